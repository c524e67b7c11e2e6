"""The draft head, MODEL.md chapter 5, as three graphs: what a step of the target teaches it, one pass of a block, and
one step of the serial Markov correction. Same language and shape suffixes as `m31.graph.model`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from m31 import ops
from m31.config import Draft
from m31.graph.model import Declare, Step, head_projection, mlp, norm, rounded
from m31.graph.rounding import Rounding
from m31.graph.step import StepBatch
from m31.graph.trace import Built, ModelGraph, Stored, record
from m31.ops import TensorType


@dataclass(frozen=True, eq=False)
class DraftGraphs:
    """The graphs of a draft head. All take the step's buffers and the head's own cache.

    Attributes:
        context: takes `taps` [T, n*C] of committed tokens, writes their keys and values; gives c [T,C] (§5.1).
        block: tokens are the anchor and noise, slots are not used; gives the base logits [R,V] of `out_rows`, and as
            extra `hidden` [R,C] (§5.2).
        markov: takes `base` [R,V], `hidden` [R,C] and `prev` [R], the token before each row; gives the logits [R,V],
            and as extra `confidence` [R] (§5.3).
    """

    context: ModelGraph
    block: ModelGraph
    markov: ModelGraph


@dataclass(eq=False)
class DraftBatch(StepBatch):
    """A step of a draft graph: `given` are its inputs besides the step's, as large as the step."""

    given: dict[str, torch.Tensor] = field(default_factory=dict)

    def narrowed(self) -> dict[str, torch.Tensor]:
        """See `StepBatch.narrowed`."""
        return super().narrowed() | self.given


def trace_draft(d: Draft, rounding: Rounding, stored: Stored | None, pages: tuple[str, str]) -> DraftGraphs:
    """The checked graphs of a draft head.

    Args:
        d: the description.
        rounding: which values an arithmetic rounds to BF16; keys and values of the block are rounded where queries are.
        stored: see `trace`; names of the head's own tensors begin with `dspark.`, embedding and head are the target's.
        pages: formats of the head's own pages.
    """

    def context(step: Step, kv: Any, w: Declare, given: Mapping[str, Any]) -> Built:
        return _context(d, step, kv, given["taps"], w, rounding)

    def block(step: Step, kv: Any, w: Declare, given: Mapping[str, Any]) -> Built:
        return _block(d, step, kv, w, rounding)

    def markov(step: Step, kv: Any, w: Declare, given: Mapping[str, Any]) -> Built:
        return _markov(d, kv, given, w)

    taps = {"taps": TensorType(("T", len(d.target_layer_ids) * d.hidden_size), "T,C", "model")}
    rows = {
        "base": TensorType(("R", d.vocab_size), "R,V", "accum"),
        "hidden": TensorType(("R", d.hidden_size), "R,C", "model"),
        "prev": TensorType(("R",), "R", "int64"),
    }
    return DraftGraphs(
        context=record(context, stored=stored, pages=pages, inputs=taps),
        block=record(block, stored=stored, pages=pages),
        markov=record(markov, stored=stored, pages=pages, inputs=rows),
    )


def _context(d: Draft, step: Step, kv: Any, taps_TC: Any, w: Declare, r: Rounding) -> Built:
    """MODEL.md §5.1. Keys and values come from c directly, without a layer's norm before them; c runs no layer."""
    table = ops.rope_table(step.positions, theta=d.rope_theta, rotary_dim=d.rotary_dim)
    width = len(d.target_layer_ids) * d.hidden_size
    fused_TC = ops.linear(rounded(r.linear, taps_TC), w.matrix("dspark.fc", d.hidden_size, width, None, None))
    c_TC = rounded(r.linear, norm(d, fused_TC, "dspark.hidden_norm", w))
    for layer in range(d.num_layers):
        k_ThD, v_TC = _key_value(d, c_TC, layer, table, w, r)
        kv = ops.kv_write(kv, k_ThD, v_TC, step.slot_map, layer=layer)
    return c_TC, kv, {}


def _block(d: Draft, step: Step, kv: Any, w: Declare, r: Rounding) -> Built:
    """MODEL.md §5.2."""
    table = ops.rope_table(step.positions, theta=d.rope_theta, rotary_dim=d.rotary_dim)
    x_TC = ops.embedding(step.tokens, w.matrix("model.embed_tokens", d.vocab_size, d.hidden_size, "vocab", None))
    for layer in range(d.num_layers):
        at = f"dspark.layers.{layer}.decoder_layer"
        h_TC = rounded(r.linear, norm(d, x_TC, f"{at}.input_layernorm", w))
        q_ThD = head_projection(d, h_TC, f"{at}.self_attn.q", d.num_heads, d.head_dim, "heads", table, w, r.query)
        k_ThD, v_TC = _key_value(d, h_TC, layer, table, w, r)
        o_TC = ops.draft_attention(
            q_ThD,
            k_ThD,
            v_TC,
            kv,
            *step.context,
            layer=layer,
            kv_heads=d.num_kv_heads,
            scale=d.head_dim**-0.5,
            window=d.sliding_window,
        )
        out = w.matrix(f"{at}.self_attn.o_proj", d.hidden_size, d.num_heads * d.head_dim, None, "heads")
        x_TC = ops.add(x_TC, ops.linear(rounded(r.linear, o_TC), out))
        h_TC = rounded(r.linear, norm(d, x_TC, f"{at}.post_attention_layernorm", w))
        x_TC = ops.add(x_TC, mlp(d, h_TC, f"{at}.mlp", d.intermediate_size, w))
    u_TC = rounded(r.linear, norm(d, x_TC, "dspark.final_norm", w))
    u_RC = ops.gather_rows(u_TC, step.out_rows)
    base_RV = ops.lm_head(u_RC, w.matrix("lm_head", d.vocab_size, d.hidden_size, "vocab", None))
    return base_RV, kv, {"hidden": u_RC}


def _markov(d: Draft, kv: Any, given: Mapping[str, Any], w: Declare) -> Built:
    """MODEL.md §5.3."""
    m_RC = ops.markov_embedding(
        given["prev"], w.matrix("dspark.markov_head.markov_w1", d.vocab_size, d.markov_rank, None, None)
    )
    w2 = w.matrix("dspark.markov_head.markov_w2", d.vocab_size, d.markov_rank, "vocab", None)
    logits_RV = ops.markov_bias(given["base"], m_RC, w2)
    at = "dspark.confidence_head.proj"
    width = d.hidden_size + (d.markov_rank if d.confidence_with_markov else 0)
    head = w.group(at, {"weight": (f"{at}.weight", (1, width), (None, None)), "bias": (f"{at}.bias", (1,), (None,))})
    sure_R = ops.confidence(given["hidden"], m_RC, head, with_markov=d.confidence_with_markov)
    return logits_RV, kv, {"confidence": sure_R}


def _key_value(d: Draft, x_TC: Any, layer: int, table: tuple[Any, Any], w: Declare, r: Rounding) -> tuple[Any, Any]:
    at = f"dspark.layers.{layer}.decoder_layer.self_attn"
    k_ThD = head_projection(d, x_TC, f"{at}.k", d.num_kv_heads, d.head_dim, "kv_heads", table, w, r.query)
    v_TC = ops.linear(x_TC, w.matrix(f"{at}.v_proj", d.num_kv_heads * d.head_dim, d.hidden_size, "kv_heads", None))
    return k_ThD, rounded(r.query, v_TC)
