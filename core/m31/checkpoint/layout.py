"""Where each tensor of a checkpoint to be written will lie: decided in full before the first byte is written."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from m31.checkpoint.encoding import Unit
from m31.checkpoint.header import encode_header
from m31.checkpoint.inventory import ITEMSIZE, TensorDecl
from m31.checkpoint.naming import add_official


@dataclass(frozen=True, kw_only=True)
class ShardLayout:
    """One file.

    Attributes:
        file: its final name.
        header: length field and JSON, as written.
        size: bytes of the whole file.
        offsets: canonical stored name -> byte position in the file.
        stored_names: names as they stand in the header, in file order.
        units: the logical weights in it, in model order.
    """

    file: str
    header: bytes
    size: int
    offsets: Mapping[str, int]
    stored_names: tuple[str, ...]
    units: tuple[Unit, ...]


def plan_shards(every: Iterable[Unit], *, max_shard_bytes: int, official: bool) -> tuple[ShardLayout, ...]:
    """Fill shards in model order; the parts of one weight share a shard.

    Args:
        every: the weights.
        max_shard_bytes: tensor data per shard; one larger weight gets a shard of its own.
        official: whether text tensors get their `language_model.` prefix, as in the vision-language architecture.
    """
    shards: list[list[Unit]] = [[]]
    held = 0
    for unit in every:
        size = sum(decl.stored_bytes for _, _, decl in unit.parts)
        if shards[-1] and held + size > max_shard_bytes:
            shards.append([])
            held = 0
        shards[-1].append(unit)
        held += size
    count = len(shards)
    rename: Callable[[str], str] = add_official if official else str
    return tuple(
        _layout(f"model-{number:05d}-of-{count:05d}.safetensors", members, rename)
        for number, members in enumerate(shards, 1)
    )


def _layout(file: str, members: list[Unit], rename: Callable[[str], str]) -> ShardLayout:
    """Widest dtype first, so that every tensor is aligned for its dtype and never copied on load."""
    parts: list[tuple[str, TensorDecl]] = [(name, decl) for unit in members for _, name, decl in unit.parts]
    parts.sort(key=lambda item: -ITEMSIZE[item[1].dtypes[0]])
    entries: dict[str, dict[str, Any]] = {}
    starts: dict[str, int] = {}
    position = 0
    for name, decl in parts:
        stop = position + decl.stored_bytes
        entries[rename(name)] = {
            "dtype": decl.dtypes[0],
            "shape": list(decl.shape),
            "data_offsets": [position, stop],
        }
        starts[name], position = position, stop
    header = encode_header(entries, {"format": "pt"})
    return ShardLayout(
        file=file,
        header=header,
        size=len(header) + position,
        offsets={name: len(header) + start for name, start in starts.items()},
        stored_names=tuple(entries),
        units=tuple(members),
    )
