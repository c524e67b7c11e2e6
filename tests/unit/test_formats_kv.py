"""The NVFP4 cache: store and read rules over every bfloat16 (MODEL.md §3.4); int8 per key."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from tests.unit.formats_helpers import BYTES, bfloat16_block, block, positive_bfloat16, same_bits

from m31.errors import OpRefused
from m31.formats import e2m1, fp8, int8, nvfp4, scalar

SCALES = BYTES[:127].view(torch.float8_e4m3fn)  # every scale that a store rule can emit, 0 included
MIDPOINTS = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], dtype=torch.float64)
TIE_GOES_UP = torch.tensor([False, True, False, True, False, True, False])


@settings(max_examples=200, deadline=None)
@given(bfloat16_block(16))
def test_store_equals_the_scalar_rule(xs: list[float]) -> None:
    packed, sf = nvfp4.encode_kv(torch.tensor(xs))
    codes, code = scalar.nvfp4_encode_kv(xs)
    assert (e2m1.unpack(packed).tolist(), int(sf.view(torch.uint8))) == (codes, code)
    assert same_bits(nvfp4.encode_kv(torch.tensor(xs).bfloat16())[0], packed)
    assert 8 not in codes
    for shift in (0, 3):
        read = nvfp4.decode_kv_e4m3(packed, sf, scale_shift=shift)
        assert read.tolist() == [scalar.nvfp4_kv_e4m3(c, code, shift) for c in codes]


def test_every_scale_is_the_nearest_of_the_real_quotient() -> None:
    """sf over all bfloat16 amax: float32's amax / 6 is never on the wrong side of a tie. Checked without dividing."""
    amax = positive_bfloat16()
    x = torch.zeros(len(amax), 16, dtype=torch.bfloat16)
    x[:, 7] = -amax
    _, sf = nvfp4.encode_kv(x)
    values = fp8.decode(SCALES).double()
    ties = 6 * (values[1:] + values[:-1]) / 2  # exact
    wide = amax.double().unsqueeze(-1)
    above = (wide > ties) | ((wide == ties) & (torch.arange(126) % 2 == 1))  # a tie goes to the even code
    assert torch.equal(sf.view(torch.uint8).flatten(), above.sum(-1).to(torch.uint8))


def test_every_code_is_the_nearest_of_the_real_quotient() -> None:
    """Codes over all bfloat16 x all scales, 4 million pairs; ties exist and go to the even code."""
    x = positive_bfloat16()
    ties = 0
    for sf in fp8.decode(SCALES[1:]):
        code = e2m1.encode(x.float() / sf)
        edges = MIDPOINTS * sf.double()  # exact
        wide = x.double().unsqueeze(-1)
        ties += int((wide == edges).sum())
        assert torch.equal(code, ((wide > edges) | ((wide == edges) & TIE_GOES_UP)).sum(-1).to(torch.uint8))
    assert ties == 882


def test_a_rounded_reciprocal_decides_ties_differently() -> None:
    """Why `exact division` is part of the rule: multiplying by 1/sf changes some codes, all of them ties."""
    x = positive_bfloat16().float()
    changed = 0
    for sf in fp8.decode(SCALES[1:]):
        exact, product = e2m1.encode(x / sf), e2m1.encode(x * (1.0 / sf))
        at = (exact != product).nonzero().flatten()
        changed += len(at)
        quotients = (x[at] / sf).double()
        assert bool(torch.isin(quotients, MIDPOINTS).all())
    assert changed == 42


def test_underflowed_scale() -> None:
    """No floor: sf is 0, codes are at full scale as peers store them, and everything decodes to 0."""
    x = torch.tensor([2.0**-8, -(2.0**-9), 0.0] + [-0.0] * 13).bfloat16()
    packed, sf = nvfp4.encode_kv(x)  # amax / 6 is below 2^-10
    assert sf.view(torch.uint8).tolist() == [0]
    assert e2m1.unpack(packed).tolist() == [7, 15] + [0] * 14
    for read in (nvfp4.decode_kv(packed, sf), nvfp4.decode_kv_e4m3(packed, sf)):
        assert not bool(read.any())
    smallest = torch.zeros(16, dtype=torch.bfloat16)
    smallest[0] = 6 * 2.0**-10  # a tie between 0 and 2^-9, which belongs to 0
    assert nvfp4.encode_kv(smallest)[1].view(torch.uint8).tolist() == [0]
    smallest[0] = 6.0625 * 2.0**-10
    assert nvfp4.encode_kv(smallest)[1].view(torch.uint8).tolist() == [1]


@pytest.mark.parametrize("value", [0.0, -0.0, 2.0**-133, 1.0, 2688.0, 2.0**127])
def test_hard_blocks(value: float) -> None:  # BUG-53
    x = torch.zeros(2, 4, 128, dtype=torch.bfloat16)
    x[0, 1, 17] = value
    packed, sf = nvfp4.encode_kv(x)
    assert (packed.shape, sf.shape) == ((2, 4, 64), (2, 4, 8))
    back = nvfp4.decode_kv(packed, sf)
    assert bool(back.isfinite().all())
    assert int(packed[1].sum()) == 0
    assert float(back[0, 1, 17]) == (min(value, 2688.0) if value >= 1 else 0.0) or value == 1.0
    assert float(back[0, 1, 17]) == pytest.approx(min(value, 2688.0), rel=1 / 16, abs=1e-3)


def products() -> tuple[torch.Tensor, torch.Tensor]:
    """Every code under every scale: packed [127, 8], scale [127, 1]."""
    return e2m1.pack(BYTES[:16].expand(127, 16)), SCALES.unsqueeze(-1)


