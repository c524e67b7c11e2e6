"""Transforms between formats: what each costs, and when it costs nothing."""

from __future__ import annotations

import math

import pytest
import torch

from m31.errors import OpRefused
from m31.formats import e2m1, fp8, mxfp8, nvfp4, scalar
from m31.formats.transforms import (
    TRANSFORMS,
    Loss,
    measure,
    mxfp8_to_block_fp8,
    nvfp4_shared_scale,
    nvfp4_to_mxfp8,
)


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_every_transform_is_named() -> None:
    assert {
        "mxfp8-to-block-fp8": mxfp8_to_block_fp8,
        "nvfp4-to-mxfp8": nvfp4_to_mxfp8,
        "nvfp4-shared-scale": nvfp4_shared_scale,
    } == TRANSFORMS


def test_measure() -> None:
    before = torch.tensor([1.0, -2.0, 0.0, 4.0])
    assert measure(before, before.clone()) == Loss(0.0, 0.0, 0.0, True)
    after = torch.tensor([1.0, -2.5, 0.0, 0.0])
    loss = measure(before, after)
    assert (loss.max_abs, loss.max_rel, loss.exact) == (4.0, 1.0, False)
    assert loss.rms == pytest.approx(math.sqrt((0.25 + 16) / 21))
    assert measure(torch.zeros(2), torch.tensor([0.0, 1.0])) == Loss(1.0, math.inf, math.inf, False)
    assert measure(torch.zeros(0), torch.zeros(0)).exact
    assert not measure(torch.tensor([1.0]), torch.tensor([math.nan])).exact
    with pytest.raises(OpRefused, match=r"measure: \[2\] against \[3\]; expected one shape"):
        measure(torch.zeros(2), torch.zeros(3))


