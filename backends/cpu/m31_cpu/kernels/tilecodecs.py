"""Stored weights decoded into tiles: pieces of rows in their natural order (MODEL.md §3.1, §3.2).

Values are exact, except for NVFP4's global scale, which sums are multiplied with: an E2M1 code times an E4M3 scale, and
an E4M3 code times a power of two, have few enough bits for bfloat16. Damage (a number that is none, a block scale that is
NaN or has a sign) sets the matrix's flag. Nothing outside the piece is read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from m31_cpu.kernels.tiled import Tiling
from m31_cpu.lang import F32, HALF, I8, I16, I32, I64, PTR, Val, vec
from m31_cpu.native import Kernel
from m31_cpu.simd import wide

_AHEAD = 6  # rows: how early the lines of a piece are asked for
_LINE = 64
_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # 2 * E2M1 by code


@dataclass(frozen=True)
class Matrix:
    """A stored matrix, as values of a kernel.

    Attributes:
        codes, codes_row: address, and bytes from one row to the next.
        scales, scales_row: the same of block scales, if it has them.
        factor: float32, multiplies its products.
        flag: address of an int64 that is set if a number is damaged.
    """

    codes: Val
    codes_row: Val
    scales: Val
    scales_row: Val
    factor: Val
    flag: Val


@dataclass(frozen=True)
class Codec:
    """How a format becomes rows of a tile.

    Args:
        name: as `m31.sdk.stored_as` says it.
        exact: bfloat16 does not hold its values.
        bits: of a number in `codes`.
        group: columns of a block scale, 1 without; pieces are multiples of it.
        piece: `piece(k, tiling, codes, scales, width, to)` decodes a piece and returns whether it is damaged.
    """

    name: str
    exact: bool
    bits: int
    group: int
    piece: Callable[[Kernel, Tiling, Val, Val, Val, Val], Val]

    def row(self, k: Kernel, t: Tiling, m: Matrix, r: Val, first: Val, width: Val, to: Val) -> None:
        """Columns `first` to `first + width` of row r."""
        codes, scales = m.codes + r * m.codes_row + first * self.bits // 8, m.scales
        if self.group > 1:
            scales = scales + r * m.scales_row + first // self.group
        for offset in k.range(0, width * self.bits // 8, _LINE):
            k.prefetch(codes + m.codes_row * _AHEAD + offset)
        with k.when(self.piece(k, t, codes, scales, width, to)):
            k.store(k.i64(1), m.flag, align=8)


def _store(k: Kernel, t: Tiling, value: Val, to: Val, column: Val) -> None:
    """Float32 numbers into the tile; bfloat16 holds those of an inexact tile."""
    if t.pairs:
        k.store((value.bits(vec(I32, value.type.count)) >> 16).trunc(I16), to, column * 2, align=2)
    else:
        k.store(value, to, column * 4, align=4)


def _any(k: Kernel, x: Val, least: int) -> Val:
    """Whether a lane, unsigned, is at least so great."""
    count = x.type.count
    while count > 1:
        count //= 2
        x = k.binary("umax", x.shuffle(list(range(count))), x.shuffle(list(range(count, 2 * count))))
    return x.lane(0).zext(I32) >= least


def _plain(bits: int) -> Callable[[Kernel, Tiling, Val, Val, Val, Val], Val]:
    """Bfloat16 (16 bits) or float32."""
    kind = I16 if bits == 16 else I32
    most = (1 << (bits - 1)) - 1
    infinite = 0x7F80 if bits == 16 else 0x7F800000

    def piece(k: Kernel, t: Tiling, codes: Val, _: Val, width: Val, to: Val) -> Val:
        lanes = 2 * t.lanes
        worst, rest = (k.var(k.const(vec(kind, n), 0)) for n in (lanes, 1))
        whole = width - width % lanes

        def put(i: Val, n: int, seen: object) -> None:
            x = k.load(vec(kind, n), codes, i * (bits // 8), align=bits // 8)
            seen.set(k.binary("umax", seen.get(), x & most))  # type: ignore[attr-defined]
            if bits == 16 and t.pairs:
                k.store(x, to, i * 2, align=2)
            else:
                k.store(wide(x) if bits == 16 else x.bits(vec(F32, n)), to, i * 4, align=4)

        for i in k.range(0, whole, lanes):
            put(i, lanes, worst)
        for i in k.range(whole, width):
            put(i, 1, rest)
        return _any(k, worst.get(), infinite) | _any(k, rest.get(), infinite)

    return piece


def e4m3(k: Kernel, x: Val) -> Val:
    """E4M3 codes (int8 vector) as float32; NaN is not kept."""
    if k.isa.name == "portable":  # no conversion from half precision: the exponent is moved, then its bias corrected
        return ((x.sext(I32) << 20) & -0x78100000).bits(vec(F32, x.type.count)) * 2.0**120
    half = ((x.sext(I16) << 7) & -0x4080).bits(vec(HALF, x.type.count))
    return half.to_f32() * 256.0


def _mxfp8(k: Kernel, t: Tiling, codes: Val, scales: Val, width: Val, to: Val) -> Val:
    lanes = t.lanes
    worst, exponents = k.var(k.const(vec(I8, 32), 0)), k.var(k.i32(0))
    for i in k.range(0, width, 32):
        x = k.load(vec(I8, 32), codes, i)
        worst.set(k.binary("umax", worst.get(), x & 0x7F))
        exponent = k.load(I8, scales, i // 32).zext(I32)
        exponents.set(k.binary("umax", exponents.get(), exponent))
        # 2^-127 is no normal float32 number.
        scale = exponent.eq(0).select(k.i32(0x00400000), exponent << 23).bits(F32).splat(lanes)
        for j in range(0, 32, lanes):
            _store(k, t, e4m3(k, x.shuffle(list(range(j, j + lanes)))) * scale, to, i + j)
    return _any(k, worst.get(), 0x7F) | (exponents.get() >= 255)


def _e2m1_doubled(k: Kernel, codes: Val) -> Val:
    """2 * E2M1 of codes 0 to 15 (int8 vector of 16), as int8."""
    kind = codes.type
    table = k.listed(I8, _DOUBLED)
    if k.isa.name in ("avx2", "avx512"):
        return k.call("llvm.x86.ssse3.pshuf.b.128", kind, table, codes)
    if k.isa.name == "neon":
        return k.call("llvm.aarch64.neon.tbl1.v16i8", kind, table, codes)
    m = codes & 7
    above = [k.binary("usub.sat", m, n) for n in (4, 6)]  # the step from one code to the next doubles at 4 and at 6
    size = m + above[0] + (above[1] + above[1])
    sign = -(codes >> 3)
    return (size ^ sign) - sign


def _nvfp4(k: Kernel, t: Tiling, codes: Val, scales: Val, width: Val, to: Val) -> Val:
    lanes, worst = t.lanes, k.var(k.i32(0))
    for i in k.range(0, width, 16):
        packed = k.load(vec(I8, 8), codes, i // 2)
        order = [n // 2 + 8 * (n % 2) for n in range(16)]
        doubled = _e2m1_doubled(k, (packed & 15).shuffle(order, packed >> 4))
        byte = k.load(I8, scales, i // 16).zext(I32)
        worst.set(k.binary("umax", worst.get(), byte))
        scale = ((byte << 20).bits(F32) * 2.0**119).splat(lanes)  # half the scale
        for j in range(0, 16, lanes):
            whole = doubled.shuffle(list(range(j, j + lanes))).sext(I32).to_f32()
            _store(k, t, whole * scale, to, i + j)
    return worst.get() >= 0x7F


FIELDS = {"codes": PTR, "codes_row": I64, "scales": PTR, "scales_row": I64, "factor": F32, "flag": PTR}
TABLE_ROW = 32  # bytes of a matrix in a table: codes, codes_row, scales, scales_row


def given(a: Any) -> Matrix:
    """The matrix of a record with FIELDS."""
    return Matrix(*(getattr(a, name) for name in FIELDS))


def listed(k: Kernel, table: Val, factors: Val, flag: Val, index: Val) -> Matrix:
    """A matrix of a table, whose factors are float32 [matrices]."""
    row = table + index * TABLE_ROW
    pointer = [k.load(kind, row, 8 * i, align=8) for i, kind in enumerate((PTR, I64, PTR, I64))]
    return Matrix(*pointer, k.load(F32, factors, index * 4, align=4), flag)


CODECS = {
    codec.name: codec
    for codec in (
        Codec("bfloat16", False, 16, 1, _plain(16)),
        Codec("float32", True, 32, 1, _plain(32)),
        Codec("mxfp8", False, 8, 32, _mxfp8),
        Codec("nvfp4", False, 4, 16, _nvfp4),
    )
}
