"""Repairs to Triton's interpreter, which computes several formats wrongly without saying so.

The interpreter of Triton 3.9 keeps bfloat16 as uint16 and FP8 as uint8, and most of its operations then work on those
integers: sums, products, comparisons, reductions and `tl.dot` of bfloat16 are meaningless, float32 -> bfloat16
truncates, float32 -> FP8 rounds half up and mistreats subnormals, NaN and infinity, and NVFP4's E4M3 block scales are
decoded as E8M0. A comparison of two scalars keeps their type, and is no mask once it is spread over a block.

Here such operands are widened to float32, computed on, and rounded to nearest even, as the devices do. FP8 casts
saturate: the conversion instructions that Triton emits do.

`repaired()` puts the repairs in place for the duration of one `with` and takes them away again, so that nobody else's
use of the interpreter changes. `m31_triton.selftest` decides whether they fit the installed version.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import triton.language as tl
from numpy.typing import NDArray
from triton._C.libtriton import ir
from triton.runtime import interpreter as stock

from m31.errors import OpRefused

Array = NDArray[Any]
Handle = Any  # stock.TensorHandle: `data`, a numpy array, and `dtype`

FP8 = {tl.float8e4nv: torch.float8_e4m3fn, tl.float8e5: torch.float8_e5m2}
# Codes that are finite and not negative: 0 up to and without these.
_FINITE = {tl.float8e4nv: 0x7F, tl.float8e5: 0x7C}
_NAN = {tl.float8e4nv: 0x7F, tl.float8e5: 0x7E}
# Formats of devices that m31 does not target; the interpreter is wrong for them too and nothing here corrects that.
_UNMODELLED = (tl.float8e4b8, tl.float8e5b16, tl.float8e4b15)


def _narrow(handle: Handle) -> bool:
    """Whether the interpreter keeps these floats as integers."""
    if isinstance(handle.dtype, tl.pointer_type):
        return False
    return _narrow_type(handle.dtype.scalar)


def _narrow_type(scalar: Any) -> bool:
    if scalar in _UNMODELLED:
        raise OpRefused(
            f"{scalar} has no model on the processor",
            where="interpreted kernel",
            expected="bfloat16, float8e4nv or float8e5",
        )
    return scalar == tl.bfloat16 or scalar in FP8


@functools.cache
def _fp8_values(scalar: Any) -> Array:
    """The value of each of the 256 codes."""
    return torch.arange(256, dtype=torch.uint8).view(FP8[scalar]).float().numpy()


@functools.cache
def _fp8_midpoints(scalar: Any) -> Array:
    """Halfway between each finite code and the next: exact in float32."""
    values = _fp8_values(scalar)[: _FINITE[scalar]]
    return (values[:-1] + values[1:]) / 2


def widen(data: Array, scalar: Any) -> Array:
    """Stored elements of a Triton scalar type as numpy floats; types that numpy has are returned as they are."""
    if scalar == tl.bfloat16:
        return (np.ascontiguousarray(data).astype(np.uint32) << 16).view(np.float32)
    if scalar in FP8:
        return np.asarray(_fp8_values(scalar)[data])
    return data


def narrow(values: Array, scalar: Any) -> Array:
    """Numbers rounded to nearest even into the storage of a Triton scalar type; FP8 saturates, NaN stays NaN."""
    if scalar == tl.bfloat16:
        return _to_bfloat16(_to_float32(values))
    if scalar in FP8:
        return _to_fp8(_to_float32(values), scalar)
    with np.errstate(all="ignore"):
        return values.astype(stock._get_np_dtype(scalar))


def _to_float32(values: Array) -> Array:
    """float32 that rounds on to a narrower format as the original would: inexact results get an odd last bit."""
    if values.dtype in (np.float32, np.float16):
        return values.astype(np.float32)
    wide = values.astype(np.float64)
    with np.errstate(all="ignore"):
        near = wide.astype(np.float32)
        inexact = (near.astype(np.float64) != wide) & np.isfinite(wide)
        bits = near.view(np.uint32)
        bits = np.where(inexact & (np.abs(near.astype(np.float64)) > np.abs(wide)), bits - np.uint32(1), bits)
    return np.where(inexact, bits | np.uint32(1), bits).astype(np.uint32).view(np.float32)


def _to_bfloat16(values: Array) -> Array:
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    quiet = (bits >> np.uint32(16)) | np.uint32(0x40)
    return np.where(np.isnan(values), quiet, rounded).astype(np.uint16)


def _to_fp8(values: Array, scalar: Any) -> Array:
    magnitude = np.abs(values)
    middle = _fp8_midpoints(scalar)
    below, above = np.searchsorted(middle, magnitude, "left"), np.searchsorted(middle, magnitude, "right")
    code = np.where(below % 2 == 0, below, above)  # they differ on a tie, which belongs to the even code
    code = np.where(np.isnan(values), _NAN[scalar], code)
    return (code | np.where(np.signbit(values), 0x80, 0)).astype(np.uint8)


def _wide(handle: Handle) -> Array:
    return widen(handle.data, handle.dtype.scalar)


_binary, _unary = stock.InterpreterBuilder.binary_op, stock.InterpreterBuilder.unary_op
_cast, _clamp = stock.InterpreterBuilder.cast_impl, stock.InterpreterBuilder.create_clampf
_fma, _fp_to_fp = stock.InterpreterBuilder.create_fma, stock.InterpreterBuilder.create_fp_to_fp
_reduce, _scan = stock.ReduceOps.apply_impl, stock.ScanOps.apply_impl
_scale = stock._dot_scaled_scale_to_f32
_BITWISE = (np.bitwise_and, np.bitwise_or, np.bitwise_xor)
# Reductions that the interpreter hands to numpy whole. It runs others step by step, through the repaired operations.
_WHOLE = (
    *(tl.standard._sum_combine, tl.standard._prod_combine),
    *(tl.standard._elementwise_max, tl.standard._elementwise_min),
    *(tl.standard._argmax_combine_tie_break_left, tl.standard._argmax_combine_tie_break_fast),
    *(tl.standard._argmin_combine_tie_break_left, tl.standard._argmin_combine_tie_break_fast),
)


def _binary_op(self: Any, lhs: Handle, rhs: Handle, op: Callable[..., Array]) -> Handle:
    scalar = lhs.dtype.scalar
    if op in _BITWISE or not (_narrow(lhs) or _narrow(rhs)):
        result = _binary(self, lhs, rhs, op)
    else:
        with np.errstate(all="ignore"):
            out = op(_wide(lhs), _wide(rhs))
        result = stock.TensorHandle(out if out.dtype == np.bool_ else narrow(out, scalar), scalar)
    if result.data.dtype == np.bool_:
        result.dtype = tl.int1  # not the operands' type, in which a scalar would be spread over a block
    return result


def _unary_op(self: Any, arg: Handle, op: Callable[..., Array]) -> Handle:
    if not _narrow(arg):
        return _unary(self, arg, op)
    with np.errstate(all="ignore"):
        return stock.TensorHandle(narrow(op(_wide(arg)), arg.dtype.scalar), arg.dtype.scalar)


def _cast_impl(self: Any, src: Handle, dst_type: Any) -> Handle:
    if _narrow(src) or _narrow_type(dst_type.scalar):
        return stock.TensorHandle(narrow(_wide(src), dst_type.scalar), dst_type.scalar)
    with np.errstate(all="ignore"):
        return _cast(self, src, dst_type)


def _create_fp_to_fp(self: Any, src: Handle, dst_type: Any, rounding_mode: Any) -> Handle:
    if not (_narrow(src) or _narrow_type(dst_type.scalar)):
        return _fp_to_fp(self, src, dst_type, rounding_mode)
    if rounding_mode is not None and rounding_mode != ir.ROUNDING_MODE.RTNE:
        raise OpRefused(f"rounding {rounding_mode} has no model", where="interpreted kernel", expected="nearest even")
    return _cast_impl(self, src, dst_type)


def _create_fma(self: Any, x: Handle, y: Handle, z: Handle) -> Handle:
    if not _narrow(z):
        return _fma(self, x, y, z)
    return stock.TensorHandle(narrow(_wide(x).astype(np.float64) * _wide(y) + _wide(z), z.dtype.scalar), z.dtype.scalar)


def _create_clampf(self: Any, arg: Handle, low: Handle, high: Handle, propagate_nans: Any) -> Handle:
    if not _narrow(arg):
        return _clamp(self, arg, low, high, propagate_nans)
    wide = (stock.TensorHandle(_wide(handle), tl.float32) for handle in (arg, low, high))
    return stock.TensorHandle(narrow(_clamp(self, *wide, propagate_nans).data, arg.dtype.scalar), arg.dtype.scalar)


def _create_dot(self: Any, a: Handle, b: Handle, d: Handle, precision: Any, imprecise: Any) -> Handle:
    _narrow(a), _narrow(b)  # for the refusal
    return stock.TensorHandle(np.matmul(_wide(a), _wide(b), dtype=d.data.dtype) + d.data, d.dtype.scalar)


def _dot_scaled_scale(handle: Handle, compute_type: Any) -> Array:
    return _wide(handle) if handle.dtype.scalar in FP8 else _scale(handle, compute_type)


def _dot_scaled_value(handle: Handle) -> Array:
    return stock._e2m1_to_f32(handle.data) if handle.dtype.scalar == tl.uint8 else _wide(handle)


def _through_float32(original: Callable[..., Any]) -> Callable[..., Any]:
    """`apply_impl` of a reduction or scan that widens narrow floats first and rounds once at the end."""

    def apply_impl(self: Any, inputs: tuple[Any, ...]) -> Any:
        if self.combine_fn not in _WHOLE or not any(_narrow(t.handle) for t in inputs):
            return original(self, inputs)
        widened = tuple(self.to_tensor(_wide(t.handle), tl.float32) if _narrow(t.handle) else t for t in inputs)
        out = original(self, widened)
        several = isinstance(out, list | tuple)
        results = [
            _rounded(result, given.dtype) if _narrow(given.handle) else result
            for result, given in zip(out if several else [out], inputs, strict=True)
        ]
        return results if several else results[0]

    return apply_impl


def _rounded(tensor: Any, scalar: Any) -> Any:
    handle = stock.TensorHandle(narrow(tensor.handle.data, scalar), scalar)
    return tl.core.tensor(handle, tl.block_type(scalar, list(tensor.shape)) if tensor.type.is_block() else scalar)


_REPAIRS: tuple[tuple[Any, str, Any], ...] = (
    (stock.InterpreterBuilder, "binary_op", _binary_op),
    (stock.InterpreterBuilder, "unary_op", _unary_op),
    (stock.InterpreterBuilder, "cast_impl", _cast_impl),
    (stock.InterpreterBuilder, "create_fp_to_fp", _create_fp_to_fp),
    (stock.InterpreterBuilder, "create_fma", _create_fma),
    (stock.InterpreterBuilder, "create_clampf", _create_clampf),
    (stock.InterpreterBuilder, "create_dot", _create_dot),
    (stock.ReduceOps, "apply_impl", _through_float32(_reduce)),
    (stock.ScanOps, "apply_impl", _through_float32(_scan)),
    (stock, "_dot_scaled_scale_to_f32", _dot_scaled_scale),
    (stock, "_mxfp_value_handle_to_float32", _dot_scaled_value),
)


@contextlib.contextmanager
def replaced(changes: tuple[tuple[Any, str, Any], ...]) -> Iterator[None]:
    """Set attributes (object, name, value) for the duration of a `with`."""
    before = [(place, name, getattr(place, name)) for place, name, _ in changes]
    for place, name, value in changes:
        setattr(place, name, value)
    try:
        yield
    finally:
        for place, name, value in before:
            setattr(place, name, value)


def repaired() -> contextlib.AbstractContextManager[None]:
    """The repairs, in place for the duration of a `with`."""
    return replaced(_REPAIRS)