@pytest.mark.parametrize("shape", [(128, 256), (130, 160), (3, 32), (2, 129, 288)])
def test_mxfp8_to_block_fp8(shape: tuple[int, ...]) -> None:
    codes, scale = mxfp8.encode(randn(*shape))
    new, loss = mxfp8_to_block_fp8(codes, scale)
    n, k = shape[-2:]
    assert new.codes.shape == codes.shape
    assert new.scale.shape == (*shape[:-2], -(-n // 128), -(-k // 128))
    before = mxfp8.decode(codes, scale)
    assert loss == measure(before, new.decode())
    assert loss.rms < 0.05
    assert loss.exact == (n == 3)  # one amax of 1.75 * 2^k makes that scale a power of two
    # Half a step of E4M3 for what stays normal, half a smallest step of its block otherwise.
    step = new.scale.repeat_interleave(128, -2)[..., :n, :].repeat_interleave(128, -1)[..., :k]
    bound = torch.maximum(before.abs() / 16, step * 2.0**-10) * (1 + 1e-6)
    assert bool(((new.decode() - before).abs() <= bound).all())


def test_mxfp8_to_block_fp8_loses_small_groups() -> None:
    """A group 2^-20 below its neighbours is representable in MXFP8 and gone under a shared scale."""
    x = torch.ones(128, 128)
    x[:, 32:64] = 2.0**-20
    codes, scale = mxfp8.encode(x)
    assert torch.equal(mxfp8.decode(codes, scale), x)
    new, loss = mxfp8_to_block_fp8(codes, scale)
    assert loss.max_rel == 1.0
    assert not bool(new.decode()[:, 32:64].any())


def test_mxfp8_to_block_fp8_exactly() -> None:
    x = torch.zeros(130, 160)
    x[:128, :128] = 448 * 2.0**-3
    new, loss = mxfp8_to_block_fp8(*mxfp8.encode(x))
    assert loss.exact
    assert new.scale.tolist() == [[2.0**-3, 0.0], [0.0, 0.0]]  # an all-zero block has scale 0
    with pytest.raises(OpRefused, match=r"mxfp8_to_block_fp8: \[32\]; expected a matrix"):
        mxfp8_to_block_fp8(*mxfp8.encode(torch.zeros(32)))


def test_nvfp4_to_mxfp8_is_lossy() -> None:
    """MODEL.md §3.2: six significant bits into four, one exponent for two groups, any float32 in 1/G."""
    part = nvfp4.encode(randn(64, 512))
    new, loss = nvfp4_to_mxfp8(*part)
    assert (new.codes.shape, new.scale.shape) == ((64, 512), (64, 16))
    assert loss == measure(nvfp4.decode(*part), mxfp8.decode(*new))
    assert 0.02 < loss.rms < 0.04
    assert loss.max_rel <= 1 / 17 + 1e-6
    assert torch.equal(mxfp8.encode(nvfp4.decode(*part)).scale, new.scale)


def test_how_much_of_nvfp4_fits_mxfp8() -> None:
    """Even with G a power of two, 222 of 833 products of a code and a normal scale need more than four bits."""
    fits = 0
    for code in range(1, 8):
        for sf in range(0x08, 0x7F):  # normal scales
            product = scalar.e2m1_value(code) * scalar.e4m3_value(sf)
            significand = math.frexp(product)[0] * 16
            fits += significand == int(significand)
    # Codes .5, 1, 2, 4 are powers of two and keep the scale's four bits; 1.5, 3 and 6 triple it.
    total = 7 * (0x7F - 0x08)
    assert (fits, total) == (4 * 119 + 135, 833)


def test_nvfp4_to_mxfp8_exactly() -> None:
    x = torch.zeros(2, 64)
    x[:, ::2] = torch.tensor([4.0, -2.0, 0.5, 1.0]).repeat(8)
    part = nvfp4.encode(x, torch.tensor([1.0]))
    assert set(part.scale.float().unique().tolist()) == {0.6875}  # 4/6 rounded: codes 6, 3, ... under 11/16
    power = nvfp4.Nvfp4(part.packed, torch.ones_like(part.scale.float()).to(part.scale.dtype), torch.tensor([4.0]))
    assert nvfp4_to_mxfp8(*power)[1].exact
    with pytest.raises(OpRefused, match=r"nvfp4_to_mxfp8: shape \[2, 48\]: the last dimension 48 is not"):
        nvfp4_to_mxfp8(*nvfp4.encode(torch.zeros(2, 48)))


def test_one_global_scale_for_gate_and_up() -> None:
    gate, up = nvfp4.encode(randn(32, 64, seed=1)), nvfp4.encode(3 * randn(32, 64, seed=2))
    shared, loss = nvfp4_shared_scale([gate, up])
    assert torch.equal(shared.packed[0], gate.packed)
    assert torch.equal(shared.scale[1].view(torch.uint8), up.scale.view(torch.uint8))  # up has the smaller G
    assert shared.decode_scale.dtype == torch.bfloat16
    after = torch.cat([m.flatten() for m in shared.decode()])
    assert loss == measure(torch.cat([nvfp4.decode(*gate).flatten(), nvfp4.decode(*up).flatten()]), after)
    # One more rounding of the block scales (1/16 at most) and of 1/G (2^-8 at most).
    assert 0 < loss.max_rel <= 1 / 16 + 2.0**-8
    keeping_gates_alone = fp8.decode(up.scale) * float(up.global_scale / gate.global_scale)
    assert float(keeping_gates_alone.max()) < 448  # and wrong by 3, if the other is ignored


def test_one_global_scale_exactly() -> None:
    x = randn(16, 32, seed=3)
    g = torch.tensor([64.0])
    first, second = nvfp4.encode(x, g), nvfp4.encode(x / 2, g * 2)
    shared, loss = nvfp4_shared_scale([first, second])
    assert loss.exact  # equal up to a power of two, and 1/G is a bfloat16 number
    assert torch.equal(shared.decode()[1] * 2, shared.decode()[0])
    odd = nvfp4.encode(x)
    assert nvfp4_shared_scale([odd, odd], dtype=torch.float32)[1].max_rel <= 2.0**-22
    assert nvfp4_shared_scale([odd])[1].max_rel <= 2.0**-8
    with pytest.raises(OpRefused, match="nvfp4_shared_scale: no matrices; expected at least one"):
        nvfp4_shared_scale([])


def test_products_fit_the_types_that_kernels_multiply_in() -> None:
    """What makes a weight-only kernel lossless before the global scale: code * scale in float16 and bfloat16."""
    code, sf = e2m1.decode(torch.arange(16).to(torch.uint8)), fp8.decode(torch.arange(127).to(torch.uint8))
    exact = code.double() * sf.double().unsqueeze(-1)
    for dtype in (torch.float16, torch.bfloat16):
        assert torch.equal((code.to(dtype) * sf.to(dtype).unsqueeze(-1)).double(), exact)
