"""E8M0, the power-of-two scale of MXFP8 (MODEL.md §3.1): value 2^(s - 127), 255 is NaN; there is no zero."""

from __future__ import annotations

import torch
from torch import Tensor

from m31.errors import OpRefused

NAN = 255
BIAS = 127

# 448 = 1.75 * 2^8: the largest E4M3 number, as exponent and as float32 mantissa bits.
_MAX_EXPONENT = 8
_MAX_MANTISSA = 0x600000


def decode(codes: Tensor) -> Tensor:
    """uint8 [...] to float32 [...]: 2^(s - 127); code 0 is the subnormal 2^-127, code 255 is NaN.

    Raises OpRefused for another dtype.
    """
    return _power(_checked(codes, "e8m0.decode"))


def reciprocal(codes: Tensor) -> Tensor:
    """uint8 [...] to float32 2^(127 - s), what encoders multiply by; always a normal number for s in 0..253.

    MODEL.md §3.1: dividing by 2^(s - 127) instead would divide by a subnormal at s = 0, which devices that flush
    subnormals turn into a division by zero. Code 255 gives NaN.
    """
    return _power(254 - _checked(codes, "e8m0.reciprocal"), nan=-1)


def _checked(codes: Tensor, where: str) -> Tensor:
    if codes.dtype != torch.uint8:
        raise OpRefused(f"scales are {codes.dtype}", where=where, expected="torch.uint8 (E8M0 bytes)")
    return codes.int()


def _power(s: Tensor, nan: int = NAN) -> Tensor:
    """2^(s - 127) from int32 s, by building the bits: no power function is involved, hence no rounding."""
    bits = torch.where(s == 0, 1 << 22, s << 23)  # s = 0: the subnormal 2^-127
    return bits.masked_fill(s == nan, 0x7FC00000).view(torch.float32)


def encode_round_up(amax: Tensor) -> Tensor:
    """Smallest scale under which `amax` still fits E4M3 (MODEL.md §3.1, steps 1 and 2).

    s = ceil(log2(a / 448)) + 127 with a = max(amax, smallest normal float32), clamped to 0..254. Written out on the
    bits of a = (1 + m / 2^23) * 2^(e - 127): s = e - 8, one more if 1 + m / 2^23 > 1.75. A floating-point logarithm
    would be wrong beside the thresholds 1.75 * 2^k (BUG-49, BUG-50).

    Args:
        amax: float32 [...], not negative.
    Returns:
        uint8 [...]: 0..247; 255 (NaN) where amax is NaN or infinite.
    Raises:
        OpRefused: another dtype (a cast to bfloat16 first would round twice).
    """
    if amax.dtype != torch.float32:
        raise OpRefused(f"amax is {amax.dtype}", where="e8m0.encode_round_up", expected="torch.float32")
    bits = amax.abs().view(torch.int32)
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    s = (exponent - _MAX_EXPONENT + (mantissa > _MAX_MANTISSA)).clamp(0, 254)
    return s.masked_fill(exponent == 255, NAN).to(torch.uint8)
