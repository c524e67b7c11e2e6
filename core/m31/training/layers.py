"""What the text model and the draft head have in common, with gradients: norms, projections, RoPE, MLPs."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from m31.config.model import SwigluOai
from m31.graph import Rounding
from m31.training import fakequant
from m31.training.fakequant import Quantise, straight_through
from m31.training.weights import Weights


class Sizes(Protocol):
    """What a description says about both."""

    @property
    def rms_norm_eps(self) -> float:
        """Of every norm."""

    @property
    def rope_theta(self) -> float:
        """Base of the rotation's angles."""

    @property
    def rotary_dim(self) -> int:
        """Channels of a head that are rotated."""

    @property
    def activation(self) -> SwigluOai:
        """Of every MLP."""


class Entering(NamedTuple):
    """The input of projections.

    Attributes:
        given: before it is quantised; what an adapter takes.
        seen: as the projections see it.
    """

    given: Tensor
    seen: Tensor

    def detach(self) -> Entering:
        """Without gradients."""
        return Entering(self.given.detach(), self.seen.detach())


class Layers:
    """The parts of a layer. Shapes: N tokens, C hidden channels, D channels of a head.

    Args:
        sizes: the model's description.
        weights: whose leaves it computes with.
        rounding: which values are rounded to BF16.
        activation: the input of projections: a kind of `fakequant.activation`. Where there is one, their results are
            rounded to BF16.
    """

    def __init__(self, sizes: Sizes, weights: Weights, rounding: Rounding, activation: str | None) -> None:
        self._sizes, self._weights, self._round = sizes, weights, rounding
        self._linear_in: Quantise | None = fakequant.activation(activation)
        self._linear_out = fakequant.bf16 if activation else None

    def _leaf(self, name: str) -> Tensor:
        return self._weights.leaves[f"{name}.weight"]

    def _bf16(self, rounds: bool, x: Tensor) -> Tensor:
        return straight_through(x, fakequant.bf16) if rounds else x

    def _norm(self, x: Tensor, name: str) -> Tensor:
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + self._sizes.rms_norm_eps)
        return x * scale * (1.0 + self._leaf(name))

    def _in(self, x_NC: Tensor) -> Entering:
        """The input of projections as they see it; made once for all projections of one input."""
        return Entering(x_NC, straight_through(x_NC, self._linear_in))

    def _linear(self, x_NC: Entering, name: str) -> Tensor:
        """A projection of an input from `_in`."""
        return straight_through(functional.linear(x_NC.seen, self._leaf(name)), self._linear_out)

    def _table(self, length: int) -> tuple[Tensor, Tensor]:
        """cos and sin [T, 1, rotary/2]; every step rounds to float32 (MODEL.md §2.3)."""
        dim = self._sizes.rotary_dim
        exponent = torch.arange(0, dim, 2, dtype=torch.float32) / dim
        inverse = 1.0 / (self._sizes.rope_theta**exponent)
        angle = torch.arange(length).to(torch.float32)[:, None] * inverse
        dtype = self._weights.dtype
        return angle.cos()[:, None].to(dtype), angle.sin()[:, None].to(dtype)

    def _heads(self, x_NC: Entering, at: str, heads: int, batch: int, table: tuple[Tensor, Tensor]) -> Tensor:
        """Projection, norm per head, RoPE: [B, T, heads, D]."""
        x = self._linear(x_NC, f"{at}_proj").view(batch, -1, heads, self._leaf(f"{at}_norm").numel())
        x = self._norm(x, f"{at}_norm")
        cos, sin = table
        half = cos.shape[-1]
        a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)

    def _activate(self, gate: Tensor, up: Tensor) -> Tensor:
        a = self._sizes.activation
        return swiglu(gate, up, a.alpha, a.beta, a.limit)

    def _mlp(self, x_NC: Entering, at: str) -> Tensor:
        """Of an input from `_in`. The activation is quantised from the accumulation dtype (MODEL.md §2.5)."""
        gate, up = self._linear(x_NC, f"{at}.gate_proj"), self._linear(x_NC, f"{at}.up_proj")
        return self._linear(self._in(self._activate(gate, up)), f"{at}.down_proj")


def swiglu(gate: Tensor, up: Tensor, alpha: float, beta: float, limit: float) -> Tensor:
    """SwiGLU-OAI (MODEL.md §2.5). Beyond a clamp there is no gradient: the served value does not move there."""
    gate = gate.clamp(max=limit)
    return (up.clamp(min=-limit, max=limit) + beta) * gate * torch.sigmoid(alpha * gate)
