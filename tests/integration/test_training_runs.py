"""Runs learn, continue exactly, survive being killed, and refuse what does not belong to them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.support import synthetic

import m31
from m31.checkpoint import Checkpoint
from m31.errors import DestinationBusy, TrainingDiverged, TrainingStateError
from m31.training import config as training_config
from m31.training.data import Batch, Data
from m31.training.state import LOG, STATE
from m31.training.trainer import Report, Trainer

PROCESS = """
import sys, json, pathlib
from tests.support import synthetic
from m31.training import config
from m31.training.trainer import Trainer
mapping = json.loads(sys.argv[2])
Trainer(config.parse(mapping, where="test"), synthetic.counting(), pathlib.Path(sys.argv[1])).run()
"""


def trainer(folder: Path, data: Data | None = None, report: Any = None, **changes: Any) -> Trainer:
    config = training_config.parse(synthetic.mapping(**changes), where="test")
    return Trainer(config, data or synthetic.counting(), folder, report)


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / LOG).read_text().splitlines()]


def losses(folder: Path) -> list[tuple[Any, ...]]:
    """Everything in the log that must repeat; the speed need not."""
    return [tuple((k, str(v)) for k, v in row.items() if k != "tokens_per_second") for row in rows(folder)]


def process(folder: Path, mapping: dict[str, Any], **options: Any) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", PROCESS, str(folder), json.dumps(mapping)]
    root = Path(__file__).resolve().parents[2]
    paths = [str(root), *sys.path]
    return subprocess.Popen(command, env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)}, cwd=root, **options)


class Stopping:
    """Stops its run after some steps."""

    def __init__(self, after: int) -> None:
        self.after, self.run, self.seen = after, None, []

    def __call__(self, report: Report) -> None:
        self.seen.append(report)
        if report.step == self.after:
            assert self.run is not None
            self.run.stop()


def stopped(folder: Path, after: int, **changes: Any) -> None:
    stop = Stopping(after)
    run = stop.run = trainer(folder, report=stop, **changes)
    assert not run.run().finished
    assert [r.step for r in stop.seen] == list(range(1, after + 1))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 10 steps without interruption."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    outcome = trainer(folder).run()
    assert outcome.finished
    return folder


def test_five_steps_from_a_stored_state_repeat_bit_for_bit_in_another_process(whole: Path, tmp_path: Path) -> None:
    stopped(tmp_path / "run", 5)
    assert len(losses(tmp_path / "run")) == 6  # five steps and a validation
    assert process(tmp_path / "run", synthetic.mapping()).wait(60) == 0
    assert losses(tmp_path / "run") == losses(whole)
    finished = [Checkpoint.open(folder / "checkpoint") for folder in (whole, tmp_path / "run")]
    for name in finished[0].declared:
        a, b = (c.stored(name).load() for c in finished)
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8)), name


def test_killed_at_any_moment_it_continues(whole: Path, tmp_path: Path) -> None:
    """States are written after every step here, and the process dies without a warning."""
    folder, mapping = tmp_path / "run", synthetic.mapping(run={"save_minutes": 1e-9})
    child = process(folder, mapping)
    while child.poll() is None and (not (folder / LOG).exists() or len(losses(folder)) < 4):
        time.sleep(0.005)
    child.kill()
    child.wait()
    (folder / LOG).open("a").write('{"step": half a li')  # as a dying machine may leave it
    (folder / "state-99.safetensors.tmp").write_bytes(b"half a file")
    assert trainer(folder, run={"save_minutes": 1e-9}).run().finished
    assert losses(folder) == losses(whole)
    assert sorted(p.name for p in folder.glob("*.safetensors*")) == ["best-10.safetensors", "state-10.safetensors"]


def test_a_signal_ends_a_run_with_its_state(whole: Path, tmp_path: Path) -> None:
    folder, mapping = tmp_path / "run", synthetic.mapping()
    child = process(folder, mapping)
    while child.poll() is None and (not (folder / LOG).exists() or len(losses(folder)) < 2):
        time.sleep(0.005)
    child.send_signal(signal.SIGTERM)
    assert child.wait(60) == 0
    assert 0 < json.loads((folder / STATE).read_text())["step"] < 10
    assert trainer(folder).run().finished
    assert losses(folder) == losses(whole)


def test_it_learns_and_serves_what_it_learned(tmp_path: Path) -> None:
    """Counting, in 40 steps under full quantisation; the best checkpoint counts when it is served."""
    outcome = trainer(tmp_path / "run", budget={"steps": 40}).run()
    log = rows(tmp_path / "run")
    trained = [row for row in log if "loss" in row]
    assert trained[0]["loss"] > 4.0 > 0.5 > trained[-1]["loss"]
    assert trained[-1]["kl"] < 0.7 * max(row["kl"] for row in trained)
    validations = [row["validation"] for row in log if "validation" in row]
    assert outcome.best_loss == min(validations)
    served = m31.load(
        outcome.folder, backend="reference", arithmetic="w4a4-megamoe", kv_dtype="nvfp4", index_dtype="nvfp4"
    )
    assert served.logits([5, 6, 7, 8, 9]).argmax(-1)[1:].tolist() == [7, 8, 9, 10]
    assert (outcome.folder / "note.txt").read_bytes() == b"counting"
    assert {"step", "loss", "kl", "lr", "norm", "load", "tokens_per_second"} == set(trained[0])
    assert sum(trained[0]["load"]["2"]) == pytest.approx(1, abs=1e-3)


def test_the_twin_is_written_in_bf16(tmp_path: Path) -> None:
    twin = {"weights": "none", "arithmetic": "exact", "kv": "float32", "index": "float32"}
    outcome = trainer(tmp_path / "run", quantisation=twin, budget={"steps": 3}).run()
    assert {Checkpoint.open(outcome.folder).tensor(n).format for n in ("lm_head.weight",)} == {"plain"}
    assert Checkpoint.open(outcome.folder).config.quantization is None


def test_the_number_of_threads_changes_no_bit(whole: Path, tmp_path: Path) -> None:
    before = torch.get_num_threads()
    assert trainer(tmp_path / "run", run={"threads": 3}).run().finished
    assert losses(tmp_path / "run") == losses(whole)
    assert torch.get_num_threads() == before


def test_stopped_during_a_validation_it_validates_later(whole: Path, tmp_path: Path) -> None:
    run = trainer(tmp_path / "run")
    validate = run._validate

    def stopping(*args: Any) -> float | None:
        run.stop()
        return validate(*args)

    run._validate = stopping  # type: ignore[method-assign]
    assert not run.run().finished
    assert not any("validation" in row for row in rows(tmp_path / "run"))
    assert trainer(tmp_path / "run").run().finished
    assert losses(tmp_path / "run") == losses(whole)


def test_pieces_of_a_batch_add_up(tmp_path: Path) -> None:
    """The gradient of a batch does not depend on how it is divided."""
    twin = {"weights": "none", "arithmetic": "exact", "kv": "float32", "index": "float32"}
    found = []
    for tokens in (24, 1000):
        trainer(tmp_path / str(tokens), quantisation=twin, batch={"micro_tokens": tokens}, budget={"steps": 3}).run()
        found.append([r[key] for r in rows(tmp_path / str(tokens)) if "loss" in r for key in ("loss", "kl", "norm")])
    assert found[0] == pytest.approx(found[1], rel=1e-4)


def test_the_schedule(tmp_path: Path) -> None:
    trainer(tmp_path / "run", budget={"steps": 12}, optimiser={"warmup_steps": 2}).run()
    rates = [row["lr"] for row in rows(tmp_path / "run") if "lr" in row]
    assert rates[:3] == pytest.approx([0.005, 0.01, 0.01])
    assert rates[7] == pytest.approx(0.01 * (0.1 + 0.9 * 0.5))  # half of the cosine
    assert sorted(rates[2:], reverse=True) == rates[2:]
    assert rates[-1] > 0.001


def test_a_budget_in_minutes_is_planned_once(tmp_path: Path) -> None:
    stopped(tmp_path / "run", 4, budget={"steps": None, "minutes": 0.2})
    planned = json.loads((tmp_path / "run" / STATE).read_text())["total"]
    assert planned > 4
    stop = Stopping(5)
    run = stop.run = trainer(tmp_path / "run", report=stop, budget={"steps": None, "minutes": 0.2})
    run.run()
    assert {report.total for report in stop.seen} == {planned}
    assert stop.seen[-1].seconds_left is not None


def test_the_routing_bias_moves_against_the_load(tmp_path: Path) -> None:
    run = trainer(tmp_path / "run", losses={"balance_rate": 0.25}, budget={"steps": 3})
    run.run()
    bias = dict(run.parameters.named())["model.layers.2.block_sparse_moe.e_score_correction_bias"]
    log = [r for r in rows(tmp_path / "run") if "load" in r]
    load = torch.tensor([r["load"]["2"] for r in log])
    fall = torch.tensor([1.0, 1.0, log[2]["lr"] / 0.01])  # two steps of warmup, then with the learning rate
    assert torch.allclose(bias, (0.25 * fall[:, None] * torch.sign(0.25 - load)).sum(0))
    assert bool(bias.any())


def test_a_run_that_an_earlier_version_began_is_continued(whole: Path) -> None:
    """What a state is found again by: the fingerprint, which other code computed, and the names of its tensors."""
    state = json.loads((whole / STATE).read_text())
    assert state["fingerprint"] == "37729f2cc0daf75746072eeffeb02567"
    assert state["version"] == 1
    names = set(load_file(whole / state["tensors"]))
    bias = "model.layers.2.block_sparse_moe.e_score_correction_bias"
    weights = {f"weight/{name}" for name in trainer(whole).parameters.units}
    assert {n for n in names if n.startswith("weight/")} == weights
    assert f"weight/{bias}" in names
    moments = {n.replace("weight/", f"{kind}/") for kind in ("exp_avg", "exp_avg_sq") for n in weights}
    assert names - weights == {n for n in moments if not n.endswith(bias)}
    first = rows(whole)[0]
    assert first["loss"] == pytest.approx(4.16463, abs=1e-3)
    assert list(first) == ["step", "loss", "lr", "norm", "kl", "load", "tokens_per_second"]


@pytest.mark.parametrize("change", [{"optimiser": {"learning_rate": 0.02}}, {"budget": {"steps": 11}}])
def test_another_configuration_is_not_continued(tmp_path: Path, change: dict[str, Any]) -> None:
    stopped(tmp_path / "run", 1)
    with pytest.raises(TrainingStateError, match="another configuration"):
        trainer(tmp_path / "run", **change).run()
    with pytest.raises(TrainingStateError, match="another configuration"):
        trainer(tmp_path / "run", synthetic.counting(length=20)).run()
    assert not trainer(tmp_path / "run", report=None, run={"threads": 1, "validate_every": 3}).progress.step


@pytest.mark.parametrize("damage", ["tensors", "json", "key", "type"])
def test_a_damaged_state_is_refused(tmp_path: Path, damage: str) -> None:
    stopped(tmp_path / "run", 1)
    state = tmp_path / "run" / STATE
    if damage == "tensors":
        path = tmp_path / "run" / json.loads(state.read_text())["tensors"]
        path.write_bytes(path.read_bytes()[:-1] + b"\x55")
    elif damage == "json":
        state.write_text("{")
    elif damage == "type":
        state.write_text(json.dumps({**json.loads(state.read_text()), "log_bytes": "many"}))
    else:
        state.write_text(json.dumps({"version": 1, "fingerprint": "x", "colour": "red"}))
    with pytest.raises(TrainingStateError):
        trainer(tmp_path / "run").run()


def test_files_of_others_stay(tmp_path: Path) -> None:
    """A run's folder may be one that holds a checkpoint: only what the run wrote is cleaned up."""
    folder = tmp_path / "run"
    folder.mkdir()
    names = ("model-00001-of-00001.safetensors", "state-best.safetensors", "my-state-1.safetensors")
    for name in names:
        (folder / name).write_bytes(b"weights")
    assert trainer(folder, budget={"steps": 3}).run().finished
    assert all((folder / name).read_bytes() == b"weights" for name in names)


