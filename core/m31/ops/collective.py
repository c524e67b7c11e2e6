"""Collectives between the ranks of a model that is spread over several devices (MODEL.md §2.4, DESIGN.md §4).

A rank sees only its own part, so `naive` is what one rank can say alone: the identity in a world of one. What the
ranks make of their parts together is said by `reduced` and `gathered`, over the list of all parts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from m31.ops.cases import rng_for
from m31.ops.spec import Arg, Attrs, Case, OpSpec, TensorType


def reduced(parts: Sequence[Any]) -> Any:
    """What every rank has after `all_reduce`: the elementwise sum of all ranks' parts, in rank order. numpy [T,C]."""
    return np.sum(np.stack(parts), axis=0)


def gathered(parts: Sequence[Any]) -> Any:
    """What every rank has after `all_gather`: all ranks' parts side by side, in rank order. numpy [R,V/world] x
    world -> [R,V]."""
    return np.concatenate(parts, axis=-1)


def _world(spec: OpSpec, attrs: Attrs) -> int:
    world = attrs["world"]
    if isinstance(world, bool) or not isinstance(world, int) or world < 1:
        spec.refuse(f"attribute world is {world!r}", expected="a number of ranks, 1 or more")
    return world


def _alone(spec: OpSpec, attrs: Attrs, x: Any) -> tuple[Any, ...]:
    """A world of one; what other ranks hold is not among the inputs."""
    if _world(spec, attrs) != 1:
        spec.refuse(f"one part of {attrs['world']} was given", expected="the parts of all ranks: reduced or gathered")
    return (x.copy(),)


def _cases(op: str) -> Iterator[Case]:
    for name, rows, scale in (("none", 0, 1.0), ("one", 1, 1.0), ("many", 7, 1.0), ("large", 3, 1e6)):
        rng = rng_for(f"{op}/{name}")
        yield Case(f"{op}/{name}", {"world": 1}, {"x": rng.standard_normal((rows, 24)) * scale})


def _reduce_naive(attrs: Attrs, x: Any) -> tuple[Any, ...]:
    return _alone(all_reduce, attrs, x)


def _reduce_types(attrs: Attrs, given: Sequence[Any]) -> tuple[TensorType, ...]:
    _world(all_reduce, attrs)
    return (given[0],)


all_reduce = OpSpec(
    name="all_reduce",
    doc="y = the sum of all ranks' x, summed in the accumulation dtype and rounded once, the same bits on every "
    "rank. It follows each product whose inputs are spread over the ranks (MODEL.md §8). x [T,C] -> [T,C].",
    inputs=(Arg("x", "T,C"),),
    outputs=(Arg("y", "T,C"),),
    attrs=("world",),
    infer=_reduce_types,
    naive=_reduce_naive,
    cases=lambda: _cases("all_reduce"),
    refuses=(
        ("a world without ranks", {"world": 0}, (TensorType(("T", 8), "T,C", "model"),)),
        ("a flag for a number", {"world": True}, (TensorType(("T", 8), "T,C", "model"),)),
        ("heads instead of channels", {"world": 2}, (TensorType(("T", 2, 8), "T,h,D", "model"),)),
    ),
    criterion="bound",
)


def _gather_naive(attrs: Attrs, x: Any) -> tuple[Any, ...]:
    return _alone(all_gather, attrs, x)


def _gather_types(attrs: Attrs, given: Sequence[Any]) -> tuple[TensorType, ...]:
    rows, width = given[0].shape
    return (TensorType((rows, width * _world(all_gather, attrs)), "R,V", "accum"),)


all_gather = OpSpec(
    name="all_gather",
    doc="y[r] = the x[r] of all ranks side by side, in rank order: the logits of a vocabulary that is spread over the "
    "ranks. x [R,V/world] -> [R,V].",
    inputs=(Arg("x", "R,V", "accum"),),
    outputs=(Arg("y", "R,V", "accum"),),
    attrs=("world",),
    infer=_gather_types,
    naive=_gather_naive,
    cases=lambda: _cases("all_gather"),
    refuses=(
        ("a world that is no number", {"world": "2"}, (TensorType(("R", 8), "R,V", "accum"),)),
        ("activations instead of logits", {"world": 2}, (TensorType(("T", 8), "T,C", "model"),)),
    ),
    criterion="exact",
)
