"""The draft head with gradients (MODEL.md chapter 5), rounding what the served head rounds.

It mirrors the three graphs of `m31.graph.draft`, for many blocks of one sequence at a time; a test holds the two
together, code for code. Shapes: T tokens of the sequence, A blocks of g rows, C hidden channels, K KV heads, G query
heads per KV head, D channels of a head, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from m31.checkpoint.draft import expected_draft
from m31.config import Draft
from m31.formats.arithmetic import ArithmeticSpec
from m31.graph import Rounding
from m31.training import fakequant
from m31.training.fakequant import straight_through
from m31.training.layers import Entering, Layers
from m31.training.weights import Weights

TILE = 16  # blocks whose scores are one product: neighbours read almost the same context
_MARKOV = "dspark.markov_head.markov_w"
_CONFIDENCE = "dspark.confidence_head.proj"


class HeadWeights(Weights):
    """Weights of a draft head.

    Args:
        draft: the description; its quantisation says how each weight is rounded.
        dtype: in which the leaves are computed with.
        quantise: False leaves every weight as it is.
    """

    def __init__(self, draft: Draft, *, dtype: torch.dtype, quantise: bool) -> None:
        self.draft = draft
        super().__init__(expected_draft(draft), dtype=dtype, quantise=quantise)

    def deviation(self, name: str, shape: tuple[int, ...]) -> float:
        """As for a text model, but that the Markov head corrects nothing and the confidence head says 1/2 at first."""
        if name.startswith((f"{_MARKOV}2", _CONFIDENCE)):
            return 0.0
        std = super().deviation(name, shape)
        if name.endswith((".o_proj.weight", ".down_proj.weight")):
            std /= math.sqrt(2 * self.draft.num_layers)
        return std

    def decayed(self, name: str) -> bool:
        """To matrices, not to norms; nor to the Markov embedding, of which a step touches few rows."""
        return super().decayed(name) and not name.startswith(f"{_MARKOV}1")


@dataclass(frozen=True)
class Context:
    """What the head's pages hold of a sequence, as it is read: keys and values [T, K, D] of each layer."""

    keys: list[Tensor]
    values: list[Tensor]


