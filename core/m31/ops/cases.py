"""Shared ingredients of op cases. Seeds come from the case id, so every case can be made alone (BUG-116)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]
I64 = NDArray[np.int64]


_salt = ContextVar("salt", default="")


@contextmanager
def salted(salt: str) -> Iterator[None]:
    """Within it the cases have other values, which depend on `salt` as well; "" are the usual ones."""
    token = _salt.set(salt)
    try:
        yield
    finally:
        _salt.reset(token)


def seed_of(case_id: str) -> int:
    """The seed of a case: 64 bits of a hash of its id, and of the salt if there is one."""
    text = f"{case_id}#{_salt.get()}" if _salt.get() else case_id
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


def rng_for(case_id: str) -> np.random.Generator:
    """A generator that depends on the case id, the salt, and on nothing else."""
    return np.random.default_rng(seed_of(case_id))


@dataclass(frozen=True)
class Batch:
    """Metadata of a flattened step of S sequences. Context lengths include the step's queries."""

    positions: I64  # [T]
    cu_q: I64  # [S+1]
    seq_lens: I64  # [S]
    page_table: I64  # [S,P], -1 beyond the sequence's pages
    slot_map: I64  # [T]; page * page_tokens + offset
    num_pages: int

    def inputs(self, *names: str) -> dict[str, I64]:
        """The named arrays, as op inputs."""
        return {name: getattr(self, name) for name in names}


def batch(rng: np.random.Generator, q_lens: list[int], ctx_lens: list[int], page: int, spare: int = 3) -> Batch:
    """A step over sequences whose pages lie in random physical order among `spare` unused pages."""
    counts = [-(-n // page) for n in ctx_lens]
    total = sum(counts) + spare
    order = rng.permutation(total)
    table = np.full((len(ctx_lens), max(counts, default=0)), -1, np.int64)
    positions, slots, cursor = [], [], 0
    for s, (q, n, count) in enumerate(zip(q_lens, ctx_lens, counts, strict=True)):
        table[s, :count] = order[cursor : cursor + count]
        cursor += count
        pos = np.arange(n - q, n)
        positions.append(pos)
        slots.append(table[s, pos // page] * page + pos % page)
    cu = np.concatenate([[0], np.cumsum(q_lens)]).astype(np.int64)
    return Batch(
        np.concatenate(positions).astype(np.int64),
        cu,
        np.asarray(ctx_lens, np.int64),
        table,
        np.concatenate(slots).astype(np.int64),
        total,
    )


def pages(rng: np.random.Generator, b: Batch, page: int, *inner: int, scale: float = 1.0) -> F64:
    """KV pages `[pages, *inner[:-1], page, inner[-1]]`; unused tokens are NaN, so that reading one shows (BUG-5)."""
    *heads, width = inner
    out = rng.standard_normal((b.num_pages, *heads, page, width)) * scale
    used = np.zeros((b.num_pages, page), bool)
    for s, n in enumerate(b.seq_lens):
        for t in range(int(n)):
            used[b.page_table[s, t // page], t % page] = True
    mask = used.reshape(b.num_pages, *([1] * len(heads)), page, 1)
    return np.where(mask, out, np.nan)
