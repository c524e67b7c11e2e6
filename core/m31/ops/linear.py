"""Projections `y = x W^T`, W stored [out, in], no biases in the text model (MODEL.md, notation)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from m31.ops.cases import rng_for
from m31.ops.spec import Arg, Attrs, Case, OpSpec, TensorDecl, TensorType, WeightDecl, only_slot, weight


def _linear_types(attrs: Attrs, given: Sequence[Any]) -> tuple[TensorType, ...]:
    matrix = only_slot(linear, given[1], (None, given[0].shape[1]))
    return (TensorType((given[0].shape[0], matrix.shape[0]), "T,C", "model"),)


def _cases(op: str) -> Iterator[Case]:
    for name, n, k, out, scale in (
        ("none", 0, 32, 8, 1.0),
        ("one", 1, 32, 8, 1.0),
        ("ragged", 5, 33, 7, 1.0),
        ("long-k", 3, 1024, 5, 1.0),
        ("outliers", 4, 64, 6, 1e4),
        ("small", 4, 64, 6, 1e-6),
    ):
        rng = rng_for(f"{op}/{name}")
        yield Case(f"{op}/{name}", {}, {"x": rng.standard_normal((n, k)) * scale, "w": rng.standard_normal((out, k))})


def _wrong(layout: str) -> tuple[tuple[str, Attrs, tuple[Any, ...]], ...]:
    decl = WeightDecl("w", {"weight": TensorDecl("w", (4, 9), (None, None))})
    return (("a matrix of another input width", {}, (TensorType((layout[0], 8), layout, "model"), decl)),)


linear = OpSpec(
    name="linear",
    doc="y[t,n] = sum_k x[t,k] w[n,k]. x [T,K], w [N,K] -> [T,N], accumulated in the accumulation dtype.",
    inputs=(Arg("x", "T,C"), weight("w")),
    outputs=(Arg("y", "T,C"),),
    attrs=(),
    infer=_linear_types,
    naive=lambda attrs, x, w: (x @ w.T,),
    cases=lambda: _cases("linear"),
    refuses=_wrong("T,C"),
    criterion="bound",
)


def _head_types(attrs: Attrs, given: Sequence[Any]) -> tuple[TensorType, ...]:
    matrix = only_slot(lm_head, given[1], (None, given[0].shape[1]))
    return (TensorType((given[0].shape[0], matrix.shape[0]), "R,V", "accum"),)


lm_head = OpSpec(
    name="lm_head",
    doc="logits[r,v] = sum_k x[r,k] w[v,k], kept in the accumulation dtype; untied, no scale, no soft-cap "
    "(MODEL.md §2.1).",
    inputs=(Arg("x", "R,C"), weight("w")),
    outputs=(Arg("logits", "R,V", "accum"),),
    attrs=(),
    infer=_head_types,
    naive=lambda attrs, x, w: (x @ w.T,),
    cases=lambda: _cases("lm_head"),
    refuses=_wrong("R,C"),
    criterion="bound",
)
