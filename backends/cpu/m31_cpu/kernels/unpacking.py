"""FP8 and NVFP4 pages (MODEL.md §3.4, §3.5) to panels, exactly: E4M3 and the product of an E2M1 code with its scale
have few enough bits for bfloat16. Keys stay in lanes, values stay token by token. NaN stays NaN."""

from __future__ import annotations

from m31_cpu.lang import F32, HALF, I8, I16, I32, Val, vec
from m31_cpu.native import Kernel

_TWICE = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12]  # 2 * E2M1 by code
_DIGITS = 0xC8643210 - (1 << 32)  # the same, a hexadecimal digit for each of the first eight
GROUP = 16


def e4m3(k: Kernel, codes: Val) -> Val:
    """Float32 numbers of bytes."""
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


def _nibbles(packed: Val) -> tuple[Val, Val]:
    return packed & 15, packed >> 4


def _paired(even: Val, odd: Val) -> Val:
    """Two float32 numbers that are bfloat16 numbers, as a pair."""
    kind = vec(I32, even.type.count)
    return (even.bits(kind) >> 16) | (odd.bits(kind) & -65536)


def keys_of(k: Kernel, form: str, dots: bool, dim: int, pages: tuple[Val, Val], to: Val, groups: Val) -> None:
    """The first groups of 16 keys of a head's page.

    Args:
        form: fp8 or nvfp4.
        dots: written are pairs [groups, dim / 2, 16, 2] of bfloat16, else float32 [groups, dim, 16].
        dim: channels.
        pages: codes and, for nvfp4, scales.
        to: where to.
        groups: how many.
    """

    def put(first: Val, second: Val, at: Val) -> None:
        if dots:
            k.store(_paired(first, second), at, align=4)
        else:
            k.store(first, at, align=4)
            k.store(second, at, 64, align=4)

    codes, scales = pages
    size = 32 if dots else 64  # bytes of a channel of a group
    if form == "fp8":
        for i in k.range(groups * (dim // 2)):
            first, second = (e4m3(k, k.load(vec(I8, 16), codes + i * 32, 16 * x)) for x in range(2))
            put(first, second, to + i * (2 * size))
        if dim % 2:
            raise AssertionError("pairs of channels")
        return
    for i in k.range(groups * (dim // GROUP)):
        scale = e4m3(k, k.load(vec(I8, 16), scales + i * 16)) * 0.5
        at = to + i * (GROUP * size)
        for j in range(GROUP // 2):
            low, high = _nibbles(k.load(vec(I8, 16), codes + i * 128, 16 * j))
            put(twice_e2m1(k, low) * scale, twice_e2m1(k, high) * scale, at + 2 * j * size)


def values_of(k: Kernel, form: str, dots: bool, dim: int, pages: tuple[Val, Val], to: Val, tokens: Val) -> None:
    """The first values of a head's page: pairs [tokens / 2, dim, 2] of bfloat16 for `dots`, with something behind an
    odd number of tokens, else float32 [tokens, dim]. Arguments as in `keys_of`."""
    codes, scales = pages
    row, row_scales = (dim, 0) if form == "fp8" else (dim // 2, dim // GROUP)

    def vector(token: Val, c: int, lanes: int) -> Val:
        if form == "fp8":
            return e4m3(k, k.load(vec(I8, lanes), codes + token * row, c))
        low, high = _nibbles(k.load(vec(I8, 8), codes + token * row, c // 2))
        both = low.shuffle([x for i in range(8) for x in (i, 8 + i)], high)
        scale = e4m3(k, k.load(vec(I8, 1), scales + token * row_scales, c // GROUP)) * 0.5
        return twice_e2m1(k, both) * scale.lane(0).splat(16)

    pieces = [(c, min(16, dim - c)) for c in range(0, dim, 16)]
    if not dots:
        for token in k.range(tokens):
            for c, lanes in pieces:
                k.store(vector(token, c, lanes), to + token * (4 * dim), 4 * c, align=4)
        return
    for pair in k.range(tokens // 2):
        for c, lanes in pieces:
            first, second = (vector(pair * 2 + x, c, lanes) for x in range(2))
            k.store(_paired(first, second), to + pair * (4 * dim), 4 * c, align=4)
    with k.when((tokens % 2).ne(0)):
        token = tokens - 1
        for c, lanes in pieces:
            one = vector(token, c, lanes)
            k.store(_paired(one, one), to + (token // 2) * (4 * dim), 4 * c, align=4)
