"""What the tests of the Triton kernels share: the reference's pages, steps, and rounding by another library."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import torch
from torch import Tensor

from m31.formats.layout import ScaleOrder
from m31.graph import StepClass
from m31_reference.cache import Store
from m31_reference.codecs import codec
from m31_triton.launch import Pages

CPU = torch.device("cpu")
FORMATS: list[tuple[str, ScaleOrder]] = [("bfloat16", "linear"), ("nvfp4", "linear"), ("nvfp4", "token_quad")]


def store(fmt: str, order: ScaleOrder, pages: int, heads: int, page: int, dim: int) -> Store:
    """Pages of the reference backend, every token poisoned."""
    made = Store(codec(fmt, order=order, read="exact"), pages, heads, page, dim, CPU)
    made.codec.poison(made.parts, list(range(pages)))
    return made


def pages_of(s: Store, order: ScaleOrder, dim: int) -> Pages:
    """The same memory, as the kernels take it."""
    scale = s.parts.get("scale")
    return Pages(data=s.parts["values" if scale is None else "packed"], scale=scale, order=order, dim=dim)


def bits(parts: Any) -> dict[str, Any]:
    """Stored parts as integers, to compare NaN and -0 too."""
    return {
        name: (part.view(torch.int16) if part.dtype == torch.bfloat16 else part).numpy().copy()
        for name, part in parts.items()
    }


def to_bfloat16(x: Any) -> Any:
    """float64 rounded once to bfloat16, by another library than the one under test; as float64."""
    return np.asarray(x, np.float64).astype(ml_dtypes.bfloat16).astype(np.float64)


@dataclass
class Step:
    """Buffers of a step at capacity; sequences beyond those given are padding."""

    step: StepClass
    positions: Tensor
    cu_q: Tensor
    slot_map: Tensor
    page_table: Tensor
    blocks: Tensor  # [T,kv_heads,K]

    @property
    def used(self) -> int:
        return int(self.cu_q[-1])


def make_step(
    seed: int,
    q_lens: list[int],
    ctx: list[int],
    *,
    page: int,
    kv_heads: int,
    topk: int,
    capacity: int,
    seqs: int,
    width: int,
    pages: int,
) -> Step:
    """Sequences over permuted physical pages; each query and KV head selects its own block and others at random."""
    rng = np.random.default_rng(seed)
    free = list(rng.permutation(pages))
    total = sum(q_lens)
    table = np.full((seqs, width), -1, np.int64)
    positions, slots = np.zeros(capacity, np.int64), np.full(capacity, -1, np.int64)
    blocks = np.full((capacity, kv_heads, topk), -1, np.int64)
    cu = np.full(seqs + 1, total, np.int64)
    cu[0] = 0
    row = 0
    for s, (n, length) in enumerate(zip(q_lens, ctx, strict=True)):
        count = -(-length // page)
        table[s, :count] = [free.pop() for _ in range(count)]
        for p in range(length - n, length):
            positions[row], slots[row] = p, table[s, p // page] * page + p % page
            for h in range(kv_heads):
                others = rng.permutation(p // page)[: topk - 1]
                chosen = np.sort(np.append(others, p // page))
                blocks[row, h, : len(chosen)] = chosen
            row += 1
        cu[s + 1] = row
    step = StepClass(kind="mixed", q_len=0, tokens=capacity, seqs=seqs, rows=capacity, pages=width)
    return Step(step, *map(torch.from_numpy, (positions, cu, slots, table, blocks)))
