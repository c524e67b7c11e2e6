"""What the block formats share: splitting K into groups, and finding the largest magnitude of each group."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from m31.errors import OpRefused

NonFinite = Literal["refuse", "propagate"]
"""What an encoder does with a block that holds NaN or infinity: name it in an error, or give it a scale that decodes
to NaN (so that one sequence that went wrong is noticed at the end of the step and spoils no other)."""

# float64 would be rounded twice on its way to a code (first to float32), which is not the rounding that is specified.
SOURCES = (torch.float32, torch.bfloat16, torch.float16)


def as_float32(x: Tensor, where: str) -> Tensor:
    """`x` in float32; only dtypes that float32 holds exactly are accepted (OpRefused)."""
    if x.dtype not in SOURCES:
        raise OpRefused(
            f"cannot encode {x.dtype}",
            where=where,
            expected="float32, bfloat16 or float16",
            fix="round to float32 first: a wider type would be rounded twice",
        )
    return x.float()


def over(x: Tensor, divisor: float) -> Tensor:
    """x / divisor, rounded once on every device.

    Torch divides by a Python number on some devices by multiplying with its rounded reciprocal, and a Python number by
    a tensor likewise, on all; a divisor that is a tensor on the same device is really divided by.
    """
    return x / torch.full((), divisor, dtype=x.dtype, device=x.device)


def group_count(k: int, group: int, where: str, shape: tuple[int, ...]) -> int:
    """How many groups a row of `k` elements has; OpRefused if the last one would be incomplete (BUG-46)."""
    if k % group or k == 0:
        raise OpRefused(
            f"shape {list(shape)}: the last dimension {k} is not a positive multiple of {group}",
            where=where,
            expected=f"whole groups of {group}",
            fix="scales belong to whole groups; pad the tensor where it is made, not where it is encoded",
        )
    return k // group


def split(x: Tensor, group: int, where: str) -> Tensor:
    """[..., K] as [..., K/group, group]."""
    if x.dim() == 0:
        raise OpRefused("a scalar has no groups", where=where, expected="a tensor [..., K]")
    return x.reshape(*x.shape[:-1], group_count(x.shape[-1], group, where, tuple(x.shape)), group)


def block_amax(blocks: Tensor, where: str, nonfinite: NonFinite) -> Tensor:
    """[..., G, group] to the largest magnitude [..., G] of each group; NaN wins over everything.

    Raises OpRefused naming the first block that holds NaN or infinity, if `nonfinite` is "refuse".
    """
    amax = blocks.abs().amax(dim=-1)
    if nonfinite == "refuse" and not bool(amax.isfinite().all()):
        refuse_block(~amax.isfinite(), amax, blocks.shape[-1], where)
    return amax


def refuse_block(bad: Tensor, amax: Tensor, group: int, where: str) -> None:
    """Raise OpRefused for the first block marked in `bad`, in terms of the tensor [..., K] that the caller knows."""
    at = [int(i) for i in bad.nonzero()[0]]
    lead = "".join(f"{i}, " for i in at[:-1])
    raise OpRefused(
        f"block [{lead}{at[-1] * group}:{(at[-1] + 1) * group}] holds {float(amax[tuple(at)])}"
        f" ({int(bad.sum())} of {bad.numel()} blocks are not finite)",
        where=where,
        expected="finite values: a shared scale cannot carry NaN or infinity",
        fix="find where the value came from; it would spoil the whole block",
    )
