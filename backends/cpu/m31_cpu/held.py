"""Weights that are small: norm weights and biases, held in float32."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from m31.errors import NonFiniteWeight
from m31.formats.transforms import Loss
from m31.sdk import LazyTensor


@dataclass(frozen=True, eq=False)
class Held:
    """Copies of a few vectors.

    Attributes:
        values: slot -> float32.
    """

    values: Mapping[str, torch.Tensor]
    layout_id: str = "m31-cpu:v1:float32"
    losses: Mapping[str, Loss] = field(default_factory=dict)
    in_place: frozenset[str] = frozenset()

    def dequantise(self) -> Mapping[str, torch.Tensor]:
        """See `WeightHandle.dequantise`."""
        return self.values


def hold(slots: Mapping[str, LazyTensor]) -> Held:
    """Load them all.

    Raises:
        NonFiniteWeight: a value is NaN or infinite.
    """
    values = {}
    for slot, tensor in slots.items():
        value = tensor.load()
        refuse_nonfinite(value, tensor.name)
        values[slot] = value.to(torch.float32, copy=True).contiguous()
    return Held(values)


def refuse_nonfinite(value: torch.Tensor, name: str) -> None:
    """Raises:
    NonFiniteWeight: some element is NaN or infinite; says how many and where the first one is.
    """
    bad = value.isfinite().logical_not().flatten().nonzero()
    if len(bad):
        raise NonFiniteWeight(
            f"{len(bad)} of {value.numel()} values are NaN or infinite, the first at flat index {int(bad[0])}",
            where=f"tensor '{name}'",
            fix="the checkpoint is damaged: fetch it again, or run `m31 inspect --deep` for the whole list",
        )
