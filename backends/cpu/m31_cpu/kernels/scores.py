"""Block scores (MODEL.md §2.4): the greatest product of a query with the visible index keys of a block.

A block is a page. Keys lie in lanes, so that every channel of a query is one number for 16 keys, and products are added
up without sums across lanes. Several rows (queries of a sequence and their index heads, which lie one behind the other)
share the keys that were loaded. A task is a tile of tokens and a stretch of pages; stretches of one tile are as many as
keep all threads busy. Nothing is added up across tasks: scores do not depend on how many there are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any

import torch

from m31.graph import Arithmetic, OpInstance
from m31_cpu.binding import EXACT, Binding, Factory, rows_of
from m31_cpu.isa import Isa
from m31_cpu.kernels.rows import count_of
from m31_cpu.lang import F32, I8, I32, I64, PTR, Val, Var, vec
from m31_cpu.native import Kernel, Native
from m31_cpu.numbers import e4m3, twice_e2m1
from m31_cpu.pages import LANES, Store
from m31_cpu.program import NativeKernel, Sizes, Work, span
from m31_cpu.simd import dot_pairs, fma, narrow

_TILE = 16  # tokens that share keys while they are in a cache
_MOST_PAGES = 16  # of a task
_TASKS = 8  # of a thread, if there are enough pages
_INFINITY = float("inf")
_UPPERMOST = -(1 << 24)  # byte of an int32
_BYTE = 2.0**-24  # of a number there


@dataclass(frozen=True)
class _Step:
    """What is loaded at once of 16 keys.

    Args:
        channels: of each key.
        size: bytes.
    """

    channels: int
    size: int


_STEPS = {
    "float32": _Step(1, 64),
    "bfloat16": _Step(2, 64),
    "int8": _Step(4, 64),
    "fp8": _Step(1, 16),
    "nvfp4": _Step(2, 16),
}
_GROUP = 16  # channels under an NVFP4 scale


def rows_at_once(isa: Isa) -> tuple[int, ...]:
    """How many rows share loaded keys, the most first: their sums fit the registers."""
    return {"avx512": (8, 4, 2, 1), "avx2": (4, 2, 1), "neon": (4, 2, 1)}.get(isa.name, (2, 1))


@dataclass(frozen=True)
class _Shape:
    """Of index keys and queries."""

    form: str
    heads: int
    page: int
    dim: int

    @property
    def step(self) -> _Step:
        """Of a load."""
        return _STEPS[self.form]

    @property
    def steps(self) -> int:
        """Of a group of keys."""
        return self.dim // self.step.channels

    @property
    def group_bytes(self) -> int:
        """Of 16 keys, without scales."""
        return self.steps * self.step.size

    def page_bytes(self) -> list[int]:
        """By part."""
        groups = -(-self.page // LANES)
        codes = groups * self.group_bytes
        if self.form == "nvfp4":
            return [codes, groups * self.dim // _GROUP * LANES]
        return [codes, self.page * 4] if self.form == "int8" else [codes]


class _Scorer:
    """Writes the scores of one page for some rows."""

    def __init__(self, k: Kernel, shape: _Shape) -> None:
        self.k, self.shape = k, shape
        self.lanes = k.isa.lanes
        self.vectors = LANES // self.lanes
        self.pairs = k.isa.dots and shape.form == "bfloat16"  # queries are pairs of bfloat16 as well
        self.copied = self.pairs or shape.form == "int8"  # queries are rounded or scaled first
        self.query_bytes = 2 if self.pairs else 4  # of a channel
        self.iota = k.listed(I32, list(range(LANES)))
        self.zero = k.const(vec(F32, self.lanes), 0.0)

    def _part(self, value: Val, v: int) -> Val:
        """Vector number v of 16 lanes."""
        if self.vectors == 1:
            return value
        return value.shuffle(list(range(v * self.lanes, (v + 1) * self.lanes)))

    def _split(self, value: Val) -> list[Val]:
        return [self._part(value, v) for v in range(self.vectors)]

    def _decoded(self, at: Val, scale: list[Val] | None) -> Iterator[list[Val]]:
        """The vectors of 16 keys in float32, one channel of a step after the other: no more of them than are in use."""
        k, form, lanes = self.k, self.shape.form, self.lanes
        if form == "fp8":
            yield self._split(e4m3(k, k.load(vec(I8, LANES), at)))
        elif form == "nvfp4":
            assert scale is not None
            codes = k.load(vec(I8, LANES), at)
            for odd in (False, True):
                half = self._split(twice_e2m1(k, codes >> 4 if odd else codes & 15))
                yield [x * s for x, s in zip(half, scale, strict=True)]
        else:
            words = [k.load(vec(I32, lanes), at, v * 4 * lanes, align=4) for v in range(self.vectors)]
            for c in range(self.shape.step.channels):
                if form == "int8":  # in the uppermost byte; queries are smaller by as much
                    yield [self._top_byte(w, c).to_f32() for w in words]
                else:
                    kept = words if form == "float32" else [w & -65536 if c else w << 16 for w in words]
                    yield [w.bits(vec(F32, lanes)) for w in kept]

    def _top_byte(self, words: Val, c: int) -> Val:
        """Byte c of each word where the uppermost is, zeros below."""
        if c in (0, 3):
            return words << 24 if c == 0 else words & _UPPERMOST
        if self.k.isa.name == "portable":
            return (words << (24 - 8 * c)) & _UPPERMOST
        count = 4 * self.lanes
        zeros = self.k.const(vec(I8, count), 0)
        picks = [at - 3 + c if at % 4 == 3 else count for at in range(count)]
        return words.bits(vec(I8, count)).shuffle(picks, zeros).bits(words.type)

    def _add(self, sums: list[list[Var]], at: Val, query: Val, apart: int, scale: list[Val] | None) -> None:
        """One step: products of its channels to the sums of every row; rows of queries are `apart` bytes apart."""
        k = self.k
        if self.pairs:
            words = k.load(vec(I32, self.lanes), at, align=4)
            for r, row in enumerate(sums):
                pair = k.load(I32, query, r * apart, align=4).splat(self.lanes)
                row[0].set(dot_pairs(k, row[0].get(), words, pair))
            return
        for c, vectors in enumerate(self._decoded(at, scale)):
            for r, row in enumerate(sums):
                number = k.load(F32, query, r * apart + 4 * c, align=4).splat(self.lanes)
                for total, keys in zip(row, vectors, strict=True):
                    total.set(fma(k, keys, number, total.get()))

    def _scales_of_keys(self, scales: Val, group: Val, count: int) -> list[Val]:
        """The float32 scales of a group of int8 keys; behind the last of them there may be nothing to read."""
        k = self.k
        at = scales + group * (4 * LANES)
        if count == LANES:
            return [k.load(vec(F32, self.lanes), at, v * 4 * self.lanes, align=4) for v in range(self.vectors)]
        value = k.const(vec(F32, LANES), 0.0)
        for i in range(count):
            value = value.with_lane(i, k.load(F32, at, 4 * i, align=4))
        return self._split(value)

    def products(
        self, group: Val, count: int, several: int, rows: int, parts: Sequence[Val], ahead: Val, query: Val
    ) -> list[list[list[Val]]]:
        """Products of `several` groups of `count` keys with `rows` rows, by group, row and vector."""
        k, shape = self.k, self.shape
        sums = [[[k.var(self.zero) for _ in range(self.vectors)] for _ in range(rows)] for _ in range(several)]
        for one in (total for row in sums for vectors in row for total in vectors):
            one.set(self.zero)
        keys, offset = parts[0] + group * shape.group_bytes, group * shape.group_bytes
        apart, wide = shape.dim * self.query_bytes, shape.step.channels * self.query_bytes
        sizes = shape.step.size, shape.step.size, wide
        if shape.form == "nvfp4":
            scales = parts[1] + group * (shape.dim // _GROUP * LANES)
            per = _GROUP // shape.step.channels
            for block in k.range(shape.dim // _GROUP):
                scale = self._split(e4m3(k, k.load(vec(I8, LANES), scales + block * LANES)) * 0.5)
                for i in k.range(block * per, (block + 1) * per, 4):  # as many bytes as a line
                    k.prefetch(ahead + offset + i * shape.step.size)
                    at, row = keys + i * shape.step.size, query + i * wide
                    for j in range(4):
                        self._add(sums[0], at + j * shape.step.size, row + j * wide, apart, scale)
        else:
            turn = next(n for n in (4, 2, 1) if shape.steps % n == 0)
            for i in k.range(0, shape.steps, turn):
                at, near, row = (
                    start + i * size for start, size in zip((keys, ahead + offset, query), sizes, strict=True)
                )
                for j, g in product(range(turn), range(several)):
                    place = g * shape.group_bytes + j * shape.step.size
                    if j * shape.step.size % 64 == 0:
                        k.prefetch(near, place)
                    self._add(sums[g], at + place, row + j * wide, apart, None)
        found = [[[total.get() for total in row] for row in each] for each in sums]
        if shape.form == "int8":
            for g, each in enumerate(found):
                scale = self._scales_of_keys(parts[1], group + g, count)
                found[g] = [[x * s for x, s in zip(row, scale, strict=True)] for row in each]
        return found

    def page(self, rows: int, parts: Sequence[Val], ahead: Val, query: Val, bounds: Sequence[Val]) -> list[Val]:
        """The greatest score of each row.

        Args:
            rows: how many.
            parts: of the page.
            ahead: the keys that will be read next.
            query: the first row.
            bounds: of each row, the last key of the page that it sees; below 0: none.
        """
        k, shape = self.k, self.shape
        lowest = k.const(vec(F32, self.lanes), -_INFINITY)
        best = [[k.var(lowest) for _ in range(self.vectors)] for _ in range(rows)]
        for one in (value for row in best for value in row):
            one.set(lowest)

        def groups(group: Val, count: int, several: int) -> None:
            found = self.products(group, count, several, rows, parts, ahead, query)
            for g, each in enumerate(found):
                for r, row in enumerate(each):
                    last = (bounds[r] - (group + g) * LANES).trunc(I32).splat(self.lanes)
                    for v, score in enumerate(row):
                        seen = self._part(self.iota, v) <= last
                        held = best[r][v]
                        # A comparison with NaN is false: such a score does not count.
                        held.set((seen & (score > held.get())).select(score, held.get()))

        if shape.page % LANES:
            for g in range(-(-shape.page // LANES)):
                groups(k.i64(g), min(LANES, shape.page - g * LANES), 1)
        else:
            furthest = bounds[0]
            for bound in bounds[1:]:
                furthest = k.max(furthest, bound)
            several = 2 if k.isa.name == "avx512" and shape.page % 32 == 0 and shape.form != "nvfp4" else 1
            for group in k.range(0, furthest // LANES + 1, several):
                groups(group, LANES, several)
        out = []
        for row in best:
            values = [value.get() for value in row]
            value = values[0]
            for other in values[1:]:
                value = (other > value).select(other, value)
            out.append(_greatest(value))
        return out


def _greatest(x: Val) -> Val:
    """The greatest lane; none is NaN."""
    count = x.type.count
    while count > 1:
        count //= 2
        low, high = x.shuffle(list(range(count))), x.shuffle(list(range(count, 2 * count)))
        x = (low > high).select(low, high)
    return x.lane(0)


@cache
def _scores(shape: _Shape) -> Native:
    fields = {
        **dict.fromkeys(("q", "y", "positions", "cu_q", "table", "keys", "scales"), PTR),
        **dict.fromkeys(("tokens", "seqs", "pages"), PTR),
        **dict.fromkeys(("table_width", "width"), I64),
    }

    def emit(k: Kernel, a: Any) -> None:
        tokens, seqs, pages = (count_of(k, cell) for cell in (a.tokens, a.seqs, a.pages))
        tiles = (tokens + (_TILE - 1)) // _TILE
        per = k.max(k.min(pages * tiles // (k.threads * _TASKS), k.i64(_MOST_PAGES)), k.i64(1))
        stretches = (pages + per - 1) // per
        scorer = _Scorer(k, shape)
        room = k.room(_TILE * shape.heads * shape.dim * scorer.query_bytes) if scorer.copied else None
        for task in k.tasks(tiles * stretches):
            tile, first = task % tiles, task // tiles * per
            start, stop = tile * _TILE, k.min(tile * _TILE + _TILE, tokens)
            end = k.min(first + per, pages)
            _clear(k, a, start * shape.heads, stop * shape.heads, first, end)
            _tile(k, a, scorer, room, (start, stop), (first, end), seqs)

    name = f"block_scores_{shape.form}_{shape.heads}x{shape.dim}_{shape.page}"
    return Native(name, fields, emit)


def _clear(k: Kernel, a: Any, row: Val, rows: Val, first: Val, end: Val) -> None:
    """-inf to a stretch of some rows."""
    lowest = k.f32(-_INFINITY)
    for r in k.range(row, rows):
        for b in k.range(first, end):
            k.store(lowest, a.y, (r * a.width + b) * 4, align=4)


def _tile(
    k: Kernel, a: Any, scorer: _Scorer, room: Val | None, tile: tuple[Val, Val], stretch: tuple[Val, Val], seqs: Val
) -> None:
    """The scores of some tokens for some pages, one sequence after the other."""
    shape = scorer.shape
    seq, token = k.var(k.i64(0)), k.var(tile[0])
    seq.set(k.i64(0))
    token.set(tile[0])

    def ends() -> Val:
        """Of the sequence, or of the last one: nothing behind the array is read."""
        return k.load(I64, a.cu_q, k.min(seq.get(), seqs - 1) * 8 + 8, align=8)

    def skip() -> None:
        for _ in k.repeat(lambda: (seq.get() < seqs) & (ends() <= token.get())):
            seq.add(1)

    skip()
    for _ in k.repeat(lambda: (token.get() < tile[1]) & (seq.get() < seqs)):
        start, stop = token.get(), k.min(ends(), tile[1])
        last = k.var(k.i64(-1))
        last.set(k.i64(-1))
        for t in k.range(start, stop):
            last.set(k.max(last.get(), k.load(I64, a.positions, t * 8, align=8)))
        end = k.min(stretch[1], last.get() // shape.page + 1)
        with k.when((last.get() >= 0) & (stretch[0] < end)):
            table = a.table + seq.get() * a.table_width * 8
            _rows(k, a, scorer, room, (start * shape.heads, stop * shape.heads), (stretch[0], end), table)
        token.set(stop)
        skip()


def _rows(
    k: Kernel, a: Any, scorer: _Scorer, room: Val | None, rows: tuple[Val, Val], stretch: tuple[Val, Val], table: Val
) -> None:
    """The scores of rows of one sequence for some of its pages."""
    shape = scorer.shape
    row_bytes = shape.dim * scorer.query_bytes
    queries = a.q + rows[0] * (4 * shape.dim)
    if room is not None:
        _copied(k, scorer, queries, room, (rows[1] - rows[0]) * shape.dim)
        queries = room
    sizes = shape.page_bytes()

    def page_at(b: Val) -> Val:
        return k.load(I64, table, b * 8, align=8)

    for b in k.range(stretch[0], stretch[1]):
        page = page_at(b)
        parts = [pointer + page * size for pointer, size in zip((a.keys, a.scales), sizes, strict=False)]
        ahead = a.keys + page_at(k.min(b + 1, stretch[1] - 1)) * sizes[0]
        done = k.var(rows[0])
        done.set(rows[0])
        for count in rows_at_once(k.isa):
            first = done.get()
            whole = (rows[1] - first) // count * count
            for r in k.range(first, first + whole, count):
                bounds = []
                for i in range(count):
                    position = k.load(I64, a.positions, (r + i) // shape.heads * 8, align=8)
                    bounds.append(k.min(position - b * shape.page, k.i64(shape.page - 1)))
                found = scorer.page(count, parts, ahead, queries + (r - rows[0]) * row_bytes, bounds)
                for i, score in enumerate(found):
                    k.store(score, a.y, ((r + i) * a.width + b) * 4, align=4)
            done.set(first + whole)


def _copied(k: Kernel, scorer: _Scorer, numbers: Val, to: Val, count: Val) -> None:
    """Queries as bfloat16, or as what codes in the uppermost byte are multiplied with; rows are of even length."""

    def some(i: Val, lanes: int) -> None:
        value = k.load(vec(F32, lanes), numbers, i * 4, align=4)
        if scorer.pairs:
            k.store(narrow(k, value), to, i * 2, align=2)
        else:
            k.store(value * _BYTE, to, i * 4, align=4)

    lanes = k.isa.lanes
    whole = count - count % lanes
    for i in k.range(0, whole, lanes):
        some(i, lanes)
    for i in k.range(whole, count):
        some(i, 1)


def block_scores(op: OpInstance, at: Binding) -> NativeKernel:
    """See the op."""
    layer, heads = op.attrs["layer"], int(op.inputs[0].shape[1])  # type: ignore[union-attr]
    pairs = at.isa.dots and getattr(op.inputs[1], "index_format", "") == "bfloat16"

    def works(outs: Sequence[Any], ins: Sequence[Any], w: Any, _: torch.Tensor | None, sizes: Sizes) -> list[Work]:
        (q, cache_, positions, cu_q, _seq_lens, table), (y,) = ins, outs
        store: Store = cache_.index[layer]
        parts = list(store.parts.values())
        values = {
            "q": q.data_ptr(),
            "y": y.data_ptr(),
            "positions": positions.data_ptr(),
            "cu_q": cu_q.data_ptr(),
            "table": table.data_ptr(),
            "keys": parts[0].data_ptr(),
            "scales": parts[-1].data_ptr(),
            "tokens": sizes.at(rows_of(op)),
            "seqs": sizes.at(op.inputs[4].shape[0]),  # type: ignore[union-attr]
            "pages": sizes.at(op.outputs[0].shape[2]),  # type: ignore[union-attr]
            "table_width": table.shape[1],
            "width": y.shape[2],
        }
        reads = tuple(span(x) for x in (q, positions, cu_q, table, *parts))
        native = _scores(_Shape(store.form.name, heads, store.page, store.dim))
        return [Work(native, values, reads, (span(y),), (sizes, cache_))]

    return at.kernel(op, works, Arithmetic("bfloat16", "float32", "float32") if pairs else EXACT)


SCORES: Mapping[str, Factory] = {"block_scores": block_scores}
