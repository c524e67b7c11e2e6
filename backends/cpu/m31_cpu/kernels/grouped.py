"""The op `experts` for many tokens (MODEL.md §2.5).

Pairs of (token, choice) are sorted by expert; an expert's inputs are packed into panels of its own and multiplied with
its weights tile by tile (`m31_cpu.kernels.tiled`), so that a weight is decoded once for all its tokens. The activation
is written where w2 finds it packed. Outputs of pairs are kept and summed per token in the order of its choices: what a
token gets does not depend on the others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from m31_cpu.kernels.rows import count_of
from m31_cpu.kernels.tiled import COLUMNS, SEGMENT, STEP, Source, Tiling, pack, paired, passes, product, put_rows, tiling
from m31_cpu.lang import F32, I64, PTR, Val, vec
from m31_cpu.native import Kernel, Native
from m31_cpu.simd import fma, load_f32, splat, store_f32, strips, swiglu

# What sorting leaves, in int64: counts, then tables of segments and panels.
_SEGMENTS, _PANELS, _BAD = 0, 8, 16  # bytes into the counts
SEGMENT_ROW, PANEL_ROW = 32, 24  # (expert, first pair, pairs, slot), (first pair, pairs, slot)
_TOKENS = 8  # of a task that sums


@dataclass(frozen=True)
class Room:
    """Where things lie in the workspace, in bytes from its start.

    Args:
        t: the tiling.
        pairs: most pairs of token and choice.
        experts, width, inner: sizes of the op.
        threads: how many need a tile.
    """

    t: Tiling
    pairs: int
    experts: int
    width: int
    inner: int
    threads: int

    def sizes(self) -> dict[str, int]:
        """Bytes of each part, in their order."""
        groups = min(self.experts, self.pairs)
        segments = groups + self.pairs // SEGMENT
        slots = self.t.slots(self.pairs, groups)
        return {
            "counts": 64,
            "starts": 8 * (self.experts + 1),
            "order": 8 * self.pairs,
            "segments": SEGMENT_ROW * segments,
            "panels": PANEL_ROW * (groups + self.pairs // self.t.panel),
            # Outputs of pairs take the place of the packed inputs.
            "packed": max(slots * self.t.slot(self.width), 4 * self.pairs * self.width),
            "act": slots * self.t.slot(self.inner),
            "rooms": self.threads * self.thread_bytes,
        }

    @property
    def thread_bytes(self) -> int:
        """A thread's tile and sums."""
        return _lines(self.t.room(self.pairs))

    @property
    def bytes(self) -> int:
        """All of it."""
        return sum(map(_lines, self.sizes().values()))

    def at(self, base: int) -> dict[str, int]:
        """The address of each part."""
        found, here = {}, base
        for name, size in self.sizes().items():
            found[name] = here
            here += _lines(size)
        return found


