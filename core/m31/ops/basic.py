"""Embedding lookup, row gather, residual addition."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from m31.ops.cases import rng_for
from m31.ops.spec import Arg, Attrs, Case, OpSpec, TensorDecl, TensorType, WeightDecl, only_slot, weight


def _embedding_types(attrs: Attrs, given: Sequence[Any]) -> tuple[TensorType, ...]:
    table = only_slot(embedding, given[1], (None, None))
    return (TensorType((*given[0].shape, table.shape[1]), "T,C", "model"),)


def _embedding_naive(attrs: Attrs, tokens: Any, table: Any) -> tuple[Any, ...]:
    return (np.stack([table[t] for t in tokens]) if len(tokens) else np.zeros((0, table.shape[1])),)


def _embedding_cases() -> Iterator[Case]:
    for name, n in (("none", 0), ("one", 1), ("many", 33)):
        rng = rng_for(f"embedding/{name}")
        tokens = rng.integers(0, 50, n)
        yield Case(f"embedding/{name}", {}, {"tokens": tokens, "table": rng.standard_normal((50, 24))})


embedding = OpSpec(
    name="embedding",
    doc="x[t] = table[tokens[t]]; no scale (MODEL.md §2.1). tokens [T] int64, table [V,C].",
    inputs=(Arg("tokens", "T", "int64"), weight("table")),
    outputs=(Arg("x", "T,C"),),
    attrs=(),
    infer=_embedding_types,
    naive=_embedding_naive,
    cases=_embedding_cases,
    refuses=(
        (
            "a table with three axes",
            {},
            (TensorType(("T",), "T", "int64"), WeightDecl("e", {"weight": TensorDecl("e", (2, 3, 4), (None,) * 3)})),
        ),
    ),
    criterion="exact",
)


def _gather_types(attrs: Attrs, given: Sequence[Any]) -> tuple[TensorType, ...]:
    return (TensorType((given[1].shape[0], given[0].shape[1]), "R,C", "model"),)


def _gather_cases() -> Iterator[Case]:
    for name, rows in (("none", []), ("last", [8]), ("some", [0, 3, 8])):
        rng = rng_for(f"gather_rows/{name}")
        yield Case(f"gather_rows/{name}", {}, {"x": rng.standard_normal((9, 16)), "rows": np.asarray(rows, np.int64)})


gather_rows = OpSpec(
    name="gather_rows",
    doc="y[r] = x[rows[r]]: only the rows that get logits reach the head (DESIGN.md §5).",
    inputs=(Arg("x", "T,C"), Arg("rows", "R", "int64")),
    outputs=(Arg("y", "R,C"),),
    attrs=(),
    infer=_gather_types,
    naive=lambda attrs, x, rows: (x[rows],),
    cases=_gather_cases,
    refuses=(
        (
            "rows of activations instead of indices",
            {},
            (TensorType(("T", 8), "T,C", "model"), TensorType(("R", 8), "R,C", "model")),
        ),
    ),
    criterion="exact",
)


def _add_types(attrs: Attrs, given: Sequence[Any]) -> tuple[TensorType, ...]:
    if given[0].shape != given[1].shape:
        add.refuse(f"shapes {given[0].shape} and {given[1].shape} differ", expected="equal shapes")
    return (given[0],)


def _add_cases() -> Iterator[Case]:
    for name, n in (("none", 0), ("one", 1), ("many", 7)):
        rng = rng_for(f"add/{name}")
        yield Case(f"add/{name}", {}, {"x": rng.standard_normal((n, 16)), "y": rng.standard_normal((n, 16)) * 1e3})


add = OpSpec(
    name="add",
    doc="z = x + y, added in the accumulation dtype and rounded once (MODEL.md §2.1).",
    inputs=(Arg("x", "T,C"), Arg("y", "T,C")),
    outputs=(Arg("z", "T,C"),),
    attrs=(),
    infer=_add_types,
    naive=lambda attrs, x, y: (x + y,),
    cases=_add_cases,
    refuses=(("different widths", {}, (TensorType(("T", 8), "T,C", "model"), TensorType(("T", 4), "T,C", "model"))),),
    criterion="bound",
)
