"""Pages in the plain formats: one tensor per layer and kind."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from m31.sdk.backend import KV_BYTES, KVCache, KVLayout, KVSpec

_VERSION = 1
_DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}


class PlainLayout(KVLayout):
    """K and V `[pages, kv_heads, page_tokens, head_dim]`, index key `[pages, page_tokens, index_dim]`, per layer."""

    def __init__(self, spec: KVSpec, device: torch.device) -> None:
        self.spec, self.device = spec, device
        self.layout_id = f"plain:{spec.kv_format}:{spec.index_format}:heads{spec.kv_heads}:v{_VERSION}"
        main = 2 * spec.kv_heads * spec.head_dim * KV_BYTES[spec.kv_format] * len(spec.indexed)
        index = spec.index_dim * KV_BYTES[spec.index_format] * sum(spec.indexed)
        self.page_bytes = spec.page_tokens * (main + index)

    def allocate(self, pages: int) -> PlainCache:
        """See `KVLayout.allocate`. The memory is reserved; the system commits it page by page as it is written."""
        return PlainCache(self, pages)


class PlainCache(KVCache):
    """See `PlainLayout`."""

    def __init__(self, layout: PlainLayout, pages: int) -> None:
        self.layout, self.pages = layout, pages
        spec, device = layout.spec, layout.device
        shape = (pages, spec.kv_heads, spec.page_tokens, spec.head_dim)
        kv, index = _DTYPES[spec.kv_format], _DTYPES[spec.index_format]
        self.page_tokens = spec.page_tokens
        self.k = [torch.empty(shape, dtype=kv, device=device) for _ in spec.indexed]
        self.v = [torch.empty(shape, dtype=kv, device=device) for _ in spec.indexed]
        self.index = [
            torch.empty((pages, spec.page_tokens, spec.index_dim), dtype=index, device=device) if has else None
            for has in spec.indexed
        ]

    def _all(self) -> list[torch.Tensor]:
        return [*self.k, *self.v, *(t for t in self.index if t is not None)]

    def poison(self, pages: Sequence[int]) -> None:
        """See `KVCache.poison`."""
        for tensor in self._all():
            tensor[list(pages)] = torch.nan

    def read(self, layer: int, page: int) -> dict[str, torch.Tensor]:
        """See `KVCache.read`."""
        out = {"k": self.k[layer][page].clone(), "v": self.v[layer][page].clone()}
        index = self.index[layer]
        if index is not None:
            out["index"] = index[page].clone()
        return out

    def copy_pages(self, source: Sequence[int], target: Sequence[int]) -> None:
        """See `KVCache.copy_pages`."""
        for tensor in self._all():
            tensor[list(target)] = tensor[list(source)]
