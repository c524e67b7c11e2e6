"""A low-rank adapter in PEFT's layout: `adapter_config.json` and `adapter_model.safetensors`.

Tensors are called `base_model.model.<module>.lora_A.weight` [r, in] and `.lora_B.weight` [out, r], with the module
names of the official checkpoint, with or without `language_model.`, or those of transformers. What is computed is

    y = W x + scale * B (A x),      scale = alpha / r, or alpha / sqrt(r)

A is used as it is stored; B is multiplied by the scale once, in float32, when it is read.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from m31.checkpoint.adapter_config import NAME, AdapterConfig, parse_adapter
from m31.checkpoint.encoding import units
from m31.checkpoint.header import Header, encode_header, printable, read_header
from m31.checkpoint.inventory import expected
from m31.checkpoint.lazy import LazyTensor, MappedFile, stored_dtype
from m31.checkpoint.naming import rename
from m31.checkpoint.validation import nearest
from m31.checkpoint.workfolder import file_hash, sync_folder, write_file
from m31.checkpoint.writer import check_destination
from m31.config import Model
from m31.config.jsonfile import read_object
from m31.config.loading import VISION_LANGUAGE
from m31.errors import CheckpointError, MissingTensor, NotACheckpoint, UnexpectedTensor, WrongDtype, WrongShape

if TYPE_CHECKING:
    import torch

TENSORS = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_DTYPES = ("F32", "BF16", "F16")
_TENSOR = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<part>[AB])\.weight")
_LINEAR = re.compile(
    r"lm_head|model\.layers\.\d+\.(?:"
    r"self_attn\.(?:q|k|v|o|index_q|index_k)_proj"
    r"|mlp\.(?:gate|up|down)_proj"
    r"|block_sparse_moe\.shared_experts\.(?:gate|up|down)_proj"
    r"|block_sparse_moe\.experts\.\d+\.w[123])"
)
_BASE = re.compile(r"\.(?:base_layer|embed_tokens|lm_head)\.weight$")
_COPIED = "it is a copy of the base's weights: save with PEFT's save_embedding_layers=False"
Shape = tuple[int, int]


@dataclass(frozen=True, slots=True)
class AdapterTensor:
    """A or B of a module as it is multiplied with: float32, B with the scale in it. A lazy tensor.

    Attributes:
        name: canonical name of the module, and `.lora_A.weight` or `.lora_B.weight`.
        source: the tensor in the file.
        factor: what its values are multiplied by.
    """

    name: str
    source: LazyTensor
    factor: float

    @property
    def shape(self) -> tuple[int, ...]:
        """[r, in] or [out, r], after any `slice`."""
        return self.source.shape

    @property
    def path(self) -> Path:
        """The file that holds it."""
        return self.source.path

    @property
    def dtype(self) -> torch.dtype:
        """torch.float32."""
        import torch

        return torch.float32

    @property
    def format(self) -> Literal["plain"]:
        """Always plain."""
        return "plain"

    def load(self) -> torch.Tensor:
        """The values, float32."""
        value = self.source.load().float()
        return value if self.factor == 1 else value * self.factor

    def parts(self) -> dict[str, AdapterTensor]:
        """Only itself, as `weight`."""
        return {"weight": self}

    def slice(self, dim: int, start: int, stop: int) -> AdapterTensor:
        """The part `start:stop` along `dim`."""
        return replace(self, source=self.source.slice(dim, start, stop))


@dataclass(frozen=True, slots=True)
class LowRank:
    """The adapter of one module.

    Attributes:
        module: canonical name, without `.weight`.
        a: [r, in].
        b: [out, r], times the scale.
    """

    module: str
    a: AdapterTensor
    b: AdapterTensor

    @property
    def rank(self) -> int:
        """r."""
        return self.a.shape[0]

    def delta(self, start: int, stop: int) -> torch.Tensor:
        """Rows `start:stop` of what is added to the weight, float64 [stop - start, in]."""
        return self.b.slice(0, start, stop).load().double() @ self.a.load().double()


@dataclass(frozen=True, slots=True)
class Adapter:
    """A validated adapter folder. Make one with `open`.

    Attributes:
        folder: the folder.
        config: its adapter_config.json.
        modules: canonical module name -> its low-rank pair, in model order.
        notes: what was read and has no part in what is computed.
    """

    folder: Path
    config: AdapterConfig
    modules: Mapping[str, LowRank]
    notes: tuple[str, ...]

    @classmethod
    def open(cls, folder: str | Path, model: Model) -> Adapter:
        """Read and check an adapter for a model; no tensor data are touched.

        Raises:
            NotACheckpoint: there is no adapter in the folder.
            ConfigError: adapter_config.json (`m31.checkpoint.adapter_config.parse_adapter`).
            UnexpectedTensor: a tensor of no linear layer of the model, or of one that `target_modules` leaves out.
            MissingTensor: a targeted module without its two tensors, or no target at all.
            WrongShape, WrongDtype, BadHeader, TruncatedShard: the tensors.
        """
        path = Path(folder)
        config, header = _require(path), read_header(path / TENSORS)
        linears = adaptable(model)
        where = str(header.path)
        found = _modules(header)
        spelt = _spelling(found, linears, model, where)
        wanted = {spelt(module): module for module in linears}
        for spelling in found:
            if not config.targets(spelling):
                raise UnexpectedTensor(
                    f"'{printable(spelling)}' has tensors and is no target",
                    where=where,
                    expected=f"modules that 'target_modules' of {NAME} names",
                )
        file = MappedFile(header.path, header.file_size)
        modules: dict[str, LowRank] = {}
        for spelling, module in wanted.items():
            if config.targets(spelling):
                (out, width), rank, scale = linears[module], config.rank(spelling), config.scale(spelling)
                a = _tensor(header, file, spelling, module, "A", (rank, width))
                b = _tensor(header, file, spelling, module, "B", (out, rank))
                modules[module] = LowRank(module, a, replace(b, factor=scale))
        if not modules:
            raise MissingTensor(
                f"'target_modules' of {NAME} names no linear layer of this model",
                where=str(path),
                expected=f"for example '{next(iter(wanted))}'",
            )
        return cls(path, config, modules, config.notes)

    def tensor(self, name: str) -> AdapterTensor | None:
        """A or B by `AdapterTensor.name`; None for any other name."""
        module, _, part = name.removesuffix(".weight").rpartition(".")
        found = self.modules.get(module)
        return {"lora_A": found.a, "lora_B": found.b}.get(part) if found is not None else None

    @property
    def digest(self) -> str:
        """Changes with every byte of the folder's two files."""
        hashes = [file_hash(self.folder / name) for name in (NAME, TENSORS)]
        return hashlib.sha256("".join(hashes).encode()).hexdigest()

    def __str__(self) -> str:
        ranks = sorted({pair.rank for pair in self.modules.values()})
        rank = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"
        return f"{self.folder}: {rank} in {len(self.modules):,} linear layers"


