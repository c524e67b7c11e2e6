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
        yield _as_many_heads_as_tokens(spec.name)


def _as_many_heads_as_tokens(op: str) -> Case:
    name = f"{op}/heads-equal-tokens"
    rng = rng_for(name)
    b = batch(rng, [4], [19], 4)
    inputs = {"q": rng.standard_normal((4, 4, 8)) * 2, **b.inputs(*_CONTEXT)}
    state = {(0, "k"): pages(rng, b, 4, 2, 8), (0, "v"): pages(rng, b, 4, 2, 8)}
    if op == "sparse_attention":
        inputs["blocks"] = np.asarray([[[0, 1, 3, 4], [0, 2, 3, 4]]] * 4, np.int64)
        inputs["blocks"][0, :, 3] = -1  # its own block is the fourth
    return Case(name, {"layer": 0, "kv_heads": 2, "scale": 8**-0.5}, inputs, state)
