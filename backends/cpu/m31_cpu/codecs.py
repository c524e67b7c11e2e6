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

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from llvmlite import ir

from m31_cpu.isa import Isa
from m31_cpu.lang import F32, I8, I16, I32, I64, PTR, Val, vec
from m31_cpu.lookups import (
    E2M1,
    bytes_bad,
    e2m1,
    e2m1_pairs,
    e4m3,
    e4m3_pairs,
    e4m3_scales,
    e4m3_sixteen,
    e8m0,
    look_up,
    signed16,
    split,
)
from m31_cpu.native import Kernel
from m31_cpu.simd import splat, strips, wide

CHUNK = 128
TABLE_ROW = 48
"""Bytes of a matrix in a table: addresses of codes and scales with the bytes from row to row, the factor (float32), the
address of an int64 in which damage is noted."""
DAMAGED, INFINITE = 1, 2
"""What is noted: a weight that no encoder writes; a sum that is not finite, for which an input may be the cause."""


@dataclass(frozen=True)
class Matrix:
    """A stored matrix, as values of a kernel; see `TABLE_ROW`."""

    codes: Val
    stride: Val
    scales: Val
    scale_stride: Val
    factor: Val
    flag: Val


@dataclass(frozen=True)
class Run:
    """Vectors whose products are summed and then multiplied with `scale`, if there is one."""

    vectors: list[Val]
    scale: Val | None


@dataclass(frozen=True)
class Chunk:
    """Decoded columns.

    Args:
        runs: in order.
        bad: to be gathered with `Codec.worse`; None if there is nothing to look for.
    """

    runs: list[Run]
    bad: Val | None


class Codec(ABC):
    """A way of storing a matrix.

    Attributes:
        name: as in `TensorDecl.stored`.
        bits: of a code.
        group: columns that share a block scale; 0 without scales.
        exact: numbers that bfloat16 does not hold.
        fields: what `matrix` reads.
    """

    name: ClassVar[str]
    bits: ClassVar[int]
    group: ClassVar[int] = 0
    exact: ClassVar[bool] = False
    fields: ClassVar[Mapping[str, Any]] = {"table": PTR}

    def matrix(self, k: Kernel, a: Any, index: Val | int = 0) -> Matrix:
        """The matrix in row `index` of the table at `a.table`."""
        at = a.table + index * TABLE_ROW
        kinds = (PTR, I64, PTR, I64, F32, PTR)
        return Matrix(*(k.load(kind, at, 8 * i, align=8) for i, kind in enumerate(kinds)))

    def scale(self, k: Kernel, a: Any) -> Val:
        """The factor of the first matrix of a table."""
        return self.matrix(k, a).factor

    def pairs(self, isa: Isa) -> bool:
        """Whether vectors of a chunk are pairs of bfloat16 numbers, in int32."""
        return isa.dots and not self.exact

    @property
    def chunk_bytes(self) -> int:
        """Codes of a chunk."""
        return CHUNK * self.bits // 8

    @property
    def scale_bytes(self) -> int:
        """Scales of a chunk."""
        return CHUNK // self.group if self.group else 0

    def shift(self, isa: Isa) -> int:
        """Decoded numbers are too small by 2^-shift."""
        return 0

    @abstractmethod
    def order(self, isa: Isa) -> list[int]:
        """The column in each place of a chunk, its vectors one after the other."""

    @abstractmethod
    def chunk(self, k: Kernel, w: Val, s: Val) -> Chunk:
        """128 columns of a row, from codes at w and scales at s."""

    def sound(self, k: Kernel) -> Val | None:
        """What `Chunk.bad` is if nothing is; None if there is nothing to look for."""
        return None

    def worse(self, k: Kernel, x: Val, y: Val) -> Val:
        """What is bad in either of two chunks."""
        return x | y

    def damaged(self, k: Kernel, bad: Val) -> Val:
        """Whether what was gathered says that something is (int1)."""
        raise AssertionError(f"nothing is looked for in {self.name}")

    def row(self, k: Kernel, t: Any, m: Matrix, row: Val, first: Val, width: Val, to: Val) -> None:
        """Decode `width` columns of a row from column `first` on, a multiple of `group` both, and note damage.

        Args:
            t: `t.pairs`: write bfloat16, else float32.
            to: where they go, in their order.
        """
        w = m.codes + row * m.stride + first * self.bits // 8
        s = m.scales + row * m.scale_stride + first // self.group if self.group else m.scales
        self._row(k, t.pairs, m, w, s, width, to)

    @abstractmethod
    def _row(self, k: Kernel, pairs: bool, m: Matrix, w: Val, s: Val, width: Val, to: Val) -> None:
        """`row` at these addresses."""


