"""Mutated headers, indexes and configs: an error of ours or a correct load, never anything else."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from tests.support import fuzz, fuzz_scales
from tests.support.quantised import bf16_config, write_bf16


def test_pull_request_set(tmp_path: Path) -> None:
    (tmp_path / "templates").mkdir()
    outcomes, failures = fuzz.run(0, 2000, tmp_path, report=print)
    assert failures == []
    # Damage that is nearly always refused, or nearly never, would test only one side.
    assert outcomes["refused"] > 1000
    assert outcomes["loaded"] > 100


@pytest.mark.nightly
@pytest.mark.timeout(4 * 3600)
def test_nightly_set(tmp_path: Path) -> None:
    (tmp_path / "templates").mkdir()
    outcomes, failures = fuzz.run(0, 100_000, tmp_path, report=print)
    assert failures == []
    assert sum(outcomes.values()) == 100_000


def test_calibration_files(tmp_path: Path) -> None:
    """An error of ours that leaves nothing behind, or the scales that the file says, as float32 holds them."""
    source = write_bf16(tmp_path / "source", bf16_config(), shard=10**9).folder
    outcomes, failures = fuzz_scales.run(0, 60, source, tmp_path)
    assert failures == []
    assert outcomes["refused"] > 25
    assert outcomes["written"] > 10


def test_cases_are_the_same_everywhere() -> None:
    data = b'{"a": [1, 2, {"b": "c"}], "d": null}'
    for case in range(50):
        one, two = (fuzz.damage(random.Random(case), "x.json", data) for _ in range(2))
        assert one == two


def test_the_judge_notices_what_it_is_there_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loader that mixes up two tensors, an exception of Python's own, and a hang."""
    (tmp_path / "templates").mkdir()
    every = fuzz.templates(tmp_path / "templates")
    plain = every[0]
    file = plain.folder / "config.json"
    rng = random.Random(0)
    assert fuzz.judge(plain, plain.folder, "config.json", file.read_bytes(), rng) == "loaded"
    changed = file.read_bytes().replace(b'"rms_norm_eps": 1e-06', b'"rms_norm_eps": 1e-05')
    assert "had no effect" in fuzz.judge(plain, plain.folder, "config.json", changed, rng)
    original = fuzz.Checkpoint.stored
    monkeypatch.setattr(fuzz.Checkpoint, "stored", lambda self, _: original(self, "model.norm.weight"))
    assert "was loaded differently" in fuzz.judge(plain, plain.folder, "config.json", file.read_bytes(), rng)

    def forever(_: Path) -> None:
        while True:
            pass

    monkeypatch.setattr(fuzz, "LIMIT_S", 1)
    monkeypatch.setattr(fuzz.Checkpoint, "open", forever)
    assert fuzz.run_case(0, every, tmp_path / "scratch") == "Hang: more than 1 s"
    monkeypatch.setattr(fuzz.Checkpoint, "open", lambda _: [][1])
    assert fuzz.run_case(0, every, tmp_path / "scratch") == "IndexError: list index out of range"
