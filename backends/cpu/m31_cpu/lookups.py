"""Codes of few bits as numbers: tables for byte shuffles, arithmetic on the bits of floats (MODEL.md §3.1, §3.2)."""

from __future__ import annotations

from collections.abc import Sequence

from m31_cpu.lang import F32, HALF, I8, I16, I32, Val, vec
from m31_cpu.native import Kernel

# E2M1 by code as bfloat16, 16 bits each.
E2M1 = [0x0000, 0x3F00, 0x3F80, 0x3FC0, 0x4000, 0x4040, 0x4080, 0x40C0]
E2M1 += [0x8000 | bits for bits in E2M1]


def e4m3_bits(code: int) -> int:
    """E4M3 (without sign) as bfloat16 bits; the last code is NaN."""
    exponent, mantissa = code >> 3, code & 7
    if code == 0x7F:
        return 0x7FC0
    if exponent:
        return (exponent + 120) << 7 | mantissa << 4
    if not mantissa:
        return 0
    top = mantissa.bit_length() - 1
    return (118 + top) << 7 | (mantissa << (7 - top)) & 0x7F


E4M3 = [e4m3_bits(code) for code in range(128)]


def table(k: Kernel, values: Sequence[int], width: int) -> Val:
    """A table of 16 bytes, once in each 16 bytes of a vector."""
    return k.listed(I8, list(values) * (width // 16))


def look_up(k: Kernel, values: Sequence[int], codes: Val) -> Val:
    """values[code] of bytes from 0 to 15."""
    kind, width = codes.type, codes.type.count
    held = table(k, values, width)
    if k.isa.name == "neon":
        return k.call("llvm.aarch64.neon.tbl1.v16i8", kind, held, codes)
    name = {16: "llvm.x86.ssse3.pshuf.b.128", 32: "llvm.x86.avx2.pshuf.b", 64: "llvm.x86.avx512.pshuf.b.512"}[width]
    return k.call(name, kind, held, codes)


def interleaved(low: Val, high: Val, upper: int) -> Val:
    """Bytes of two vectors in turn: of each 16, the first eight (upper 0) or the last (upper 1)."""
    width = low.type.count
    picks = [p for q in range(0, width, 16) for i in range(8) for p in (q + 8 * upper + i, width + q + 8 * upper + i)]
    return low.shuffle(picks, high)


def split(pairs: Val) -> list[Val]:
    """The first and second bfloat16 of each pair as float32."""
    kind = vec(F32, pairs.type.count)
    return [(pairs << 16).bits(kind), (pairs & -65536).bits(kind)]


def small_floats(codes: Val, exponent: int, mantissa: int, bias: int) -> Val:
    """Numbers without sign (int32 lanes) of a format with few mantissa bits as float32, by integer arithmetic alone; a
    subnormal is a normal number minus its leading one. `bias` is what its exponents are increased by."""
    kind = vec(F32, codes.type.count)
    bits = codes << (23 - mantissa)
    normal = (bits + (bias << 23)).bits(kind)
    small = (bits + ((bias + 1) << 23)).bits(kind) - 2.0 ** (bias + 1 - 127)
    return (codes < (1 << mantissa)).select(small, normal)


def e4m3_scales(k: Kernel, codes: Val) -> Val:
    """E4M3 without sign as float32 times 2^-8: the half-precision number with the same bits."""
    if k.isa.name == "portable":
        return small_floats(codes.zext(I32), 4, 3, 120 - 8)
    return (codes.zext(I16) << 7).bits(vec(HALF, codes.type.count)).to_f32()


def bytes_bad(word: Val) -> Val:
    """Bit 7 of some byte is set exactly if a byte is 0x7F or more (a carry only leaves a bad byte)."""
    ones = int.from_bytes(b"\1" * (word.type.width // 8), "little")
    return word | (word + ones)


def signed16(value: int) -> int:
    return value - 65536 if value >= 32768 else value


def e2m1_pairs(k: Kernel, raw: Val) -> list[Val]:
    """Packed E2M1 as pairs of bfloat16 in int32: bytes 0 to 7 of each 16, first their low halves, then the high ones;
    bytes 8 to 15 likewise."""
    tables = [[v >> shift & 255 for v in E2M1] for shift in (0, 8)]
    looked = [[look_up(k, table, codes) for table in tables] for codes in (raw & 15, raw >> 4)]
    kind = vec(I32, raw.type.count // 4)
    return [interleaved(*both, u).bits(kind) for u in range(2) for both in looked]


def e2m1(k: Kernel, codes: Val) -> Val:
    """E2M1 in the low four bits of int32 lanes as float32, by arithmetic."""
    kind = vec(F32, codes.type.count)
    value = small_floats(codes & 7, 2, 1, 126)
    return (value.bits(codes.type) | ((codes & 8) << 28)).bits(kind)


def e8m0(k: Kernel, codes: Val) -> Val:
    """2^(s - 127); the least is subnormal, NaN becomes infinity."""
    lanes = codes.type.count
    return k.binary("smax", codes.zext(I32) << 23, 0x00400000).bits(vec(F32, lanes))


def e4m3_pairs(k: Kernel, raw: Val) -> list[Val]:
    """64 codes as pairs of bfloat16: bytes 0 to 7 of each 16, and bytes 8 to 15."""
    parts = []
    for shift in (0, 8):
        tables = [k.listed(I8, [E4M3[i] >> shift & 255 for i in range(n, n + 64)]) for n in (0, 64)]
        parts.append(k.call("llvm.x86.avx512.vpermi2var.qi.512", raw.type, tables[0], raw, tables[1]))
    low, high = parts[0], parts[1] | (raw & -128)
    return [interleaved(low, high, u).bits(vec(I32, 16)) for u in range(2)]


def e4m3(k: Kernel, raw: Val) -> list[Val]:
    """Codes as float32 times 2^-8, in their order: four vectors of the instruction set."""
    lanes, width = k.isa.lanes, raw.type.count
    if k.isa.name == "portable":
        out = []
        for part in range(0, width, lanes):
            codes = raw.shuffle(list(range(part, part + lanes))).zext(I32)
            value = small_floats(codes & 0x7F, 4, 3, 120 - 8)
            out.append((value.bits(codes.type) | ((codes & 0x80) << 24)).bits(value.type))
        return out
    halves = [e4m3_halves(raw, u) for u in range(2)]
    if lanes == 8:
        parts = [(u, q) for q in range(2) for u in range(2)]
        return [halves[u].shuffle(list(range(8 * q, 8 * q + 8))).to_f32() for u, q in parts]
    both = [half.to_f32() for half in halves]
    return [both[u].shuffle(list(range(4 * p, 4 * p + 4))) for u in range(2) for p in range(2)]


def e4m3_halves(raw: Val, upper: int) -> Val:
    """Half-precision numbers with the bits of codes: sign, then everything else one place further down."""
    width = raw.type.count
    words = interleaved(raw ^ raw, raw, upper).bits(vec(I16, width // 2))
    return (words.sar(1) & -16385).bits(vec(HALF, width // 2))


def e4m3_sixteen(k: Kernel, raw: Val) -> Val:
    """Sixteen codes as float32, times 2^-8."""
    words = raw.zext(I16) << 8
    return (words.sar(1) & -16385).bits(vec(HALF, 16)).to_f32()
