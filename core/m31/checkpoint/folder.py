"""Which files of a folder are the checkpoint: index, shards, strays and half downloads."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from m31.checkpoint.header import Header, StoredTensor, printable, read_header
from m31.config.jsonfile import read_object
from m31.config.schema import shown
from m31.errors import CheckpointError, DuplicateTensor, IndexMismatch, NotACheckpoint

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
INDEX_LIMIT = 256 * 2**20  # bytes; 89,632 names need about 12 MB
_PARTIAL = (".incomplete", ".part", ".aria2", ".crdownload", ".tmp")


def listed(names: Iterable[str], limit: int = 5) -> str:
    """Up to `limit` names and how many more there are."""
    every = [printable(name) for name in names]
    rest = f" and {len(every) - limit} more" if len(every) > limit else ""
    return ", ".join(every[:limit]) + rest


@dataclass(frozen=True, kw_only=True)
class StoredFiles:
    """The shards of a folder with validated headers.

    Attributes:
        headers: one per shard, in file-name order.
        tensors: stored name -> entry, over all shards.
        notes: things the user should know that are no errors.
    """

    headers: tuple[Header, ...]
    tensors: dict[str, StoredTensor]
    notes: tuple[str, ...]


def require_folder(folder: Path) -> None:
    """Refuse what is not a checkpoint folder.

    Raises:
        NotACheckpoint: absent, a file, empty, unreadable, or without config.json.
    """
    where = str(folder)
    try:
        if folder.is_file():
            raise NotACheckpoint(
                "is a file", where=where, expected="a checkpoint folder", fix="pass the folder around it"
            )
        if not folder.is_dir():
            raise NotACheckpoint("does not exist", where=where, fix="m31 does not download: pass a local folder")
        names = sorted(os.listdir(folder))
    except (OSError, ValueError) as exc:  # ValueError: a NUL in the path
        raise NotACheckpoint(f"cannot be read ({exc})", where=where, fix="check the path and its permissions") from exc
    if not names:
        raise NotACheckpoint("is an empty folder", where=where, expected="config.json and *.safetensors")
    if "config.json" not in names:
        half = _partial(folder)
        hint = f"an unfinished download is there ({listed(half)}): finish it" if half else f"it holds {listed(names)}"
        raise NotACheckpoint("has no config.json", where=where, expected="a checkpoint folder", fix=hint)


def read_files(folder: Path) -> StoredFiles:
    """Find the shards and read their headers.

    Raises:
        NotACheckpoint: no weights in the folder.
        IndexMismatch: the index names absent shards (BUG-100), lies about a tensor, or is malformed.
        DuplicateTensor: two shards hold the same tensor.
        CheckpointError: a header or file is bad; see `read_header`.
    """
    notes: list[str] = []
    index_path = folder / INDEX_NAME
    weight_map: dict[str, str] | None = None
    total: int | None = None
    if index_path.exists():
        weight_map, total = _read_index(index_path)
        shards = sorted(set(weight_map.values()))
        _require_shards(folder, shards, index_path)
    else:
        shards = [_single(folder)]
    strays = sorted(p.name for p in folder.glob("*.safetensors") if p.name not in shards)
    if strays:
        by = "the index does not name them" if weight_map is not None else f"only {SINGLE_NAME} is read"
        notes.append(f"ignored {listed(strays)}: {by}")  # BUG-103
    if half := _partial(folder):
        notes.append(f"left over from an unfinished download: {listed(half)}")
    paths = {shard: folder / shard for shard in shards}
    headers = tuple(read_header(path) for path in paths.values())
    tensors = _merge(headers, weight_map, paths, index_path)
    stored = sum(t.stop - t.start for t in tensors.values())
    if total is not None and total != stored:
        notes.append(f"the index gives total_size {total:,}, the shards hold {stored:,} bytes")
    return StoredFiles(headers=headers, tensors=tensors, notes=tuple(notes))


def _single(folder: Path) -> str:
    if (folder / SINGLE_NAME).exists():
        return SINGLE_NAME
    found = sorted(p.name for p in folder.glob("*.safetensors"))
    half = _partial(folder)
    if found or half:
        raise NotACheckpoint(
            f"has neither {INDEX_NAME} nor {SINGLE_NAME}, only {listed(found + half)}",
            where=str(folder),
            fix="the download is unfinished: fetch the rest",
        )
    other = sorted(p.name for p in folder.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".gguf"))
    raise NotACheckpoint(
        "has no weights" + (f", only {listed(other)}" if other else ""),
        where=str(folder),
        expected=f"{SINGLE_NAME}, or {INDEX_NAME} and its shards",
        fix="convert it to safetensors" if other else "fetch the checkpoint again",
    )


def is_partial(path: Path) -> bool:
    """True for the name of an unfinished download."""
    return path.suffix in _PARTIAL


def _partial(folder: Path) -> list[str]:
    cache = folder / ".cache" / "huggingface" / "download"
    places = [folder, cache] if cache.is_dir() else [folder]
    return sorted(p.name for place in places for p in place.iterdir() if is_partial(p))


def _read_index(path: Path) -> tuple[dict[str, str], int | None]:
    data = read_object(path, limit=INDEX_LIMIT, error=IndexMismatch)
    where, weight_map = str(path), data.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise IndexMismatch("has no weight_map", where=where, expected="an object from tensor to file name")
    for shard in set(map(str, weight_map.values())):
        _check_shard_name(shard, where)
    if not all(isinstance(shard, str) for shard in weight_map.values()):
        raise IndexMismatch("weight_map holds something else than file names", where=where)
    metadata: Any = data.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    return weight_map, total if type(total) is int else None


def _check_shard_name(shard: str, where: str) -> None:
    """Any name inside the folder is fine (BUG-104); anything that could lead out of it is not."""
    parts = PurePosixPath(shard).parts
    if not parts or shard.startswith("/") or ".." in parts or "\\" in shard or "\0" in shard or ":" in shard:
        raise IndexMismatch(
            f"names the shard {shown(shard)}",
            where=where,
            expected="a file inside the folder",
            fix="do not trust this file",
        )


def _require_shards(folder: Path, shards: list[str], index_path: Path) -> None:
    try:
        absent = [shard for shard in shards if not (folder / shard).exists()]
    except OSError as exc:
        raise CheckpointError(f"cannot look for its shards ({exc})", where=str(index_path)) from exc
    if absent:
        half = _partial(folder)
        state = f"; unfinished downloads: {listed(half)}" if half else ""
        raise IndexMismatch(
            f"names {len(absent)} of {len(shards)} shards that are absent: {listed(absent)}{state}",
            where=str(index_path),
            fix="the download is incomplete: fetch the missing files",
        )


def _merge(
    headers: tuple[Header, ...], weight_map: dict[str, str] | None, paths: dict[str, Path], index_path: Path
) -> dict[str, StoredTensor]:
    tensors: dict[str, StoredTensor] = {}
    for header in headers:
        both = sorted(tensors.keys() & header.tensors.keys())
        if both:
            raise DuplicateTensor(
                f"{len(both)} tensors are also in {tensors[both[0]].path.name}: {listed(both)}",
                where=str(header.path),
                expected="each tensor in one shard",
            )
        tensors.update(header.tensors)
    if weight_map is None:
        return tensors
    where = str(index_path)
    absent = sorted(name for name in weight_map if name not in tensors)
    if absent:
        claim = f"'{printable(absent[0])}' should be in {printable(weight_map[absent[0]])}"
        raise IndexMismatch(
            f"names {len(absent)} tensors that no shard holds: {listed(absent)}",
            where=where,
            expected=claim,
            fix="fetch it again",
        )
    unlisted = sorted(name for name in tensors if name not in weight_map)
    if unlisted:
        raise IndexMismatch(
            f"omits {len(unlisted)} tensors that its shards hold: {listed(unlisted)}", where=where, fix="fetch it again"
        )
    moved = sorted(name for name, shard in weight_map.items() if tensors[name].path is not paths[shard])
    if moved:
        name = moved[0]
        raise IndexMismatch(
            f"places {len(moved)} tensors in the wrong shard: '{printable(name)}' in {printable(weight_map[name])}, "
            f"but it is in {tensors[name].path.name}",
            where=where,
            fix="fetch it again",
        )
    return tensors
