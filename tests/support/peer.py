"""Tiny models made and run by transformers, the oracle that we did not write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import MiniMaxM3SparseForConditionalGeneration
from transformers.models.minimax_m3_vl.configuration_minimax_m3_vl import MiniMaxM3VLConfig, MiniMaxM3VLTextConfig
from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import MiniMaxM3VLForCausalLM

SPARSE, FULL = "minimax_m3_sparse", "full_attention"
VOCAB = 211


def text_config(**changes: Any) -> dict[str, Any]:
    """Four layers, two dense and two MoE, all sparse; block 4, top-3; clamps that really clamp."""
    values: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 32,
        "dense_intermediate_size": 96,
        "shared_intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rotary_dim": 8,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.5},
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "mlp_layer_types": ["dense"] * 2 + ["sparse"] * 2,
        "layer_types": [SPARSE] * 4,
        "index_n_heads": 2,
        "index_head_dim": 16,
        "index_block_size": 4,
        "index_topk_blocks": 3,
        "index_local_blocks": 1,
        "swiglu_limit": 1.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "max_position_embeddings": 8192,
    }
    return {**values, **changes}


def randomise(model: torch.nn.Module, seed: int) -> None:
    """Weights under which every branch of the model matters; transformers' own leave norms, bias and clamps inert."""
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, value in [*model.named_parameters(), *model.named_buffers()]:
            if "inv_freq" in name:
                continue
            vector = value.ndim == 1
            value.copy_(torch.randn(value.shape, generator=rng) * (0.3 if vector else 1.5 * value.shape[-1] ** -0.5))


def vision_language(folder: Path, seed: int, **changes: Any) -> MiniMaxM3SparseForConditionalGeneration:
    """A vision-language model of the architecture, saved to `folder`."""
    vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = MiniMaxM3VLConfig(text_config=text_config(**changes), vision_config=vision, projector_hidden_size=64)
    model = MiniMaxM3SparseForConditionalGeneration(config).eval()
    randomise(model, seed)
    model.save_pretrained(folder)
    return model


def text_only(folder: Path, seed: int, **changes: Any) -> MiniMaxM3VLForCausalLM:
    """A text-only model, saved to `folder`."""
    model = MiniMaxM3VLForCausalLM(MiniMaxM3VLTextConfig(**text_config(**changes))).eval()
    randomise(model, seed)
    model.save_pretrained(folder)
    return model


@torch.no_grad()
def logits(model: Any, ids: list[int]) -> torch.Tensor:
    """float32 logits [n, V] of one prefill."""
    return model(input_ids=torch.tensor([ids])).logits[0]


@torch.no_grad()
def decode(model: Any, ids: list[int], steps: int) -> tuple[list[int], torch.Tensor]:
    """Greedy tokens and the logits [steps, V] from which each was taken, token by token with a cache."""
    out = model(input_ids=torch.tensor([ids]), use_cache=True)
    tokens, rows = [], []
    for _ in range(steps):
        rows.append(out.logits[0, -1])
        tokens.append(int(rows[-1].argmax()))
        out = model(input_ids=torch.tensor([[tokens[-1]]]), past_key_values=out.past_key_values, use_cache=True)
    return tokens, torch.stack(rows)
