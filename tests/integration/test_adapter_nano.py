"""The bundled nano, which continues Python, learns prose from this repository's documents."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import m31
from m31.checkpoint import bundled
from m31.training import lora, textfile
from m31.training.trainer import Trainer

ROOT = Path(__file__).resolve().parents[2]
STEPS = 40


@pytest.mark.nightly
def test_it_learns_and_its_codes_stay(tmp_path: Path) -> None:
    text = tmp_path / "documents.txt"
    text.write_text("\n".join(path.read_text() for path in sorted((ROOT / "docs").glob("*.md"))))
    before = {path: path.read_bytes() for path in bundled.folder().rglob("*") if path.is_file()}
    data = textfile.provide(file=str(text), length=128, rows=4, seed=1, validation=0.05)
    mapping = {
        "seed": 1,
        "run": {"folder": "run", "threads": 1, "save_minutes": 60.0, "validate_every": 20},
        "data": {"provider": "m31.training.textfile:provide", "options": {}},
        "target": {"arithmetic": "w4a4-megamoe", "kv": "nvfp4", "index": "nvfp4"},
        "lora": {"r": 8, "alpha": 16.0, "rslora": False, "targets": r".*\.(\w+_proj|w[123])"},
        "losses": {"index_weight": 1.0},
        "optimiser": {
            "learning_rate": 5e-3,
            "final_fraction": 0.1,
            "warmup_steps": 3,
            "weight_decay": 0.0,
            "beta1": 0.9,
            "beta2": 0.95,
            "epsilon": 1e-8,
            "clip_norm": 1.0,
        },
        "budget": {"steps": STEPS},
        "batch": {"micro_tokens": 512},
    }
    outcome = Trainer(lora.parse(mapping, where="test"), data, tmp_path / "run").run()
    assert {path: path.read_bytes() for path in before} == before
    content = json.loads((outcome.folder / "adapter_config.json").read_text())
    assert content["base_model_name_or_path"] == "nano"

    def loss(**options: object) -> float:
        model = m31.load(
            backend="reference", arithmetic="w4a4-megamoe", kv_dtype="nvfp4", index_dtype="nvfp4", **options
        )  # type: ignore[arg-type]
        rows = [
            torch.nn.functional.cross_entropy(model.logits(tokens[0].tolist()), targets[0])
            for tokens, targets in data.validation
        ]
        return float(torch.stack(rows).mean())

    plain, applied = loss(), loss(adapter=outcome.folder)
    merged = loss(adapter=outcome.folder, adapter_mode="merge")
    assert applied == pytest.approx(outcome.best_loss, rel=1e-3)
    assert applied < plain - 0.2
    assert abs(merged - applied) < 0.25 * (plain - applied)
