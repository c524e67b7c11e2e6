"""The repaired interpreter: right in the formats that Triton's own gets wrong, guarded, and gone after use."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter as stock
from triton.runtime.jit import JITFunction

from m31.errors import BackendRefused, OpRefused
from m31_triton import interpreter, repairs, selftest
from m31_triton.interpreter import interpret

ML = {
    tl.bfloat16: ml_dtypes.bfloat16,
    tl.float8e4nv: ml_dtypes.float8_e4m3fn,
    tl.float8e5: ml_dtypes.float8_e5m2,
}


@triton.jit
def _copy(x, y, n, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    tl.store(y + i, tl.load(x + i, mask=i < n, other=0).to(y.dtype.element_ty), mask=i < n)


@triton.jit
def _to_e4b8(x, y):
    i = tl.arange(0, 16)
    tl.store(y + i, tl.load(x + i).to(tl.float8e4b8).to(tl.float32))


@triton.jit
def _towards_zero(x, y):
    i = tl.arange(0, 16)
    tl.store(y + i, tl.load(x + i).to(tl.bfloat16, fp_downcast_rounding="rtz"))


@triton.jit
def _halved(v):
    return v * 0.5


@triton.jit
def _calls_another(x, y):
    i = tl.arange(0, 16)
    tl.store(y + i, _halved(tl.load(x + i)))


def test_the_installed_triton_passes_the_self_test() -> None:
    assert list(selftest.failures()) == []
    selftest.require(triton.__version__)


def test_the_self_test_rejects_the_unrepaired_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every repair is needed, and a Triton that computes as 3.9 does without them would be refused."""
    monkeypatch.setattr(interpreter, "repaired", contextlib.nullcontext)
    with np.errstate(all="ignore"):
        failed = [name for name in selftest.CHECKS if any(found.startswith(name) for found in selftest.failures())]
    assert failed == list(selftest.CHECKS)


