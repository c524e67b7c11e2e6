"""Weights that stay in their file and are decoded when they are used, with a bounded cache of decoded ones."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from m31.errors import NonFiniteWeight
from m31.formats import mxfp8, nvfp4
from m31.formats.scales import check_scale
from m31.formats.transforms import (
    Loss,
    measure,
    nvfp4_shared_scale,
    requantise,
    share_scale,
    to_block_fp8,
    worst,
)
from m31.sdk import LazyTensor, StoredPart


class Transformed:
    """A quantised tensor as a lossy transform of `m31.formats.transforms` leaves it; a lazy tensor itself.

    Args:
        source: stored in the format that the transform starts from.
        transform: its name there.
        group: for one that takes several tensors (a shared scale): all of them, `source` among them.
    """

    def __init__(self, source: LazyTensor, transform: str, group: Sequence[LazyTensor]) -> None:
        self._source, self._transform, self._group = source, transform, group
        self.name, self.shape, self.dtype, self.format = source.name, source.shape, source.dtype, source.format

    def parts(self) -> Mapping[str, StoredPart]:
        """The stored tensors, not transformed."""
        return self._source.parts()

    def load(self) -> Tensor:
        """The values after the transform, float32."""
        if self._transform == "nvfp4-shared-scale":
            return share_scale(self._parts()).matrix(list(self._group).index(self._source))
        stored = _stored(self._source)
        if self._transform == "nvfp4-to-mxfp8":
            return mxfp8.decode(*requantise(stored["packed"], stored["scale"], stored["global_scale"]))
        return to_block_fp8(stored["codes"], stored["scale"]).decode()

    def loss(self) -> Loss:
        """What the transform changed, in all tensors that it took together."""
        if self._transform == "nvfp4-shared-scale":
            return nvfp4_shared_scale(self._parts())[1]
        return measure(self._source.load(), self.load())

    def _parts(self) -> list[nvfp4.Nvfp4]:
        stored = [_stored(tensor) for tensor in self._group]
        return [nvfp4.Nvfp4(s["packed"], s["scale"], s["global_scale"]) for s in stored]


def _stored(tensor: LazyTensor) -> dict[str, Tensor]:
    """The stored tensors, their block scales checked as `LazyTensor.load` would."""
    parts = tensor.parts()
    stored = {role: part.load() for role, part in parts.items() if role != "input_global_scale"}
    check_scale(parts["scale"], stored["scale"])
    return stored


def transformed(slots: Mapping[str, LazyTensor], transform: str | None) -> dict[str, Transformed]:
    """The slots that `transform` changes: those stored in the format that it starts from.

    A shared scale spans gate and up (`w1.e` and `w3.e`) of one expert, and the down matrix alone.
    """
    if transform is None:
        return {}
    start = "mxfp8" if transform.startswith("mxfp8") else "nvfp4"
    found = {}
    for slot, tensor in slots.items():
        if tensor.format == start:
            matrix, _, expert = slot.partition(".")
            paired = transform == "nvfp4-shared-scale" and matrix in ("w1", "w3")
            group = [slots[f"w1.{expert}"], slots[f"w3.{expert}"]] if paired else [tensor]
            found[slot] = Transformed(tensor, transform, group)
    return found


class DecodedCache:
    """Decoded tensors, least recently used first out, within a number of bytes.

    Args:
        limit_bytes: most bytes held. A tensor larger than this is returned and not held.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes, self.held_bytes = limit_bytes, 0
        self.hits = self.misses = 0
        self._held: OrderedDict[int, tuple[LazyTensor, Tensor]] = OrderedDict()

    @property
    def room(self) -> int:
        """Bytes that it may still take."""
        return self.limit_bytes - self.held_bytes

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
        in_place: slots that are read from the file whenever they are used.
        transformed: the arithmetic's transform of weights, by name, and the slots that it changed.
        input_scale: slot -> static encode scale of the matrix's input, for an arithmetic that uses it.
    """

    tensors: Mapping[str, Tensor]
    in_place: frozenset[str] = frozenset()
    transformed: Mapping[str, Sequence[Transformed]] = field(default_factory=dict)
    input_scale: Mapping[str, Tensor] = field(default_factory=dict)
    layout_id: str = "m31-reference:v3"

    @property
    def losses(self) -> dict[str, Loss]:
        """See `WeightHandle.losses`. Measured when asked for: it decodes every tensor that was transformed."""
        return {name: worst([tensor.loss() for tensor in changed]) for name, changed in self.transformed.items()}

    def dequantise(self) -> Mapping[str, Tensor]:
        """See `WeightHandle.dequantise`: exactly the values that the kernels multiply with, decoded on access."""
        return self.tensors


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
