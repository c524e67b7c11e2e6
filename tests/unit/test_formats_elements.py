"""Elements and scales, code by code, against ml_dtypes (BUG-52), and the encoders against its casts."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
import torch
from tests.unit.formats_helpers import BYTES, all_bfloat16, all_float16, same_bits

from m31.errors import OpRefused
from m31.formats import e2m1, e8m0, fp8, scalar


def peer_values(dtype: object, codes: int = 256) -> torch.Tensor:
    return torch.from_numpy(np.arange(codes, dtype=np.uint8).view(dtype).astype(np.float32))


def test_all_256_codes_of_e4m3() -> None:
    ours, peer = fp8.decode(BYTES), peer_values(ml_dtypes.float8_e4m3fn)
    assert torch.equal(ours.nan_to_num(999), peer.nan_to_num(999))
    assert torch.equal(ours.signbit(), peer.signbit())
    assert ours.isnan().nonzero().flatten().tolist() == [0x7F, 0xFF]  # not ±480, not infinite
    table = torch.tensor([scalar.e4m3_value(code) for code in range(256)])
    assert torch.equal(ours.nan_to_num(999), table.nan_to_num(999))


def test_all_256_codes_of_e5m2() -> None:
    ours, peer = fp8.decode_e5m2(BYTES), peer_values(ml_dtypes.float8_e5m2)
    assert torch.equal(ours.nan_to_num(999, 1e9, -1e9), peer.nan_to_num(999, 1e9, -1e9))
    assert ours.isinf().nonzero().flatten().tolist() == [0x7C, 0xFC]
    assert int(ours.isnan().sum()) == 6
    table = torch.tensor([scalar.e5m2_value(code) for code in range(256)])
    assert torch.equal(ours.nan_to_num(999, 1e9, -1e9), table.nan_to_num(999, 1e9, -1e9))


def test_all_256_codes_of_e8m0() -> None:
    ours, peer = e8m0.decode(BYTES), peer_values(ml_dtypes.float8_e8m0fnu)
    assert torch.equal(ours.nan_to_num(0), peer.nan_to_num(0))
    assert ours.isnan().nonzero().flatten().tolist() == [255]
    assert float(ours[0]) == 2.0**-127  # a subnormal, not zero
    assert ours[:255].tolist() == [scalar.e8m0_value(code) for code in range(255)]
    assert math.isnan(scalar.e8m0_value(255))


def test_reciprocal_scales_are_exact() -> None:
    both = e8m0.decode(BYTES[:254]).double() * e8m0.reciprocal(BYTES[:254]).double()
    assert torch.equal(both, torch.ones_like(both))
    assert bool(e8m0.reciprocal(BYTES[255:]).isnan())
    assert float(e8m0.reciprocal(BYTES[254:255])) == 2.0**-127


def test_all_16_codes_of_e2m1() -> None:
    ours, peer = e2m1.decode(BYTES[:16]), peer_values(ml_dtypes.float4_e2m1fn, 16)
    assert same_bits(ours, peer)
    assert same_bits(ours, torch.tensor([scalar.e2m1_value(code) for code in range(16)]))
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        assert torch.equal(e2m1.decode(BYTES[:16], dtype).float(), ours)


def test_every_packed_byte_decodes_as_its_two_nibbles() -> None:
    assert same_bits(e2m1.decode_packed(BYTES), e2m1.decode(e2m1.unpack(BYTES)))
    assert torch.equal(e2m1.pack(e2m1.unpack(BYTES)), BYTES)


def test_the_even_column_is_the_low_nibble() -> None:  # BUG-55
    assert e2m1.pack(torch.tensor([1, 2, 3, 4], dtype=torch.uint8)).tolist() == [0x21, 0x43]
    assert e2m1.unpack(torch.tensor([0x21], dtype=torch.uint8)).tolist() == [1, 2]
    assert scalar.pack([1, 2, 3, 4]) == bytes([0x21, 0x43])
    swapped = torch.tensor([0x12], dtype=torch.uint8)
    assert e2m1.decode_packed(swapped).tolist() != e2m1.decode_packed(torch.tensor([0x21], dtype=torch.uint8)).tolist()


@pytest.mark.parametrize("source", [all_bfloat16(), all_float16()], ids=["bfloat16", "float16"])
def test_e4m3_encoder_over_all_16_bit_numbers(source: torch.Tensor) -> None:
    wide = source.float()
    with np.errstate(invalid="ignore"):
        peer = torch.from_numpy(wide.numpy().astype(ml_dtypes.float8_e4m3fn).view(np.uint8))
    peer = torch.where(wide.isnan(), torch.tensor(0x7F, dtype=torch.uint8), peer)  # we keep no sign of NaN
    plain = fp8.encode(source, saturate=False, keep_minus_zero=True).view(torch.uint8)
    assert torch.equal(torch.where(peer == 0xFF, torch.tensor(0x7F, dtype=torch.uint8), peer), plain)

    ours = fp8.encode(source).view(torch.uint8)
    beyond = wide.abs() > 464  # 464 itself is a tie, which belongs to 448
    assert bool((ours[beyond & (wide > 0)] == 0x7E).all())
    assert bool((ours[beyond & (wide < 0)] == 0xFE).all())
    assert bool((ours != 0x80).all())
    rest = ~beyond & (plain != 0x80)
    assert torch.equal(ours[rest], plain[rest])


@pytest.mark.parametrize("source", [all_bfloat16(), all_float16()], ids=["bfloat16", "float16"])
def test_e2m1_encoder_over_all_16_bit_numbers(source: torch.Tensor) -> None:
    wide = source[~source.isnan()].float()
    peer = torch.from_numpy(wide.numpy().astype(ml_dtypes.float4_e2m1fn).view(np.uint8))  # saturates, as we do
    ours = e2m1.encode(source[~source.isnan()])
    assert torch.equal(ours, torch.where(peer == 8, torch.zeros_like(peer), peer))
    assert 8 not in ours.unique().tolist()
    assert set(ours.unique().tolist()) == set(range(16)) - {8}


def neighbourhood(points: torch.Tensor) -> torch.Tensor:
    """Each float32 with its four nearest neighbours, and all of that negated."""
    pattern = points.view(torch.int32).unsqueeze(-1) + torch.arange(-2, 3, dtype=torch.int32)
    near = pattern.clamp(min=0).flatten().view(torch.float32)
    return torch.cat((near, -near))


def test_encoders_beside_every_threshold() -> None:
    """Float32 neighbours of every value and midpoint: vectorised, scalar and ml_dtypes agree."""
    for name, values, encode, plain, peer in (
        ("e2m1", e2m1.VALUES[:8], e2m1.encode, scalar.e2m1_encode, ml_dtypes.float4_e2m1fn),
        ("e4m3", [scalar.e4m3_value(c) for c in range(127)], fp8.encode, scalar.e4m3_encode, ml_dtypes.float8_e4m3fn),
    ):
        points = torch.tensor(values)
        x = neighbourhood(torch.cat((points, (points[1:] + points[:-1]) / 2, points[-1:] * 2**20)))
        ours = encode(x).view(torch.uint8)
        assert ours.tolist() == [plain(value) for value in x.tolist()], name
        inside = x.abs() <= points[-1]
        cast = torch.from_numpy(x.numpy().astype(peer).view(np.uint8))
        minus_zero = 8 if name == "e2m1" else 0x80
        assert torch.equal(ours[inside], torch.where(cast == minus_zero, 0, cast)[inside]), name


def test_float64_and_integers_are_refused() -> None:
    with pytest.raises(OpRefused, match=r"fp8.encode: cannot encode torch.float64; expected float32, bfloat16 or floa"):
        fp8.encode(torch.zeros(2, dtype=torch.float64))
    with pytest.raises(OpRefused, match=r"cannot encode torch.int32"):
        e2m1.encode(torch.zeros(2, dtype=torch.int32))


def test_float64_would_have_been_rounded_twice() -> None:
    """Why it is refused: 2.5 + 2^-40 belongs above the tie, and float32 does not see that."""
    exact = 2.5 + 2.0**-40
    assert scalar.e2m1_encode(exact) == 5
    assert int(e2m1.encode(torch.tensor(exact))) == 4


def test_special_numbers() -> None:
    special = torch.tensor([math.inf, -math.inf, 0.0, -0.0])
    assert e2m1.encode(special).tolist() == [7, 15, 0, 0]
    assert fp8.encode(special).view(torch.uint8).tolist() == [0x7E, 0xFE, 0, 0]
    assert fp8.encode(special, saturate=False, keep_minus_zero=True).view(torch.uint8).tolist() == [0x7F, 0x7F, 0, 0x80]
    negative_nan = torch.tensor([-0x400000], dtype=torch.int32).view(torch.float32)
    assert bool(negative_nan.isnan())
    assert fp8.encode(negative_nan).view(torch.uint8).tolist() == [0x7F]
    with pytest.raises(OpRefused, match=r"e2m1.encode: NaN has no E2M1 code; expected numbers"):
        e2m1.encode(torch.tensor([1.0, math.nan]))


def test_codes_of_the_wrong_kind_are_refused() -> None:
    with pytest.raises(
        OpRefused, match=r"fp8.decode: codes are torch.float8_e5m2; expected torch.float8_e4m3fn or its b"
    ):
        fp8.decode(torch.zeros(2, dtype=torch.float8_e5m2))
    with pytest.raises(OpRefused, match=r"codes are torch.float8_e4m3fn; expected torch.float8_e5m2"):
        fp8.decode_e5m2(torch.zeros(2, dtype=torch.float8_e4m3fn))
    with pytest.raises(OpRefused, match=r"scales are torch.int32; expected torch.uint8"):
        e8m0.decode(torch.zeros(2, dtype=torch.int32))
    with pytest.raises(OpRefused, match=r"e2m1.decode: code 16; expected 0..15; unpack packed bytes first"):
        e2m1.decode(torch.tensor([3, 16], dtype=torch.uint8))
    with pytest.raises(OpRefused, match=r"cannot pack shape \[3\]; expected an even last dimension"):
        e2m1.pack(torch.zeros(3, dtype=torch.uint8))
    with pytest.raises(OpRefused, match=r"amax is torch.bfloat16; expected torch.float32"):
        e8m0.encode_round_up(torch.ones(1, dtype=torch.bfloat16))
