"""Cases that a fault or a mutant of the reference asked for: no other case could tell it from the truth."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from m31.conformance.cases.planned import Planned
from m31.ops import Case
from m31.ops.cases import batch, pages, rng_for

_CONTEXT = ("positions", "cu_q", "seq_lens", "page_table")


def _attention(op: str, case: str, tokens: int, scale: float) -> Case:
    name = f"{op}/{case}"
    rng = rng_for(name)
    b = batch(rng, [tokens], [19], 4)
    inputs: dict[str, Any] = {"q": rng.standard_normal((tokens, 4, 8)) * scale, **b.inputs(*_CONTEXT)}
    state: dict[tuple[int, str], Any] = {(0, kind): pages(rng, b, 4, 2, 8) for kind in ("k", "v")}
    if op == "sparse_attention":
        blocks = np.asarray([[[0, 1, 3, 4], [0, 2, 3, 4]]] * tokens, np.int64)
        blocks[b.positions < 16, :, 3] = -1  # their own block is the fourth
        inputs["blocks"] = blocks
    return Case(name, {"layer": 0, "kv_heads": 2, "scale": 8**-0.5}, inputs, state)


def _slot_zero(op: str) -> Case:
    name = f"{op}/slot-zero"
    rng = rng_for(name)
    state: dict[tuple[int, str], Any] = {(0, kind): rng.standard_normal((3, 2, 4, 8)) for kind in ("k", "v")}
    state[0, "index"] = rng.standard_normal((3, 4, 8))
    inputs: dict[str, Any] = {"slot_map": np.asarray([0, -1, 7, 1, -1], np.int64)}
    if op == "index_write":
        inputs["index_k"] = rng.standard_normal((5, 1, 8))
    else:
        inputs |= {"k": rng.standard_normal((5, 2, 8)), "v": rng.standard_normal((5, 16))}
    return Case(name, {"layer": 0}, inputs, state)


def _planned(op: str, case: str, values: str, build: Any, vector: int, **sizes: Any) -> Planned:
    return Planned(f"{op}/{case}", build, {"values": values, **sizes}, vector=vector)


FOUND: dict[str, list[Planned]] = {
    **{
        op: [
            # four tokens and four heads: the ambiguous shape of BUG-1 (faults dense-, sparse-heads-for-tokens)
            _planned(op, "as-many-heads", "ordinary", partial(_attention, op, "as-many-heads", 4, 2.0), 8, tokens=4),
            # exp of these logits overflows unless the largest is subtracted first (a mutant of the definition)
            _planned(op, "large-logits", "large", partial(_attention, op, "large-logits", 3, 2e3), 8, tokens=3),
        ]
        for op in ("dense_attention", "sparse_attention")
    },
    # a token is written to slot 0, beside padding (mutants of the reference that take slot 0 for padding)
    **{
        op: [_planned(op, "slot-zero", "ordinary", partial(_slot_zero, op), 8, tokens=5, padding=True)]
        for op in ("kv_write", "index_write")
    },
}
"""By op."""
