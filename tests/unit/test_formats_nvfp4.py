"""NVFP4 weights and activations: rounding order, scales, conventions, refusals (MODEL.md §3.2)."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.formats_helpers import block, same_bits

from m31.errors import OpRefused
from m31.formats import e2m1, fp8, nvfp4, scalar


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def plain(packed: torch.Tensor, scale: torch.Tensor) -> tuple[list[int], int]:
    """One block's codes and scale byte as Python integers."""
    return e2m1.unpack(packed).tolist(), int(scale.view(torch.uint8))


encode_scales = st.builds(lambda m, e: scalar.f32(m * 2.0**e), st.floats(1, 2, width=32), st.integers(-40, 40))


@settings(max_examples=200, deadline=None)
@given(block(16), st.none() | encode_scales)
def test_weights_equal_the_scalar_rule(xs: list[float], scale: float | None) -> None:
    x = torch.tensor(xs)
    packed, sf, g = nvfp4.encode(x, None if scale is None else torch.tensor(scale))
    wanted = scalar.nvfp4_global_scale(max(abs(v) for v in xs)) if scale is None else scale
    assert float(g) == wanted
    codes, code = scalar.nvfp4_encode(xs, wanted)
    assert plain(packed, sf) == (codes, code)
    assert 8 not in codes
    assert code <= 0x7E  # never negative, never NaN
    decoded = torch.tensor([scalar.nvfp4_decode(c, code, wanted) for c in codes])
    assert same_bits(nvfp4.decode(packed, sf, g), decoded)


@settings(max_examples=150, deadline=None)
@given(block(48))
def test_token_inputs_equal_the_scalar_rule(xs: list[float]) -> None:
    packed, sf, token = nvfp4.encode_per_token(torch.tensor(xs))
    t = scalar.nvfp4_token_scale(xs)
    assert float(token) == t
    for i in range(3):
        part = slice(i * 16, i * 16 + 16)
        assert plain(packed[i * 8 : i * 8 + 8], sf[i]) == scalar.nvfp4_encode_token_block(xs[part], t)
    assert bool((sf.view(torch.uint8) >= 1).all())  # the floor 2^-9
    back = nvfp4.quantise_per_token(torch.tensor(xs))
    assert torch.equal(back, nvfp4.decode_kv(packed, sf) * token)


@settings(max_examples=150, deadline=None)
@given(block(16), encode_scales)
def test_static_inputs_equal_the_scalar_rule(xs: list[float], g: float) -> None:
    packed, sf, s = nvfp4.encode_static(torch.tensor(xs), torch.tensor([g]))
    assert plain(packed, sf) == scalar.nvfp4_encode_static(xs, g)
    assert float(s) == scalar.f32(1 / g)
    assert int(sf.view(torch.uint8)) >= 1
    back = nvfp4.quantise_static(torch.tensor(xs), torch.tensor(g))
    assert torch.equal(back, nvfp4.decode_kv(packed, sf) * s)


def amax_sweep(g: float) -> torch.Tensor:
    """Float32 amax of every exponent, subnormals too, and beside every step of sf = E4M3(amax / 6 * g)."""
    values = torch.arange(0x7F, dtype=torch.uint8)
    steps = fp8.decode(values).double()
    middles = torch.cat([(steps[1:] + steps[:-1]) / 2, steps, torch.tensor([464.0], dtype=torch.float64)]) * 6 / g
    bits = middles.float().view(torch.int32)[:, None] + torch.arange(-2, 3, dtype=torch.int32)
    mantissas = torch.tensor([0, 1, 0x3FFFFF, 0x400000, 0x400001, 0x7FFFFE, 0x7FFFFF], dtype=torch.int32)
    exponents = (torch.arange(255, dtype=torch.int32)[:, None] << 23) | mantissas
    both = torch.cat([bits.flatten(), exponents.flatten()])
    return both[both > 0].view(torch.float32)


@pytest.mark.parametrize("g", [1.0, 2.0**-100, 448.0, scalar.f32(1.3e6), scalar.f32(1.7e-4), 2.0**60])
def test_scales_over_every_exponent_of_amax(g: float) -> None:
    """Weights (G) and FC2's input (1 / s), against the scalar rule and, for the scale, against real arithmetic."""
    amax = amax_sweep(g)
    x = torch.zeros(len(amax), 16)
    x[:, 3], x[:, 9] = amax, -amax / 3
    weights, static = nvfp4.encode(x, torch.tensor([g])), nvfp4.encode_static(x, torch.tensor([g]))
    for i, xs in enumerate(x.tolist()):
        assert plain(weights.packed[i], weights.scale[i]) == scalar.nvfp4_encode(xs, g)
        assert plain(static[0][i], static[1][i]) == scalar.nvfp4_encode_static(xs, g)
    # Two roundings to float32 lie between amax and the ratio: beside a step the real ratio may say the other code.
    ratio = amax.double() / 6 * g
    lower, upper = (fp8.encode((ratio * (1 + e)).float()).view(torch.uint8).int() for e in (-(2.0**-22), 2.0**-22))
    got = weights.scale.view(torch.uint8).flatten().int()
    assert bool(((got >= lower) & (got <= upper)).all())
    assert set(got.tolist()) == set(range(0x7F))


