"""Paged attention: block-sparse with one block list per KV head, and dense causal (MODEL.md §2.4)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from m31.ops.cases import Batch, batch, pages, rng_for
from m31.ops.select import _SHAPES, CONTEXT, CONTEXT_NAMES, CONTEXT_TYPES, sequences
from m31.ops.spec import KV, Arg, Attrs, Case, OpSpec, StateType, TensorType, positive


def _output(spec: OpSpec, attrs: Attrs, q: TensorType) -> tuple[TensorType, ...]:
    positive(spec, attrs, "scale", "kv_heads")
    _, heads, dim = q.shape
    if not isinstance(heads, int) or not isinstance(dim, int) or heads % attrs["kv_heads"]:
        spec.refuse(f"{heads} query heads over {attrs['kv_heads']} KV heads", expected="a multiple")
    return (TensorType((q.shape[0], heads * dim), "T,C", "model"),)


def _attend(q: Any, k: Any, v: Any, scale: float) -> Any:
    """softmax(q k^T * scale) v for one query [D] and its visible keys [n,D]."""
    logits = k @ q * scale
    p = np.exp(logits - logits.max())
    return p @ v / p.sum()


def _naive(attrs: Attrs, q: Any, kv: Any, context: Sequence[Any], blocks: Any | None) -> tuple[Any, ...]:
    positions, cu_q, _, page_table = context
    keys, values = kv[attrs["layer"], "k"], kv[attrs["layer"], "v"]
    page, group = keys.shape[2], q.shape[1] // attrs["kv_heads"]
    out = np.zeros((len(q), q.shape[1] * q.shape[2]))
    for s, rows in sequences(cu_q):
        for t in rows:
            for j in range(q.shape[1]):
                h = j // group
                chosen = None if blocks is None else set(blocks[t, h].tolist())
                visible = [
                    (page_table[s, n // page], n % page)
                    for n in range(int(positions[t]) + 1)
                    if chosen is None or n // page in chosen
                ]
                k = np.stack([keys[p, h, o] for p, o in visible])
                v = np.stack([values[p, h, o] for p, o in visible])
                out[t, j * q.shape[2] : (j + 1) * q.shape[2]] = _attend(q[t, j], k, v, attrs["scale"])
    return (out,)


def _sparse_types(attrs: Attrs, given: Sequence[Any]) -> tuple[TensorType, ...]:
    if given[2].shape[1] != attrs["kv_heads"]:
        sparse_attention.refuse(
            f"block lists for {given[2].shape[1]} heads", expected=f"{attrs['kv_heads']}, one per KV head"
        )
    return _output(sparse_attention, attrs, given[0])


def _state(rng: np.random.Generator, b: Batch) -> dict[tuple[int, str], Any]:
    return {(0, "k"): pages(rng, b, 4, 2, 8), (0, "v"): pages(rng, b, 4, 2, 8)}


def _random_blocks(rng: np.random.Generator, positions: Any, topk: int) -> Any:
    out = np.full((len(positions), 2, topk), -1, np.int64)
    for t, p in enumerate(positions):
        own = int(p) // 4
        for h in range(2):
            others = rng.permutation(own)[: topk - 1]
            chosen = np.sort(np.append(others, own))
            out[t, h, : len(chosen)] = chosen
    return out


_ATTRS: Attrs = {"layer": 0, "kv_heads": 2, "scale": 8**-0.5}


# Steps whose blocks are a true choice: top-4 of 15 and more for many queries at once, with block lists that differ
# from query to query. A context of 59 leaves the last token of its last page, which is selected, unwritten (NaN).
_CHOICES = (
    ("choice", [20], [60]),
    ("choice-before-unwritten", [20], [59]),
    ("choice-in-company", [1, 20, 9], [33, 59, 41]),
    ("choice-at-128", [20], [139]),
)


def _sparse_cases() -> Iterator[Case]:
    for name, q_lens, ctx in (*_SHAPES, *_CHOICES):
        case = f"sparse_attention/{name}"
        rng = rng_for(case)
        b = batch(rng, q_lens, ctx, 4)
        inputs = {
            "q": rng.standard_normal((sum(q_lens), 4, 8)) * 2,
            "blocks": _random_blocks(rng, b.positions, 4),
            **b.inputs(*CONTEXT_NAMES),
        }
        yield Case(case, _ATTRS, inputs, _state(rng, b))


sparse_attention = OpSpec(
    name="sparse_attention",
    doc="o = sum over the visible tokens of the selected blocks of softmax(q.k * scale) v, softmax in the "
    "accumulation "
    "dtype; query head j reads KV head j // (heads / kv_heads) and that head's block list (MODEL.md §2.4, "
    "BUG-29). Tokens "
    "after the query stay masked in every block; ids of -1 are no block (BUG-6). q [T,h,D], blocks [T,kv_heads,K] -> "
    "heads concatenated [T,h*D].",
    inputs=(Arg("q", "T,h,D"), KV, Arg("blocks", "T,h,K", "int64"), *CONTEXT),
    outputs=(Arg("o", "T,C"),),
    attrs=("layer", "kv_heads", "scale"),
    infer=_sparse_types,
    naive=lambda attrs, q, kv, blocks, *context: _naive(attrs, q, kv, context, blocks),
    cases=_sparse_cases,
    refuses=(
        (
            "one block list for two KV heads",
            _ATTRS,
            (
                TensorType(("T", 4, 8), "T,h,D", "model"),
                StateType("kv"),
                TensorType(("T", 1, 4), "T,h,K", "int64"),
                *CONTEXT_TYPES,
            ),
        ),
    ),
    criterion="bound",
)


def _dense_types(attrs: Attrs, given: Sequence[Any]) -> tuple[TensorType, ...]:
    return _output(dense_attention, attrs, given[0])


def _dense_cases() -> Iterator[Case]:
    for name, q_lens, ctx in _SHAPES:
        case = f"dense_attention/{name}"
        rng = rng_for(case)
        b = batch(rng, q_lens, ctx, 4)
        inputs = {"q": rng.standard_normal((sum(q_lens), 4, 8)) * 2, **b.inputs(*CONTEXT_NAMES)}
        yield Case(case, _ATTRS, inputs, _state(rng, b))


dense_attention = OpSpec(
    name="dense_attention",
    doc="Full causal attention over all tokens up to the query's position (M3 layers 0-2, MODEL.md §2.4). q "
    "[T,h,D] -> [T,h*D].",
    inputs=(Arg("q", "T,h,D"), KV, *CONTEXT),
    outputs=(Arg("o", "T,C"),),
    attrs=("layer", "kv_heads", "scale"),
    infer=_dense_types,
    naive=lambda attrs, q, kv, *context: _naive(attrs, q, kv, context, None),
    cases=_dense_cases,
    refuses=(
        (
            "query heads that do not divide",
            _ATTRS,
            (TensorType(("T", 3, 8), "T,h,D", "model"), StateType("kv"), *CONTEXT_TYPES),
        ),
    ),
    criterion="bound",
)
