"""A KV cache of one integer per slot, for tests that only ask which page holds what, and tables over it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from m31.engine.pages import PageTable
from m31.engine.pool import PagePool
from m31.engine.seals import PLAIN, Context
from m31.sdk.backend import ExportedPages, KVCache, KVLayout

POISON = -1
PAGE = 4  # tokens of a page
TEXT = [7, 65, 321, 200_063, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18]


class FakeLayout(KVLayout):
    """Has a name."""

    page_bytes = 0

    def __init__(self, layout_id: str) -> None:
        self.layout_id = layout_id

    def allocate(self, pages: int) -> KVCache:
        raise AssertionError("tests make the cache")


class FakeCache(KVCache):
    """`values` [pages, page_tokens]; what was never written is zero until somebody poisons it."""

    def __init__(self, pages: int, page_tokens: int, layout_id: str = "fake:v1") -> None:
        self.layout, self.pages = FakeLayout(layout_id), pages
        self.values = np.zeros((pages, page_tokens), np.int64)
        self.copies: list[tuple[int, int]] = []

    def poison(self, pages: Sequence[int]) -> None:
        self.values[list(pages)] = POISON

    def copy_pages(self, source: Sequence[int], target: Sequence[int]) -> None:
        self.copies += zip(source, target, strict=True)
        self.values[list(target)] = self.values[list(source)]

    def write(self, slots: Sequence[int], values: Sequence[int]) -> None:
        """What a step does."""
        self.values.reshape(-1)[list(slots)] = values

    def at(self, slots: Sequence[int]) -> list[int]:
        """The values in slots."""
        found: list[int] = self.values.reshape(-1)[list(slots)].tolist()
        return found

    def read(self, layer: int, page: int) -> dict[str, torch.Tensor]:
        raise AssertionError("not part of page life")

    def export(self, pages: Sequence[int]) -> ExportedPages:
        raise AssertionError("not part of page life")

    def import_(self, exported: ExportedPages, pages: Sequence[int]) -> None:
        raise AssertionError("not part of page life")


def make(pages: int = 8, *, prefix_cache: bool = True, layout_id: str = "fake:v1", **options: Any) -> PagePool:
    """A poisoned pool."""
    cache = FakeCache(pages, PAGE, layout_id)
    return PagePool(cache, page_tokens=PAGE, prefix_cache=prefix_cache, poison=True, **options)


def start(
    pool: PagePool, text: list[int], *, room: int = 0, context: Context = PLAIN, share: bool = True, run: bool = True
) -> PageTable:
    """A table for a text; with `run`, all of it computed."""
    table = PageTable.open(pool, context, text, capacity=len(text) + room, share=share)
    return add(pool, table, text[table.length :]) if run else table


def add(pool: PagePool, table: PageTable, tokens: list[int]) -> PageTable:
    """Compute tokens: the value of a slot is its token."""
    pool._cache.write(table.place(len(tokens)), tokens)  # type: ignore[attr-defined]
    table.append(tokens)
    return table


def contents(pool: PagePool, table: PageTable) -> list[int]:
    """What a sequence reads."""
    return pool._cache.at(table.slots(0, table.length))  # type: ignore[attr-defined,no-any-return]