def adaptable(model: Model) -> dict[str, Shape]:
    """The linear layers that can have an adapter, in model order: canonical module name -> [out, in].

    Projections of attention, index branch, dense MLP, shared and routed experts, and the head. Not the embedding,
    which is a table, and not the router, which decides in float32 on what the base learned to tell apart.
    """
    found: dict[str, Shape] = {}
    for unit in units(expected(model)):
        module = unit.name.removesuffix(".weight")
        if _LINEAR.fullmatch(module):
            found[module] = (unit.shape[0], unit.shape[1])
    return found


def official_module(module: str, model: Model) -> str:
    """The name of a module in the official checkpoint of this architecture."""
    return f"language_model.{module}" if model.architecture == VISION_LANGUAGE else module


def _modules(header: Header) -> list[str]:
    """The modules that have tensors, as the file spells them."""
    found: dict[str, None] = {}
    for name in header.tensors:
        match = _TENSOR.fullmatch(name)
        if match is None:
            raise UnexpectedTensor(
                f"'{printable(name)}' is no tensor of a plain adapter",
                where=str(header.path),
                expected=f"{_PREFIX}<module>.lora_A.weight and .lora_B.weight",
                fix=_COPIED if _BASE.search(name) else None,
            )
        found[match["module"]] = None
    return list(found)


def _tensor(header: Header, file: MappedFile, spelling: str, module: str, part: str, shape: Shape) -> AdapterTensor:
    """A or B of a module, without its scale."""
    name, where = f"{_PREFIX}{spelling}.lora_{part}.weight", str(header.path)
    stored = header.tensors.get(name)
    if stored is None:
        raise MissingTensor(
            f"has no tensor '{name}'",
            where=where,
            expected=f"both tensors of every module that 'target_modules' of {NAME} names",
        )
    if stored.dtype not in _DTYPES:
        raise WrongDtype(f"'{name}' is {stored.dtype}", where=where, expected=" or ".join(_DTYPES))
    if stored.shape != shape:
        raise WrongShape(f"'{name}' is {list(stored.shape)}", where=where, expected=str(list(shape)))
    canonical = f"{module}.lora_{part}.weight"
    source = LazyTensor(name=canonical, shape=shape, stored_dtype=stored.dtype, offset=stored.start, file=file)
    return AdapterTensor(canonical, source, 1.0)


