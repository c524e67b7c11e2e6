"""`linear` and `lm_head` for many tokens, on tiles (`m31_cpu.kernels.tiled`)."""

from __future__ import annotations

from typing import Any

from m31_cpu.kernels.rows import count_of
from m31_cpu.kernels.tiled import COLUMNS, SEGMENT, Source, Tiling, pack, passes, product, put_rows, tiling
from m31_cpu.lang import F32, I64, PTR, Val
from m31_cpu.native import Kernel, Native


def _pack(k: Kernel, a: Any, t: Tiling) -> None:
    count = count_of(k, a.rows)
    panels, blocks = (count + (t.panel - 1)) // t.panel, (a.columns + (COLUMNS - 1)) // COLUMNS
    slot = ((a.columns + 3) & -4) * t.size
    for task in k.tasks(panels * blocks):
        begin, first = task // blocks * t.panel, task % blocks * COLUMNS
        x = a.x + begin * a.columns * 4
        last = k.min(first + COLUMNS, a.columns)
        pack(
            k,
            t,
            lambda j, x=x: x + j * a.columns * 4,
            k.min(count - begin, k.i64(t.panel)),
            first,
            last,
            a.columns,
            a.to + begin * slot,
        )


def pack_native(exact: bool) -> Native:
    return Native(
        f"pack.{'exact' if exact else 'any'}",
        {"x": PTR, "to": PTR, "rows": PTR, "columns": I64},
        lambda k, a: _pack(k, a, tiling(k.isa, exact=exact)),
    )


def many_native(codec: Any) -> Native:
    def emit(k: Kernel, a: Any) -> None:
        t = tiling(k.isa, exact=codec.exact)
        count = count_of(k, a.rows)
        slot = ((a.columns + 3) & -4) * t.size
        segments, blocks = (count + (SEGMENT - 1)) // SEGMENT, (a.outputs + (a.block - 1)) // a.block
        room = a.room + k.thread * a.room_bytes
        for task in k.tasks(segments * blocks):
            begin, n = task // blocks * SEGMENT, task % blocks * a.block
            here = k.min(count - begin, k.i64(SEGMENT))
            rows, span = passes(k, t, here, a.block)
            for n in k.range(n, k.min(n + a.block, a.outputs), rows):
                used = k.min(a.outputs - n, rows)

                def decode(r: Val, first: Val, width: Val, to: Val, n: Val = n) -> None:
                    codec.row(k, t, a, n + r, first, width, to)

                source = Source(k.i64(0), used, decode)
                sums = product(k, t, (source,), a.x + begin * slot, here, a.columns, rows, span, room)
                y = a.y + (begin * a.outputs + n) * 4
                put_rows(k, t, sums, here, rows, used, lambda j, y=y: y + j * a.outputs * 4, codec.scale(k, a))

    return Native(
        f"many.{codec.name}",
        {
            **codec.fields,
            "x": PTR,
            "y": PTR,
            "room": PTR,
            "rows": PTR,
            "columns": I64,
            "outputs": I64,
            "block": I64,
            "room_bytes": I64,
        },
        emit,
    )
