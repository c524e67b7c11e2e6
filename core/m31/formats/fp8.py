"""The eight-bit floats: E4M3 (finite, NaN, no infinity: `float8_e4m3fn`) and E5M2 (MODEL.md §3.1, §3.5)."""

from __future__ import annotations

import torch
from torch import Tensor

from m31.errors import OpRefused
from m31.formats._blocks import as_float32

E4M3_MAX = 448.0
E4M3_MIN_NORMAL = 2.0**-6
E4M3_MIN = 2.0**-9
"""Smallest positive E4M3 number (code 0x01, subnormal)."""
_OVERFLOW = 464.0  # the tie between 448 and the 480 that would follow; it belongs to 448
NAN = 0x7F
MINUS_ZERO = 0x80


def encode(x: Tensor, *, saturate: bool = True, keep_minus_zero: bool = False, where: str = "fp8.encode") -> Tensor:
    """Nearest E4M3 number of each element, ties to even.

    Args:
        x: [...] float32, bfloat16 or float16. NaN stays NaN (0x7F, whatever its sign).
        saturate: magnitudes above 448 become ±448, infinity too. Otherwise those that would round to 480 or more, that
            is all above 464, become NaN.
        keep_minus_zero: emit 0x80 where a negative number rounds to zero. Otherwise 0x00: no -0 leaves an encoder.
        where: what the caller calls x, for the error.
    Returns:
        float8_e4m3fn [...].
    Raises:
        OpRefused: another dtype.
    """
    x = as_float32(x, where)
    # Clamped in any case, because what torch's own cast does beyond 448 depends on its version (NaN before 2.12). The
    # clamp lets NaN pass.
    codes = x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
    if not saturate:
        codes.masked_fill_(x.abs() > _OVERFLOW, NAN)
    if not keep_minus_zero:
        codes.masked_fill_(codes == MINUS_ZERO, 0)
    codes.masked_fill_(codes == 0xFF, NAN)
    return codes.view(torch.float8_e4m3fn)


def decode(codes: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Value of each E4M3 code: float8_e4m3fn (or its bytes as uint8) [...] to [...] of `dtype`; 0x7F and 0xFF are NaN.

    Raises OpRefused for another dtype of `codes`, E5M2 above all: its bytes would be misread (MODEL.md §3.5).
    """
    return _as(codes, torch.float8_e4m3fn, "fp8.decode").to(dtype)


def decode_e5m2(codes: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Value of each E5M2 code: float8_e5m2 (or bytes) [...] to `dtype`; 0x7C and 0xFC are infinite, above is NaN."""
    return _as(codes, torch.float8_e5m2, "fp8.decode_e5m2").to(dtype)


def _as(codes: Tensor, dtype: torch.dtype, where: str) -> Tensor:
    if codes.dtype not in (dtype, torch.uint8):
        raise OpRefused(f"codes are {codes.dtype}", where=where, expected=f"{dtype} or its bytes as torch.uint8")
    return codes.view(dtype)