def _require(path: Path) -> AdapterConfig:
    """The configuration of a folder that has both files."""
    if not (path / NAME).is_file() or not (path / TENSORS).is_file():
        missing = NAME if not (path / NAME).is_file() else TENSORS
        pickled = missing == TENSORS and (path / "adapter_model.bin").exists()
        raise NotACheckpoint(
            f"has no {missing}",
            where=str(path),
            expected=f"a folder with {NAME} and {TENSORS}, as PEFT saves it",
            fix="save it again with safe_serialization: a .bin file can run code when it is read" if pickled else None,
        )
    where = str(path / NAME)
    return parse_adapter(read_object(path / NAME), where=where)


def _transformers(module: str) -> str:
    """A module's name in transformers' tree of the vision-language model."""
    name = re.sub(r"^model\.", "model.language_model.", module)
    return (
        name.replace(".index_q_", ".indexer.q_")
        .replace(".index_k_", ".indexer.k_")
        .replace(".block_sparse_moe.", ".mlp.")
    )


def _spelling(modules: list[str], linears: Mapping[str, Shape], model: Model, where: str) -> Callable[[str], str]:
    """How the folder spells canonical names: one way for all of its modules."""
    ways: tuple[Callable[[str], str], ...] = (
        lambda module: official_module(module, model),
        lambda module: module,
        lambda module: f"language_model.{module}",
        _transformers,
    )
    for spell in ways:
        if {spell(module) for module in linears}.issuperset(modules):
            return spell
    known = {spell(module) for spell in ways for module in linears}
    stranger = next((module for module in modules if module not in known), None)
    if stranger is None:
        raise UnexpectedTensor(
            f"'{printable(modules[0])}' and others are spelt in different ways",
            where=where,
            expected="the module names of one library for all tensors",
        )
    canonical = rename(f"{stranger}.weight").removesuffix(".weight")
    near = nearest(canonical, list(linears))
    raise UnexpectedTensor(
        f"'{printable(stranger)}' is no linear layer of this model that can have an adapter",
        where=where,
        expected="projections of attention, index branch, MLP and experts, or lm_head",
        fix=f"the nearest is '{near}'" if near else None,
    )


def write_adapter(
    folder: str | Path,
    config: AdapterConfig,
    tensors: Mapping[str, tuple[torch.Tensor, torch.Tensor]],
    *,
    model: Model,
    base: str,
) -> Adapter:
    """Write an adapter; the folder appears complete or not at all.

    Args:
        folder: destination; absent or empty.
        config: whose `target_modules` name exactly the modules of `tensors`, in their official spelling.
        tensors: canonical module name -> A [r, in] and B [out, r] without the scale; float32, bfloat16 or float16.
        model: the base's description.
        base: name of the base, written into adapter_config.json.

    Returns:
        The folder, opened again and thereby validated.

    Raises:
        CheckpointError: the destination is not empty or cannot be written, or the tensors are not what the model and
            the configuration ask for.
    """
    destination = Path(folder)
    check_destination(destination)
    named = {
        f"{_PREFIX}{official_module(module, model)}.lora_{part}.weight": tensor.detach().cpu().contiguous()
        for module, pair in tensors.items()
        for part, tensor in zip("AB", pair, strict=True)
    }
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=f".{destination.name}.writing-", dir=destination.parent))
    except OSError as exc:
        raise CheckpointError(f"cannot be created ({exc})", where=str(destination)) from exc
    try:
        write_file(staging / NAME, (json.dumps(config.to_json(base), indent=2) + "\n").encode())
        write_file(staging / TENSORS, b"".join(_file(named)))
        Adapter.open(staging, model)  # what could not be read back must not be left behind
        staging.chmod(0o755)
        os.rename(staging, destination)
        sync_folder(destination.parent)
    except OSError as exc:
        raise CheckpointError(
            f"cannot be written ({exc})", where=str(destination), fix="check space and permissions"
        ) from exc
    finally:
        if staging.exists():
            shutil.rmtree(staging)
    return Adapter.open(destination, model)


def _file(tensors: Mapping[str, torch.Tensor]) -> Iterator[bytes]:
    """The bytes of a safetensors file, widest dtype first, so that every tensor is aligned for its dtype."""
    import torch

    ordered = sorted(tensors.items(), key=lambda item: -item[1].element_size())
    entries, position = {}, 0
    for name, tensor in ordered:
        stop = position + tensor.nbytes
        entries[name] = {
            "dtype": stored_dtype(tensor.dtype),
            "shape": list(tensor.shape),
            "data_offsets": [position, stop],
        }
        position = stop
    yield encode_header(entries, {"format": "pt"})
    for _, tensor in ordered:
        yield tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