@pytest.mark.parametrize("repair", repairs._REPAIRS, ids=lambda r: r[1])
def test_no_repair_is_idle(repair: tuple[Any, str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Taking any one away is noticed."""
    monkeypatch.setattr(repairs, "_REPAIRS", tuple(other for other in repairs._REPAIRS if other is not repair))
    with np.errstate(all="ignore"):
        assert next(selftest.failures(), None) or not pointwise_is_right()


def test_another_triton_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def raises() -> bool:
        raise AttributeError("renamed")

    monkeypatch.setattr(selftest, "CHECKS", {"a sum": lambda: False, "a cast": raises, "a load": lambda: True})
    with pytest.raises(BackendRefused, match=r"Triton 9\.9 .*a sum, a cast \(AttributeError: renamed\); .*3\.9"):
        selftest.require("9.9")


@pytest.mark.parametrize("scalar", ML, ids=str)
def test_every_code_is_read_as_ml_dtypes_reads_it(scalar: Any) -> None:
    wide = scalar == tl.bfloat16
    codes = np.arange(1 << (16 if wide else 8)).astype(np.uint16 if wide else np.uint8)
    with np.errstate(all="ignore"):
        want = codes.view(ML[scalar]).astype(np.float32)
    got = repairs.widen(codes, scalar)
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(np.signbit(got)[~np.isnan(want)], np.signbit(want)[~np.isnan(want)])


def nearest(x: Any, kind: Any, top: float) -> Any:
    """The nearest number of `kind`, ties to the even code, by comparing distances in float64; beyond `top`, top."""
    clipped = np.clip(x.astype(np.float64), -top, top)
    guess = clipped.astype(np.float32).astype(kind)
    others = (guess, np.nextafter(guess, kind(np.inf)), np.nextafter(guess, kind(-np.inf)))
    with np.errstate(all="ignore"):
        distance = np.stack([np.abs(o.astype(np.float64) - clipped) for o in others])
    codes = np.stack([o.view(f"u{guess.itemsize}") for o in others]).astype(np.int64)
    distance = np.where(np.isfinite(distance), distance, np.inf)
    best = distance == distance.min(0)
    even = np.where(best, codes % 2, 9).argmin(0)
    return np.take_along_axis(codes, even[None], 0)[0]


@pytest.mark.parametrize("scalar", ML, ids=str)
@pytest.mark.parametrize("source", [np.float32, np.float64, np.int64])
def test_numbers_are_rounded_to_the_nearest(scalar: Any, source: Any) -> None:
    """Once, ties to even; FP8 saturates. A double just above a tie is not rounded to the tie first."""
    rng = np.random.default_rng(0)
    kind = ML[scalar]
    top = float(ml_dtypes.finfo(kind).max)
    if source is np.int64:
        x: Any = rng.integers(-(1 << 40), 1 << 40, 20_000)
    else:
        x = (rng.standard_normal(20_000) * 2.0 ** rng.integers(-30, 30, 20_000)).clip(-top, top).astype(source)
        near = x.astype(np.float32).astype(kind)
        with np.errstate(all="ignore"):
            ties = (near.astype(np.float64) + np.nextafter(near, kind(np.inf)).astype(np.float64)) / 2
            ties = ties[np.isfinite(ties) & (ties != 0)]
            beyond = np.array([2 * top, -2 * top])
            x = np.concatenate([x, *(v.astype(source) for v in (ties, np.nextafter(ties, np.inf), beyond))])
    if scalar == tl.bfloat16:
        x = x[np.abs(x.astype(np.float64)) < top]
    np.testing.assert_array_equal(repairs.narrow(x, scalar).astype(np.int64), nearest(x, kind, top))
    np.testing.assert_array_equal(repairs.narrow(np.array([0.0, -0.0]), scalar) != 0, [False, True])


def test_nan_and_infinity_are_rounded_as_devices_do() -> None:
    x = np.array([np.nan, np.inf, -np.inf], np.float32)
    assert repairs.narrow(x, tl.float8e4nv).tolist() == [0x7F, 0x7E, 0xFE]
    assert repairs.narrow(x, tl.float8e5).tolist() == [0x7E, 0x7B, 0xFB]
    bf16 = repairs.narrow(x, tl.bfloat16).view(ml_dtypes.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(bf16, x)


@triton.jit
def _pointwise(x, y):
    i = tl.arange(0, 16)
    v = tl.load(x + i)
    tl.store(y + i, v % 1.0)
    tl.store(y + 16 + i, tl.clamp(v, -1.0, 1.0, propagate_nan=tl.PropagateNan.ALL).to(tl.bfloat16))
    tl.store(y + 32 + i, tl.cumsum(v, 0).to(tl.bfloat16))
    tl.store(y + 48 + i, tl.abs(v))


def pointwise_is_right() -> bool:
    x = torch.linspace(-3, 3, 16).bfloat16()
    y = torch.empty(4, 16, dtype=torch.bfloat16)
    interpreter.run_unchecked(_pointwise, (1,), x=x, y=y)
    wide = x.double()
    exact = torch.equal(y[[0, 1, 3]].double(), torch.stack([wide.fmod(1), wide.clamp(-1, 1), wide.abs()]))
    return exact and torch.allclose(y[2].double(), wide.cumsum(0), rtol=2**-8, atol=2**-8)


def test_pointwise_operations_and_scans_of_bfloat16() -> None:
    assert pointwise_is_right()


def test_what_has_no_model_is_refused() -> None:
    x, y = torch.ones(16), torch.empty(16)
    with pytest.raises(OpRefused, match=r"fp8e4b8 has no model.*bfloat16, float8e4nv or float8e5"):
        interpret(_to_e4b8, (1,), x=x, y=y)
    with pytest.raises(OpRefused, match=r"rounding .* has no model.*nearest even"):
        interpret(_towards_zero, (1,), x=x, y=y.bfloat16())


@pytest.mark.parametrize("size", [16, 32])
def test_accesses_outside_every_tensor_are_refused(size: int) -> None:
    """They would end the process, or corrupt what lies there."""
    small, large = torch.zeros(size - 1), torch.zeros(size)
    with pytest.raises(OpRefused, match=r"a load of 1 elements outside of every tensor.*program \(0, 0, 0\)|program"):
        interpret(_copy, (1,), x=small, y=large, n=size, SIZE=size)
    with pytest.raises(OpRefused, match="a store of 1 elements outside"):
        interpret(_copy, (1,), x=large, y=small, n=size, SIZE=size)
    interpret(_copy, (1,), x=small, y=small, n=size - 1, SIZE=size)  # masked lanes touch nothing


def test_a_view_ends_where_it_ends() -> None:
    whole = torch.zeros(64)
    with pytest.raises(OpRefused, match="a store of 8 elements"):
        interpret(_copy, (1,), x=torch.ones(16), y=whole[40:48], n=16, SIZE=16)
    assert not whole.any()


def test_repairs_and_patches_are_gone_afterwards() -> None:
    def state() -> list[Any]:
        return [
            *(getattr(place, name) for place, name, _ in repairs._REPAIRS),
            *(JITFunction.__call__, stock._patch_lang, tl.load, tl.sum, tl.range, tl.tensor.__getitem__),
            *(stock.InterpreterBuilder.create_masked_load, stock.InterpreterBuilder.create_masked_store),
        ]

    x, y = torch.arange(16.0), torch.empty(16)
    before = state()
    interpret(_calls_another, (1,), x=x, y=y)
    assert torch.equal(y, x / 2)
    assert [a is b for a, b in zip(state(), before, strict=True)] == [True] * len(before)
    with pytest.raises(OpRefused):
        interpret(_to_e4b8, (1,), x=x, y=y)
    assert [a is b for a, b in zip(state(), before, strict=True)] == [True] * len(before)


def test_kernels_bound_to_triton_s_own_interpreter_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(16)
    with pytest.raises(BackendRefused, match=r"TRITON_INTERPRET.*not set.*unset it"):
        interpret(stock.InterpretedFunction(_calls_another.fn), (1,), x=x, y=x)
    monkeypatch.setattr(triton.knobs.runtime, "interpret", True)
    with pytest.raises(BackendRefused, match="TRITON_INTERPRET"):
        interpret(_calls_another, (1,), x=x, y=x)


def test_threads_interpret_one_after_the_other() -> None:
    """The language is patched for the whole process; a second thread waits."""
    results: list[bool] = []

    def work() -> None:
        x, y = torch.arange(16.0), torch.empty(16)
        for _ in range(5):
            interpret(_calls_another, (1,), x=x, y=y)
            results.append(torch.equal(y, x / 2))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 15
