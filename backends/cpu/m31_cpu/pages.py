"""Pages of this backend's own: keys in vector lanes, so that products of a query with 16 keys add no lanes up.

Of a page of P tokens, keys and index keys lie in groups of 16, G = ceil(P / 16); lanes behind the last token are zero.
Channels that an instruction multiplies together lie side by side in a lane. Values lie token by token, channels in
lanes. What follows the page (and head) dimension, D channels:

| format   | K and index keys                               | V                                       |
|----------|------------------------------------------------|-----------------------------------------|
| float32  | values float32 [G, D, 16]                      | values float32 [P, D]                   |
| bfloat16 | values int16 [G, D/2, 16, 2]                   | values int16 [ceil(P/2), D, 2]          |
| fp8      | codes uint8 [G, D, 16]                         | codes uint8 [P, D]                      |
| nvfp4    | codes uint8 [G, D/2, 16], scale [G, D/16, 16]  | codes uint8 [P, D/2], scale [P, D/16]   |
| int8     | codes int8 [G, D/4, 16, 4], scale float32 [P]  | (index keys only)                       |

A byte of NVFP4 codes is channels 2j (low) and 2j + 1 of one token. Formats are those of `m31.formats`, bit for bit.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from m31.errors import BackendRefused, LayoutMismatch
from m31.formats import fp8, int8, nvfp4
from m31.sdk import ExportedPages, KVCache, KVLayout, KVSpec

MAKER, VERSION = "m31-cpu", 1  # the name of this byte order; a change of the parts below raises the version
LANES = 16
_NAN_BYTE = 0x7F  # NaN in E4M3FN
_NAN_BF16 = 0x7FC0


# --- orders of one tensor ---


@dataclass(frozen=True)
class Lanes:
    """Tokens in lanes, `unit` channels side by side: logical [..., P, C] is stored [..., G, C/unit, 16, unit], without
    the last dimension where the unit is one."""

    unit: int = 1

    def shape(self, page: int, channels: int) -> tuple[int, ...]:
        """Of a page as stored."""
        tail = (self.unit,) if self.unit > 1 else ()
        return -(-page // LANES), channels // self.unit, LANES, *tail

    def logical(self, stored: Tensor, page: int) -> Tensor:
        """[..., P, C] of what is stored: a copy."""
        if self.unit == 1:
            stored = stored.unsqueeze(-1)
        return stored.transpose(-2, -3).flatten(-2).flatten(-3, -2)[..., :page, :]

    def padding(self, stored: Tensor, page: int) -> Tensor | None:
        """The view of lanes that hold no token, if there are any."""
        if page % LANES == 0:
            return None
        last = stored.unsqueeze(-1) if self.unit == 1 else stored
        return last[..., -1, :, page % LANES :, :]


@dataclass(frozen=True)
class Rows:
    """Token by token, `unit` tokens side by side: logical [..., P, C] is stored [..., ceil(P/unit), C, unit], without
    the last dimension where the unit is one."""

    unit: int = 1

    def shape(self, page: int, channels: int) -> tuple[int, ...]:
        """Of a page as stored."""
        tail = (self.unit,) if self.unit > 1 else ()
        return -(-page // self.unit), channels, *tail

    def logical(self, stored: Tensor, page: int) -> Tensor:
        """[..., P, C] of what is stored."""
        if self.unit == 1:
            return stored
        return stored.transpose(-1, -2).flatten(-3, -2)[..., :page, :]

    def padding(self, stored: Tensor, page: int) -> Tensor | None:
        """The view of what holds no token, if there is any."""
        return None if page % self.unit == 0 else stored[..., -1, :, page % self.unit :]


Order = Lanes | Rows


@dataclass(frozen=True)
class Piece:
    """One tensor of a format.

    Args:
        dtype: as stored.
        per: channels of a vector for each element here: 1, or 2 in a packed byte, 16 under a scale; 0: one for all.
        order: of the elements.
        poison: what a page of NaN holds here.
    """

    dtype: torch.dtype
    per: int
    order: Order
    poison: float


@dataclass(frozen=True)
class Form:
    """How vectors of a format are stored.

    Args:
        name: of the format.
        storage: dtype of what `read` gives.
        channels: vectors have a multiple of so many.
        pieces: by name; the first holds the elements.
        decode: values [..., P, D] of the pieces in logical order.
    """

    name: str
    storage: torch.dtype
    channels: int
    pieces: dict[str, Piece]
    decode: Callable[..., Tensor]

    def shapes(self, page: int, dim: int) -> dict[str, tuple[int, ...]]:
        """Of one head's page, by piece."""
        found = {}
        for name, piece in self.pieces.items():
            shape = piece.order.shape(page, dim // piece.per if piece.per else 1)
            found[name] = shape if piece.per else shape[:1]
        return found

    def bytes(self, page: int, dim: int) -> int:
        """Of one head's page."""
        return sum(
            torch.Size(shape).numel() * self.pieces[name].dtype.itemsize
            for name, shape in self.shapes(page, dim).items()
        )


def _plain(dtype: torch.dtype) -> Callable[..., Tensor]:
    return lambda values: values.contiguous().view(dtype)


def _nvfp4(codes: Tensor, scale: Tensor) -> Tensor:
    return nvfp4.decode_kv(codes, scale.contiguous().view(torch.float8_e4m3fn))


def _int8(codes: Tensor, scale: Tensor) -> Tensor:
    return int8.decode(codes, scale.flatten(-2))


def _forms(pair: Order, one: Order) -> dict[str, Form]:
    """Formats of keys or of values: `pair` is the order of 16-bit numbers, `one` of all others."""
    bf16 = torch.bfloat16
    return {
        form.name: form
        for form in (
            Form(
                "float32",
                torch.float32,
                1,
                {"values": Piece(torch.float32, 1, one, torch.nan)},
                _plain(torch.float32),
            ),
            Form("bfloat16", bf16, 2, {"values": Piece(torch.int16, 1, pair, _NAN_BF16)}, _plain(bf16)),
            Form("fp8", torch.float32, 1, {"codes": Piece(torch.uint8, 1, one, _NAN_BYTE)}, fp8.decode),
            Form(
                "nvfp4",
                torch.float32,
                nvfp4.GROUP,
                {
                    # not zero, so that a reader who drops the NaN of a scale still shows
                    "codes": Piece(torch.uint8, 2, one, 0x22),
                    "scale": Piece(torch.uint8, nvfp4.GROUP, one, _NAN_BYTE),
                },
                _nvfp4,
            ),
        )
    }


KEYS = _forms(Lanes(2), Lanes())
VALUES = _forms(Rows(2), Rows())
INDEX = {
    **KEYS,
    "int8": Form(
        "int8",
        torch.float32,
        4,
        {"codes": Piece(torch.int8, 1, Lanes(4), 1), "scale": Piece(torch.float32, 0, Rows(), torch.nan)},
        _int8,
    ),
}


# --- stores and caches ---


class Store:
    """Vectors of one kind of one layer.

    Attributes:
        form: how they are stored.
        heads, page, dim: sizes.
        headed: whether the parts have a dimension for heads; those of index keys, of one head, have none.
        parts: the tensors `[pages, heads, ...]`, or `[pages, ...]`; what kernels work on.
    """

    def __init__(self, form: Form, pages: int, heads: int | None, page: int, dim: int) -> None:
        self.form, self.heads, self.page, self.dim = form, heads or 1, page, dim
        self.headed = heads is not None
        outer = (pages,) if heads is None else (pages, heads)
        self.parts: dict[str, Tensor] = {}
        for name, shape in form.shapes(page, dim).items():
            part = self.parts[name] = reserve((*outer, *shape), form.pieces[name].dtype)
            space = form.pieces[name].order.padding(part, page) if form.pieces[name].per else None
            if space is not None:
                space.zero_()

    def poison(self, pages: list[int]) -> None:
        """Make these pages NaN; padding stays zero."""
        for name, part in self.parts.items():
            piece = self.form.pieces[name]
            for page in pages:
                part[page] = piece.poison
                space = piece.order.padding(part[page], self.page) if piece.per else None
                if space is not None:
                    space.zero_()

    def read(self, page: int) -> Tensor:
        """`[heads, P, D]`, or `[P, D]` of index keys: one page, decoded exactly."""
        found = {}
        for name, part in self.parts.items():
            piece = self.form.pieces[name]
            found[name] = piece.order.logical(part[page], self.page) if piece.per else part[page].unsqueeze(-1)
        return self.form.decode(**found).to(self.form.storage, copy=True)


def reserve(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A tensor in memory of its own that the system commits as it is written, in huge pages where it has them: small
    ones cost a scan of many keys a fourth of its speed."""
    size = torch.Size(shape).numel() * dtype.itemsize
    if size < _HUGE:
        return torch.zeros(shape, dtype=dtype)
    room = mmap.mmap(-1, size + _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        room.madvise(mmap.MADV_HUGEPAGE)
    start = -ctypes.addressof(ctypes.c_char.from_buffer(room)) % _HUGE
    return torch.frombuffer(room, dtype=torch.uint8, count=size, offset=start).view(dtype).view(shape)


_HUGE = 1 << 21


class CpuLayout(KVLayout):
    """Pages of every format that has kernels here.

    Args:
        spec: what they hold.

    Raises:
        BackendRefused: a format, an order or a size that they cannot hold.
    """

    def __init__(self, spec: KVSpec) -> None:
        self.spec = spec
        self.k = _form(KEYS, spec.kv_format, spec.head_dim, "K and V")
        self.v = _form(VALUES, spec.kv_format, spec.head_dim, "K and V")
        self.index = _form(INDEX, spec.index_format, spec.index_dim, "index keys")
        if spec.kv_format == "nvfp4" and spec.v_scale_order != "linear":
            raise BackendRefused(
                f"V scales in the order '{spec.v_scale_order}'",
                where="KV pages",
                expected="linear: pages of this backend are ordered for its own kernels",
            )
        self.layout_id = spec.name(MAKER, VERSION)
        main = self.k.bytes(spec.page_tokens, spec.head_dim) + self.v.bytes(spec.page_tokens, spec.head_dim)
        index = self.index.bytes(spec.page_tokens, spec.index_dim)
        self.page_bytes = len(spec.indexed) * spec.kv_heads * main + sum(spec.indexed) * index

    def allocate(self, pages: int) -> CpuCache:
        """See `KVLayout.allocate`. The memory is reserved; the system commits it page by page as it is written."""
        return CpuCache(self, pages)


def _form(forms: dict[str, Form], name: str, dim: int, what: str) -> Form:
    form = forms.get(name)
    if form is None:
        raise BackendRefused(
            f"{what} cannot be stored as {name}", where="KV pages", expected=f"one of {', '.join(forms)}"
        )
    if dim % form.channels:
        raise BackendRefused(
            f"vectors of {dim} elements cannot be stored as {name}",
            where="KV pages",
            expected=f"a multiple of {form.channels}",
            fix="choose another format with --kv-dtype or --index-dtype",
        )
    return form


class CpuCache(KVCache):
    """See `CpuLayout`."""

    def __init__(self, layout: CpuLayout, pages: int) -> None:
        self.layout, self.pages = layout, pages
        spec = layout.spec
        self.page_tokens = spec.page_tokens
        sizes = spec.page_tokens, spec.head_dim
        self.k = [Store(layout.k, pages, spec.kv_heads, *sizes) for _ in spec.indexed]
        self.v = [Store(layout.v, pages, spec.kv_heads, *sizes) for _ in spec.indexed]
        self.index = [
            Store(layout.index, pages, None, spec.page_tokens, spec.index_dim) if has else None for has in spec.indexed
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
        """See `KVCache.components`; parts and shapes are in the table of the module."""
        return dict(self._parts())

    def poison(self, pages: Sequence[int]) -> None:
        """See `KVCache.poison`."""
        for _, store in self._stores():
            store.poison(list(pages))

    def read(self, layer: int, page: int) -> dict[str, Tensor]:
        """See `KVCache.read`."""
        out = {"k": self.k[layer].read(page), "v": self.v[layer].read(page)}
        index = self.index[layer]
        if index is not None:
            out["index"] = index.read(page)
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
            tensor[list(pages)] = exported.tensors[name]


__all__ = ["INDEX", "KEYS", "LANES", "VALUES", "CpuCache", "CpuLayout", "Form", "Lanes", "Piece", "Rows", "Store"]
