"""Adapter folders with random pairs, and the same adapters added to decoded weights by numpy."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tests.support import quantised

from m31.checkpoint import Checkpoint

# Endings of module names, by what they are part of; the official names of MODEL.md §4.1.
PLACES: dict[str, tuple[str, ...]] = {
    "attention": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "index branch": ("index_q_proj", "index_k_proj"),
    "dense MLP": ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
    "shared expert": ("shared_experts.gate_proj", "shared_experts.up_proj", "shared_experts.down_proj"),
    "routed experts": ("w1", "w2", "w3"),
    "head": ("lm_head",),
}
EVERYWHERE = tuple(name for names in PLACES.values() for name in names)
Pairs = dict[str, tuple[torch.Tensor, torch.Tensor]]


def shapes(checkpoint: Checkpoint) -> dict[str, tuple[int, ...]]:
    """Every two-dimensional weight of the text model but table and routers: module name -> [out, in]."""
    found = {name.removesuffix(".weight"): checkpoint.tensor(name).shape for name in checkpoint.names}
    return {
        name: shape
        for name, shape in found.items()
        if len(shape) == 2 and name != "model.embed_tokens" and not name.endswith("block_sparse_moe.gate")
    }


def pairs(checkpoint: Checkpoint, targets: Sequence[str], *, rank: int = 3, size: float = 0.4, seed: int = 7) -> Pairs:
    """Random A and B, float32, of the modules with such endings."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: (
            torch.randn(rank, width, generator=generator) * width**-0.5,
            torch.randn(out, rank, generator=generator) * size,
        )
        for name, (out, width) in shapes(checkpoint).items()
        if any(name == target or name.endswith(f".{target}") for target in targets)
    }


def write(
    folder: Path,
    made: Pairs,
    targets: Sequence[str] | str,
    *,
    rank: int = 3,
    alpha: float = 5.0,
    prefix: str = "",
    tensors: Mapping[str, torch.Tensor | None] | None = None,
    **config: Any,
) -> Path:
    """A folder in PEFT's layout, by a writer of our own.

    Args:
        prefix: before module names, such as `language_model.`.
        tensors: changes by stored name; None leaves one out.
        config: further keys of adapter_config.json.
    """
    folder.mkdir(parents=True)
    content = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": targets, **config}
    (folder / "adapter_config.json").write_text(json.dumps({k: v for k, v in content.items() if v != "absent"}))
    stored: dict[str, torch.Tensor | None] = {}
    for module, (a, b) in made.items():
        stored[f"base_model.model.{prefix}{module}.lora_A.weight"] = a
        stored[f"base_model.model.{prefix}{module}.lora_B.weight"] = b
    stored |= tensors or {}
    quantised.save(folder / "adapter_model.safetensors", {n: t for n, t in stored.items() if t is not None})
    return folder


def added(checkpoint: Checkpoint, made: Pairs, scale: float) -> dict[str, torch.Tensor]:
    """Decoded weights of the whole model, float64, W + scale B A where there is a pair."""
    out = {}
    for name in checkpoint.names:
        value = checkpoint.tensor(name).load().double().numpy()
        pair = made.get(name.removesuffix(".weight"))
        if pair is not None:
            a, b = (part.double().numpy() for part in pair)
            value = value + np.asarray(b * scale, np.float64) @ a
        out[name] = torch.from_numpy(np.array(value))
    return out


def scale(alpha: float, rank: int, *, rslora: bool = False) -> float:
    """Of B A."""
    return alpha / (math.sqrt(rank) if rslora else rank)
