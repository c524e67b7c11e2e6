"""Runs that train a draft head: it learns to draft, continues exactly, and is exported whole or not at all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support import drafted, quantised, synthetic

import m31
from m31.checkpoint import Checkpoint
from m31.cli.main import main
from m31.errors import CheckpointError, ConfigError, TrainingStateError
from m31.training import config as text_config
from m31.training.draft.export import export
from m31.training.draft.model import HeadWeights
from m31.training.state import LOG, STATE
from m31.training.trainer import Report, Trainer

SERVED: dict[str, Any] = {
    "backend": "reference",
    "arithmetic": "w4a4-megamoe",
    "kv_dtype": "nvfp4",
    "index_dtype": "nvfp4",
    "max_context": 512,
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that has learned to count."""
    config = text_config.parse(synthetic.mapping(budget={"steps": 40}), where="test")
    return Trainer(config, synthetic.counting(), tmp_path_factory.mktemp("target") / "run").run().folder


def trainer(folder: Path, of: Path, report: Any = None, **changes: Any) -> Trainer:
    return Trainer(drafted.config(of, **changes), synthetic.counting(), folder, report)


def rows(folder: Path) -> list[dict[str, Any]]:
    log = [json.loads(line) for line in (folder / LOG).read_text().splitlines()]
    return [{key: value for key, value in row.items() if key != "tokens_per_second"} for row in log]


def accepted(folder: Path) -> float:
    """Drafted tokens kept per verify of a greedy text."""
    model = m31.load(folder, draft=7, **SERVED)
    generation = model.generate([5, 6, 7, 8], max_tokens=60, temperature=0.0, ignore_eos=True)
    list(generation.events())
    plain = m31.load(folder, **SERVED).generate([5, 6, 7, 8], max_tokens=60, temperature=0.0, ignore_eos=True)
    list(plain.events())
    assert generation.token_ids == plain.token_ids
    assert generation.stats.accepted_per_verify is not None
    return generation.stats.accepted_per_verify


def test_a_trained_head_drafts_what_the_target_says(tmp_path: Path, target: Path) -> None:
    learning = {"losses": {"blocks": 146, "hard_labels": 0.5}, "optimiser": {"learning_rate": 0.02}}
    outcome = trainer(tmp_path / "run", target, run={"validate_every": 20}, budget={"steps": 60}, **learning).run()
    log = rows(tmp_path / "run")
    steps, checks = ([row for row in log if key in row] for key in ("loss", "validation"))
    assert steps[-1]["loss"] < 0.4 * steps[0]["loss"]
    assert checks[-1]["accepted"] > 2 * checks[0]["accepted"]
    assert checks[-1]["greedy"] > 4
    assert len(checks[-1]["acceptance"]) == 7
    assert set(steps[0]) == {"step", "loss", "lr", "norm", "accepted", "greedy", "acceptance", "confidence"}
    assert outcome.finished
    saved = Checkpoint.open(outcome.folder)
    weights = HeadWeights(drafted.config(target).draft(), dtype=torch.float32, quantise=True)
    weights.initialise(9)
    export(tmp_path / "random", Checkpoint.open(target), drafted.head_config(), weights)
    assert saved.draft is not None
    assert json.loads((outcome.folder / "dspark" / "config.json").read_text()) == drafted.head_config()
    names = json.loads((outcome.folder / "dspark" / "model.safetensors.index.json").read_text())["weight_map"]
    assert all(name.startswith("language_model.model.dspark.") for name in names)
    assert accepted(outcome.folder) > 3 > 1 > accepted(tmp_path / "random")


def test_five_steps_from_a_stored_state_repeat_bit_for_bit(tmp_path: Path, target: Path) -> None:
    assert trainer(tmp_path / "whole", target, run={"threads": 2}).run().finished

    def stop(report: Report) -> None:
        if report.step == 5:
            first.stop()

    first = trainer(tmp_path / "run", target, stop)
    assert not first.run().finished
    moved = tmp_path / "moved"
    moved.symlink_to(target)  # where the target lies does not matter
    assert trainer(tmp_path / "run", moved).run().finished
    assert rows(tmp_path / "run") == rows(tmp_path / "whole")
    heads = [Checkpoint.open(tmp_path / name / "checkpoint").draft for name in ("run", "whole")]
    assert heads[0] is not None
    assert heads[1] is not None
    for name in heads[0].declared:
        a, b = (head.stored(name).load() for head in heads if head is not None)
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8)), name


