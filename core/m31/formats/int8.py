"""int8 with one float32 scale per vector, for index keys ("int8 per key")."""

from __future__ import annotations

import torch
from torch import Tensor

from m31.errors import OpRefused
from m31.formats._blocks import NonFinite, as_float32, block_amax, over

MAX = 127


def encode(x: Tensor, *, nonfinite: NonFinite = "refuse") -> tuple[Tensor, Tensor]:
    """Symmetric quantisation of each vector: scale = amax / 127, code = round_half_even(x / scale), within ±127.

    Args:
        x: [..., D] float32, bfloat16 or float16.
    Returns:
        int8 [..., D] and float32 [...]. A zero vector has scale 0 and codes 0.
    Raises:
        OpRefused: another dtype, no last dimension, or (unless propagated, as a NaN scale) a vector not finite.
    """
    where = "int8.encode"
    x = as_float32(x, where)
    if x.dim() == 0 or x.shape[-1] == 0:
        raise OpRefused(f"shape {list(x.shape)}", where=where, expected="vectors [..., D] with D > 0")
    amax = block_amax(x.unsqueeze(-2), where, nonfinite).squeeze(-1)
    scale = over(torch.where(amax.isfinite(), amax, torch.nan), MAX)
    codes = (x / scale.unsqueeze(-1)).nan_to_num(nan=0.0).round().clamp(-MAX, MAX).to(torch.int8)
    return codes.masked_fill(scale.unsqueeze(-1) == 0, 0), scale


def decode(codes: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """int8 [..., D] * float32 [...] -> [..., D] of `dtype`."""
    if codes.dtype != torch.int8 or codes.shape[:-1] != scale.shape:
        raise OpRefused(
            f"codes {codes.dtype} {list(codes.shape)} with scales {list(scale.shape)}",
            where="int8.decode",
            expected="int8 [..., D] and float32 [...]",
        )
    return (codes.float() * scale.unsqueeze(-1)).to(dtype)