def _lines(size: int) -> int:
    return -(-size // 64) * 64


# --- sorting ---


def _sort(k: Kernel, a: Any, t: Tiling) -> None:
    """One thread: counting sort of the pairs, and the tables of what there is to do."""
    for _ in k.tasks(k.i64(1)):
        pairs = count_of(k, a.rows) * a.topk
        k.fill(a.starts, 0, (a.experts + 1) * 8)
        bad = k.var(k.i64(0))
        for i in k.range(pairs):
            expert = k.load(I64, a.ids, i * 8, align=8)
            known = _known(expert, a.experts)
            with k.when(known):
                _bump(k, a.starts, expert + 1)
            with k.unless(known):
                bad.add(1)
        segments, panels, slot = k.var(k.i64(0)), k.var(k.i64(0)), k.var(k.i64(0))
        start = k.var(k.i64(0))
        for expert in k.range(a.experts):
            first, count = start.get(), k.load(I64, a.starts, expert * 8 + 8, align=8)
            k.store(first, a.starts, expert * 8, align=8)  # the place of its next pair, while pairs are put in order
            for begin in k.range(0, count, SEGMENT):
                size = k.min(count - begin, k.i64(SEGMENT))
                _put(k, a.segments, segments, SEGMENT_ROW, (expert, first + begin, size, slot.get()))
                for panel in k.range(0, size, t.panel):
                    rest = k.min(size - panel, k.i64(t.panel))
                    _put(k, a.panels, panels, PANEL_ROW, (first + begin + panel, rest, slot.get()))
                    slot.add((rest <= t.lanes).select(k.i64(t.lanes), k.i64(t.panel)))
            start.add(count)
        for i in k.range(pairs):
            expert = k.load(I64, a.ids, i * 8, align=8)
            with k.when(_known(expert, a.experts)):
                place = _bump(k, a.starts, expert)
                k.store(i, a.order, place * 8, align=8)
        for offset, value in ((_SEGMENTS, segments), (_PANELS, panels), (_BAD, bad)):
            k.store(value.get(), a.counts, offset, align=8)
        with k.when(bad.get().ne(0)):
            k.store(bad.get(), a.flag, align=8)


def _known(expert: Val, experts: Val) -> Val:
    return (expert >= 0) & (expert < experts)


def _bump(k: Kernel, numbers: Val, index: Val) -> Val:
    """Add one to a number; what it was before."""
    before = k.load(I64, numbers, index * 8, align=8)
    k.store(before + 1, numbers, index * 8, align=8)
    return before


def _put(k: Kernel, table: Val, count: Any, size: int, values: tuple[Val, ...]) -> None:
    for i, value in enumerate(values):
        k.store(value, table, count.get() * size + 8 * i, align=8)
    count.add(1)


def sort_native(exact: bool) -> Native:
    """See `_sort`."""
    fields = ("ids", "rows", "counts", "starts", "order", "segments", "panels", "flag")
    return Native(
        f"experts.sort.{_mode(exact)}",
        {**dict.fromkeys(fields, PTR), "topk": I64, "experts": I64},
        lambda k, a: _sort(k, a, tiling(k.isa, exact=exact)),
    )


def _mode(exact: bool) -> str:
    return "exact" if exact else "any"


# --- packing ---


def _pack(k: Kernel, a: Any, t: Tiling) -> None:
    blocks = (a.columns + (COLUMNS - 1)) // COLUMNS
    slot = _slot(t, a.columns)
    for task in k.tasks(k.load(I64, a.counts, _PANELS, align=8) * blocks):
        table, first = a.panels + task // blocks * PANEL_ROW, task % blocks * COLUMNS
        order = a.order + k.load(I64, table, align=8) * 8
        pack(
            k,
            t,
            lambda j, order=order: a.x + k.load(I64, order, j * 8, align=8) // a.topk * a.columns * 4,
            k.load(I64, table, 8, align=8),
            first,
            k.min(first + COLUMNS, a.columns),
            a.columns,
            a.to + k.load(I64, table, 16, align=8) * slot,
        )


def pack_native(exact: bool) -> Native:
    """Rows of the inputs, gathered into the panels of experts."""
    return Native(
        f"experts.pack.{_mode(exact)}",
        {**dict.fromkeys(("x", "to", "counts", "order", "panels"), PTR), "topk": I64, "columns": I64},
        lambda k, a: _pack(k, a, tiling(k.isa, exact=exact)),
    )


def _slot(t: Tiling, columns: Val) -> Val:
    return ((columns + (STEP - 1)) & -STEP) * t.size


@dataclass(frozen=True)
class _Segment:
    """A row of the table."""

    expert: Val
    first: Val
    count: Val
    slot: Val


def _segment(k: Kernel, table: Val, index: Val) -> _Segment:
    return _Segment(*(k.load(I64, table, index * SEGMENT_ROW + 8 * i, align=8) for i in range(4)))


# --- w1 and w3 with the activation ---


def _gate_up(k: Kernel, a: Any, t: Tiling, codec: Any) -> None:
    room = a.room + k.thread * a.room_bytes
    blocks = (a.outputs + (a.block - 1)) // a.block
    slot, act_slot = _slot(t, a.columns), _slot(t, a.outputs)
    for task in k.tasks(k.load(I64, a.counts, _SEGMENTS, align=8) * blocks):
        s, n = _segment(k, a.segments, task // blocks), task % blocks * a.block
        matrices = [codec.matrix(k, a, s.expert * 3 + i) for i in range(2)]
        rows, span = passes(k, t, s.count, a.block * 2)
        half = rows // 2
        for n in k.range(n, k.min(n + a.block, a.outputs), half):
            used = k.min(a.outputs - n, half)
            sources = [
                Source(at, used, lambda r, first, width, to, m=m, n=n: codec.row(k, t, m, n + r, first, width, to))
                for at, m in zip((k.i64(0), half), matrices, strict=True)
            ]
            sums = product(k, t, sources, a.x + s.slot * slot, s.count, a.columns, rows, span, room)
            for begin in k.range(0, s.count, t.panel):
                part, to = sums + begin * rows * 4, a.act + (s.slot + begin) * act_slot
                few = (s.count - begin) <= t.lanes
                _activate(k, a, t, part, half, used, few, [m.factor for m in matrices], to, n)


def _activate(
    k: Kernel, a: Any, t: Tiling, sums: Val, half: Val, used: Val, few: Val, factors: list[Val], to: Val, n: Val
) -> None:
    """Sums of a panel, w1's rows and then w3's, into columns `n` to `n + used` of the panel of activations; columns
    that fill it up are zero."""
    tokens = few.select(k.i64(t.lanes), k.i64(t.panel))
    scales = [splat(factor, t.lanes) for factor in factors]
    for r in k.range(0, (used + (STEP - 1)) & -STEP, 2):
        for v in k.range(0, tokens, t.lanes):
            made = []
            for i in range(2):
                gate, up = (
                    k.load(vec(F32, t.lanes), sums, ((r + i + first) * tokens + v) * 4, align=4) * scale
                    for first, scale in zip((k.i64(0), half), scales, strict=True)
                )
                value = swiglu(k, gate, up, a.alpha, a.beta, a.limit)
                made.append((r + i < used).select(value, 0.0))
            if t.pairs:
                k.store(paired(k, *made), to, ((n + r) * tokens + v * 2) * 2, align=4)
            else:
                for i in range(2):
                    k.store(made[i], to, ((n + r + i) * tokens + v) * 4, align=4)


def gate_up_native(codec: Any) -> Native:
    """act = swiglu(w1 h, w3 h) of all pairs, in panels."""
    return Native(
        f"experts.gate_up.{codec.name}",
        {
            **dict.fromkeys(("table", "x", "act", "counts", "segments", "room"), PTR),
            **dict.fromkeys(("columns", "outputs", "block", "room_bytes"), I64),
            **dict.fromkeys(("alpha", "beta", "limit"), F32),
        },
        lambda k, a: _gate_up(k, a, tiling(k.isa, exact=codec.exact), codec),
    )


# --- w2, and the sum ---


def _down(k: Kernel, a: Any, t: Tiling, codec: Any) -> None:
    room = a.room + k.thread * a.room_bytes
    blocks = (a.outputs + (a.block - 1)) // a.block
    slot = _slot(t, a.columns)
    for task in k.tasks(k.load(I64, a.counts, _SEGMENTS, align=8) * blocks):
        s, n = _segment(k, a.segments, task // blocks), task % blocks * a.block
        matrix = codec.matrix(k, a, s.expert * 3 + 2)
        order = a.order + s.first * 8
        rows, span = passes(k, t, s.count, a.block)
        for n in k.range(n, k.min(n + a.block, a.outputs), rows):
            used = k.min(a.outputs - n, rows)

            def decode(r: Val, first: Val, width: Val, to: Val, m: Any = matrix, n: Val = n) -> None:
                codec.row(k, t, m, n + r, first, width, to)

            def row(j: Val, order: Val = order, n: Val = n) -> Val:
                return a.y + (k.load(I64, order, j * 8, align=8) * a.outputs + n) * 4

            source = Source(k.i64(0), used, decode)
            sums = product(k, t, (source,), a.act + s.slot * slot, s.count, a.columns, rows, span, room)
            put_rows(k, t, sums, s.count, rows, used, row, matrix.factor)


def down_native(codec: Any) -> Native:
    """w2 act of all pairs, a row for each pair."""
    return Native(
        f"experts.down.{codec.name}",
        {
            **dict.fromkeys(("table", "act", "y", "counts", "order", "segments", "room"), PTR),
            **dict.fromkeys(("columns", "outputs", "block", "room_bytes"), I64),
        },
        lambda k, a: _down(k, a, tiling(k.isa, exact=codec.exact), codec),
    )


def _sum(k: Kernel, a: Any) -> None:
    tokens = count_of(k, a.rows)
    for task in k.tasks((tokens + (_TOKENS - 1)) // _TOKENS):
        for token in k.range(task * _TOKENS, k.min(task * _TOKENS + _TOKENS, tokens)):
            x, weights, y = a.x + token * a.topk * a.width * 4, a.weights + token * a.topk * 4, a.y + token * a.width * 4
            for lanes, i in strips(k, a.width):
                sums = k.var(k.const(vec(F32, lanes), 0.0))
                sums.set(k.const(vec(F32, lanes), 0.0))
                for choice in k.range(a.topk):
                    weight = splat(k.load(F32, weights, choice * 4, align=4), lanes)
                    sums.set(fma(k, weight, load_f32(k, x + choice * a.width * 4, i, lanes), sums.get()))
                store_f32(k, sums.get() * splat(a.factor, lanes), y, i)


SUM = Native(
    "experts.sum",
    {**dict.fromkeys(("x", "weights", "y", "rows"), PTR), "topk": I64, "width": I64, "factor": F32},
    _sum,
)
