"""Small checkpoints with random weights, one for each way in which weights are stored, in kernels' real sizes.

Heads have 128 channels and blocks 128 tokens, as in the published model: a kernel may serve nothing else (MODEL.md
§1.2). Widths are small, so that the reference takes a second or two for more than 16 blocks.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from m31.errors import RequestError

#: name -> target format of `m31.checkpoint.target`
FORMATS = {"random-bf16": "bf16", "random-m31": "m31", "random-m3-mxfp8": "m3-mxfp8"}
VOCAB_SIZE = 512
SEED = 31


def config() -> dict[str, Any]:
    """config.json contents (MODEL.md §1), unquantised: one dense and two MoE layers, all sparse."""
    from m31.text import demo

    special, layers = demo.special_ids(), 3
    return {
        "architectures": ["MiniMaxM3SparseForCausalLM"],
        "model_type": "minimax_m2",
        "torch_dtype": "bfloat16",
        "num_hidden_layers": layers,
        "hidden_size": 128,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": 1_048_576,
        "rope_theta": 10_000_000,
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
        "dense_intermediate_size": 192,
        "intermediate_size": 64,
        "shared_intermediate_size": 96,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "scoring_func": "sigmoid",
        "use_routing_bias": True,
        "routed_scaling_factor": 2.0,
        "moe_layer_freq": [0, 1, 1],
        "tie_word_embeddings": False,
        "bos_token_id": special["]~b]"],
        "eos_token_id": special["[e~["],
        "sparse_attention_config": {
            "use_sparse_attention": True,
            "sparse_attention_freq": [1] * layers,
            "sparse_num_index_heads": 2,
            "sparse_index_dim": 128,
            "sparse_topk_blocks": 16,
            "sparse_block_size": 128,
            "sparse_local_block": 1,
            "sparse_init_block": 0,
            "sparse_score_type": "max",
            "sparse_disable_index_value": [1] * layers,
        },
    }


def write(folder: Path, name: str) -> None:
    """Write one of `FORMATS`, all or nothing; the same bytes everywhere.

    Raises:
        RequestError: no such checkpoint.
        CheckpointError: the folder has content or cannot be written.
    """
    import torch

    from m31.checkpoint import encoded, target_config, writer
    from m31.config import parse
    from m31.text import demo

    if name not in FORMATS:
        raise RequestError(f"'{name}' is no synthetic checkpoint", expected=", ".join(FORMATS))
    raw = config()
    plain = parse(raw, where=name)
    tensors = writer.random_tensors(plain, seed=SEED, dtype=torch.bfloat16)
    if FORMATS[name] != "bf16":
        raw, target = target_config(raw, plain, FORMATS[name])  # type: ignore[arg-type]
        tensors = encoded(target, tensors, input_scales={})
    generation = {"bos_token_id": raw["bos_token_id"], "eos_token_id": raw["eos_token_id"]}
    files = demo.tokenizer_files(VOCAB_SIZE) | {"generation_config.json": json.dumps(generation, indent=2).encode()}
    writer.write(folder, raw, tensors, max_shard_bytes=1 << 30, extra_files=files)


def draft_config(block: int) -> dict[str, Any]:
    """`dspark/config.json` of a head for the model of `config` (MODEL.md §1.5), unquantised.

    Args:
        block: tokens drafted in one pass.
    """
    from m31.text import demo

    special, target = demo.special_ids(), config()
    layers = [0, target["num_hidden_layers"] - 1]
    same: tuple[str, ...] = (
        "hidden_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "rotary_dim",
        "rope_theta",
    )
    same += ("rms_norm_eps", "vocab_size", "dense_intermediate_size", "swiglu_alpha", "swiglu_limit", "use_gemma_norm")
    return {name: target[name] for name in same} | {
        "architectures": ["DSparkMiniMaxDraftModel"],
        "num_hidden_layers": 1,
        "dspark_ffn_hidden_size": target["dense_intermediate_size"],
        "dspark_use_dense_ffn": True,
        "sliding_window": 256,
        "layer_types": ["sliding_attention"],
        "dspark_block_size": block,
        "dspark_noise_token_id": special["[e~["],
        "dspark_target_layer_ids": layers,
        "dspark_markov_rank": 16,
        "dspark_markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        "dflash_config": {
            "num_target_layers": target["num_hidden_layers"],
            "num_hidden_layers": 1,
            "target_layer_ids": layers,
        },
    }


def write_with_draft(folder: Path, name: str, block: int) -> None:
    """`write`, and a draft head beside it that drafts up to `block` tokens.

    Raises:
        RequestError, CheckpointError: see `write`.
    """
    import torch

    from m31.checkpoint.draft import FOLDER, expected_draft
    from m31.checkpoint.header import encode_header
    from m31.config.draft import parse_draft

    write(folder, name)
    raw = draft_config(block)
    entries: dict[str, dict[str, Any]] = {}
    body = b""
    for at, (tensor, decl) in enumerate(expected_draft(parse_draft(raw, where=FOLDER)).items()):
        made = torch.Generator().manual_seed(SEED + at)
        values = torch.randn(decl.shape, generator=made) / math.sqrt(decl.shape[-1])
        stored = values.to(torch.bfloat16).view(torch.uint8).numpy().tobytes()
        entries[tensor] = {
            "dtype": "BF16",
            "shape": list(decl.shape),
            "data_offsets": [len(body), len(body) + len(stored)],
        }
        body += stored
    (folder / FOLDER).mkdir()
    (folder / FOLDER / "config.json").write_text(json.dumps(raw, indent=2), encoding="utf-8")
    (folder / FOLDER / "model.safetensors").write_bytes(encode_header(entries, {}) + body)
