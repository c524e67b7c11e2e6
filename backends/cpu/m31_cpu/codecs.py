"""Stored weights become numbers in registers: NVFP4, MXFP8, BF16 and float32 (MODEL.md §3.1, §3.2).

Two uses. `chunk` decodes 128 columns of a row for dot products: in whatever order of columns is cheapest, the same for
every chunk (`order`), into which inputs are put once. Its vectors come in runs; the products of a run are summed before
they are multiplied with the run's block scales, lane by lane. `row` decodes columns in their own order into memory.

Codes are decoded exactly: E2M1 has two significant bits, E4M3 four, their products six, so that bfloat16 holds them as
well. Numbers are too small by the constant `2^-shift` where block scales or codes are read as half precision; the
matrix's factor makes up for it, together with the global scale.

Whatever is damaged is noticed: NaN or a sign in an E4M3 scale and NaN in an E4M3 code are looked for; everything else
that is not finite (BF16, float32, E8M0) makes sums that are not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from llvmlite import ir

from m31_cpu.codec import CHUNK, DAMAGED, INFINITE, TABLE_ROW, Chunk, Codec, Matrix, Run, note
from m31_cpu.isa import Isa
from m31_cpu.lang import F32, HALF, I8, I16, I32, I64, Val, vec
from m31_cpu.native import Kernel
from m31_cpu.simd import splat, strips, wide

# E2M1 by code as bfloat16, 16 bits each.
_E2M1 = [0x0000, 0x3F00, 0x3F80, 0x3FC0, 0x4000, 0x4040, 0x4080, 0x40C0]
_E2M1 += [0x8000 | bits for bits in _E2M1]


def _e4m3_bits(code: int) -> int:
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


_E4M3 = [_e4m3_bits(code) for code in range(128)]


# --- pieces ---


def _table(k: Kernel, values: Sequence[int], width: int) -> Val:
    """A table of 16 bytes, once in each 16 bytes of a vector."""
    return k.listed(I8, list(values) * (width // 16))


def _look_up(k: Kernel, values: Sequence[int], codes: Val) -> Val:
    """values[code] of bytes from 0 to 15."""
    kind, width = codes.type, codes.type.count
    table = _table(k, values, width)
    if k.isa.name == "neon":
        return k.call("llvm.aarch64.neon.tbl1.v16i8", kind, table, codes)
    name = {16: "llvm.x86.ssse3.pshuf.b.128", 32: "llvm.x86.avx2.pshuf.b", 64: "llvm.x86.avx512.pshuf.b.512"}[width]
    return k.call(name, kind, table, codes)


def _interleaved(low: Val, high: Val, upper: int) -> Val:
    """Bytes of two vectors in turn: of each 16, the first eight (upper 0) or the last (upper 1)."""
    width = low.type.count
    picks = [p for q in range(0, width, 16) for i in range(8) for p in (q + 8 * upper + i, width + q + 8 * upper + i)]
    return low.shuffle(picks, high)


def _split(pairs: Val) -> list[Val]:
    """The first and second bfloat16 of each pair as float32."""
    kind = vec(F32, pairs.type.count)
    return [(pairs << 16).bits(kind), (pairs & -65536).bits(kind)]


def _small_floats(codes: Val, exponent: int, mantissa: int, bias: int) -> Val:
    """Numbers without sign (int32 lanes) of a format with few mantissa bits as float32, by integer arithmetic alone; a
    subnormal is a normal number minus its leading one. `bias` is what its exponents are increased by."""
    kind = vec(F32, codes.type.count)
    bits = codes << (23 - mantissa)
    normal = (bits + (bias << 23)).bits(kind)
    small = (bits + ((bias + 1) << 23)).bits(kind) - 2.0 ** (bias + 1 - 127)
    return (codes < (1 << mantissa)).select(small, normal)


def _e4m3_scales(k: Kernel, codes: Val) -> Val:
    """E4M3 without sign as float32 times 2^-8: the half-precision number with the same bits."""
    if k.isa.name == "portable":
        return _small_floats(codes.zext(I32), 4, 3, 120 - 8)
    return (codes.zext(I16) << 7).bits(vec(HALF, codes.type.count)).to_f32()


def _bytes_bad(word: Val) -> Val:
    """Bit 7 of some byte is set exactly if a byte is 0x7F or more (a carry only leaves a bad byte)."""
    ones = int.from_bytes(b"\1" * (word.type.width // 8), "little")
    return word | (word + ones)


# --- NVFP4 ---


class Nvfp4(Codec):
    """E2M1 codes, two a byte, the even column in the low half; E4M3 scales of 16 columns; a global encode scale."""

    name, bits, group = "nvfp4", 4, 16

    def shift(self, isa: Isa) -> int:
        """See `Codec.shift`."""
        return 8

    def order(self, isa: Isa) -> list[int]:
        """See `Codec.order`."""
        if isa.dots:
            return [16 * g + 4 * j + i for j in range(4) for g in range(8) for i in range(4)]
        if isa.name == "portable":
            return [32 * p + 8 * lane + j for p in range(4) for j in range(8) for lane in range(4)]
        if isa.lanes == 8:  # the middle words of each 16 bytes change places, see `chunk`
            places = [0, 1, 2, 3, 8, 9, 10, 11, 4, 5, 6, 7, 12, 13, 14, 15]
            return [
                64 * a + 2 * (16 * q + places[8 * u + 2 * lane + odd]) + nibble
                for a in range(2)
                for u in range(2)
                for nibble in range(2)
                for odd in range(2)
                for q in range(2)
                for lane in range(4)
            ]
        return [
            32 * p + 2 * (8 * u + 2 * lane + odd) + nibble
            for p in range(4)
            for u in range(2)
            for nibble in range(2)
            for odd in range(2)
            for lane in range(4)
        ]

    def chunk(self, k: Kernel, w: Val, s: Val) -> Chunk:
        """See `Codec.chunk`."""
        bad = _bytes_bad(k.load(I64, s))
        codes = k.load(vec(I8, 8), s)
        make = {"avx512": self._dots, "portable": self._portable, "avx2": self._avx2}.get(k.isa.name, self._looked_up)
        return Chunk(make(k, w, codes), bad)

    def sound(self, k: Kernel) -> Val | None:
        """See `Codec.sound`."""
        return k.i64(0)

    def damaged(self, k: Kernel, bad: Val) -> Val:
        """See `Codec.damaged`."""
        ones = int.from_bytes(b"\x80" * (bad.type.width // 8), "little", signed=True)
        return (bad & ones).ne(0)

    def _dots(self, k: Kernel, w: Val, s: Val) -> list[Run]:
        """Eight bytes are a group: four of its codes at a time are moved to the low ends of four words, whose higher
        bits the table ignores by holding everything twice."""
        raw, table = k.load(vec(I8, 64), w), k.listed(I16, [_signed16(v) for v in _E2M1 * 2])
        vectors = []
        for j in range(4):
            where = k.listed(I8, [16 * j + 4 * i for i in range(4) for _ in range(2)] * 8)
            index = k.call("llvm.x86.avx512.pmultishift.qb.512", raw.type, where, raw).bits(table.type)
            vectors.append(k.call("llvm.x86.avx512.permvar.hi.512", table.type, table, index).bits(vec(I32, 16)))
        return [Run(vectors, _e4m3_scales(k, s.shuffle([lane // 2 for lane in range(16)])))]

    def _avx2(self, k: Kernel, w: Val, s: Val) -> list[Run]:
        """32 bytes at a time; words change places so that two lanes belong to a group in all eight vectors."""
        scales = _e4m3_scales(k, s.shuffle([0, 1, 4, 5, 2, 3, 6, 7]))
        runs = []
        for a in range(2):
            raw = k.load(vec(I32, 8), w, 32 * a).shuffle([0, 2, 1, 3, 4, 6, 5, 7]).bits(vec(I8, 32))
            vectors = [v for pairs in _e2m1_pairs(k, raw) for v in _split(pairs)]
            picks = [2 * a, 2 * a, 2 * a + 1, 2 * a + 1]
            scale = scales.shuffle(picks + [4 + p for p in picks])
            runs += [Run(vectors[:4], scale), Run(vectors[4:], scale)]  # long chains of sums would wait for themselves
        return runs

    def _looked_up(self, k: Kernel, w: Val, s: Val) -> list[Run]:
        scales, runs = _e4m3_scales(k, s), []
        for p in range(4):
            pairs = _e2m1_pairs(k, k.load(vec(I8, 16), w, 16 * p))
            for u in range(2):
                vectors = [v for two in pairs[2 * u : 2 * u + 2] for v in _split(two)]
                runs.append(Run(vectors, scales.shuffle([2 * p + u] * 4)))
        return runs

    def _portable(self, k: Kernel, w: Val, s: Val) -> list[Run]:
        runs = []
        for p in range(4):
            words = k.load(vec(I32, 4), w, 16 * p)
            vectors = [_e2m1(k, words >> (4 * j) if j else words) for j in range(8)]
            scale = _e4m3_scales(k, s.shuffle([2 * p, 2 * p, 2 * p + 1, 2 * p + 1]))
            runs.append(Run(vectors, scale))
        return runs

    def _row(self, k: Kernel, pairs: bool, m: Matrix, w: Val, s: Val, width: Val, to: Val) -> None:
        bad = k.var(k.const(I8, 0))
        for i in k.range(0, width // self.group):
            code = k.load(I8, s, i)
            bad.set(bad.get() | _bytes_bad(code))
            scale = _e4m3_scales(k, splat(code, 8)).shuffle([0] * 16)
            raw = k.load(vec(I8, 8), w, i * 8)
            value = self._sixteen(k, raw) * scale
            store = (value.bits(vec(I32, 16)) >> 16).trunc(I16) if pairs else value
            k.store(store, to, i * (32 if pairs else 64), align=4)
        note(k, m.flag, self.damaged(k, bad.get()), DAMAGED)

    def _sixteen(self, k: Kernel, raw: Val) -> Val:
        """Sixteen columns of eight bytes, in their order."""
        low, high = raw & 15, raw >> 4
        codes = low.shuffle([p for i in range(8) for p in (i, 8 + i)], high)
        if k.isa.name == "portable":
            return _e2m1(k, codes.zext(I32))
        words = [_look_up(k, [v >> shift & 255 for v in _E2M1], codes) for shift in (0, 8)]
        picks = [p for i in range(16) for p in (i, 16 + i)]
        return wide(words[0].shuffle(picks, words[1]).bits(vec(I16, 16)))


def _signed16(value: int) -> int:
    return value - 65536 if value >= 32768 else value


def _e2m1_pairs(k: Kernel, raw: Val) -> list[Val]:
    """Packed E2M1 as pairs of bfloat16 in int32: bytes 0 to 7 of each 16, first their low halves, then the high ones;
    bytes 8 to 15 likewise."""
    tables = [[v >> shift & 255 for v in _E2M1] for shift in (0, 8)]
    looked = [[_look_up(k, table, codes) for table in tables] for codes in (raw & 15, raw >> 4)]
    kind = vec(I32, raw.type.count // 4)
    return [_interleaved(both[0], both[1], u).bits(kind) for u in range(2) for both in looked]


def _e2m1(k: Kernel, codes: Val) -> Val:
    """E2M1 in the low four bits of int32 lanes as float32, by arithmetic."""
    kind = vec(F32, codes.type.count)
    value = _small_floats(codes & 7, 2, 1, 126)
    return (value.bits(codes.type) | ((codes & 8) << 28)).bits(kind)


# --- MXFP8 ---


class Mxfp8(Codec):
    """E4M3 codes, E8M0 scales of 32 columns."""

    name, bits, group = "mxfp8", 8, 32

    def shift(self, isa: Isa) -> int:
        """See `Codec.shift`."""
        return 0 if isa.dots else 8

    def order(self, isa: Isa) -> list[int]:
        """See `Codec.order`."""
        if not isa.dots:
            return list(range(CHUNK))
        return [64 * h + 16 * q + 8 * u + i for h in range(2) for u in range(2) for q in range(4) for i in range(8)]

    def chunk(self, k: Kernel, w: Val, s: Val) -> Chunk:
        """See `Codec.chunk`."""
        scales = _e8m0(k, k.load(vec(I8, 4), s))
        if k.isa.dots:
            runs = []
            for h in range(2):
                scale = scales.shuffle([2 * h] * 8 + [2 * h + 1] * 8)
                runs.append(Run(_e4m3_pairs(k, k.load(vec(I8, 64), w, 64 * h)), scale))
            return Chunk(runs, None)
        runs, bad = [], None
        width = 4 * k.isa.lanes  # bytes
        for block in range(4):
            vectors = []
            for part in range(0, 32, width):
                raw = k.load(vec(I8, width), w, 32 * block + part)
                worst = raw & 0x7F
                bad = worst if bad is None else self.worse(k, bad, worst)
                vectors += _e4m3(k, raw)
            runs.append(Run(vectors, scales.shuffle([block] * k.isa.lanes)))
        return Chunk(runs, bad)

    def sound(self, k: Kernel) -> Val | None:
        """See `Codec.sound`."""
        return None if k.isa.dots else k.const(vec(I8, 4 * k.isa.lanes), 0)

    def worse(self, k: Kernel, x: Val, y: Val) -> Val:
        """See `Codec.worse`: the greatest code without its sign."""
        return k.binary("umax", x, y)

    def damaged(self, k: Kernel, bad: Val) -> Val:
        """See `Codec.damaged`."""
        lanes = bad.type.count // 8
        words = (bad + 1).bits(vec(I64, lanes))
        word = words.lane(0)
        for lane in range(1, lanes):
            word = word | words.lane(lane)
        return (word & int.from_bytes(b"\x80" * 8, "little", signed=True)).ne(0)

    def _row(self, k: Kernel, pairs: bool, m: Matrix, w: Val, s: Val, width: Val, to: Val) -> None:
        kind = vec(I8, 32)
        bad = k.var(k.const(kind, 0))
        for i in k.range(0, width // self.group):
            raw = k.load(kind, w, i * 32)
            bad.set(self.worse(k, bad.get(), raw & 0x7F))
            code = k.load(I8, s, i)
            scale = _e8m0(k, splat(code, 8))
            with k.when(code.eq(-1)):
                bad.set(k.const(kind, 0x7F))
            if k.isa.dots:
                for part in range(2):
                    value = _e4m3_sixteen(k, raw.shuffle(list(range(16 * part, 16 * part + 16)))) * 2.0**8
                    self._put(k, pairs, value * scale.shuffle([0] * 16), to, i * 32 + 16 * part)
                continue
            step = 4 * k.isa.lanes
            at = 0
            for part in range(0, 32, step):
                for value in _e4m3(k, raw.shuffle(list(range(part, part + step)))):
                    lanes = value.type.count
                    self._put(k, pairs, value * scale.shuffle([0] * lanes), to, i * 32 + at)
                    at += lanes
        note(k, m.flag, self.damaged(k, bad.get()), DAMAGED)

    def _put(self, k: Kernel, pairs: bool, value: Val, to: Val, column: Val) -> None:
        if pairs:
            k.store((value.bits(vec(I32, value.type.count)) >> 16).trunc(I16), to, column * 2, align=2)
        else:
            k.store(value, to, column * 4, align=4)


def _e8m0(k: Kernel, codes: Val) -> Val:
    """2^(s - 127); the least is subnormal, NaN becomes infinity."""
    lanes = codes.type.count
    return k.binary("smax", codes.zext(I32) << 23, 0x00400000).bits(vec(F32, lanes))


def _e4m3_pairs(k: Kernel, raw: Val) -> list[Val]:
    """64 codes as pairs of bfloat16: bytes 0 to 7 of each 16, and bytes 8 to 15."""
    parts = []
    for shift in (0, 8):
        tables = [k.listed(I8, [_E4M3[i] >> shift & 255 for i in range(n, n + 64)]) for n in (0, 64)]
        parts.append(k.call("llvm.x86.avx512.vpermi2var.qi.512", raw.type, tables[0], raw, tables[1]))
    low, high = parts[0], parts[1] | (raw & -128)
    return [_interleaved(low, high, u).bits(vec(I32, 16)) for u in range(2)]


def _e4m3(k: Kernel, raw: Val) -> list[Val]:
    """Codes as float32 times 2^-8, in their order: four vectors of the instruction set."""
    lanes, width = k.isa.lanes, raw.type.count
    if k.isa.name == "portable":
        out = []
        for part in range(0, width, lanes):
            codes = raw.shuffle(list(range(part, part + lanes))).zext(I32)
            value = _small_floats(codes & 0x7F, 4, 3, 120 - 8)
            out.append((value.bits(codes.type) | ((codes & 0x80) << 24)).bits(value.type))
        return out
    halves = [_e4m3_halves(raw, u) for u in range(2)]
    if lanes == 8:
        parts = [(u, q) for q in range(2) for u in range(2)]
        return [halves[u].shuffle(list(range(8 * q, 8 * q + 8))).to_f32() for u, q in parts]
    both = [half.to_f32() for half in halves]
    return [both[u].shuffle(list(range(4 * p, 4 * p + 4))) for u in range(2) for p in range(2)]


def _e4m3_halves(raw: Val, upper: int) -> Val:
    """Half-precision numbers with the bits of codes: sign, then everything else one place further down."""
    width = raw.type.count
    words = _interleaved(raw ^ raw, raw, upper).bits(vec(I16, width // 2))
    return (words.sar(1) & -16385).bits(vec(HALF, width // 2))


def _e4m3_sixteen(k: Kernel, raw: Val) -> Val:
    """Sixteen codes as float32, times 2^-8."""
    words = raw.zext(I16) << 8
    return (words.sar(1) & -16385).bits(vec(HALF, 16)).to_f32()


# --- BF16 and float32 ---


class Bfloat16(Codec):
    """As they are."""

    name, bits = "bfloat16", 16

    def order(self, isa: Isa) -> list[int]:
        """See `Codec.order`."""
        if isa.dots:
            return list(range(CHUNK))
        step = 2 * isa.lanes
        return [at + 2 * lane + odd for at in range(0, CHUNK, step) for odd in range(2) for lane in range(isa.lanes)]

    def chunk(self, k: Kernel, w: Val, s: Val) -> Chunk:
        """See `Codec.chunk`."""
        lanes = k.isa.lanes
        pairs = [k.load(vec(I32, lanes), w, at) for at in range(0, self.chunk_bytes, 4 * lanes)]
        vectors = pairs if k.isa.dots else [v for pair in pairs for v in _split(pair)]
        return Chunk([Run(vectors[at : at + 4], None) for at in range(0, len(vectors), 4)], None)

    def _row(self, k: Kernel, pairs: bool, m: Matrix, w: Val, s: Val, width: Val, to: Val) -> None:
        def take(lanes: int, i: Val) -> Val:
            bits = k.load(vec(I16, lanes), w, i * 2, align=1)
            k.store(bits if pairs else wide(bits), to, i * (2 if pairs else 4), align=2)
            return bits

        _watch(k, m, width, I16, 0x7F80, take)


class Float32(Codec):
    """As they are; never rounded."""

    name, bits, exact = "float32", 32, True

    def order(self, isa: Isa) -> list[int]:
        """See `Codec.order`."""
        return list(range(CHUNK))

    def chunk(self, k: Kernel, w: Val, s: Val) -> Chunk:
        """See `Codec.chunk`."""
        lanes = k.isa.lanes
        vectors = [k.load(vec(F32, lanes), w, 4 * at) for at in range(0, CHUNK, lanes)]
        return Chunk([Run(vectors[at : at + 4], None) for at in range(0, len(vectors), 4)], None)

    def _row(self, k: Kernel, pairs: bool, m: Matrix, w: Val, s: Val, width: Val, to: Val) -> None:
        def take(lanes: int, i: Val) -> Val:
            bits = k.load(vec(I32, lanes), w, i * 4, align=1)
            k.store(bits, to, i * 4, align=4)
            return bits

        _watch(k, m, width, I32, 0x7F800000, take)


def _watch(k: Kernel, m: Matrix, width: Val, kind: Any, exponent: int, take: Callable[[int, Val], Val]) -> None:
    """`take(lanes, i)` for all columns; damage is noted if an exponent is all ones in the bits that it returns."""
    sign, unit = 1 << (kind.width - 1), exponent & -exponent
    bad = {lanes: k.var(k.const(vec(kind, lanes), 0)) for lanes in (k.isa.lanes, 1)}
    for lanes, i in strips(k, width):
        # An exponent of all ones carries into the sign, which was masked away.
        bad[lanes].set(bad[lanes].get() | ((take(lanes, i) & exponent) + unit))
    for lanes, found in bad.items():
        whole = (found.get() & -sign).bits(ir.IntType(lanes * kind.width))
        note(k, m.flag, whole.ne(0), DAMAGED)


CODECS: Mapping[str, Codec] = {codec.name: codec for codec in (Nvfp4(), Mxfp8(), Bfloat16(), Float32())}
__all__ = ["CHUNK", "CODECS", "DAMAGED", "INFINITE", "TABLE_ROW", "Chunk", "Codec", "Matrix", "Run", "note"]
