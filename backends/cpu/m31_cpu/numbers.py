"""Small number formats in vectors: E4M3, E2M1 and int8, encoded and decoded as `m31.formats` does, bit for bit."""

from __future__ import annotations

from m31_cpu.lang import F32, HALF, I8, I16, I32, Val, vec
from m31_cpu.native import Kernel

_MAGNITUDE = 0x7FFFFFFF
_INFINITE = 0x7F800000
_TWICE = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12]  # 2 * E2M1 by code
_DIGITS = 0xC8643210 - (1 << 32)  # the same, a hexadecimal digit for each of the first eight
# Between two magnitudes of E2M1; where the next code is the even one, it gets what lies exactly between.
_STEPS = ((0.25, False), (0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False))
_WHOLE = 12582912.0  # 1.5 * 2^23: float32 from here on has no fractions


# --- decoding ---


def e4m3(k: Kernel, codes: Val) -> Val:
    """Float32 numbers of bytes; NaN stays NaN."""
    lanes = codes.type.count
    if k.isa.name == "portable":
        return _e4m3_built(codes.zext(I32), lanes)
    # The half-precision number with the same bits is smaller by 2^8; its NaN has more of them.
    bits = (codes.sext(I16) << 7) & -0x4080
    magnitude = bits & 0x3F80
    bits = magnitude.eq(0x3F80).select(bits | 0x7C00, bits)
    return bits.bits(vec(HALF, lanes)).to_f32() * 256.0


def _e4m3_built(wide: Val, lanes: int) -> Val:
    """Without half precision; a subnormal is a normal number minus its leading one."""
    kind = vec(F32, lanes)
    magnitude = wide & 0x7F
    mantissa = magnitude << 20
    normal = (mantissa + (120 << 23)).bits(kind)
    small = (mantissa + (121 << 23)).bits(kind) - 2.0**-6
    value = (magnitude < 8).select(small, normal).bits(vec(I32, lanes))
    value = magnitude.eq(0x7F).select(value | 0x7FC00000, value)
    return (value | ((wide & 0x80) << 24)).bits(kind)


def twice_e2m1(k: Kernel, codes: Val) -> Val:
    """2 * E2M1 as float32, of sixteen bytes that hold a code each."""
    kind = vec(I8, 16)
    look = {"avx512": "llvm.x86.ssse3.pshuf.b.128", "avx2": "llvm.x86.ssse3.pshuf.b.128"}.get(k.isa.name)
    if k.isa.name == "neon":
        look = "llvm.aarch64.neon.tbl1.v16i8"
    if look is not None:
        return k.call(look, kind, k.listed(I8, _TWICE), codes).sext(I32).to_f32()
    wide = codes.zext(I32)
    digits = k.const(vec(I32, 16), _DIGITS)
    value = (digits >> ((wide & 7) << 2)) & 15
    sign = (wide & 8) << 28
    return (value.to_f32().bits(vec(I32, 16)) | sign).bits(vec(F32, 16))


# --- encoding ---


def magnitude(x: Val) -> Val:
    """|x| as bits: ordered as the numbers are, NaN above all."""
    return x.bits(vec(I32, x.type.count)) & _MAGNITUDE


def most(k: Kernel, bits: Val) -> Val:
    """The greatest lane of non-negative int32."""
    count = bits.type.count
    while count > 1:
        upper = count - count // 2  # an odd one is compared with itself
        bits = k.max(bits.shuffle(list(range(upper))), bits.shuffle(list(range(count - upper, count))))
        count = upper
    return bits.lane(0)


def finite_or_nan(k: Kernel, bits: Val) -> Val:
    """The float32 number of a magnitude; of infinity NaN, as the scale of a block that holds it."""
    return (bits >= _INFINITE).select(k.i32(0x7FC00000), bits).bits(F32)


def to_e4m3(k: Kernel, x: Val) -> Val:
    """Bytes of the nearest E4M3 numbers, ties to even, saturating at 448; no -0, NaN is 0x7F."""
    lanes = x.type.count
    whole = x.bits(vec(I32, lanes))
    bits = whole & _MAGNITUDE
    nan = bits > _INFINITE
    bits = k.min(bits, 0x43E00000)  # 448
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - 960
    # Below 2^-6 codes count steps of 2^-9, which are those of float32 at 2^14.
    small = (bits.bits(vec(F32, lanes)) + 16384.0).bits(vec(I32, lanes)) - 0x46800000
    code = (bits < 0x3C800000).select(small, normal)
    code = code.eq(0).select(0, code | ((whole >> 24) & 0x80))
    return nan.select(0x7F, code).trunc(I8)


def to_e2m1(k: Kernel, x: Val) -> Val:
    """Codes (int32) of the nearest E2M1 numbers, ties to the even code, saturating; zero and NaN are code 0."""
    lanes = x.type.count
    size = magnitude(x).bits(vec(F32, lanes))
    code = k.const(vec(I32, lanes), 0)
    for step, even in _STEPS:
        code = code + (size >= step if even else size > step).zext(I32)
    return ((x < 0.0) & code.ne(0)).select(code + 8, code)


def to_int8(k: Kernel, x: Val) -> Val:
    """Bytes of the nearest integers, ties to even, within 127; NaN is 0."""
    lanes = x.type.count
    x = x.nan().select(0.0, x)
    x = (x > 127.0).select(127.0, x)
    x = (x < -127.0).select(-127.0, x)
    return (x + _WHOLE).bits(vec(I32, lanes)).trunc(I8)  # the low byte of the sum's bits is that of the integer
