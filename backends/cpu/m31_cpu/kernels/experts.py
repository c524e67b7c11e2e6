"""The op `experts` for up to 16 tokens (MODEL.md §2.5): the weights of the chosen experts are read once.

Two kernels. The first takes rows of w1 and w3 of an expert together, for all tokens that chose it, and keeps the
activation in float32; the second takes the same rows of w2 of all chosen experts and sums their outputs per token, in
the order of its choices. Pairs of token and choice are put in the order of experts by every thread for itself: there
are few.
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
from m31_cpu.codecs import Codec
from m31_cpu.isa import Isa
from m31_cpu.kernels.dots import MOST, Layout, dots, pack, slot_of
from m31_cpu.kernels.grouped import many_experts
from m31_cpu.kernels.linear import span_rows, whole_lines
from m31_cpu.kernels.many import PAIRS
from m31_cpu.kernels.rows import count_of
from m31_cpu.lang import F32, I64, PTR, Val, vec
from m31_cpu.native import Kernel, Native
from m31_cpu.program import NativeKernel, Sizes, Work, span
from m31_cpu.simd import fma, load_f32, splat, store_f32, strips, swiglu
from m31_cpu.stored import codec_of

_SPAN = 64  # most rows of a task
_LINE = 64


@dataclass(frozen=True)
class _Room:
    """What a thread keeps, in bytes.

    Args:
        codec: of the weights that it multiplies with.
        isa: the instruction set.
        columns: of them.
        topk: choices of a token.
        tokens: how many there are at most.
    """

    codec: Codec
    isa: Isa
    columns: int
    topk: int
    tokens: int

    @property
    def bytes(self) -> int:
        """All of it: scratch, lists, sums of a task, packed inputs."""
        pairs, layout = self.tokens * self.topk, Layout(self.codec, self.isa)
        lists = 5 * 8 * (MOST * self.topk + 1)
        sums = 4 * _SPAN * max(2 * MOST, pairs)
        return whole_lines(layout.scratch + lists + _LINE + sums + _LINE + pairs * layout.slot(self.columns))


@dataclass(frozen=True)
class _Groups:
    """Pairs in the order of experts, as values of a kernel.

    Args:
        count: of experts that are chosen.
        experts: [count] which.
        starts: [count + 1] the first pair of each.
        order: the pair in each place.
        places: the place of each pair, -1 for an expert that does not exist.
        pointers: room for an address for each place.
        rest: what follows in the room.
    """

    count: Val
    experts: Val
    starts: Val
    order: Val
    places: Val
    pointers: Val
    rest: Val


def _grouped(k: Kernel, a: Any, room: Val, pairs: Val) -> _Groups:
    size = (a.topk * MOST + 1) * 8
    experts, starts, order, places, pointers = (room + size * i for i in range(5))
    found = k.var(k.i64(0))
    for i in k.range(0, pairs):  # `places` holds each pair's group first
        expert = k.load(I64, a.ids, i * 8, align=8)
        group = k.var(k.i64(-1))
        known = (expert >= 0) & (expert < a.experts)
        with k.when(known):
            for d in k.range(0, found.get()):
                same = k.load(I64, experts, d * 8, align=8).eq(expert)
                group.set(same.select(d, group.get()))
            with k.when(group.get() < 0):
                group.set(found.get())
                k.store(expert, experts, found.get() * 8, align=8)
                found.add(1)
        with k.unless(known):
            k.store(k.i64(1), a.refused, align=8)
        k.store(group.get(), places, i * 8, align=8)
    place = k.var(k.i64(0))
    for d in k.range(0, found.get()):
        k.store(place.get(), starts, d * 8, align=8)
        for i in k.range(0, pairs):
            with k.when(k.load(I64, places, i * 8, align=8).eq(d)):
                k.store(i, order, place.get() * 8, align=8)
                place.add(1)
    k.store(place.get(), starts, found.get() * 8, align=8)
    for at in k.range(0, place.get()):
        k.store(at, places, k.load(I64, order, at * 8, align=8) * 8, align=8)
    rest = room + size * 5
    return _Groups(found.get(), experts, starts, order, places, pointers, _aligned(k, rest))


def _aligned(k: Kernel, at: Val) -> Val:
    word = Val(k, k.b.ptrtoint(at.v, I64))
    return at + ((-word) & (_LINE - 1))


def _each_group(k: Kernel, g: _Groups, d: Val) -> Any:
    """`for place, count in ...`: the places of a group, 16 at a time: a token may choose an expert twice."""
    end = k.load(I64, g.starts, d * 8 + 8, align=8)
    for place in k.range(k.load(I64, g.starts, d * 8, align=8), end, MOST):
        yield place, k.min(end - place, k.i64(MOST))


# --- w1 and w3 with the activation ---


def _gate_up(k: Kernel, a: Any, codec: Codec) -> None:
    room, tokens = a.room + k.thread * a.room_bytes, count_of(k, a.rows)
    g = _grouped(k, a, room + Layout(codec, k.isa).scratch, tokens * a.topk)
    gate = g.rest
    up = gate + MOST * _SPAN * 4
    packed, slot = up + MOST * _SPAN * 4, slot_of(k, codec, a.width)
    for token in k.range(0, tokens):
        pack(k, codec, a.h + token * a.width * 4, a.width, packed + token * slot)
    for place in k.range(0, k.load(I64, g.starts, g.count * 8, align=8)):
        token = k.load(I64, g.order, place * 8, align=8) // a.topk
        k.store(packed + token * slot, g.pointers, place * 8, align=8)
    blocks = (a.inner + a.span - 1) // a.span
    for task in k.tasks(g.count * blocks):
        d, row = task // blocks, task % blocks * a.span
        rows = k.min(a.inner - row, a.span)
        first = k.load(I64, g.experts, d * 8, align=8) * 3
        for place, count in _each_group(k, g, d):
            for third, to in enumerate((gate, up)):
                matrix, inputs = codec.matrix(k, a, first + third), g.pointers + place * 8
                dots(k, codec, matrix, row, rows, a.width, inputs, count, to, k.i64(_SPAN * 4), room)
            for j in k.range(0, count):
                act = a.act + ((place + j) * a.inner + row) * 4
                for lanes, i in strips(k, rows):
                    g1, u1 = (load_f32(k, x + j * (_SPAN * 4), i, lanes) for x in (gate, up))
                    store_f32(k, swiglu(k, g1, u1, a.alpha, a.beta, a.limit), act, i)


_SHARED = {
    **dict.fromkeys(("table", "ids", "act", "rows", "room", "refused"), PTR),
    **dict.fromkeys(("topk", "experts", "width", "inner", "span", "room_bytes"), I64),
}


def gate_up_native(codec: Codec) -> Native:
    """act = swiglu(w1 h, w3 h) for each pair, in the order of experts."""
    return Native(
        f"experts.few.gate_up.{codec.name}",
        {**_SHARED, "h": PTR, **dict.fromkeys(("alpha", "beta", "limit"), F32)},
        lambda k, a: _gate_up(k, a, codec),
    )


# --- w2 and the sum ---


def _down(k: Kernel, a: Any, codec: Codec) -> None:
    room, tokens = a.room + k.thread * a.room_bytes, count_of(k, a.rows)
    g = _grouped(k, a, room + Layout(codec, k.isa).scratch, tokens * a.topk)
    places = k.load(I64, g.starts, g.count * 8, align=8)
    sums = g.rest
    packed, slot = sums + places * (_SPAN * 4), slot_of(k, codec, a.inner)
    for place in k.range(0, places):
        to = packed + place * slot
        pack(k, codec, a.act + place * a.inner * 4, a.inner, to)
        k.store(to, g.pointers, place * 8, align=8)
    for task in k.tasks((a.width + a.span - 1) // a.span):
        row = task * a.span
        rows = k.min(a.width - row, a.span)
        for d in k.range(0, g.count):
            matrix = codec.matrix(k, a, k.load(I64, g.experts, d * 8, align=8) * 3 + 2)
            for place, count in _each_group(k, g, d):
                to, inputs = sums + place * (_SPAN * 4), g.pointers + place * 8
                dots(k, codec, matrix, row, rows, a.inner, inputs, count, to, k.i64(_SPAN * 4), room)
        for token in k.range(0, tokens):
            y = a.y + (token * a.width + row) * 4
            for lanes, i in strips(k, rows):
                value = k.var(k.const(vec(F32, lanes), 0.0))
                for choice in k.range(0, a.topk):
                    pair = token * a.topk + choice
                    place = k.load(I64, g.places, pair * 8, align=8)
                    with k.when(place >= 0):
                        weight = splat(k.load(F32, a.weights, pair * 4, align=4), lanes)
                        x = load_f32(k, sums + place * (_SPAN * 4), i, lanes)
                        value.set(fma(k, weight, x, value.get()))
                store_f32(k, value.get() * splat(a.factor, lanes), y, i)


def down_native(codec: Codec) -> Native:
    """y = factor * sum over choices of weight * w2 act."""
    return Native(
        f"experts.few.down.{codec.name}",
        {**_SHARED, "weights": PTR, "y": PTR, "factor": F32},
        lambda k, a: _down(k, a, codec),
    )


def codecs_of(op: OpInstance) -> tuple[Codec, Codec] | Refusal:
    """How w1 and w3, and how w2 of an instance are stored."""
    found = []
    for names in (("w1", "w3"), ("w2",)):
        codec = codec_of(op, *(slot for slot in op.slots if slot.partition(".")[0] in names))
        if isinstance(codec, Refusal):
            return codec
        found.append(codec)
    return found[0], found[1]


def experts(op: OpInstance, at: Binding) -> NativeKernel | Refusal:
    """See the op."""
    codecs = codecs_of(op)
    if isinstance(codecs, Refusal):
        return codecs
    dim = rows_of(op)
    tokens = at.step.size(dim)
    if tokens > MOST:
        return many_experts(op, at, codecs)
    topk = int(op.inputs[1].shape[1])  # type: ignore[union-attr]
    inner, width = op.slots["w1.0"].shape
    rooms = [_Room(c, at.isa, n, topk, tokens) for c, n in zip(codecs, (width, inner), strict=True)]
    room_bytes = max(room.bytes for room in rooms)
    act_bytes = whole_lines(4 * tokens * topk * inner)
    spans = [
        min(_SPAN, span_rows(codec, columns, rows, at.threads))
        for codec, columns, rows in zip(codecs, (width, inner), (inner, width), strict=True)
    ]
    refused = ctypes.c_int64(0)
    count = int(op.attrs["experts"])

    def works(outs: Sequence[Any], ins: Sequence[Any], w: Any, space: torch.Tensor | None, sizes: Sizes) -> list[Work]:
        assert space is not None
        (h, ids, weights), (y,) = ins, outs
        act = whole_lines(space.data_ptr())
        room = act + act_bytes
        shared = {
            "table": w.table.ctypes.data,
            "ids": ids.data_ptr(),
            "act": act,
            "rows": sizes.at(dim),
            "room": room,
            "refused": ctypes.addressof(refused),
            "topk": topk,
            "experts": count,
            "width": width,
            "inner": inner,
            "room_bytes": room_bytes,
        }
        kept, middle = (room, room + at.threads * room_bytes), (act, room)
        held = (sizes, space, w, refused)
        activation = {name: op.attrs[name] for name in ("alpha", "beta", "limit")}
        last = {"weights": weights.data_ptr(), "y": y.data_ptr(), "factor": op.attrs["routed_scaling_factor"]}
        return [
            Work(
                gate_up_native(codecs[0]),
                {**shared, **activation, "h": h.data_ptr(), "span": spans[0]},
                (span(h), span(ids)),
                (middle, kept),
                held,
            ),
            Work(
                down_native(codecs[1]),
                {**shared, **last, "span": spans[1]},
                (middle, span(ids), span(weights)),
                (span(y), kept),
                held,
            ),
        ]

    def after(w: Any) -> None:
        if refused.value:
            refused.value = 0
            raise OpRefused("an expert that does not exist", where=f"op {op.name}", expected=f"from 0 to {count - 1}")
        w.look()

    names = "/".join(dict.fromkeys(codec.name for codec in codecs))
    return at.kernel(
        op,
        works,
        PAIRS if any(codec.pairs(at.isa) for codec in codecs) else EXACT,
        reason=f"{names} in place",
        workspace_bytes=act_bytes + at.threads * room_bytes + _LINE,
        after=after,
    )


EXPERTS: Mapping[str, Factory] = {"experts": experts}
