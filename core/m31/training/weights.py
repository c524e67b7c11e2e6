"""Master weights, the weights that serving would decode from them, and the gradients that both share.

Masters are float32 and named as in checkpoints. Once per optimiser step they are quantised; the results are the leaves
of the graph, so that the straight-through gradient of a master is simply the gradient of its leaf.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from m31.checkpoint import TensorDecl
from m31.checkpoint.encoding import Unit, units
from m31.errors import CheckpointError
from m31.training import fakequant


class Weights:
    """The weights that a run trains. A subclass says how they begin, and may hold several in one tensor.

    Args:
        declared: the stored tensors that they become; they say how each weight is rounded.
        dtype: in which the leaves are computed with; masters are float32 always.
        quantise: False leaves every weight as it is.

    Attributes:
        units: canonical name -> how the weight is stored, in model order.
        masters: float32 by tensor name; a canonical name unless a subclass stacks weights.
        leaves: what is computed with, by the same names; those of `learned` tensors require a gradient.
    """

    def __init__(self, declared: Mapping[str, TensorDecl], *, dtype: torch.dtype, quantise: bool) -> None:
        self.dtype, self.quantise = dtype, quantise
        self.units: dict[str, Unit] = {unit.name: unit for unit in units(declared)}
        self.masters: dict[str, Tensor] = {}
        for name, unit in self.units.items():
            self._place(name, unit.shape)
        self.leaves = {
            name: torch.zeros(master.shape, dtype=dtype, requires_grad=self.learned(name))
            for name, master in self.masters.items()
        }

    def _place(self, name: str, shape: tuple[int, ...]) -> None:
        """Make room for a weight in `masters`."""
        self.masters[name] = torch.zeros(shape)

    def view(self, name: str, tensors: Mapping[str, Tensor]) -> Tensor:
        """The part of `tensors` (keyed as `masters`) that a canonical name means."""
        return tensors[name]

    def named(self) -> Iterator[tuple[str, Tensor]]:
        """(canonical name, master float32) in model order; views, so that writing into them changes the masters."""
        for name in self.units:
            yield name, self.view(name, self.masters)

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Set all masters.

        Raises:
            CheckpointError: names or shapes are not those of the model.
        """
        wrong = sorted(tensors.keys() ^ self.units.keys())
        if wrong:
            raise CheckpointError(f"'{wrong[0]}' is missing or unknown ({len(wrong)} such names)", where="weights")
        for name, master in self.named():
            if tensors[name].shape != master.shape:
                raise CheckpointError(
                    f"'{name}' is {list(tensors[name].shape)}", where="weights", expected=str(list(master.shape))
                )
            master.copy_(tensors[name])

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """Random masters; each depends on seed and name only: normal, as wide as `deviation` says."""
        for name, master in self.named():
            std = self.deviation(name, tuple(master.shape))
            if not std:
                master.zero_()
                continue
            digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
            master.copy_(torch.randn(master.shape, generator=generator) * std)

    def deviation(self, name: str, shape: tuple[int, ...]) -> float:
        """Standard deviation of a weight at the start; 0: it starts at zero.

        Norms and biases start at zero (a norm multiplies by 1 + w), matrices at 0.5 / sqrt(inputs).
        """
        return 0.0 if len(shape) == 1 else 0.5 / math.sqrt(shape[1])

    @torch.no_grad()
    def refresh(self) -> None:
        """Bring the leaves up to date with the masters, and forget their gradients.

        Raises:
            OpRefused: a weight is NaN or infinite.
        """
        for name, unit in self.units.items():
            master = self.view(name, self.masters)
            value = fakequant.weight(unit, master) if self.quantise else master
            self.view(name, self.leaves).copy_(value)
        for leaf in self.leaves.values():
            leaf.grad = None

    def learned(self, name: str) -> bool:
        """Whether a gradient moves a weight: for names of `units` and of `masters` alike."""
        return True

    def decayed(self, name: str) -> bool:
        """Whether weight decay applies to a tensor of `masters`: to matrices, not to norms and biases."""
        return self.masters[name].dim() > 1
