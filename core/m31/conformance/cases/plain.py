"""Cases of what is computed element by element, row by row, or only moved."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from m31.conformance.cases.matrices import ACTIVATION, SPECIAL, special
from m31.conformance.cases.planned import Planned
from m31.ops import Case
from m31.ops.cases import rng_for
from m31.ops.rope import inverse_frequencies

_EDGES = (127, 128, 129, 2047, 2048, 2049)
_LAST = 1_048_575


# ----------------------------------------------------------------------------------------------- addition, activation


def _pair(op: str, a: str, b: str, attrs: dict[str, Any], name: str, tokens: int, width: int, kind: str) -> Case:
    case = f"{op}/{name}"
    rng = rng_for(case)
    x, y = rng.standard_normal((2, tokens, width))
    if kind == "cancelling":
        y = -x
        y[:, 0] += 1
    elif kind == "huge":
        x, y = x * 1e30, y * 1e30
    elif kind == "at-the-limits":
        x[:, ::3], y[:, 1::3] = attrs["limit"], -attrs["limit"]
    elif kind == "far-beyond":  # the sigmoid of the one is 0, the clamps hold the other
        x, y = np.sign(x) * 1e4, y * 1e4
    else:
        x = special(x, kind)
    return Case(case, attrs, {a: x, b: y})


def _pairs(op: str, a: str, b: str, attrs: dict[str, Any], kinds: tuple[str, ...]) -> Iterator[Planned]:
    for name, tokens, width, kind in (
        *((f"tokens-{n}", n, 8, "ordinary") for n in _EDGES),
        ("square", 128, 128, "ordinary"),
        ("hidden-6144", 2, 6144, "ordinary"),
        *((f"wide-{kind}", 3, 128, kind) for kind in (*SPECIAL, *kinds)),
    ):
        sizes = {"tokens": tokens, "width": width, "values": kind, **attrs}
        yield Planned(f"{op}/{name}", partial(_pair, op, a, b, attrs, name, tokens, width, kind), sizes)


# --------------------------------------------------------------------------------------------------------------- norms


def _norm(name: str, tokens: int, width: int, kind: str) -> Case:
    case = f"gemma_rmsnorm/{name}"
    rng = rng_for(case)
    w = rng.standard_normal(width) * 0.3
    w[1] = -1  # a channel that the norm removes
    return Case(case, {"eps": 1e-6}, {"x": special(rng.standard_normal((tokens, width)), kind), "w": w})


def _norms() -> Iterator[Planned]:
    for name, tokens, width, kind in (
        *((f"tokens-{n}", n, 16, "ordinary") for n in _EDGES),
        ("k-80", 3, 80, "ordinary"),
        ("square", 128, 128, "ordinary"),
        ("hidden-6144", 2, 6144, "ordinary"),
        *((f"wide-{kind}", 3, 128, kind) for kind in (*SPECIAL, "large")),
    ):
        sizes = {"tokens": tokens, "width": width, "values": kind}
        yield Planned(f"gemma_rmsnorm/{name}", partial(_norm, name, tokens, width, kind), sizes, ())


def _head_norm(name: str, tokens: int, heads: int, dim: int, kind: str) -> Case:
    case = f"head_rmsnorm/{name}"
    rng = rng_for(case)
    x = special(rng.standard_normal((tokens, heads * dim)), kind)
    return Case(case, {"eps": 1e-6, "heads": heads}, {"x": x, "w": rng.standard_normal(dim) * 0.3})


def _head_norms() -> Iterator[Planned]:
    for name, tokens, heads, dim, kind in (
        *((f"tokens-{n}", n, 2, 16, "ordinary") for n in _EDGES),
        ("real", 3, 64, 128, "ordinary"),
        ("real-one-head", 5, 1, 128, "ordinary"),
        ("real-tokens-equal-heads", 4, 4, 128, "ordinary"),
        *((f"real-{kind}", 3, 4, 128, kind) for kind in SPECIAL),
    ):
        sizes = {"tokens": tokens, "width": heads * dim, "heads": heads, "values": kind}
        yield Planned(f"head_rmsnorm/{name}", partial(_head_norm, name, tokens, heads, dim, kind), sizes, ())


def _add_norm(name: str, tokens: int, width: int, rounded: bool) -> Case:
    case = f"add_norm/{name}"
    rng = rng_for(case)
    x, y = rng.standard_normal((2, tokens, width))
    return Case(case, {"eps": 1e-6, "rounded": rounded}, {"x": x, "y": y, "w": rng.standard_normal(width) * 0.3})


def _add_norms() -> Iterator[Planned]:
    for name, tokens, width, rounded in (
        ("tokens-129", 129, 128, True),
        ("hidden-6144", 2, 6144, True),
        ("hidden-6144-unrounded", 2, 6144, False),
    ):
        sizes = {"tokens": tokens, "width": width, "rounded": rounded}
        yield Planned(f"add_norm/{name}", partial(_add_norm, name, tokens, width, rounded), sizes, (), real=True)


# ---------------------------------------------------------------------------------------------------------------- rope


def _rope(name: str, positions: list[int], heads: int, dim: int, rotary: int) -> Case:
    case = f"rope/{name}"
    rng = rng_for(case)
    angle = np.asarray(positions, np.float32)[:, None] * inverse_frequencies(5e6, rotary)
    x = rng.standard_normal((len(positions), heads, dim))
    return Case(case, {}, {"x": x, "cos": np.cos(np.float64(angle)), "sin": np.sin(np.float64(angle))})


def _ropes() -> Iterator[Planned]:
    for name, positions, heads, dim, rotary in (
        *((f"tokens-{n}", list(range(n)), 1, 16, 8) for n in _EDGES),
        ("real", [0, 1, 127, 128, 2047], 16, 128, 64),
        ("real-last-positions", list(range(_LAST - 4, _LAST + 1)), 4, 128, 64),
        ("real-tokens-equal-heads", [5, 6, 7, 8], 4, 128, 64),
        ("real-full", [3, 4, 5], 2, 128, 128),
    ):
        sizes = {"tokens": len(positions), "heads": heads, "head_dim": dim, "rotary_dim": rotary}
        yield Planned(f"rope/{name}", partial(_rope, name, positions, heads, dim, rotary), sizes)


def _table(name: str, positions: list[int], theta: float, rotary: int) -> Case:
    return Case(f"rope_table/{name}", {"theta": theta, "rotary_dim": rotary}, {"positions": np.asarray(positions)})


def _tables() -> Iterator[Planned]:
    for name, positions, theta, rotary in (
        *((f"tokens-{n}", list(range(n)), 5e6, 16) for n in _EDGES),
        ("last-positions", list(range(_LAST - 128, _LAST + 1)), 5e6, 64),
        ("last-positions-1e7", list(range(_LAST - 3, _LAST + 1)), 1e7, 64),
        ("full-width", [0, 7, 262_143, 262_144, _LAST], 5e6, 128),
        ("repeated", [5, 5, 0, 5], 1e4, 32),
    ):
        sizes = {"tokens": len(positions), "theta": theta, "rotary_dim": rotary}
        yield Planned(f"rope_table/{name}", partial(_table, name, positions, theta, rotary), sizes)


# --------------------------------------------------------------------------------------------------- what is only moved


def _rounded(op: str, name: str, shape: tuple[int, ...], kind: str) -> Case:
    x = rng_for(f"{op}/{name}").standard_normal(shape).astype(np.float32).astype(np.float64)
    if kind == "not-finite":  # the definition passes them on
        x.reshape(-1)[:3] = np.inf, -np.inf, np.nan
    elif kind == "negative-zero":
        x[0] = -0.0
    return Case(f"{op}/{name}", {}, {"x": x})


def _roundings(op: str, inner: tuple[int, ...], wide: tuple[int, ...]) -> Iterator[Planned]:
    for name, tokens, shape, kind in (
        *((f"tokens-{n}", n, inner, "ordinary") for n in _EDGES),
        ("wide", 3, wide, "ordinary"),
        ("wide-not-finite", 3, wide, "not-finite"),
        ("wide-negative-zero", 3, wide, "negative-zero"),
    ):
        build = partial(_rounded, op, name, (tokens, *shape), kind)
        yield Planned(f"{op}/{name}", build, {"tokens": tokens, "values": kind})


def _embedding(op: str, index: str, table: str, name: str, picked: Any, rows: int, width: int) -> Case:
    values = rng_for(f"{op}/{name}").standard_normal((rows, width))
    picked = rng_for(f"{op}/{name}/picked").integers(0, rows, picked) if isinstance(picked, int) else picked
    return Case(f"{op}/{name}", {}, {index: np.asarray(picked, np.int64), table: values})


def _embeddings(op: str, index: str, table: str) -> Iterator[Planned]:
    axis = "tokens" if op == "embedding" else "rows"
    shapes: list[tuple[str, int | list[int], int, int]] = [(f"{axis}-{n}", n, 40, 8) for n in _EDGES]
    shapes += [("first-and-last", [0, 299, 299, 0], 300, 128), ("hidden-6144", 3, 20, 6144)]
    for name, picked, rows, width in shapes:
        sizes = {axis: picked if isinstance(picked, int) else len(picked)}
        build = partial(_embedding, op, index, table, name, picked, rows, width)
        yield Planned(f"{op}/{name}", build, sizes, (width,))


def _gather(name: str, tokens: int, rows: Any, width: int) -> Case:
    x = rng_for(f"gather_rows/{name}").standard_normal((tokens, width))
    return Case(f"gather_rows/{name}", {}, {"x": x, "rows": np.asarray(rows, np.int64)})


def _gathers() -> Iterator[Planned]:
    for name, tokens, rows, width in (
        ("last-of-2049", 2049, [2048], 8),
        *((f"rows-{n}", n, list(range(n)), 8) for n in (127, 128, 129)),
        ("backwards", 17, list(range(16, -1, -1)), 128),
        ("twice-the-same", 9, [4, 4, 0], 6144),
    ):
        sizes = {"tokens": tokens, "width": width, "rows": len(rows)}
        yield Planned(f"gather_rows/{name}", partial(_gather, name, tokens, rows, width), sizes)


def _part(op: str, name: str, rows: int, width: int) -> Case:
    return Case(f"{op}/{name}", {"world": 1}, {"x": rng_for(f"{op}/{name}").standard_normal((rows, width))})


def _parts(op: str) -> Iterator[Planned]:
    axis = "tokens" if op == "all_reduce" else "rows"
    for n in (127, 128, 129):
        name = f"{axis}-{n}"
        yield Planned(f"{op}/{name}", partial(_part, op, name, n, 16), {axis: n, "width": 16, "world": 1})


PLAIN: dict[str, list[Planned]] = {
    "add": list(_pairs("add", "x", "y", {}, ("cancelling", "huge"))),
    "swiglu_oai": list(_pairs("swiglu_oai", "gate", "up", ACTIVATION, ("at-the-limits", "far-beyond"))),
    "gemma_rmsnorm": list(_norms()),
    "head_rmsnorm": list(_head_norms()),
    "add_norm": list(_add_norms()),
    "rope": list(_ropes()),
    "rope_table": list(_tables()),
    "round_channels": list(_roundings("round_channels", (4,), (128,))),
    "round_heads": list(_roundings("round_heads", (2, 4), (4, 128))),
    "embedding": list(_embeddings("embedding", "tokens", "table")),
    "markov_embedding": list(_embeddings("markov_embedding", "prev", "w1")),
    "gather_rows": list(_gathers()),
    "all_reduce": list(_parts("all_reduce")),
    "all_gather": list(_parts("all_gather")),
}
