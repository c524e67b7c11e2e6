"""Tensors that stay in their file until they are asked for. torch is imported on the first load, not before."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from m31.checkpoint.inventory import ITEMSIZE, numel
from m31.errors import CheckpointError, TruncatedShard

if TYPE_CHECKING:
    import torch

_TORCH_NAMES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "U32": "uint32",
    "I32": "int32",
    "U64": "uint64",
    "I64": "int64",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
}


def torch_dtype(stored: str) -> torch.dtype:
    """The torch dtype of a safetensors dtype name."""
    import torch

    dtype: torch.dtype = getattr(torch, _TORCH_NAMES[stored])
    return dtype


def stored_dtype(dtype: torch.dtype) -> str:
    """The safetensors dtype name of a torch dtype.

    Raises:
        CheckpointError: safetensors cannot hold it.
    """
    name = str(dtype).removeprefix("torch.")
    for stored, known in _TORCH_NAMES.items():
        if known == name:
            return stored
    raise CheckpointError(f"dtype {name} has no safetensors name", expected=", ".join(_TORCH_NAMES.values()))


class MappedFile:
    """A private (copy-on-write) map of a whole file, made on first use and shared by its tensors.

    Writing into a loaded tensor never reaches the file. `release` drops this object's hold; the map itself lives
    as long as any tensor made from it.
    """

    def __init__(self, path: Path, size: int) -> None:
        self.path, self.size = path, size
        self._storage: torch.UntypedStorage | None = None

    def storage(self) -> torch.UntypedStorage:
        """The bytes of the file.

        Raises:
            TruncatedShard: the file's size changed since its header was read.
            CheckpointError: the file cannot be opened any more.
        """
        if self._storage is None:
            import torch

            try:
                now = os.stat(self.path).st_size
                if now != self.size:
                    raise TruncatedShard(
                        f"had {self.size:,} bytes when it was opened and has {now:,} now",
                        where=str(self.path),
                        fix="do not modify a checkpoint while it is in use; open it again",
                    )
                mapped = torch.UntypedStorage.from_file(str(self.path), shared=False, nbytes=self.size)
            except (OSError, RuntimeError) as exc:
                raise CheckpointError(f"cannot be mapped ({exc})", where=str(self.path)) from exc
            assert isinstance(mapped, torch.UntypedStorage)  # torch's annotation is wider than what it returns
            self._storage = mapped
        return self._storage

    def release(self) -> None:
        """Forget the map; the next load makes a new one."""
        self._storage = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LazyTensor:
    """A tensor in a file.

    Attributes:
        name: canonical name.
        shape: its shape, after any `slice`.
        stored_dtype: safetensors dtype name, such as `BF16`.
        offset: byte position of its first element in the file.
        file: the map that it shares with its neighbours.
    """

    name: str
    shape: tuple[int, ...]
    stored_dtype: str
    offset: int
    file: MappedFile = field(repr=False)
    _base: tuple[int, ...] | None = None  # shape in the file, where a slice along an inner dim differs from it
    _narrow: tuple[tuple[int, int, int], ...] = ()

    @property
    def format(self) -> Literal["plain"]:
        """Distinguishes it from `m31.checkpoint.QuantizedTensor`, which has the same interface."""
        return "plain"

    def parts(self) -> dict[str, LazyTensor]:
        """The stored tensors by role: only itself, as `weight`."""
        return {"weight": self}

    @property
    def path(self) -> Path:
        """The file that holds it."""
        return self.file.path

    @property
    def dtype(self) -> torch.dtype:
        """Its torch dtype."""
        return torch_dtype(self.stored_dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of the selected elements."""
        return numel(self.shape) * ITEMSIZE[self.stored_dtype]

    def load(self) -> torch.Tensor:
        """The tensor: a zero-copy view of the private map, to be treated as read-only.

        Data that the writer left misaligned for its dtype are copied instead.

        Raises:
            TruncatedShard, CheckpointError: the file changed or vanished since it was opened.
        """
        import torch

        dtype, base = self.dtype, self.shape if self._base is None else self._base
        item = ITEMSIZE[self.stored_dtype]
        if numel(base) == 0:
            tensor = torch.empty(base, dtype=dtype)
        elif self.offset % item == 0:
            strides = [numel(base[dim + 1 :]) for dim in range(len(base))]
            empty = torch.empty(0, dtype=dtype)
            tensor = empty.set_(self.file.storage(), self.offset // item, base, strides)
        else:
            raw = torch.empty(0, dtype=torch.uint8)
            size = numel(base) * item
            raw = raw.set_(self.file.storage(), self.offset, (size,), (1,))
            tensor = raw.clone().view(dtype).reshape(base)
        for dim, start, length in self._narrow:
            tensor = tensor.narrow(dim, start, length)
        return tensor

    def slice(self, dim: int, start: int, stop: int) -> LazyTensor:
        """The part `start:stop` along `dim`, still in the file.

        A slice of the first dimension reads nothing else; one of another dimension loads as a strided view.

        Raises:
            CheckpointError: outside the shape.
        """
        if not 0 <= dim < len(self.shape) or not 0 <= start <= stop <= self.shape[dim]:
            raise CheckpointError(f"no slice {start}:{stop} of dimension {dim} in {list(self.shape)}", where=self.name)
        shape = (*self.shape[:dim], stop - start, *self.shape[dim + 1 :])
        if dim == 0 and not self._narrow:
            row = numel(self.shape[1:]) * ITEMSIZE[self.stored_dtype]
            return replace(self, shape=shape, offset=self.offset + start * row)
        base = self.shape if self._base is None else self._base
        return replace(self, shape=shape, _base=base, _narrow=(*self._narrow, (dim, start, stop - start)))
