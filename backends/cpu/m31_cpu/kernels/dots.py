"""Dot products of stored rows with few inputs: weights are read once, in the order of the memory (MODEL.md, notation).

Inputs are packed once per thread, in the order of columns that the codec decodes (`Codec.order`), zeros behind the last
one. One to three inputs are multiplied with a row while it is decoded. For more, a few columns of several rows are
decoded into the first-level cache, and register blocks of rows and inputs run over them.

Every path adds the same numbers in the same order: for each run of a chunk its products, one after the other, then the
run's sum times its scales to the total of each lane, the lanes at the end. What an input gets from a row does not
depend on the company of either.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from m31_cpu.codecs import CHUNK, DAMAGED, INFINITE, Codec, Matrix, Run, note
from m31_cpu.isa import Isa
from m31_cpu.lang import F32, I16, I32, I64, PTR, VOID, Fn, Val, vec
from m31_cpu.native import Kernel
from m31_cpu.simd import dot_pairs, fma, narrow, total

MOST = 16
"""Inputs at once."""
_DIRECT = 3  # inputs that are multiplied while a row is decoded
_ROWS = 8  # decoded at once for more
_CHUNKS = 4  # of each, at most
_AHEAD = 512  # bytes between what is read and what is asked for
_LINE = 64


class Routine(Kernel):
    """A function that kernels of a module share.

    Args:
        module: theirs.
        name: its symbol.
        isa: what it is compiled for.
        given: types of its arguments.
    """

    def __init__(self, module: Any, name: str, isa: Isa, given: Sequence[Any]) -> None:
        Fn.__init__(self, module, name, VOID, given)
        self.isa = isa
        self.function.linkage = "internal"
        self.function.attributes.add("noinline")


@dataclass(frozen=True)
class Layout:
    """Sizes of what a thread keeps, in bytes.

    Args:
        codec: of the weights.
        isa: the instruction set.
    """

    codec: Codec
    isa: Isa

    @property
    def size(self) -> int:
        """Of an operand."""
        return 2 if self.codec.pairs(self.isa) else 4

    @property
    def vector(self) -> int:
        """Of a register."""
        return 4 * self.isa.lanes

    @property
    def decoded(self) -> int:
        """Of a decoded chunk, at most: its vectors and the scales of its runs."""
        vectors = CHUNK * self.size // self.vector
        return self.vector * (vectors + (-(-vectors // 4) if self.codec.group else 0))

    def slot(self, columns: int) -> int:
        """Of a packed input."""
        return -(-columns // CHUNK) * CHUNK * self.size

    @property
    def scratch(self) -> int:
        """Of decoded rows and of totals."""
        return _ROWS * (_CHUNKS * self.decoded + MOST * self.vector)

    def room(self, columns: int, inputs: int = MOST) -> int:
        """Of packed inputs, their addresses and scratch."""
        return inputs * (self.slot(columns) + 8) + self.scratch + 2 * _LINE


def slot_of(k: Kernel, codec: Codec, columns: Val) -> Val:
    """`Layout.slot` at run time."""
    return ((columns + (CHUNK - 1)) & -CHUNK) * Layout(codec, k.isa).size


# --- inputs ---


def pack(k: Kernel, codec: Codec, x: Val, columns: Val, to: Val) -> None:
    """Put a row of float32 where dot products with a codec's rows find it."""
    name = f"m31_pack_{codec.name}"
    if name not in k.module.globals:
        _write_pack(Routine(k.module, name, k.isa, (PTR, I64, PTR)), codec)
    k.b.call(k.module.globals[name], [x.v, columns.v, to.v])


def _write_pack(k: Kernel, codec: Codec) -> None:
    x, columns, to = k.given
    size = Layout(codec, k.isa).size
    padded = k.room(CHUNK * 4)
    whole = columns & -CHUNK
    for c in k.range(0, whole, CHUNK):
        _pack_chunk(k, codec, x + c * 4, to + c * size)
    with k.when(whole < columns):
        k.fill(padded, 0, k.i64(CHUNK * 4))
        k.copy(padded, x + whole * 4, (columns - whole) * 4)
        _pack_chunk(k, codec, padded, to + whole * size)
    k.done()


