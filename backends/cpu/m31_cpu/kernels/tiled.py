"""Products of many tokens with stored weights: a matrix product in tiles (MODEL.md, notation; §3.1, §3.2).

Tokens lie in the lanes. Inputs are packed once into panels, [columns][tokens of a panel], so that a register takes
neighbouring tokens of one column; a block of weight rows is decoded once into a tile in the processor's cache, in its
natural order, and each of its numbers is multiplied with a panel's registers. With bfloat16 pairs a panel is
[columns / 2][tokens][2], and a tile holds bfloat16. Sums run over the columns of a block in their order, and sums of
blocks are added in theirs, however the work is divided: an output depends on its token and its weight row alone.

Sizes: a column block of a panel (16 KiB) stays in the first-level cache while the tile's rows (96 KiB, second level)
pass by; sums of a task rest in memory between column blocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from m31_cpu.codecs import Codec, Matrix
from m31_cpu.isa import Isa
from m31_cpu.lang import F32, I16, I32, Val, vec
from m31_cpu.native import Kernel
from m31_cpu.simd import dot_pairs, fma, narrow

COLUMNS = 256  # of a block: a multiple of every format's scale block
STEP = 4  # columns at a time; panels and tiles are filled up with zeros to a multiple
FEW = 128  # tokens: up to here weights are read in long pieces
SEGMENT = 512  # most tokens of a task: their sums fit the second-level cache beside a tile
_LINE = 64
_AHEAD = 6  # rows


@dataclass(frozen=True)
class Shape:
    """A register block: `rows` weights times `vectors` registers of tokens."""

    rows: int
    vectors: int


@dataclass(frozen=True)
class Tiling:
    """How an instruction set multiplies.

    Args:
        lanes: float32 numbers of a register.
        pairs: whether operands are pairs of bfloat16 numbers.
        full, rest: register blocks for whole panels, and for a last one with at most `lanes` tokens.
        rows: most weight rows of a task.
    """

    lanes: int
    pairs: bool
    full: Shape
    rest: Shape
    rows: int

    @property
    def panel(self) -> int:
        """Tokens of a whole panel."""
        return self.full.vectors * self.lanes

    @property
    def size(self) -> int:
        """Bytes of an operand."""
        return 2 if self.pairs else 4

    @property
    def unit(self) -> int:
        """Rows of a task are a multiple of this."""
        return 2 * math.lcm(self.full.rows, self.rest.rows)

    @property
    def stride(self) -> int:
        """Bytes from one row of a tile to the next: not a power of two, which would meet in few sets of a cache."""
        return COLUMNS * self.size + _LINE

    def slot(self, columns: int) -> int:
        """Bytes that a token takes in a panel."""
        return -(-columns // STEP) * STEP * self.size

    def slots(self, tokens: int, groups: int = 1) -> int:
        """Most tokens, gaps included, of the panels for `tokens` tokens in at most so many groups."""
        return tokens + min(groups, tokens) * max(self.lanes - 1, self.panel - self.lanes - 1)

    def room(self, tokens: int) -> int:
        """Bytes of a thread's tile and sums for at most so many tokens in a segment."""
        padded = -(-min(tokens, SEGMENT) // self.panel) * self.panel
        return self.rows * self.stride + 4 * self.rows * padded


def tiling(isa: Isa, *, exact: bool = False) -> Tiling:
    """The tiles of an instruction set.

    Args:
        exact: operands are not rounded to bfloat16, for weights that it does not hold.
    """
    if isa.lanes == 16:
        # With more sums than 24, tokens of two steps would not find a register.
        return Tiling(16, isa.dots and not exact, Shape(12, 2), Shape(24, 1), 96)
    if isa.lanes == 8:
        return Tiling(8, False, Shape(6, 2), Shape(12, 1), 96)
    rows = 8 if isa.name == "neon" else 4
    return Tiling(4, False, Shape(rows, 2), Shape(8, 1), 96)


def task_rows(t: Tiling, rows: int, segments: int, threads: int) -> int:
    """Weight rows of a task: as many as a tile holds, fewer where threads would have nothing to do."""
    count = t.rows
    while count > t.unit and -(-rows // count) * segments < 4 * threads:
        count -= t.unit
    return count


def mode(exact: bool) -> str:
    """For names of kernels."""
    return "exact" if exact else "any"


def whole_lines(size: int) -> int:
    """The next multiple of a cache line."""
    return -(-size // _LINE) * _LINE


def slot_of(t: Tiling, columns: Val) -> Val:
    """`Tiling.slot` at run time."""
    return ((columns + (STEP - 1)) & -STEP) * t.size


# --- packing ---


def transposed(vectors: Sequence[Val]) -> list[Val]:
    """n vectors of n lanes: lane i of vector j becomes lane j of vector i."""
    rows, n = list(vectors), len(vectors)
    step = 1
    while step < n:
        for i in (i for i in range(n) if not i & step):
            a, b = rows[i], rows[i + step]
            rows[i] = a.shuffle([lane if not lane & step else n + lane - step for lane in range(n)], b)
            rows[i + step] = a.shuffle([lane + step if not lane & step else n + lane for lane in range(n)], b)
        step *= 2
    return rows


def pack(
    k: Kernel, t: Tiling, row: Callable[[Val], Val], count: Val, first: Val, last: Val, columns: Val, to: Val
) -> None:
    """Columns `first` to `last` of a panel.

    Args:
        row: `row(j)`: where input row j lies; asked for j below `count` only.
        count: tokens in the panel; zeros fill it up.
        first, last: columns; `first` is a multiple of COLUMNS, `last` that or the end of the row.
        columns: of a whole row.
        to: the panel.
    """
    zeros = k.room(64)
    k.fill(zeros, 0, k.i64(64))
    few = count <= t.lanes
    tokens = few.select(k.i64(t.lanes), k.i64(t.panel))
    for begin in k.range(0, tokens, t.lanes):
        sources = [begin + j for j in range(t.lanes)]
        valid = [j < count for j in sources]
        rows = [ok.select(row(ok.select(j, 0)), zeros) for j, ok in zip(sources, valid, strict=True)]
        steps = [ok.select(k.i64(4), k.i64(0)) for ok in valid]  # the zeros stay where they are
        whole = last - (last - first) % t.lanes
        for c in k.range(first, whole, t.lanes):
            given = [k.load(vec(F32, t.lanes), x + c * s, align=4) for x, s in zip(rows, steps, strict=True)]
            _put(k, t, transposed(given), to, c, begin, tokens)
        with k.when(whole < last):
            for c in k.range(whole, (last + (STEP - 1)) & -STEP, STEP):
                made = []
                for i in range(STEP):
                    inside = (c + i) < columns
                    at = inside.select(c + i, 0)
                    one = k.const(vec(F32, t.lanes), 0.0)
                    for j, (x, s) in enumerate(zip(rows, steps, strict=True)):
                        one = one.with_lane(j, k.load(F32, x, at * s, align=4))
                    made.append(inside.select(one, 0.0))
                _put(k, t, made, to, c, begin, tokens)


def _put(k: Kernel, t: Tiling, columns: Sequence[Val], to: Val, first: Val, begin: Val, tokens: Val) -> None:
    """Store neighbouring columns of a few tokens."""
    if not t.pairs:
        for i, value in enumerate(columns):
            k.store(value, to, ((first + i) * tokens + begin) * 4, align=4)
        return
    for i in range(0, len(columns), 2):
        k.store(paired(k, columns[i], columns[i + 1]), to, ((first + i) * tokens + begin * 2) * 2, align=4)


def paired(k: Kernel, low: Val, high: Val) -> Val:
    """Two float32 vectors, rounded to bfloat16, as vectors of pairs (int32)."""
    return narrow(k, low).zext(I32) | (narrow(k, high).zext(I32) << 16)


# --- the product ---


@dataclass(frozen=True)
class Source:
    """Weight rows of a tile.

    Args:
        first: their first row there.
        used: how many there are.
        decode: `decode(r, column, width, to)` writes `width` columns of row r from `column` on.
    """

    first: Val
    used: Val
    decode: Callable[[Val, Val, Val, Val], None]


def decoder(k: Kernel, t: Tiling, codec: Codec, matrix: Matrix, n: Val) -> Callable[[Val, Val, Val, Val], None]:
    """`Source.decode` of a matrix's rows from row n on. Rows lie too far from each other for a processor to foresee the
    next one: the same columns of a later one are asked for early."""

    def decode(r: Val, column: Val, width: Val, to: Val) -> None:
        later = matrix.codes + (n + r + _AHEAD) * matrix.stride + column * codec.bits // 8
        for line in k.range(0, width * codec.bits // 8, _LINE):
            k.prefetch(later + line)
        codec.row(k, t, matrix, n + r, column, width, to)

    return decode


def passes(k: Kernel, t: Tiling, count: Val, most: Val) -> tuple[Val, Val]:
    """Rows that a task takes at once, and columns that it decodes of each.

    With few tokens decoding and reading weights is most of the work: long pieces of few rows are read nearly in the
    order of the memory. With many, each part of the inputs that is read serves many rows.

    Args:
        count: tokens.
        most: rows that the task has, a multiple of `unit`.
    """
    few = count <= FEW
    rows = few.select(k.i64(t.unit), k.min(most, k.i64(t.rows)))
    return rows, few.select(k.i64(t.rows // t.unit * COLUMNS), k.i64(COLUMNS))


def product(
    k: Kernel, t: Tiling, sources: Sequence[Source], x: Val, count: Val, columns: Val, rows: Val, span: Val, room: Val
) -> Val:
    """Weight rows times the panels of a segment.

    Args:
        sources: of the rows.
        x: the segment's panels.
        count: its tokens.
        columns: of a row.
        rows: rows of the tile: a multiple of half a `unit`.
        span: columns decoded at once, a multiple of COLUMNS; rows * span / COLUMNS is at most `t.rows`.
        room: `t.room` bytes.

    Returns:
        The sums: for the panel that begins at token p, [rows][its tokens] float32 from `4 * p * rows` on.
    """
    sums = room + t.rows * t.stride
    slot = slot_of(t, columns)
    for start in k.range(0, columns, span):
        end = k.min(start + span, columns)
        for source in sources:
            for r in k.range(0, source.used):
                for first in k.range(start, end, COLUMNS):
                    to = room + ((first - start) // COLUMNS * rows + source.first + r) * t.stride
                    width = k.min(end - first, k.i64(COLUMNS))
                    source.decode(r, first, width, to)
                    _pad(k, t, to, width)
        for first in k.range(start, end, COLUMNS):
            padded = (k.min(end - first, k.i64(COLUMNS)) + (STEP - 1)) & -STEP
            tile = room + (first - start) // COLUMNS * rows * t.stride
            for begin in k.range(0, count, t.panel):
                panel, part = x + begin * slot, sums + begin * rows * 4
                few = (count - begin) <= t.lanes
                for shape, chosen in ((t.full, few ^ 1), (t.rest, few)):
                    with k.when(chosen):
                        tokens = shape.vectors * t.lanes
                        given = panel + first * (tokens * t.size)
                        following = given + slot * t.panel
                        whole = k.i64(COLUMNS * tokens * t.size // _LINE) * shape.rows // rows * _LINE
                        share = ((count - begin) > t.panel).select(whole, 0)
                        for r in k.range(0, rows, shape.rows):
                            # The next panel comes from memory: each block asks for its share of it.
                            part_of = following + r // shape.rows * share
                            for line in k.range(0, share, _LINE):
                                k.prefetch(part_of + line)
                            weights = tile + r * t.stride
                            _block(k, t, shape, given, weights, padded, part + r * (tokens * 4), first.eq(0))
    return sums


def _block(k: Kernel, t: Tiling, shape: Shape, x: Val, w: Val, steps: Val, sums: Val, begins: Val) -> None:
    """A register block: sums += w x over `steps` columns."""
    kind, tokens = vec(F32, t.lanes), shape.vectors * t.lanes
    ahead = -(-shape.rows * t.stride * STEP // (COLUMNS * _LINE))
    cells = [(r, v) for r in range(shape.rows) for v in range(shape.vectors)]
    totals = {cell: k.var(k.const(kind, 0.0)) for cell in cells}
    place = {(r, v): 4 * (r * tokens + v * t.lanes) for r, v in cells}
    for line in range(0, 4 * shape.rows * tokens, _LINE):
        k.prefetch(sums, line, 3)
    for c in k.range(0, steps, STEP):
        xs, ws = x + c * (tokens * t.size), w + c * t.size
        # The next rows of the tile come from the second-level cache: a line for each STEP columns and more.
        for line in range(ahead):
            k.prefetch(w + c * (ahead * _LINE // STEP), shape.rows * t.stride + line * _LINE, 3)
        for u in range(0, STEP, 4 // t.size):
            given = [
                k.load(vec(I32, t.lanes) if t.pairs else kind, xs, u * tokens * t.size + v * t.lanes * 4, align=4)
                for v in range(shape.vectors)
            ]
            for r in range(shape.rows):
                one = k.load(I32 if t.pairs else F32, ws, r * t.stride + u * t.size, align=4).splat(t.lanes)
                for v in range(shape.vectors):
                    total = totals[r, v]
                    total.set(
                        dot_pairs(k, total.get(), one, given[v]) if t.pairs else fma(k, one, given[v], total.get())
                    )
    with k.when(begins):
        for cell in cells:
            k.store(totals[cell].get(), sums, place[cell], align=4)
    with k.unless(begins):
        for cell in cells:
            k.store(totals[cell].get() + k.load(kind, sums, place[cell], align=4), sums, place[cell], align=4)


def put_rows(
    k: Kernel, t: Tiling, sums: Val, count: Val, rows: Val, used: Val, row: Callable[[Val], Val], scale: Val
) -> None:
    """Store a segment's sums as rows of tokens.

    Args:
        sums, count, rows: as of `product`.
        used: how many of the rows exist; from sums' row 0 on.
        row: `row(j)`: where the outputs of token j begin; asked for j below `count` only.
        scale: multiplies them.
    """
    lanes = t.lanes
    factor = scale.splat(lanes)
    for begin in k.range(0, count, t.panel):
        few = (count - begin) <= lanes
        tokens = few.select(k.i64(lanes), k.i64(t.panel))
        part = sums + begin * rows * 4
        for v in k.range(0, tokens, lanes):
            valid = [(begin + v + j) < count for j in range(lanes)]
            to = [row(ok.select(begin + v + j, 0)) for j, ok in enumerate(valid)]
            whole = used - used % lanes
            for r in k.range(0, whole, lanes):
                given = [
                    k.load(vec(F32, lanes), part + ((r + i) * tokens + v) * 4, align=4) * factor for i in range(lanes)
                ]
                for j, value in enumerate(transposed(given)):
                    with k.when(valid[j]):
                        k.store(value, to[j], r * 4, align=4)
            for r in k.range(whole, used):
                one = k.load(vec(F32, lanes), part + (r * tokens + v) * 4, align=4) * factor
                for j in range(lanes):
                    with k.when(valid[j]):
                        k.store(one.lane(j), to[j], r * 4, align=4)


def _pad(k: Kernel, t: Tiling, row: Val, width: Val) -> None:
    """Zeros behind `width` columns of a tile's row up to a multiple of STEP: what lies there may be no number."""
    for c in k.range(width, (width + (STEP - 1)) & -STEP):
        k.store(k.const(I16 if t.pairs else I32, 0), row, c * t.size, align=t.size)
