"""Ops that only the draft head needs (MODEL.md chapter 5); in `m31.ops.DRAFT`, not among those of the text model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from m31.ops.attention import _attend, _output
from m31.ops.cases import batch, pages, rng_for
from m31.ops.select import CONTEXT, CONTEXT_NAMES, CONTEXT_TYPES, sequences
from m31.ops.spec import (
    KV,
    Arg,
    Attrs,
    Case,
    OpSpec,
    StateType,
    TensorDecl,
    TensorType,
    WeightDecl,
    only_slot,
    positive,
    weight,
)


def _matrix(name: str, *shape: int) -> WeightDecl:
    return WeightDecl(name, {"weight": TensorDecl(name, shape, (None,) * len(shape))})


# ---------------------------------------------------------------------------------------------------------- concat


def _concat_types(attrs: Attrs, given: Sequence[Any]) -> tuple[TensorType, ...]:
    x, y = given
    if x.shape[0] != y.shape[0]:
        concat.refuse(f"{x.shape[0]} and {y.shape[0]} tokens", expected="the same tokens")
    return (TensorType((x.shape[0], x.shape[1] + y.shape[1]), "T,C", "model"),)


def _concat_cases() -> Iterator[Case]:
    for name, n in (("none", 0), ("one", 1), ("many", 7)):
        rng = rng_for(f"concat/{name}")
        yield Case(f"concat/{name}", {}, {"x": rng.standard_normal((n, 12)), "y": rng.standard_normal((n, 5))})


concat = OpSpec(
    name="concat",
    doc="z = [x | y] along the channels, x first: residual streams of several layers, side by side (MODEL.md §5.1).",
    inputs=(Arg("x", "T,C"), Arg("y", "T,C")),
    outputs=(Arg("z", "T,C"),),
    attrs=(),
    infer=_concat_types,
    naive=lambda attrs, x, y: (np.concatenate([x, y], axis=1),),
    cases=_concat_cases,
    refuses=(
        ("rows instead of tokens", {}, (TensorType(("T", 8), "T,C", "model"), TensorType(("R", 8), "R,C", "model"))),
    ),
    criterion="exact",
)


# ------------------------------------------------------------------------------------------------- draft_attention


def _draft_types(attrs: Attrs, given: Sequence[Any]) -> tuple[TensorType, ...]:
    q, k, v = given[:3]
    positive(draft_attention, attrs, "window")
    if k.shape[1] != attrs["kv_heads"] or k.shape[2] != q.shape[2] or v.shape[1] != k.shape[1] * k.shape[2]:
        draft_attention.refuse(
            f"keys {list(k.shape[1:])} and values of {v.shape[1]} channels for queries of {q.shape[2]}",
            expected=f"{attrs['kv_heads']} heads of {q.shape[2]}",
        )
    return _output(draft_attention, attrs, q)


def _draft_naive(
    attrs: Attrs, q: Any, k: Any, v: Any, kv: Any, positions: Any, cu_q: Any, seq_lens: Any, page_table: Any
) -> tuple[Any, ...]:
    keys, values = kv[attrs["layer"], "k"], kv[attrs["layer"], "v"]
    page, group = keys.shape[2], q.shape[1] // attrs["kv_heads"]
    block_v = v.reshape(k.shape)
    out = np.zeros((len(q), q.shape[1] * q.shape[2]))
    for s, rows in sequences(cu_q):
        context = int(seq_lens[s]) - len(rows)
        for t in rows:
            first = max(0, int(positions[t]) - attrs["window"] + 1)
            seen = [(page_table[s, n // page], n % page) for n in range(first, context)]
            for j in range(q.shape[1]):
                h = j // group
                all_k = np.stack([*(keys[p, h, o] for p, o in seen), *(k[n, h] for n in rows)])
                all_v = np.stack([*(values[p, h, o] for p, o in seen), *(block_v[n, h] for n in rows)])
                out[t, j * q.shape[2] : (j + 1) * q.shape[2]] = _attend(q[t, j], all_k, all_v, attrs["scale"])
    return (out,)


_ATTRS: Attrs = {"layer": 0, "kv_heads": 2, "scale": 8**-0.5, "window": 9}


def _draft_cases() -> Iterator[Case]:
    # Context lengths include the block. A window of 9 with pages of 4 begins inside a page.
    for name, q_lens, ctx, window in (
        ("one-row", [1], [8], 9),
        ("no-context", [3], [3], 9),
        ("all-in-window", [7], [12], 64),
        ("window", [7], [40], 9),
        ("edge-of-page", [4, 4, 4], [7, 8, 9], 9),
        ("block-longer-than-window", [7], [23], 3),
        ("company", [3, 7, 1], [30, 7, 33], 9),
        ("tokens-equal-heads", [2], [17], 9),
    ):
        case = f"draft_attention/{name}"
        rng = rng_for(case)
        b = batch(rng, q_lens, ctx, 4)
        n = sum(q_lens)
        state = {(0, kind): pages(rng, b, 4, 2, 8) for kind in ("k", "v")}
        for s, (length, count) in enumerate(zip(ctx, q_lens, strict=True)):
            for at in range(length - count, length):  # the block's own slots are never read
                for array in state.values():
                    array[b.page_table[s, at // 4], :, at % 4] = np.nan
        inputs = {
            "q": rng.standard_normal((n, 4, 8)) * 2,
            "k": rng.standard_normal((n, 2, 8)),
            "v": rng.standard_normal((n, 16)),
            **b.inputs(*CONTEXT_NAMES),
        }
        yield Case(case, {**_ATTRS, "window": window}, inputs, state)


_T = TensorType(("T", 4, 8), "T,h,D", "model"), TensorType(("T", 2, 8), "T,h,D", "model")

draft_attention = OpSpec(
    name="draft_attention",
    doc="Attention of a drafted block (MODEL.md §5.2): a row at position p sees the context in pages at positions "
    "p - window + 1 and later, and every row of its own block, later ones too. The block's k and v are given, never "
    "stored; seq_lens includes the block, so that the context of a sequence is what lies before it. Head grouping and "
    "softmax as in dense_attention. q [T,h,D], k [T,kv_heads,D], v [T,kv_heads*D] -> [T,h*D].",
    inputs=(Arg("q", "T,h,D"), Arg("k", "T,h,D"), Arg("v", "T,C"), KV, *CONTEXT),
    outputs=(Arg("o", "T,C"),),
    attrs=("layer", "kv_heads", "scale", "window"),
    infer=_draft_types,
    naive=_draft_naive,
    cases=_draft_cases,
    refuses=(
        (
            "values of another width than keys",
            _ATTRS,
            (*_T, TensorType(("T", 8), "T,C", "model"), StateType("kv"), *CONTEXT_TYPES),
        ),
        (
            "a window of zero",
            {**_ATTRS, "window": 0},
            (*_T, TensorType(("T", 16), "T,C", "model"), StateType("kv"), *CONTEXT_TYPES),
        ),
    ),
    criterion="bound",
)


# ------------------------------------------------------------------------------------------------------ Markov head


def _embedding_types(attrs: Attrs, given: Sequence[Any]) -> tuple[TensorType, ...]:
    table = only_slot(markov_embedding, given[1], (None, None))
    return (TensorType((*given[0].shape, table.shape[1]), "R,C", "model"),)


def _embedding_cases() -> Iterator[Case]:
    for name, n in (("none", 0), ("one", 1), ("many", 9)):
        rng = rng_for(f"markov_embedding/{name}")
        inputs = {"prev": rng.integers(0, 50, n), "w1": rng.standard_normal((50, 6))}
        yield Case(f"markov_embedding/{name}", {}, inputs)


markov_embedding = OpSpec(
    name="markov_embedding",
    doc="m[r] = w1[prev[r]]: what the Markov head knows of the token before (MODEL.md §5.3). prev [R], w1 [V,rank].",
    inputs=(Arg("prev", "R", "int64"), weight("w1")),
    outputs=(Arg("m", "R,C"),),
    attrs=(),
    infer=_embedding_types,
    naive=lambda attrs, prev, w1: (w1[prev],),
    cases=_embedding_cases,
    refuses=(("a table of three axes", {}, (TensorType(("R",), "R", "int64"), _matrix("w1", 2, 3, 4))),),
    criterion="exact",
)


def _bias_types(attrs: Attrs, given: Sequence[Any]) -> tuple[TensorType, ...]:
    only_slot(markov_bias, given[2], (given[0].shape[1], given[1].shape[1]))
    return (given[0],)


def _bias_cases() -> Iterator[Case]:
    for name, n, scale in (("none", 0, 1.0), ("one", 1, 1.0), ("many", 7, 1.0), ("large", 3, 1e4)):
        rng = rng_for(f"markov_bias/{name}")
        inputs = {
            "base": rng.standard_normal((n, 40)) * 5,
            "m": rng.standard_normal((n, 6)) * scale,
            "w2": rng.standard_normal((40, 6)),
        }
        yield Case(f"markov_bias/{name}", {}, inputs)


_BASE = TensorType(("R", 40), "R,V", "accum")

markov_bias = OpSpec(
    name="markov_bias",
    doc="logits[r] = base[r] + w2 m[r], in the accumulation dtype (MODEL.md §5.3). base [R,V], m [R,rank], "
    "w2 [V,rank].",
    inputs=(Arg("base", "R,V", "accum"), Arg("m", "R,C"), weight("w2")),
    outputs=(Arg("logits", "R,V", "accum"),),
    attrs=(),
    infer=_bias_types,
    naive=lambda attrs, base, m, w2: (base + m @ w2.T,),
    cases=_bias_cases,
    refuses=(
        ("a bias for another vocabulary", {}, (_BASE, TensorType(("R", 6), "R,C", "model"), _matrix("w2", 41, 6))),
        ("another rank", {}, (_BASE, TensorType(("R", 5), "R,C", "model"), _matrix("w2", 40, 6))),
    ),
    criterion="bound",
)


# ------------------------------------------------------------------------------------------------------- confidence


def _confidence_types(attrs: Attrs, given: Sequence[Any]) -> tuple[TensorType, ...]:
    u, m, decl = given
    if not isinstance(attrs["with_markov"], bool):
        confidence.refuse(f"attribute with_markov is {attrs['with_markov']!r}", expected="True or False")
    width = u.shape[1] + (m.shape[1] if attrs["with_markov"] else 0)
    shapes = {slot: tensor.shape for slot, tensor in decl.slots.items()}
    if shapes != {"weight": (1, width), "bias": (1,)}:
        confidence.refuse(f"weight '{decl.name}' is {shapes}", expected=f"weight [1, {width}] and bias [1]")
    return (TensorType((u.shape[0],), "R", "accum"),)


def _confidence_naive(attrs: Attrs, u: Any, m: Any, w: Any) -> tuple[Any, ...]:
    x = np.concatenate([u, m], axis=1) if attrs["with_markov"] else u
    return (1 / (1 + np.exp(-(x @ w["weight"][0] + w["bias"][0]))),)


def _confidence_cases() -> Iterator[Case]:
    for name, n, with_markov in (("none", 0, True), ("one", 1, True), ("many", 7, True), ("without-markov", 5, False)):
        rng = rng_for(f"confidence/{name}")
        inputs = {
            "u": rng.standard_normal((n, 12)),
            "m": rng.standard_normal((n, 6)),
            "w": {"weight": rng.standard_normal((1, 18 if with_markov else 12)), "bias": rng.standard_normal(1)},
        }
        yield Case(f"confidence/{name}", {"with_markov": with_markov}, inputs)


confidence = OpSpec(
    name="confidence",
    doc="c[r] = sigmoid(weight [u[r] | m[r]] + bias), without m unless with_markov: how sure the draft head is that "
    "the token it drafts from this row will be kept (MODEL.md §5.3). u [R,C], m [R,rank] -> [R].",
    inputs=(Arg("u", "R,C"), Arg("m", "R,C"), weight("w")),
    outputs=(Arg("c", "R", "accum"),),
    attrs=("with_markov",),
    infer=_confidence_types,
    naive=_confidence_naive,
    cases=_confidence_cases,
    refuses=(
        (
            "a weight that leaves out the Markov embedding",
            {"with_markov": True},
            (
                TensorType(("R", 12), "R,C", "model"),
                TensorType(("R", 6), "R,C", "model"),
                WeightDecl(
                    "w", {"weight": TensorDecl("w", (1, 12), (None, None)), "bias": TensorDecl("b", (1,), (None,))}
                ),
            ),
        ),
    ),
    criterion="bound",
)
