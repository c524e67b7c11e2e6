"""The table of RoPE (MODEL.md §2.3): cosine and sine of angles that were rounded to float32, up to millions of radians.

Angles are reduced and evaluated in double precision; the error that is left is far below one float32 step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import torch

from m31.graph import OpInstance
from m31_cpu.binding import EXACT, Binding, Factory, rows_of
from m31_cpu.kernels.rows import count_of, to_f32
from m31_cpu.lang import F64, I64, PTR, Val, vec
from m31_cpu.native import Kernel, Native
from m31_cpu.program import NativeKernel, Sizes, Work, span
from m31_cpu.simd import load_f32, splat, store_f32, strips

# pi / 2 to 150 bits: its first 30 bits, so that they times a count of turns below 2^23 are exact, and the rest.
_HALF_PI = Fraction(0x6487ED5110B4611A62633145C06E0E68948127, 1 << 150)
_HIGH = math.floor(_HALF_PI * 2**29) / 2**29
_LOW = float(_HALF_PI - Fraction(_HIGH))
_WHOLE = 1.5 * 2.0**52  # float64 from here on has no fractions, and the low bits are those of the integer
# Taylor series on |r| <= pi / 4, highest power first: the terms left out are below 2^-40.
_SIN = tuple((-1) ** n / math.factorial(2 * n + 1) for n in range(6, 0, -1))
_COS = tuple((-1) ** n / math.factorial(2 * n) for n in range(6, 0, -1))
_ROWS = 16  # of a task


def _series(k: Kernel, square: Val, terms: Sequence[float]) -> Val:
    """square * (terms[-1] + square * (terms[-2] + ...))."""
    value = k.const(square.type, terms[0])
    for term in terms[1:]:
        value = value * square + term
    return value * square


def cos_sin(k: Kernel, angle: Val) -> tuple[Val, Val]:
    """Of float32 angles below 2^23 in magnitude."""
    kind = vec(F64, angle.type.count)
    x = Val(k, k.b.fpext(angle.v, kind))
    shifted = x * (2 / math.pi) + _WHOLE
    turns = shifted - _WHOLE
    quarter = shifted.bits(vec(I64, angle.type.count))
    r = (x - turns * _HIGH) - turns * _LOW
    square = r * r
    sine, cosine = r + r * _series(k, square, _SIN), _series(k, square, _COS) + 1.0
    swap = (quarter & 1).ne(0)

    def signed(value: Val, negative: Val) -> Val:
        return Val(k, k.b.fptrunc(negative.select(-value, value).v, angle.type))

    cos = signed(swap.select(sine, cosine), ((quarter + 1) & 2).ne(0))
    return cos, signed(swap.select(cosine, sine), (quarter & 2).ne(0))


def _table(k: Kernel, a: Any) -> None:
    rows = count_of(k, a.rows)
    for task in k.tasks((rows + (_ROWS - 1)) // _ROWS):
        for row in k.range(task * _ROWS, k.min(task * _ROWS + _ROWS, rows)):
            position = to_f32(k, k.load(I64, a.positions, row * 8, align=8))
            for lanes, i in strips(k, a.half):
                cos, sin = cos_sin(k, load_f32(k, a.frequencies, i, lanes) * splat(position, lanes))
                store_f32(k, cos, a.cos, row * a.half + i)
                store_f32(k, sin, a.sin, row * a.half + i)


TABLE = Native(
    "rope_table",
    {**dict.fromkeys(("positions", "frequencies", "cos", "sin", "rows"), PTR), "half": I64},
    _table,
)


def frequencies(theta: float, width: int) -> torch.Tensor:
    """`1 / theta ** (2d / width)` float32 [width / 2]: the power is the nearest float32, then the reciprocal."""
    exponent = torch.arange(0, width, 2, dtype=torch.float32) / width
    return 1.0 / torch.pow(torch.tensor(theta).double(), exponent.double()).float()


def rope_table(op: OpInstance, at: Binding) -> NativeKernel:
    """See the op."""
    inverse = frequencies(op.attrs["theta"], op.attrs["rotary_dim"])

    def works(outs: Sequence[Any], ins: Sequence[Any], w: Any, _: torch.Tensor | None, sizes: Sizes) -> list[Work]:
        (positions,), (cos, sin) = ins, outs
        values = {
            "positions": positions.data_ptr(),
            "frequencies": inverse.data_ptr(),
            "cos": cos.data_ptr(),
            "sin": sin.data_ptr(),
            "rows": sizes.at(rows_of(op)),
            "half": len(inverse),
        }
        return [Work(TABLE, values, (span(positions),), (span(cos), span(sin)), (sizes, inverse))]

    return at.kernel(op, works, EXACT)


TABLES: Mapping[str, Factory] = {"rope_table": rope_table}
