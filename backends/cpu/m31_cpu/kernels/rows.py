"""Ops that work row by row: norms, RoPE, activation, addition, rounding, lookups (MODEL.md §2.1 to §2.3, §2.5)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from m31.graph import Arithmetic, OpInstance
from m31_cpu.binding import EXACT, Binding, Factory, rows_of
from m31_cpu.lang import F32, I64, PTR, Val, vec
from m31_cpu.native import Kernel, Native
from m31_cpu.program import NativeKernel, Sizes, Work, span
from m31_cpu.simd import fma, load_f32, narrow, splat, store_f32, strips, swiglu, total, wide

_CHUNK = 16_384  # elements of a task where rows are short or many


def count_of(k: Kernel, cell: Val) -> Val:
    """The number behind a dimension, where `Sizes.at` said."""
    return k.load(I64, cell, align=8)


def to_f32(k: Kernel, count: Val) -> Val:
    """An int64 as float32."""
    return Val(k, k.b.sitofp(count.v, F32))


# --- norms (MODEL.md §2.2) ---


def _norm(k: Kernel, a: Any) -> None:
    for row in k.tasks(count_of(k, a.rows) * a.heads):
        x, y = a.x + row * a.width * 4, a.y + row * a.width * 4
        sums, rest = k.var(k.const(vec(F32, k.isa.lanes), 0.0)), k.var(k.f32(0.0))
        for lanes, i in strips(k, a.width):
            value = load_f32(k, x, i, lanes)
            if lanes == 1:
                rest.add((value * value).lane(0))
            else:
                sums.set(fma(k, value, value, sums.get()))
        mean = (total(sums.get()) + rest.get()) / to_f32(k, a.width)
        scale = 1.0 / k.unary("sqrt", mean + a.eps)
        for lanes, i in strips(k, a.width):
            weight = load_f32(k, a.w, i, lanes) + 1.0
            store_f32(k, load_f32(k, x, i, lanes) * splat(scale, lanes) * weight, y, i)


NORM = Native("norm", {"x": PTR, "w": PTR, "y": PTR, "rows": PTR, "heads": I64, "width": I64, "eps": F32}, _norm)


def norm(op: OpInstance, at: Binding) -> NativeKernel:
    """`gemma_rmsnorm`, and `head_rmsnorm` over each of its heads."""
    heads = int(op.attrs.get("heads", 1))

    def works(outs: Sequence[Any], ins: Sequence[Any], w: Any, _: torch.Tensor | None, sizes: Sizes) -> list[Work]:
        (x,), (y,) = ins, outs
        weight = w.values[next(iter(op.slots))]
        values = {
            "x": x.data_ptr(),
            "w": weight.data_ptr(),
            "y": y.data_ptr(),
            "rows": sizes.at(rows_of(op)),
            "heads": heads,
            "width": x.shape[1] // heads,
            "eps": op.attrs["eps"],
        }
        return [Work(NORM, values, (span(x),), (span(y),), (sizes, weight))]

    return at.kernel(op, works, EXACT)


# --- element by element ---


def _each(k: Kernel, a: Any, compute: Callable[[int, Val], Val]) -> None:
    """`y[i] = compute(lanes, i)` for all elements of rows that lie side by side."""
    elements = count_of(k, a.rows) * a.width
    for task in k.tasks((elements + (_CHUNK - 1)) // _CHUNK):
        start = task * _CHUNK
        length = k.min(elements - start, k.i64(_CHUNK))
        for lanes, i in strips(k, length):
            at = start + i
            store_f32(k, compute(lanes, at), a.y, at)


_PAIR = {"x": PTR, "z": PTR, "y": PTR, "rows": PTR, "width": I64}
ADD = Native(
    "add",
    _PAIR,
    lambda k, a: _each(k, a, lambda n, i: load_f32(k, a.x, i, n) + load_f32(k, a.z, i, n)),
)
SWIGLU = Native(
    "swiglu",
    {**_PAIR, "alpha": F32, "beta": F32, "limit": F32},
    lambda k, a: _each(
        k,
        a,
        lambda n, i: swiglu(k, load_f32(k, a.x, i, n), load_f32(k, a.z, i, n), a.alpha, a.beta, a.limit),
    ),
)
ROUND = Native(
    "round",
    {"x": PTR, "y": PTR, "rows": PTR, "width": I64},
    lambda k, a: _each(k, a, lambda n, i: wide(narrow(k, load_f32(k, a.x, i, n)))),
)


def _elementwise(native: Native, names: Sequence[str], attrs: Sequence[str], arithmetic: Arithmetic) -> Factory:
    def factory(op: OpInstance, at: Binding) -> NativeKernel:
        def works(outs: Sequence[Any], ins: Sequence[Any], w: Any, _: torch.Tensor | None, sizes: Sizes) -> list[Work]:
            (y,) = outs
            values: Mapping[str, int | float] = {
                **{name: x.data_ptr() for name, x in zip(names, ins, strict=True)},
                "y": y.data_ptr(),
                "rows": sizes.at(rows_of(op)),
                "width": y[:1].numel() if len(y) else 0,
                **{name: op.attrs[name] for name in attrs},
            }
            return [Work(native, values, tuple(span(x) for x in ins), (span(y),), (sizes,))]

        return at.kernel(op, works, arithmetic)

    return factory


# --- RoPE (MODEL.md §2.3) ---


def _rope(k: Kernel, a: Any) -> None:
    half = a.half
    for row in k.tasks(count_of(k, a.rows) * a.heads):
        x, y = a.x + row * a.width * 4, a.y + row * a.width * 4
        token = row // a.heads
        cos, sin = a.cos + token * half * 4, a.sin + token * half * 4
        for lanes, i in strips(k, half):
            c, s = load_f32(k, cos, i, lanes), load_f32(k, sin, i, lanes)
            first, second = load_f32(k, x, i, lanes), load_f32(k, x, i + half, lanes)
            store_f32(k, first * c - second * s, y, i)
            store_f32(k, second * c + first * s, y, i + half)
        rest = half * 2
        k.copy(y + rest * 4, x + rest * 4, (a.width - rest) * 4)


ROPE = Native(
    "rope",
    {"x": PTR, "cos": PTR, "sin": PTR, "y": PTR, "rows": PTR, "heads": I64, "width": I64, "half": I64},
    _rope,
)


def rope(op: OpInstance, at: Binding) -> NativeKernel:
    """See the op."""

    def works(outs: Sequence[Any], ins: Sequence[Any], w: Any, _: torch.Tensor | None, sizes: Sizes) -> list[Work]:
        (x, cos, sin), (y,) = ins, outs
        values = {
            "x": x.data_ptr(),
            "cos": cos.data_ptr(),
            "sin": sin.data_ptr(),
            "y": y.data_ptr(),
            "rows": sizes.at(rows_of(op)),
            "heads": x.shape[1],
            "width": x.shape[2],
            "half": cos.shape[1],
        }
        return [Work(ROPE, values, (span(x), span(cos), span(sin)), (span(y),), (sizes,))]

    return at.kernel(op, works, EXACT)


# --- rows of a table ---


def _gather(k: Kernel, a: Any) -> None:
    for row in k.tasks(count_of(k, a.rows)):
        k.copy(a.y + row * a.bytes, a.x + k.load(I64, a.ids, row * 8, align=8) * a.bytes, a.bytes)


GATHER = Native("gather", {"x": PTR, "ids": PTR, "y": PTR, "rows": PTR, "bytes": I64}, _gather)


def gather_rows(op: OpInstance, at: Binding) -> NativeKernel:
    """See the op."""

    def works(outs: Sequence[Any], ins: Sequence[Any], w: Any, _: torch.Tensor | None, sizes: Sizes) -> list[Work]:
        (x, ids), (y,) = ins, outs
        values = {
            "x": x.data_ptr(),
            "ids": ids.data_ptr(),
            "y": y.data_ptr(),
            "rows": sizes.at(op.outputs[0].shape[0]),  # type: ignore[union-attr]
            "bytes": 4 * x.shape[1],
        }
        return [Work(GATHER, values, (span(x), span(ids)), (span(y),), (sizes,))]

    return at.kernel(op, works, EXACT)


ROWS: Mapping[str, Factory] = {
    "gemma_rmsnorm": norm,
    "head_rmsnorm": norm,
    "add": _elementwise(ADD, ("x", "z"), (), EXACT),
    "swiglu_oai": _elementwise(SWIGLU, ("x", "z"), ("alpha", "beta", "limit"), EXACT),
    "round_channels": _elementwise(ROUND, ("x",), (), Arithmetic("float32", "float32", "bfloat16")),
    "round_heads": _elementwise(ROUND, ("x",), (), Arithmetic("float32", "float32", "bfloat16")),
    "rope": rope,
    "gather_rows": gather_rows,
}
__all__ = ["ROWS", "count_of", "to_f32"]