def test_the_cache_scale_over_every_bfloat16() -> None:
    """All 32,640 positive finite amax: sf is the E4M3 number nearest to amax / 6, stated in float64 (MODEL.md §3.4)."""
    amax = torch.arange(1, 0x7F80, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    x = torch.zeros(len(amax), 16, dtype=torch.bfloat16)
    x[:, 5] = -amax
    _, sf = nvfp4.encode_kv(x)
    table = fp8.decode(torch.arange(0x7F, dtype=torch.uint8)).double()
    exact = (amax.double() / 6).clamp(max=448.0)
    distance = (sf.double().flatten() - exact).abs()
    assert torch.equal(distance, (table[None] - exact[:, None]).abs().amin(1))
    assert int(sf.view(torch.uint8).max()) == 0x7E


def test_codes_are_computed_with_the_rounded_scale() -> None:  # BUG-47
    x = torch.zeros(1, 32)
    x[0, 0] = 6.0  # G = 448
    x[0, 16:18] = torch.tensor([5.9, 4.95])
    packed, sf, g = nvfp4.encode(x)
    unrounded = float(x[0, 16]) / 6 * 448
    assert unrounded < float(sf.float()[0, 1]) == 448.0
    # 4.95 is 5.03 under the unrounded scale and 4.95 under the stored one: on different sides of the tie at 5.
    assert e2m1.unpack(packed)[0, 16:18].tolist() == [7, 6]
    assert e2m1.encode(x[0, 16:18] * g / unrounded).tolist() == [7, 7]


def test_operations_are_in_the_order_that_is_written() -> None:
    """x * G / sf and x / (sf / G) round differently; MODEL.md writes the first."""
    x = randn(256, 1024, seed=3).bfloat16().float()
    packed, sf, g = nvfp4.encode(x)
    wide = fp8.decode(sf).unsqueeze(-1)
    groups = x.reshape(256, -1, 16)
    first = e2m1.encode(groups * g / wide).reshape(x.shape)
    second = e2m1.encode(groups / (wide / g)).reshape(x.shape)
    assert torch.equal(e2m1.unpack(packed), first)
    differing = int((first != second).sum())
    assert 0 < differing < x.numel() / 1000
    assert int((first.int() - second.int()).abs().max()) == 1  # neighbours: only ties are decided differently


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 6), st.integers(1, 9), st.integers(0, 2**32 - 1))
def test_error_of_weights_is_bounded(rows: int, groups: int, seed: int) -> None:
    x = randn(rows, groups * 16, seed=seed)
    packed, sf, g = nvfp4.encode(x)
    assert packed.shape == (rows, groups * 8)
    assert sf.shape == (rows, groups)
    assert g.shape == (1,)
    assert sf.shape[-1] * 16 == packed.shape[-1] * 2  # BUG-46
    amax = x.reshape(rows, groups, 16).abs().amax(-1, keepdim=True)
    error = (nvfp4.decode(packed, sf, g) - x).abs().reshape(rows, groups, 16)
    # Half a step of the coarsest pair (4, 6) is a sixth of 6; a scale rounded down clips by up to 1/17 more.
    normal = sf.float().unsqueeze(-1) >= 2.0**-6
    assert bool((error <= amax * (1 / 6 + 1 / 16) + 1e-30)[normal.expand_as(error)].all())
    assert float(nvfp4.decode(packed, sf, g).abs().max()) == pytest.approx(float(x.abs().max()), rel=1e-6)


def test_the_largest_block_uses_the_whole_range() -> None:
    x = randn(64, 256, seed=5)
    _, sf, _ = nvfp4.encode(x)
    assert int((sf.view(torch.uint8) == 0x7E).sum()) >= 1
    assert int(nvfp4.saturated_blocks(x, nvfp4.global_scale(x.abs().max()))) == 0


