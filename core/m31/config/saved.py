"""The transformers dialect: the config.json that transformers 5.23 writes with `save_pretrained`.

Recognised by `layer_types`, `mlp_layer_types`, `index_*` and `rope_parameters`. Five numbers do not exist in this
dialect because transformers' model code fixes them; they are the constants below and nothing else is assumed.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import StrictBool, StrictStr

from m31.config.schema import (
    BlockCount,
    ExpertCount,
    Finite,
    LayerCount,
    NaturalInt,
    PositiveFloat,
    PositiveInt,
    Strict,
    TextGeneric,
)
from m31.config.schema import Generic as _Generic

INIT_BLOCKS = 0  # its indexer has no initial blocks at all, MODEL.md §1.2
SWIGLU_BETA = 1.0  # written into its activation as `up + 1`
SHARED_EXPERTS = 1  # its MoE block builds exactly one
SEGMENT_MAX_FRAMES = 4  # its video processor emits grids of at most 4 temporal patches, MODEL.md §6.2


class SavedText(TextGeneric):
    """`text_config`, or the whole file of `MiniMaxM3VLForCausalLM`."""

    num_hidden_layers: LayerCount
    hidden_size: PositiveInt
    num_attention_heads: PositiveInt
    num_key_value_heads: PositiveInt
    head_dim: PositiveInt
    vocab_size: PositiveInt
    max_position_embeddings: PositiveInt
    rope_parameters: dict[str, Any]
    rotary_dim: PositiveInt
    rms_norm_eps: PositiveFloat
    hidden_act: StrictStr
    swiglu_alpha: PositiveFloat
    swiglu_limit: PositiveFloat
    dense_intermediate_size: PositiveInt
    intermediate_size: PositiveInt
    shared_intermediate_size: PositiveInt
    num_local_experts: ExpertCount
    num_experts_per_tok: PositiveInt
    routed_scaling_factor: PositiveFloat
    layer_types: list[Literal["minimax_m3_sparse", "full_attention"]]
    mlp_layer_types: list[Literal["sparse", "dense"]]
    index_n_heads: PositiveInt
    index_head_dim: PositiveInt
    index_block_size: BlockCount
    index_topk_blocks: BlockCount
    index_local_blocks: NaturalInt
    # Official extras that survive a load and save; transformers ignores them, so only its own behaviour may be named.
    use_gemma_norm: StrictBool | None = None
    use_qk_norm: StrictBool | None = None
    qk_norm_type: StrictStr | None = None
    swiglu_beta: Finite | None = None
    n_shared_experts: NaturalInt | None = None
    scoring_func: StrictStr | None = None
    use_routing_bias: StrictBool | None = None


class SavedRope(Strict):
    """`rope_parameters` of the text model. Scaling keys never reach this section: the caller refuses them by name."""

    rope_type: StrictStr
    rope_theta: PositiveFloat
    partial_rotary_factor: PositiveFloat


class SavedVision(_Generic):
    """`vision_config`."""

    hidden_size: PositiveInt
    num_hidden_layers: LayerCount
    num_attention_heads: PositiveInt
    intermediate_size: PositiveInt
    patch_size: PositiveInt
    temporal_patch_size: PositiveInt
    spatial_merge_size: PositiveInt
    num_channels: PositiveInt
    image_size: PositiveInt
    layer_norm_eps: PositiveFloat
    hidden_act: StrictStr
    rope_parameters: dict[str, Any]
    rope_mode: StrictStr | None = None
    position_embedding_type: StrictStr | None = None
    projection_dim: PositiveInt | None = None
    vision_segment_max_frames: PositiveInt | None = None
    img_token_compression_config: dict[str, Any] | None = None
    vocab_size: NaturalInt | None = None


class SavedVisionRope(Strict):
    """`rope_parameters` of the vision tower."""

    rope_type: StrictStr
    rope_theta: PositiveFloat
