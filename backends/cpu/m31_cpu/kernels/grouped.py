"""The op `experts` for many tokens (MODEL.md §2.5).

Pairs of (token, choice) are sorted by expert; an expert's inputs are packed into panels of its own and multiplied with
its weights tile by tile (`m31_cpu.kernels.tiled`), so that a weight is decoded once for all its tokens. The activation
is written where w2 finds it packed. Outputs of pairs are kept and summed per token in the order of its choices: what a
token gets does not depend on the others.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from m31.errors import OpRefused
from m31.graph import OpInstance
from m31_cpu.binding import EXACT, Binding, rows_of
from m31_cpu.codecs import Codec
from m31_cpu.kernels.many import PAIRS
from m31_cpu.kernels.rows import count_of
from m31_cpu.kernels.tiled import (
    COLUMNS,
    SEGMENT,
    STEP,
    Source,
    Tiling,
    decoder,
    mode,
    pack,
    paired,
    passes,
    product,
    put_rows,
    slot_of,
    task_rows,
    tiling,
    whole_lines,
)
from m31_cpu.lang import F32, I64, PTR, Val, vec
from m31_cpu.native import Kernel, Native
from m31_cpu.program import NativeKernel, Sizes, Work, span
from m31_cpu.simd import fma, load_f32, splat, store_f32, strips, swiglu

# What sorting leaves, in int64: counts, then tables of segments and panels.
_SEGMENTS, _PANELS, _BAD = 0, 8, 16  # bytes into the counts
SEGMENT_ROW, PANEL_ROW = 32, 24  # (expert, first pair, pairs, slot), (first pair, pairs, slot)
_TOKENS = 8  # of a task that sums


@dataclass(frozen=True)
class Room:
    """Where things lie in the workspace, in bytes from its start.

    Args:
        first, second: tilings of w1 and w3, and of w2.
        pairs: most pairs of token and choice.
        experts, width, inner: sizes of the op.
        threads: how many need a tile.
    """

    first: Tiling
    second: Tiling
    pairs: int
    experts: int
    width: int
    inner: int
    threads: int

    def sizes(self) -> dict[str, int]:
        """Bytes of each part, in their order."""
        groups = min(self.experts, self.pairs)
        segments = groups + self.pairs // SEGMENT
        slots = self.first.slots(self.pairs, groups)
        return {
            "counts": 64,
            "starts": 8 * (self.experts + 1),
            "order": 8 * self.pairs,
            "segments": SEGMENT_ROW * segments,
            "panels": PANEL_ROW * (groups + self.pairs // self.first.panel),
            # Outputs of pairs take the place of the packed inputs.
            "packed": max(slots * self.first.slot(self.width), 4 * self.pairs * self.width),
            "act": slots * self.second.slot(self.inner),
            "rooms": self.threads * self.thread_bytes,
        }

    @property
    def thread_bytes(self) -> int:
        """A thread's tile and sums."""
        return whole_lines(max(self.first.room(self.pairs), self.second.room(self.pairs)))

    @property
    def bytes(self) -> int:
        """All of it."""
        return sum(map(whole_lines, self.sizes().values()))

    def at(self, base: int) -> dict[str, int]:
        """The address of each part."""
        found, here = {}, base
        for name, size in self.sizes().items():
            found[name] = here
            here += whole_lines(size)
        return found


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
        f"experts.sort.{mode(exact)}",
        {**dict.fromkeys(fields, PTR), "topk": I64, "experts": I64},
        lambda k, a: _sort(k, a, tiling(k.isa, exact=exact)),
    )


# --- packing ---


def _pack(k: Kernel, a: Any, t: Tiling) -> None:
    blocks = (a.columns + (COLUMNS - 1)) // COLUMNS
    slot = slot_of(t, a.columns)
    for task in k.tasks(k.load(I64, a.counts, _PANELS, align=8) * blocks):
        table, first = a.panels + task // blocks * PANEL_ROW, task % blocks * COLUMNS
        order = a.order + k.load(I64, table, align=8) * 8
        pack(
            k,
            t,
            _gathered(k, a.x, order, a.topk, a.columns * 4),
            k.load(I64, table, 8, align=8),
            first,
            k.min(first + COLUMNS, a.columns),
            a.columns,
            a.to + k.load(I64, table, 16, align=8) * slot,
        )


def _gathered(k: Kernel, start: Val, order: Val, each: Val, size: Val) -> Callable[[Val], Val]:
    """Where the row of pair j of a list lies, in rows of `size` bytes from `start` on, one for `each` pairs."""
    return lambda j: start + k.load(I64, order, j * 8, align=8) // each * size


def pack_native(exact: bool) -> Native:
    """Rows of the inputs, gathered into the panels of experts."""
    return Native(
        f"experts.pack.{mode(exact)}",
        {**dict.fromkeys(("x", "to", "counts", "order", "panels"), PTR), "topk": I64, "columns": I64},
        lambda k, a: _pack(k, a, tiling(k.isa, exact=exact)),
    )


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


