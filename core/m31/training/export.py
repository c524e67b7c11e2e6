"""Trained weights as a checkpoint in the official layout (MODEL.md chapter 4)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from m31.checkpoint import Checkpoint, encoded, write
from m31.training.parameters import Parameters

MAX_SHARD_BYTES = 5_000_000_000  # what the published folders use


def export(
    folder: str | Path, config: Mapping[str, Any], parameters: Parameters, *, extra_files: Mapping[str, bytes]
) -> Checkpoint:
    """Write the masters, each rounded as the target's format says: exactly what the leaves were in training.

    Args:
        folder: absent or empty.
        config: config.json contents of which `parameters.target` is the typed form.
        parameters: the weights.
        extra_files: tokenizer.json and its like.

    Raises:
        CheckpointError: the folder is not empty or cannot be written, or a weight is not finite.
    """
    tensors = encoded(parameters.target, parameters.named(), input_scales={})
    return write(folder, config, tensors, max_shard_bytes=MAX_SHARD_BYTES, extra_files=extra_files)
