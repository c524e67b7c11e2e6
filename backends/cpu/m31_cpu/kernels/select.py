"""Block selection (MODEL.md §2.4): forced blocks and the best of the others, the lower id first among equals.

Scores are not sorted. The greatest of each of 64 strands (every 64th block) are looked at first: the n-th best of those
is a bound that the n best blocks reach. Then whatever reaches it goes into a short list that is kept in order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
from llvmlite import ir

from m31.graph import OpInstance
from m31_cpu.binding import EXACT, Binding, Factory, rows_of
from m31_cpu.kernels.rows import count_of
from m31_cpu.lang import F32, I1, I64, PTR, Val, vec
from m31_cpu.native import Kernel, Native
from m31_cpu.program import NativeKernel, Sizes, Work, span
from m31_cpu.simd import load_f32, splat, store_f32, strips

_STRANDS = 64
_FEW = 4 * _STRANDS  # blocks from which on the strands are worth their time
_INFINITY = float("inf")


class _Best:
    """A list of the best scores with their ids, in order, in memory.

    Args:
        k: the kernel.
        most: how many it has room for.

    Attributes:
        count: how many there are.
        least: the last score of a full list, else -inf.
    """

    def __init__(self, k: Kernel, most: int) -> None:
        self.k, self.limit = k, k.i64(most)
        self.scores, self.ids = k.room(4 * most), k.room(8 * most)
        self.count, self.least = k.var(k.i64(0)), k.var(k.f32(-_INFINITY))

    def clear(self, limit: Val) -> None:
        """Empty it; it keeps `limit` scores from now on, and what is not above -inf never gets in."""
        self.limit = limit
        self.count.set(self.k.i64(0))
        self.least.set(self.k.f32(-_INFINITY))

    def offer(self, score: Val, block: Val) -> None:
        """Take a score if it is above the least one of a full list. Blocks come in order of their ids: of equals
        the first stays."""
        k = self.k
        with k.when((score > self.least.get()) & (self.limit > 0)):
            full = self.count.get() >= self.limit
            at = k.var(self.count.get())
            at.set(full.select(self.count.get() - 1, self.count.get()))
            self.count.set(full.select(self.count.get(), self.count.get() + 1))

            def before() -> Val:
                return k.load(F32, self.scores, k.max(at.get() - 1, k.i64(0)) * 4, align=4)

            for _ in k.repeat(lambda: (at.get() > 0) & (before() < score)):
                k.store(before(), self.scores, at.get() * 4, align=4)
                k.store(k.load(I64, self.ids, (at.get() - 1) * 8, align=8), self.ids, at.get() * 8, align=8)
                at.add(-1)
            k.store(score, self.scores, at.get() * 4, align=4)
            k.store(block, self.ids, at.get() * 8, align=8)
            with k.when(self.count.get() >= self.limit):
                self.least.set(k.load(F32, self.scores, (self.limit - 1) * 4, align=4))


def _reaching(k: Kernel, best: _Best, row: Val, first: Val, end: Val, bound: Val) -> None:
    """Offer the blocks from `first` to `end` whose score is at least `bound`."""
    for lanes, i in strips(k, end - first):
        at = first + i
        score = load_f32(k, row, at, lanes)
        if lanes == 1:
            with k.when(score.lane(0) >= bound):
                best.offer(score.lane(0), at)
            continue
        wanted = (score >= splat(bound, lanes)) & (score > splat(best.least.get(), lanes))
        left = k.var(k.i64(0))
        left.set(_mask(k, wanted))
        for _ in k.repeat(lambda left=left: left.get().ne(0)):  # type: ignore[misc]
            lane = k.call("llvm.cttz.i64", I64, left.get(), k.const(I1, 0))
            best.offer(k.load(F32, row, (at + lane) * 4, align=4), at + lane)
            left.set(left.get() & (left.get() - 1))


def _mask(k: Kernel, lanes: Val) -> Val:
    """A bit for each lane."""
    return lanes.bits(ir.IntType(lanes.type.count)).zext(I64)


def _bound(k: Kernel, best: _Best, room: Val, row: Val, first: Val, end: Val) -> Val:
    """What as many blocks reach as the list keeps; -inf where that is not known."""
    wide = k.isa.lanes
    bound = k.var(k.f32(-_INFINITY))
    bound.set(k.f32(-_INFINITY))
    with k.when(end - first >= _FEW):
        lowest = k.const(vec(F32, wide), -_INFINITY)
        held = [k.var(lowest) for _ in range(min(8, _STRANDS // wide))]
        span_ = len(held) * wide
        for one in held:
            one.set(lowest)
        for i in k.range(0, (end - first) // span_ * span_, span_):
            for j, one in enumerate(held):
                score = load_f32(k, row, first + i + j * wide, wide)
                one.set((score > one.get()).select(score, one.get()))
        for j, one in enumerate(held):
            store_f32(k, one.get(), room, k.i64(j * wide))
        for strand in k.range(span_):
            best.offer(k.load(F32, room, strand * 4, align=4), strand)
        bound.set(best.least.get())
        best.clear(best.limit)
    return bound.get()


@cache
def _select(topk: int, block: int, local: int, init: int) -> Native:
    def emit(k: Kernel, a: Any) -> None:
        room, best = k.room(4 * _STRANDS), _Best(k, topk)
        for task in k.tasks(count_of(k, a.rows) * a.heads):
            position = k.load(I64, a.positions, task // a.heads * 8, align=8)
            visible = position // block + 1
            first = k.min(visible, k.i64(init))
            end = k.max(visible - local, first)
            best.clear(topk - (first + (visible - end)))
            row, y = a.x + task * a.width * 4, a.y + task * (8 * topk)
            bound = _bound(k, best, room, row, first, end)
            _reaching(k, best, row, first, end, bound)
            _emit(k, best, y, first, end, visible, topk)

    fields = {"x": PTR, "positions": PTR, "y": PTR, "rows": PTR, "heads": I64, "width": I64}
    return Native(f"block_select_{topk}_{block}_{local}_{init}", fields, emit)


def _emit(k: Kernel, best: _Best, y: Val, first: Val, end: Val, visible: Val, topk: int) -> None:
    """Initial blocks, the listed ones in order of their ids, local blocks, and -1."""
    for i in k.range(first):
        k.store(i, y, i * 8, align=8)
    count = best.count.get()
    for i in k.range(count):
        block = k.load(I64, best.ids, i * 8, align=8)
        at = k.var(first)
        at.set(first + i)

        def before(at: Any = at) -> Val:
            return k.load(I64, y, k.max(at.get() - 1, k.i64(0)) * 8, align=8)

        for _ in k.repeat(lambda at=at, block=block, before=before: (at.get() > first) & (before() > block)):  # type: ignore[misc]
            k.store(before(), y, at.get() * 8, align=8)
            at.add(-1)
        k.store(block, y, at.get() * 8, align=8)
    done = first + count
    for i in k.range(visible - end):
        k.store(end + i, y, (done + i) * 8, align=8)
    for i in k.range(done + (visible - end), topk):
        k.store(k.i64(-1), y, i * 8, align=8)


def block_select(op: OpInstance, at: Binding) -> NativeKernel:
    """See the op."""
    given = (op.attrs[name] for name in ("topk", "block", "local_blocks", "init_blocks"))
    native = _select(*(int(value) for value in given))

    def works(outs: Sequence[Any], ins: Sequence[Any], w: Any, _: torch.Tensor | None, sizes: Sizes) -> list[Work]:
        (x, positions), (y,) = ins, outs
        values = {
            "x": x.data_ptr(),
            "positions": positions.data_ptr(),
            "y": y.data_ptr(),
            "rows": sizes.at(rows_of(op)),
            "heads": x.shape[1],
            "width": x.shape[2],
        }
        return [Work(native, values, (span(x), span(positions)), (span(y),), (sizes,))]

    return at.kernel(op, works, EXACT)


SELECT: Mapping[str, Factory] = {"block_select": block_select}