def _pack_chunk(k: Kernel, codec: Codec, x: Val, to: Val) -> None:
    lanes, order = k.isa.lanes, codec.order(k.isa)
    if codec.pairs(k.isa):
        half = k.room(CHUNK * 2)
        for at in range(0, CHUNK, lanes):
            k.store(narrow(k, k.load(vec(F32, lanes), x, 4 * at, align=4)), half, 2 * at, align=2)
        x, order, kind = half, [column // 2 for column in order[::2]], I32
    else:
        kind = F32
    for at in range(0, len(order), lanes):
        places = order[at : at + lanes]
        if places == list(range(places[0], places[0] + lanes)):
            value = k.load(vec(kind, lanes), x, 4 * places[0], align=4)
        else:
            value = k.const(vec(kind, lanes), 0)
            for lane, place in enumerate(places):
                value = value.with_lane(lane, k.load(kind, x, 4 * place, align=4))
        k.store(value, to, 4 * at, align=4)


# --- products ---

_GIVEN = (PTR, I64, PTR, I64, F32, PTR, I64, I64, PTR, I64, PTR, I64, PTR)


def dots(
    k: Kernel,
    codec: Codec,
    m: Matrix,
    row: Val,
    rows: Val,
    columns: Val,
    inputs: Val,
    count: Val,
    out: Val,
    stride: Val,
    scratch: Val,
) -> None:
    """Products of some rows of a matrix with inputs.

    Args:
        row, rows: the first one and how many.
        columns: of the matrix.
        inputs: addresses (int64) of packed inputs; `count` of them, 1 to 16.
        out: product of row i and input j, float32, goes to `out + j * stride + 4 * i`.
        scratch: `Layout.scratch` bytes, aligned to a line.
    """
    name = f"m31_dots_{codec.name}"
    if name not in k.module.globals:
        _write(Routine(k.module, name, k.isa, _GIVEN), codec)
    moved = (m.codes + row * m.stride, m.stride, m.scales + row * m.scale_stride, m.scale_stride, m.factor, m.flag)
    given = (*moved, rows, columns, inputs, count, out, stride, scratch)
    k.b.call(k.module.globals[name], [value.v for value in given])


class _Call:
    """The arguments, and what is found on the way."""

    def __init__(self, k: Kernel, codec: Codec) -> None:
        self.k, self.codec = k, codec
        codes, stride, scales, scale_stride, factor, flag, self.rows, self.columns = k.given[:8]
        self.m = Matrix(codes, stride, scales, scale_stride, factor, flag)
        self.inputs, self.count, self.out, self.stride, self.scratch = k.given[8:]
        self.chunks, self.rest = self.columns // CHUNK, self.columns % CHUNK
        self.kind = vec(F32, k.isa.lanes)
        self.layout = Layout(codec, k.isa)
        self.spare = k.room(codec.chunk_bytes), k.room(max(codec.scale_bytes, 8))
        sound = codec.sound(k)
        self._bad = None if sound is None else k.var(sound)
        self.infinite = k.var(k.i32(0))

    def chunk(self, w: Val, s: Val) -> list[Run]:
        """The runs of a chunk; what is bad about it is kept."""
        chunk = self.codec.chunk(self.k, w, s)
        if self._bad is not None and chunk.bad is not None:
            self._bad.set(self.codec.worse(self.k, self._bad.get(), chunk.bad))
        return chunk.runs

    def last(self, w: Val, s: Val) -> tuple[Val, Val]:
        """Copies of the columns behind the last whole chunk, zeros behind them; no byte is read beyond the row."""
        k, codec = self.k, self.codec
        codes, scales = self.spare
        k.fill(codes, 0, k.i64(codec.chunk_bytes))
        k.copy(codes, w + self.chunks * codec.chunk_bytes, self.rest * codec.bits // 8)
        if codec.group:
            k.fill(scales, 0, k.i64(codec.scale_bytes))
            k.copy(scales, s + self.chunks * codec.scale_bytes, self.rest // codec.group)
        return codes, scales

    def put(self, sums: Val, row: Val, j: Any) -> None:
        """Store a finished product."""
        value = total(sums)
        bits = value.bits(I32)
        self.infinite.set(self.infinite.get() | ((bits & 0x7F800000) + 0x00800000))
        self.k.store(value * self.m.factor, self.out + j * self.stride, row * 4, align=4)

    def product(self, weight: Val, x: Val, sums: Val | None) -> Val:
        """weight * x + sums."""
        k = self.k
        if self.codec.pairs(k.isa):
            return dot_pairs(k, k.const(self.kind, 0.0) if sums is None else sums, weight, x)
        return weight * x if sums is None else fma(k, weight, x, sums)

    def joined(self, part: Val, scale: Val | None, sums: Val) -> Val:
        """A run's sum, added to the total."""
        return sums + part if scale is None else fma(self.k, part, scale, sums)

    def load_x(self, x: Val, at: int) -> Val:
        """Vector `at` of an input's chunk."""
        kind = vec(I32, self.k.isa.lanes) if self.codec.pairs(self.k.isa) else self.kind
        return self.k.load(kind, x, at * self.layout.vector, align=4)

    def finish(self) -> None:
        """Note what was found."""
        k, flag = self.k, self.m.flag
        if self._bad is not None:
            note(k, flag, self.codec.damaged(k, self._bad.get()), DAMAGED)
        note(k, flag, self.infinite.get() < 0, INFINITE)


def _write(k: Kernel, codec: Codec) -> None:
    call = _Call(k, codec)
    for count in range(1, _DIRECT + 1):
        with k.when(call.count.eq(count)):
            _direct(call, count)
    with k.when(call.count > _DIRECT):
        _tiled(call)
    call.finish()
    k.done()


def _direct(call: _Call, count: int) -> None:
    """Row by row, inputs from the cache."""
    k, codec, m = call.k, call.codec, call.m
    inputs = [k.load(PTR, call.inputs, 8 * j, align=8) for j in range(count)]
    step = CHUNK * call.layout.size
    for row in k.range(0, call.rows):
        w, s = m.codes + row * m.stride, m.scales + row * m.scale_stride
        totals = [k.var(k.const(call.kind, 0.0)) for _ in range(count)]

        def use(w: Val, s: Val, offset: Val, totals: Sequence[Any] = totals) -> None:
            at = 0
            for run in call.chunk(w, s):
                for x, sums in zip(inputs, totals, strict=True):
                    part = None
                    for i, weight in enumerate(run.vectors):
                        part = call.product(weight, call.load_x(x + offset, at + i), part)
                    assert part is not None
                    sums.set(call.joined(part, run.scale, sums.get()))
                at += len(run.vectors)

        for c in k.range(0, call.chunks):
            here, scales = w + c * codec.chunk_bytes, s + c * codec.scale_bytes
            for line in range(0, codec.chunk_bytes, _LINE):
                k.prefetch(here, _AHEAD + line)
            if codec.group:
                k.prefetch(scales, _AHEAD * codec.scale_bytes // codec.chunk_bytes)
            use(here, scales, c * step)
        with k.when(call.rest.ne(0)):
            use(*call.last(w, s), call.chunks * step)
        for j, sums in enumerate(totals):
            call.put(sums.get(), row, k.i64(j))


def _tiled(call: _Call) -> None:
    """Chunks of several rows decoded, then multiplied with all inputs."""
    k, m, layout = call.k, call.m, call.layout
    chunks = call.chunks + (call.rest + (CHUNK - 1)) // CHUNK
    decoded = layout.decoded
    totals = call.scratch + _ROWS * _CHUNKS * decoded
    at_once = (call.count > MOST // 2).select(k.i64(_CHUNKS // 2), k.i64(_CHUNKS))
    tile = 2 if k.isa.name in ("avx2", "portable") else 4
    for first in k.range(0, call.rows, _ROWS):
        rows = k.min(call.rows - first, k.i64(_ROWS))
        k.fill(totals, 0, k.i64(_ROWS * MOST * layout.vector))
        for begin in k.range(0, chunks, at_once):
            end = k.min(begin + at_once, chunks)
            for r in k.range(0, rows):
                w, s = m.codes + (first + r) * m.stride, m.scales + (first + r) * m.scale_stride
                for c in k.range(begin, end):
                    _decode(call, w, s, c, call.scratch + (r * _CHUNKS + (c - begin)) * decoded)
            for r in k.range(0, rows, tile):
                weights, sums = call.scratch + r * (_CHUNKS * decoded), totals + r * (MOST * layout.vector)
                _groups(call, tile, weights, sums, begin, end)
        for r in k.range(0, rows):
            for j in k.range(0, call.count):
                value = k.load(call.kind, totals + (r * MOST + j) * layout.vector, align=4)
                call.put(value, first + r, j)


def _decode(call: _Call, w: Val, s: Val, c: Val, to: Val) -> None:
    k, codec, layout = call.k, call.codec, call.layout
    codes, scales = k.var(w + c * codec.chunk_bytes), k.var(s + c * codec.scale_bytes)
    for line in range(0, codec.chunk_bytes, _LINE):  # the rows after these, at the same columns
        k.prefetch(codes.get() + call.m.stride * _ROWS, line)
    if codec.group:
        k.prefetch(scales.get() + call.m.scale_stride * _ROWS)
    with k.when(c.eq(call.chunks)):
        spare = call.last(w, s)
        codes.set(spare[0])
        scales.set(spare[1])
    at = 0
    for run in call.chunk(codes.get(), scales.get()):
        for value in (*run.vectors, *([] if run.scale is None else [run.scale])):
            k.store(value, to, at, align=4)
            at += layout.vector


def _groups(call: _Call, rows: int, weights: Val, sums: Val, begin: Val, end: Val) -> None:
    """All inputs, three at a time, or two where one would be left over."""
    k, count = call.k, call.count
    # Of 3n + 1 inputs four are taken in pairs, of 3n + 2 two.
    threes = (count % 3).eq(1).select(count - 4, count - count % 3)
    for j in k.range(0, threes, 3):
        _block(call, rows, 3, weights, sums, j, begin, end)
    for j in k.range(threes, count, 2):
        _block(call, rows, 2, weights, sums, j, begin, end)


def _block(call: _Call, rows: int, inputs: int, weights: Val, sums: Val, j: Val, begin: Val, end: Val) -> None:
    """A register block of rows and inputs."""
    k, layout = call.k, call.layout
    cells = [(r, n) for r in range(rows) for n in range(inputs)]
    places = {(r, n): sums + (j + n + r * MOST) * layout.vector for r, n in cells}
    totals = {cell: k.var(k.load(call.kind, places[cell], align=4)) for cell in cells}
    xs = [k.load(PTR, call.inputs, (j + n) * 8, align=8) for n in range(inputs)]
    for c in k.range(begin, end):
        w, offset = weights + (c - begin) * layout.decoded, c * (CHUNK * layout.size)
        at, here = 0, 0
        for length, scaled in _shape(call):
            parts: dict[tuple[int, int], Val | None] = dict.fromkeys(cells)
            for i in range(length):
                row = [_load_w(call, w, r, here + i * layout.vector) for r in range(rows)]
                for n in range(inputs):
                    value = call.load_x(xs[n] + offset, at + i)
                    for r in range(rows):
                        parts[r, n] = call.product(row[r], value, parts[r, n])
            here += length * layout.vector
            for r, n in cells:
                scale = k.load(call.kind, w, r * _CHUNKS * layout.decoded + here, align=4) if scaled else None
                totals[r, n].set(call.joined(parts[r, n], scale, totals[r, n].get()))  # type: ignore[arg-type]
            here += layout.vector if scaled else 0
            at += length
    for cell in cells:
        k.store(totals[cell].get(), places[cell], align=4)


def _load_w(call: _Call, w: Val, r: int, offset: int) -> Val:
    k = call.k
    kind = vec(I32, k.isa.lanes) if call.codec.pairs(k.isa) else call.kind
    return k.load(kind, w, r * _CHUNKS * call.layout.decoded + offset, align=4)


def _shape(call: _Call) -> list[tuple[int, bool]]:
    """Vectors of each run of a chunk, and whether it has a scale."""
    scratch = Routine(type(call.k.module)(), "shape", call.k.isa, (PTR, PTR))
    return [(len(run.vectors), run.scale is not None) for run in call.codec.chunk(scratch, *scratch.given).runs]


__all__ = ["I16", "MOST", "Layout", "dots", "pack", "slot_of"]
