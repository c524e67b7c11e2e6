"""MXFP8: the scale over every exponent, hard blocks, refusals (MODEL.md §3.1)."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from tests.unit.formats_helpers import block, positive_bfloat16, same_bits

from m31.errors import OpRefused
from m31.formats import e8m0, fp8, mxfp8, scalar

# Both sides of a change of binade, of 1.75 (where the scale changes), and of the middle.
MANTISSAS = [0, 1, 2, 0x3FFFFF, 0x400000, 0x5FFFFE, 0x5FFFFF, 0x600000, 0x600001, 0x600002, 0x7FFFFE, 0x7FFFFF]


def sweep() -> torch.Tensor:
    """[255, 12] float32: every exponent (subnormals first) with the mantissas beside every threshold."""
    return ((torch.arange(255, dtype=torch.int32)[:, None] << 23) | torch.tensor(MANTISSAS, dtype=torch.int32)).view(
        torch.float32
    )


def test_scale_over_every_exponent() -> None:
    """The scale is the smallest under which amax fits, stated in rationals (BUG-49, BUG-50)."""
    amax = sweep()
    for a, s in zip(amax.flatten().tolist(), e8m0.encode_round_up(amax).flatten().tolist(), strict=True):
        wanted = max(Fraction(a), Fraction(2) ** -126)
        assert wanted <= 448 * Fraction(2) ** (s - 127)
        assert s == 0 or wanted > 448 * Fraction(2) ** (s - 128)
        assert s == scalar.mxfp8_scale(a)


def test_a_logarithm_in_floating_point_would_be_wrong() -> None:
    """What the bits are for: ceil(log2) in float32 misses thresholds, by saturating the largest element."""
    amax = sweep()
    careless = (torch.ceil(torch.log2(amax.clamp(min=2.0**-126) / 448)) + 127).clamp(0, 254).to(torch.uint8)
    wrong = careless != e8m0.encode_round_up(amax)
    assert int(wrong.sum()) > 400
    assert bool((amax[wrong] > 0).all())
    assert set(wrong.any(dim=0).nonzero().flatten().tolist()) == {8, 9}  # 1.75 * 2^k and just above


def test_rounding_amax_to_bfloat16_first_would_be_wrong() -> None:  # BUG-50
    amax = torch.tensor([1.7500001, 448.00003])
    assert e8m0.encode_round_up(amax).tolist() == [120, 128]
    assert e8m0.encode_round_up(amax.bfloat16().float()).tolist() == [119, 127]


def test_no_block_saturates_and_none_wastes_a_bit() -> None:
    amax = sweep().flatten()
    x = torch.zeros(len(amax), 32)
    x[:, 5] = -amax
    codes, scale = mxfp8.encode(x)
    scaled = x[:, 5].double() * 2.0 ** (127 - scale[:, 0].double())
    assert bool((scaled.abs() <= 448).all())
    assert bool((scaled.abs()[scale[:, 0] > 0] > 224).all())
    assert not bool(fp8.decode(codes).isnan().any())


def test_every_bfloat16_amax() -> None:
    x = torch.zeros(32639, 32, dtype=torch.bfloat16)
    x[:, 0] = positive_bfloat16()
    back = mxfp8.quantise(x)[:, 0]
    wide = x[:, 0].float()
    # Above, the nearest E4M3 number times its scale is 2^128, beyond float32; below, the smallest scale is reached and
    # E4M3 is subnormal under it.
    ordinary = (wide < 1.9375 * 2.0**127) & (wide >= 2.0**-130)
    assert float(((back - wide).abs() / wide)[ordinary].max()) <= 2.0**-4
    assert bool(back[wide >= 1.9375 * 2.0**127].isinf().all())
    assert float((back - wide).abs()[wide < 2.0**-130].max()) <= 2.0**-134


@settings(max_examples=150, deadline=None)
@given(block(32))
def test_vectorised_equals_scalar(xs: list[float]) -> None:
    codes, scale = mxfp8.encode(torch.tensor(xs))
    plain, s = scalar.mxfp8_encode(xs)
    assert (codes.view(torch.uint8).tolist(), scale.tolist()) == (plain, [s])
    decoded = [scalar.f32(scalar.e4m3_value(c) * scalar.e8m0_value(s)) for c in plain]
    assert same_bits(mxfp8.decode(codes, scale), torch.tensor(decoded))
    assert 0x80 not in plain


@pytest.mark.parametrize(
    ("name", "value"),
    [("zero", 0.0), ("minus zero", -0.0), ("smallest subnormal", 2.0**-149), ("smallest normal", 2.0**-126)],
)
def test_hard_blocks(name: str, value: float) -> None:  # BUG-53
    x = torch.zeros(2, 64)
    x[0, 3] = value
    codes, scale = mxfp8.encode(x)
    back = mxfp8.decode(codes, scale)
    assert bool(back.isfinite().all())
    assert not bool(back.signbit().any())
    assert int(scale[0, 0]) == 0
    assert float(back[0, 3]) == (value if name == "smallest normal" else 0.0)
    assert int(codes.view(torch.uint8)[1].sum()) == 0


def test_an_outlier_takes_its_own_block_only() -> None:
    x = torch.full((1, 64), 1e-3)
    x[0, 40] = 3e38
    back = mxfp8.quantise(x)
    assert float(back[0, 40]) == pytest.approx(3e38, rel=2.0**-4)
    assert back[0, 33:40].tolist() == [0.0] * 7
    assert torch.allclose(back[0, :32], x[0, :32], rtol=2.0**-4)


def test_rows_concatenate() -> None:
    """Blocks lie along K: the fused projection is the concatenation of rows of codes and of scales."""
    parts = [torch.randn(n, 96, generator=torch.Generator().manual_seed(n)) for n in (3, 1, 5)]
    whole = mxfp8.encode(torch.cat(parts))
    assert same_bits(
        whole.codes, torch.cat([mxfp8.encode(p).codes.view(torch.uint8) for p in parts]).view(whole.codes.dtype)
    )
    assert torch.equal(whole.scale, torch.cat([mxfp8.encode(p).scale for p in parts]))


def test_leading_dimensions_and_dtypes() -> None:
    x = torch.randn(2, 3, 64, generator=torch.Generator().manual_seed(0))
    codes, scale = mxfp8.encode(x)
    assert (codes.shape, scale.shape) == ((2, 3, 64), (2, 3, 2))
    flat = mxfp8.encode(x.reshape(6, 64))
    assert same_bits(codes.reshape(6, 64), flat.codes)
    for dtype in (torch.bfloat16, torch.float64):
        assert torch.equal(mxfp8.decode(codes, scale, dtype).float(), mxfp8.decode(codes, scale))  # 4 bits fit
    empty = mxfp8.encode(torch.zeros(0, 64))
    assert (empty.codes.shape, empty.scale.shape) == ((0, 64), (0, 2))
    assert mxfp8.decode(*empty).shape == (0, 64)
    assert mxfp8.quantise(x.bfloat16()).dtype == torch.float32


def test_refusals() -> None:
    with pytest.raises(OpRefused) as caught:  # BUG-46
        mxfp8.encode(torch.zeros(2, 48), where="layers.0.q_proj")
    assert str(caught.value) == (
        "layers.0.q_proj: shape [2, 48]: the last dimension 48 is not a positive multiple of 32; expected whole groups "
        "of 32; scales belong to whole groups; pad the tensor where it is made, not where it is encoded"
    )
    with pytest.raises(OpRefused, match="a scalar has no groups"):
        mxfp8.encode(torch.tensor(1.0))
    with pytest.raises(OpRefused, match="the last dimension 0 is not a positive multiple of 32"):
        mxfp8.encode(torch.zeros(2, 0))
    codes, scale = mxfp8.encode(torch.zeros(2, 64))
    with pytest.raises(OpRefused, match=r"scales of shape \[2, 1\] for codes of shape \[2, 64\]; expected \[2, 2\]"):
        mxfp8.decode(codes, scale[:, :1])
    with pytest.raises(OpRefused, match=r"expected .* one scale per 32 elements"):
        mxfp8.decode(codes[:, :32], scale)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_block_that_is_not_finite_is_named(bad: float) -> None:
    x = torch.zeros(3, 2, 64)
    x[2, 1, 50] = bad
    with pytest.raises(OpRefused) as caught:
        mxfp8.encode(x, where="w")
    assert str(caught.value).startswith(f"w: block [2, 1, 32:64] holds {abs(bad)} (1 of 12 blocks are not finite)")
    codes, scale = mxfp8.encode(x, nonfinite="propagate")
    assert int(scale[2, 1, 1]) == 255
    back = mxfp8.decode(codes, scale)
    assert bool(back[2, 1, 32:].isnan().all())
    assert int(back.isnan().sum()) == 32
