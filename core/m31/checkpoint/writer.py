"""Writing a folder in the official layout: sharded safetensors, index, config.json. And random weights for it."""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from m31.checkpoint.draft import FOLDER as DRAFT_FOLDER
from m31.checkpoint.draft import official
from m31.checkpoint.folder import INDEX_NAME
from m31.checkpoint.header import encode_header
from m31.checkpoint.inventory import TensorDecl, expected
from m31.checkpoint.lazy import stored_dtype
from m31.checkpoint.naming import add_official
from m31.checkpoint.reader import Checkpoint
from m31.checkpoint.workfolder import copy_file, sync_folder, write_file
from m31.config import Model, parse
from m31.config.loading import VISION_LANGUAGE
from m31.errors import CheckpointError, DuplicateTensor, UnexpectedTensor, UnsupportedFeature, WrongDtype, WrongShape

if TYPE_CHECKING:
    import torch


def write(
    folder: str | Path,
    config: Mapping[str, Any],
    tensors: Iterable[tuple[str, torch.Tensor]],
    *,
    max_shard_bytes: int,
    extra_files: Mapping[str, bytes],
) -> Checkpoint:
    """Write a checkpoint; the folder appears complete or not at all.

    Args:
        folder: destination; must be absent or empty.
        config: config.json contents; parsed strictly first.
        tensors: (canonical name, tensor) pairs in any order; consumed one shard at a time.
        max_shard_bytes: tensor data per shard; one larger tensor gets a shard of its own.
        extra_files: further files, such as tokenizer.json, by plain file name.

    Returns:
        The folder, opened again and thereby validated.

    Raises:
        ConfigError: the config is not valid.
        CheckpointError: the destination is not empty, a tensor does not fit the config, or nothing can be written.
    """
    destination = Path(folder)
    model = parse(config, where="config.json (to be written)")
    check_destination(destination)
    _check_extra(extra_files)
    if max_shard_bytes < 1:
        raise CheckpointError(f"max_shard_bytes is {max_shard_bytes}", expected="a positive number of bytes")
    with _staged(destination) as staging:
        _fill(staging, config, model, tensors, max_shard_bytes, extra_files)
        Checkpoint.open(staging)  # what we could not read back must not be left behind
    return Checkpoint.open(destination)


def write_draft(
    folder: str | Path,
    target: Checkpoint,
    config: Mapping[str, Any],
    tensors: Iterable[tuple[str, torch.Tensor]],
) -> Checkpoint:
    """Write a target's files and a draft head for it (MODEL.md §4.3); the folder appears complete or not at all.

    Args:
        folder: destination; must be absent or empty.
        target: whose files are copied, except a draft head and what begins with a dot.
        config: contents of `dspark/config.json`.
        tensors: (canonical name, tensor) pairs of the head, in any order.

    Returns:
        The folder, opened again and thereby validated, the head too.

    Raises:
        ConfigError: the config is not valid, or the head does not fit the target.
        CheckpointError: the destination is not empty, a tensor does not fit the config, or nothing can be written.
    """
    destination = Path(folder)
    check_destination(destination)
    with _staged(destination) as staging:
        for path in sorted(target.folder.rglob("*")):
            name = path.relative_to(target.folder)
            if name.parts[0] == DRAFT_FOLDER or name.parts[0].startswith("."):
                continue
            if path.is_dir():
                (staging / name).mkdir()
            else:
                copy_file(path, staging / name)
        head = staging / DRAFT_FOLDER
        head.mkdir()
        shard = [(official(name), tensor) for name, tensor in tensors]
        total, file = _write_shard(head / "shard.tmp", shard), "model-00001-of-00001.safetensors"
        os.rename(head / "shard.tmp", head / file)
        _write_index(head, total, {name: file for name, _ in shard})
        write_file(head / "config.json", (json.dumps(config, indent=2) + "\n").encode())
        sync_folder(head)
        sync_folder(staging)
        _ = Checkpoint.open(staging).draft
    return Checkpoint.open(destination)


@contextmanager
def _staged(destination: Path) -> Iterator[Path]:
    """A folder to fill, which becomes the destination if nothing goes wrong, and otherwise vanishes."""
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=f".{destination.name}.writing-", dir=destination.parent))
    except OSError as exc:
        raise CheckpointError(f"cannot be created ({exc})", where=str(destination)) from exc
    try:
        yield staging
        staging.chmod(0o755)
        os.rename(staging, destination)  # replaces an empty folder, fails on any other
        sync_folder(destination.parent)
    except OSError as exc:
        raise CheckpointError(
            f"cannot be written ({exc})", where=str(destination), fix="check space and permissions"
        ) from exc
    finally:
        if staging.exists():
            shutil.rmtree(staging)


def check_destination(destination: Path) -> None:
    """Refuse a destination that holds something.

    Raises:
        CheckpointError: a folder with content, or no folder at all.
    """
    if destination.is_dir():
        if any(destination.iterdir()):
            raise CheckpointError(
                "is not empty", where=str(destination), fix="choose another folder or delete it first"
            )
    elif destination.exists() or destination.is_symlink():
        raise CheckpointError("exists and is not a folder", where=str(destination), fix="choose another name")


def _check_extra(extra_files: Mapping[str, bytes]) -> None:
    for name in extra_files:
        plain = (
            PurePosixPath(name).name == name and name not in ("", ".", "..") and "\\" not in name and "\0" not in name
        )
        if not plain or name in ("config.json", INDEX_NAME) or name.endswith(".safetensors"):
            raise CheckpointError(
                f"extra file {name!r}", expected="a plain file name that the writer does not use itself"
            )


