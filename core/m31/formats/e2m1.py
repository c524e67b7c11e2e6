"""E2M1, the four-bit element of NVFP4 (MODEL.md §3.2): 1 sign, 2 exponent, 1 mantissa bit; no infinity, no NaN."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from m31.errors import OpRefused
from m31.formats._blocks import as_float32

VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""Value of each code. Code 8 is minus zero: it decodes, and no encoder of m31 emits it."""

MAX = 6.0


@functools.cache
def _values(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(VALUES, dtype=dtype, device=device)


@functools.cache
def _pairs(dtype: torch.dtype, device: torch.device) -> Tensor:
    """[256, 2]: the two values of each packed byte."""
    byte = torch.arange(256, device=device)
    return _values(dtype, device)[torch.stack((byte & 15, byte >> 4), dim=-1)]


def encode(x: Tensor, *, where: str = "e2m1.encode") -> Tensor:
    """Nearest code of each element, ties to the even code, saturating at ±6 (infinity too); zero is always code 0.

    Args:
        x: [...] float32, bfloat16 or float16.
        where: what the caller calls x, for the error.
    Returns:
        uint8 [...], 0..15 without 8.
    Raises:
        OpRefused: x holds NaN, which has no code; or another dtype.
    """
    x = as_float32(x, where)
    if bool(x.isnan().any()):
        raise OpRefused("NaN has no E2M1 code", where=where, expected="numbers", fix="find where the NaN came from")
    return encode_unchecked(x)


def encode_unchecked(x: Tensor) -> Tensor:
    """`encode` of float32 without looking for NaN, which becomes code 0: for blocks that were checked by their amax."""
    # The codes are a piecewise linear count of magnitude: steps of 1/2 up to 2, of 1 up to 4, of 2 up to 6. Each piece
    # is exact in float32, `round` is half-to-even, and both ends of a piece are even codes, so that ties go to the
    # even code everywhere.
    magnitude = x.abs().nan_to_num_(nan=0.0, posinf=6.0)
    code = magnitude.clamp(max=2.0).mul_(2.0).round_()
    code += magnitude.clamp(2.0, 4.0).sub_(2.0).round_()
    code += magnitude.clamp_(4.0, 6.0).sub_(4.0).mul_(0.5).round_()
    negative = (x < 0) & (code != 0)
    return code.to(torch.uint8).add_(negative.to(torch.uint8), alpha=8)


def decode(codes: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Value of each code: uint8 [...] in 0..15 to [...] of `dtype` (exact in every floating dtype of 8 bits or more).

    Raises OpRefused for a byte above 15: packed bytes go through `unpack` first.
    """
    if bool((codes > 15).any()):
        raise OpRefused(
            f"code {int(codes.max())}", where="e2m1.decode", expected="0..15", fix="unpack packed bytes first"
        )
    return _values(dtype, codes.device)[codes.int()]


def decode_packed(packed: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values [..., K] of packed bytes uint8 [..., K/2]; every byte is two codes, so that there is nothing to refuse."""
    return _pairs(dtype, packed.device)[packed.int()].flatten(-2)


def pack(codes: Tensor) -> Tensor:
    """uint8 codes [..., K] to bytes [..., K/2]: the even column in the low nibble, the odd one in the high (BUG-55).

    Raises OpRefused for an odd K.
    """
    if codes.dim() == 0 or codes.shape[-1] % 2:
        raise OpRefused(f"cannot pack shape {list(codes.shape)}", where="e2m1.pack", expected="an even last dimension")
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack(packed: Tensor) -> Tensor:
    """Bytes [..., K/2] to codes [..., K]; the inverse of `pack`."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)
