"""Matrices that are read where they lie in the checkpoint's map."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from m31.errors import NonFiniteWeight, OpRefused
from m31.formats import mxfp8, nvfp4
from m31.formats.transforms import Loss
from m31.graph import OpInstance, Refusal
from m31.sdk import LazyTensor, StoredPart, stored_as
from m31_cpu.codecs import CODECS, DAMAGED, TABLE_ROW, Codec
from m31_cpu.held import refuse_nonfinite
from m31_cpu.isa import Isa


@dataclass(frozen=True)
class _Matrix:
    """One stored matrix: what keeps its bytes mapped."""

    codes: torch.Tensor  # bfloat16 or float32 [N, K], float8_e4m3fn [N, K], or uint8 [N, K/2]
    scale: torch.Tensor | None  # float8_e4m3fn [N, K/16] or uint8 [N, K/32]
    divisor: float  # global encode scale; 1 without one
    mapped: bool

    def decoded(self) -> torch.Tensor:
        """Its values: NVFP4 in float64, which holds E2M1 * E4M3 / G to its last place but one."""
        if self.scale is None:
            return self.codes
        if self.codes.dtype == torch.uint8:
            return nvfp4.decode(self.codes, self.scale, torch.ones(1), torch.float64) / self.divisor
        return mxfp8.decode(self.codes, self.scale)


class _Decoded(Mapping[str, torch.Tensor]):
    """Slot -> values, decoded on access and not kept."""

    def __init__(self, matrices: Mapping[str, _Matrix], vectors: Mapping[str, torch.Tensor]) -> None:
        self._matrices, self._vectors = matrices, vectors

    def __getitem__(self, slot: str) -> torch.Tensor:
        return self._vectors[slot] if slot in self._vectors else self._matrices[slot].decoded()

    def __iter__(self) -> Iterator[str]:
        yield from self._matrices
        yield from self._vectors

    def __len__(self) -> int:
        return len(self._matrices) + len(self._vectors)


@dataclass(frozen=True, eq=False)
class Stored:
    """The weights of an op, as the checkpoint stores them; vectors beside matrices are held in float32.

    Attributes:
        table: int64 [matrices, 6] for kernels, see `m31_cpu.codecs.TABLE_ROW`; matrices in the order of the slots.
        vectors: slot -> float32.
        in_place: slots with bytes that are read in the file; what is misaligned there is held as a copy.
    """

    table: NDArray[np.int64]
    vectors: Mapping[str, torch.Tensor]
    in_place: frozenset[str]
    layout_id: str
    losses: Mapping[str, Loss] = field(default_factory=dict)
    _flags: ctypes.Array[ctypes.c_char] = field(default_factory=lambda: ctypes.create_string_buffer(0), repr=False)
    _matrices: Mapping[str, _Matrix] = field(default_factory=dict, repr=False)
    _sources: Mapping[str, LazyTensor] = field(default_factory=dict, repr=False)
    _sound: set[str] = field(default_factory=set, repr=False)  # looked at, and nothing was found

    def dequantise(self) -> Mapping[str, torch.Tensor]:
        """See `WeightHandle.dequantise`: decoded on each access. All experts of a published layer would be 29 GB."""
        return _Decoded(self._matrices, self.vectors)

    def look(self) -> None:
        """After kernels have run: whether one of them found something wrong with a weight.

        Raises:
            NonFiniteWeight: a weight that was needed is damaged; names the tensor.
        """
        if self._flags.raw.count(0) != len(self._flags):
            self._refuse()

    def forget(self) -> None:
        """Drop what kernels have found: their step is refused for another reason, and the next one begins anew."""
        ctypes.memset(self._flags, 0, len(self._flags))

    def _refuse(self) -> None:
        flags = np.frombuffer(memoryview(self._flags), np.int64)
        found = {slot: int(flag) for slot, flag in zip(self._matrices, flags, strict=True) if flag}
        flags[:] = 0
        for slot, flag in found.items():
            if slot in self._sound and not flag & DAMAGED:
                continue  # a sum that is not finite, and its weights are: an input was not
            source = self._sources[slot]
            refuse_nonfinite(source.load(), source.name)  # `load` refuses block scales itself, with their place
            if flag & DAMAGED:
                raise NonFiniteWeight(
                    "a kernel read a damaged weight that is whole now",
                    where=f"tensor '{source.name}'",
                    fix="do not modify a checkpoint while it is in use; open it again",
                )
            self._sound.add(slot)


def stored(slots: Mapping[str, LazyTensor], isa: Isa) -> Stored:
    """The handle; reads vectors and global scales and nothing else.

    Args:
        slots: as `Session.prepare` gets them.
        isa: what kernels are compiled for.

    Raises:
        OpRefused: a matrix is stored in a way that kernels do not read.
        NonFiniteWeight: a vector is not finite, or a global scale not a finite number above zero.
    """
    matrices: dict[str, _Matrix] = {}
    vectors: dict[str, torch.Tensor] = {}
    codecs: dict[str, Codec] = {}
    for slot, tensor in slots.items():
        if len(tensor.shape) != 2:
            value = tensor.load()
            refuse_nonfinite(value, tensor.name)
            vectors[slot] = value.to(torch.float32, copy=True).contiguous()
            continue
        how = stored_as(tensor)
        if how not in CODECS:
            raise OpRefused(f"'{tensor.name}' is stored as {how}", where="backend cpu", expected=" or ".join(CODECS))
        matrices[slot], codecs[slot] = _matrix(tensor), CODECS[how]
    table = np.zeros((len(matrices), TABLE_ROW // 8), np.int64)
    flags = ctypes.create_string_buffer(8 * len(matrices))
    for at, (slot, matrix) in enumerate(matrices.items()):
        table[at, :2] = matrix.codes.data_ptr(), matrix.codes.stride(0) * matrix.codes.element_size()
        if matrix.scale is not None:
            table[at, 2:4] = matrix.scale.data_ptr(), matrix.scale.stride(0)
        table[at, 4:5].view(np.float32)[0] = np.float32(2.0 ** codecs[slot].shift(isa) / matrix.divisor)
        table[at, 5] = ctypes.addressof(flags) + 8 * at
    names = ",".join(dict.fromkeys(codec.name for codec in codecs.values()))
    return Stored(
        table=table,
        vectors=vectors,
        in_place=frozenset(slot for slot, matrix in matrices.items() if matrix.mapped),
        layout_id=f"m31-cpu:v2:{names}:as-stored",
        _flags=flags,
        _matrices=matrices,
        _sources={slot: slots[slot] for slot in matrices},
    )


def copied_bytes(slots: Mapping[str, LazyTensor]) -> int:
    """Bytes that holding these allocates: vectors, and what lies misaligned in its file."""
    total = 0
    for tensor in slots.values():
        if len(tensor.shape) != 2:
            total += 4 * int(np.prod(tensor.shape))
            continue
        parts = [
            _loaded(part) for role, part in tensor.parts().items() if role in ("weight", "packed", "codes", "scale")
        ]
        total += sum(value.numel() * value.element_size() for value, mapped in parts if not mapped)
    return total


def codec_of(op: OpInstance, *slots: str) -> Codec | Refusal:
    """How some slots of an instance are stored, all in the same way."""
    ways = {op.slots[slot].stored for slot in slots}
    if len(ways) != 1:
        names = " and ".join(dict.fromkeys(slot.partition(".")[0] for slot in slots))
        return Refusal(f"{names} are stored in several ways: {', '.join(sorted(map(str, ways)))}")
    (way,) = ways
    if way is None:
        return Refusal("traced without a checkpoint: how its weights are stored is not known")
    codec = CODECS.get(way)
    if codec is None:
        return Refusal(f"weights stored as {way} are not read in place, only {', '.join(CODECS)}")
    if codec.group and any(op.slots[slot].shape[1] % codec.group for slot in slots):
        return Refusal(f"{way} rows of {op.slots[slots[0]].shape[1]} are not a multiple of {codec.group}")
    return codec


def _matrix(tensor: LazyTensor) -> _Matrix:
    parts = tensor.parts()
    if tensor.format == "plain":
        codes, mapped = _held(parts["weight"])
        return _Matrix(codes, None, 1.0, mapped)
    codes, codes_mapped = _held(parts["packed" if tensor.format == "nvfp4" else "codes"])
    scale, scale_mapped = _held(parts["scale"])
    divisor = float(parts["global_scale"].load()) if tensor.format == "nvfp4" else 1.0
    return _Matrix(codes, scale, divisor, codes_mapped or scale_mapped)


def _held(part: StoredPart) -> tuple[torch.Tensor, bool]:
    """The stored tensor as it is kept, and whether that is the file's own bytes. Else it is a copy of our own: whose
    the loaded one is, and what else it keeps alive, nobody says."""
    value, mapped = _loaded(part)
    return (value, True) if mapped else (value.clone(memory_format=torch.contiguous_format), False)


def _loaded(part: StoredPart) -> tuple[torch.Tensor, bool]:
    """The stored tensor, and whether a kernel can read it where it lies in the file: mapped bytes have one address,
    copies have two. Columns must lie side by side; rows may have gaps, as in a part of a tensor."""
    value, again = part.load(), part.load()
    mapped = value.numel() > 0 and value.data_ptr() == again.data_ptr()
    return value, mapped and (value.dim() != 2 or value.stride(1) == 1 or value.shape[1] == 1)
