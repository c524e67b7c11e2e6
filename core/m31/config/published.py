"""The published config.json contents, MODEL.md §1.1 to §1.4: for planning, documentation and tests."""

from __future__ import annotations

from typing import Any, Literal

PublishedName = Literal["m3.1-flash", "m3"]


def published(name: PublishedName) -> dict[str, Any]:
    """A fresh copy of the official config.

    `m3.1-flash` carries its quantization_config; `m3` is the BF16 release, which has none. The order and wording of
    `ignored_layers` is ours: the modules it covers are published, their spelling in the file is not.

    Raises:
        ValueError: another name.
    """
    if name not in ("m3.1-flash", "m3"):
        raise ValueError(f"no published config '{name}'; known: m3.1-flash, m3")
    flash = name == "m3.1-flash"
    compression = {
        "image_token_compression_method": "patch_merge",
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    }
    config: dict[str, Any] = {
        "architectures": ["MiniMaxM3SparseForConditionalGeneration"],
        "model_type": "minimax_m3_vl",
        "torch_dtype": "bfloat16",
        "image_token_index": 200025,
        "video_token_index": 200026,
        "image_seq_length": 576,
        "projector_hidden_size": 6144,
        "projector_hidden_act": "gelu",
        "multimodal_projector_bias": True,
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
        "process_image_mode": "dynamic_res",
        "img_token_compression_config": compression,
        "image_grid_pinpoints": [[h, w] for h in range(336, 2017, 336) for w in range(336, 2017, 336)],
        "num_reward_heads": 0,
        "text_config": _text(flash),
        "vision_config": _vision(flash, dict(compression)),
    }
    if flash:
        config["quantization_config"] = _quantization()
    return config


def _text(flash: bool) -> dict[str, Any]:
    moe = [0] * 3 + [1] * 57
    sparse = [1] * 60 if flash else list(moe)
    text: dict[str, Any] = {
        "architectures": ["MiniMaxM3SparseForCausalLM"],
        "model_type": "minimax_m2",
        "num_hidden_layers": 60,
        "hidden_size": 6144,
        "num_attention_heads": 64,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "vocab_size": 200064,
        "max_position_embeddings": 1048576,
        "rope_theta": 10_000_000 if flash else 5_000_000,
        "rotary_dim": 64,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1e-6,
        "use_gemma_norm": True,
        "use_qk_norm": True,
        "qk_norm_type": "per_head",
        "attention_output_gate": False,
        "hidden_act": "swigluoai",
        "swiglu_alpha": 1.702,
        "swiglu_beta": 1.0,
        "swiglu_limit": 7.0,
        "dense_intermediate_size": 12288,
        "intermediate_size": 3072,
        "shared_intermediate_size": 3072,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "n_shared_experts": 1,
        "scoring_func": "sigmoid",
        "use_routing_bias": True,
        "routed_scaling_factor": 2.0,
        "moe_layer_freq": moe,
        "tie_word_embeddings": False,
        "bos_token_id": 200034,
        "eos_token_id": 200020,
        "sparse_attention_config": {
            "use_sparse_attention": True,
            "sparse_attention_freq": sparse,
            "sparse_num_index_heads": 4,
            "sparse_index_dim": 128,
            "sparse_topk_blocks": 16,
            "sparse_block_size": 128,
            "sparse_local_block": 1,
            "sparse_init_block": 0,
            "sparse_score_type": "max",
            "sparse_disable_index_value": list(sparse),
        },
    }
    if not flash:
        text["num_mtp_modules"] = 7
        text["num_nextn_predict_layers"] = 1
    return text


def _vision(flash: bool, compression: dict[str, Any]) -> dict[str, Any]:
    return {
        "model_type": "clip_vision_model",
        "hidden_size": 1280,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "intermediate_size": 5120,
        "patch_size": 14,
        "num_channels": 3,
        "image_size": 672 if flash else 2016,
        "projection_dim": 6144,
        "position_embedding_type": "rope",
        "rope_mode": "3d",
        "rope_theta": 10000.0,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-5,
        "vision_segment_max_frames": 4,
        "img_token_compression_config": compression,
    }


def _quantization() -> dict[str, Any]:
    gates = [f"model.layers.{layer}.block_sparse_moe.gate" for layer in range(3, 60)]
    return {
        "quant_method": "mxfp8",
        "weight_block_size": [1, 32],
        "activation_scheme": "dynamic",
        "moe_quant_algo": "NVFP4",
        "moe_quant_format": "nvfp4-pack-quantized",
        "group_size": 16,
        "attention_quant_algo": "FP8",
        "kv_cache_quant_algo": "FP8",
        "index_k_quant_type": "nvfp4",
        "ignored_layers": [
            *gates,
            "lm_head",
            "model.embed_tokens",
            "multi_modal_projector",
            "patch_merge_mlp",
            "vision_tower",
        ],
    }
