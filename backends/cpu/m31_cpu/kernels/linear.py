"""Projections, router and lookups on weights that stay in their file (MODEL.md §2.1, §2.5).

Up to 16 tokens weights are read once, as dot products (`m31_cpu.kernels.dots`); for more they are decoded into tiles
(`m31_cpu.kernels.many`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from m31.errors import OpRefused
from m31.graph import OpInstance, Refusal
from m31_cpu.binding import EXACT, Binding, Factory, rows_of
from m31_cpu.codecs import TABLE_ROW, Codec
from m31_cpu.kernels.dots import MOST, Layout, dots, pack, slot_of
from m31_cpu.kernels.many import PAIRS, arithmetic_of, linear_bytes, linear_works, many_linear
from m31_cpu.kernels.rows import ADD, count_of
from m31_cpu.lang import F32, I64, PTR, Val, vec
from m31_cpu.native import Kernel, Native
from m31_cpu.program import NativeKernel, Sizes, Work, span
from m31_cpu.simd import fma, load_f32, sigmoid, splat, store_f32, strips, total
from m31_cpu.stored import codec_of

_SPAN = 256 << 10  # bytes of weights that a task reads, if there are enough of them
_LINE = 64


def whole_lines(size: int) -> int:
    """Rounded up to cache lines."""
    return -(-size // _LINE) * _LINE


# --- a few tokens ---


def span_rows(codec: Codec, columns: int, rows: int, threads: int) -> int:
    """Rows of a task: long pieces of the file, but something to do for every thread."""
    per_row = columns * codec.bits // 8 + (columns // codec.group if codec.group else 0)
    wanted = min(-(-_SPAN // max(per_row, 1)), -(-rows // (4 * threads)))
    return max(8, -(-wanted // 8) * 8)


def pack_rows(k: Kernel, codec: Codec, x: Val, count: Val, columns: Val, room: Val) -> tuple[Val, Val]:
    """Pack rows that lie side by side; the addresses of the packed ones, and what is left of the room, as scratch."""
    scratch = Layout(codec, k.isa).scratch
    pointers = room + scratch
    slot = slot_of(k, codec, columns)
    for j in k.range(0, count):
        to = pointers + MOST * 8 + j * slot
        pack(k, codec, x + j * columns * 4, columns, to)
        k.store(to, pointers, j * 8, align=8)
    return pointers, room


def _few(k: Kernel, a: Any, codec: Codec) -> None:
    count = count_of(k, a.rows)
    with k.when(count > 0):
        inputs, scratch = pack_rows(k, codec, a.x, count, a.columns, a.room + k.thread * a.room_bytes)
        matrix = codec.matrix(k, a)
        for task in k.tasks((a.outputs + a.span - 1) // a.span):
            row = task * a.span
            rows = k.min(a.outputs - row, a.span)
            dots(k, codec, matrix, row, rows, a.columns, inputs, count, a.y + row * 4, a.outputs * 4, scratch)


def few_native(codec: Codec) -> Native:
    """y = x W^T for at most 16 rows of x."""
    pointers, numbers = ("x", "y", "rows", "room"), ("columns", "outputs", "span", "room_bytes")
    return Native(
        f"linear.{codec.name}",
        {**codec.fields, **dict.fromkeys(pointers, PTR), **dict.fromkeys(numbers, I64)},
        lambda k, a: _few(k, a, codec),
    )


@dataclass(frozen=True)
class _Product:
    """y = x W^T within an op: works and workspace for any number of tokens."""

    at: Binding
    codec: Codec
    capacity: int
    columns: int

    @property
    def few(self) -> bool:
        """Whether it runs as dot products."""
        return self.capacity <= MOST

    @property
    def arithmetic(self) -> Any:
        """What it computes with."""
        if not self.few:
            return arithmetic_of(self.at, self.codec)
        return PAIRS if self.codec.pairs(self.at.isa) else EXACT

    @property
    def _thread(self) -> int:
        return whole_lines(Layout(self.codec, self.at.isa).room(self.columns, min(self.capacity, MOST)) + MOST * 8)

    @property
    def bytes(self) -> int:
        """Of the workspace."""
        if self.few:
            return self.at.threads * self._thread
        return linear_bytes(self.at, self.codec, self.capacity, self.columns)

    def works(
        self, x: torch.Tensor, y: torch.Tensor, table: int, rows: int, room: int, held: tuple[Any, ...]
    ) -> list[Work]:
        """As `many.linear_works`."""
        if not self.few:
            return linear_works(self.at, self.codec, x, y, table, rows, room, held)
        values = {
            "table": table,
            "x": x.data_ptr(),
            "y": y.data_ptr(),
            "rows": rows,
            "room": room,
            "columns": self.columns,
            "outputs": y.shape[1],
            "span": span_rows(self.codec, self.columns, y.shape[1], self.at.threads),
            "room_bytes": self._thread,
        }
        return [Work(few_native(self.codec), values, (span(x),), (span(y), (room, room + self.bytes)), held)]


def _product(op: OpInstance, at: Binding, codec: Codec, given: int = 0) -> _Product:
    dim, columns = op.inputs[given].shape  # type: ignore[union-attr]
    return _Product(at, codec, at.step.size(dim), int(columns))


def linear(op: OpInstance, at: Binding) -> NativeKernel | Refusal:
    """`linear` and `lm_head`."""
    codec = codec_of(op, *op.slots)
    if isinstance(codec, Refusal):
        return codec
    product = _product(op, at, codec)
    if not product.few:
        return many_linear(op, at, codec)

    def works(outs: Sequence[Any], ins: Sequence[Any], w: Any, room: torch.Tensor | None, sizes: Sizes) -> list[Work]:
        assert room is not None
        table, rows, start = w.table.ctypes.data, sizes.at(rows_of(op)), whole_lines(room.data_ptr())
        return product.works(ins[0], outs[0], table, rows, start, (sizes, room, w))

    return at.kernel(
        op,
        works,
        product.arithmetic,
        reason=f"{codec.name} in place",
        workspace_bytes=product.bytes + _LINE,
        after=lambda w: w.look(),
    )


# --- router ---


def _route(k: Kernel, a: Any) -> None:
    """Scores in place of their logits; the best of score + bias, in order, the lower id first among equals."""
    for token in k.tasks(count_of(k, a.rows)):
        scores = a.scores + token * a.experts * 4
        choices = a.choices + token * a.experts * 4
        ids, weights = a.ids + token * a.topk * 8, a.weights + token * a.topk * 4
        for lanes, i in strips(k, a.experts):
            score = sigmoid(k, load_f32(k, scores, i, lanes))
            store_f32(k, score, scores, i)
            store_f32(k, score + load_f32(k, a.bias, i, lanes), choices, i)
        sum_ = k.var(k.f32(0.0))
        for j in k.range(0, a.topk):
            best, at = k.var(k.f32(float("-inf"))), k.var(k.i64(-1))
            for e in k.range(0, a.experts):
                choice = k.load(F32, choices, e * 4, align=4)
                free = k.var(k.i64(1))
                for before in k.range(0, j):
                    taken = k.load(I64, ids, before * 8, align=8)
                    free.set(taken.eq(e).select(0, free.get()))
                better = (choice > best.get()) | (at.get() < 0)  # with scores that are NaN there are ids all the same
                with k.when(better & free.get().ne(0)):
                    best.set(choice)
                    at.set(e)
            k.store(at.get(), ids, j * 8, align=8)
            score = k.load(F32, scores, at.get() * 4, align=4)
            k.store(score, weights, j * 4, align=4)
            sum_.add(score)
        for j in k.range(0, a.topk):
            k.store(k.load(F32, weights, j * 4, align=4) / sum_.get(), weights, j * 4, align=4)


ROUTE = Native(
    "route",
    {
        **dict.fromkeys(("scores", "choices", "bias", "ids", "weights", "rows"), PTR),
        **dict.fromkeys(("experts", "topk"), I64),
    },
    _route,
)


def router(op: OpInstance, at: Binding) -> NativeKernel | Refusal:
    """See the op."""
    codec = codec_of(op, "weight")
    if isinstance(codec, Refusal):
        return codec
    product = _product(op, at, codec)
    experts, dim = op.slots["weight"].shape[0], rows_of(op)
    buffer = whole_lines(4 * product.capacity * experts)

    def works(outs: Sequence[Any], ins: Sequence[Any], w: Any, room: torch.Tensor | None, sizes: Sizes) -> list[Work]:
        assert room is not None
        (h,), (ids, weights) = ins, outs
        start, rows, held = whole_lines(room.data_ptr()), sizes.at(dim), (sizes, room, w)
        first = start - room.data_ptr()
        scores = room[first : first + 4 * len(h) * experts].view(torch.float32).view(len(h), experts)
        values = {
            "scores": start,
            "choices": start + buffer,
            "bias": w.vectors["bias"].data_ptr(),
            "ids": ids.data_ptr(),
            "weights": weights.data_ptr(),
            "rows": rows,
            "experts": experts,
            "topk": op.attrs["topk"],
        }
        both = (start, start + 2 * buffer)
        return [
            *product.works(h, scores, w.table.ctypes.data, rows, start + 2 * buffer, held),
            Work(ROUTE, values, (both,), (span(ids), span(weights), both), held),
        ]

    return at.kernel(
        op,
        works,
        product.arithmetic,
        reason=f"{codec.name} in place",
        workspace_bytes=2 * buffer + product.bytes + _LINE,
        after=lambda w: w.look(),
    )


# --- lookups ---


class _Plain:
    """Rows that are decoded to float32."""

    pairs = False


def _lookup(k: Kernel, a: Any, codec: Codec) -> None:
    matrix = codec.matrix(k, a)
    for token in k.tasks(count_of(k, a.rows)):
        row = k.load(I64, a.ids, token * 8, align=8)
        known = (row >= 0) & (row < a.entries)
        with k.unless(known):
            k.store(k.i64(1), a.refused, align=8)
        with k.when(known):
            y = a.y + token * a.columns * 4
            codec.row(k, _Plain, matrix, row, k.i64(0), a.columns, y)
            if codec.group:
                for lanes, i in strips(k, a.columns):
                    store_f32(k, load_f32(k, y, i, lanes) * splat(matrix.factor, lanes), y, i)


def lookup_native(codec: Codec) -> Native:
    """y[t] = table[ids[t]]."""
    return Native(
        f"lookup.{codec.name}",
        {**codec.fields, **dict.fromkeys(("ids", "y", "rows", "refused"), PTR), "columns": I64, "entries": I64},
        lambda k, a: _lookup(k, a, codec),
    )


def lookup(op: OpInstance, at: Binding) -> NativeKernel | Refusal:
    """`embedding` and `markov_embedding`."""
    codec = codec_of(op, *op.slots)
    if isinstance(codec, Refusal):
        return codec
    if codec.name == "nvfp4":
        return Refusal("a row of NVFP4 would be rounded twice")
    ((entries, columns),) = (slot.shape for slot in op.slots.values())
    refused = ctypes.c_int64(0)

    def works(outs: Sequence[Any], ins: Sequence[Any], w: Any, _: torch.Tensor | None, sizes: Sizes) -> list[Work]:
        (ids,), (y,) = ins, outs
        values = {
            "table": w.table.ctypes.data,
            "ids": ids.data_ptr(),
            "y": y.data_ptr(),
            "rows": sizes.at(rows_of(op)),
            "refused": ctypes.addressof(refused),
            "columns": columns,
            "entries": entries,
        }
        return [Work(lookup_native(codec), values, (span(ids),), (span(y),), (sizes, w, refused))]

    def after(w: Any) -> None:
        if refused.value:
            refused.value = 0
            raise OpRefused("an id that the table does not have", where=f"op {op.name}", expected=f"0 to {entries - 1}")
        w.look()

    return at.kernel(op, works, EXACT, reason=f"{codec.name} in place", after=after)


# --- the draft's Markov head, confidence and taps (MODEL.md §5.1, §5.3) ---


def markov_bias(op: OpInstance, at: Binding) -> NativeKernel | Refusal:
    """See the op."""
    codec = codec_of(op, *op.slots)
    if isinstance(codec, Refusal):
        return codec
    product = _product(op, at, codec, given=1)
    dim = rows_of(op)

    def works(outs: Sequence[Any], ins: Sequence[Any], w: Any, room: torch.Tensor | None, sizes: Sizes) -> list[Work]:
        assert room is not None
        (base, m), (y,) = ins, outs
        start, rows, held = whole_lines(room.data_ptr()), sizes.at(dim), (sizes, room, w)
        values = {
            "x": y.data_ptr(),
            "z": base.data_ptr(),
            "y": y.data_ptr(),
            "rows": rows,
            "width": y.shape[1],
        }
        return [
            *product.works(m, y, w.table.ctypes.data, rows, start, held),
            Work(ADD, values, (span(y), span(base)), (span(y),), held),
        ]

    return at.kernel(
        op,
        works,
        product.arithmetic,
        reason=f"{codec.name} in place",
        workspace_bytes=product.bytes + _LINE,
        after=lambda w: w.look(),
    )


def _concat(k: Kernel, a: Any) -> None:
    for row in k.tasks(count_of(k, a.rows)):
        z = a.z + row * (a.first + a.second)
        k.copy(z, a.x + row * a.first, a.first)
        k.copy(z + a.first, a.y + row * a.second, a.second)


CONCAT = Native("concat", {**dict.fromkeys(("x", "y", "z", "rows"), PTR), "first": I64, "second": I64}, _concat)


def concat(op: OpInstance, at: Binding) -> NativeKernel:
    """See the op."""

    def works(outs: Sequence[Any], ins: Sequence[Any], w: Any, _: torch.Tensor | None, sizes: Sizes) -> list[Work]:
        (x, y), (z,) = ins, outs
        values = {
            "x": x.data_ptr(),
            "y": y.data_ptr(),
            "z": z.data_ptr(),
            "rows": sizes.at(rows_of(op)),
            "first": 4 * x.shape[1],
            "second": 4 * y.shape[1],
        }
        return [Work(CONCAT, values, (span(x), span(y)), (span(z),), (sizes,))]

    return at.kernel(op, works, EXACT)


def _confidence(k: Kernel, a: Any) -> None:
    for row in k.tasks(count_of(k, a.rows)):
        sums, rest = k.var(k.const(vec(F32, k.isa.lanes), 0.0)), k.var(k.load(F32, a.bias, align=4))
        for x, w, width in ((a.u, a.w, a.channels), (a.m, a.w + a.channels * 4, a.rank)):
            for lanes, i in strips(k, width):
                value, weight = load_f32(k, x + row * width * 4, i, lanes), load_f32(k, w, i, lanes)
                if lanes == 1:
                    rest.add((value * weight).lane(0))
                else:
                    sums.set(fma(k, value, weight, sums.get()))
        found = sigmoid(k, splat(total(sums.get()) + rest.get(), 4)).lane(0)
        k.store(found, a.c, row * 4, align=4)


CONFIDENCE = Native(
    "confidence",
    {**dict.fromkeys(("u", "m", "w", "bias", "c", "rows"), PTR), "channels": I64, "rank": I64},
    _confidence,
)


def confidence(op: OpInstance, at: Binding) -> NativeKernel:
    """See the op; its weights are held."""
    with_markov = bool(op.attrs["with_markov"])

    def works(outs: Sequence[Any], ins: Sequence[Any], w: Any, _: torch.Tensor | None, sizes: Sizes) -> list[Work]:
        (u, m), (c,) = ins, outs
        values = {
            "u": u.data_ptr(),
            "m": m.data_ptr(),
            "w": w.values["weight"].data_ptr(),
            "bias": w.values["bias"].data_ptr(),
            "c": c.data_ptr(),
            "rows": sizes.at(rows_of(op)),
            "channels": u.shape[1],
            "rank": m.shape[1] if with_markov else 0,
        }
        return [Work(CONFIDENCE, values, (span(u), span(m)), (span(c),), (sizes, w))]

    return at.kernel(op, works, EXACT)


LINEAR: Mapping[str, Factory] = {
    "linear": linear,
    "lm_head": linear,
    "router": router,
    "embedding": lookup,
    "markov_embedding": lookup,
    "markov_bias": markov_bias,
    "concat": concat,
    "confidence": confidence,
}
__all__ = ["LINEAR", "TABLE_ROW", "pack_rows", "span_rows", "whole_lines"]
