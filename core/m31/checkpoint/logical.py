"""Weights as the model sees them: one object for codes and scales, whatever the format on disk (BUG-37, BUG-43).

Decoding, MODEL.md §3.1 and §3.2:

    mxfp8   value = e4m3(code) * 2^(scale - 127)
    nvfp4   value = e2m1(code) * e4m3(scale) / G

ModelOpt stores 1/G. Its scale is turned into `G = 1 / stored`, rounded once to fp32, when it is read, and everything
that follows divides by that G: reference, backends and converted files then agree bit for bit with each other. Against
a reader that multiplies by the stored scale the values differ by a unit in the last place at most (BUG-44).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from m31.checkpoint.inventory import ITEMSIZE, MX_BLOCK, NV_GROUP, numel
from m31.checkpoint.lazy import LazyTensor
from m31.errors import CheckpointError, NonFiniteWeight
from m31.formats.scales import check_scale

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class GlobalScale:
    """An NVFP4 global scale in the encode convention, as one fp32 value of shape [1], whatever is stored.

    Attributes:
        stored: the tensor in the file, [1] or a scalar (MODEL.md §10.7).
        inverse: the file holds the decode scale, so `load` returns its reciprocal.
    """

    stored: LazyTensor
    inverse: bool

    @property
    def name(self) -> str:
        """Canonical name."""
        return self.stored.name

    @property
    def shape(self) -> tuple[int, ...]:
        """Always (1,)."""
        return (1,)

    @property
    def stored_dtype(self) -> str:
        """`F32`."""
        return self.stored.stored_dtype

    @property
    def nbytes(self) -> int:
        """4."""
        return self.stored.nbytes

    @property
    def path(self) -> Path:
        """The file that holds it."""
        return self.stored.path

    @property
    def dtype(self) -> torch.dtype:
        """torch.float32."""
        return self.stored.dtype

    def load(self) -> torch.Tensor:
        """The encode scale, float32 [1].

        Raises:
            NonFiniteWeight: it, or its reciprocal, is not a finite number above zero.
            TruncatedShard, CheckpointError: the file changed or vanished since it was opened.
        """
        from m31.formats import nvfp4

        value = self.stored.load().reshape(1)
        scale = 1.0 / value if self.inverse else value
        if not nvfp4.divisible(value) or not nvfp4.divisible(scale):
            raise NonFiniteWeight(
                f"'{self.name}' holds {float(value)}",
                where=str(self.path),
                expected="a finite scale above zero whose reciprocal is finite as well",
                fix="the file is damaged: fetch it again",
            )
        return scale


Part = LazyTensor | GlobalScale


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedTensor:
    """A quantised weight [out, in] in its file(s). It loads as float32; `parts` gives what is stored.

    Attributes:
        name: canonical logical name, ending in `.weight`.
        shape: logical shape, after any `slice`.
        format: `mxfp8` or `nvfp4`.
    """

    name: str
    shape: tuple[int, ...]
    format: Literal["mxfp8", "nvfp4"]
    _parts: tuple[tuple[str, Part], ...]

    @property
    def dtype(self) -> torch.dtype:
        """torch.float32, the dtype of `load`."""
        import torch

        return torch.float32

    @property
    def stored_dtype(self) -> str:
        """The safetensors dtype of the codes: `F8_E4M3`, or `U8` for packed E2M1."""
        return self._parts[0][1].stored_dtype

    @property
    def nbytes(self) -> int:
        """Stored bytes of all parts."""
        return sum(part.nbytes for _, part in self._parts)

    @property
    def path(self) -> Path:
        """The file that holds the codes."""
        return self._parts[0][1].path

    def parts(self) -> dict[str, Part]:
        """The stored tensors by role, for a backend that reads them in place.

        mxfp8: `codes` e4m3 [out, in], `scale` uint8 E8M0 [out, in/32].
        nvfp4: `packed` uint8 [out, in/2], `scale` e4m3 [out, in/16], `global_scale` and `input_global_scale`, encode
        scales, float32 [1].
        """
        return dict(self._parts)

    def load(self) -> torch.Tensor:
        """The decoded weight, float32, in memory of its own.

        Raises:
            NonFiniteWeight: the global scale cannot be divided by.
            DamagedScale: a block scale is NaN or has a sign.
            TruncatedShard, CheckpointError: a file changed or vanished since it was opened.
        """
        import torch

        from m31.formats import mxfp8, nvfp4

        parts = dict(self._parts)
        stored = parts["scale"]
        assert isinstance(stored, LazyTensor)
        scale = stored.load()
        check_scale(stored, scale)
        if self.format == "mxfp8":
            return mxfp8.decode(parts["codes"].load(), scale, torch.float32)
        overall = parts["global_scale"].load()
        return nvfp4.decode(parts["packed"].load(), scale, overall, torch.float32)

    def slice(self, dim: int, start: int, stop: int) -> QuantizedTensor:
        """The part `start:stop` along a logical `dim`: codes and scales are cut together (BUG-37).

        Raises:
            CheckpointError: outside the shape, or a cut of the inputs that divides a block.
        """
        if not 0 <= dim < len(self.shape) or not 0 <= start <= stop <= self.shape[dim]:
            raise CheckpointError(f"no slice {start}:{stop} of dimension {dim} in {list(self.shape)}", where=self.name)
        block = MX_BLOCK if self.format == "mxfp8" else NV_GROUP
        if dim == 1 and (start % block or stop % block):
            raise CheckpointError(
                f"slice {start}:{stop} of the inputs cuts a block",
                where=self.name,
                expected=f"multiples of {block}, the block of {self.format}",
            )
        cut: list[tuple[str, Part]] = []
        for role, part in self._parts:
            if isinstance(part, GlobalScale):
                cut.append((role, part))
                continue
            per = {"codes": 1, "packed": 2, "scale": block}[role] if dim == 1 else 1  # logical inputs per element
            cut.append((role, part.slice(dim, start // per, stop // per)))
        shape = (*self.shape[:dim], stop - start, *self.shape[dim + 1 :])
        return replace(self, shape=shape, _parts=tuple(cut))


LogicalTensor = LazyTensor | QuantizedTensor


def bytes_view(scale: LazyTensor) -> LazyTensor:
    """An E8M0 scale as the uint8 that it is, also where the file calls it F8_E8M0."""
    return replace(scale, stored_dtype="U8")


def element_count(tensor: LogicalTensor) -> int:
    """Stored elements without scales, as a hub counts them: a byte of packed E2M1 counts once."""
    if isinstance(tensor, LazyTensor):
        return numel(tensor.shape)
    codes = tensor.parts()["codes" if tensor.format == "mxfp8" else "packed"]
    return codes.nbytes // ITEMSIZE[codes.stored_dtype]
