"""Keys, values and index keys into pages, quantised as their format says (MODEL.md §2.4, §3.4, §3.5).

A task is 16 tokens of one head: as many as share the vectors of a page, so that threads do not write to one line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import torch

from m31.graph import OpInstance
from m31_cpu.binding import EXACT, Binding, Factory
from m31_cpu.kernels.rows import count_of
from m31_cpu.lang import F32, I8, I32, I64, PTR, Val, vec
from m31_cpu.native import Kernel, Native
from m31_cpu.numbers import e4m3, finite_or_nan, magnitude, most, to_e2m1, to_e4m3, to_int8
from m31_cpu.pages import LANES, Store
from m31_cpu.program import NativeKernel, Sizes, Work, span
from m31_cpu.simd import narrow

_TOKENS = 16  # of a task
_GROUP = 16  # channels under an NVFP4 scale

# `put(kernel, vector, page parts, offset in the page)`: parts are the pointers to one head's page
Put = Callable[[Kernel, Val, Sequence[Val], Val], None]


def _pieces(k: Kernel, x: Val, dim: int) -> Iterator[tuple[Val, Val]]:
    """(first channel, up to 16 channels from there) of a float32 vector; the body is written once more for a rest."""
    whole = dim - dim % 16
    for c in k.range(0, whole, 16):
        yield c, k.load(vec(F32, 16), x, c * 4, align=4)
    if dim % 16:
        c = k.i64(whole)
        yield c, k.load(vec(F32, dim % 16), x, 4 * whole, align=4)


def _scatter(k: Kernel, values: Val, at: Val, apart: int) -> None:
    """Lanes to places `apart` bytes from each other."""
    for i in range(values.type.count):
        k.store(values.lane(i), at, i * apart)


def _in_lanes(k: Kernel, units: Val, part: Val, offset: Val, rows: int, first: Val) -> None:
    """Units from number `first` on of a vector, into the lane of a token; a group of 16 tokens has `rows` units."""
    size = units.type.element.width // 8
    at = ((offset // LANES) * rows + first) * LANES + offset % LANES
    _scatter(k, units, part + at * size, LANES * size)


def _nvfp4(k: Kernel, x: Val) -> tuple[Val, Val]:
    """Packed bytes of 16 channels and the byte of their scale; no floor, and codes from the rounded scale (§3.4)."""
    amax = finite_or_nan(k, most(k, magnitude(x)))
    scale = to_e4m3(k, (amax / 6.0).splat(16))
    codes = to_e2m1(k, x / e4m3(k, scale))
    even, odd = (codes.shuffle(list(range(i, 16, 2))) for i in (0, 1))
    return (even | (odd << 4)).trunc(I8), scale.lane(0)


def _key(form: str, dim: int) -> Put:
    """Of a key, or of an index key: tokens in lanes."""

    def put(k: Kernel, x: Val, parts: Sequence[Val], offset: Val) -> None:
        if form == "int8":
            _int8_key(k, x, parts, offset, dim)
            return
        for c, value in _pieces(k, x, dim):
            if form == "float32":
                _in_lanes(k, value.bits(vec(I32, value.type.count)), parts[0], offset, dim, c)
            elif form == "bfloat16":
                pairs = narrow(k, value).bits(vec(I32, value.type.count // 2))
                _in_lanes(k, pairs, parts[0], offset, dim // 2, c // 2)
            elif form == "fp8":
                _in_lanes(k, to_e4m3(k, value), parts[0], offset, dim, c)
            else:
                packed, scale = _nvfp4(k, value)
                _in_lanes(k, packed, parts[0], offset, dim // 2, c // 2)
                at = ((offset // LANES) * (dim // _GROUP) + c // _GROUP) * LANES + offset % LANES
                k.store(scale, parts[1], at)

    return put


def _int8_key(k: Kernel, x: Val, parts: Sequence[Val], offset: Val, dim: int) -> None:
    top = k.var(k.i32(0))
    for _, value in _pieces(k, x, dim):
        top.set(k.max(top.get(), most(k, magnitude(value))))
    scale = finite_or_nan(k, top.get()) / 127.0
    for c, value in _pieces(k, x, dim):
        count = value.type.count
        codes = to_int8(k, scale.eq(0.0).select(k.const(value.type, 0.0), value / scale.splat(count)))
        _in_lanes(k, codes.bits(vec(I32, count // 4)), parts[0], offset, dim // 4, c // 4)
    k.store(scale, parts[1], offset * 4, align=4)


def _value(form: str, dim: int) -> Put:
    """Of a value: channels in lanes."""

    def put(k: Kernel, x: Val, parts: Sequence[Val], offset: Val) -> None:
        for c, value in _pieces(k, x, dim):
            if form == "float32":
                k.store(value, parts[0], (offset * dim + c) * 4, align=4)
            elif form == "bfloat16":  # not both tokens of a pair at once: another thread may write the other one
                at = ((offset // 2) * dim + c) * 4 + (offset % 2) * 2
                _scatter(k, narrow(k, value), parts[0] + at, 4)
            elif form == "fp8":
                k.store(to_e4m3(k, value), parts[0], offset * dim + c)
            else:
                packed, scale = _nvfp4(k, value)
                k.store(packed, parts[0], offset * (dim // 2) + c // 2)
                k.store(scale, parts[1], offset * (dim // _GROUP) + c // _GROUP)

    return put


def _sizes(store: Store) -> list[int]:
    """Bytes of a head's page of each part."""
    return [
        part[0].numel() * part.element_size() // (store.heads if store.headed else 1) for part in store.parts.values()
    ]


