"""Tiny targets on disk, draft heads for them, and configurations that train these."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tests.support import quantised, synthetic, trained

from m31.config.draft import parse_draft
from m31.formats.arithmetic import parse
from m31.training.draft.config import DraftConfig
from m31.training.draft.config import parse as parse_config
from m31.training.draft.model import HeadWeights, TrainedHead
from m31.training.draft.target import FrozenTarget
from m31.training.export import export
from m31.training.fakequant import Scheme


def write_target(folder: Path, weights: str = "m31", *, arithmetic: str = "w4a4-megamoe", seed: int = 3) -> None:
    """A random target whose every part matters."""
    raw, target = trained.tiny(weights)
    model = trained.model(target, trained.scheme(arithmetic, weights=weights), dtype=torch.float32, seed=seed)
    export(folder, raw, model.parameters, extra_files={"note.txt": b"target"})


def head_config(**changes: Any) -> dict[str, Any]:
    """Contents of `dspark/config.json`, as TOML can hold it; a change to None leaves a key out."""
    whole = {**quantised.draft_config(), **changes}
    return {key: value for key, value in whole.items() if value is not None}


def head(
    folder: Path, scheme: Scheme, mapping: dict[str, Any], *, dtype: torch.dtype, quantise: bool = True, seed: int = 5
) -> tuple[FrozenTarget, HeadWeights, TrainedHead]:
    """A random head of a target, in which norms, biases and the Markov head matter."""
    target = FrozenTarget(folder, scheme, dtype=dtype)
    weights = HeadWeights(parse_draft(mapping, where="head"), dtype=dtype, quantise=quantise)
    generator = torch.Generator().manual_seed(seed)
    for _, master in weights.named():
        scale = 0.2 if master.dim() == 1 else 1.5 * master.shape[1] ** -0.5
        master.copy_(torch.randn(master.shape, generator=generator) * scale)
    weights.refresh()
    made = TrainedHead(weights, scheme.arithmetic, embedding=target.embedding, head=target.head)
    return target, weights, made


def scheme(arithmetic: str, kv: str, index: str) -> Scheme:
    """Of a frozen target."""
    return Scheme(arithmetic=parse(arithmetic), kv_format=kv, index_format=index, weights=None)


def mapping(folder: str | Path = "target", **changes: dict[str, Any]) -> dict[str, Any]:
    """A configuration as TOML decodes it; `changes` update sections."""
    base = synthetic.mapping()
    whole: dict[str, Any] = {
        **{name: base[name] for name in ("seed", "run", "data", "optimiser", "budget", "batch")},
        "target": {"checkpoint": str(folder), "arithmetic": "w4a4-megamoe", "kv": "nvfp4", "index": "nvfp4"},
        "losses": {"blocks": 128, "hard_labels": 0.25, "row_decay": 0.9, "confidence_weight": 1.0},
        "head": head_config(),
    }
    for name, values in changes.items():
        whole[name] = {**whole[name], **values}
    return whole


def config(folder: Path, **changes: dict[str, Any]) -> DraftConfig:
    """`mapping`, parsed."""
    return parse_config(mapping(folder, **changes), where="test", folder=Path())
