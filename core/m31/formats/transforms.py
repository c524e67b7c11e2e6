"""From one stored format to another, with the loss measured (MODEL.md §3.1, §3.2).

A backend that cannot multiply what the checkpoint holds converts it when it loads. Such a conversion is named here,
and returns what it cost: `Loss` compares the decoded values after with the decoded values before, element by element.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from m31.errors import OpRefused
from m31.formats import fp8, mxfp8, nvfp4
from m31.formats._blocks import over


@dataclass(frozen=True)
class Loss:
    """What a transform changed.

    `max_abs`: largest |after - before|. `rms`: root of the mean square of that difference, over the root mean square
    of `before`. `max_rel`: largest |after - before| / |before|; an element that became zero counts 1, one that was
    zero and no longer is counts infinity. `exact`: every element is unchanged.
    """

    max_abs: float
    rms: float
    max_rel: float
    exact: bool


def measure(before: Tensor, after: Tensor) -> Loss:
    """Loss between two decoded tensors of one shape, computed in float64."""
    if before.shape != after.shape:
        raise OpRefused(f"{list(before.shape)} against {list(after.shape)}", where="measure", expected="one shape")
    if before.numel() == 0 or torch.equal(before, after):
        return Loss(0.0, 0.0, 0.0, True)
    old = before.double()
    difference = (after.double() - old).abs()
    power = float(old.square().mean())
    relative = torch.where(difference == 0, 0.0, difference / old.abs())
    rms = float(difference.square().mean())
    return Loss(
        max_abs=float(difference.max()),
        rms=(rms / power) ** 0.5 if power else float("inf"),
        max_rel=float(relative.max()),
        exact=False,
    )


def worst(losses: Sequence[Loss]) -> Loss:
    """The largest of each number over several tensors.

    Raises OpRefused for none.
    """
    if not losses:
        raise OpRefused("no losses", where="worst", expected="at least one")
    return Loss(
        max_abs=max(loss.max_abs for loss in losses),
        rms=max(loss.rms for loss in losses),
        max_rel=max(loss.max_rel for loss in losses),
        exact=all(loss.exact for loss in losses),
    )


class BlockFp8(NamedTuple):
    """E4M3 with a float32 decode scale per square block: codes [..., N, K], scale [..., ceil(N/b), ceil(K/b)]."""

    codes: Tensor
    scale: Tensor
    block: int

    def decode(self) -> Tensor:
        """[..., N, K] in float32: E4M3 * scale."""
        n, k = self.codes.shape[-2:]
        return fp8.decode(self.codes) * _spread(self.scale, self.block, n, k)


def _spread(scale: Tensor, block: int, n: int, k: int) -> Tensor:
    return scale.repeat_interleave(block, -2)[..., :n, :].repeat_interleave(block, -1)[..., :k]


def to_block_fp8(codes: Tensor, scale: Tensor, *, block: int = 128) -> BlockFp8:
    """MXFP8 [..., N, K] to E4M3 with one float32 scale per `block` x `block`: amax / 448, then E4M3(x / scale).

    For devices without MXFP8 products. Lossy: 512 exponents (at 128 x 128) become one, so that small groups lose bits
    or vanish. Blocks at the edges may be partial. An all-zero block has scale 0.

    Raises OpRefused if the shapes do not belong together or there are fewer than two dimensions.
    """
    if codes.dim() < 2:
        raise OpRefused(f"{list(codes.shape)}", where="mxfp8_to_block_fp8", expected="a matrix [..., N, K]")
    before = mxfp8.decode(codes, scale)
    n, k = codes.shape[-2:]
    down, right = -n % block, -k % block
    padded = torch.nn.functional.pad(before, (0, right, 0, down))
    tiles = padded.reshape(*before.shape[:-2], (n + down) // block, block, (k + right) // block, block)
    new_scale = over(tiles.abs().amax(dim=(-3, -1)), fp8.E4M3_MAX)
    divisor = _spread(new_scale, block, n, k)
    return BlockFp8(fp8.encode(torch.where(divisor == 0, 0.0, before / divisor)), new_scale, block)


def mxfp8_to_block_fp8(codes: Tensor, scale: Tensor, *, block: int = 128) -> tuple[BlockFp8, Loss]:
    """`to_block_fp8`, and what it cost."""
    result = to_block_fp8(codes, scale, block=block)
    return result, measure(mxfp8.decode(codes, scale), result.decode())


def requantise(packed: Tensor, scale: Tensor, global_scale: Tensor) -> mxfp8.Mxfp8:
    """NVFP4 [..., K] to MXFP8: decoded to float32, quantised again per 32 (MODEL.md §3.2).

    Lossy: a code times a block scale has up to six significant bits and E4M3 holds four, two groups of 16 share one
    exponent, and 1/G is any float32. Raises OpRefused unless K is a multiple of 32.
    """
    return mxfp8.encode(nvfp4.decode(packed, scale, global_scale), where="nvfp4_to_mxfp8")


def nvfp4_to_mxfp8(packed: Tensor, scale: Tensor, global_scale: Tensor) -> tuple[mxfp8.Mxfp8, Loss]:
    """`requantise`, and what it cost."""
    result = requantise(packed, scale, global_scale)
    return result, measure(nvfp4.decode(packed, scale, global_scale), mxfp8.decode(*result))


class SharedScale(NamedTuple):
    """Several NVFP4 matrices under one decode scale: value = E2M1 * E4M3 * decode_scale."""

    packed: tuple[Tensor, ...]
    scale: tuple[Tensor, ...]
    decode_scale: Tensor

    def matrix(self, at: int) -> Tensor:
        """Matrix `at` [..., K] in float32."""
        return nvfp4.decode_kv(self.packed[at], self.scale[at]) * self.decode_scale.float()

    def decode(self) -> tuple[Tensor, ...]:
        """Each matrix [..., K] in float32."""
        return tuple(self.matrix(at) for at in range(len(self.packed)))


def share_scale(parts: Sequence[nvfp4.Nvfp4], *, dtype: torch.dtype = torch.bfloat16) -> SharedScale:
    """Gate and up (or any matrices) under one global scale, for weight-only kernels that take one per expert.

    The smallest G of the parts becomes the common one, so that no block scale grows; the others' block scales become
    E4M3(sf * G / G_own), and the decode scale 1/G is rounded to `dtype`, the one such kernels multiply in. Codes stay.
    Exact only if all G are equal (or apart by powers of two) and 1/G is a `dtype` number.

    Raises OpRefused for no parts.
    """
    if not parts:
        raise OpRefused("no matrices", where="nvfp4_shared_scale", expected="at least one")
    common = torch.stack([part.global_scale.reshape(()) for part in parts]).min()
    scales = tuple(
        part.scale
        if bool(part.global_scale == common)
        else fp8.encode(fp8.decode(part.scale) * (common / part.global_scale))
        for part in parts
    )
    return SharedScale(tuple(part.packed for part in parts), scales, (1.0 / common).reshape(1).to(dtype))


def nvfp4_shared_scale(
    parts: Sequence[nvfp4.Nvfp4], *, dtype: torch.dtype = torch.bfloat16
) -> tuple[SharedScale, Loss]:
    """`share_scale`, and what it cost over all matrices."""
    result = share_scale(parts, dtype=dtype)
    before = torch.cat([nvfp4.decode(*part).flatten() for part in parts])
    return result, measure(before, torch.cat([matrix.flatten() for matrix in result.decode()]))


TRANSFORMS: dict[str, Callable[..., tuple[Any, Loss]]] = {
    "mxfp8-to-block-fp8": mxfp8_to_block_fp8,
    "nvfp4-to-mxfp8": nvfp4_to_mxfp8,
    "nvfp4-shared-scale": nvfp4_shared_scale,
}
"""Every lossy preparation of weights, by the name under which a backend declares it."""
