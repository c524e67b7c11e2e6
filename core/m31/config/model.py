"""The typed, validated description of a model: the one thing every other room reads instead of config.json.

Nothing here has a default for a number: a description is complete or it does not exist (BUG-2).
Field by field source: MODEL.md §1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

AttentionKind = Literal["sparse", "full"]
MlpKind = Literal["dense", "moe"]
Dialect = Literal["official", "transformers"]


@dataclass(frozen=True, kw_only=True)
class SparseAttention:
    """MSA index branch and block selection, MODEL.md §2.4. One index head serves one KV head."""

    num_index_heads: int
    index_dim: int
    topk_blocks: int
    block_size: int  # tokens; also the KV page size
    local_blocks: int  # forced blocks ending with the query's own
    init_blocks: int  # forced blocks at the start of the sequence


@dataclass(frozen=True, kw_only=True)
class Moe:
    """Mixture of experts, MODEL.md §2.5."""

    num_experts: int
    experts_per_token: int
    num_shared_experts: int  # 1 everywhere; the shared expert's width is shared_intermediate_size
    expert_intermediate_size: int
    shared_intermediate_size: int
    routed_scaling_factor: float  # multiplies the routed sum once, never the shared expert (BUG-27)


@dataclass(frozen=True, kw_only=True)
class SwigluOai:
    """act(g, u) = (clamp(u, -limit, limit) + beta) * min(g, limit) * sigmoid(alpha * min(g, limit)), MODEL.md §2.5."""

    alpha: float
    beta: float
    limit: float


@dataclass(frozen=True, kw_only=True)
class Text:
    """The text model. Per-layer kinds are explicit; their lengths equal num_layers."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position: int  # tokens
    rope_theta: float
    rotary_dim: int  # rotated channels of each head, NeoX pairing
    rms_norm_eps: float
    activation: SwigluOai
    dense_intermediate_size: int
    attention: tuple[AttentionKind, ...]
    mlp: tuple[MlpKind, ...]
    sparse: SparseAttention | None  # None only when no layer is sparse
    moe: Moe | None  # None only when no layer is moe
    tie_word_embeddings: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None
    num_mtp_layers: int  # M3's multi-token-prediction layers declared by the config; 0 in M3.1


@dataclass(frozen=True, kw_only=True)
class Vision:
    """The vision tower and projector, MODEL.md §1.3 and §6."""

    hidden_size: int
    num_layers: int
    num_heads: int
    intermediate_size: int
    patch_size: int
    temporal_patch_size: int
    spatial_merge_size: int
    num_channels: int
    layer_norm_eps: float
    rope_theta: float
    image_size: int  # inert: no learned position table
    segment_max_frames: int  # temporal patches
    projector_hidden_size: int


WeightFormat = Literal["plain", "mxfp8", "nvfp4"]
ScaleDialect = Literal["official", "modelopt"]


@dataclass(frozen=True, kw_only=True)
class Quantization:
    """What `quantization_config` says, MODEL.md §1.4.

    `dialect` tells whose names and scales the files carry: the official NVFP4 global scales encode (they multiply a
    weight before it is rounded), ModelOpt's decode (BUG-42, BUG-43).
    """

    linears: WeightFormat  # attention, dense MLP, shared experts
    experts: WeightFormat
    ignored: tuple[str, ...]  # module names kept in BF16/F32, normalised without a leading "model."
    dialect: ScaleDialect


@dataclass(frozen=True, kw_only=True)
class Model:
    """A whole model."""

    architecture: str
    dialect: Dialect
    text: Text
    vision: Vision | None  # None for the text-only alias architectures
    image_token_id: int | None
    video_token_id: int | None
    quantization: Quantization | None  # None: BF16 / FP32 weights
    dtype: str | None  # "bfloat16" | "float32" as declared; None when config.json does not say
