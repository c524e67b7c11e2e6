"""The text model, MODEL.md chapter 2, and the only definition of it.

Plain Python over ops; it is traced once and never runs as written. Every name below stands for a node of the graph.
Shape suffixes: T tokens, R rows that get logits, C hidden channels, h heads, D channels of a head, P pages, K choices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from m31 import ops
from m31.config import Moe, SparseAttention, SwigluOai, Text
from m31.errors import GraphError
from m31.graph.rounding import Rounding
from m31.ops.moe import expert_slots

D = TypeVar("D")


class Declare(Protocol):
    """Declares weights as inputs of the graph; names are canonical checkpoint names without `.weight`."""

    def matrix(self, name: str, out: int, in_: int, out_axis: str | None, in_axis: str | None) -> Any:
        """A weight `[out, in]` and the axes along which it shards."""

    def vector(self, name: str, size: int) -> Any:
        """A norm weight `[size]`."""

    def group(self, name: str, slots: dict[str, tuple[str, tuple[int, ...], tuple[str | None, ...]]]) -> Any:
        """Several tensors that one op takes together: slot -> (tensor name, shape, axes)."""


@dataclass(frozen=True)
class Step:
    """Proxies of the step's buffers (DESIGN.md §5)."""

    tokens: Any  # [T]
    positions: Any  # [T]
    cu_q: Any  # [S+1]
    seq_lens: Any  # [S]
    slot_map: Any  # [T]
    page_table: Any  # [S,P]
    out_rows: Any  # [R]

    @property
    def context(self) -> tuple[Any, Any, Any, Any]:
        """What attention needs to know about the sequences."""
        return self.positions, self.cu_q, self.seq_lens, self.page_table


class Sizes(Protocol):
    """What the text model and the draft head have in common."""

    @property
    def hidden_size(self) -> int:
        """Channels of the residual stream."""

    @property
    def rms_norm_eps(self) -> float:
        """Of every norm."""

    @property
    def activation(self) -> SwigluOai:
        """Of every MLP."""


def text_model(
    m: Text, step: Step, kv: Any, w: Declare, r: Rounding, taps: Sequence[int] = ()
) -> tuple[Any, Any, Any | None]:
    """Logits [R,V] of the rows in `step.out_rows`, the cache after the step, and the residual streams after the layers
    `taps`, side by side [T, len(taps)*C], of every token; None without taps."""
    if list(taps) != sorted(set(taps)) or not all(0 <= layer < m.num_layers for layer in taps):
        raise GraphError(f"taps {list(taps)}", expected=f"ascending layers below {m.num_layers}")
    tapped = None
    cos_TD, sin_TD = ops.rope_table(step.positions, theta=m.rope_theta, rotary_dim=m.rotary_dim)
    x_TC = ops.embedding(step.tokens, w.matrix("model.embed_tokens", m.vocab_size, m.hidden_size, "vocab", None))
    for layer in range(m.num_layers):
        at = f"model.layers.{layer}"
        h_TC = rounded(r.linear, norm(m, x_TC, f"{at}.input_layernorm", w))
        attended_TC, kv = _attention(m, layer, h_TC, (cos_TD, sin_TD), step, kv, w, r)
        x_TC = ops.add(x_TC, attended_TC)
        quantised = r.linear or (r.experts and m.mlp[layer] != "dense")
        h_TC = rounded(quantised, norm(m, x_TC, f"{at}.post_attention_layernorm", w))
        if m.mlp[layer] == "dense":
            mixed_TC = mlp(m, h_TC, f"{at}.mlp", m.dense_intermediate_size, w)
        else:
            mixed_TC = _moe(m, _require(m.moe, "moe", layer), h_TC, f"{at}.block_sparse_moe", w)
        x_TC = ops.add(x_TC, mixed_TC)
        if layer in taps:  # before any further norm, also the last layer's (MODEL.md §5.1)
            tapped = x_TC if tapped is None else ops.concat(tapped, x_TC)
    h_TC = rounded(r.linear, norm(m, x_TC, "model.norm", w))
    last_RC = ops.gather_rows(h_TC, step.out_rows)
    return ops.lm_head(last_RC, w.matrix("lm_head", m.vocab_size, m.hidden_size, "vocab", None)), kv, tapped


def _attention(
    m: Text, layer: int, h_TC: Any, table: tuple[Any, Any], step: Step, kv: Any, w: Declare, r: Rounding
) -> tuple[Any, Any]:
    """MODEL.md §2.3 and §2.4. This step's K and V are read back through pages only, after the write."""
    at = f"model.layers.{layer}.self_attn"
    q_ThD = head_projection(m, h_TC, f"{at}.q", m.num_heads, m.head_dim, "heads", table, w, r.query)
    k_ThD = head_projection(m, h_TC, f"{at}.k", m.num_kv_heads, m.head_dim, "kv_heads", table, w, r.kv)
    v_TC = ops.linear(h_TC, w.matrix(f"{at}.v_proj", m.num_kv_heads * m.head_dim, m.hidden_size, "kv_heads", None))
    kv = ops.kv_write(kv, k_ThD, rounded(r.kv, v_TC), step.slot_map, layer=layer)
    attrs = {"layer": layer, "kv_heads": m.num_kv_heads, "scale": m.head_dim**-0.5}
    if m.attention[layer] == "sparse":
        blocks_ThK, kv = _select_blocks(m, _require(m.sparse, "sparse", layer), layer, h_TC, table, step, kv, w, r)
        o_TC = ops.sparse_attention(q_ThD, kv, blocks_ThK, *step.context, **attrs)
    else:
        o_TC = ops.dense_attention(q_ThD, kv, *step.context, **attrs)
    out = w.matrix(f"{at}.o_proj", m.hidden_size, m.num_heads * m.head_dim, None, "heads")
    return ops.linear(rounded(r.linear, o_TC), out), kv


