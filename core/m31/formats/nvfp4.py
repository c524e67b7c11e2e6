"""NVFP4 (MODEL.md §3.2, §3.4): two E2M1 codes a byte, one E4M3 scale per 16 elements of K, one float32 for the whole.

The global scale here is always the *encode* scale G of M3.1-Flash's checkpoint: value = E2M1 * E4M3 / G. ModelOpt
stores 1/G; convert where such a tensor is read (`from_decode_scale`), nowhere else.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from m31.errors import OpRefused
from m31.formats import e2m1, fp8
from m31.formats._blocks import NonFinite, as_float32, block_amax, over, split
from m31.formats.layout import check_nvfp4_shapes

GROUP = 16
FULL_RANGE = fp8.E4M3_MAX * e2m1.MAX
"""2688: the largest product of a code and a block scale."""
TOKEN_FLOOR = 1e-12
"""Smallest amax of a token, so that a token of zeros has a scale (MODEL.md §3.2)."""
_FLOAT32_MAX = torch.finfo(torch.float32).max


class Nvfp4(NamedTuple):
    """A tensor [..., K]: `packed` uint8 [..., K/2], `scale` float8_e4m3fn [..., K/16], `global_scale` float32 [1]."""

    packed: Tensor
    scale: Tensor
    global_scale: Tensor


class Nvfp4Tokens(NamedTuple):
    """Activations [..., K] with one float32 *decode* scale per token: value = E2M1 * E4M3 * token_scale [..., 1]."""

    packed: Tensor
    scale: Tensor
    token_scale: Tensor


def global_scale(amax: Tensor) -> Tensor:
    """Encode scale G = 2688 / amax of a tensor whose largest magnitude is `amax` (float32 [] or [1]) -> float32 [1].

    An all-zero tensor gets G = 1. Where 2688 / amax would overflow (amax below 8e-36) G is the largest float32.
    Raises OpRefused if amax is negative, NaN or infinite.
    """
    value = as_float32(amax, "nvfp4.global_scale").reshape(1)
    if not bool((value.isfinite() & (value >= 0)).all()):
        raise OpRefused(f"amax is {float(value)}", where="nvfp4.global_scale", expected="a finite number >= 0")
    return torch.where(
        value == 0, torch.ones_like(value), (torch.full_like(value, FULL_RANGE) / value).clamp(max=_FLOAT32_MAX)
    )


def from_decode_scale(decode_scale: Tensor) -> Tensor:
    """Encode scale float32 [1] of a ModelOpt tensor, which stores the decode scale 1/G ([] or [1]).

    1/(1/G) is not always G in float32: the decoded tensor may differ in the last place (BUG-44).
    Raises OpRefused for a scale that is not finite and positive.
    """
    return checked_global_scale(1.0 / checked_global_scale(decode_scale, "decode scale"), "decode scale")


def divisible(scale: Tensor) -> bool:
    """Whether every number of `scale` (float32, any shape) is finite, above zero, and has a finite reciprocal.

    What is quantised under a G below 2^-128 or so becomes NaN, because 1/G exceeds float32. No encoder writes one: it
    would belong to an amax beyond float32.
    """
    return bool((scale.isfinite() & (scale > 0) & (1.0 / scale).isfinite()).all())


def checked_global_scale(scale: Tensor, where: str) -> Tensor:
    """`scale` as float32 [1] (shapes [] and [1] occur); OpRefused unless it is one number that can be divided by.

    See `divisible`.
    """
    if scale.dtype != torch.float32 or scale.numel() != 1:
        raise OpRefused(
            f"global scale is {scale.dtype} of shape {list(scale.shape)}", where=where, expected="one float32"
        )
    if not divisible(scale):
        raise OpRefused(
            f"global scale is {float(scale)}",
            where=where,
            expected="a finite number > 0 whose reciprocal is finite",
        )
    return scale.reshape(1)


def encode(x: Tensor, global_scale: Tensor | None = None, *, where: str = "nvfp4.encode") -> Nvfp4:
    """Quantise weights: sf = E4M3(amax16 / 6 * G), code = E2M1(x * G / sf), both operations from left to right in
    float32, and the code computed with the *rounded* sf (BUG-47). Where sf is 0 (an all-zero block, or one below
    2^-10 * 6 / G) all codes are 0.

    Args:
        x: [..., K] float32, bfloat16 or float16; K a multiple of 16.
        global_scale: G, float32 [] or [1]; from the amax of x if None. Blocks too large for a given G saturate:
            see `saturated_blocks`.
        where: what the caller calls x, for errors.
    Raises:
        OpRefused: K is not a multiple of 16, another dtype, a block that is not finite, or G not finite and positive.
    """
    blocks = split(as_float32(x, where), GROUP, where)
    amax = block_amax(blocks, where, "refuse")
    if global_scale is None:
        global_scale = _scale_for(amax)
    g = checked_global_scale(global_scale, where)
    sf = fp8.encode(over(amax, 6.0) * g)
    sf32 = fp8.decode(sf).unsqueeze(-1)
    codes = e2m1.encode_unchecked(blocks * g / sf32).masked_fill_(sf32 == 0, 0)
    return Nvfp4(e2m1.pack(codes.reshape(x.shape)), sf, g)


def _scale_for(amax: Tensor) -> Tensor:
    return global_scale(amax.max() if amax.numel() else amax.new_zeros(1))


def saturated_blocks(x: Tensor, global_scale: Tensor) -> Tensor:
    """How many blocks of x [..., K] lose more to a too large G than rounding a scale ever costs: int64 [].

    A block counts if its scale amax16 / 6 * G is above 464, from where the nearest E4M3 number would be beyond 448.
    """
    amax = block_amax(split(as_float32(x, "x"), GROUP, "x"), "x", "refuse")
    return (over(amax, 6.0) * checked_global_scale(global_scale, "global_scale") > 464.0).sum()


def decode(packed: Tensor, scale: Tensor, global_scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """E2M1 * E4M3 / G: the product is exact, the division rounds to float32 once, then once more to `dtype`.

    Args:
        packed: uint8 [..., K/2]; scale: float8_e4m3fn [..., K/16]; global_scale: encode scale, float32 [] or [1].
    Returns:
        [..., K] of `dtype`.
    Raises:
        OpRefused: shapes that do not belong together, or G not finite and positive.
    """
    g = checked_global_scale(global_scale, "nvfp4.decode")
    return (_product(packed, scale, "nvfp4.decode") / g).to(dtype)


def _product(packed: Tensor, scale: Tensor, where: str) -> Tensor:
    """E2M1 * E4M3 [..., K] in float32: exact, at most six significant bits."""
    check_nvfp4_shapes(packed, scale, where)
    blocks = split(e2m1.decode_packed(packed), GROUP, where)
    return (blocks * fp8.decode(scale).unsqueeze(-1)).flatten(-2)


def encode_per_token(x: Tensor, *, nonfinite: NonFinite = "refuse") -> Nvfp4Tokens:
    """Quantise the input of the routed experts' first matrix product (FC1, MODEL.md §3.2), per token.

    t = max(amax of the token, 1e-12) / 2688; v = x / t; sf = E4M3(clip(amax16(v) / 6, 2^-9, 448)); code = E2M1(v / sf),
    all in float32. The floor 2^-9 keeps sf from being 0, so that an all-zero block has sf = 2^-9 and codes 0.

    Args:
        x: [..., K]; K a multiple of 16; every row [K] is a token.
        nonfinite: "propagate": a token with NaN or infinity gets a NaN scale.
    """
    where = "nvfp4.encode_per_token"
    blocks = split(as_float32(x, where), GROUP, where)
    amax = block_amax(blocks, where, nonfinite).amax(dim=-1, keepdim=True).clamp(min=TOKEN_FLOOR)
    token = over(torch.where(amax.isfinite(), amax, torch.nan), FULL_RANGE)
    scaled = blocks / token.unsqueeze(-1)
    packed, sf = _encode_with_floor(scaled, over(scaled.abs().amax(dim=-1), 6.0), 1.0)
    return Nvfp4Tokens(packed, sf, token)


def _encode_with_floor(blocks: Tensor, ratio: Tensor, unit: Tensor | float) -> tuple[Tensor, Tensor]:
    """The activation rules: sf = E4M3(clip(ratio, 2^-9, 448)), code = E2M1(x / (sf * unit))."""
    sf = fp8.encode(ratio.clamp(fp8.E4M3_MIN, fp8.E4M3_MAX))
    codes = e2m1.encode_unchecked(blocks / (fp8.decode(sf) * unit).unsqueeze(-1))
    return e2m1.pack(codes.flatten(-2)), sf


def quantise_per_token(x: Tensor, *, dtype: torch.dtype = torch.float32, nonfinite: NonFinite = "refuse") -> Tensor:
    """What FC1 sees of x [..., K]: E2M1 * E4M3 * t, in `dtype`. bfloat16 would round once more: t is any float32."""
    packed, sf, token = encode_per_token(x, nonfinite=nonfinite)
    return (_product(packed, sf, "nvfp4.quantise_per_token") * token).to(dtype)


def encode_static(
    x: Tensor, input_global_scale: Tensor, *, nonfinite: NonFinite = "refuse"
) -> tuple[Tensor, Tensor, Tensor]:
    """Quantise the input of the routed experts' second matrix product (FC2, MODEL.md §3.2), with a stored scale.

    s = 1 / G; sf = E4M3(clip(amax16 / (6 * s), 2^-9, 448)); code = E2M1(x / (sf * s)), all in float32. The rule is
    defined on the float32 activation: do not round it to bfloat16 first.

    Args:
        x: [..., K]; K a multiple of 16.
        input_global_scale: G of w2's `input_global_scale`, float32 [] or [1].
    Returns:
        packed uint8 [..., K/2], scale float8_e4m3fn [..., K/16], s float32 [1].
    """
    where = "nvfp4.encode_static"
    blocks = split(as_float32(x, where), GROUP, where)
    s = 1.0 / checked_global_scale(input_global_scale, where)
    amax = block_amax(blocks, where, nonfinite)
    amax = torch.where(amax.isfinite(), amax, torch.nan)
    packed, sf = _encode_with_floor(blocks, amax / (6.0 * s), s)
    return packed, sf, s


def default_input_scale(limit: float, beta: float) -> float:
    """An `input_global_scale` for FC2 where no calibration is known: 2688 / ((limit + |beta|) * limit).

    The divisor bounds every output of the clamped SwiGLU-OAI (MODEL.md §2.5: 56 for the published numbers, hence 48),
    so that no activation can saturate under it, whatever the input.
    Raises OpRefused where `limit` or `beta` is such that float32 cannot hold the number or divide by it.
    """
    bound = (limit + abs(beta)) * limit
    scale = FULL_RANGE / bound if bound else math.inf
    if not divisible(torch.tensor([scale], dtype=torch.float64).float()):
        raise OpRefused(
            f"no default input scale follows from limit {limit:g} and beta {beta:g}",
            where="nvfp4.default_input_scale",
            expected="a limit above zero for which float32 holds 2688 / ((limit + |beta|) * limit) and its reciprocal",
            fix="check the swiglu limit and beta in config.json, or use calibrated scales",
        )
    return scale


def quantise_static(
    x: Tensor, input_global_scale: Tensor, *, dtype: torch.dtype = torch.float32, nonfinite: NonFinite = "refuse"
) -> Tensor:
    """What FC2 sees of x [..., K]: E2M1 * E4M3 * s, in `dtype`."""
    packed, sf, s = encode_static(x, input_global_scale, nonfinite=nonfinite)
    return (_product(packed, sf, "nvfp4.quantise_static") * s).to(dtype)


def encode_kv(x: Tensor, *, nonfinite: NonFinite = "refuse") -> tuple[Tensor, Tensor]:
    """Quantise keys, values or index keys for the cache (MODEL.md §3.4 with g = 1 and exact division).

    sf = E4M3(amax16 / 6) without a floor; code = E2M1(x / sf). Both quotients are of few bits, so that float32 gives
    exactly the nearest code of the real quotient. A block whose sf underflows to 0 has codes at full scale, as the
    peers store it, and decodes to 0.

    Args:
        x: [..., D] bfloat16, or float32 that holds bfloat16 values (MODEL.md §2.3); D a multiple of 16.
    Returns:
        packed uint8 [..., D/2], scale float8_e4m3fn [..., D/16].
    Raises:
        OpRefused: D is not a multiple of 16, another dtype, values that bfloat16 does not hold, a block not finite.
    """
    where = "nvfp4.encode_kv"
    if x.dtype != torch.bfloat16 and nonfinite == "refuse" and not bool(_is_bfloat16(x)):
        raise OpRefused(
            "values are not rounded to bfloat16",
            where=where,
            expected="bfloat16 values: the cache is quantised from what the model computes in bfloat16",
            fix="round with .bfloat16() first",
        )
    blocks = split(as_float32(x, where), GROUP, where)
    amax = block_amax(blocks, where, nonfinite)
    amax = torch.where(amax.isfinite(), amax, torch.nan)
    sf = fp8.encode(over(amax, 6.0))
    # 0 / 0 is NaN and becomes code 0; x / 0 is infinite and saturates.
    codes = e2m1.encode_unchecked(blocks / fp8.decode(sf).unsqueeze(-1))
    return e2m1.pack(codes.reshape(x.shape)), sf


def _is_bfloat16(x: Tensor) -> Tensor:
    return ((x.bfloat16().to(x.dtype) == x) | x.isnan()).all()


def decode_kv(packed: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """E2M1 * E4M3 [..., D]: the reference's read rule; exact in float32, bfloat16 and float16 (MODEL.md §3.4)."""
    return _product(packed, scale, "nvfp4.decode_kv").to(dtype)


def decode_kv_e4m3(
    packed: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32, *, scale_shift: int = 0
) -> Tensor:
    """The read rule of kernels that multiply in E4M3: the product rounded to E4M3, saturating (MODEL.md §3.4).

    Args:
        packed, scale: uint8 [..., D/2], float8_e4m3fn [..., D/16].
        scale_shift: such kernels may first replace sf by E4M3(sf / 2^scale_shift) and multiply the result back; 0 is
            the rule that m31 uses, 3 a peer's default, which loses precision for small blocks.
    """
    sf = fp8.encode(fp8.decode(scale) * 2.0**-scale_shift)
    product = _product(packed, sf, "nvfp4.decode_kv_e4m3")
    return (fp8.decode(fp8.encode(product)) * 2.0**scale_shift).to(dtype)
