"""Cases that a fault or a mutant of the reference asked for: no other case could tell it from the truth."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from m31.ops import Case, OpSpec
from m31.ops.cases import batch, pages, rng_for

_CONTEXT = ("positions", "cu_q", "seq_lens", "page_table")


def more(spec: OpSpec) -> Iterator[Case]:
    """Those of an op."""
    if spec.name == "gather_rows":
        # rows come in any order, and twice: all other cases ask for ascending ones (fault rows-ascending)
        rng = rng_for("gather_rows/any-order")
        rows = np.asarray([8, 0, 3, 3, 1], np.int64)
        yield Case("gather_rows/any-order", {}, {"x": rng.standard_normal((9, 16)), "rows": rows})
    elif spec.name in ("dense_attention", "sparse_attention"):
        # four tokens and four heads: the ambiguous shape of BUG-1 (faults dense-, sparse-heads-for-tokens)
        yield _attention(spec.name, "heads-equal-tokens", 4, 2.0)
        # exp of these logits overflows unless the largest is subtracted first (a mutant of the definition)
        yield _attention(spec.name, "large-logits", 3, 2e3)
    elif spec.name in ("kv_write", "index_write"):
        # a token is written to slot 0, beside padding (mutants of the reference that take slot 0 for padding)
        yield _slot_zero(spec.name)


def _attention(op: str, case: str, tokens: int, scale: float) -> Case:
    name = f"{op}/{case}"
    rng = rng_for(name)
    b = batch(rng, [tokens], [19], 4)
    inputs = {"q": rng.standard_normal((tokens, 4, 8)) * scale, **b.inputs(*_CONTEXT)}
    state = {(0, "k"): pages(rng, b, 4, 2, 8), (0, "v"): pages(rng, b, 4, 2, 8)}
    if op == "sparse_attention":
        blocks = np.asarray([[[0, 1, 3, 4], [0, 2, 3, 4]]] * tokens, np.int64)
        blocks[b.positions < 16, :, 3] = -1  # their own block is the fourth
        inputs["blocks"] = blocks
    return Case(name, {"layer": 0, "kv_heads": 2, "scale": 8**-0.5}, inputs, state)


def _slot_zero(op: str) -> Case:
    name = f"{op}/slot-zero"
    rng = rng_for(name)
    slots = np.asarray([0, -1, 7, 1, -1], np.int64)
    state = {(0, kind): rng.standard_normal((3, 2, 4, 8)) for kind in ("k", "v")}
    state[0, "index"] = rng.standard_normal((3, 4, 8))
    if op == "index_write":
        inputs = {"index_k": rng.standard_normal((5, 1, 8)), "slot_map": slots}
    else:
        inputs = {"k": rng.standard_normal((5, 2, 8)), "v": rng.standard_normal((5, 16)), "slot_map": slots}
    return Case(name, {"layer": 0}, inputs, state)
