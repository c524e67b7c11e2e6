"""A trained draft head as the `dspark` folder of its target (MODEL.md §4.3)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from m31.checkpoint import Checkpoint, write_draft
from m31.checkpoint.encoding import Held, encode
from m31.training.draft.model import HeadWeights


def export(folder: str | Path, target: Checkpoint, config: Mapping[str, Any], weights: HeadWeights) -> Checkpoint:
    """Write a folder that holds the target's files and the head, each weight rounded as it was in training.

    Args:
        folder: absent or empty.
        target: whose files are copied; a head that it has is left behind.
        config: `dspark/config.json` contents of which `weights.draft` is the typed form.
        weights: the head's.

    Raises:
        CheckpointError: the folder is not empty or cannot be written, or a weight is not finite.
    """
    return write_draft(folder, target, config, _encoded(weights))


def _encoded(weights: HeadWeights) -> Iterator[tuple[str, Tensor]]:
    """(canonical stored name, tensor)."""
    import torch

    for name, master in weights.named():
        pieces: dict[str, list[Tensor]] = {}
        for piece in encode(weights.units[name], Held(name, master.detach()), None):
            pieces.setdefault(piece.name, []).append(piece.value)
        yield from ((stored, torch.cat(values)) for stored, values in pieces.items())
