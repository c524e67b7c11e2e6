"""Small checkpoints in every format that m31 reads: BF16, M3-MXFP8, M3.1-Flash with its draft head, and ModelOpt's."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from m31 import config
from m31.checkpoint import Checkpoint, encoded, random_tensors, target_config, write
from m31.checkpoint.draft import expected_draft
from m31.checkpoint.lazy import stored_dtype, torch_dtype
from m31.config.draft import parse_draft
from m31.formats import mxfp8

LAYERS = 3
EXPERTS = 4


def bf16_config(*, vision: bool = False, name: config.PublishedName = "m3.1-flash") -> dict[str, Any]:
    """An official BF16 config of three layers, the last with experts, whose widths every block divides."""
    mapping = config.published(name)
    mapping.pop("quantization_config", None)
    text = mapping["text_config"]
    text.update(
        num_hidden_layers=LAYERS,
        hidden_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        rotary_dim=16,
        vocab_size=64,
        max_position_embeddings=512,
        dense_intermediate_size=96,
        intermediate_size=32,
        shared_intermediate_size=32,
        num_local_experts=EXPERTS,
        num_experts_per_tok=2,
        moe_layer_freq=[0, 0, 1],
        bos_token_id=1,
        eos_token_id=2,
    )
    sparse = [1, 1, 1] if name == "m3.1-flash" else [0, 1, 1]
    text["sparse_attention_config"].update(
        sparse_attention_freq=sparse,
        sparse_disable_index_value=sparse,
        sparse_num_index_heads=2,
        sparse_index_dim=32,
        sparse_topk_blocks=3,
        sparse_block_size=4,
    )
    mapping.update(projector_hidden_size=20, image_token_index=10, video_token_index=11)
    mapping["vision_config"].update(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=24,
        patch_size=2,
        projection_dim=64,
    )
    if vision:
        return mapping
    return {**text, "architectures": ["MiniMaxM3SparseForCausalLM"], "torch_dtype": "bfloat16"}


def bf16_weights(mapping: Mapping[str, Any], seed: int = 1) -> dict[str, torch.Tensor]:
    """Random logical weights by canonical name."""
    model = config.parse(mapping, where="config.json")
    return dict(random_tensors(model, seed=seed, dtype=torch.bfloat16))


def write_bf16(folder: Path, mapping: Mapping[str, Any], *, seed: int = 1, shard: int = 60_000) -> Checkpoint:
    """A BF16 folder in several shards."""
    tensors = bf16_weights(mapping, seed).items()
    return write(folder, mapping, tensors, max_shard_bytes=shard, extra_files={"tokenizer.json": b"{}"})


def write_quantised(
    folder: Path, mapping: Mapping[str, Any], target: Any, *, seed: int = 1, shard: int = 60_000
) -> Checkpoint:
    """`write_bf16`'s weights in the target format, without a draft head."""
    model = config.parse(mapping, where="config.json")
    raw, described = target_config(mapping, model, target)
    tensors = encoded(described, bf16_weights(mapping, seed).items(), input_scales={})
    return write(folder, raw, tensors, max_shard_bytes=shard, extra_files={})


def draft_config(**changes: Any) -> dict[str, Any]:
    """`dspark/config.json` for the target of `bf16_config`, MODEL.md §1.5."""
    mapping: dict[str, Any] = {
        "architectures": ["DSparkMiniMaxDraftModel"],
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "rotary_dim": 16,
        "partial_rotary_factor": 0.5,
        "rope_theta": 1e7,
        "rms_norm_eps": 1e-6,
        "vocab_size": 64,
        "dense_intermediate_size": 96,
        "dspark_ffn_hidden_size": 96,
        "dspark_use_dense_ffn": True,
        "moe_layer_freq": [0, 0],
        "sparse_attention_config": None,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
        "use_gemma_norm": True,
        "sliding_window": 16,
        "layer_types": ["sliding_attention"] * 2,
        "dspark_block_size": 7,
        "dspark_noise_token_id": 58,
        "dspark_target_layer_ids": [0, 2],
        "dspark_markov_rank": 8,
        "dspark_markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        "dspark_hybrid_context_fusion": False,
        "dflash_config": {"num_target_layers": 3, "num_hidden_layers": 2, "target_layer_ids": [0, 2]},
        "quantization_config": {
            "quant_method": "mxfp8",
            "weight_block_size": [1, 32],
            "activation_scheme": "dynamic",
        },
    }
    return {**mapping, **changes}


def draft_weights(mapping: Mapping[str, Any], seed: int = 5) -> dict[str, torch.Tensor]:
    """Random stored tensors of a draft head by canonical name; MXFP8 weights really encoded."""
    generator = torch.Generator().manual_seed(seed)
    out: dict[str, torch.Tensor] = {}
    for name, decl in expected_draft(parse_draft(mapping, where="dspark/config.json")).items():
        values = torch.randn(decl.shape, generator=generator) / math.sqrt(decl.shape[-1])
        if decl.storage == "fp8":
            out[name], out[f"{name}_scale_inv"] = mxfp8.encode(values)
        elif decl.storage == "plain":
            out[name] = values.to(torch_dtype(decl.dtypes[0]))
    return out


def write_draft(folder: Path, *, prefix: str = "language_model.model.", seed: int = 5, **changes: Any) -> None:
    """A `dspark` folder, single file."""
    mapping = draft_config(**changes)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(mapping))
    save(folder / "model.safetensors", {prefix + name: t for name, t in draft_weights(mapping, seed).items()})


def save(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """A safetensors file, by a writer of our own."""
    header: dict[str, Any] = {}
    body: list[bytes] = []
    position = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: -item[1].element_size()):
        raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        span = [position, position + len(raw)]
        header[name] = {"dtype": stored_dtype(tensor.dtype), "shape": list(tensor.shape), "data_offsets": span}
        body.append(raw)
        position += len(raw)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(body))


def stored_tensors(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """Every stored tensor by canonical name, copied."""
    return {name: checkpoint.stored(name).load().clone() for name in checkpoint.declared}


MODELOPT_SECTION: dict[str, Any] = {
    "quant_method": "modelopt",
    "quant_algo": "MIXED_PRECISION",
    "producer": {"name": "modelopt", "version": "0.44.0"},
    "ignore": ["lm_head", "*gate"],
    "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
    "quantized_layers": {
        "model.layers.2.block_sparse_moe.experts": {"quant_algo": "NVFP4", "group_size": 16},
        "model.layers.0.self_attn.q_proj": {"quant_algo": "MXFP8", "group_size": 32},
    },
}


def to_modelopt(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """M3.1's stored tensors under ModelOpt's names, scales decoding, scalars of shape ()."""
    out: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if name.endswith((".weight_global_scale", ".input_global_scale")):
            new = name.replace("weight_global_scale", "weight_scale_2").replace("input_global_scale", "input_scale")
            out[new] = (1.0 / tensor).reshape(())
        elif name.endswith(".weight_packed"):
            out[name.removesuffix("_packed")] = tensor
        else:
            out[name.replace(".weight_scale_inv", ".weight_scale")] = tensor
    return out


def write_modelopt(folder: Path, mapping: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> Path:
    """A single-file folder in ModelOpt's dialect with the given stored tensors."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**mapping, "quantization_config": MODELOPT_SECTION}))
    save(folder / "model.safetensors", tensors)
    return folder
