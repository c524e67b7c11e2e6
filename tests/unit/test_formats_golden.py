"""The golden vectors of MODEL.md §3.1 and §3.4."""

from __future__ import annotations

import pytest
import torch

from m31.formats import e2m1, e8m0, mxfp8, nvfp4, scalar


@pytest.mark.parametrize(
    ("amax", "scale"),
    [(448.0, 127), (449.0, 128), (896.0, 128), (1.0, 119), (1.75, 119), (1.7501, 120), (0.0, 0)],
)
def test_mxfp8_scales(amax: float, scale: int) -> None:
    assert int(e8m0.encode_round_up(torch.tensor(amax))) == scale
    assert scalar.mxfp8_scale(scalar.f32(amax)) == scale


def test_mxfp8_block() -> None:
    block = [((37 * i % 41) - 20) / 8 for i in range(32)]
    codes, scale = mxfp8.encode(torch.tensor(block))
    first = bytes.fromhex("FA 78 75 71 6A 58 E4 EE")
    assert scale.tolist() == [120]
    assert bytes(codes.view(torch.uint8)[:8].tolist()) == first
    assert mxfp8.decode(codes, scale)[:8].tolist() == [-2.5, 2.0, 1.625, 1.125, 0.625, 0.125, -0.375, -0.875]
    plain, s = scalar.mxfp8_encode(block)
    assert (s, bytes(plain[:8])) == (120, first)
    assert plain == codes.view(torch.uint8).tolist()


KV_INPUT = [((29 * i % 31) - 15) / 10 for i in range(16)]
KV_DECODED = [-1.5, 1.5, 1, 1, 0.75, 0.5, 0.375, 0.25, 0, -0.25, -0.375, -0.5, -0.75, -1, -1, -1.5]


def test_kv_group() -> None:
    x = torch.tensor(KV_INPUT).bfloat16()
    payload = bytes.fromhex("7F 66 45 23 A0 CB ED FE")
    packed, scale = nvfp4.encode_kv(x)
    assert scale.view(torch.uint8).tolist() == [0x28]
    assert bytes(packed.tolist()) == payload
    assert nvfp4.decode_kv(packed, scale).tolist() == KV_DECODED
    codes, sf = scalar.nvfp4_encode_kv(x.tolist())
    assert (scalar.pack(codes), sf) == (payload, 0x28)
    assert e2m1.unpack(packed).tolist() == codes