@cache
def _insert(kinds: tuple[tuple[str, str, tuple[int, ...]], ...], heads: int, page: int, dim: int) -> Native:
    """Writes vectors of each of `kinds`: (name, format, bytes of a head's page by part); `index` has one head."""
    fields: dict[str, Any] = {"slots": PTR, "rows": PTR}
    for name, _, sizes in kinds:
        fields |= {name: PTR, **{f"{name}{i}": PTR for i in range(len(sizes))}}

    def emit(k: Kernel, a: Any) -> None:
        rows = count_of(k, a.rows)
        for task in k.tasks((rows + (_TOKENS - 1)) // _TOKENS * heads):
            head, first = task % heads, task // heads * _TOKENS
            for t in k.range(first, k.min(first + _TOKENS, rows)):
                slot = k.load(I64, a.slots, t * 8, align=8)
                with k.when(slot >= 0):
                    place, offset = slot // page * heads + head, slot % page
                    for name, form, sizes in kinds:
                        parts = [getattr(a, f"{name}{i}") + place * size for i, size in enumerate(sizes)]
                        put = _value if name == "v" else _key
                        put(form, dim)(k, getattr(a, name) + (t * heads + head) * (4 * dim), parts, offset)

    what = "_".join(f"{name}_{form}" for name, form, _ in kinds)
    return Native(f"insert_{what}_{heads}x{dim}_{page}", fields, emit)


def _inserting(*kinds: str) -> Factory:
    """Of the op that writes these kinds."""

    def factory(op: OpInstance, at: Binding) -> NativeKernel:
        layer = op.attrs["layer"]

        def works(outs: Sequence[Any], ins: Sequence[Any], w: Any, _: torch.Tensor | None, sizes: Sizes) -> list[Work]:
            cache_, *data, slots = ins
            stores: list[Store] = [getattr(cache_, kind)[layer] for kind in kinds]
            given = tuple(
                (kind, store.form.name, tuple(_sizes(store))) for kind, store in zip(kinds, stores, strict=True)
            )
            values: dict[str, int | float] = {"slots": slots.data_ptr(), "rows": sizes.at(rows_of_data(op))}
            parts = []
            for kind, store, x in zip(kinds, stores, data, strict=True):
                values[kind] = x.data_ptr()
                for i, part in enumerate(store.parts.values()):
                    values[f"{kind}{i}"] = part.data_ptr()
                    parts.append(part)
            native = _insert(given, stores[0].heads, stores[0].page, stores[0].dim)
            reads = tuple(span(x) for x in (*data, slots))
            return [Work(native, values, reads, tuple(span(part) for part in parts), (sizes, cache_))]

        return at.kernel(op, works, EXACT)

    return factory


def rows_of_data(op: OpInstance) -> Any:
    """The dimension that counts tokens; the first input is the cache."""
    return op.inputs[1].shape[0]  # type: ignore[union-attr]


INSERT: Mapping[str, Factory] = {"kv_write": _inserting("k", "v"), "index_write": _inserting("index")}
