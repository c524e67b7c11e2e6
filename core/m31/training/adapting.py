"""The text model with a low-rank adapter, with gradients for the adapter alone (MODEL.md §3.6).

The base is what the checkpoint decodes to, once; its codes are not touched. The adapter computes as the served graph
does (`m31.graph.adapt`): it takes what was not quantised, as BF16 products under an arithmetic that quantises
activations, and is added after the base's product.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from m31.checkpoint import Checkpoint, TensorDecl
from m31.training.experts import Added, grouped
from m31.training.fakequant import Quantise, Scheme, bf16, straight_through
from m31.training.layers import Entering
from m31.training.model import TrainedText
from m31.training.parameters import Parameters
from m31.training.weights import Weights


class FrozenBase(Parameters):
    """The weights of a checkpoint as serving decodes them; nothing learns, and there are no masters."""

    def __init__(self, checkpoint: Checkpoint, *, dtype: torch.dtype) -> None:
        super().__init__(checkpoint.config, dtype=dtype, quantise=False)
        for name in self.units:
            self.view(name, self.leaves).copy_(checkpoint.tensor(name).load())
        self.masters = {}
        checkpoint.release()

    def learned(self, name: str) -> bool:
        """Nothing."""
        return False


@dataclass(frozen=True)
class Pair:
    """Sizes and scale of one module's adapter."""

    rank: int
    out: int
    width: int
    scale: float


class AdapterWeights(Weights):
    """A and B of every module, float32 masters. B begins at zero, so that a run begins with the base.

    Args:
        pairs: canonical module name -> its adapter, in model order.
        dtype: in which is computed.
    """

    def __init__(self, pairs: Mapping[str, Pair], *, dtype: torch.dtype) -> None:
        self.pairs = dict(pairs)
        declared: dict[str, TensorDecl] = {}  # their group is for counting a model's weights, which these are not
        for module, pair in self.pairs.items():
            for part, shape in (("A", (pair.rank, pair.width)), ("B", (pair.out, pair.rank))):
                declared[f"{module}.lora_{part}.weight"] = TensorDecl(
                    shape=shape, dtypes=("F32",), group="attention", logical_numel=math.prod(shape), storage="plain"
                )
        super().__init__(declared, dtype=dtype, quantise=False)

    def deviation(self, name: str, shape: tuple[int, ...]) -> float:
        """1 / sqrt(3 * inputs) for A, the deviation of PEFT's uniform start; 0 for B."""
        return 1.0 / math.sqrt(3 * shape[1]) if name.endswith(".lora_A.weight") else 0.0

    def a(self, module: str) -> Tensor:
        """[r, in]."""
        return self.leaves[f"{module}.lora_A.weight"]

    def b(self, module: str) -> Tensor:
        """[out, r] with the scale in it, multiplied in float32 as serving does."""
        return (self.leaves[f"{module}.lora_B.weight"].float() * self.pairs[module].scale).to(self.dtype)

    def tensors(self) -> dict[str, tuple[Tensor, Tensor]]:
        """The masters by module, as `m31.checkpoint.write_adapter` takes them."""
        return {m: (self.masters[f"{m}.lora_A.weight"], self.masters[f"{m}.lora_B.weight"]) for m in self.pairs}


class AdaptedText(TrainedText):
    """The model of a frozen base and an adapter.

    Args:
        base: whose leaves have no gradient.
        adapter: whose leaves have one.
        scheme: what is rounded while the model runs.
    """

    def __init__(self, base: FrozenBase, adapter: AdapterWeights, scheme: Scheme) -> None:
        super().__init__(base, scheme)
        self.adapter = adapter
        self._low = self._linear_out  # inputs and results of an adapter's products
        at = {module.rpartition(".experts.")[0] for module in adapter.pairs if ".experts." in module}
        self._experts = {f"{name}.experts" for name in at}

    def _linear(self, x_NC: Entering, name: str) -> Tensor:
        y = super()._linear(x_NC, name)
        if name not in self.adapter.pairs:
            return y
        low = _rounded(functional.linear(_rounded(x_NC.given, self._low), self.adapter.a(name)), self._low)
        return y + _rounded(functional.linear(low, self.adapter.b(name)), self._low)

    def logits(self, hidden_NC: Tensor) -> Tensor:
        """[N, V]."""
        logits = super().logits(hidden_NC)
        if "lm_head" not in self.adapter.pairs:
            return logits
        low = _rounded(functional.linear(_rounded(hidden_NC, self._low), self.adapter.a("lm_head")), self._low)
        return logits + functional.linear(low, self.adapter.b("lm_head"))

    def _added(self, at: str) -> Added | None:
        if at not in self._experts:
            return None
        moe = self.text.moe
        assert moe is not None
        return _ExpertPairs(self.adapter, at, moe.num_experts, self._steps.leave)


@dataclass(frozen=True)
class _ExpertPairs:
    """The adapters of the routed experts of a layer."""

    adapter: AdapterWeights
    at: str
    experts: int
    rounds: Quantise | None
    _zeros: dict[tuple[int, ...], Tensor] = field(default_factory=dict)

    def first(self, x_MC: Tensor, ends: list[int]) -> Tensor | None:
        """See `Added`."""
        gate, up = self._product("w1", x_MC, ends), self._product("w3", x_MC, ends)
        known = gate if gate is not None else up
        if known is None:
            return None
        return torch.cat([torch.zeros_like(known) if half is None else half for half in (gate, up)], -1)

    def second(self, act_MI: Tensor, ends: list[int]) -> Tensor | None:
        """See `Added`."""
        return self._product("w2", act_MI, ends)

    def _product(self, matrix: str, x: Tensor, ends: list[int]) -> Tensor | None:
        """B (A x) of the experts that have an adapter of this matrix, zero of the others."""
        names = [f"{self.at}.{expert}.{matrix}" for expert in range(self.experts)]
        pairs = {name: self.adapter.pairs[name] for name in names if name in self.adapter.pairs}
        if not pairs:
            return None
        rank = max(pair.rank for pair in pairs.values())
        like = next(iter(pairs.values()))
        a = torch.stack([self._padded(name, "a", (rank, like.width)) for name in names])
        b = torch.stack([self._padded(name, "b", (like.out, rank)) for name in names])
        low = _rounded(grouped(_rounded(x, self.rounds), a, ends), self.rounds)
        return _rounded(grouped(low, b, ends), self.rounds)

    def _padded(self, name: str, part: str, shape: tuple[int, int]) -> Tensor:
        """A or B with as much rank as the largest has; what is added is zero in both."""
        if name not in self.adapter.pairs:
            return self._zeros.setdefault(shape, torch.zeros(shape, dtype=self.adapter.dtype))
        value = self.adapter.a(name) if part == "a" else self.adapter.b(name)
        return functional.pad(value, (0, shape[1] - value.shape[1], 0, shape[0] - value.shape[0]))


def _rounded(x: Tensor, rounds: Quantise | None) -> Tensor:
    return straight_through(x, bf16) if rounds is not None else x
