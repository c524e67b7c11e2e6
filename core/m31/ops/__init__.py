"""The op interface: every op of the model, declared once (DESIGN.md §4)."""

from m31.ops.attention import dense_attention, sparse_attention
from m31.ops.basic import add, embedding, gather_rows
from m31.ops.cache import index_write, kv_write
from m31.ops.collective import all_gather, all_reduce
from m31.ops.draft import concat, confidence, draft_attention, markov_bias, markov_embedding
from m31.ops.linear import linear, lm_head
from m31.ops.lora import lora_experts, lora_logits
from m31.ops.moe import experts, router, swiglu_oai
from m31.ops.norm import gemma_rmsnorm, head_rmsnorm
from m31.ops.rope import rope, rope_table
from m31.ops.rounding import round_channels, round_heads
from m31.ops.select import block_scores, block_select
from m31.ops.spec import Arg, Attrs, Case, OpSpec, StateType, TensorDecl, TensorType, ValueType, WeightDecl

ALL: dict[str, OpSpec] = {
    spec.name: spec
    for spec in (
        embedding,
        gemma_rmsnorm,
        head_rmsnorm,
        rope_table,
        rope,
        round_channels,
        round_heads,
        linear,
        kv_write,
        index_write,
        block_scores,
        block_select,
        sparse_attention,
        dense_attention,
        router,
        experts,
        swiglu_oai,
        add,
        gather_rows,
        lm_head,
        all_reduce,
        all_gather,
    )
}

#: Ops of the draft head and of the taps that feed it: asked for only of a session whose `Limits.draft_tokens` allow it.
DRAFT: dict[str, OpSpec] = {
    spec.name: spec for spec in (concat, draft_attention, markov_embedding, markov_bias, confidence)
}

#: Ops of an adapter that is applied to the head or to routed experts; asked for only with one.
ADAPTER: dict[str, OpSpec] = {spec.name: spec for spec in (lora_experts, lora_logits)}

__all__ = [
    "ADAPTER",
    "ALL",
    "DRAFT",
    "Arg",
    "Attrs",
    "Case",
    "OpSpec",
    "StateType",
    "TensorDecl",
    "TensorType",
    "ValueType",
    "WeightDecl",
    "add",
    "all_gather",
    "all_reduce",
    "block_scores",
    "block_select",
    "concat",
    "confidence",
    "dense_attention",
    "draft_attention",
    "embedding",
    "experts",
    "gather_rows",
    "gemma_rmsnorm",
    "head_rmsnorm",
    "index_write",
    "kv_write",
    "linear",
    "lm_head",
    "lora_experts",
    "lora_logits",
    "markov_bias",
    "markov_embedding",
    "rope",
    "rope_table",
    "round_channels",
    "round_heads",
    "router",
    "sparse_attention",
    "swiglu_oai",
]
