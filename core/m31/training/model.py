"""The text model with gradients (MODEL.md chapter 2), rounding what the served model rounds.

It mirrors `m31.graph.model`, op by op, for whole sequences that begin at position 0; a test holds the two together,
code for code. Shapes: B sequences of T tokens, N = B * T, C hidden channels, D channels of a head, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from m31.config.model import SparseAttention, Text
from m31.errors import GraphError
from m31.training import attention, fakequant
from m31.training.experts import Added, ExpertSteps, mixture
from m31.training.fakequant import Scheme, straight_through
from m31.training.layers import Entering, Layers
from m31.training.parameters import BIAS, Parameters

Recorder = dict[str, Any]


@dataclass
class Output:
    """Of one forward pass.

    Attributes:
        hidden: [N, C], what the head multiplies with.
        kl: divergence of the index branch's block weights from the main branch's, summed over tokens and averaged over
            heads and layers: a scalar whose gradient reaches index weights only.
        load: tokens that each expert got, by layer, int64 [E].
        taps: the residual streams after the layers that were asked for, side by side [N, taps * C]; None without.
    """

    hidden: Tensor
    kl: Tensor
    load: dict[int, Tensor] = field(default_factory=dict)
    taps: Tensor | None = None


class TrainedText(Layers):
    """The differentiable model.

    Args:
        parameters: whose leaves it computes with; call `refresh` after changing them.
        scheme: what is rounded.
    """

    def __init__(self, parameters: Parameters, scheme: Scheme) -> None:
        self.text: Text = parameters.target.text
        self.parameters, self.scheme = parameters, scheme
        spec = scheme.arithmetic
        super().__init__(self.text, parameters, scheme.rounding, spec.linear_activation)
        self._query = fakequant.activation("e4m3") if spec.query == "e4m3" else None
        self._kv = fakequant.page(scheme.kv_format, spec.kv_read)
        self._index = fakequant.page(scheme.index_format, spec.kv_read)
        enter = spec.expert_input if spec.expert_input != "bfloat16" else None  # the graph has rounded it already
        rounds = spec.expert_input is not None or spec.expert_middle is not None
        scale = fakequant.middle_scale(self.text)
        self._steps = ExpertSteps(
            enter=fakequant.activation(enter),
            leave=fakequant.bf16 if rounds else None,
            middle=fakequant.activation(spec.expert_middle, static_scale=scale),
            activate=self._activate,
        )

    def __call__(self, tokens_BT: Tensor, record: Recorder | None = None, taps: Sequence[int] = ()) -> Output:
        """Run sequences.

        Args:
            tokens_BT: int64; every row is a sequence from position 0.
            record: gets what a test compares with serving: per layer K, V and index keys before they are written
                ("3.k", [B, T, heads, D]), as they are read ("3.k.read"), kept blocks ("3.keep"), experts ("3.experts").
            taps: layers whose residual streams are wanted, ascending (MODEL.md §5.1).
        """
        text, batch, length = self.text, *tokens_BT.shape
        if length > text.max_position:
            raise GraphError(f"sequences of {length} tokens", expected=f"at most {text.max_position}")
        table = self._table(length)
        x_NC = functional.embedding(tokens_BT.flatten(), self._leaf("model.embed_tokens"))
        out = Output(hidden=x_NC, kl=x_NC.new_zeros(()))
        sparse = text.attention.count("sparse")
        tapped = []
        for layer in range(text.num_layers):
            at = f"model.layers.{layer}"
            h_NC = self._bf16(self._round.linear, self._norm(x_NC, f"{at}.input_layernorm"))
            attended_NC, kl = self._attention(layer, h_NC, batch, table, record)
            if kl is not None:
                out.kl = out.kl + kl / sparse
            x_NC = x_NC + attended_NC
            moe = text.mlp[layer] == "moe"
            quantised = self._round.linear or (self._round.experts and moe)
            h_NC = self._bf16(quantised, self._norm(x_NC, f"{at}.post_attention_layernorm"))
            x_NC = x_NC + (self._moe(layer, h_NC, out, record) if moe else self._mlp(self._in(h_NC), f"{at}.mlp"))
            if layer in taps:
                tapped.append(x_NC)
        out.taps = torch.cat(tapped, -1) if tapped else None
        out.hidden = self._bf16(self._round.linear, self._norm(x_NC, "model.norm"))
        return out

    def logits(self, hidden_NC: Tensor) -> Tensor:
        """[N, V]."""
        return functional.linear(hidden_NC, self._leaf("lm_head"))

    def loss(self, hidden_NC: Tensor, targets_N: Tensor) -> Tensor:
        """Cross-entropy in nats, summed over the rows whose target is not -1."""
        rows = (targets_N >= 0).nonzero().flatten()
        logits = self.logits(hidden_NC[rows] if len(rows) < len(targets_N) else hidden_NC)
        return functional.cross_entropy(logits, targets_N[rows], reduction="sum")

    # -- parts -----------------------------------------------------------------------------------------------------

    def _attention(
        self, layer: int, h_NC: Tensor, batch: int, table: tuple[Tensor, Tensor], record: Recorder | None
    ) -> tuple[Tensor, Tensor | None]:
        text, at = self.text, f"model.layers.{layer}.self_attn"
        x_NC = self._in(h_NC)
        q = self._bf16(self._round.query, self._heads(x_NC, f"{at}.q", text.num_heads, batch, table))
        q = straight_through(q, self._query).view(*q.shape[:2], text.num_kv_heads, -1, text.head_dim)
        k = self._bf16(self._round.kv, self._heads(x_NC, f"{at}.k", text.num_kv_heads, batch, table))
        v_NC = self._bf16(self._round.kv, self._linear(x_NC, f"{at}.v_proj"))
        v = v_NC.view(k.shape)
        k_read, v_read = straight_through(k, self._kv), straight_through(v, self._kv)
        if record is not None:
            record.update({f"{layer}.k": k, f"{layer}.v": v, f"{layer}.k.read": k_read, f"{layer}.v.read": v_read})
        rounded = self.scheme.arithmetic.probability is not None
        block, scores = self._block, None
        if text.attention[layer] == "sparse":
            sparse = _need(text.sparse, "sparse", layer)
            scores = self._scores(layer, sparse, x_NC.detach(), batch, table, record)
        parts, kl, kept = [], [], []
        for row in range(batch):
            keep = None
            if scores is not None:
                sparse = _need(text.sparse, "sparse", layer)
                keep = attention.select(
                    scores[row],
                    topk=sparse.topk_blocks,
                    block=block,
                    local_blocks=sparse.local_blocks,
                    init_blocks=sparse.init_blocks,
                )
            o, mass = attention.attend(
                q[row],
                k_read[row],
                v_read[row],
                keep,
                block=block,
                scale=text.head_dim**-0.5,
                rounded_probability=rounded,
            )
            parts.append(o)
            kept.append(keep)
            if scores is not None:
                kl.append(divergence(scores[row] * sparse.index_dim**-0.5, mass, keep, block))
        if record is not None:
            record[f"{layer}.keep"] = kept
        o_NC = self._in(self._bf16(self._round.linear, torch.cat(parts)))
        return self._linear(o_NC, f"{at}.o_proj"), sum(kl[1:], kl[0]) if kl else None

    @property
    def _block(self) -> int:
        return self.text.sparse.block_size if self.text.sparse is not None else attention.TILE

    def _scores(
        self,
        layer: int,
        sparse: SparseAttention,
        x_NC: Entering,
        batch: int,
        table: tuple[Tensor, Tensor],
        record: Recorder | None,
    ) -> list[Tensor]:
        """Block scores of every sequence. `x_NC` has no gradient: this branch learns without moving what it reads."""
        at = f"model.layers.{layer}.self_attn"
        iq = self._bf16(self._round.query, self._heads(x_NC, f"{at}.index_q", sparse.num_index_heads, batch, table))
        iq = straight_through(iq, self._query)
        ik = self._bf16(self._round.index, self._heads(x_NC, f"{at}.index_k", 1, batch, table))
        read = straight_through(ik, self._index)
        if record is not None:
            record.update({f"{layer}.index": ik, f"{layer}.index.read": read})
        return [attention.block_scores(iq[row], read[row, :, 0], sparse.block_size) for row in range(batch)]

    def _moe(self, layer: int, h_NC: Tensor, out: Output, record: Recorder | None) -> Tensor:
        moe, at = _need(self.text.moe, "moe", layer), f"model.layers.{layer}.block_sparse_moe"
        score = torch.sigmoid(functional.linear(h_NC, self._leaf(f"{at}.gate")))
        bias = self.parameters.leaves[f"{at}{BIAS}"]
        order = torch.sort(score.detach() + bias, dim=-1, descending=True, stable=True).indices
        ids_NK = order[:, : moe.experts_per_token]
        chosen = score.gather(1, ids_NK)
        weights = chosen / chosen.sum(-1, keepdim=True) * moe.routed_scaling_factor
        out.load[layer] = torch.bincount(ids_NK.flatten(), minlength=moe.num_experts)
        if record is not None:
            record[f"{layer}.experts"] = ids_NK
        routed = mixture(
            h_NC,
            ids_NK,
            weights,
            self.parameters.leaves[f"{at}.experts.w13"],
            self.parameters.leaves[f"{at}.experts.w2"],
            self._steps,
            self._added(f"{at}.experts"),
        )
        return routed + self._mlp(self._in(h_NC), f"{at}.shared_experts")

    def _added(self, at: str) -> Added | None:
        """What is added to the products of the routed experts `at`."""
        return None


def divergence(scores_TKb: Tensor, mass_TKb: Tensor, keep: Tensor | None, block: int) -> Tensor:
    """KL(mass || softmax of scores) over the blocks that a query kept, summed over tokens, averaged over heads.

    What it did not keep has no weight in `mass` because it was not read, which says nothing about it.
    """
    among = attention.visible(len(scores_TKb), block)[:, None] if keep is None else keep
    logp = torch.log_softmax(scores_TKb.masked_fill(~among, -torch.inf), -1).masked_fill(~among, 0.0)
    entropy = torch.xlogy(mass_TKb, mass_TKb).sum()
    return (entropy - (mass_TKb * logp).sum()) / scores_TKb.shape[1]


def _need(part: Any, what: str, layer: int) -> Any:
    if part is None:
        raise GraphError(f"layer {layer} is {what} but the model description has no {what} part")
    return part
