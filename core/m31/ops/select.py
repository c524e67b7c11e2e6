"""MSA index branch: block scores and block selection (MODEL.md §2.4)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from m31.ops.cases import Batch, batch, pages, rng_for
from m31.ops.spec import KV, Arg, Attrs, Case, OpSpec, StateType, TensorType, positive

POSITIONS = Arg("positions", "T", "int64")
CU_Q = Arg("cu_q", "S", "int64")
SEQ_LENS = Arg("seq_lens", "S", "int64")
PAGE_TABLE = Arg("page_table", "S,P", "int64")
CONTEXT = (POSITIONS, CU_Q, SEQ_LENS, PAGE_TABLE)
CONTEXT_NAMES = tuple(a.name for a in CONTEXT)
CONTEXT_TYPES = (
    TensorType(("T",), "T", "int64"),
    TensorType(("S+1",), "S", "int64"),
    TensorType(("S",), "S", "int64"),
    TensorType(("S", "P"), "S,P", "int64"),
)


def sequences(cu_q: Any) -> Iterator[tuple[int, range]]:
    """(sequence, its query rows) for every sequence that has queries in this step."""
    for s in range(len(cu_q) - 1):
        rows = range(int(cu_q[s]), int(cu_q[s + 1]))
        if rows:
            yield s, rows


def _score_types(attrs: Attrs, given: Sequence[Any]) -> tuple[TensorType, ...]:
    q = given[0]
    return (TensorType((q.shape[0], q.shape[1], given[5].shape[1]), "T,h,P", "accum"),)


def _score_naive(
    attrs: Attrs, q: Any, kv: Any, positions: Any, cu_q: Any, seq_lens: Any, page_table: Any
) -> tuple[Any, ...]:
    keys = kv[attrs["layer"], "index"]
    block = keys.shape[1]
    out = np.full((len(q), q.shape[1], page_table.shape[1]), -np.inf)
    for s, rows in sequences(cu_q):
        for t in rows:
            for b in range(int(positions[t]) // block + 1):
                for i in range(q.shape[1]):
                    for offset in range(min(block, int(positions[t]) - b * block + 1)):
                        score = float(np.dot(q[t, i], keys[page_table[s, b], offset]))
                        if not np.isnan(score):  # NaN counts as -inf
                            out[t, i, b] = max(out[t, i, b], score)
    return (out,)


# (name, query lengths, context lengths); block 4 in the cases
_SHAPES = (
    ("one-token", [1], [1]),
    ("edge-of-block", [1, 1, 1], [3, 4, 5]),
    ("prefill", [9], [9]),
    ("chunk-of-long", [5], [38]),
    ("mixed", [4, 1, 7], [4, 33, 20]),
    ("tokens-equal-heads", [2], [17]),
)


def _score_cases() -> Iterator[Case]:
    for name, q_lens, ctx in _SHAPES:
        case = f"block_scores/{name}"
        rng = rng_for(case)
        b = batch(rng, q_lens, ctx, 4)
        inputs = {"q": rng.standard_normal((sum(q_lens), 2, 8)), **b.inputs(*CONTEXT_NAMES)}
        yield Case(case, {"layer": 0}, inputs, {(0, "index"): pages(rng, b, 4, 8)})
    rng = rng_for("block_scores/nan-key")
    b = batch(rng, [1], [14], 4)
    keys = pages(rng, b, 4, 8)
    keys[b.page_table[0, 1], 2] = np.nan  # a NaN key must not decide
    inputs = {"q": rng.standard_normal((1, 2, 8)), **b.inputs(*CONTEXT_NAMES)}
    yield Case("block_scores/nan-key", {"layer": 0}, inputs, {(0, "index"): keys})


block_scores = OpSpec(
    name="block_scores",
    doc="S[t,i,b] = max over visible tokens j of block b (j <= position[t]) of dot(q[t,i], index_key[j]); -inf "
    "for blocks "
    "without a visible token. No scale, softmax or per-head weight (MODEL.md §2.4). q [T,h,D] -> [T,h,P].",
    inputs=(Arg("q", "T,h,D"), KV, *CONTEXT),
    outputs=(Arg("scores", "T,h,P", "accum"),),
    attrs=("layer",),
    infer=_score_types,
    naive=_score_naive,
    cases=_score_cases,
    refuses=(
        (
            "queries in h,T,D order",
            {"layer": 0},
            (TensorType((2, "T", 8), "h,T,D", "model"), StateType("kv"), *CONTEXT_TYPES),
        ),
    ),
    criterion="bound",
)


def _select_types(attrs: Attrs, given: Sequence[Any]) -> tuple[TensorType, ...]:
    positive(block_select, attrs, "topk", "block")
    forced = attrs["local_blocks"] + attrs["init_blocks"]
    if min(attrs["local_blocks"], attrs["init_blocks"]) < 0 or forced > attrs["topk"]:
        block_select.refuse(f"{forced} forced blocks", expected=f"0 to top-k, which is {attrs['topk']}")
    scores = given[0]
    return (TensorType((scores.shape[0], scores.shape[1], attrs["topk"]), "T,h,K", "int64"),)


def _select_naive(attrs: Attrs, scores: Any, positions: Any) -> tuple[Any, ...]:
    out = np.full((*scores.shape[:2], attrs["topk"]), -1, np.int64)
    for t in range(len(scores)):
        own = int(positions[t]) // attrs["block"]
        for i in range(scores.shape[1]):
            forced = {b for b in range(own + 1) if b > own - attrs["local_blocks"] or b < attrs["init_blocks"]}
            rest = [b for b in range(own + 1) if b not in forced and scores[t, i, b] > -np.inf]
            rest.sort(key=lambda b: (-scores[t, i, b], b))  # the lower id wins a tie
            chosen = sorted([*forced, *rest][: attrs["topk"]])
            out[t, i, : len(chosen)] = chosen
    return (out,)


def _select_cases() -> Iterator[Case]:
    for name, positions, init, local, kind in (
        ("below-topk", [0, 3, 11], 0, 1, "random"),
        ("beyond-topk", [40, 43, 44, 55], 0, 1, "random"),
        ("init-block", [40, 47], 1, 1, "random"),
        ("two-local", [40, 47], 0, 2, "random"),
        ("no-forced", [40, 47], 0, 0, "random"),
        ("all-equal", [55], 0, 1, "equal"),
        ("ties", [55, 55, 54], 0, 1, "ties"),
        ("local-is-worst", [55], 0, 1, "worst"),
        ("nan", [55], 0, 1, "nan"),
        ("tokens-equal-heads", [30, 50], 0, 1, "random"),
    ):
        case = f"block_select/{name}"
        rng = rng_for(case)
        pos = np.asarray(positions, np.int64)
        scores = rng.standard_normal((len(pos), 2, 14))
        if kind == "equal":
            scores[:] = 0.5
        elif kind == "ties":
            scores = np.round(scores)
        elif kind == "worst":
            scores[:, :, 13] = -1e9
        elif kind == "nan":
            scores[:, :, 2] = -np.inf  # what block_scores makes of NaN
        visible = np.arange(14)[None, :] <= pos[:, None] // 4
        scores = np.where(visible[:, None, :], scores, -np.inf)
        attrs = {"topk": 4, "block": 4, "local_blocks": local, "init_blocks": init}
        yield Case(case, attrs, {"scores": scores, "positions": pos})


block_select = OpSpec(
    name="block_select",
    doc="The min(topk, visible) best blocks of each query and index head: forced local and initial blocks first, "
    "then by "
    "score, the lower id winning ties; emitted ascending, -1 at the tail (MODEL.md §2.4). [T,h,P] -> [T,h,K].",
    inputs=(Arg("scores", "T,h,P", "accum"), POSITIONS),
    outputs=(Arg("blocks", "T,h,K", "int64"),),
    attrs=("topk", "block", "local_blocks", "init_blocks"),
    infer=_select_types,
    naive=_select_naive,
    cases=_select_cases,
    refuses=(
        (
            "more forced blocks than top-k",
            {"topk": 2, "block": 4, "local_blocks": 2, "init_blocks": 1},
            (TensorType(("T", 2, "P"), "T,h,P", "accum"), TensorType(("T",), "T", "int64")),
        ),
    ),
    criterion="exact",
)

__all__ = ["Batch", "block_scores", "block_select", "sequences"]
