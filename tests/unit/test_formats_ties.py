"""Every NVFP4 rule at and within two float32 steps of its ties, where the order of operations decides.

Random inputs hardly ever come that close: with them, `amax / 6 / s` passes for `amax / (6 * s)`. Here the largest
magnitude of a block puts its scale beside a tie of E4M3, and the other elements lie beside ties of E2M1 under it.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from m31.formats import e2m1, nvfp4, scalar

SCALE_TIES = [(scalar.e4m3_value(c) + scalar.e4m3_value(c + 1)) / 2 for c in range(126)]
CODE_TIES = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
SCALES = [2.0**9, 577.042236328125, 1.2345678, 3.3e4, 1 / 3]


def step(x: float, ulps: int) -> float:
    """The float32 that lies `ulps` steps beside x (x positive and normal)."""
    pattern = torch.tensor(scalar.f32(x)).view(torch.int32) + ulps
    return float(pattern.view(torch.float32))


def hard_blocks(unit: float, scale_of: Callable[[list[float]], int]) -> list[list[float]]:
    """Blocks of 16 whose decoded values are code * scale * unit; `scale_of` is the rule for the scale code."""
    chance = random.Random(repr(unit))
    blocks = []
    for tie in SCALE_TIES[1:]:
        for ulps in range(-2, 3):
            amax = step(6 * tie * unit, ulps)
            sf = scalar.e4m3_value(scale_of([amax] + [0.0] * 15))
            near = [step(mid * sf * unit, chance.randint(-2, 2)) for mid in CODE_TIES for _ in range(3) if sf]
            rest = [x * chance.choice((1, -1)) for x in near if x <= amax]
            blocks.append([amax, *chance.sample(rest + [0.0] * 15, 15)])
    return blocks


def compare(blocks: list[list[float]], packed: torch.Tensor, sf: torch.Tensor, rule: Callable[..., object]) -> None:
    codes, scales = e2m1.unpack(packed).tolist(), sf.view(torch.uint8).flatten().tolist()
    for block, got, scale in zip(blocks, codes, scales, strict=True):
        assert (got, scale) == rule(block)


@pytest.mark.parametrize("g", SCALES)
def test_weights(g: float) -> None:
    g = scalar.f32(g)
    blocks = hard_blocks(1 / g, lambda block: scalar.nvfp4_encode(block, g)[1])
    packed, sf, _ = nvfp4.encode(torch.tensor(blocks), torch.tensor(g))
    compare(blocks, packed, sf, lambda block: scalar.nvfp4_encode(block, g))


@pytest.mark.parametrize("g", SCALES)
def test_static_inputs(g: float) -> None:
    g = scalar.f32(g)
    blocks = hard_blocks(scalar.f32(1 / g), lambda block: scalar.nvfp4_encode_static(block, g)[1])
    packed, sf, _ = nvfp4.encode_static(torch.tensor(blocks), torch.tensor(g))
    compare(blocks, packed, sf, lambda block: scalar.nvfp4_encode_static(block, g))


@pytest.mark.parametrize("largest", [1.0, 2688.0, 7.7, 1e-3])
def test_token_inputs(largest: float) -> None:
    token = scalar.nvfp4_token_scale([scalar.f32(largest)])
    blocks = hard_blocks(token, lambda block: scalar.nvfp4_encode_token_block(block, token)[1])
    blocks = [block for block in blocks if block[0] <= largest]
    rows = torch.tensor([[scalar.f32(largest)] + [0.0] * 15 + block for block in blocks])
    packed, sf, scale = nvfp4.encode_per_token(rows)
    assert set(scale.flatten().tolist()) == {token}
    compare(blocks, packed[:, 8:], sf[:, 1:], lambda block: scalar.nvfp4_encode_token_block(block, token))


def test_the_cache() -> None:
    """All ties of E2M1 under every scale, with their bfloat16 neighbours, through the encoder itself."""
    blocks = []
    for code in range(1, 127):
        sf = scalar.e4m3_value(code)
        ties = torch.tensor([mid * sf for mid in CODE_TIES]).bfloat16()  # exact
        for ulps in (-1, 0, 1):
            near = (ties.view(torch.int16) + ulps).view(torch.bfloat16).float()
            blocks.append([6 * sf, *near.tolist(), *(-near).tolist(), 0.0])
    packed, sf = nvfp4.encode_kv(torch.tensor(blocks))
    assert sf.view(torch.uint8).flatten().tolist() == [code for code in range(1, 127) for _ in range(3)]
    compare(blocks, packed, sf, scalar.nvfp4_encode_kv)
