"""The weights of the fused projection: five matrices as one, in bfloat16."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import torch
from torch import Tensor

from m31.errors import NonFiniteWeight
from m31.formats.transforms import Loss
from m31.sdk import LazyTensor

MATRICES = ("q", "k", "v", "iq", "ik")
"""Arguments of the op `qkv_insert` in the order in which a row of the product has them."""
NORMS = ("q_norm", "k_norm", "iq_norm", "ik_norm")
EXACT = ("bfloat16", "mxfp8")
"""Storage whose every value bfloat16 holds: E4M3 times a power of two has four significant bits."""


@dataclass(frozen=True, eq=False)
class ProjectionWeights:
    """A `WeightHandle` of `qkv_insert`; `matrix` bfloat16 [N,C], `norms` float32 [D] by argument.

    Args:
        rows: argument -> its rows of `matrix`.
    """

    matrix: Tensor
    norms: Mapping[str, Tensor]
    rows: Mapping[str, slice]
    layout_id: str = "m31-triton-projection:v1"
    losses: Mapping[str, Loss] = field(default_factory=lambda: MappingProxyType({}))
    in_place: frozenset[str] = frozenset()

    def dequantise(self) -> dict[str, Tensor]:
        """See `WeightHandle.dequantise`."""
        matrices = {f"{name}.weight": self.matrix[rows] for name, rows in self.rows.items()}
        return matrices | {f"{name}.weight": norm for name, norm in self.norms.items()}

    @classmethod
    def of(cls, slots: Mapping[str, LazyTensor], device: torch.device) -> ProjectionWeights:
        """From the tensors of the op by slot (`q.weight`, `q_norm.weight`, ...), each read once and released.

        Raises:
            NonFiniteWeight: a value is NaN or infinite.
        """
        first = slots["q.weight"].shape
        total = sum(slots[f"{name}.weight"].shape[0] for name in MATRICES)
        matrix = torch.empty(total, first[1], dtype=torch.bfloat16, device=device)
        rows: dict[str, slice] = {}
        end = 0
        for name in MATRICES:
            tensor = slots[f"{name}.weight"]
            rows[name] = slice(end, end + tensor.shape[0])
            matrix[rows[name]] = _finite(tensor).to(device)
            end += tensor.shape[0]
        norms = {n: _finite(slots[f"{n}.weight"]).to(device, torch.float32, copy=True) for n in NORMS}
        return cls(matrix, norms, rows)


def bytes_of(slots: Mapping[str, LazyTensor]) -> int:
    """What `ProjectionWeights.of` allocates and keeps."""
    shapes = {slot: tensor.shape for slot, tensor in slots.items()}
    return sum(2 * shape[0] * shape[1] if len(shape) == 2 else 4 * shape[0] for shape in shapes.values())


def _finite(tensor: LazyTensor) -> Tensor:
    value = tensor.load()
    if not bool(value.isfinite().all()):
        raise NonFiniteWeight("holds NaN or infinity", where=f"tensor '{tensor.name}'", expected="finite numbers")
    return value