def test_a_product_of_another_run_is_not_taken_for_this_ones(tmp_path: Path) -> None:
    (tmp_path / "run" / "checkpoint").mkdir(parents=True)
    with pytest.raises(TrainingStateError, match="this run has not written it"):
        trainer(tmp_path / "run").run()
    (tmp_path / "file").write_text("x")
    with pytest.raises(TrainingStateError, match="cannot be made"):
        trainer(tmp_path / "file").run()


def test_a_validation_that_is_not_finite_is_no_best_one(tmp_path: Path) -> None:
    run = trainer(tmp_path / "run", run={"validate_every": 2})
    measure = run.task.measure

    def overflown(piece: Any) -> Any:
        found = measure(piece)
        found.loss = float("nan")
        return found

    run.task.measure = overflown  # type: ignore[method-assign]
    with pytest.raises(TrainingDiverged, match="validation loss nan"):
        run.run()
    assert not list((tmp_path / "run").glob("best-*"))


def test_one_process_at_a_time(tmp_path: Path) -> None:
    def second(report: Report) -> None:
        with pytest.raises(DestinationBusy):
            trainer(tmp_path / "run").run()

    trainer(tmp_path / "run", report=second, budget={"steps": 3}).run()


def test_divergence_is_named_and_the_state_stays(tmp_path: Path) -> None:
    stopped(tmp_path / "run", 2, losses={"index_weight": 1.0})
    before = (tmp_path / "run" / STATE).read_bytes()
    run = trainer(tmp_path / "run")
    task: Any = run.task
    piece = task.model.loss
    task.model.loss = lambda hidden, targets: piece(hidden, targets) * torch.nan
    with pytest.raises(TrainingDiverged, match="step 2"):
        run.run()
    assert (tmp_path / "run" / STATE).read_bytes() == before


def test_batches_may_have_any_shape(tmp_path: Path) -> None:
    class Mixed:
        def batch(self, step: int) -> Batch:
            return synthetic.Counting(4 >> step % 3, 12 << step % 3, 64, 5).batch(step)

    data = Data(Mixed(), [Mixed().batch(0), Mixed().batch(1)], "mixed")
    assert trainer(tmp_path / "run", data, budget={"steps": 4}).run().finished
