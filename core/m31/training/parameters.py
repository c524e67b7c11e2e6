"""Master weights, the weights that serving would decode from them, and the gradients that both share.

Masters are float32 and named as in checkpoints. Once per optimiser step they are quantised; the results are the leaves
of the graph, so that the straight-through gradient of a master is simply the gradient of its leaf. The matrices of
a layer's experts lie in two stacks, [E, 2I, C] (gate and up) and [E, C, I] (down), of which the names are views.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from m31.checkpoint import expected
from m31.checkpoint.encoding import Unit, units
from m31.checkpoint.inventory import TensorDecl
from m31.config.model import Model
from m31.errors import CheckpointError
from m31.training import fakequant

BIAS = ".e_score_correction_bias"
_EXPERT = re.compile(r"(?P<at>.*\.experts)\.(?P<expert>\d+)\.(?P<matrix>w[123])\.weight")


class Parameters:
    """Weights of one model.

    Args:
        target: the model as it will be stored; its quantisation says how each weight is rounded.
        dtype: in which the leaves are computed with; masters are float32 always.
        quantise: False leaves every weight as it is (the unquantised twin).
    """

    def __init__(self, target: Model, *, dtype: torch.dtype, quantise: bool) -> None:
        self.target, self.dtype, self.quantise = target, dtype, quantise
        declared = expected(target)
        self.units: dict[str, Unit] = {unit.name: unit for unit in units(declared)}
        self.stored: dict[str, TensorDecl] = declared
        self.masters: dict[str, Tensor] = {}
        self._views: dict[str, tuple[str, tuple[int | slice, ...]]] = {}
        for name, unit in self.units.items():
            self._place(name, unit.shape)
        self.leaves = {
            name: torch.zeros(master.shape, dtype=dtype, requires_grad=not name.endswith(BIAS))
            for name, master in self.masters.items()
        }

    def _place(self, name: str, shape: tuple[int, ...]) -> None:
        match = _EXPERT.fullmatch(name)
        if match is None:
            self.masters[name] = torch.zeros(shape)
            self._views[name] = name, ()
            return
        moe = self.target.text.moe
        assert moe is not None
        at, expert, matrix = match["at"], int(match["expert"]), match["matrix"]
        inner = moe.expert_intermediate_size
        stack = f"{at}.w2" if matrix == "w2" else f"{at}.w13"
        if stack not in self.masters:
            whole = shape if matrix == "w2" else (2 * inner, shape[1])
            self.masters[stack] = torch.zeros(moe.num_experts, *whole)
        rows = {"w1": slice(0, inner), "w3": slice(inner, None), "w2": slice(None)}[matrix]
        self._views[name] = stack, (expert, rows)

    def view(self, name: str, tensors: Mapping[str, Tensor]) -> Tensor:
        """The part of `tensors` (keyed as `masters`) that a canonical name means."""
        stack, index = self._views[name]
        return tensors[stack][index] if index else tensors[stack]

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
        """Random masters; each depends on seed and name only.

        Matrices have the standard deviation 0.5 / sqrt(inputs); those that write into the residual stream are smaller
        by sqrt(2 * layers), so that its variance does not grow with depth. Norm weights and biases start at zero (a
        norm multiplies by 1 + w), embedding and head at 0.02, routers at 0.005: almost equal scores, so that the
        routing bias can spread the load before a few experts have learned more than the others.
        """
        depth = math.sqrt(2 * self.target.text.num_layers)
        for name, master in self.named():
            if master.dim() == 1:
                master.zero_()
                continue
            digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
            std = 0.5 / math.sqrt(master.shape[1])
            if name.endswith((".o_proj.weight", ".down_proj.weight", ".w2.weight")):
                std /= depth
            if name in ("model.embed_tokens.weight", "lm_head.weight"):
                std = 0.02
            if name.endswith(".block_sparse_moe.gate.weight"):
                std = 0.005
            master.copy_(torch.randn(master.shape, generator=generator) * std)

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

    def decayed(self, name: str) -> bool:
        """Whether weight decay applies to a tensor of `masters`: to matrices, not to norms."""
        return self.masters[name].dim() > 1 and name != "model.embed_tokens.weight"
