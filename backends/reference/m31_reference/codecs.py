"""How a key or value vector is stored in a page: one codec per format (MODEL.md §3.3 to §3.5).

A codec names the tensors that hold vectors of `dim` elements, encodes vectors, and decodes whole pages. Codes and FP8
scales are kept as bytes, because indexing is not defined for 8-bit floats on every device. Every decoded value is
exact in float32 except where a reading rule says that it is rounded. Values that are not finite stay NaN, so that they
reach the logits, where they are refused by name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from m31.errors import BackendRefused
from m31.formats import e2m1, fp8, int8, nvfp4
from m31.formats.layout import ScaleOrder

Parts = Mapping[str, Tensor]
PLAIN = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}
_NAN_BYTE = 0x7F  # NaN in E4M3FN
_SHIFT3 = 8.0  # a peer reads E4M3(scale / 8) and multiplies the result by 8 (§3.4)
_QUAD = 4  # tokens whose scales lie together in the token-quad order


class _Table:
    """What `m31.formats` makes of each of the 256 bytes, to be looked up: a quarter of the time of torch's conversions.

    Tests compare everything that is decoded through it with the functions there.
    """

    def __init__(self, build: Callable[[Tensor], Tensor]) -> None:
        self._build, self._values = build, torch.empty(0)

    def take(self, codes: Tensor) -> Tensor:
        """The entries of codes [...], in order, flat."""
        if not len(self._values) or self._values.device != codes.device:
            self._values = self._build(torch.arange(256, dtype=torch.uint8, device=codes.device))
        return self._values.index_select(0, codes.flatten().int())


class Codec(ABC):
    """See the module. Shapes: a page part is `[pages, heads, page, ...]`, an encoded vector `[n, heads, ...]`."""

    storage: torch.dtype  # the dtype in which `KVCache.read` gives values

    @abstractmethod
    def allocate(self, pages: int, heads: int, page: int, dim: int, device: torch.device) -> dict[str, Tensor]:
        """Uninitialised page parts."""

    @abstractmethod
    def encode(self, x_nhD: Tensor) -> dict[str, Tensor]:
        """Parts of vectors `[n, heads, D]`."""

    @abstractmethod
    def decode(self, parts: Parts, dtype: torch.dtype) -> Tensor:
        """Operands `[..., page, D]` of page parts `[..., page, ...]`, by the reading rule."""

    def exact(self, parts: Parts, dtype: torch.dtype) -> Tensor:
        """The stored values, whatever the reading rule."""
        return self.decode(parts, dtype)

    @abstractmethod
    def poison(self, parts: Parts, pages: list[int]) -> None:
        """Make `pages` decode to NaN."""

    def put(self, parts: Parts, page: Tensor, offset: Tensor, encoded: Parts) -> None:
        """Store encoded vector i at `offset[i]` of page `page[i]`."""
        for name, value in encoded.items():
            parts[name][page, :, offset] = value


class Plain(Codec):
    """A torch float format; the cast to bfloat16 is the rounding of MODEL.md §2.3."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.storage = dtype

    def allocate(self, pages: int, heads: int, page: int, dim: int, device: torch.device) -> dict[str, Tensor]:
        """See `Codec.allocate`."""
        return {"values": torch.empty(pages, heads, page, dim, dtype=self.storage, device=device)}

    def encode(self, x_nhD: Tensor) -> dict[str, Tensor]:
        """See `Codec.encode`."""
        return {"values": x_nhD.to(self.storage)}

    def decode(self, parts: Parts, dtype: torch.dtype) -> Tensor:
        """See `Codec.decode`."""
        return parts["values"].to(dtype)

    def poison(self, parts: Parts, pages: list[int]) -> None:
        """See `Codec.poison`."""
        parts["values"][pages] = torch.nan


class Fp8(Codec):
    """E4M3FN at unit scale, saturating at 448 (MODEL.md §3.5). There is no scale to forget (BUG-8)."""

    storage = torch.float32

    def __init__(self) -> None:
        self._e4m3 = _Table(fp8.decode)

    def allocate(self, pages: int, heads: int, page: int, dim: int, device: torch.device) -> dict[str, Tensor]:
        """See `Codec.allocate`."""
        return {"codes": torch.empty(pages, heads, page, dim, dtype=torch.uint8, device=device)}

    def encode(self, x_nhD: Tensor) -> dict[str, Tensor]:
        """See `Codec.encode`."""
        return {"codes": fp8.encode(x_nhD.float(), saturate=True).view(torch.uint8)}

    def decode(self, parts: Parts, dtype: torch.dtype) -> Tensor:
        """See `Codec.decode`."""
        return self._e4m3.take(parts["codes"]).view(parts["codes"].shape).to(dtype)

    def poison(self, parts: Parts, pages: list[int]) -> None:
        """See `Codec.poison`."""
        parts["codes"][pages] = _NAN_BYTE


