"""KV pages as one structured numpy array: a record is a page, and holds K, V and index keys of all layers.

Inside a record the order is layer, token, head, channel. So a page is one stretch of memory, and copying, exporting and
importing pages is indexing. m31 never looks inside: it knows pages by number, and bytes by their layout id.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from m31.errors import BackendRefused, LayoutMismatch
from m31.sdk import ExportedPages, KVCache, KVLayout, KVSpec
from m31_numpy.codes import Array, from_bf16, to_bf16

MAKER, VERSION = "m31-numpy", 1  # name and version of this order of bytes
STORAGE = {"float32": np.float32, "bfloat16": np.uint16}  # bfloat16 as bits
_NAN = {np.float32: np.nan, np.uint16: 0x7FC0}


class PageLayout(KVLayout):
    """Pages of float32 or bfloat16."""

    def __init__(self, spec: KVSpec) -> None:
        for name in (spec.kv_format, spec.index_format):
            if name not in STORAGE:
                raise BackendRefused(
                    f"pages of {name} are not served", where="backend numpy", expected=" or ".join(STORAGE)
                )
        self.spec = spec
        self.main, self.index = STORAGE[spec.kv_format], STORAGE[spec.index_format]
        vectors = (len(spec.indexed), spec.page_tokens, spec.kv_heads, spec.head_dim)
        self.record = np.dtype(
            [
                ("k", self.main, vectors),
                ("v", self.main, vectors),
                ("index", self.index, (sum(spec.indexed), spec.page_tokens, spec.index_dim)),
            ]
        )
        self.layout_id = spec.name(MAKER, VERSION)
        self.page_bytes = self.record.itemsize

    def allocate(self, pages: int) -> Pages:
        """See `KVLayout.allocate`."""
        return Pages(self, pages)


class Pages(KVCache):
    """A cache; kernels call `write` and `take`, the core calls the rest."""

    layout: PageLayout

    def __init__(self, layout: PageLayout, pages: int) -> None:
        self.layout, self.pages = layout, pages
        self.page_tokens = layout.spec.page_tokens
        self._records = np.empty(pages, layout.record)
        # Layers without an index key take no room: the place of a layer's keys among those that have one.
        self._rank = np.cumsum(layout.spec.indexed) - 1

    def _part(self, part: str, layer: int) -> tuple[Array, int]:
        """All pages of one part [pages, layers, tokens, ...], and the layer's place in it."""
        return self._records[part], int(self._rank[layer]) if part == "index" else layer

    def write(self, layer: int, part: str, slots: Array, values: Array) -> None:
        """Store vector i at slot i, which is page * page_tokens + offset; a negative slot is padding."""
        stored, at = self._part(part, layer)
        page, offset = np.divmod(slots[slots >= 0], self.page_tokens)
        values = values[slots >= 0]
        stored[page, at, offset] = to_bf16(values) if stored.dtype == np.uint16 else values

    def take(self, layer: int, part: str, pages: Array, heads: Array | None = None) -> Array:
        """Pages in float32: `[*pages.shape, page_tokens, ...]`; with `heads`, one head each, broadcast with `pages`."""
        stored, at = self._part(part, layer)
        taken = stored[pages, at] if heads is None else stored[pages, at, :, heads]
        return from_bf16(taken) if taken.dtype == np.uint16 else taken

    def poison(self, pages: Sequence[int]) -> None:
        """See `KVCache.poison`."""
        for part in ("k", "v", "index"):
            stored = self._records[part]
            stored[list(pages)] = _NAN[stored.dtype.type]

    def read(self, layer: int, page: int) -> dict[str, torch.Tensor]:
        """See `KVCache.read`."""
        parts = ["k", "v", *(["index"] if self.layout.spec.indexed[layer] else [])]
        out = {}
        for part in parts:
            stored, at = self._part(part, layer)
            values = stored[page, at] if part == "index" else stored[page, at].swapaxes(0, 1)  # heads first
            tensor = torch.from_numpy(values.copy())
            out[part] = tensor.view(torch.bfloat16) if stored.dtype == np.uint16 else tensor
        return out

    def copy_pages(self, source: Sequence[int], target: Sequence[int]) -> None:
        """See `KVCache.copy_pages`."""
        self._records[list(target)] = self._records[list(source)]

    def export(self, pages: Sequence[int]) -> ExportedPages:
        """See `KVCache.export`: one component, the records as bytes."""
        raw = self._records[_index(pages)].view(np.uint8).reshape(len(pages), self.layout.page_bytes)
        return ExportedPages(self.layout.layout_id, len(pages), {"records": torch.from_numpy(raw)})

    def import_(self, exported: ExportedPages, pages: Sequence[int]) -> None:
        """See `KVCache.import_`."""
        if exported.layout_id != self.layout.layout_id:
            raise LayoutMismatch(
                f"pages have the layout '{exported.layout_id}'",
                where="KV import",
                expected=f"'{self.layout.layout_id}'",
                fix="export from a cache of the same backend, formats and geometry",
            )
        given = {name: (tuple(t.shape), str(t.dtype)) for name, t in exported.tensors.items()}
        wanted = {"records": ((len(pages), self.layout.page_bytes), "torch.uint8")}
        if given != wanted or exported.count != len(pages) or len(set(pages)) != len(pages):
            raise LayoutMismatch(
                f"{exported.count} pages with the components {given} for {len(set(pages))} different places",
                where="KV import",
                expected=str(wanted),
                fix="the pages are not what their layout id says: export them again",
            )
        raw = np.ascontiguousarray(exported.tensors["records"].numpy())
        self._records[_index(pages)] = raw.view(self.layout.record).reshape(len(pages))


def _index(pages: Sequence[int]) -> Any:
    return np.asarray(pages, np.intp)  # an empty list would be float64, which is no index
