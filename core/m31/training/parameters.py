"""Weights of the text model. The matrices of a layer's experts lie in two stacks, [E, 2I, C] (gate and up) and
[E, C, I] (down), of which the canonical names are views.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

import torch
from torch import Tensor

from m31.checkpoint import expected
from m31.config.model import Model
from m31.training.weights import Weights

BIAS = ".e_score_correction_bias"
_EXPERT = re.compile(r"(?P<at>.*\.experts)\.(?P<expert>\d+)\.(?P<matrix>w[123])\.weight")


class Parameters(Weights):
    """Weights of one text model.

    Args:
        target: the model as it will be stored; its quantisation says how each weight is rounded.
        dtype: in which the leaves are computed with; masters are float32 always.
        quantise: False leaves every weight as it is (the unquantised twin).
    """

    def __init__(self, target: Model, *, dtype: torch.dtype, quantise: bool) -> None:
        self.target = target
        self._views: dict[str, tuple[str, tuple[int | slice, ...]]] = {}
        super().__init__(expected(target), dtype=dtype, quantise=quantise)

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
        """See `Weights.view`."""
        stack, index = self._views[name]
        return tensors[stack][index] if index else tensors[stack]

    def deviation(self, name: str, shape: tuple[int, ...]) -> float:
        """Standard deviation at the start.

        Matrices have 0.5 / sqrt(inputs); those that write into the residual stream are smaller by sqrt(2 * layers), so
        that its variance does not grow with depth. Norm weights and biases start at zero, embedding and head at 0.02,
        routers at 0.005: almost equal scores, so that the routing bias can spread the load before a few experts have
        learned more than the others.
        """
        if len(shape) == 1:
            return 0.0
        if name in ("model.embed_tokens.weight", "lm_head.weight"):
            return 0.02
        if name.endswith(".block_sparse_moe.gate.weight"):
            return 0.005
        std = 0.5 / math.sqrt(shape[1])
        if name.endswith((".o_proj.weight", ".down_proj.weight", ".w2.weight")):
            std /= math.sqrt(2 * self.target.text.num_layers)
        return std

    def learned(self, name: str) -> bool:
        """All but the routing bias, which follows the load."""
        return not name.endswith(BIAS)

    def decayed(self, name: str) -> bool:
        """To matrices, not to norms; nor to the embedding, of which a step touches few rows."""
        return super().decayed(name) and name != "model.embed_tokens.weight"
