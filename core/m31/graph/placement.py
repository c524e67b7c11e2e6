"""Which part of each logical tensor a rank reads, and of the KV pages it holds (MODEL.md §2.4, §8).

Heads, feed-forward widths and the vocabulary of the head are spread; everything that decides (norms, router, index key)
and the embedding table is on every rank: a lookup of rows that lie on another rank would need a collective of its own
to save what a mapped file does not cost.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, Self, TypeVar

from m31.config import Text
from m31.errors import GraphError
from m31.formats import mxfp8, nvfp4
from m31.graph.trace import ModelGraph
from m31.ops import TensorDecl
from m31.parallel import Shard, ShardRefused

_BLOCKS = {"mxfp8": mxfp8.GROUP, "nvfp4": nvfp4.GROUP}  # inputs that share a scale; no cut may divide them

_ON_EVERY_RANK = ("embedding", "router")  # ops whose weights are not spread, whatever their axes
_COPIED = ("kv_heads", "index_heads")  # axes of which neighbouring ranks may have the same part


@dataclass(frozen=True, slots=True)
class Cut:
    """`start:stop` along dimension `axis` of a tensor."""

    axis: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Part:
    """What one rank reads of a logical tensor.

    Args:
        name: of the tensor.
        whole: its full shape.
        cut: None if the rank reads all of it.
    """

    name: str
    whole: tuple[int, ...]
    cut: Cut | None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the part."""
        if self.cut is None:
            return self.whole
        axis, length = self.cut.axis, self.cut.stop - self.cut.start
        return (*self.whole[:axis], length, *self.whole[axis + 1 :])


@dataclass(frozen=True, slots=True)
class KVShare:
    """The KV heads of one rank: `heads` of the model's, which are part `index` of `count`.

    Ranks with a copy of the same heads have the same index, so that their pages are interchangeable.
    """

    heads: int
    index: int
    count: int


def kv_share(text: Text, shard: Shard) -> KVShare:
    """Which KV heads the pages of a rank hold; index keys are on every rank (MODEL.md §2.4).

    Raises:
        ShardRefused: the heads do not divide.
    """
    own = heads_of(text, shard, "kv_heads")
    return KVShare(len(own), own.start // len(own), text.num_kv_heads // len(own))


def heads_of(text: Text, shard: Shard, axis: str) -> range:
    """The rank's own heads along `heads`, `kv_heads` or `index_heads`.

    Raises:
        ShardRefused: they do not divide.
    """
    count = _head_counts(text)[axis]
    share = shard.share_or_copy if axis in _COPIED else shard.share
    return share(count, axis.replace("_", " "), str(shard))


def _head_counts(text: Text) -> dict[str, int]:
    index = text.sparse.num_index_heads if text.sparse is not None else 0
    return {"heads": text.num_heads, "kv_heads": text.num_kv_heads, "index_heads": index}


def placement(graph: ModelGraph, text: Text, shard: Shard) -> dict[str, Part]:
    """Tensor name -> the part that a rank reads, for every weight of the unspread graph.

    Raises:
        ShardRefused: heads, a width or the vocabulary do not divide, or the cut of a quantised tensor's inputs would
            divide one of its blocks (known if the graph was traced with `stored`).
        GraphError: a weight with axes that cannot be spread.
    """
    parts: dict[str, Part] = {}
    spans: dict[tuple[str, int], range] = {}  # few, for tens of thousands of tensors
    for call in graph.calls:
        if call.op.weights is None:
            continue
        spread = shard.world > 1 and call.op.spec.name not in _ON_EVERY_RANK
        for tensor in call.op.weights.slots.values():
            cut = None
            if spread and any(tensor.axes):
                at, axis = _axis(tensor)
                key = axis, tensor.shape[at]
                if key not in spans:
                    spans[key] = _span(*key, text, shard, tensor.name)
                cut = Cut(at, spans[key].start, spans[key].stop)
                _check_block(tensor, cut, shard)
            parts[tensor.name] = Part(tensor.name, tensor.shape, cut)
    return parts


def _axis(tensor: TensorDecl) -> tuple[int, str]:
    """The one dimension of a tensor that is cut, and the axis of the model that it is."""
    along = [(at, axis) for at, axis in enumerate(tensor.axes) if axis is not None]
    if len(along) > 1:
        raise GraphError(f"spreads along {[axis for _, axis in along]}", where=tensor.name, expected="one axis")
    return along[0]


def _span(axis: str, size: int, text: Text, shard: Shard, name: str) -> range:
    """The rank's own of `size` elements along an axis."""
    if axis in _WORDS:
        return shard.share(size, _WORDS[axis], f"{shard}, tensor '{name}'")
    if axis not in _head_counts(text):
        raise GraphError(f"spreads along '{axis}'", where=name, expected=f"heads or {' or '.join(_WORDS)}")
    own, unit = heads_of(text, shard, axis), size // _head_counts(text)[axis]
    return range(own.start * unit, own.stop * unit)


_WORDS = {"ff": "feed-forward channels", "vocab": "tokens of the vocabulary"}


def _check_block(tensor: TensorDecl, cut: Cut, shard: Shard) -> None:
    """Refuse a cut of the inputs of a quantised matrix that divides a block of it."""
    last = len(tensor.shape) - 1
    block = _BLOCKS.get(tensor.stored or "", 1)
    if cut.axis == last and (cut.start % block or cut.stop % block):
        raise ShardRefused(
            f"{tensor.shape[last]:,} inputs over {shard.world} ranks divide a block of {tensor.stored}",
            where=f"{shard}, tensor '{tensor.name}'",
            expected=f"a multiple of {block * shard.world:,}, {block} for each rank",
            fix="use fewer devices, or a checkpoint that stores this tensor plain",
        )


class Sliceable(Protocol):
    """A lazy tensor of which a part can be taken without reading it, codes and scales together."""

    @property
    def name(self) -> str:
        """Canonical checkpoint name."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Logical shape."""

    def slice(self, dim: int, start: int, stop: int) -> Self:
        """The part `start:stop` along a logical `dim`, still unread."""


T = TypeVar("T", bound=Sliceable)


def narrow(tensor: T, part: Part) -> T:
    """The rank's part of a stored tensor, still unread; the tensor itself where the rank reads all of it.

    Raises:
        GraphError: the tensor is not the one that the part was made for.
        CheckpointError: the cut divides a block of a quantised tensor.
    """
    if tensor.name != part.name or tuple(tensor.shape) != part.whole:
        raise GraphError(
            f"tensor '{tensor.name}' of shape {list(tensor.shape)}",
            where="narrow",
            expected=f"'{part.name}' of shape {list(part.whole)}, of which this is to be a part",
        )
    return tensor if part.cut is None else tensor.slice(part.cut.axis, part.cut.start, part.cut.stop)