def test_products_are_exact_in_sixteen_bits() -> None:
    """E2M1 * E4M3 has at most six significant bits: float16 and bfloat16 hold every product."""
    packed, scale = products()
    exact = e2m1.decode(BYTES[:16]).double() * fp8.decode(SCALES).double().unsqueeze(-1)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert torch.equal(nvfp4.decode_kv(packed, scale, dtype).double(), exact)
        by_itself = e2m1.decode(BYTES[:16], dtype) * fp8.decode(SCALES, dtype).unsqueeze(-1)  # multiplied in that type
        assert torch.equal(by_itself.double(), exact)
    nonzero = exact[exact != 0].abs()
    assert (float(nonzero.min()), float(nonzero.max())) == (2.0**-10, 2688.0)
    significand = torch.frexp(nonzero)[0] * 64
    assert torch.equal(significand, significand.round())


def test_products_rounded_to_e4m3() -> None:
    packed, scale = products()
    read = nvfp4.decode_kv_e4m3(packed, scale)
    wanted = [[scalar.nvfp4_kv_e4m3(code, sf) for code in range(16)] for sf in range(127)]
    assert torch.equal(read, torch.tensor(wanted))
    exact = nvfp4.decode_kv(packed, scale)
    inside = (exact.abs() <= 448) & (exact.abs() >= 2.0**-6)
    assert float(((read - exact).abs() / exact.abs())[inside].max()) == pytest.approx(1 / 21)
    assert bool((read.abs()[exact.abs() > 448] == 448).all())
    assert torch.equal(nvfp4.decode_kv_e4m3(packed, scale, torch.bfloat16).float(), read)


def test_a_scale_shift_of_three_loses_small_blocks() -> None:
    """A peer's default: sf / 8 in E4M3. It drops scales up to 2^-7 and rounds those below 2^-3."""
    packed, scale = products()
    shifted = nvfp4.decode_kv_e4m3(packed, scale, scale_shift=3)
    value = fp8.decode(SCALES)
    dropped = (value > 0) & (value <= 2.0**-7)
    assert not bool(shifted[dropped].any())
    assert int(dropped.sum()) == 4
    assert bool(shifted[(value > 2.0**-7)].any(dim=-1).all())
    clean = value >= 2.0**-3
    rounded = fp8.decode(fp8.encode(value / 8)) * 8
    assert torch.equal(rounded[clean], value[clean])
    assert not torch.equal(rounded[~clean], value[~clean])


def test_refusals() -> None:
    with pytest.raises(
        OpRefused, match=r"nvfp4.encode_kv: values are not rounded to bfloat16; expected bfloat16 values"
    ):
        nvfp4.encode_kv(torch.full((16,), 1.001))
    with pytest.raises(OpRefused, match=r"shape \[24\]: the last dimension 24"):
        nvfp4.encode_kv(torch.zeros(24, dtype=torch.bfloat16))
    bad = torch.zeros(2, 32, dtype=torch.bfloat16)
    bad[1, 0] = math.inf
    with pytest.raises(OpRefused, match=r"block \[1, 0:16\] holds inf"):
        nvfp4.encode_kv(bad)
    packed, sf = nvfp4.encode_kv(bad, nonfinite="propagate")
    assert sf.view(torch.uint8).tolist() == [[0, 0], [0x7F, 0]]
    assert bool(nvfp4.decode_kv(packed, sf)[1, :16].isnan().all())
    assert bool(nvfp4.decode_kv_e4m3(packed, sf)[1, :16].isnan().all())


@settings(max_examples=150, deadline=None)
@given(block(8))
def test_int8_equals_the_scalar_rule(xs: list[float]) -> None:
    codes, scale = int8.encode(torch.tensor(xs))
    plain, s = scalar.int8_encode(xs)
    assert (codes.tolist(), float(scale)) == (plain, s)
    amax = max(abs(x) for x in xs)
    if 1e-30 < amax < 3e38:  # beyond, 127 * scale may round to infinity; below, the scale is subnormal
        assert max(abs(c) for c in plain) == 127
        error = (int8.decode(codes, scale).double() - torch.tensor(xs, dtype=torch.float64)).abs().max()
        assert float(error) <= amax / 254 * (1 + 1e-4)


def test_int8_shapes_and_refusals() -> None:
    x = torch.randn(2, 3, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    x[1, 2] = 0
    codes, scale = int8.encode(x)
    assert (codes.shape, codes.dtype, scale.shape, scale.dtype) == ((2, 3, 128), torch.int8, (2, 3), torch.float32)
    assert float(scale[1, 2]) == 0.0
    assert not bool(int8.decode(codes, scale)[1, 2].any())
    assert int(codes.min()) >= -127
    with pytest.raises(OpRefused, match=r"int8.encode: shape \[2, 0\]; expected vectors"):
        int8.encode(torch.zeros(2, 0))
    with pytest.raises(
        OpRefused, match=r"int8.decode: codes torch.int8 \[2, 3, 128\] with scales \[3\]; expected int8"
    ):
        int8.decode(codes, scale[0])
    x[0, 1, 5] = math.nan
    with pytest.raises(OpRefused, match=r"int8.encode: block \[0, 1, 0:128\] holds nan"):
        int8.encode(x)
    codes, scale = int8.encode(x, nonfinite="propagate")
    assert bool(int8.decode(codes, scale)[0, 1].isnan().all())
    assert not bool(int8.decode(codes, scale)[1].isnan().any())
