"""`linear` and `lm_head` for many tokens: inputs packed once, then tiles of weights (`m31_cpu.kernels.tiled`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from m31.graph import Arithmetic, OpInstance
from m31_cpu.binding import EXACT, Binding, rows_of
from m31_cpu.codecs import Codec
from m31_cpu.kernels.rows import count_of
from m31_cpu.kernels.tiled import (
    COLUMNS,
    SEGMENT,
    Source,
    Tiling,
    decoder,
    mode,
    pack,
    passes,
    product,
    put_rows,
    slot_of,
    task_rows,
    tiling,
    whole_lines,
)
from m31_cpu.lang import I64, PTR, Val
from m31_cpu.native import Kernel, Native
from m31_cpu.program import NativeKernel, Sizes, Work, span

PAIRS = Arithmetic("bfloat16", "float32", "float32")


def _pack(k: Kernel, a: Any, t: Tiling) -> None:
    count = count_of(k, a.rows)
    panels, blocks = (count + (t.panel - 1)) // t.panel, (a.columns + (COLUMNS - 1)) // COLUMNS
    slot, size = slot_of(t, a.columns), a.columns * 4
    for task in k.tasks(panels * blocks):
        begin, first = task // blocks * t.panel, task % blocks * COLUMNS
        x, last = a.x + begin * size, k.min(first + COLUMNS, a.columns)
        here = k.min(count - begin, k.i64(t.panel))
        pack(k, t, _rows(x, size), here, first, last, a.columns, a.to + begin * slot)


def _rows(start: Val, size: Val) -> Callable[[Val], Val]:
    """Where row j lies, rows of `size` bytes from `start` on."""
    return lambda j: start + j * size


def pack_native(exact: bool) -> Native:
    """Rows of float32 into panels."""
    return Native(
        f"tiles.pack.{mode(exact)}",
        {"x": PTR, "to": PTR, "rows": PTR, "columns": I64},
        lambda k, a: _pack(k, a, tiling(k.isa, exact=exact)),
    )


def _multiply(k: Kernel, a: Any, codec: Codec) -> None:
    t, matrix, count = tiling(k.isa, exact=codec.exact), codec.matrix(k, a), count_of(k, a.rows)
    slot = slot_of(t, a.columns)
    segments, blocks = (count + (SEGMENT - 1)) // SEGMENT, (a.outputs + (a.block - 1)) // a.block
    room = a.room + k.thread * a.room_bytes
    for task in k.tasks(segments * blocks):
        begin, start = task // blocks * SEGMENT, task % blocks * a.block
        here = k.min(count - begin, k.i64(SEGMENT))
        rows, columns = passes(k, t, here, a.block)
        for n in k.range(start, k.min(start + a.block, a.outputs), rows):
            used = k.min(a.outputs - n, rows)
            source = Source(k.i64(0), used, decoder(k, t, codec, matrix, n))
            sums = product(k, t, (source,), a.x + begin * slot, here, a.columns, rows, columns, room)
            y = a.y + (begin * a.outputs + n) * 4
            put_rows(k, t, sums, here, rows, used, _rows(y, a.outputs * 4), matrix.factor)


def multiply_native(codec: Codec) -> Native:
    """Panels times a stored matrix."""
    pointers, numbers = ("x", "y", "room", "rows"), ("columns", "outputs", "block", "room_bytes")
    return Native(
        f"tiles.multiply.{codec.name}",
        {**codec.fields, **dict.fromkeys(pointers, PTR), **dict.fromkeys(numbers, I64)},
        lambda k, a: _multiply(k, a, codec),
    )


def linear_works(
    at: Binding, codec: Codec, x: torch.Tensor, y: torch.Tensor, table: int, rows: int, room: int, held: tuple[Any, ...]
) -> list[Work]:
    """y = x W^T.

    Args:
        codec: of W.
        x, y: [T, K] and [T, N] float32, at capacity.
        table: address of W's row, `m31_cpu.codecs.TABLE_ROW`.
        rows: address of the number of rows that are used.
        room: address of `linear_bytes` bytes.
        held: what these addresses belong to.
    """
    t, (capacity, columns), outputs = tiling(at.isa, exact=codec.exact), x.shape, y.shape[1]
    packed = whole_lines(t.slots(capacity) * t.slot(columns))
    thread = whole_lines(t.room(capacity))
    parts = (room, room + packed), (room + packed, room + packed + at.threads * thread)
    values = {"x": x.data_ptr(), "to": room, "rows": rows, "columns": columns}
    first = Work(pack_native(codec.exact), values, (span(x),), parts[:1], held)
    values = {
        "table": table,
        "x": room,
        "y": y.data_ptr(),
        "room": room + packed,
        "rows": rows,
        "columns": columns,
        "outputs": outputs,
        "block": task_rows(t, outputs, -(-capacity // SEGMENT), at.threads),
        "room_bytes": thread,
    }
    return [first, Work(multiply_native(codec), values, parts[:1], (span(y), parts[1]), held)]


def linear_bytes(at: Binding, codec: Codec, capacity: int, columns: int) -> int:
    """Bytes of panels and of every thread's tile and sums."""
    t = tiling(at.isa, exact=codec.exact)
    return whole_lines(t.slots(capacity) * t.slot(columns)) + at.threads * whole_lines(t.room(capacity))


def arithmetic_of(at: Binding, codec: Codec) -> Arithmetic:
    """What tiles compute with."""
    return PAIRS if tiling(at.isa, exact=codec.exact).pairs else EXACT


def many_linear(op: OpInstance, at: Binding, codec: Codec) -> NativeKernel:
    """`linear` or `lm_head` on weights that a handle lists: `handle.table` (`m31_cpu.codecs.TABLE_ROW`), and
    `handle.look()`, which raises what a kernel has found damaged."""
    dim = rows_of(op)
    columns = at.step.size(op.inputs[0].shape[1])  # type: ignore[union-attr]

    def works(outs: Sequence[Any], ins: Sequence[Any], w: Any, room: torch.Tensor | None, sizes: Sizes) -> list[Work]:
        (x,), (y,) = ins, outs
        assert room is not None
        start = whole_lines(room.data_ptr())
        return linear_works(at, codec, x, y, w.table.ctypes.data, sizes.at(dim), start, (sizes, room, w))

    return at.kernel(
        op,
        works,
        arithmetic_of(at, codec),
        reason=f"{codec.name} in tiles",
        workspace_bytes=linear_bytes(at, codec, at.step.size(dim), columns) + 64,
        after=lambda w: w.look(),
    )
