"""`Checkpoint`: a folder, checked completely, whose weights stay on disk until they are loaded."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path

from m31.checkpoint.draft import FOLDER, expected_draft, map_draft, require_fit
from m31.checkpoint.folder import read_files, require_folder
from m31.checkpoint.inventory import ITEMSIZE, TensorDecl, expected, numel
from m31.checkpoint.lazy import LazyTensor, MappedFile
from m31.checkpoint.logical import GlobalScale, LogicalTensor, QuantizedTensor, bytes_view
from m31.checkpoint.validation import Placed, map_names, nearest, validate
from m31.config import Dialect, Draft, Model, load
from m31.config.draft import load_draft
from m31.errors import MissingTensor


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Keep the garbage collector out while 89,632 headers become objects, none of which is garbage.

    It would walk all of them again and again, the more so the more checkpoints are open: a third of the time.
    """
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


class TensorFolder:
    """Validated tensors of one folder.

    Attributes:
        folder: the folder.
        declared: canonical stored name -> what the tensor is; as realised by this folder.
        names: canonical logical names in model order. Each belongs to a weight of the model; codes and scales of a
            quantised one share it.
        files: the shards that are read.
        notes: oddities that are no errors: ignored files and tensors.
        total_bytes: bytes of all declared tensors.
    """

    def __init__(
        self,
        *,
        folder: Path,
        placed: Mapping[str, Placed],
        declared: Mapping[str, TensorDecl],
        files: tuple[MappedFile, ...],
        notes: tuple[str, ...],
        inverse_scales: bool,
    ) -> None:
        self.folder, self.declared, self.files, self.notes = folder, declared, files, notes
        self._placed, self._maps, self._inverse = placed, {file.path: file for file in files}, inverse_scales
        self.names = tuple(logical_names(declared))
        self.total_bytes = sum(numel(p.shape) * ITEMSIZE[p.stored.dtype] for p in map(placed.__getitem__, declared))

    def stored(self, name: str) -> LazyTensor:
        """A tensor as it lies in its file, by its canonical stored name, such as `....weight_packed`.

        Raises:
            MissingTensor: there is none.
        """
        place = self._placed.get(name)
        if place is None or name not in self.declared:
            raise self._missing(name)
        return LazyTensor(
            name=name,
            shape=place.shape,
            stored_dtype=place.stored.dtype,
            offset=place.start,
            file=self._maps[place.stored.path],
        )

    def tensor(self, name: str) -> LogicalTensor:
        """The weight of a canonical logical name; plain, MXFP8 and NVFP4 alike.

        Raises:
            MissingTensor: there is none.
        """
        decl = self.declared.get(name)
        if decl is not None and decl.storage == "plain":
            return self.stored(name)
        if decl is not None and decl.storage == "fp8":
            codes, scale = self.stored(name), bytes_view(self.stored(f"{name}_scale_inv"))
            return QuantizedTensor(
                name=name, shape=codes.shape, format="mxfp8", _parts=(("codes", codes), ("scale", scale))
            )
        if decl is not None or f"{name}_packed" not in self.declared:
            raise self._missing(name)
        packed, stem = self.stored(f"{name}_packed"), name.removesuffix("weight")
        return QuantizedTensor(
            name=name,
            shape=(packed.shape[0], packed.shape[1] * 2),
            format="nvfp4",
            _parts=(
                ("packed", packed),
                ("scale", self.stored(f"{name}_scale")),
                ("global_scale", GlobalScale(stored=self.stored(f"{name}_global_scale"), inverse=self._inverse)),
                (
                    "input_global_scale",
                    GlobalScale(stored=self.stored(f"{stem}input_global_scale"), inverse=self._inverse),
                ),
            ),
        )

    def _missing(self, name: str) -> MissingTensor:
        near = nearest(name, list(self.names))
        part = name in self.declared
        return MissingTensor(
            f"has no weight '{name}'" if part else f"has no tensor '{name}'",
            where=str(self.folder),
            fix="it is a part of a quantised weight: use parts() of that"
            if part
            else f"did you mean '{near}'?"
            if near
            else "names are canonical: without 'language_model.'",
        )

    def release(self) -> None:
        """Drop the maps of all files; tensors that were loaded stay valid, the next load maps anew."""
        for file in self.files:
            file.release()


def logical_names(declared: Mapping[str, TensorDecl]) -> Iterator[str]:
    """The logical names in an inventory, in its order."""
    for name, decl in declared.items():
        if decl.storage in ("plain", "fp8"):
            yield name
        elif decl.storage == "fp4_packed":
            yield name.removesuffix("_packed")


class DraftCheckpoint(TensorFolder):
    """The `dspark` folder of a checkpoint, MODEL.md §4.3. Canonical names begin with `dspark.`.

    Attributes:
        config: its typed config.json.
    """

    def __init__(self, config: Draft, *, folder: Path, target: Model) -> None:
        where = str(folder)
        require_fit(config, target, where=where)
        stored = read_files(folder)
        placed, declared, notes = map_draft(stored.tensors, expected_draft(config), where=where)
        files = tuple(MappedFile(header.path, header.file_size) for header in stored.headers)
        self.config = config
        super().__init__(
            folder=folder,
            placed=placed,
            declared=declared,
            files=files,
            notes=(*stored.notes, *notes),
            inverse_scales=False,
        )


class Checkpoint(TensorFolder):
    """A validated checkpoint folder. Make one with `open`.

    Attributes (beside those of `TensorFolder`):
        config: its typed config.json.
        dialect: spelling of the stored tensor names. It may differ from `config.dialect`: transformers saves the
            vision-language model with official tensor names beside its own config.
    """

    def __init__(
        self,
        *,
        folder: Path,
        config: Model,
        dialect: Dialect,
        placed: Mapping[str, Placed],
        declared: Mapping[str, TensorDecl],
        files: tuple[MappedFile, ...],
        notes: tuple[str, ...],
    ) -> None:
        self.config, self.dialect = config, dialect
        inverse = config.quantization is not None and config.quantization.dialect == "modelopt"
        super().__init__(
            folder=folder, placed=placed, declared=declared, files=files, notes=notes, inverse_scales=inverse
        )

    @classmethod
    def open(cls, folder: str | Path) -> Checkpoint:
        """Read config.json and every header, map names and validate; no tensor data are touched.

        Raises:
            NotACheckpoint, ConfigError, IndexMismatch, BadHeader, TruncatedShard, UnexpectedTensor, MissingTensor,
            DuplicateTensor, WrongDtype, WrongShape: each says which file or tensor is at fault.
        """
        path = Path(folder)
        require_folder(path)
        config = load(path)
        with _collector_paused():
            stored = read_files(path)
            inventory = expected(config)
            mapped = map_names(stored.tensors, inventory, config)
            declared, notes = validate(mapped, inventory, config, where=str(path))
            return cls(
                folder=path,
                config=config,
                dialect=mapped.dialect,
                placed=mapped.placed,
                declared=declared,
                files=tuple(MappedFile(header.path, header.file_size) for header in stored.headers),
                notes=(*stored.notes, *mapped.notes, *notes),
            )

    @cached_property
    def draft(self) -> DraftCheckpoint | None:
        """The draft head in `dspark/`, or None where there is no such folder.

        It is read on first use, so that a target runs alone beside a draft that does not.

        Raises:
            NotACheckpoint, ConfigError, CheckpointError: as `open`, for that folder; or it was made for another target.
        """
        folder = self.folder / FOLDER
        if not folder.is_dir():
            return None
        require_folder(folder)
        return DraftCheckpoint(load_draft(folder), folder=folder, target=self.config)
