"""MXFP8 (MODEL.md §3.1): E4M3 elements, one E8M0 scale per 32 elements of K, the exponent rounded up."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from m31.errors import OpRefused
from m31.formats import e8m0, fp8
from m31.formats._blocks import NonFinite, as_float32, block_amax, group_count, split

GROUP = 32


class Mxfp8(NamedTuple):
    """A tensor [..., K]: `codes` float8_e4m3fn [..., K], `scale` uint8 E8M0 [..., K/32], row-major, not swizzled."""

    codes: Tensor
    scale: Tensor


def encode(x: Tensor, *, nonfinite: NonFinite = "refuse", where: str = "mxfp8.encode") -> Mxfp8:
    """Quantise per 32 elements: s from the block's amax, rounded up; code = E4M3(x * 2^(127 - s)).

    The product is exact (or rounds to zero either way), so that the only rounding is the one to E4M3, and it never
    saturates. An all-zero block has s = 0 and codes 0.

    Args:
        x: [..., K] float32, bfloat16 or float16; K a multiple of 32.
        nonfinite: "propagate" gives a block with NaN or infinity the scale 255, so that it decodes to NaN.
        where: what the caller calls x, for errors.
    Raises:
        OpRefused: K is not a multiple of 32, another dtype, or (unless propagated) a block that is not finite.
    """
    blocks = split(as_float32(x, where), GROUP, where)
    scale = e8m0.encode_round_up(block_amax(blocks, where, nonfinite))
    codes = fp8.encode(blocks * e8m0.reciprocal(scale).unsqueeze(-1), where=where)
    return Mxfp8(codes.reshape(x.shape), scale)


def decode(codes: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """E4M3 [..., K] times 2^(s - 127) [..., K/32], in float32 (exact), then rounded once to `dtype`.

    bfloat16 is exact as well: four significant bits; below 2^-126 it has subnormals down to 2^-133. An element of
    1.9375 * 2^127 or more has the code of 2^128, which float32 does not hold: it decodes to infinity.
    Raises OpRefused if the shapes do not belong together.
    """
    check_shapes(codes, scale, "mxfp8.decode")
    blocks = split(fp8.decode(codes), GROUP, "mxfp8.decode")
    return (blocks * e8m0.decode(scale).unsqueeze(-1)).reshape(codes.shape).to(dtype)


def check_shapes(codes: Tensor, scale: Tensor, where: str) -> None:
    """OpRefused unless `scale` is [..., K/32] for `codes` [..., K]."""
    shape = tuple(codes.shape)
    want = (*shape[:-1], group_count(shape[-1] if shape else 0, GROUP, where, shape))
    if tuple(scale.shape) != want:
        raise OpRefused(
            f"scales of shape {list(scale.shape)} for codes of shape {list(shape)}",
            where=where,
            expected=f"{list(want)}: one scale per {GROUP} elements",
        )


def quantise(x: Tensor, *, dtype: torch.dtype = torch.float32, nonfinite: NonFinite = "refuse") -> Tensor:
    """What a W8A8 linear sees of its input x [..., K]: encoded and decoded, in `dtype` (MODEL.md §3.6)."""
    return decode(*encode(x, nonfinite=nonfinite, where="mxfp8.quantise"), dtype)
