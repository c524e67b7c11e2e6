"""Weights that stay in their file and are decoded when they are used, with a bounded cache of decoded ones."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from m31.errors import NonFiniteWeight
from m31.sdk.backend import LazyTensor


class DecodedCache:
    """Decoded tensors, least recently used first out, within a number of bytes.

    Args:
        limit_bytes: most bytes held. A tensor larger than this is returned and not held.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes, self.held_bytes = limit_bytes, 0
        self.hits = self.misses = 0
        self._held: OrderedDict[int, tuple[LazyTensor, Tensor]] = OrderedDict()

    def get(self, source: LazyTensor, decode: Callable[[LazyTensor], Tensor]) -> Tensor:
        """The decoded tensor of `source`."""
        key = id(source)  # the entry keeps its source alive, so that no other object can get its id
        if key in self._held:
            self.hits += 1
            self._held.move_to_end(key)
            return self._held[key][1]
        self.misses += 1
        value = decode(source)
        size = value.numel() * value.element_size()
        if size <= self.limit_bytes:
            while self.held_bytes + size > self.limit_bytes:
                _, (_, old) = self._held.popitem(last=False)
                self.held_bytes -= old.numel() * old.element_size()
            self._held[key] = (source, value)
            self.held_bytes += size
        return value


class Decoded(Mapping[str, Tensor]):
    """Slot -> values: held ones, and ones that are decoded through the cache on each access.

    Args:
        held: in the compute dtype; file-backed where the file already has it.
        lazy: still as stored.
        cache: shared by all weights of a session.
        decode: to the compute dtype; refuses values that are not finite.
    """

    def __init__(
        self,
        held: Mapping[str, Tensor],
        lazy: Mapping[str, LazyTensor],
        cache: DecodedCache,
        decode: Callable[[LazyTensor], Tensor],
    ) -> None:
        self._held, self._lazy, self._cache, self._decode = held, lazy, cache, decode

    def __getitem__(self, slot: str) -> Tensor:
        value = self._held.get(slot)
        return self._cache.get(self._lazy[slot], self._decode) if value is None else value

    def __iter__(self) -> Iterator[str]:
        yield from self._held
        yield from self._lazy

    def __len__(self) -> int:
        return len(self._held) + len(self._lazy)


@dataclass
class Weights:
    """The weights of one op instance.

    Attributes:
        tensors: slot -> values in the compute dtype.
        input_scale: slot -> static encode scale of the matrix's input, for an arithmetic that uses it.
        formats: slot -> how it is stored.
    """

    tensors: Mapping[str, Tensor]
    input_scale: Mapping[str, Tensor] = field(default_factory=dict)
    formats: Mapping[str, str] = field(default_factory=dict)
    layout_id: str = "m31-reference:v2"

    def dequantise(self) -> dict[str, Tensor]:
        """See `WeightHandle.dequantise`: exactly the values that the kernels multiply with."""
        return dict(self.tensors)


def require_finite(value: Tensor, name: str) -> None:
    """Refuse NaN and infinity.

    Raises:
        NonFiniteWeight: how many, the first place, and the tensor's name.
    """
    if bool(torch.isfinite(value.sum(dtype=torch.float64))) or bool(torch.isfinite(value).all()):
        return
    bad = torch.isfinite(value).logical_not().flatten().nonzero()
    raise NonFiniteWeight(
        f"{len(bad)} of {value.numel()} values are NaN or infinite, the first at flat index {int(bad[0])}",
        where=f"tensor '{name}'",
        fix="the checkpoint is damaged: fetch it again, or run `m31 inspect --deep` for the whole list",
    )
