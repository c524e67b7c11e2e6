"""Does the repaired interpreter compute what the formats say? Asked once per process, before the first kernel.

The repairs replace private parts of Triton. They were written against one version; another may have renamed, mended or
broken something. So nothing is believed: all 256 codes of both FP8 formats, all 65,536 bfloat16 numbers, their
arithmetic, casts, reductions, matrix products and scaled products are compared with torch, exactly or, where the
order of a sum is free, within float32 rounding.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from m31.errors import BackendRefused
from m31.formats import e2m1

TESTED = "3.9"
"""The versions of Triton (major.minor) that the repairs were written for."""


@triton.jit
def _cast_kernel(x, y, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(y + i, tl.load(x + i).to(y.dtype.element_ty))


@triton.jit
def _arithmetic_kernel(a, b, out, N: tl.constexpr):
    i = tl.arange(0, N)
    x = tl.load(a + i)
    y = tl.load(b + i)
    tl.store(out + i, x + y)
    tl.store(out + N + i, x - y)
    tl.store(out + 2 * N + i, x * y)
    tl.store(out + 3 * N + i, (x / y).to(tl.bfloat16))
    tl.store(out + 4 * N + i, tl.where(x > y, x, y))
    tl.store(out + 5 * N + i, -x)
    tl.store(out + 6 * N + i, tl.maximum(x, y))
    tl.store(out + 7 * N + i, tl.fma(x, y, x))


@triton.jit
def _mask_kernel(x, y, limit, N: tl.constexpr):
    i = tl.arange(0, N)
    last = tl.load(limit)
    for k in range(2):
        some = (i < last) & (k * last > 0)
        tl.store(y + k * N + i, tl.load(x + i, mask=some, other=0))


@triton.jit
def _reduce_kernel(x, total, best, at, N: tl.constexpr):
    v = tl.load(x + tl.arange(0, N))
    tl.store(total, tl.sum(v, 0))
    tl.store(best, tl.max(v, 0))
    tl.store(at, tl.argmax(v, 0))


@triton.jit
def _dot_kernel(a, b, out, N: tl.constexpr):
    i = tl.arange(0, N)
    at = i[:, None] * N + i[None, :]
    tl.store(out + at, tl.dot(tl.load(a + at), tl.load(b + at)))


@triton.jit
def _nvfp4_kernel(a, sa, b, sb, out, M: tl.constexpr, K: tl.constexpr):
    i = tl.arange(0, M)
    k = tl.arange(0, K // 2)
    g = tl.arange(0, K // 16)
    x = tl.load(a + i[:, None] * (K // 2) + k[None, :])
    y = tl.load(b + i[:, None] * (K // 2) + k[None, :])
    sx = tl.load(sa + i[:, None] * (K // 16) + g[None, :])
    sy = tl.load(sb + i[:, None] * (K // 16) + g[None, :])
    tl.store(out + i[:, None] * M + i[None, :], tl.dot_scaled(x, sx, "e2m1", y.T, sy, "e2m1"))


@triton.jit
def _mixed_kernel(a, b, sb, out, M: tl.constexpr, K: tl.constexpr):
    i = tl.arange(0, M)
    x = tl.load(a + i[:, None] * K + tl.arange(0, K)[None, :])
    y = tl.load(b + i[:, None] * (K // 2) + tl.arange(0, K // 2)[None, :])
    sy = tl.load(sb + i[:, None] * (K // 32) + tl.arange(0, K // 32)[None, :])
    tl.store(out + i[:, None] * M + i[None, :], tl.dot_scaled(x, None, "bf16", y.T, sy, "e2m1"))


def _run(kernel: Any, **arguments: Any) -> None:
    from m31_triton.interpreter import run_unchecked

    run_unchecked(kernel, (1,), **arguments)


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    out = torch.empty(x.shape, dtype=dtype)
    _run(_cast_kernel, x=x, y=out, N=len(x))
    return out


def _same(got: Tensor, want: Tensor) -> bool:
    """Equal bit for bit, any NaN for any NaN."""
    got, want = got.double(), want.double()
    return bool(((got == want) & (got.signbit() == want.signbit()) | (got.isnan() & want.isnan())).all())


def _close(got: Tensor, want: Tensor) -> bool:
    return bool(((got.double() - want).abs() <= 1e-5 * want.abs().max()).all())


def _every(dtype: torch.dtype, codes: int, integer: torch.dtype) -> Tensor:
    return torch.arange(codes, dtype=torch.int32).to(integer).view(dtype)


def _numbers() -> Tensor:
    """float32 around every bfloat16 and FP8 rounding boundary, and some beyond; 2^18 numbers."""
    bf16 = _every(torch.bfloat16, 1 << 16, torch.int16).float()
    bits = bf16.view(torch.int32)
    halves = torch.cat([bits, bits + 0x8000, bits + 0x7FFF, bits + 0x8001])  # exact, the tie, just below, just above
    return halves.view(torch.float32)


def _bfloat16_codes() -> bool:
    every = _every(torch.bfloat16, 1 << 16, torch.int16)
    return _same(_cast(every, torch.float32), every.float()) and _same(_cast(every, torch.float16), every.half())


def _bfloat16_casts() -> bool:
    x = _numbers()
    return _same(_cast(x, torch.bfloat16), x.bfloat16())


def _fp8_codes() -> bool:
    kinds = (torch.float8_e4m3fn, torch.float8_e5m2)
    every = [_every(kind, 256, torch.uint8) for kind in kinds]
    return all(_same(_cast(x, torch.float32), x.float()) for x in every)


def _fp8_casts() -> bool:
    x = _numbers()
    # FP8 has few enough mantissa bits for all its ties to be bfloat16 numbers.
    ok = True
    for kind, top in ((torch.float8_e4m3fn, 448.0), (torch.float8_e5m2, 57344.0)):
        ok &= _same(_cast(x, kind).float(), x.clamp(-top, top).to(kind).float())
    return ok


def _arithmetic() -> bool:
    n = 1 << 12
    g = torch.Generator().manual_seed(0)
    a, b = (torch.randn(n, generator=g).mul(4).bfloat16() for _ in range(2))
    b[0], a[1] = 0.0, torch.inf
    out = torch.empty(8, n, dtype=torch.bfloat16)
    _run(_arithmetic_kernel, a=a, b=b, out=out, N=n)
    x, y = a.double(), b.double()
    # A quotient is rounded twice at most: by float32, then by bfloat16; torch does the same.
    want = [x + y, x - y, x * y, (a.float() / b.float()).double(), torch.where(x > y, x, y), -x, torch.fmax(x, y)]
    exact = [_same(row, w.float().bfloat16()) for row, w in zip(out, want, strict=False)]
    return all(exact) and _same(out[7], (x * y + x).float().bfloat16())


def _masks() -> bool:
    x, out = torch.arange(1, 17), torch.empty(32, dtype=torch.int64)
    _run(_mask_kernel, x=x, y=out, limit=torch.tensor([5]), N=16)
    return out.tolist() == [0] * 16 + [1, 2, 3, 4, 5] + [0] * 11


def _reductions() -> bool:
    g = torch.Generator().manual_seed(1)
    x = torch.randn(512, generator=g).bfloat16()
    total, best, at = torch.empty(1).bfloat16(), torch.empty(1).bfloat16(), torch.empty(1, dtype=torch.int32)
    _run(_reduce_kernel, x=x, total=total, best=best, at=at, N=512)
    near = abs(float(total) - float(x.double().sum())) <= 2.0**-7 * abs(float(x.double().sum()))
    return near and float(best) == float(x.max()) and int(at) == int(x.float().argmax())


def _products() -> bool:
    g = torch.Generator().manual_seed(2)
    ok = True
    for kind in (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2):
        a, b = (torch.randn(64, 64, generator=g).to(kind) for _ in range(2))
        out = torch.empty(64, 64)
        _run(_dot_kernel, a=a, b=b, out=out, N=64)
        ok &= _close(out, a.double() @ b.double())
    return ok


def _nvfp4() -> bool:
    m, k = 32, 128
    g = torch.Generator().manual_seed(3)
    a, b = (torch.randint(0, 256, (m, k // 2), dtype=torch.uint8, generator=g) for _ in range(2))
    sa, sb = (torch.rand(m, k // 16, generator=g).mul(400).to(torch.float8_e4m3fn) for _ in range(2))
    out = torch.empty(m, m)
    _run(_nvfp4_kernel, a=a, sa=sa, b=b, sb=sb, out=out, M=m, K=k)
    x, y = (
        e2m1.decode_packed(codes, torch.float64) * scale.double().repeat_interleave(16, 1)
        for codes, scale in ((a, sa), (b, sb))
    )
    return _close(out, x @ y.T)


def _mixed() -> bool:
    """bfloat16, also beyond float16's range, times E2M1 with E8M0 scales."""
    m, k = 32, 128
    g = torch.Generator().manual_seed(4)
    a = torch.randn(m, k, generator=g).mul(1e6).bfloat16()
    b = torch.randint(0, 256, (m, k // 2), dtype=torch.uint8, generator=g)
    sb = torch.randint(120, 134, (m, k // 32), dtype=torch.uint8, generator=g)
    out = torch.empty(m, m)
    _run(_mixed_kernel, a=a, b=b, sb=sb, out=out, M=m, K=k)
    y = e2m1.decode_packed(b, torch.float64) * (sb.double() - 127).exp2().repeat_interleave(32, 1)
    return _close(out, a.double() @ y.T)


CHECKS: dict[str, Callable[[], bool]] = {
    "reading bfloat16": _bfloat16_codes,
    "rounding to bfloat16": _bfloat16_casts,
    "reading FP8": _fp8_codes,
    "rounding to FP8": _fp8_casts,
    "bfloat16 arithmetic": _arithmetic,
    "masks from scalars": _masks,
    "bfloat16 reductions": _reductions,
    "matrix products of narrow formats": _products,
    "the NVFP4 product": _nvfp4,
    "the product of bfloat16 and MXFP4": _mixed,
}


def failures() -> Iterator[str]:
    """Names of the checks that the installed Triton fails, repairs in place."""
    for name, check in CHECKS.items():
        try:
            passed = check()
        except BackendRefused:
            raise
        except Exception as error:  # noqa: BLE001 - another Triton may fail in any way; which one is the answer
            yield f"{name} ({type(error).__name__}: {error})"
        else:
            if not passed:
                yield name


@functools.cache
def require(version: str) -> None:
    """Raise BackendRefused unless the interpreter of the installed Triton, `version`, passes every check."""
    failed = list(failures())
    if failed:
        raise BackendRefused(
            f"Triton {version} is interpreted wrongly: {', '.join(failed)}",
            where="m31_triton's interpreter",
            expected=f"a version that passes the self-test: {TESTED}",
            fix=f"install triton=={TESTED}.*",
        )
