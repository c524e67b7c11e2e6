"""Where bytes lie: shapes, the 128x4 swizzle with its padding, the two orders of V scales."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.formats_helpers import same_bits

from m31.errors import OpRefused
from m31.formats import layout, nvfp4, scalar


def scales(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(1, 127, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 300), st.integers(1, 14), st.integers(0, 99))
def test_swizzle_round_trip(rows: int, columns: int, seed: int) -> None:  # BUG-58, BUG-61: sizes that no tile divides
    plain = scales(rows, columns, seed=seed)
    flat = layout.swizzle_128x4(plain)
    assert flat.shape == (-(-rows // 128) * -(-columns // 4) * 512,)
    assert torch.equal(layout.unswizzle_128x4(flat, rows, columns), plain)
    assert int((flat != 0).sum()) == rows * columns  # the padding is zero (BUG-59)


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (128, 4), (130, 7), (257, 12)])
def test_swizzle_places_every_byte_where_the_scalar_rule_says(rows: int, columns: int) -> None:
    plain = scales(rows, columns)
    flat = layout.swizzle_128x4(plain).tolist()
    for r in range(rows):
        for c in range(columns):
            assert flat[scalar.swizzled_offset(r, c, columns)] == int(plain[r, c])


@pytest.mark.parametrize("k", [32, 96, 224, 256, 288])
def test_padding_has_no_influence(k: int) -> None:  # BUG-58, BUG-59: producer and consumer agree on the padded stride
    x = torch.randn(5, k, generator=torch.Generator().manual_seed(k))
    packed, sf, g = nvfp4.encode(x)
    flat = layout.swizzle_128x4(sf)
    assert flat.dtype == sf.dtype
    used = layout.swizzle_128x4(torch.ones(5, k // 16, dtype=torch.uint8)).bool()
    poisoned = flat.view(torch.uint8).masked_fill(~used, 0x7F).view(sf.dtype)
    back = layout.unswizzle_128x4(poisoned, 5, k // 16)
    assert same_bits(nvfp4.decode(packed, back, g), nvfp4.decode(packed, sf, g))


def test_swizzle_of_several_matrices() -> None:
    plain = scales(3, 2, 130, 5)
    flat = layout.swizzle_128x4(plain)
    assert flat.shape == (3, 2, 2 * 2 * 512)
    assert torch.equal(flat[2, 1], layout.swizzle_128x4(plain[2, 1]))
    assert torch.equal(layout.unswizzle_128x4(flat, 130, 5), plain)


def test_swizzle_refuses() -> None:
    with pytest.raises(OpRefused, match=r"swizzle_128x4: torch.float32 \[4, 4\]; expected bytes \[..., R, C\]"):
        layout.swizzle_128x4(torch.zeros(4, 4))
    with pytest.raises(OpRefused, match=r"torch.uint8 \[4\]"):
        layout.swizzle_128x4(torch.zeros(4, dtype=torch.uint8))
    with pytest.raises(OpRefused, match=r"torch.uint8 \[512\] for scales \[130, 4\]; expected 1024 bytes"):
        layout.unswizzle_128x4(torch.zeros(512, dtype=torch.uint8), 130, 4)


def test_orders_of_v_scales() -> None:
    """The bytes differ; what they decode to does not."""
    v = torch.randn(2, 128, 128, generator=torch.Generator().manual_seed(1)).bfloat16()
    packed, sf = nvfp4.encode_kv(v)
    token, group = torch.arange(128).unsqueeze(-1), torch.arange(8)
    decoded = []
    for order in ("linear", "token_quad"):
        stored = layout.store_order(sf, order)
        assert stored.shape == (2, 1024)
        at = layout.scale_offset(token, group, order)
        assert sorted(at.flatten().tolist()) == list(range(1024))
        assert same_bits(stored[:, at], sf)
        back = layout.load_order(stored, order)
        assert same_bits(back, sf)
        decoded.append(nvfp4.decode_kv(packed, back))
    assert same_bits(*decoded)
    assert not same_bits(layout.linear(sf), layout.token_quad(sf))
    misread = layout.load_order(layout.token_quad(sf), "linear")
    assert not torch.equal(nvfp4.decode_kv(packed, misread), decoded[0])


def test_token_quad_offsets() -> None:
    for token in (0, 1, 3, 4, 127):
        for group in (0, 1, 7):
            wanted = scalar.token_quad_offset(token, group)
            assert int(layout.scale_offset(torch.tensor(token), torch.tensor(group), "token_quad")) == wanted
    assert scalar.token_quad_offset(5, 2) == 32 + 8 + 1


def test_orders_refuse() -> None:
    for call in (layout.store_order, layout.load_order):
        with pytest.raises(OpRefused, match="order: unknown scale order 'quad'; expected 'linear' or 'token_quad'"):
            call(scales(8, 8), "quad")
    with pytest.raises(OpRefused, match="unknown scale order 'quad'"):
        layout.scale_offset(torch.tensor(0), torch.tensor(0), "quad")
    with pytest.raises(OpRefused, match="token-quad scales: 6 tokens; expected a multiple of four tokens"):
        layout.token_quad(scales(6, 8))
    with pytest.raises(OpRefused, match="token-quad scales: 6 tokens"):
        layout.load_order(scales(48), "token_quad")
    for order in ("linear", "token_quad"):
        with pytest.raises(OpRefused, match=r"load_order: 44 bytes in groups of 8; expected a multiple of 8"):
            layout.load_order(scales(44), order)


@given(st.lists(st.integers(1, 5), max_size=3), st.integers(1, 40))
def test_packed_and_logical_shapes(lead: list[int], groups: int) -> None:  # BUG-46
    logical = (*lead, groups * 16)
    packed = layout.packed_shape(logical)
    assert layout.logical_shape(packed) == logical
    assert layout.scale_shape(logical, 16) == (*lead, groups)
    assert layout.scale_shape(logical, 16)[-1] * 16 == 2 * packed[-1]


def test_shapes_refuse() -> None:
    with pytest.raises(OpRefused, match=r"logical shape: \[3, 8\]; expected a last dimension that is"):
        layout.packed_shape((3, 8))
    with pytest.raises(OpRefused, match=r"packed shape: \[3, 4\]; expected .* multiple of 8"):
        layout.logical_shape((3, 4))
    with pytest.raises(OpRefused, match=r"logical shape: \[3, 0\]"):
        layout.scale_shape((3, 0), 32)
    with pytest.raises(OpRefused, match=r"logical shape: \[\]"):
        layout.scale_shape((), 32)
