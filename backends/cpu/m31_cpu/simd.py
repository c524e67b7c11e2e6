"""Vectors: loads and stores of number formats, sums, exponentials. What LLVM can lower for any processor, in the width
that the instruction set has; rows whose length is no multiple of that end in single lanes."""

from __future__ import annotations

from collections.abc import Iterator

from llvmlite import ir

from m31_cpu.lang import F32, I16, I32, Val, vec
from m31_cpu.native import Kernel


def strips(k: Kernel, count: Val) -> Iterator[tuple[int, Val]]:
    """`for lanes, i in strips(k, n)`: vectors at i, i + lanes, ..., then single lanes for the rest of a row. Its body
    is written twice, for both widths."""
    wide = k.isa.lanes
    whole = count - count % wide
    for i in k.range(0, whole, wide):
        yield wide, i
    for i in k.range(whole, count):
        yield 1, i


def fma(k: Kernel, x: Val, y: Val, z: Val) -> Val:
    """x * y + z, rounded once where the instruction set can."""
    lanes = x.type.count
    fused = k.isa.fused
    return k.call(f"llvm.{'fma' if fused else 'fmuladd'}.v{lanes}f32", x.type, x, y, z)


def load_f32(k: Kernel, at: Val, index: Val, lanes: int) -> Val:
    """`lanes` float32 from element `index` on."""
    return k.load(vec(F32, lanes), at, index * 4, align=4)


def store_f32(k: Kernel, value: Val, at: Val, index: Val) -> None:
    """Float32 from element `index` on."""
    k.store(value, at, index * 4, align=4)


def wide(x: Val) -> Val:
    """The float32 numbers of bfloat16 bits."""
    return (x.zext(I32) << 16).bits(vec(F32, x.type.count))


def narrow(k: Kernel, x: Val) -> Val:
    """Float32 to bfloat16 bits, to nearest, ties to even; NaN stays NaN."""
    bits = x.bits(vec(I32, x.type.count))
    rounded = (bits + ((bits >> 16) & 1) + 0x7FFF) >> 16
    quiet = (bits >> 16) | 0x40
    return x.nan().select(quiet, rounded).trunc(I16)


def splat(x: Val, lanes: int) -> Val:
    """A scalar in every lane; also of a vector of one lane."""
    return x.splat(lanes)


def total(x: Val) -> Val:
    """The sum of all lanes, halves first: a fixed order for a width."""
    count = x.type.count
    while count > 1:
        count //= 2
        x = x.shuffle(list(range(count))) + x.shuffle(list(range(count, 2 * count)))
    return x.lane(0)


def greatest(k: Kernel, x: Val) -> Val:
    """The greatest lane."""
    count = x.type.count
    while count > 1:
        count //= 2
        x = k.max(x.shuffle(list(range(count))), x.shuffle(list(range(count, 2 * count))))
    return x.lane(0)


_LOG2E, _LN2_HIGH, _LN2_LOW = 1.4426950408889634, 0.693359375, -2.12194440054690581e-4
# exp(r) = 1 + r + r^2 p(r) on |r| <= ln 2 / 2, least greatest error; highest power first.
_EXP = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
_LEAST, _MOST = -87.33654, 88.37626
_POINT = 1.5 * 2.0**23


def exp(k: Kernel, x: Val) -> Val:
    """e^x to about 2 units in the last place; 0 below -87.3, and of -inf; NaN of NaN."""
    kind = x.type
    clamped = k.max(k.min(x, _MOST), _LEAST)
    turns = clamped * _LOG2E
    # Where no instruction rounds: these sums have no bits behind the point.
    turns = (turns + _POINT) - _POINT if k.isa.name == "portable" else k.unary("roundeven", turns)
    r = fma(k, turns, k.const(kind, -_LN2_HIGH), clamped)
    r = fma(k, turns, k.const(kind, -_LN2_LOW), r)
    p = k.const(kind, _EXP[0])
    for c in _EXP[1:]:
        p = fma(k, p, r, k.const(kind, c))
    y = fma(k, p, r * r, r) + 1.0
    power = ((turns.to_int(I32) + 127) << 23).bits(kind)
    y = (x < _LEAST).select(0.0, y * power)
    return x.nan().select(x, y)


def sigmoid(k: Kernel, x: Val) -> Val:
    """1 / (1 + e^-x)."""
    return 1.0 / (exp(k, -x) + 1.0)


def swiglu(k: Kernel, gate: Val, up: Val, alpha: Val, beta: Val, limit: Val) -> Val:
    """SwiGLU-OAI (MODEL.md §2.5); the parameters are scalars. NaN stays NaN through the clamps."""
    lanes = gate.type.count
    a, b, top = (splat(v, lanes) for v in (alpha, beta, limit))
    g = (gate > top).select(top, gate)
    u = (up > top).select(top, up)
    u = (u < -top).select(-top, u)
    return (u + b) * g * sigmoid(k, a * g)


class _BFloat(ir.types._BaseFloatType):  # type: ignore[misc]  # llvmlite has no name for it
    null = "0.0"
    intrinsic_name = "bf16"

    def __str__(self) -> str:
        return "bfloat"


_BFloat._create_instance()
BF16 = _BFloat()


def dot_pairs(k: Kernel, sums: Val, x: Val, y: Val) -> Val:
    """sums + both products of the pairs of bfloat16 numbers in each int32 of x and y; `isa.dots` only. Products and
    sums are rounded to float32, numbers below its normal range are zero."""
    lanes = sums.type.count
    kind = vec(BF16, 2 * lanes)
    return k.call(f"llvm.x86.avx512bf16.dpbf16ps.{32 * lanes}", sums.type, sums, x.bits(kind), y.bits(kind))
