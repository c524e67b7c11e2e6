"""One reader of safetensors headers, one behaviour (BUG-106).

The header is checked in full before anything is mapped: a header that contradicts itself, and a file that is shorter
or longer than its header says (BUG-101), are refused with the file and the tensor named.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from m31.checkpoint.inventory import ITEMSIZE
from m31.config.jsonfile import decode_object
from m31.config.schema import shown
from m31.errors import BadHeader, CheckpointError, TruncatedShard

HEADER_LIMIT = 100_000_000  # bytes; the limit of the format's own library
_LENGTH = struct.Struct("<Q")
_MAX_EXTENT = 2**62  # keeps every product far inside int64 for the code that maps the data
_ENTRY_KEYS = frozenset({"dtype", "shape", "data_offsets"})
_FETCH = "the download or copy is incomplete or damaged; fetch the file again"


class StoredTensor(NamedTuple):
    """One header entry. `start` and `stop` are byte offsets in the file, not in its data section.

    A tuple because a checkpoint has 89,632 of them and tuples are the cheapest immutable records.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: Path
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Header:
    """A validated header; `file_size` is what the file had when it was read."""

    path: Path
    tensors: dict[str, StoredTensor]
    metadata: dict[str, str]
    file_size: int


def printable(name: str) -> str:
    """A name from a file, fit for any terminal: control characters and lone surrogates escaped, at most 200 long."""
    text = name if name.isprintable() else ascii(name)[1:-1]
    return text if len(text) <= 200 else f"{text[:197]}..."


def read_header(path: Path) -> Header:
    """Read and check one file's header. Tensor data is not touched.

    Raises:
        CheckpointError: the file cannot be read.
        BadHeader: not a safetensors header, or one that contradicts itself.
        TruncatedShard: file size and header disagree.
    """
    where = str(path)
    try:
        if not path.is_file():
            raise CheckpointError("is not a regular file", where=where, expected="a safetensors file")
        with path.open("rb") as handle:
            file_size = handle.seek(0, 2)
            handle.seek(0)
            length = _header_length(handle.read(8), file_size, where)
            raw = handle.read(length)
    except OSError as exc:
        raise CheckpointError(f"cannot be read ({exc})", where=where, fix="check the file and its permissions") from exc
    if len(raw) != length:
        raise TruncatedShard(f"ends inside its header of {length:,} bytes", where=where, fix=_FETCH)
    if not raw.startswith(b"{"):
        raise BadHeader("header is not a JSON object", where=where, expected="a safetensors file", fix=_FETCH)
    entries = decode_object(raw, where=f"{where}: header", error=BadHeader)
    metadata = _metadata(entries.pop("__metadata__", {}), where)
    base = 8 + length
    tensors = {name: _entry(name, entry, path, base) for name, entry in entries.items()}
    _check_extents(tensors, base, file_size, where)
    return Header(path=path, tensors=tensors, metadata=metadata, file_size=file_size)


def _header_length(first: bytes, file_size: int, where: str) -> int:
    if first.startswith(b"version "):
        raise BadHeader("is a Git LFS pointer, not the weights", where=where, fix="run `git lfs pull` in that folder")
    if len(first) < 8:
        raise TruncatedShard(f"has {file_size} bytes, fewer than a header's length field", where=where, fix=_FETCH)
    length = int(_LENGTH.unpack(first)[0])
    if length > HEADER_LIMIT:
        raise BadHeader(
            f"claims a header of {length:,} bytes", where=where, expected=f"at most {HEADER_LIMIT:,}", fix=_FETCH
        )
    if length < 2:
        raise BadHeader(f"claims a header of {length} bytes", where=where, expected="at least 2", fix=_FETCH)
    if 8 + length > file_size:
        raise TruncatedShard(
            f"has {file_size:,} bytes, but its header alone needs {8 + length:,}", where=where, fix=_FETCH
        )
    return length


def _metadata(value: Any, where: str) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(item, str) for item in value.values()):
        raise BadHeader("__metadata__ is not a map of strings", where=where, expected="text values only")
    return value


def _entry(name: str, entry: Any, path: Path, base: int) -> StoredTensor:
    if not isinstance(entry, dict) or len(entry) != 3 or not entry.keys() >= _ENTRY_KEYS:
        raise _bad(name, path, f"has the entry {shown(entry)}", "dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEMSIZE:
        raise _bad(name, path, f"has the dtype {shown(dtype)}", f"one of {', '.join(ITEMSIZE)}")
    if not isinstance(shape, list) or len(shape) > 8:
        raise _bad(name, path, f"has the shape {shown(shape)}", "up to 8 non-negative integers")
    need = ITEMSIZE[dtype]
    for size in shape:
        if type(size) is not int or size < 0:
            raise _bad(name, path, f"has the shape {shown(shape)}", "up to 8 non-negative integers")
        need *= size
    if not isinstance(offsets, list) or len(offsets) != 2 or type(offsets[0]) is not int or type(offsets[1]) is not int:
        raise _bad(name, path, f"has the data_offsets {shown(offsets)}", "two integers")
    begin, end = offsets
    if not 0 <= begin <= end < _MAX_EXTENT:
        raise _bad(name, path, f"has the data_offsets {shown(offsets)}", "0 <= begin <= end")
    if need != end - begin:
        span = f"needs {shown(need)} bytes, but its data_offsets span {end - begin}"
        raise _bad(name, path, f"of {dtype} {shown(shape)} {span}")
    return StoredTensor(name, dtype, tuple(shape), path, base + begin, base + end)


def _bad(name: str, path: Path, what: str, expected: str | None = None) -> BadHeader:
    return BadHeader(f"tensor '{printable(name)}' {what}", where=str(path), expected=expected, fix=_FETCH)


def _check_extents(tensors: dict[str, StoredTensor], base: int, file_size: int, where: str) -> None:
    """No overlap, no gap, and exactly the file's bytes."""
    position, previous = base, ""
    for tensor in sorted(tensors.values(), key=lambda t: (t.start, t.stop)):
        if tensor.start < position:
            raise BadHeader(
                f"tensors '{printable(previous)}' and '{printable(tensor.name)}' overlap", where=where, fix=_FETCH
            )
        if tensor.start > position:
            raise BadHeader(
                f"{tensor.start - position:,} bytes before tensor '{printable(tensor.name)}' belong to no tensor",
                where=where,
                expected="data without gaps",
                fix=_FETCH,
            )
        position, previous = tensor.stop, tensor.name
    if file_size < position:
        lost = sum(tensor.stop > max(file_size, tensor.start) for tensor in tensors.values())
        raise TruncatedShard(
            f"has {file_size:,} bytes, but its header describes {position:,} ({lost} tensors reach beyond the end)",
            where=where,
            fix=_FETCH,
        )
    if file_size > position:
        raise TruncatedShard(
            f"has {file_size - position:,} bytes after its last tensor",
            where=where,
            expected=f"exactly {position:,} bytes",
            fix=_FETCH,
        )


def encode_header(entries: dict[str, dict[str, Any]], metadata: dict[str, str]) -> bytes:
    """The length field and JSON header for `entries`, padded with spaces so that the data begin 8-byte aligned."""
    body = json.dumps({"__metadata__": metadata, **entries}, separators=(",", ":")).encode()
    body += b" " * (-len(body) % 8)
    return _LENGTH.pack(len(body)) + body
