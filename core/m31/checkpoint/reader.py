"""`Checkpoint`: a folder, checked completely, whose weights stay on disk until they are loaded."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from m31.checkpoint.folder import read_files, require_folder
from m31.checkpoint.inventory import ITEMSIZE, TensorDecl, expected, numel
from m31.checkpoint.lazy import LazyTensor, MappedFile
from m31.checkpoint.validation import Placed, map_names, nearest, validate
from m31.config import Dialect, Model, load
from m31.errors import MissingTensor, UnsupportedFeature


class Checkpoint:
    """A validated checkpoint folder. Make one with `open`.

    Attributes:
        folder: the folder.
        config: its typed config.json.
        dialect: spelling of the stored tensor names. It may differ from `config.dialect`: transformers saves the
            vision-language model with official tensor names beside its own config.
        names: canonical tensor names in model order.
        declared: canonical name -> what the tensor is; as realised by this checkpoint.
        notes: oddities that are no errors: ignored files and tensors.
        files: the shards that are read.
        total_bytes: bytes of all named tensors.
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
        self.folder, self.config, self.dialect = folder, config, dialect
        self.declared, self.files, self.notes = declared, files, notes
        self._placed, self._maps = placed, {file.path: file for file in files}
        self.names = tuple(declared)
        self.total_bytes = sum(numel(p.shape) * ITEMSIZE[p.stored.dtype] for p in map(placed.__getitem__, declared))

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

    def tensor(self, name: str) -> LazyTensor:
        """The tensor of a canonical name.

        Raises:
            MissingTensor: there is none.
        """
        place = self._placed.get(name)
        if place is None:
            near = nearest(name, self.declared)
            raise MissingTensor(
                f"has no tensor '{name}'",
                where=str(self.folder),
                fix=f"did you mean '{near}'?" if near else "names are canonical: without 'language_model.'",
            )
        return LazyTensor(
            name=name,
            shape=place.shape,
            stored_dtype=place.stored.dtype,
            offset=place.start,
            file=self._maps[place.stored.path],
        )

    def require_plain(self) -> None:
        """Refuse a quantised checkpoint.

        Raises:
            UnsupportedFeature: config.json declares MXFP8 or NVFP4 weights.
        """
        quantization = self.config.quantization
        if quantization is not None:
            raise UnsupportedFeature(
                f"holds {quantization.linears} linears and {quantization.experts} experts",
                where=str(self.folder),
                expected="BF16 or F32 weights: this version of m31 loads unquantised checkpoints only",
                fix="`m31 inspect` works; to run, use a BF16 checkpoint",
            )

    def release(self) -> None:
        """Drop the maps of all files; tensors that were loaded stay valid, the next load maps anew."""
        for file in self.files:
            file.release()
