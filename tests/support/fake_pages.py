"""A KV cache of one integer per slot, for tests that only ask which page holds what."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from m31.sdk.backend import ExportedPages, KVCache, KVLayout

POISON = -1


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
