"""Cases of products: projections, the head, the router, experts, and adapters of the head and of experts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import numpy as np

from m31.conformance.cases.planned import Planned
from m31.ops import Case
from m31.ops.cases import rng_for
from m31.ops.moe import expert_slots

ACTIVATION = {"alpha": 1.702, "beta": 1.0, "limit": 7.0}
_SUBNORMAL = 2.0**-130  # BF16 and float32 hold it


def special(x: Any, kind: str) -> Any:
    """Activations [T,C] with something in them that kernels get wrong, among ordinary values."""
    x = x.copy()
    if kind == "outlier-channel":
        x[:, x.shape[1] // 3] *= 1e4
    elif kind == "zero-blocks":
        x[:, : x.shape[1] // 2] = 0
    elif kind == "negative-zero":
        x[0] = -0.0
        x[:, ::5] = -0.0
    elif kind == "subnormals":
        x[:, 1::2] = np.sign(x[:, 1::2]) * _SUBNORMAL
    elif kind == "large":
        x *= 1e4
    return x


SPECIAL = ("outlier-channel", "zero-blocks", "negative-zero", "subnormals")


def _linear(op: str, name: str, rows: int, k: int, out: int, values: str) -> Case:
    case = f"{op}/{name}"
    rng = rng_for(case)
    x = rng.standard_normal((rows, k))
    return Case(case, {}, {"x": special(x, values), "w": rng.standard_normal((out, k)) * 0.2})


def _plan_linear(op: str, name: str, rows: int, k: int, out: int, values: str = "ordinary") -> Planned:
    sizes = {"tokens" if op == "linear" else "rows": rows, "width": k}
    return Planned(
        f"{op}/{name}",
        partial(_linear, op, name, rows, k, out, values),
        {**sizes, "values": values},
        (k,),
        real=name.startswith(("hidden", "tokens-17", "wide")),
    )


def _linears() -> Iterator[Planned]:
    for tokens in (1, 16, 17):  # around a tile
        yield _plan_linear("linear", f"tokens-{tokens}", tokens, 64, 48)
    for tokens in (127, 128, 129, 2047, 2048, 2049):
        yield _plan_linear("linear", f"tokens-{tokens}", tokens, 32, 9)
    for k in (48, 80, 96, 160, 16384):  # not a multiple of a tile, and as long as sums become
        yield _plan_linear("linear", f"k-{k}", 3, k, 5)
    yield _plan_linear("linear", "hidden-128", 4, 128, 256)  # tokens and rows of the matrix are multiples of a tile
    yield _plan_linear("linear", "hidden-6144", 2, 6144, 24)
    yield _plan_linear("linear", "square", 128, 128, 128)  # T equals K equals N
    for values in SPECIAL:
        yield _plan_linear("linear", f"wide-{values}", 5, 128, 32, values)


def _heads() -> Iterator[Planned]:
    for rows in (127, 128, 129):
        yield _plan_linear("lm_head", f"rows-{rows}", rows, 32, 17)
    yield _plan_linear("lm_head", "hidden-6144", 2, 6144, 300)
    yield _plan_linear("lm_head", "square", 128, 128, 128)
    for values in SPECIAL:
        yield _plan_linear("lm_head", f"wide-{values}", 3, 128, 65, values)


# ------------------------------------------------------------------------------------------------------------- router


def _router(name: str, tokens: int, experts: int, topk: int, width: int, kind: str) -> Case:
    case = f"router/{name}"
    rng = rng_for(case)
    weight, bias = rng.standard_normal((experts, width)) * width**-0.5, rng.standard_normal(experts) * 0.2
    h = rng.standard_normal((tokens, width))
    if kind == "equal-scores":  # the lower id wins, whatever the bias of the others
        weight[:], bias[:] = 0, 0
        bias[experts // 2] = -1
    elif kind == "twin-experts":  # two and two have the same score and the same bias
        weight[1::2], bias[1::2] = weight[::2], bias[::2]
    elif kind == "bias-decides":
        bias[:] = np.linspace(40, -40, experts)
    else:
        h = special(h, kind)
    return Case(case, {"topk": topk}, {"h": h, "w": {"weight": weight, "bias": bias}})


def _routers() -> Iterator[Planned]:
    for name, tokens, experts, topk, width, kind in (
        ("tokens-127", 127, 8, 2, 32, "ordinary"),
        ("tokens-128", 128, 8, 2, 32, "ordinary"),
        ("tokens-129", 129, 8, 2, 32, "ordinary"),
        ("experts-128", 17, 128, 4, 128, "ordinary"),
        ("hidden-6144", 2, 128, 4, 6144, "ordinary"),
        ("tokens-equal-experts", 16, 16, 4, 128, "ordinary"),
        ("equal-scores", 3, 128, 4, 128, "equal-scores"),
        ("twin-experts", 5, 128, 4, 128, "twin-experts"),
        ("bias-decides", 5, 128, 4, 128, "bias-decides"),
        *((f"wide-{kind}", 5, 32, 4, 128, kind) for kind in SPECIAL),
    ):
        yield Planned(
            f"router/{name}",
            partial(_router, name, tokens, experts, topk, width, kind),
            {"tokens": tokens, "width": width, "topk": topk, "values": kind},
            (width,),
            real=width % 128 == 0,
        )


# ------------------------------------------------------------------------------------------------------------ experts


def _ids(rng: np.random.Generator, tokens: int, experts: int, topk: int, spread: str) -> Any:
    if spread == "all-one":
        return np.tile(np.arange(topk) + 1, (tokens, 1))
    if spread == "one-each":
        return np.arange(tokens * topk).reshape(tokens, topk) % experts
    if spread == "idle":  # the first and the last expert are chosen by nobody
        experts, first = experts - 2, 1
    else:
        first = 0
    found = [rng.permutation(experts)[:topk] + first for _ in range(tokens)]
    return np.asarray(found, np.int64).reshape(tokens, topk)


def _expert_inputs(case: str, p: dict[str, Any]) -> dict[str, Any]:
    rng = rng_for(case)
    tokens, width, inner, topk, count = (p[n] for n in ("tokens", "width", "inner", "topk", "experts"))
    w = {
        slot: rng.standard_normal((width, inner) if slot.startswith("w2") else (inner, width)) * p["scale"]
        for slot in expert_slots(count)
    }
    ids = _ids(rng, tokens, count, topk, p["spread"])
    h, weights = rng.standard_normal((tokens, width)), rng.uniform(0.1, 1, (tokens, topk))
    return {"h": special(h, p["values"]), "ids": ids, "weights": weights, "w": w}


def _experts(name: str, p: dict[str, Any]) -> Case:
    attrs = {**p["act"], "routed_scaling_factor": p["factor"], "experts": p["experts"]}
    return Case(f"experts/{name}", attrs, _expert_inputs(f"experts/{name}", p))


_BASE = {
    "width": 64,
    "inner": 32,
    "topk": 2,
    "experts": 5,
    "scale": 0.3,
    "spread": "random",
    "values": "ordinary",
    "act": ACTIVATION,
    "factor": 2.0,
}
_REAL = {"width": 128, "inner": 128, "topk": 4, "experts": 8, "scale": 0.15}
_ODD = {"alpha": 1.25, "beta": 0.5, "limit": 1.5}


def _expert_shapes() -> Iterable[tuple[str, dict[str, Any]]]:
    for tokens in (1, 16, 17):
        yield f"tokens-{tokens}", {"tokens": tokens}
    for tokens in (127, 128, 129):
        yield f"tokens-{tokens}", {"tokens": tokens, "width": 32, "topk": 1}
    yield "k-not-a-tile", {"tokens": 3, "width": 96, "inner": 160}
    yield "k-of-groups", {"tokens": 3, "width": 48, "inner": 80}
    yield "real", {"tokens": 5, **_REAL}
    yield "experts-128", {"tokens": 3, "topk": 4, "experts": 128}
    yield "real-hit-by-all", {"tokens": 9, **_REAL, "spread": "all-one"}
    yield "real-hit-by-one", {"tokens": 2, **_REAL, "spread": "one-each"}
    yield "real-hit-by-none", {"tokens": 4, **_REAL, "spread": "idle"}
    yield "real-other-parameters", {"tokens": 4, **_REAL, "act": _ODD, "factor": 0.75, "scale": 0.5}
    yield "real-clamped", {"tokens": 4, **_REAL, "scale": 1.5}
    for values in SPECIAL:
        yield f"real-{values}", {"tokens": 4, **_REAL, "values": values}


def _expert_plans() -> Iterator[Planned]:
    for name, changes in _expert_shapes():
        p = {**_BASE, **changes}
        attrs = {**p["act"], "routed_scaling_factor": p["factor"], "experts": p["experts"]}
        yield Planned(
            f"experts/{name}",
            partial(_experts, name, p),
            {"tokens": p["tokens"], "width": p["width"], "values": p["values"], "hit": p["spread"], **attrs},
            tuple(dict.fromkeys((p["width"], p["inner"]))),
            real=name.startswith("real"),
            seconds=0.2 if p["experts"] == 128 else 0.03,
        )


def _shared(name: str, p: dict[str, Any]) -> Case:
    case = f"experts_shared/{name}"
    inputs = _expert_inputs(case, p)
    rng = rng_for(f"{case}/shared")
    width, shared = p["width"], p["width"]
    inputs["routed"] = inputs.pop("w")
    inputs |= {arg: rng.standard_normal((shared, width)) * p["scale"] for arg in ("gate", "up", "down")}
    return Case(case, {**p["act"], "routed_scaling_factor": p["factor"], "experts": p["experts"]}, inputs)


def _shared_plans() -> Iterator[Planned]:
    for name, changes in (
        ("real", {"tokens": 5}),
        ("real-129", {"tokens": 129, "inner": 32, "topk": 1}),
        ("real-outlier-channel", {"tokens": 3, "values": "outlier-channel"}),
        ("real-clamped", {"tokens": 3, "scale": 1.5}),
    ):
        p: dict[str, Any] = {**_BASE, **_REAL, **changes}
        attrs = {**p["act"], "routed_scaling_factor": p["factor"], "experts": p["experts"]}
        yield Planned(
            f"experts_shared/{name}",
            partial(_shared, name, p),
            {"tokens": p["tokens"], "width": p["width"], "values": p["values"], **attrs},
            tuple(dict.fromkeys((p["width"], p["inner"]))),
            real=True,
        )


# ----------------------------------------------------------------------------------------------------------- adapters


def _lora_logits(name: str, rows: int, rank: int, vocabulary: int, values: str) -> Case:
    case = f"lora_logits/{name}"
    rng = rng_for(case)
    inputs = {"logits": rng.standard_normal((rows, vocabulary)) * 3, "a": rng.standard_normal((rows, rank))}
    inputs["a"] = special(inputs["a"], values)
    return Case(case, {}, {**inputs, "w": rng.standard_normal((vocabulary, rank))})


def _lora_logits_plans() -> Iterator[Planned]:
    for name, rows, rank, vocabulary, values in (
        *((f"rows-{rows}", rows, 8, 17, "ordinary") for rows in (127, 128, 129)),
        ("real-rank-16", 3, 16, 1024, "ordinary"),
        ("real-square", 64, 64, 64, "ordinary"),  # R equals K equals V
        *((f"real-{values}", 3, 32, 128, values) for values in SPECIAL),
    ):
        yield Planned(
            f"lora_logits/{name}",
            partial(_lora_logits, name, rows, rank, vocabulary, values),
            {"rows": rows, "width": vocabulary, "values": values},
            (rank,),
            real=name.startswith("real"),
        )


def _lora_experts(name: str, p: dict[str, Any]) -> Case:
    case = f"lora_experts/{name}"
    inputs, rng = _expert_inputs(case, p), rng_for(f"{case}/adapters")
    for slot in [slot for slot in inputs["w"] if slot.startswith(p["adapted"])]:
        rows, width = inputs["w"][slot].shape
        inputs["w"][f"lora_A.{slot}"] = rng.standard_normal((p["rank"], width)) * p["scale"]
        inputs["w"][f"lora_B.{slot}"] = rng.standard_normal((rows, p["rank"])) * p["scale"]
    return Case(case, {**p["act"], "routed_scaling_factor": p["factor"], "experts": p["experts"]}, inputs)


def _lora_expert_plans() -> Iterator[Planned]:
    shapes: tuple[tuple[str, dict[str, Any]], ...] = (
        *((f"tokens-{tokens}", {"tokens": tokens}) for tokens in (1, 17)),
        *((f"tokens-{tokens}", {"tokens": tokens, "width": 32, "topk": 1}) for tokens in (127, 128, 129)),
        ("real", {"tokens": 5, **_REAL, "rank": 16}),
        ("real-hit-by-all", {"tokens": 9, **_REAL, "spread": "all-one"}),
        ("real-hit-by-none", {"tokens": 4, **_REAL, "spread": "idle"}),
        ("real-of-one-expert", {"tokens": 6, **_REAL, "adapted": ("w1.3", "w2.3", "w3.3")}),
        ("real-down-only", {"tokens": 4, **_REAL, "adapted": ("w2",)}),
        ("real-other-parameters", {"tokens": 4, **_REAL, "act": _ODD, "factor": 0.75, "scale": 0.5}),
        *((f"real-{values}", {"tokens": 4, **_REAL, "values": values}) for values in SPECIAL),
    )
    for name, changes in shapes:
        p = {**_BASE, "rank": 8, "adapted": ("w1", "w2", "w3"), **changes}
        attrs = {**p["act"], "routed_scaling_factor": p["factor"], "experts": p["experts"]}
        yield Planned(
            f"lora_experts/{name}",
            partial(_lora_experts, name, p),
            {"tokens": p["tokens"], "width": p["width"], "values": p["values"], "hit": p["spread"], **attrs},
            tuple(dict.fromkeys((p["width"], p["inner"]))),
            real=name.startswith("real"),
            seconds=0.03,
        )


MATRICES: dict[str, list[Planned]] = {
    "linear": list(_linears()),
    "lm_head": list(_heads()),
    "router": list(_routers()),
    "experts": list(_expert_plans()),
    "experts_shared": list(_shared_plans()),
    "lora_logits": list(_lora_logits_plans()),
    "lora_experts": list(_lora_expert_plans()),
}
