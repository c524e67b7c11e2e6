"""A training configuration and data for it that a tiny model can learn within seconds."""

from __future__ import annotations

from typing import Any

import torch
from tests.support import quantised

from m31.training.data import Batch, Data


class Counting:
    """Sequences that count upwards from a random start, modulo the vocabulary."""

    def __init__(self, rows: int, length: int, vocabulary: int, seed: int) -> None:
        self.rows, self.length, self.vocabulary, self.seed = rows, length, vocabulary, seed

    def batch(self, step: int) -> Batch:
        """See `m31.training.data.Source`. The first target of each row has no loss."""
        generator = torch.Generator().manual_seed(self.seed * 100_003 + step)
        start = torch.randint(0, self.vocabulary, (self.rows, 1), generator=generator)
        line = (start + torch.arange(self.length + 1)) % self.vocabulary
        targets = line[:, 1:].clone()
        targets[:, 0] = -1
        return line[:, :-1].contiguous(), targets


def counting(*, rows: int = 4, length: int = 24, vocabulary: int = 64) -> Data:
    """The provider that configurations of these tests name."""
    train, held_out = (Counting(rows, length, vocabulary, seed) for seed in (1, 2))
    return Data(train, [held_out.batch(0)], f"counting-{rows}-{length}-{vocabulary}", {"note.txt": b"counting"})


def mapping(**changes: dict[str, Any]) -> dict[str, Any]:
    """A configuration as TOML decodes it; `changes` update sections."""
    model = quantised.bf16_config()
    whole: dict[str, Any] = {
        "seed": 1,
        "run": {"folder": "run", "threads": 1, "save_minutes": 60.0, "validate_every": 4},
        "data": {"provider": "tests.support.synthetic:counting", "options": {}},
        "model": model,
        "quantisation": {"weights": "m31", "arithmetic": "w4a4-megamoe", "kv": "nvfp4", "index": "nvfp4"},
        "optimiser": {
            "learning_rate": 0.01,
            "final_fraction": 0.1,
            "warmup_steps": 2,
            "beta1": 0.9,
            "beta2": 0.95,
            "epsilon": 1e-8,
            "weight_decay": 0.1,
            "clip_norm": 1.0,
        },
        "losses": {"index_weight": 1.0, "balance_rate": 0.001},
        "budget": {"steps": 10},
        "batch": {"micro_tokens": 48},
    }
    for name, values in changes.items():
        whole[name] = {**whole[name], **values}
    return whole


def as_toml(mapping: dict[str, Any], name: str) -> str:
    """A section, and those within it; None cannot be said in TOML and is left out."""
    plain = {key: value for key, value in mapping.items() if not isinstance(value, dict) and value is not None}
    lines = [f"[{name}]"]
    for key, value in plain.items():
        lines.append(f"{key} = {str(value).lower() if isinstance(value, bool) else repr(value)}")
    for key, value in mapping.items():
        if isinstance(value, dict):
            lines.append(as_toml(value, f"{name}.{key}"))
    return "\n".join(lines)