def _fill(
    staging: Path,
    config: Mapping[str, Any],
    model: Model,
    tensors: Iterable[tuple[str, torch.Tensor]],
    max_shard_bytes: int,
    extra_files: Mapping[str, bytes],
) -> None:
    contents: list[list[str]] = []
    total = 0
    for shard in _shards(_checked(model, tensors), max_shard_bytes):
        total += _write_shard(staging / _draft(len(contents)), shard)
        contents.append([name for name, _ in shard])
    weight_map: dict[str, str] = {}
    for number, names in enumerate(contents):
        final = f"model-{number + 1:05d}-of-{len(contents):05d}.safetensors"
        os.rename(staging / _draft(number), staging / final)
        weight_map.update(dict.fromkeys(names, final))
    _write_index(staging, total, weight_map)
    write_file(staging / "config.json", (json.dumps(config, indent=2) + "\n").encode())
    for name, data in extra_files.items():
        write_file(staging / name, data)
    sync_folder(staging)


def _write_index(folder: Path, total: int, weight_map: Mapping[str, str]) -> None:
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    write_file(folder / INDEX_NAME, json.dumps(index, indent=1).encode())


def _draft(number: int) -> str:
    return f"shard-{number}.tmp"  # the final name needs the number of shards


def _checked(model: Model, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Stored name and tensor, each checked against the inventory as it passes."""
    declared = expected(model)
    prefix = model.architecture == VISION_LANGUAGE
    done: set[str] = set()
    for name, tensor in tensors:
        decl = declared.get(name)
        if decl is None:
            raise UnexpectedTensor(f"'{name}' does not belong to this architecture", expected="canonical names only")
        if name in done:
            raise DuplicateTensor(f"'{name}' was given twice", expected="each tensor once")
        if tuple(tensor.shape) != decl.shape:
            raise WrongShape(f"'{name}' is {list(tensor.shape)}", expected=str(list(decl.shape)))
        if stored_dtype(tensor.dtype) not in decl.dtypes:
            raise WrongDtype(f"'{name}' is {stored_dtype(tensor.dtype)}", expected=" or ".join(decl.dtypes))
        done.add(name)
        yield add_official(name) if prefix else name, tensor


def _shards(
    tensors: Iterator[tuple[str, torch.Tensor]], max_shard_bytes: int
) -> Iterator[list[tuple[str, torch.Tensor]]]:
    held: list[tuple[str, torch.Tensor]] = []
    size = 0
    for name, tensor in tensors:
        if held and size + tensor.nbytes > max_shard_bytes:
            yield held
            held, size = [], 0
        held.append((name, tensor))
        size += tensor.nbytes
    if held:
        yield held


def _write_shard(path: Path, shard: list[tuple[str, torch.Tensor]]) -> int:
    """Write one file; widest dtype first, so that every tensor is aligned for its dtype and never copied on load."""
    import torch

    ordered = sorted(shard, key=lambda item: -item[1].element_size())
    entries: dict[str, dict[str, Any]] = {}
    position = 0
    for name, tensor in ordered:
        stop = position + tensor.nbytes
        dtype = stored_dtype(tensor.dtype)
        entries[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [position, stop]}
        position = stop
    with path.open("wb") as handle:
        handle.write(encode_header(entries, {"format": "pt"}))
        for _, tensor in ordered:
            raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            handle.write(raw.numpy().data)
        handle.flush()
        os.fsync(handle.fileno())
    return position


def random_tensors(
    config: Model, *, seed: int, dtype: torch.dtype, scale: float = 1.0
) -> Iterator[tuple[str, torch.Tensor]]:
    """Random weights for an unquantised model, one tensor at a time, in model order.

    Each tensor depends on seed and name only, so that a change of layout leaves the others as they were. No norm
    weight or bias is zero: an implementation that drops one must be seen to differ.

    Args:
        config: the model; must be unquantised.
        seed: any integer.
        dtype: torch.bfloat16 or torch.float32; the router stays float32 as in the published files.
        scale: multiplies the linear weights, whose standard deviation is 1 / sqrt(inputs) otherwise. Large values
            drive activations into the clamps.

    Raises:
        UnsupportedFeature: the config is quantised.
        WrongDtype: another dtype.
    """
    import torch

    if config.quantization is not None:
        raise UnsupportedFeature(
            "random weights for a quantised config", expected="a config without quantization_config"
        )
    if dtype not in (torch.bfloat16, torch.float32):
        raise WrongDtype(f"random weights in {dtype}", expected="torch.bfloat16 or torch.float32")
    for name, decl in expected(config).items():
        digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        values = torch.randn(decl.shape, generator=generator, dtype=torch.float32)
        values = _shaped(name, decl, values, scale)
        yield name, values.to(torch.float32 if decl.group == "router" else dtype)


def _shaped(name: str, decl: TensorDecl, values: torch.Tensor, scale: float) -> torch.Tensor:
    if decl.norm:
        return values * 0.1 + 0.05
    if len(decl.shape) == 1:  # the one-dimensional weights left are LayerNorm's, which multiply by w itself
        return values * 0.1 + (1.0 if name.endswith(".weight") else 0.05)
    if name == "model.embed_tokens.weight":
        return values
    fan_in = math.prod(decl.shape[1:])
    return values * (scale / math.sqrt(fan_in))
