"""Inputs for the tests of number formats: every bfloat16, every code, blocks that hit ties and extremes."""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from torch import Tensor

BYTES = torch.arange(256, dtype=torch.int32).to(torch.uint8)


def all_bfloat16() -> Tensor:
    """All 65,536 bfloat16 numbers, NaN and infinity included."""
    return torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


def all_float16() -> Tensor:
    """All 65,536 float16 numbers."""
    return torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.float16)


def positive_bfloat16() -> Tensor:
    """Every finite bfloat16 above zero."""
    return torch.arange(1, 0x7F80, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


def bits(x: Tensor) -> Tensor:
    """Bit patterns, so that -0 and NaN compare as what they are."""
    return x.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(bits(a), bits(b))


def numbers() -> st.SearchStrategy[float]:
    """float32 numbers: any at all, few-bit ones (which meet ties between codes), zeros of both signs."""
    few_bits = st.builds(lambda m, e: float(m) * 2.0**e, st.integers(-255, 255), st.integers(-20, 8))
    anything = st.floats(width=32, allow_nan=False, allow_infinity=False)
    return st.one_of(few_bits, few_bits, anything, st.sampled_from([0.0, -0.0, 2.0**-149, -(2.0**-126), 448.0, -6.0]))


def block(size: int) -> st.SearchStrategy[list[float]]:
    return st.lists(numbers(), min_size=size, max_size=size)


def bfloat16_block(size: int) -> st.SearchStrategy[list[float]]:
    return block(size).map(lambda xs: torch.tensor(xs).clamp(-3e38, 3e38).bfloat16().tolist())
