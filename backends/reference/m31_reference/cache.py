"""Pages: per layer one store for K, one for V and, on sparse layers, one for index keys."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from m31.errors import BackendRefused, LayoutMismatch
from m31.sdk import ExportedPages, KVCache, KVLayout, KVSpec
from m31_reference.codecs import Codec, codec

MAKER, VERSION = "m31-reference", 2  # the name of this byte order; a change of the parts below raises the version


class Store:
    """Vectors of one kind of one layer.

    Readers name the pages that they need and get those decoded; nothing else is touched.
    """

    def __init__(self, codec: Codec, pages: int, heads: int, page: int, dim: int, device: torch.device) -> None:
        self.codec, self.heads, self.page = codec, heads, page
        self.parts = codec.allocate(pages, heads, page, dim, device)

    def write(self, page: Tensor, offset: Tensor, x_nhD: Tensor) -> None:
        """Store vector i of every head at `offset[i]` of page `page[i]`."""
        self.codec.put(self.parts, page, offset, self.codec.encode(x_nhD))

    def head(self, ids: list[int], head: int, dtype: torch.dtype) -> Tensor:
        """`[len(ids) * page, D]` of one head; a view where ids are consecutive and nothing needs decoding."""
        if ids == list(range(ids[0], ids[0] + len(ids))):
            taken = {name: part[ids[0] : ids[0] + len(ids), head] for name, part in self.parts.items()}
        else:
            index = torch.tensor(ids, device=next(iter(self.parts.values())).device)
            taken = {name: part[:, head][index] for name, part in self.parts.items()}
        return self.codec.decode(taken, dtype).flatten(0, 1)

    def rows(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """`[len(rows), page, D]` of rows `page * heads + head`."""
        taken = {name: part.flatten(0, 1).index_select(0, rows) for name, part in self.parts.items()}
        return self.codec.decode(taken, dtype)

    def exact(self, page: int) -> Tensor:
        """`[heads, page, D]`: one page as stored."""
        return self.codec.exact({name: part[page] for name, part in self.parts.items()}, self.codec.storage).clone()


class PagedLayout(KVLayout):
    """Pages of any format the reference knows.

    Args:
        spec: what they hold.
        device: where.
        read: how NVFP4 pages are read (`ArithmeticSpec.kv_read`); part of the arithmetic, not of the stored bytes.
    """

    def __init__(self, spec: KVSpec, device: torch.device, *, read: str) -> None:
        self.spec, self.device = spec, device
        self.layout_id = spec.name(MAKER, VERSION)
        self.page_bytes = spec.page_tokens * (spec.main_bytes + spec.index_bytes)
        if spec.kv_format not in ("float64", "float32", "bfloat16", "fp8", "nvfp4"):
            raise BackendRefused(f"K and V cannot be stored as {spec.kv_format}", where="KV pages")
        self.k = codec(spec.kv_format, order="linear", read=read)
        self.v = codec(spec.kv_format, order=spec.v_scale_order, read=read)
        self.index = codec(spec.index_format, order="linear", read=read)

    def allocate(self, pages: int) -> PagedCache:
        """See `KVLayout.allocate`. The memory is reserved; the system commits it page by page as it is written."""
        return PagedCache(self, pages)


class PagedCache(KVCache):
    """See `PagedLayout`."""

    def __init__(self, layout: PagedLayout, pages: int) -> None:
        self.layout, self.pages = layout, pages
        spec, device = layout.spec, layout.device
        self.page_tokens = spec.page_tokens
        main = (pages, spec.kv_heads, spec.page_tokens, spec.head_dim, device)
        self.k = [Store(layout.k, *main) for _ in spec.indexed]
        self.v = [Store(layout.v, *main) for _ in spec.indexed]
        self.index = [
            Store(layout.index, pages, 1, spec.page_tokens, spec.index_dim, device) if has else None
            for has in spec.indexed
        ]

    def _stores(self) -> Iterator[tuple[str, Store]]:
        """Every store with its name, such as `12.k`."""
        for layer, stores in enumerate(zip(self.k, self.v, self.index, strict=True)):
            for kind, store in zip(("k", "v", "index"), stores, strict=True):
                if store is not None:
                    yield f"{layer}.{kind}", store

    def _parts(self) -> Iterator[tuple[str, Tensor]]:
        for name, store in self._stores():
            for part, tensor in store.parts.items():
                yield f"{name}.{part}", tensor

    def components(self) -> dict[str, Tensor]:
        """See `KVCache.components`; part names and shapes are those of the codecs."""
        return dict(self._parts())

    def poison(self, pages: Sequence[int]) -> None:
        """See `KVCache.poison`."""
        for _, store in self._stores():
            store.codec.poison(store.parts, list(pages))

    def read(self, layer: int, page: int) -> dict[str, Tensor]:
        """See `KVCache.read`."""
        out = {"k": self.k[layer].exact(page), "v": self.v[layer].exact(page)}
        index = self.index[layer]
        if index is not None:
            out["index"] = index.exact(page)[0]
        return out

    def copy_pages(self, source: Sequence[int], target: Sequence[int]) -> None:
        """See `KVCache.copy_pages`."""
        for _, tensor in self._parts():
            tensor[list(target)] = tensor[list(source)]

    def export(self, pages: Sequence[int]) -> ExportedPages:
        """See `KVCache.export`."""
        tensors = {name: tensor[list(pages)] for name, tensor in self._parts()}
        return ExportedPages(self.layout.layout_id, len(pages), tensors)

    def import_(self, exported: ExportedPages, pages: Sequence[int]) -> None:
        """See `KVCache.import_`."""
        if exported.layout_id != self.layout.layout_id:
            raise LayoutMismatch(
                f"pages have the layout '{exported.layout_id}'",
                where="KV import",
                expected=f"'{self.layout.layout_id}'",
                fix="export from a cache of the same formats, head shard and version; pages are not converted",
            )
        if len(pages) != exported.count or len(set(pages)) != len(pages):
            raise LayoutMismatch(
                f"{exported.count} pages for {len(set(pages))} different places", where="KV import", expected="as many"
            )
        mine = dict(self._parts())
        wanted = {name: ((exported.count, *t.shape[1:]), t.dtype) for name, t in mine.items()}
        given = {name: (tuple(t.shape), t.dtype) for name, t in exported.tensors.items()}
        wrong = sorted(name for name in wanted.keys() | given.keys() if wanted.get(name) != given.get(name))
        if wrong:
            raise LayoutMismatch(
                f"component '{wrong[0]}' is {given.get(wrong[0], 'absent')}",
                where="KV import",
                expected=str(wanted.get(wrong[0], "no such component")),
                fix="the pages are not what their layout id says: export them again",
            )
        for name, tensor in mine.items():
            tensor[list(pages)] = exported.tensors[name].to(tensor.device)
