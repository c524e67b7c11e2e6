"""Running a Triton kernel on processor tensors, with the repairs of `m31_triton.repairs` and guarded memory.

The same kernel object stays compilable in the same process: the environment variable TRITON_INTERPRET, with which
Triton would interpret everything and compile nothing, must not be set. While a kernel is interpreted the language is
patched for the whole process, so that interpreting and compiling exclude each other (`ONE_AT_A_TIME`).

An address outside the tensors that a launch was given ends a process with a segmentation fault, or corrupts whatever
lies there. Here every access is compared with the tensors' extents first and refused by name.
"""

from __future__ import annotations

import threading
import types
import warnings
from typing import Any

import numpy as np
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor
from triton.runtime import interpreter as stock
from triton.runtime.errors import InterpreterError
from triton.runtime.jit import JITFunction

from m31.errors import BackendRefused, M31Error, OpRefused
from m31_triton.repairs import repaired, replaced

ONE_AT_A_TIME = threading.RLock()
"""Held while a kernel is interpreted or compiled."""

_language = types.FunctionType((lambda: None).__code__, {"tl": tl, "core": tl.core})
_patch_language = stock._patch_lang
_interpreted_forms: dict[Any, Any] = {}


def interpret(kernel: Any, grid: tuple[int, ...], /, **arguments: Any) -> None:
    """Run every program of `kernel` over `grid`, one after the other.

    Args:
        kernel: a `triton.jit` function.
        grid: number of programs along each axis; nothing runs if one is 0.
        arguments: all of the kernel's arguments by name: tensors, numbers, constants.

    Raises:
        BackendRefused: TRITON_INTERPRET is set, or the installed Triton does not pass the self-test.
        OpRefused: the kernel touches memory outside its tensors, or uses a format that has no model here.
    """
    from m31_triton.selftest import require

    require(triton.__version__)
    run_unchecked(kernel, grid, **arguments)


def run_unchecked(kernel: Any, grid: tuple[int, ...], /, **arguments: Any) -> None:
    """`interpret` without the self-test, which is itself made of interpreted kernels."""
    if triton.knobs.runtime.interpret or not isinstance(kernel, JITFunction):
        raise BackendRefused(
            "kernels are bound to Triton's own interpreter",
            where="environment variable TRITON_INTERPRET",
            expected="that it is not set when triton is imported",
            fix="unset it: m31 interprets through m31_triton.interpreter, with the repairs that bfloat16 needs",
        )
    with (
        ONE_AT_A_TIME,
        repaired(),
        replaced(_patches(arguments)),
        np.errstate(all="ignore"),
        warnings.catch_warnings(),
    ):
        # A device says nothing about NaN either.
        warnings.filterwarnings("ignore", "All-NaN slice", RuntimeWarning)
        try:
            _form(kernel).run(grid=tuple(grid), warmup=False, **arguments)
        except InterpreterError as error:
            cause = error.__cause__
            if isinstance(cause, M31Error):
                raise cause from None
            raise


def _patches(arguments: dict[str, Any]) -> tuple[tuple[Any, str, Any], ...]:
    return (
        (JITFunction, "__call__", _call_device_function),
        (stock, "_patch_lang", lambda fn: _patch_language(_language)),
        *_guard(arguments),
    )


def _form(kernel: Any) -> Any:
    """The interpretable form of a kernel or device function, made once."""
    if kernel.fn not in _interpreted_forms:
        _interpreted_forms[kernel.fn] = stock.InterpretedFunction(kernel.fn)
    return _interpreted_forms[kernel.fn]


def _call_device_function(self: Any, *args: Any, **kwargs: Any) -> Any:
    """What calling a `triton.jit` function means inside an interpreted kernel; the language is patched already."""
    kwargs.pop("_semantic", None)
    return _form(self).rewrite()(*args, **kwargs)


def _guard(arguments: dict[str, Any]) -> tuple[tuple[Any, str, Any], ...]:
    """Loads and stores that compare every address with the extents of the launch's tensors."""
    extents = sorted((t.data_ptr(), t.data_ptr() + _reach(t)) for t in arguments.values() if isinstance(t, Tensor))
    starts = np.array([start for start, _ in extents], np.uint64)
    ends = np.array([end for _, end in extents], np.uint64)
    ends = np.maximum.accumulate(ends) if len(ends) else ends  # one tensor may lie within another
    load, store = stock.InterpreterBuilder.create_masked_load, stock.InterpreterBuilder.create_masked_store

    def inside(what: str, ptrs: Any, mask: Any) -> None:
        every, active = np.broadcast_arrays(ptrs.data, mask.data)
        addresses: NDArray[Any] = every[active]
        if not addresses.size:
            return
        size = max(1, ptrs.get_element_ty().primitive_bitwidth // 8)
        place = np.searchsorted(starts, addresses, "right").astype(np.int64) - 1
        wrong = place < 0
        wrong |= addresses + np.uint64(size) > ends[np.maximum(place, 0)]
        if wrong.any():
            raise OpRefused(
                f"{what} of {int(wrong.sum())} elements outside of every tensor of the launch",
                where=f"program {stock.interpreter_builder.grid_idx}",
                expected="addresses within the tensors that the kernel was given",
            )

    def guarded_load(self: Any, ptrs: Any, mask: Any, other: Any, policy: Any, volatile: Any) -> Any:
        inside("a load", ptrs, mask)
        return load(self, ptrs, mask, other, policy, volatile)

    def guarded_store(self: Any, ptrs: Any, value: Any, mask: Any, policy: Any) -> Any:
        inside("a store", ptrs, mask)
        return store(self, ptrs, value, mask, policy)

    builder = stock.InterpreterBuilder
    return (builder, "create_masked_load", guarded_load), (builder, "create_masked_store", guarded_store)


def _reach(tensor: Tensor) -> int:
    """Bytes from the first element to the end of the last."""
    if not tensor.numel():
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()
