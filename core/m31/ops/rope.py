"""Rotary position embedding (MODEL.md §2.3): the table, built by the float32 recipe, and the rotation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from m31.ops.cases import rng_for
from m31.ops.spec import Arg, Attrs, Case, OpSpec, TensorType, positive


def inverse_frequencies(theta: float, rotary_dim: int) -> Any:
    """`1 / theta ** (2d / rotary_dim)` in float32, every step rounded to float32. [rotary_dim/2].

    The power is rounded before the reciprocal. A correctly rounded quotient differs by an ulp in many entries and by
    0.03 in the cosine at position 1,048,575, so the order is part of the model (MODEL.md §2.3).
    """
    exponent = np.arange(0, rotary_dim, 2, dtype=np.float32) / np.float32(rotary_dim)
    power = np.power(np.float64(np.float32(theta)), exponent.astype(np.float64)).astype(np.float32)
    return (np.float32(1.0) / power).astype(np.float32)


def _table_types(attrs: Attrs, given: Sequence[Any]) -> tuple[TensorType, ...]:
    positive(rope_table, attrs, "theta", "rotary_dim")
    if attrs["rotary_dim"] % 2:
        rope_table.refuse(f"rotary_dim {attrs['rotary_dim']} is odd", expected="an even number of channels")
    out = TensorType((given[0].shape[0], attrs["rotary_dim"] // 2), "T,D", "accum")
    return out, out


def _table_naive(attrs: Attrs, positions: Any) -> tuple[Any, ...]:
    inv = inverse_frequencies(attrs["theta"], attrs["rotary_dim"])
    angle = (positions.astype(np.float32)[:, None] * inv[None, :]).astype(np.float32).astype(np.float64)
    return np.cos(angle), np.sin(angle)


def _table_cases() -> Iterator[Case]:
    for theta in (1e7, 5e6):
        case = f"rope_table/{theta:.0e}"
        yield Case(
            case,
            {"theta": theta, "rotary_dim": 64},
            {"positions": np.asarray([0, 1, 127, 128, 2047, 2048, 262_143, 1_048_575], np.int64)},
        )
    yield Case("rope_table/none", {"theta": 1e4, "rotary_dim": 8}, {"positions": np.zeros(0, np.int64)})


rope_table = OpSpec(
    name="rope_table",
    doc="cos and sin of fp32(position) * inv_freq, the product rounded to fp32 first (MODEL.md §2.3). [T] -> 2 x "
    "[T,D/2].",
    inputs=(Arg("positions", "T", "int64"),),
    outputs=(Arg("cos", "T,D", "accum"), Arg("sin", "T,D", "accum")),
    attrs=("theta", "rotary_dim"),
    infer=_table_types,
    naive=_table_naive,
    cases=_table_cases,
    refuses=(("an odd rotary width", {"theta": 1e7, "rotary_dim": 7}, (TensorType(("T",), "T", "int64"),)),),
    criterion="bound",
)


def _rope_types(attrs: Attrs, given: Sequence[Any]) -> tuple[TensorType, ...]:
    x, cos, sin = given
    if cos.shape != sin.shape or 2 * cos.shape[1] > x.shape[2]:
        rope.refuse(
            f"table widths {cos.shape[1]} and {sin.shape[1]} for heads of {x.shape[2]}",
            expected="half the rotated width",
        )
    return (x,)


def _rope_naive(attrs: Attrs, x: Any, cos: Any, sin: Any) -> tuple[Any, ...]:
    half = cos.shape[1]
    out = x.copy()
    for d in range(half):
        a, b = x[:, :, d], x[:, :, d + half]
        out[:, :, d] = a * cos[:, None, d] - b * sin[:, None, d]
        out[:, :, d + half] = b * cos[:, None, d] + a * sin[:, None, d]
    return (out,)


def _rope_cases() -> Iterator[Case]:
    for name, n, heads, width, half in (("none", 0, 2, 16, 4), ("partial", 5, 3, 16, 4), ("full", 4, 4, 16, 8)):
        rng = rng_for(f"rope/{name}")
        angle = rng.uniform(0, 6.3, (n, half))
        yield Case(
            f"rope/{name}",
            {},
            {"x": rng.standard_normal((n, heads, width)), "cos": np.cos(angle), "sin": np.sin(angle)},
        )


rope = OpSpec(
    name="rope",
    doc="NeoX pairing (d, d + D/2) over the first 2*table-width channels of each head; the rest passes (MODEL.md "
    "§2.3, BUG-16).",
    inputs=(Arg("x", "T,h,D"), Arg("cos", "T,D", "accum"), Arg("sin", "T,D", "accum")),
    outputs=(Arg("y", "T,h,D"),),
    attrs=(),
    infer=_rope_types,
    naive=_rope_naive,
    cases=_rope_cases,
    refuses=(
        (
            "a table wider than the head",
            {},
            (
                TensorType(("T", 2, 8), "T,h,D", "model"),
                TensorType(("T", 8), "T,D", "accum"),
                TensorType(("T", 8), "T,D", "accum"),
            ),
        ),
    ),
    criterion="bound",
)