def _gate_up(k: Kernel, a: Any, t: Tiling, after: Tiling, codec: Codec) -> None:
    room = a.room + k.thread * a.room_bytes
    blocks = (a.outputs + (a.block - 1)) // a.block
    slot, act_slot = slot_of(t, a.columns), slot_of(after, a.outputs)
    for task in k.tasks(k.load(I64, a.counts, _SEGMENTS, align=8) * blocks):
        s, start = _segment(k, a.segments, task // blocks), task % blocks * a.block
        matrices = [codec.matrix(k, a, s.expert * 3 + i) for i in range(2)]
        rows, piece = passes(k, t, s.count, a.block * 2)
        half = rows // 2
        for n in k.range(start, k.min(start + a.block, a.outputs), half):
            used = k.min(a.outputs - n, half)
            sources = [
                Source(at, used, decoder(k, t, codec, m, n)) for at, m in zip((k.i64(0), half), matrices, strict=True)
            ]
            sums = product(k, t, sources, a.x + s.slot * slot, s.count, a.columns, rows, piece, room)
            for begin in k.range(0, s.count, t.panel):
                part, to = sums + begin * rows * 4, a.act + (s.slot + begin) * act_slot
                few = (s.count - begin) <= t.lanes
                _activate(k, a, after, part, half, used, few, [m.factor for m in matrices], to, n)


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


def gate_up_native(codec: Codec, exact: bool) -> Native:
    """act = swiglu(w1 h, w3 h) of all pairs, in panels; `exact` says how w2 takes them."""
    return Native(
        f"experts.gate_up.{codec.name}.{mode(exact)}",
        {
            **codec.fields,
            **dict.fromkeys(("x", "act", "counts", "segments", "room"), PTR),
            **dict.fromkeys(("columns", "outputs", "block", "room_bytes"), I64),
            **dict.fromkeys(("alpha", "beta", "limit"), F32),
        },
        lambda k, a: _gate_up(k, a, tiling(k.isa, exact=codec.exact), tiling(k.isa, exact=exact), codec),
    )


# --- w2, and the sum ---


def _down(k: Kernel, a: Any, t: Tiling, codec: Codec) -> None:
    room = a.room + k.thread * a.room_bytes
    blocks = (a.outputs + (a.block - 1)) // a.block
    slot = slot_of(t, a.columns)
    for task in k.tasks(k.load(I64, a.counts, _SEGMENTS, align=8) * blocks):
        s, start = _segment(k, a.segments, task // blocks), task % blocks * a.block
        matrix = codec.matrix(k, a, s.expert * 3 + 2)
        order = a.order + s.first * 8
        rows, piece = passes(k, t, s.count, a.block)
        for n in k.range(start, k.min(start + a.block, a.outputs), rows):
            used = k.min(a.outputs - n, rows)

            row = _gathered(k, a.y + n * 4, order, k.i64(1), a.outputs * 4)
            source = Source(k.i64(0), used, decoder(k, t, codec, matrix, n))
            sums = product(k, t, (source,), a.act + s.slot * slot, s.count, a.columns, rows, piece, room)
            put_rows(k, t, sums, s.count, rows, used, row, matrix.factor)


def down_native(codec: Codec) -> Native:
    """w2 act of all pairs, a row for each pair."""
    return Native(
        f"experts.down.{codec.name}",
        {
            **codec.fields,
            **dict.fromkeys(("act", "y", "counts", "order", "segments", "room"), PTR),
            **dict.fromkeys(("columns", "outputs", "block", "room_bytes"), I64),
        },
        lambda k, a: _down(k, a, tiling(k.isa, exact=codec.exact), codec),
    )


def _sum(k: Kernel, a: Any) -> None:
    tokens = count_of(k, a.rows)
    for task in k.tasks((tokens + (_TOKENS - 1)) // _TOKENS):
        for token in k.range(task * _TOKENS, k.min(task * _TOKENS + _TOKENS, tokens)):
            x, weights, y = (
                a.x + token * a.topk * a.width * 4,
                a.weights + token * a.topk * 4,
                a.y + token * a.width * 4,
            )
            for lanes, i in strips(k, a.width):
                sums = k.var(k.const(vec(F32, lanes), 0.0))
                for choice in k.range(a.topk):
                    weight = splat(k.load(F32, weights, choice * 4, align=4), lanes)
                    sums.set(fma(k, weight, load_f32(k, x + choice * a.width * 4, i, lanes), sums.get()))
                store_f32(k, sums.get() * splat(a.factor, lanes), y, i)


SUM = Native(
    "experts.sum",
    {**dict.fromkeys(("x", "weights", "y", "rows"), PTR), "topk": I64, "width": I64, "factor": F32},
    _sum,
)


# --- the op ---


@dataclass(frozen=True)
class Given:
    """Buffers of `experts` at capacity: h and y [T, H] and weights [T, K] float32, ids [T, K] int64."""

    h: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    y: torch.Tensor


def experts_works(
    room: Room,
    codecs: tuple[Codec, Codec],
    given: Given,
    attrs: Any,
    table: int,
    rows: int,
    base: int,
    bad: int,
    held: Any,
) -> list[Work]:
    """All of it.

    Args:
        room: of the workspace at address `base`.
        codecs: of w1 and w3, and of w2.
        attrs: of the op.
        table: address of the rows of w1, w3 and w2 of the first expert, of the second, ...
        rows: address of the number of tokens that are used.
        bad: address of an int64 that is set if there is an expert id that does not exist.
        held: what these addresses belong to.
    """
    at, topk = room.at(base), given.ids.shape[1]
    everything = ((base, base + room.bytes),)
    first, second = codecs
    groups = max(1, min(room.experts, room.pairs))
    tables = {name: at[name] for name in ("counts", "order", "segments", "panels")}

    def some(*names: str) -> dict[str, int]:
        return {name: tables[name] for name in names}

    def product_of(tiles: Tiling, columns: int, outputs: int, matrices: int) -> dict[str, int]:
        block = task_rows(tiles, outputs * matrices, groups, room.threads) // matrices
        sizes = {"columns": columns, "outputs": outputs, "block": block, "room_bytes": room.thread_bytes}
        return {"table": table, "room": at["rooms"], **sizes, **some("counts", "segments")}

    sort = {"ids": given.ids.data_ptr(), "rows": rows, "starts": at["starts"], "flag": bad, **tables}
    sort |= {"topk": topk, "experts": room.experts}
    packing = {"x": given.h.data_ptr(), "to": at["packed"], "topk": topk, "columns": room.width}
    packing |= some("counts", "order", "panels")
    gate_up: dict[str, int | float] = {"x": at["packed"], "act": at["act"]}
    gate_up |= {
        **product_of(room.first, room.width, room.inner, 2),
        **{n: attrs[n] for n in ("alpha", "beta", "limit")},
    }
    down = {"act": at["act"], "y": at["packed"], **some("order"), **product_of(room.second, room.inner, room.width, 1)}
    summed = {"x": at["packed"], "weights": given.weights.data_ptr(), "y": given.y.data_ptr(), "rows": rows}
    summed |= {"topk": topk, "width": room.width, "factor": attrs["routed_scaling_factor"]}
    return [
        Work(sort_native(first.exact), sort, (span(given.ids),), everything, held),
        Work(pack_native(first.exact), packing, (span(given.h),), everything, held),
        Work(gate_up_native(first, second.exact), gate_up, (), everything, held),
        Work(down_native(second), down, (), everything, held),
        Work(SUM, summed, (span(given.weights), *everything), (span(given.y),), held),
    ]


def many_experts(op: OpInstance, at: Binding, codecs: tuple[Codec, Codec]) -> NativeKernel:
    """`experts` on weights that a handle lists: `handle.table` with w1, w3 and w2 of each expert in turn
    (`m31_cpu.codecs.TABLE_ROW`), and `handle.look()`, which raises what a kernel has found damaged.

    Args:
        codecs: of w1 and w3, and of w2.
    """
    dim, width = rows_of(op), op.inputs[0].shape[1]  # type: ignore[union-attr]
    topk = op.inputs[1].shape[1]  # type: ignore[union-attr]
    tiles = tiling(at.isa, exact=codecs[0].exact), tiling(at.isa, exact=codecs[1].exact)
    experts, inner = int(op.attrs["experts"]), op.slots["w1.0"].shape[0]
    room = Room(tiles[0], tiles[1], at.step.size(dim) * at.step.size(topk), experts, int(width), inner, at.threads)
    bad = ctypes.c_int64(0)

    def works(outs: Sequence[Any], ins: Sequence[Any], w: Any, space: torch.Tensor | None, sizes: Sizes) -> list[Work]:
        assert space is not None
        h, ids, weights = ins
        given, base = Given(h, ids, weights, outs[0]), whole_lines(space.data_ptr())
        here = Room(*tiles, ids.numel(), experts, int(width), inner, at.threads)
        held = (sizes, space, w, bad)
        table, flag = w.table.ctypes.data, ctypes.addressof(bad)
        return experts_works(here, codecs, given, op.attrs, table, sizes.at(dim), base, flag, held)

    def after(w: Any) -> None:
        count, bad.value = bad.value, 0
        if count:
            raise OpRefused(f"{count} expert ids", where=f"op {op.name}", expected=f"from 0 to {experts - 1}")
        w.look()

    names = "/".join(dict.fromkeys(codec.name for codec in codecs))
    arithmetic = PAIRS if any(t.pairs for t in tiles) else EXACT
    reason = f"{names} in tiles, a tile for all tokens of an expert"
    return at.kernel(op, works, arithmetic, reason=reason, workspace_bytes=room.bytes + 64, after=after)