def test_saturated_blocks_are_counted() -> None:
    x = torch.zeros(2, 64)
    x[:, ::16] = torch.tensor([[1.0, 2.0, 4.0, 8.0], [0.5, 1.03, 1.04, 1.2]])
    g = nvfp4.global_scale(torch.tensor(1.0))
    assert int(nvfp4.saturated_blocks(x, g)) == 5  # 1.03 is within what rounding a scale costs anyway
    _, sf, _ = nvfp4.encode(x, g)
    assert float(sf.float().max()) == 448.0
    assert nvfp4.decode(*nvfp4.encode(x, g))[0, ::16].tolist() == pytest.approx([1.0, 1.0, 1.0, 1.0], rel=1e-6)


@pytest.mark.parametrize("value", [0.0, -0.0, 2.0**-149, 1e-30, 1.0, 3e38])
def test_hard_blocks(value: float) -> None:  # BUG-53
    x = torch.zeros(2, 32)
    x[0, 1] = -value
    packed, sf, g = nvfp4.encode(x)
    back = nvfp4.decode(packed, sf, g)
    assert bool(back.isfinite().all())
    assert 0 < float(g) < math.inf
    assert int(packed[1].sum()) == 0
    assert int(sf.view(torch.uint8)[1].sum()) == 0
    assert 8 not in e2m1.unpack(packed).tolist()[0]
    if value >= 1e-30:
        assert float(back[0, 1]) == pytest.approx(-value, rel=1e-6)
    for quantised in (nvfp4.quantise_per_token(x), nvfp4.quantise_static(x, torch.tensor(2688.0))):
        assert bool(quantised.isfinite().all())
        assert not bool(quantised[1].any())


def test_a_block_far_below_the_largest_vanishes() -> None:
    """Its scale underflows to 0; codes are 0 as well, not the quotient by zero."""
    x = torch.zeros(1, 32)
    x[0, 0], x[0, 16:] = 1.0, 2e-6
    packed, sf, g = nvfp4.encode(x)
    assert sf.view(torch.uint8).tolist() == [[0x7E, 0]]
    assert int(packed[0, 8:].sum()) == 0
    assert not bool(nvfp4.decode(packed, sf, g)[0, 16:].any())
    x[0, 16:] = 2.4e-6  # just above 6 * 2^-10 / 2688
    assert nvfp4.encode(x).scale.view(torch.uint8).tolist() == [[0x7E, 1]]


@pytest.mark.parametrize("amax", [0.0, 2.0**-149, 1e-37, 8e-36, 1.0, 3.4e38])
def test_global_scale(amax: float) -> None:
    g = nvfp4.global_scale(torch.tensor(amax))
    assert g.shape == (1,)
    assert float(g) == scalar.nvfp4_global_scale(scalar.f32(amax))
    assert 0 < float(g) < math.inf
    if amax > 1e-35:  # BUG-42: a sanity rule of the encode convention
        assert float(g) * amax == pytest.approx(448 * 6, rel=1e-6)


def test_no_amax_that_is_not_finite() -> None:
    for bad in (math.nan, math.inf, -1.0):
        with pytest.raises(OpRefused, match=r"nvfp4.global_scale: amax is .*; expected a finite number >= 0"):
            nvfp4.global_scale(torch.tensor(bad))


def test_both_conventions_of_the_global_scale() -> None:
    """Encode scale G (M3.1) and decode scale 1/G (ModelOpt): one tensor, one value (BUG-42, BUG-43, BUG-44)."""
    x = randn(64, 512, seed=7)
    packed, sf, g = nvfp4.encode(x)
    ours = nvfp4.decode(packed, sf, g)
    for stored in (1.0 / g, (1.0 / g).reshape(())):  # shapes [1] and []
        other = nvfp4.decode(packed, sf, nvfp4.from_decode_scale(stored))
        assert float(((other - ours).abs() / ours.abs()).nan_to_num(0.0).max()) <= 2.0**-22
    inverted = nvfp4.decode(packed, sf, 1.0 / g)  # the mistake: finite, and wrong by G^2
    assert float(inverted.abs().max() / x.abs().max()) == pytest.approx(float(g) ** 2, rel=1e-4)
    power = torch.tensor([2.0**9])
    assert torch.equal(nvfp4.from_decode_scale(1 / power), power)  # a power of two survives both ways


def test_a_reciprocal_does_not_always_come_back() -> None:  # BUG-44
    g = torch.linspace(1, 1000, 10001)
    changed = (1.0 / (1.0 / g)) != g
    assert 0.05 < float(changed.float().mean()) < 0.3
    assert float(((1.0 / (1.0 / g)) / g - 1).abs().max()) <= 2.0**-23