def test_another_target_is_another_run(tmp_path: Path, target: Path) -> None:
    def stop(report: Report) -> None:
        first.stop()

    first = trainer(tmp_path / "run", target, stop)
    first.run()
    drafted.write_target(tmp_path / "other")
    with pytest.raises(TrainingStateError, match="another configuration"):
        trainer(tmp_path / "run", tmp_path / "other").run()
    with pytest.raises(TrainingStateError, match="another configuration"):
        trainer(tmp_path / "run", target, losses={"row_decay": 0.5}).run()
    before = (tmp_path / "run" / STATE).read_bytes()
    assert json.loads(before)["step"] == 1


def test_a_head_that_does_not_fit_is_refused(tmp_path: Path, target: Path) -> None:
    flash = {"num_target_layers": 4, "num_hidden_layers": 2, "target_layer_ids": [0, 2]}
    for changes, words in (
        ({"hidden_size": 96}, "hidden size 96"),
        ({"vocab_size": 96}, "vocabulary 96"),
        ({"dflash_config": flash}, "layers of its target 4"),
        ({"dspark_noise_token_id": 64}, "dspark_noise_token_id"),
    ):
        with pytest.raises(ConfigError, match=words):
            trainer(tmp_path / "run", target, head=changes)


def test_a_target_that_is_served_otherwise_is_refused(tmp_path: Path) -> None:
    drafted.write_target(tmp_path / "bf16", "bf16", arithmetic="w16a16")
    with pytest.raises(ConfigError, match="stored plain"):
        trainer(tmp_path / "run", tmp_path / "bf16")
    drafted.write_target(tmp_path / "mxfp8", "m3-mxfp8", arithmetic="w4a16")
    with pytest.raises(ConfigError, match="input scale None"):
        trainer(tmp_path / "run", tmp_path / "mxfp8")
    trainer(tmp_path / "run", tmp_path / "bf16", target={"arithmetic": "w16a16", "kv": "bfloat16"})
    with pytest.raises(m31.errors.NotACheckpoint):
        trainer(tmp_path / "run", tmp_path / "nowhere")


def test_calibrated_input_scales_are_refused(tmp_path: Path) -> None:
    quantised.write_quantised(tmp_path / "a", quantised.bf16_config(), "m31")
    trainer(tmp_path / "run", tmp_path / "a")
    checkpoint = Checkpoint.open(tmp_path / "a")
    tensors = quantised.stored_tensors(checkpoint)
    for name in tensors:
        if name.endswith("w2.input_global_scale"):
            tensors[name] *= 2
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "config.json").write_bytes((tmp_path / "a" / "config.json").read_bytes())
    quantised.save(tmp_path / "b" / "model.safetensors", tensors)
    with pytest.raises(ConfigError, match="without calibration"):
        trainer(tmp_path / "run", tmp_path / "b")


def test_an_export_is_whole_or_not_there(tmp_path: Path, target: Path) -> None:
    config = drafted.config(target)
    weights = HeadWeights(config.draft(), dtype=torch.float32, quantise=True)
    weights.initialise(1)
    weights.masters["dspark.fc.weight"][0, 0] = torch.nan
    with pytest.raises(CheckpointError, match=r"dspark\.fc"):
        export(tmp_path / "out", Checkpoint.open(target), config.head, weights)
    assert list(tmp_path.iterdir()) == []
    weights.initialise(1)
    with pytest.raises(ConfigError, match="another model"):
        export(tmp_path / "out", Checkpoint.open(target), {**config.head, "vocab_size": 96}, weights)
    assert list(tmp_path.iterdir()) == []
    export(tmp_path / "out", Checkpoint.open(target), config.head, weights)
    with pytest.raises(CheckpointError, match="not empty"):
        export(tmp_path / "out", Checkpoint.open(target), config.head, weights)
    again = export(tmp_path / "again", Checkpoint.open(tmp_path / "out"), config.head, weights)  # its head is replaced
    assert again.draft is not None


def test_the_command(tmp_path: Path, target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mapping = drafted.mapping(target.name, budget={"steps": 3})
    (tmp_path / target.name).symlink_to(target)
    path = tmp_path / "a.toml"
    top = "\n".join(synthetic.as_toml(mapping[name], name) for name in mapping if name != "seed")
    path.write_text(f"seed = {mapping['seed']}\n{top}")
    for _ in range(2):
        assert main(["train", "--draft", str(path)]) == 0
        assert "trained 3 steps" in capsys.readouterr().err
    assert (tmp_path / "run" / "checkpoint" / "dspark" / "config.json").exists()
    assert main(["train", str(path)]) == 1
    assert "m31: error:" in capsys.readouterr().err
