"""Step classes and step batches (DESIGN.md §5): one forward step serves any mixture of prefill, decode and verify."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from m31.errors import GraphError
from m31.graph.trace import STEP_INPUTS


@dataclass(frozen=True, kw_only=True)
class StepClass:
    """The capacity for which a plan is compiled: every count is an upper bound that padding fills.

    Args:
        kind: `decode` one query per sequence, `verify` q_len per sequence, `mixed` anything.
        q_len: queries per sequence; 0 for mixed.
        tokens, seqs, rows: capacities T, S, R.
        pages: page-table width P; max context is pages * page_tokens.
    """

    kind: Literal["decode", "verify", "mixed"]
    q_len: int
    tokens: int
    seqs: int
    rows: int
    pages: int

    def size(self, dim: int | str) -> int:
        """The number behind a symbolic dimension."""
        if isinstance(dim, int):
            return dim
        sizes = {"T": self.tokens, "S": self.seqs, "S+1": self.seqs + 1, "R": self.rows, "P": self.pages}
        return sizes[dim]

    def shape(self, dims: Sequence[int | str]) -> tuple[int, ...]:
        """A symbolic shape at capacity."""
        return tuple(self.size(d) for d in dims)


@dataclass(frozen=True)
class StepSize:
    """How much of the capacity this step uses."""

    tokens: int
    seqs: int
    rows: int
    pages: int

    def within(self, dim: int | str, capacity: int) -> int:
        """The used part of a symbolic dimension."""
        used = {"T": self.tokens, "S": self.seqs, "S+1": self.seqs + 1, "R": self.rows, "P": self.pages}
        return used[dim] if isinstance(dim, str) else capacity


@dataclass(eq=False)
class StepBatch:
    """The buffers of a step, allocated once per step class and refilled in place; all int64.

    Padding beyond `size`: slot -1, token 0, position 0, empty sequences, page -1, row 0. A kernel never reads it.
    """

    tokens: torch.Tensor  # [T]
    positions: torch.Tensor  # [T]
    cu_q: torch.Tensor  # [S+1]
    seq_lens: torch.Tensor  # [S]; context including this step's tokens
    slot_map: torch.Tensor  # [T]
    page_table: torch.Tensor  # [S,P]
    out_rows: torch.Tensor  # [R]
    size: StepSize

    @classmethod
    def allocate(cls, step: StepClass, device: torch.device) -> StepBatch:
        """Buffers at capacity, all padding."""
        buffers = {
            name: torch.zeros(step.shape(t.shape), dtype=torch.int64, device=device) for name, t in STEP_INPUTS.items()
        }
        batch = cls(**buffers, size=StepSize(0, 0, 0, 0))
        batch.slot_map.fill_(-1)
        batch.page_table.fill_(-1)
        return batch

    def fill(
        self,
        *,
        tokens: Sequence[int],
        positions: Sequence[int],
        q_lens: Sequence[int],
        seq_lens: Sequence[int],
        slot_map: Sequence[int],
        page_table: Sequence[Sequence[int]],
        out_rows: Sequence[int],
    ) -> None:
        """Write one step into the buffers; the rest becomes padding. Addresses do not change."""
        size = StepSize(len(tokens), len(q_lens), len(out_rows), max(map(len, page_table), default=0))
        if sum(q_lens) != size.tokens or not len(positions) == len(slot_map) == size.tokens:
            raise GraphError(f"{size.tokens} tokens, {sum(q_lens)} queries, {len(slot_map)} slots in one step")
        cu = [0]
        for n in q_lens:
            cu.append(cu[-1] + n)
        _put(self.tokens, tokens, 0)
        _put(self.positions, positions, 0)
        _put(self.cu_q, cu, cu[-1])
        _put(self.seq_lens, seq_lens, 0)
        _put(self.slot_map, slot_map, -1)
        _put(self.out_rows, out_rows, 0)
        if size.seqs > self.page_table.shape[0] or size.pages > self.page_table.shape[1]:
            raise GraphError(f"page table {size.seqs}x{size.pages} exceeds {tuple(self.page_table.shape)}")
        self.page_table.fill_(-1)
        for row, pages in enumerate(page_table):
            self.page_table[row, : len(pages)] = torch.tensor(pages, dtype=torch.int64)
        self.size = size

    def narrowed(self) -> dict[str, torch.Tensor]:
        """Views of the used part of each buffer by graph input name: what kernels see that do not skip padding."""
        views = {}
        for name, buffer in self.named().items():
            for axis, dim in enumerate(STEP_INPUTS[name].shape):
                buffer = buffer.narrow(axis, 0, self.size.within(dim, buffer.shape[axis]))
            views[name] = buffer
        return views

    def named(self) -> dict[str, torch.Tensor]:
        """The buffers by graph input name."""
        return {name: getattr(self, name) for name in STEP_INPUTS}


def _put(buffer: torch.Tensor, values: Sequence[int], padding: int) -> None:
    n = len(values)
    if n > len(buffer):
        raise GraphError(f"{n} entries exceed the step's capacity of {len(buffer)}")
    buffer[:n] = torch.as_tensor(values, dtype=torch.int64)
    buffer[n:] = padding