def test_shapes_of_several_matrices() -> None:
    x = randn(3, 2, 64, seed=9)
    packed, sf, g = nvfp4.encode(x)
    assert (packed.shape, sf.shape) == ((3, 2, 32), (3, 2, 4))
    one = nvfp4.encode(x[1], g)
    assert torch.equal(one.packed, packed[1])
    assert same_bits(one.scale, sf[1])
    assert nvfp4.decode(packed, sf, g, torch.bfloat16).dtype == torch.bfloat16
    assert nvfp4.encode(torch.zeros(0, 32)).packed.shape == (0, 16)
    assert nvfp4.quantise_per_token(torch.zeros(0, 32)).shape == (0, 32)


def test_tokens_do_not_see_each_other() -> None:
    x = randn(5, 64, seed=11)
    alone = torch.stack([nvfp4.quantise_per_token(row) for row in x])
    x[3] *= 1000
    assert torch.equal(nvfp4.quantise_per_token(x)[:3], alone[:3])


def test_static_scale_saturates_what_is_beyond_it() -> None:
    g = torch.tensor([2688.0])
    back = nvfp4.quantise_static(torch.full((1, 16), 5.0), g)
    assert float(back.max()) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("packed", "scale", "message"),
    [
        ((2, 12), (2, 1), r"packed shape: \[2, 12\]; expected a last dimension that is a positive multiple of 8"),
        ((2, 16), (2, 1), r"scales of shape \[2, 1\] for packed bytes of shape \[2, 16\], which is \[2, 32\] elements"),
        ((2, 16), (1, 2), r"expected \[2, 2\]: one scale per 16 elements"),
        ((), (1,), r"packed shape: \[\]"),
    ],
)
def test_shapes_that_do_not_belong_together(packed: tuple[int, ...], scale: tuple[int, ...], message: str) -> None:
    """BUG-46: a packed shape is not a logical one."""
    codes = torch.zeros(packed, dtype=torch.uint8)
    with pytest.raises(OpRefused, match=message):
        nvfp4.decode(codes, torch.zeros(scale, dtype=torch.float8_e4m3fn), torch.ones(1))


def test_refusals() -> None:
    with pytest.raises(
        OpRefused, match=r"experts.3.w1: shape \[2, 24\]: the last dimension 24 is not a positive multip"
    ):
        nvfp4.encode(torch.zeros(2, 24), where="experts.3.w1")
    bad = torch.zeros(2, 32)
    bad[1, 20] = math.nan
    with pytest.raises(OpRefused, match=r"w: block \[1, 16:32\] holds nan"):
        nvfp4.encode(bad, where="w")
    for scale, message in (
        (torch.tensor([0.0]), r"global scale is 0.0; expected a finite number > 0"),
        (torch.tensor([math.inf]), "global scale is inf"),
        (torch.tensor([math.nan]), "global scale is nan"),
        (torch.tensor([-1.0]), r"global scale is -1.0"),
        (torch.tensor([1e-40]), r"is 9\.999\d*e-41; expected a finite number > 0 whose reciprocal is finite"),
        (torch.ones(2), r"global scale is torch.float32 of shape \[2\]; expected one float32"),
        (torch.ones(1, dtype=torch.float64), r"global scale is torch.float64 of shape \[1\]"),
    ):
        with pytest.raises(OpRefused, match=message):
            nvfp4.encode(torch.zeros(2, 32), scale)
        with pytest.raises(OpRefused, match=message):
            nvfp4.encode_static(torch.zeros(2, 32), scale)
    with pytest.raises(OpRefused, match=r"decode scale: global scale is 1.4.*e-45"):
        nvfp4.from_decode_scale(torch.tensor(2.0**-149))
    with pytest.raises(OpRefused, match=r"codes are torch.int32, scales torch.float8_e4m3fn; expected torch.uint8"):
        nvfp4.decode(torch.zeros(2, 16, dtype=torch.int32), torch.zeros(2, 2, dtype=torch.float8_e4m3fn), torch.ones(1))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_activations_that_are_not_finite(bad: float) -> None:
    x = randn(3, 32, seed=13)
    x[1, 20] = bad
    g = torch.tensor([100.0])
    for quantise in (nvfp4.quantise_per_token, lambda x, **how: nvfp4.quantise_static(x, g, **how)):
        with pytest.raises(OpRefused, match=r"block \[1, 16:32\] holds"):
            quantise(x)
        back = quantise(x, nonfinite="propagate")
        assert bool(back[1, 16:].isnan().all())
        assert not bool(back[[0, 2]].isnan().any())
