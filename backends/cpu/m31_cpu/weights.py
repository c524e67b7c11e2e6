"""Expert weights that are read where they lie in the checkpoint's map."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from m31.errors import NonFiniteWeight, OpRefused
from m31.formats import nvfp4
from m31.formats.transforms import Loss
from m31.sdk import LazyTensor, StoredPart, stored_as
from m31_cpu.codegen import Stored
from m31_cpu.kernels import WEIGHT_FIELDS

MATRICES = ("w1", "w3", "w2")  # in the order of a table's rows


@dataclass(frozen=True)
class _Matrix:
    """One stored matrix: what keeps its bytes mapped, and where they are."""

    codes: torch.Tensor  # bfloat16 [N, K], or uint8 [N, K/2]
    scale: torch.Tensor | None  # e4m3 [N, K/16]
    divisor: float  # global scale; 1 without one
    mapped: bool

    def row(self) -> tuple[int, int, int, int]:
        """The row of a weight table, see `kernels.WEIGHT_FIELDS`."""
        per_row = self.codes.stride(0) * self.codes.element_size()
        scale = (0, 0) if self.scale is None else (self.scale.data_ptr(), self.scale.stride(0))
        return (self.codes.data_ptr(), per_row, *scale)


class _Decoded(Mapping[str, torch.Tensor]):
    """Slot -> values, decoded on access and not kept."""

    def __init__(self, matrices: Mapping[str, _Matrix]) -> None:
        self._matrices = matrices

    def __getitem__(self, slot: str) -> torch.Tensor:
        matrix = self._matrices[slot]
        if matrix.scale is None:
            return matrix.codes
        unscaled = nvfp4.decode(matrix.codes, matrix.scale, torch.ones(1), torch.float64)
        return unscaled / matrix.divisor

    def __iter__(self) -> Iterator[str]:
        return iter(self._matrices)

    def __len__(self) -> int:
        return len(self._matrices)


@dataclass(frozen=True, eq=False)
class ExpertWeights:
    """The experts of one layer, as the checkpoint stores them.

    Attributes:
        stored: how w1 and w3 are stored, and how w2 is.
        table: [3 * experts, WEIGHT_FIELDS] int64, addresses for the kernels.
        divisors: [3 * experts] float32, global encode scales; 1 for bfloat16.
        in_place: slots with bytes that are read in the file; what was misaligned there is held as a copy.
    """

    stored: tuple[Stored, Stored]
    table: NDArray[np.int64]
    divisors: NDArray[np.float32]
    in_place: frozenset[str]
    layout_id: str
    losses: Mapping[str, Loss] = field(default_factory=dict)
    _matrices: Mapping[str, _Matrix] = field(default_factory=dict, repr=False)
    _sources: Mapping[str, LazyTensor] = field(default_factory=dict, repr=False)

    @property
    def experts(self) -> int:
        """How many."""
        return len(self.divisors) // len(MATRICES)

    def dequantise(self) -> Mapping[str, torch.Tensor]:
        """See `WeightHandle.dequantise`: decoded on each access, NVFP4 in float64, which holds E2M1 * E4M3 / G to its
        last place but one. All experts of a published layer would be 29 GB."""
        return _Decoded(self._matrices)

    def refuse_damage(self, chosen: NDArray[np.int64]) -> None:
        """Say what is wrong with a weight that a kernel found damaged.

        Raises:
            NonFiniteWeight: always; names the tensor.
        """
        for expert in chosen.tolist():
            for matrix in MATRICES:
                source = self._sources[f"{matrix}.{expert}"]
                value = source.load()  # refuses damaged block scales itself, with their place
                bad = value.isfinite().logical_not().flatten().nonzero()
                if len(bad):
                    first = int(bad[0])
                    raise NonFiniteWeight(
                        f"{len(bad)} of {value.numel()} values are NaN or infinite, the first at flat index {first}",
                        where=f"tensor '{source.name}'",
                        fix="the checkpoint is damaged: fetch it again, or run `m31 inspect --deep` for the whole list",
                    )
        raise NonFiniteWeight(
            "a kernel read a damaged weight that is whole now",
            where=f"experts {chosen.tolist()}",
            fix="do not modify a checkpoint while it is in use; open it again",
        )


def expert_weights(slots: Mapping[str, LazyTensor], stored: tuple[Stored, Stored]) -> ExpertWeights:
    """The handle; reads global scales and nothing else.

    Args:
        slots: w1, w3 and w2 of every expert, stored as the kernel was bound for.

    Raises:
        OpRefused: a slot is stored in another way than `stored` says.
        NonFiniteWeight: a global scale is not a finite number above zero.
    """
    count = len(slots) // len(MATRICES)
    matrices: dict[str, _Matrix] = {}
    table = np.empty((len(slots), WEIGHT_FIELDS), np.int64)
    divisors = np.empty(len(slots), np.float32)
    for expert in range(count):
        for at, name in enumerate(MATRICES):
            slot, wanted = f"{name}.{expert}", stored[name == "w2"]
            found = stored_as(slots[slot])
            if found != wanted:
                raise OpRefused(f"'{slots[slot].name}' is stored as {found}", where="op experts", expected=wanted)
            matrix = matrices[slot] = _matrix(slots[slot])
            row = expert * len(MATRICES) + at
            table[row], divisors[row] = matrix.row(), matrix.divisor
    return ExpertWeights(
        stored=stored,
        table=table,
        divisors=divisors,
        in_place=frozenset(slot for slot, matrix in matrices.items() if matrix.mapped),
        layout_id=f"m31-cpu:v1:experts={stored[0]},{stored[1]}:as-stored",
        _matrices=matrices,
        _sources=dict(slots),
    )


def copied_bytes(tensor: LazyTensor) -> int:
    """Bytes that holding this tensor allocates: none where its data are mapped."""
    parts = [_loaded(part) for role, part in tensor.parts().items() if role in ("weight", "packed", "scale")]
    return sum(value.numel() * value.element_size() for value, mapped in parts if not mapped)


def _matrix(tensor: LazyTensor) -> _Matrix:
    parts = tensor.parts()
    if tensor.format == "plain":
        codes, mapped = _held(parts["weight"])
        return _Matrix(codes, None, 1.0, mapped)
    codes, codes_mapped = _held(parts["packed"])
    scale, scale_mapped = _held(parts["scale"])
    return _Matrix(codes, scale, float(parts["global_scale"].load()), codes_mapped or scale_mapped)


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