def note(k: Kernel, flag: Val, condition: Val, what: int) -> None:
    """Note damage where the condition holds."""
    with k.when(condition):
        k.atomic("or", flag, what, "monotonic")


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
        bad = bytes_bad(k.load(I64, s))
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
        raw, table = k.load(vec(I8, 64), w), k.listed(I16, [signed16(v) for v in E2M1 * 2])
        vectors = []
        for j in range(4):
            where = k.listed(I8, [16 * j + 4 * i for i in range(4) for _ in range(2)] * 8)
            index = k.call("llvm.x86.avx512.pmultishift.qb.512", raw.type, where, raw).bits(table.type)
            vectors.append(k.call("llvm.x86.avx512.permvar.hi.512", table.type, table, index).bits(vec(I32, 16)))
        return [Run(vectors, e4m3_scales(k, s.shuffle([lane // 2 for lane in range(16)])))]

    def _avx2(self, k: Kernel, w: Val, s: Val) -> list[Run]:
        """32 bytes at a time; words change places so that two lanes belong to a group in all eight vectors."""
        scales = e4m3_scales(k, s.shuffle([0, 1, 4, 5, 2, 3, 6, 7]))
        runs = []
        for a in range(2):
            raw = k.load(vec(I32, 8), w, 32 * a).shuffle([0, 2, 1, 3, 4, 6, 5, 7]).bits(vec(I8, 32))
            vectors = [v for pairs in e2m1_pairs(k, raw) for v in split(pairs)]
            picks = [2 * a, 2 * a, 2 * a + 1, 2 * a + 1]
            scale = scales.shuffle(picks + [4 + p for p in picks])
            runs += [Run(vectors[:4], scale), Run(vectors[4:], scale)]  # long chains of sums would wait for themselves
        return runs

    def _looked_up(self, k: Kernel, w: Val, s: Val) -> list[Run]:
        scales, runs = e4m3_scales(k, s), []
        for p in range(4):
            pairs = e2m1_pairs(k, k.load(vec(I8, 16), w, 16 * p))
            for u in range(2):
                vectors = [v for two in pairs[2 * u : 2 * u + 2] for v in split(two)]
                runs.append(Run(vectors, scales.shuffle([2 * p + u] * 4)))
        return runs

    def _portable(self, k: Kernel, w: Val, s: Val) -> list[Run]:
        runs = []
        for p in range(4):
            words = k.load(vec(I32, 4), w, 16 * p)
            vectors = [e2m1(k, words >> (4 * j) if j else words) for j in range(8)]
            scale = e4m3_scales(k, s.shuffle([2 * p, 2 * p, 2 * p + 1, 2 * p + 1]))
            runs.append(Run(vectors, scale))
        return runs

    def _row(self, k: Kernel, pairs: bool, m: Matrix, w: Val, s: Val, width: Val, to: Val) -> None:
        bad = k.var(k.const(I8, 0))
        for i in k.range(0, width // self.group):
            code = k.load(I8, s, i)
            bad.set(bad.get() | bytes_bad(code))
            scale = e4m3_scales(k, splat(code, 8)).shuffle([0] * 16)
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
            return e2m1(k, codes.zext(I32))
        words = [look_up(k, [v >> shift & 255 for v in E2M1], codes) for shift in (0, 8)]
        picks = [p for i in range(16) for p in (i, 16 + i)]
        return wide(words[0].shuffle(picks, words[1]).bits(vec(I16, 16)))


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
        scales = e8m0(k, k.load(vec(I8, 4), s))
        if k.isa.dots:
            runs = []
            for h in range(2):
                scale = scales.shuffle([2 * h] * 8 + [2 * h + 1] * 8)
                runs.append(Run(e4m3_pairs(k, k.load(vec(I8, 64), w, 64 * h)), scale))
            return Chunk(runs, None)
        runs, bad = [], None
        width = 4 * k.isa.lanes  # bytes
        for block in range(4):
            vectors = []
            for part in range(0, 32, width):
                raw = k.load(vec(I8, width), w, 32 * block + part)
                worst = raw & 0x7F
                bad = worst if bad is None else self.worse(k, bad, worst)
                vectors += e4m3(k, raw)
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
            scale = e8m0(k, splat(code, 8))
            with k.when(code.eq(-1)):
                bad.set(k.const(kind, 0x7F))
            if k.isa.dots:
                for part in range(2):
                    value = e4m3_sixteen(k, raw.shuffle(list(range(16 * part, 16 * part + 16)))) * 2.0**8
                    self._put(k, pairs, value * scale.shuffle([0] * 16), to, i * 32 + 16 * part)
                continue
            step = 4 * k.isa.lanes
            at = 0
            for part in range(0, 32, step):
                for value in e4m3(k, raw.shuffle(list(range(part, part + step)))):
                    lanes = value.type.count
                    self._put(k, pairs, value * scale.shuffle([0] * lanes), to, i * 32 + at)
                    at += lanes
        note(k, m.flag, self.damaged(k, bad.get()), DAMAGED)

    def _put(self, k: Kernel, pairs: bool, value: Val, to: Val, column: Val) -> None:
        if pairs:
            k.store((value.bits(vec(I32, value.type.count)) >> 16).trunc(I16), to, column * 2, align=2)
        else:
            k.store(value, to, column * 4, align=4)


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
        vectors = pairs if k.isa.dots else [v for pair in pairs for v in split(pair)]
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
