"""Agreement with compressed-tensors and torchao where they cover the same format, and each difference pinned.

docs/formats.md explains the differences; the numbers there are the ones asserted here.
"""

from __future__ import annotations

import pytest
import torch
from compressed_tensors.compressors.mxfp8.base import MXFP8QuantizationCompressor
from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme
from compressed_tensors.quantization.utils.helpers import calculate_qparams, generate_gparam
from compressed_tensors.quantization.utils.mxfp_utils import generate_mx_scales
from tests.unit.formats_helpers import positive_bfloat16
from torchao.prototype.mx_formats.mx_tensor import ScaleCalculationMode, to_mx
from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize, per_tensor_amax_to_scale
from torchao.prototype.mx_formats.utils import from_blocked, to_blocked

from m31.formats import e2m1, e8m0, fp8, layout, mxfp8, nvfp4

NVFP4 = preset_name_to_scheme("NVFP4", ["Linear"])


def weights(rows: int = 512, columns: int = 1024, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def raw(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.uint8)


def compressed(x: torch.Tensor) -> dict[str, torch.Tensor]:
    """x as compressed-tensors stores it, its own calibration included."""
    blocks = x.reshape(x.shape[0], -1, 16)
    overall = generate_gparam(x.min(), x.max())
    scale, _ = calculate_qparams(blocks.amin(-1), blocks.amax(-1), NVFP4.weights, global_scale=overall)
    state = {"weight": x, "weight_scale": scale, "weight_global_scale": overall}
    return NVFP4PackedCompressor.compress(state, NVFP4)


def test_compressed_tensors_writes_the_same_names_shapes_and_scales() -> None:
    x = weights()
    theirs, ours = compressed(x), nvfp4.encode(x)
    assert set(theirs) == {"weight_packed", "weight_scale", "weight_global_scale"}
    assert theirs["weight_packed"].shape == ours.packed.shape
    assert torch.equal(theirs["weight_global_scale"], ours.global_scale)  # the encode convention
    assert torch.equal(raw(theirs["weight_scale"]), raw(ours.scale))


def test_compressed_tensors_codes_differ_in_minus_zero_and_ties_only() -> None:
    x = weights(512, 2048).bfloat16().float()
    theirs, ours = e2m1.unpack(compressed(x)["weight_packed"]), e2m1.unpack(nvfp4.encode(x).packed)
    minus_zero = (theirs == 8) & (ours == 0)
    assert int(minus_zero.sum()) > 10_000  # it keeps the sign of what rounds to zero
    rest = (theirs != ours) & ~minus_zero
    # It divides by sf / G where MODEL.md multiplies by G and divides by sf.
    assert 0 < int(rest.sum()) < x.numel() / 1000
    assert int((theirs.int() - ours.int())[rest].abs().max()) == 1


def test_compressed_tensors_reads_what_we_write() -> None:
    packed, scale, overall = nvfp4.encode(weights())
    state = {"weight_packed": packed, "weight_scale": scale, "weight_global_scale": overall}
    theirs = NVFP4PackedCompressor.decompress(state, NVFP4)["weight"]
    assert theirs.dtype == torch.bfloat16
    ours = nvfp4.decode(packed, scale, overall)
    # Its decompressor computes sf / G and the product in an order of its own: at most one place of bfloat16.
    assert float(((theirs.float() - ours).abs() / ours.abs()).nan_to_num(0.0).max()) <= 2.0**-7
    assert float((theirs != ours.bfloat16()).float().mean()) < 0.01


def test_compressed_tensors_gives_a_zero_block_another_scale() -> None:
    x = torch.zeros(1, 32)
    x[0, 16] = 1.0
    theirs, ours = compressed(x), nvfp4.encode(x)
    assert theirs["weight_scale"].float().tolist() == [[0.125, 448.0]]  # it replaces a scale of 0
    assert ours.scale.float().tolist() == [[0.0, 448.0]]
    assert (
        float(compressed(torch.zeros(1, 16))["weight_global_scale"]) == 1.0 == float(nvfp4.encode(x * 0).global_scale)
    )


def test_compressed_tensors_mxfp8_rounds_the_scale_otherwise() -> None:
    """Its scale is one more exactly where amax is 1.75 * 2^k, and it has none for a zero block."""
    amax = positive_bfloat16().float()
    amax = amax[(amax >= 2.0**-110) & (amax < 2.0**120)]
    theirs, ours = generate_mx_scales(amax, 8).int(), e8m0.encode_round_up(amax).int()
    at_threshold = torch.frexp(amax)[0] == 0.875
    assert torch.equal(theirs - ours, at_threshold.int())
    assert bool(generate_mx_scales(torch.zeros(1), 8).isinf())


def test_compressed_tensors_reads_our_mxfp8() -> None:
    scheme = preset_name_to_scheme("MXFP8", ["Linear"])
    codes, scale = mxfp8.encode(weights())
    state = {"weight": codes, "weight_scale": scale}
    theirs = MXFP8QuantizationCompressor.decompress(state, scheme)["weight"]
    assert torch.equal(theirs.float(), mxfp8.decode(codes, scale))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_torchao_round_up_is_the_same_rule(dtype: torch.dtype) -> None:
    x = weights().to(dtype)
    scale, codes = to_mx(x, torch.float8_e4m3fn, 32, ScaleCalculationMode.RCEIL)
    ours = mxfp8.encode(x)
    assert torch.equal(raw(scale), ours.scale)
    theirs = raw(codes)
    assert torch.equal(torch.where(theirs == 0x80, 0, theirs), raw(ours.codes))


def test_torchao_has_other_modes_that_are_not_this_format() -> None:
    x = weights()
    ours = mxfp8.encode(x).scale.int()
    for mode, higher in (("FLOOR", False), ("EVEN", False), ("CEIL", True)):
        scale, _ = to_mx(x, torch.float8_e4m3fn, 32, ScaleCalculationMode[mode])
        differs = raw(scale).int() - ours
        assert differs.unique().tolist() == ([0, 1] if higher else [-1, 0]), mode


def test_torchao_round_up_misses_thresholds_of_float32() -> None:
    """Its logarithm is a float32 one (BUG-50): just above 1.75 * 2^k its scale is one too small, and the code clips."""
    exponents = torch.arange(8, 255, dtype=torch.int32) << 23
    x = torch.zeros(len(exponents), 32)
    x[:, 0] = (exponents | 0x600001).view(torch.float32)
    scale, _ = to_mx(x, torch.float8_e4m3fn, 32, ScaleCalculationMode.RCEIL)
    differs = raw(scale)[:, 0].int() - mxfp8.encode(x).scale[:, 0].int()
    assert set(differs.tolist()) == {-1, 0}
    assert int((differs == -1).sum()) == 239
    x[:, 0] = (exponents | 0x610000).view(torch.float32)  # the next bfloat16: both agree
    scale, _ = to_mx(x, torch.float8_e4m3fn, 32, ScaleCalculationMode.RCEIL)
    assert torch.equal(raw(scale), mxfp8.encode(x).scale)


def test_torchao_drops_the_smallest_blocks() -> None:
    """At scale 0 it multiplies by 1 instead of 2^127: a block below 2^-118 is all zeros."""
    x = torch.full((1, 32), 2.0**-120)
    _, codes = to_mx(x, torch.float8_e4m3fn, 32, ScaleCalculationMode.RCEIL)
    assert not bool(codes.float().any())
    assert torch.equal(mxfp8.quantise(x), x)


def test_torchao_nvfp4_in_two_levels() -> None:
    x = weights()
    per_tensor = per_tensor_amax_to_scale(x.abs().max())  # the decode convention
    scale, packed = nvfp4_quantize(x, 16, per_tensor)
    ours = nvfp4.encode(x)
    assert float(per_tensor) == pytest.approx(1 / float(ours.global_scale), rel=1e-6)
    assert torch.equal(raw(scale), raw(ours.scale))
    theirs, codes = e2m1.unpack(packed), e2m1.unpack(ours.packed)
    differs = torch.where(theirs == 8, 0, theirs) != codes
    assert int(differs.sum()) < x.numel() / 1000  # it multiplies by a reciprocal: ties


def test_torchao_nvfp4_in_one_level_is_the_cache_rule_but_for_ties_and_a_floor() -> None:
    x = weights().bfloat16()
    scale, packed = nvfp4_quantize(x, 16)
    ours, sf = nvfp4.encode_kv(x)
    assert torch.equal(raw(scale), raw(sf))
    theirs, codes = e2m1.unpack(packed), e2m1.unpack(ours)
    differs = torch.where(theirs == 8, 0, theirs) != codes
    assert 0 < int(differs.sum()) < x.numel() / 1000
    quotient = x.float().reshape(512, -1, 16) / fp8.decode(sf).unsqueeze(-1)
    assert bool(
        torch.isin(
            quotient.reshape(x.shape)[differs].abs(), torch.tensor([0.25, 0.75, 1.75, 2.5, 5.0, 3.5, 1.25])
        ).all()
    )
    small = torch.full((1, 16), 2.0**-7)
    assert nvfp4_quantize(small, 16)[0].float().tolist() == [[2.0**-6]]  # its floor; MODEL.md's is 2^-9, and none here
    assert nvfp4.encode_kv(small.bfloat16())[1].float().tolist() == [[2.0**-9]]


@pytest.mark.parametrize(("rows", "columns"), [(128, 4), (130, 7), (1, 1), (256, 24)])
def test_torchao_swizzles_as_we_do(rows: int, columns: int) -> None:
    scale = torch.randint(0, 256, (rows, columns), dtype=torch.uint8, generator=torch.Generator().manual_seed(rows))
    blocked = to_blocked(scale).flatten()
    assert torch.equal(layout.swizzle_128x4(scale), blocked)
    padded = layout.unswizzle_128x4(blocked, -(-rows // 128) * 128, -(-columns // 4) * 4)
    assert torch.equal(from_blocked(blocked, *padded.shape), padded)
