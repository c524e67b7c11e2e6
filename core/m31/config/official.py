"""The official dialect: the config.json that the vendor publishes, MODEL.md §1.1 to §1.3.

Recognised by `moe_layer_freq`, `sparse_attention_config` and flat RoPE keys.
"""

from __future__ import annotations

from typing import Any

from pydantic import StrictBool, StrictStr

from m31.config.schema import (
    BlockCount,
    ExpertCount,
    Finite,
    Flag01,
    LayerCount,
    NaturalInt,
    PositiveFloat,
    PositiveInt,
    Strict,
    TextGeneric,
)
from m31.config.schema import Generic as _Generic


class OfficialText(TextGeneric):
    """`text_config`, or the whole file of the text-only architecture, MODEL.md §1.2."""

    num_hidden_layers: LayerCount
    hidden_size: PositiveInt
    num_attention_heads: PositiveInt
    num_key_value_heads: PositiveInt
    head_dim: PositiveInt
    vocab_size: PositiveInt
    max_position_embeddings: PositiveInt
    rope_theta: PositiveFloat
    rotary_dim: PositiveInt | None = None  # one of these two is required; both must agree (BUG-13, BUG-14)
    partial_rotary_factor: PositiveFloat | None = None
    rms_norm_eps: PositiveFloat
    use_gemma_norm: StrictBool
    use_qk_norm: StrictBool
    qk_norm_type: StrictStr
    hidden_act: StrictStr
    swiglu_alpha: PositiveFloat
    swiglu_beta: Finite | None = None  # the one number that may be absent: MODEL.md §1.2 fixes 1.0
    swiglu_limit: PositiveFloat
    dense_intermediate_size: PositiveInt
    intermediate_size: PositiveInt
    shared_intermediate_size: PositiveInt
    num_local_experts: ExpertCount
    num_experts_per_tok: PositiveInt
    n_shared_experts: PositiveInt
    scoring_func: StrictStr
    use_routing_bias: StrictBool
    routed_scaling_factor: PositiveFloat
    moe_layer_freq: list[Flag01]
    sparse_attention_config: dict[str, Any]


class OfficialSparse(Strict):
    """`sparse_attention_config`, MODEL.md §1.2. The `*_tokens` spellings convert as its rules say."""

    use_sparse_attention: StrictBool
    sparse_attention_freq: list[Flag01]
    sparse_num_index_heads: PositiveInt
    sparse_index_dim: PositiveInt
    sparse_topk_blocks: BlockCount
    sparse_block_size: BlockCount
    sparse_local_block: NaturalInt | None = None
    sparse_init_block: NaturalInt | None = None
    sparse_local_tokens: NaturalInt | None = None
    sparse_init_tokens: NaturalInt | None = None
    sparse_score_type: StrictStr
    sparse_disable_index_value: Flag01 | list[Flag01]


class OfficialVision(_Generic):
    """`vision_config`, MODEL.md §1.3. The merge sizes may sit here or in `img_token_compression_config`."""

    hidden_size: PositiveInt
    num_hidden_layers: LayerCount
    num_attention_heads: PositiveInt
    intermediate_size: PositiveInt
    patch_size: PositiveInt
    num_channels: PositiveInt
    image_size: PositiveInt
    layer_norm_eps: PositiveFloat
    rope_theta: PositiveFloat
    rope_mode: StrictStr
    position_embedding_type: StrictStr
    hidden_act: StrictStr
    vision_segment_max_frames: PositiveInt
    projection_dim: PositiveInt | None = None
    spatial_merge_size: PositiveInt | None = None
    temporal_patch_size: PositiveInt | None = None
    img_token_compression_config: dict[str, Any] | None = None
    vocab_size: NaturalInt | None = None  # left over from the CLIP class; nothing reads it
