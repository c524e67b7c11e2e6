"""`m31 demo DIR`: a small checkpoint in the official layout whose weights are random.

It exists so that every part, from the tokenizer to the sampler, can be tried before anybody downloads 250 GB.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from m31.cli.output import Output
from m31.errors import RequestError

VOCAB_SIZE = 512
MAX_SHARD_BYTES = 1 << 20  # small, so that the demo has several shards and an index like a real checkpoint


def config(*, layers: int, vocab_size: int, special_ids: dict[str, int]) -> dict[str, Any]:
    """The demo's config.json: the official dialect of MODEL.md §1, shaped like M3.1, in miniature.

    Args:
        layers: number of layers; the first half is dense, the rest mixture of experts, all are sparse.
        vocab_size: rows of the embedding.
        special_ids: token ids of the role header (beginning of sequence) and of the end of a message.
    """
    dense = layers // 2
    return {
        "architectures": ["MiniMaxM3SparseForCausalLM"],
        "model_type": "minimax_m2",
        "torch_dtype": "bfloat16",
        "num_hidden_layers": layers,
        "hidden_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": vocab_size,
        "max_position_embeddings": 8192,
        "rope_theta": 10_000_000,
        "rotary_dim": 16,
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
        "dense_intermediate_size": 256,
        "intermediate_size": 64,
        "shared_intermediate_size": 64,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "scoring_func": "sigmoid",
        "use_routing_bias": True,
        "routed_scaling_factor": 2.0,
        "moe_layer_freq": [0] * dense + [1] * (layers - dense),
        "tie_word_embeddings": False,
        "bos_token_id": special_ids["]~b]"],
        "eos_token_id": special_ids["[e~["],
        "sparse_attention_config": {
            "use_sparse_attention": True,
            "sparse_attention_freq": [1] * layers,
            "sparse_num_index_heads": 2,
            "sparse_index_dim": 32,
            "sparse_topk_blocks": 16,
            "sparse_block_size": 128,
            "sparse_local_block": 1,
            "sparse_init_block": 0,
            "sparse_score_type": "max",
            "sparse_disable_index_value": [1] * layers,
        },
    }


def check_numbers(seed: int, layers: int) -> None:
    """Refuse numbers that make no model. Raises: RequestError."""
    for flag, value, low, high in (("--seed", seed, 0, 2**63 - 1), ("--layers", layers, 1, 64)):
        if not low <= value <= high:
            raise RequestError(
                f"{value} is out of range", where=flag, expected=f"{low} to {high:,}", fix="choose a number in it"
            )


def write(folder: Path, *, seed: int, layers: int) -> None:
    """Write the demo checkpoint, all or nothing.

    Args:
        folder: where; new or empty.
        seed: seed of the weights.
        layers: number of layers, 1 to 64.

    Raises: RequestError for numbers out of range, CheckpointError when the folder has content or cannot be written.
    """
    import torch

    from m31.checkpoint import writer
    from m31.config import parse
    from m31.text import demo

    check_numbers(seed, layers)
    raw = config(layers=layers, vocab_size=VOCAB_SIZE, special_ids=demo.special_ids())
    tensors = writer.random_tensors(parse(raw, where="demo config"), seed=seed, dtype=torch.bfloat16)
    generation = {"bos_token_id": raw["bos_token_id"], "eos_token_id": raw["eos_token_id"]}
    files = demo.tokenizer_files(VOCAB_SIZE) | {"generation_config.json": json.dumps(generation, indent=2).encode()}
    writer.write(folder, raw, tensors, max_shard_bytes=MAX_SHARD_BYTES, extra_files=files)


def command(args: argparse.Namespace, out: Output) -> int:
    """Run the command; the exit code."""
    folder = Path(args.folder)
    write(folder, seed=args.seed, layers=args.layers)
    size = sum(path.stat().st_size for path in folder.iterdir())
    out.note(
        f"wrote a demo checkpoint to {folder} ({args.layers} layers, {size / 1e6:.1f} MB). "
        f"Its weights are random (seed {args.seed}): it produces noise, not language."
    )
    return 0
