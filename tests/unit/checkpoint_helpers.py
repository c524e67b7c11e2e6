"""Small checkpoints for the tests of m31.checkpoint, in the official layout."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from m31 import config
from m31.checkpoint import Checkpoint, random_tensors, write


def tiny_config(*, vision: bool = True, **text: Any) -> dict[str, Any]:
    """An official config.json of three layers (full/dense, sparse/dense, sparse/moe); `text` overrides text keys."""
    mapping = config.published("m3")
    section = mapping["text_config"]
    section.update(
        num_hidden_layers=3,
        hidden_size=32,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        rotary_dim=8,
        vocab_size=64,
        max_position_embeddings=512,
        dense_intermediate_size=48,
        intermediate_size=24,
        shared_intermediate_size=24,
        num_local_experts=4,
        num_experts_per_tok=2,
        moe_layer_freq=[0, 0, 1],
        bos_token_id=1,
        eos_token_id=2,
    )
    section["sparse_attention_config"].update(
        sparse_attention_freq=[0, 1, 1],
        sparse_disable_index_value=[0, 1, 1],
        sparse_num_index_heads=2,
        sparse_index_dim=16,
        sparse_topk_blocks=3,
        sparse_block_size=4,
    )
    section.update(text)
    mapping.update(projector_hidden_size=20, image_token_index=10, video_token_index=11, torch_dtype="float32")
    mapping["vision_config"].update(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=24,
        patch_size=2,
        projection_dim=32,
    )
    if vision:
        return mapping
    flat: dict[str, Any] = section | {"architectures": ["MiniMaxM3SparseForCausalLM"], "torch_dtype": "float32"}
    return flat


def tiny_folder(folder: Path, *, mapping: Mapping[str, Any] | None = None, shard: int = 20_000) -> Path:
    """Write random weights for a tiny config; several shards by default."""
    chosen = tiny_config(vision=False) if mapping is None else mapping
    model = config.parse(chosen, where="config.json")
    tensors = random_tensors(model, seed=1, dtype=torch.float32)
    write(folder, chosen, tensors, max_shard_bytes=shard, extra_files={})
    return folder


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """All weights of a folder by canonical name, copied."""
    checkpoint = Checkpoint.open(folder)
    return {name: checkpoint.tensor(name).load().clone() for name in checkpoint.names}


def read_shard(path: Path) -> tuple[dict[str, Any], bytes]:
    """Header object and data of a safetensors file, by a parser of our own."""
    raw = path.read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def raw_shard(header: bytes, data: bytes) -> bytes:
    """A safetensors file from header text and data, both as given."""
    return struct.pack("<Q", len(header)) + header + data


def write_shard(path: Path, header: Mapping[str, Any], data: bytes) -> None:
    """Write a safetensors file, right or wrong."""
    path.write_bytes(raw_shard(json.dumps(header).encode(), data))


def edit_config(folder: Path, **changes: Any) -> None:
    """Change top-level keys of a folder's config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_index(folder: Path, **changes: str | None) -> None:
    """Change entries of the weight map; None removes one. Keys are stored names."""
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    for name, shard in changes.items():
        if shard is None:
            del index["weight_map"][name]
        else:
            index["weight_map"][name] = shard
    path.write_text(json.dumps(index))


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def merge_into_one(folder: Path) -> dict[str, Any]:
    """Rewrite a folder as a single model.safetensors without index; returns its header."""
    header: dict[str, Any] = {}
    data = b""
    for path in shards(folder):
        entries, body = read_shard(path)
        entries.pop("__metadata__", None)
        for name, entry in entries.items():
            header[name] = entry | {"data_offsets": [offset + len(data) for offset in entry["data_offsets"]]}
        data += body
        path.unlink()
    (folder / "model.safetensors.index.json").unlink()
    write_shard(folder / "model.safetensors", header, data)
    return header


def rewrite(folder: Path, change: Callable[[dict[str, Any], bytes], bytes]) -> None:
    """Make the folder single-file and let `change` edit header and data."""
    merge_into_one(folder)
    header, data = read_shard(folder / "model.safetensors")
    data = change(header, data)
    write_shard(folder / "model.safetensors", header, data)