class TrainedHead(Layers):
    """The differentiable head.

    Args:
        weights: whose leaves it computes with; call `refresh` after changing them.
        arithmetic: what is rounded.
        embedding, head: the target's matrices [V, C]; they get no gradient.
    """

    def __init__(self, weights: HeadWeights, arithmetic: ArithmeticSpec, *, embedding: Tensor, head: Tensor) -> None:
        self.draft = weights.draft
        kind = arithmetic.linear_activation
        if kind is not None and self.draft.quantization is None:
            kind = "bfloat16"  # projections that are stored plain have plain inputs (MODEL.md §3.7)
        own = "float64" if arithmetic.exact else "bfloat16"  # of its pages, whatever the target's are (§5.1)
        super().__init__(self.draft, weights, Rounding.of(arithmetic, own, own), kind)
        self._page = fakequant.page(own, "exact")
        self._embedding, self._head = embedding, head

    def context(self, taps_TC: Tensor) -> Context:
        """Keys and values of committed tokens, from the target's residual streams [T, n * C] (MODEL.md §5.1)."""
        taps_TC = self._bf16(self._round.linear, taps_TC)
        fused_TC = self._linear(Entering(taps_TC, taps_TC), "dspark.fc")
        x_TC = self._in(self._bf16(self._round.linear, self._norm(fused_TC, "dspark.hidden_norm")))
        table = self._table(len(taps_TC))
        out = Context([], [])
        for layer in range(self.draft.num_layers):
            k, v = self._key_value(x_TC, layer, table)
            out.keys.append(straight_through(k, self._page))
            out.values.append(straight_through(v, self._page))
        return out

    def block(self, context: Context, anchors_A: Tensor, places_A: Tensor, rows: int) -> Tensor:
        """The final rows u of blocks [A * rows, C] (MODEL.md §5.2), a block's rows one after another.

        Args:
            context: of the sequence; a block sees what lies before it.
            anchors_A: the token at the head of each block.
            places_A: position of each anchor, ascending: how many tokens are committed. At least one.
            rows: of a block, the anchor's included.
        """
        draft, count = self.draft, len(places_A)
        positions = (places_A[:, None] + torch.arange(rows)).flatten()
        cos, sin = self._table(int(places_A[-1]) + rows)
        table = cos[positions], sin[positions]
        ids = torch.full((count, rows), draft.noise_token_id)
        ids[:, 0] = anchors_A
        x_NC = functional.embedding(ids.flatten(), self._embedding)
        for layer in range(draft.num_layers):
            at = f"dspark.layers.{layer}.decoder_layer"
            h_NC = self._in(self._bf16(self._round.linear, self._norm(x_NC, f"{at}.input_layernorm")))
            q = self._heads(h_NC, f"{at}.self_attn.q", draft.num_heads, 1, table)[0]
            k, v = self._key_value(h_NC, layer, table)
            o_NC = attend(
                self._bf16(self._round.query, q).view(count, rows, draft.num_kv_heads, -1, draft.head_dim),
                k.view(count, rows, *k.shape[1:]),
                v.view(count, rows, *v.shape[1:]),
                context.keys[layer],
                context.values[layer],
                places_A,
                window=draft.sliding_window,
                scale=draft.head_dim**-0.5,
            )
            o_in = self._in(self._bf16(self._round.linear, o_NC))
            x_NC = x_NC + self._linear(o_in, f"{at}.self_attn.o_proj")
            h_NC = self._in(self._bf16(self._round.linear, self._norm(x_NC, f"{at}.post_attention_layernorm")))
            x_NC = x_NC + self._mlp(h_NC, f"{at}.mlp")
        return self._bf16(self._round.linear, self._norm(x_NC, "dspark.final_norm"))

    def logits(self, u_NC: Tensor, prev_N: Tensor) -> Tensor:
        """[N, V] of rows behind the tokens `prev_N` (MODEL.md §5.3)."""
        base_NV = functional.linear(u_NC, self._head)
        return torch.addmm(base_NV, self._markov(prev_N), self._leaf(f"{_MARKOV}2").t())

    def confidence(self, u_NC: Tensor, prev_N: Tensor) -> Tensor:
        """Logits of the confidence in each row [N]; without gradient into anything but the confidence head."""
        x = u_NC.detach()
        if self.draft.confidence_with_markov:
            x = torch.cat([x, self._markov(prev_N).detach()], -1)
        return functional.linear(x, self._leaf(_CONFIDENCE), self._weights.leaves[f"{_CONFIDENCE}.bias"])[:, 0]

    def _markov(self, prev_N: Tensor) -> Tensor:
        return functional.embedding(prev_N, self._leaf(f"{_MARKOV}1"))

    def _key_value(self, x_NC: Entering, layer: int, table: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """[N, K, D] each, of an input from `_in`."""
        at = f"dspark.layers.{layer}.decoder_layer.self_attn"
        k = self._bf16(self._round.query, self._heads(x_NC, f"{at}.k", self.draft.num_kv_heads, 1, table)[0])
        return k, self._bf16(self._round.query, self._linear(x_NC, f"{at}.v_proj")).view(k.shape)


def attend(
    q_AgKGD: Tensor,
    k_AgKD: Tensor,
    v_AgKD: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    places_A: Tensor,
    *,
    window: int,
    scale: float,
) -> Tensor:
    """Attention of blocks, as the op `draft_attention`: a row at position p sees the tokens of the context from
    p - window + 1 on that lie before its block, and all rows of its block. [A * g, K * G * D].

    No row of another block is ever read; a tile of neighbouring blocks reads one slice of the context.
    """
    parts = []
    for low, high in _tiles(len(places_A)):
        own = slice(low, high)
        parts.append(_tile(q_AgKGD[own], k_AgKD[own], v_AgKD[own], k_TKD, v_TKD, places_A[own], window, scale))
    return torch.cat(parts)


def _tiles(count: int) -> Iterator[tuple[int, int]]:
    for low in range(0, count, TILE):
        yield low, min(count, low + TILE)


def _tile(
    q: Tensor, k: Tensor, v: Tensor, k_TKD: Tensor, v_TKD: Tensor, places: Tensor, window: int, scale: float
) -> Tensor:
    count, rows, heads, group, dim = q.shape
    first, end = max(0, int(places[0]) - window + 1), int(places[-1])
    at, positions = torch.arange(first, end), places[:, None] + torch.arange(rows)
    hidden = (at >= places[:, None, None]) | (at <= positions[..., None] - window)  # [A, g, S]
    old_k, old_v = (x[first:end].transpose(0, 1) for x in (k_TKD, v_TKD))  # [K, S, D]
    flat = q.permute(2, 3, 0, 1, 4).reshape(heads, -1, dim)  # [K, G * A * g, D]
    old = torch.bmm(flat, old_k.transpose(1, 2)).view(heads, group, count, rows, -1).masked_fill(hidden, -torch.inf)
    new = torch.einsum("aikgd,ajkd->kgaij", q, k)
    p = torch.softmax(torch.cat([old, new], -1) * scale, -1)
    past, own = p[..., : len(at)], p[..., len(at) :]
    o = torch.bmm(past.reshape(heads, -1, len(at)), old_v).view(heads, group, count, rows, dim)
    o = o + torch.einsum("kgaij,ajkd->kgaid", own, v)
    return o.permute(2, 3, 0, 1, 4).reshape(count * rows, -1)