def _select_blocks(
    m: Text,
    s: SparseAttention,
    layer: int,
    h_TC: Any,
    table: tuple[Any, Any],
    step: Step,
    kv: Any,
    w: Declare,
    r: Rounding,
) -> tuple[Any, Any]:
    """The index branch: index head i chooses the blocks of KV head i."""
    at = f"model.layers.{layer}.self_attn"
    iq_ThD = head_projection(m, h_TC, f"{at}.index_q", s.num_index_heads, s.index_dim, "index_heads", table, w, r.query)
    ik_ThD = head_projection(m, h_TC, f"{at}.index_k", 1, s.index_dim, None, table, w, r.index)
    kv = ops.index_write(kv, ik_ThD, step.slot_map, layer=layer)
    scores_ThP = ops.block_scores(iq_ThD, kv, *step.context, layer=layer)
    blocks_ThK = ops.block_select(
        scores_ThP,
        step.positions,
        topk=s.topk_blocks,
        block=s.block_size,
        local_blocks=s.local_blocks,
        init_blocks=s.init_blocks,
    )
    return blocks_ThK, kv


def head_projection(
    m: Sizes,
    h_TC: Any,
    at: str,
    heads: int,
    dim: int,
    axis: str | None,
    table: tuple[Any, Any],
    w: Declare,
    quantised: bool,
) -> Any:
    """Projection, per-head norm, RoPE: the same for q, k, index q and index k. Rounded once, after RoPE (§2.3)."""
    x_TC = ops.linear(h_TC, w.matrix(f"{at}_proj", heads * dim, m.hidden_size, axis, None))
    x_ThD = ops.head_rmsnorm(x_TC, w.vector(f"{at}_norm", dim), eps=m.rms_norm_eps, heads=heads)
    x_ThD = ops.rope(x_ThD, *table)
    return ops.round_heads(x_ThD) if quantised else x_ThD


def _moe(m: Text, moe: Moe, h_TC: Any, at: str, w: Declare) -> Any:
    """MODEL.md §2.5: the factor multiplies the routed sum only; the shared expert has weight 1."""
    gate = w.group(
        f"{at}.gate",
        {
            "weight": (f"{at}.gate.weight", (moe.num_experts, m.hidden_size), ("experts", None)),
            "bias": (f"{at}.e_score_correction_bias", (moe.num_experts,), ("experts",)),
        },
    )
    ids_TK, weights_TK = ops.router(h_TC, gate, topk=moe.experts_per_token)
    routed_TC = ops.experts(
        h_TC,
        ids_TK,
        weights_TK,
        w.group(f"{at}.experts", _expert_slots(m, moe, f"{at}.experts")),
        experts=moe.num_experts,
        routed_scaling_factor=moe.routed_scaling_factor,
        **activation(m),
    )
    return ops.add(routed_TC, mlp(m, h_TC, f"{at}.shared_experts", moe.shared_intermediate_size, w))


def _expert_slots(m: Text, moe: Moe, at: str) -> dict[str, tuple[str, tuple[int, ...], tuple[str | None, ...]]]:
    inner, hidden = moe.expert_intermediate_size, m.hidden_size
    slots: dict[str, tuple[str, tuple[int, ...], tuple[str | None, ...]]] = {}
    for slot in expert_slots(moe.num_experts):
        matrix, expert = slot.split(".")
        down = matrix == "w2"
        slots[slot] = (
            f"{at}.{expert}.{matrix}.weight",
            (hidden, inner) if down else (inner, hidden),
            (None, "ff") if down else ("ff", None),
        )
    return slots


def mlp(m: Sizes, h_TC: Any, at: str, inner: int, w: Declare) -> Any:
    """SwiGLU-OAI of width `inner` (MODEL.md §2.5)."""
    gate_TC = ops.linear(h_TC, w.matrix(f"{at}.gate_proj", inner, m.hidden_size, "ff", None))
    up_TC = ops.linear(h_TC, w.matrix(f"{at}.up_proj", inner, m.hidden_size, "ff", None))
    act_TC = ops.swiglu_oai(gate_TC, up_TC, **activation(m))
    return ops.linear(act_TC, w.matrix(f"{at}.down_proj", m.hidden_size, inner, None, "ff"))


def rounded(quantised: bool, x_TC: Any) -> Any:
    """`x` as it is quantised from; a graph in which nothing quantises it has no node here."""
    return ops.round_channels(x_TC) if quantised else x_TC


def norm(m: Sizes, x_TC: Any, name: str, w: Declare) -> Any:
    """Gemma RMS norm over the hidden channels (MODEL.md §2.2)."""
    return ops.gemma_rmsnorm(x_TC, w.vector(name, m.hidden_size), eps=m.rms_norm_eps)


def activation(m: Sizes) -> dict[str, float]:
    """Attributes of the activation's ops."""
    return {"alpha": m.activation.alpha, "beta": m.activation.beta, "limit": m.activation.limit}


def _require(part: D | None, what: str, layer: int) -> D:
    if part is None:
        raise GraphError(f"layer {layer} is {what} but the model description has no {what} part")
    return part