class Nvfp4(Codec):
    """E2M1 codes and one E4M3 scale per 16, global scale 1 (MODEL.md §3.4).

    Args:
        order: of the scales inside a page: token by token, or by quads of tokens.
        read: `ArithmeticSpec.kv_read`.
    """

    storage = torch.float32

    def __init__(self, order: ScaleOrder, read: str) -> None:
        self.order, self.read = order, read
        self._e4m3 = _Table(fp8.decode)
        self._shifted = _Table(lambda b: fp8.decode(fp8.encode(fp8.decode(b) / _SHIFT3)))
        # Both values of a byte as one 64-bit word.
        self._pairs = _Table(lambda b: e2m1.decode_packed(b[:, None], torch.float32).view(torch.int64).flatten())

    def allocate(self, pages: int, heads: int, page: int, dim: int, device: torch.device) -> dict[str, Tensor]:
        """See `Codec.allocate`."""
        groups = dim // nvfp4.GROUP
        if dim % nvfp4.GROUP:
            raise BackendRefused(
                f"vectors of {dim} elements cannot be stored as NVFP4",
                where="KV pages",
                expected=f"a multiple of {nvfp4.GROUP}",
                fix="choose another format with --kv-dtype or --index-dtype",
            )
        scales: tuple[int, ...] = (page, groups)
        if self.order == "token_quad":
            if page % _QUAD:
                raise BackendRefused(
                    f"pages of {page} tokens have no token-quad order", where="KV pages", expected="a multiple of 4"
                )
            scales = (page // _QUAD, groups, _QUAD)
        return {
            "packed": torch.empty(pages, heads, page, dim // 2, dtype=torch.uint8, device=device),
            "scale": torch.empty(pages, heads, *scales, dtype=torch.uint8, device=device),
        }

    def encode(self, x_nhD: Tensor) -> dict[str, Tensor]:
        """See `Codec.encode`."""
        packed, scale = nvfp4.encode_kv(x_nhD.float(), nonfinite="propagate")
        return {"packed": packed, "scale": scale.view(torch.uint8)}

    def decode(self, parts: Parts, dtype: torch.dtype) -> Tensor:
        """See `Codec.decode`."""
        linear = self._linear(parts["scale"])
        shifted = self.read == "e4m3-shift3"
        scale = (self._shifted if shifted else self._e4m3).take(linear).view(*linear.shape, 1)
        values = self._pairs.take(parts["packed"]).view(torch.float32)
        product = values.view(*linear.shape, nvfp4.GROUP).mul_(scale).flatten(-2)
        if self.read != "exact":
            product = fp8.decode(fp8.encode(product, saturate=True))
        if shifted:
            product *= _SHIFT3
        return product.to(dtype)

    def exact(self, parts: Parts, dtype: torch.dtype) -> Tensor:
        """See `Codec.exact`."""
        return nvfp4.decode_kv(parts["packed"], self._linear(parts["scale"]).view(torch.float8_e4m3fn), dtype)

    def _linear(self, scale: Tensor) -> Tensor:
        if self.order == "token_quad":
            scale = scale.transpose(-1, -2).flatten(-3, -2).contiguous()
        return scale

    def poison(self, parts: Parts, pages: list[int]) -> None:
        """See `Codec.poison`."""
        parts["scale"][pages] = _NAN_BYTE
        parts["packed"][pages] = 0x22  # not zero, so that a reader who drops the NaN of a scale still shows

    def put(self, parts: Parts, page: Tensor, offset: Tensor, encoded: Parts) -> None:
        """See `Codec.put`."""
        parts["packed"][page, :, offset] = encoded["packed"]
        if self.order == "token_quad":
            parts["scale"][page, :, offset // _QUAD, :, offset % _QUAD] = encoded["scale"]
        else:
            parts["scale"][page, :, offset] = encoded["scale"]


class Int8(Codec):
    """Signed bytes with one float32 scale per key; for index keys only."""

    storage = torch.float32

    def allocate(self, pages: int, heads: int, page: int, dim: int, device: torch.device) -> dict[str, Tensor]:
        """See `Codec.allocate`."""
        return {
            "codes": torch.empty(pages, heads, page, dim, dtype=torch.int8, device=device),
            "scale": torch.empty(pages, heads, page, dtype=torch.float32, device=device),
        }

    def encode(self, x_nhD: Tensor) -> dict[str, Tensor]:
        """See `Codec.encode`."""
        codes, scale = int8.encode(x_nhD.float(), nonfinite="propagate")
        return {"codes": codes, "scale": scale}

    def decode(self, parts: Parts, dtype: torch.dtype) -> Tensor:
        """See `Codec.decode`."""
        return int8.decode(parts["codes"], parts["scale"], dtype)

    def poison(self, parts: Parts, pages: list[int]) -> None:
        """See `Codec.poison`."""
        parts["scale"][pages] = torch.nan
        parts["codes"][pages] = 1


def codec(name: str, *, order: ScaleOrder, read: str) -> Codec:
    """The codec of a format; `order` and `read` concern NVFP4."""
    if name in PLAIN:
        return Plain(PLAIN[name])
    if name == "nvfp4":
        return Nvfp4(order, read)
    return {"fp8": Fp8, "int8": Int8}[name]()
