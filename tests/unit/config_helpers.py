"""Config contents shared by the tests of m31.config."""

from __future__ import annotations

from typing import Any

WHERE = "config.json"


def saved_text() -> dict[str, Any]:
    """A text-only config as transformers 5.23 writes it."""
    return {
        "architectures": ["MiniMaxM3VLForCausalLM"],
        "model_type": "minimax_m3_vl_text",
        "transformers_version": "5.23.0",
        "dtype": "float32",
        "use_cache": True,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "router_aux_loss_coef": 0.001,
        "router_jitter_noise": 0.0,
        "output_router_logits": False,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": 64,
        "intermediate_size": 32,
        "dense_intermediate_size": 96,
        "shared_intermediate_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rotary_dim": 8,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.5},
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "vocab_size": 300,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "routed_scaling_factor": 2.0,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
        "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
        "mlp_layer_types": ["dense", "dense", "sparse"],
        "index_n_heads": 2,
        "index_head_dim": 16,
        "index_block_size": 4,
        "index_topk_blocks": 3,
        "index_local_blocks": 1,
    }
