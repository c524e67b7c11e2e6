"""Gemma RMS norms (MODEL.md §2.2): over the hidden axis, and over each head."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from m31.ops.cases import rng_for
from m31.ops.spec import Arg, Attrs, Case, OpSpec, TensorDecl, TensorType, WeightDecl, only_slot, positive, weight


def _rms(x: Any, w: Any, eps: float) -> Any:
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * (1.0 + w)


def _norm_types(attrs: Attrs, given: Sequence[Any]) -> tuple[TensorType, ...]:
    positive(gemma_rmsnorm, attrs, "eps")
    only_slot(gemma_rmsnorm, given[1], (given[0].shape[1],))
    return (given[0],)


def _norm_cases() -> Iterator[Case]:
    for name, n, scale in (("none", 0, 1.0), ("one", 1, 1.0), ("tiny", 3, 1e-4), ("large", 3, 1e4), ("zero", 2, 0.0)):
        rng = rng_for(f"gemma_rmsnorm/{name}")
        yield Case(
            f"gemma_rmsnorm/{name}",
            {"eps": 1e-6},
            {"x": rng.standard_normal((n, 48)) * scale, "w": rng.standard_normal(48) * 0.3},
        )


gemma_rmsnorm = OpSpec(
    name="gemma_rmsnorm",
    doc="y = x * rsqrt(mean(x^2) + eps) * (1 + w); 1 + w and everything else in the accumulation dtype, one cast "
    "at the "
    "end (MODEL.md §2.2). x [T,C], w [C] stored zero-centred.",
    inputs=(Arg("x", "T,C"), weight("w")),
    outputs=(Arg("y", "T,C"),),
    attrs=("eps",),
    infer=_norm_types,
    naive=lambda attrs, x, w: (_rms(x, w, attrs["eps"]),),
    cases=_norm_cases,
    refuses=(
        (
            "a weight of another width",
            {"eps": 1e-6},
            (TensorType(("T", 8), "T,C", "model"), WeightDecl("n", {"weight": TensorDecl("n", (4,), (None,))})),
        ),
        (
            "eps of zero",
            {"eps": 0.0},
            (TensorType(("T", 8), "T,C", "model"), WeightDecl("n", {"weight": TensorDecl("n", (8,), (None,))})),
        ),
    ),
    criterion="bound",
)


def _head_norm_types(attrs: Attrs, given: Sequence[Any]) -> tuple[TensorType, ...]:
    positive(head_rmsnorm, attrs, "eps", "heads")
    width, heads = given[0].shape[1], attrs["heads"]
    if width % heads:
        head_rmsnorm.refuse(f"{width} channels over {heads} heads", expected="a multiple of the number of heads")
    only_slot(head_rmsnorm, given[1], (width // heads,))
    return (TensorType((given[0].shape[0], heads, width // heads), "T,h,D", "model"),)


def _head_norm_naive(attrs: Attrs, x: Any, w: Any) -> tuple[Any, ...]:
    return (_rms(x.reshape(len(x), attrs["heads"], x.shape[1] // attrs["heads"]), w, attrs["eps"]),)


def _head_norm_cases() -> Iterator[Case]:
    # T == h is the ambiguous shape of BUG-1.
    for name, n, heads in (("none", 0, 2), ("one", 1, 4), ("tokens-equal-heads", 4, 4), ("many", 9, 2)):
        rng = rng_for(f"head_rmsnorm/{name}")
        inputs = {"x": rng.standard_normal((n, heads * 16)), "w": rng.standard_normal(16) * 0.3}
        yield Case(f"head_rmsnorm/{name}", {"eps": 1e-6, "heads": heads}, inputs)


head_rmsnorm = OpSpec(
    name="head_rmsnorm",
    doc="Gemma RMS norm over the channels of each head, one weight [D] shared by all heads of the branch "
    "(MODEL.md §2.3). "
    "x [T,h*D] -> [T,h,D].",
    inputs=(Arg("x", "T,C"), weight("w")),
    outputs=(Arg("y", "T,h,D"),),
    attrs=("eps", "heads"),
    infer=_head_norm_types,
    naive=_head_norm_naive,
    cases=_head_norm_cases,
    refuses=(
        (
            "channels that do not divide into heads",
            {"eps": 1e-6, "heads": 3},
            (TensorType(("T", 16), "T,C", "model"), WeightDecl("n", {"weight": TensorDecl("n", (5,), (None,))})),
        ),
    ),
    criterion="bound",
)
