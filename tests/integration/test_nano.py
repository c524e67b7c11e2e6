"""The nano that is bundled: whole, small, licensed, and what a newcomer gets to see."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from m31.checkpoint import Checkpoint, bundled
from m31.formats.arithmetic import NAMED
from m31.training import config as training_config

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "core/m31/training/nano.toml"


@pytest.fixture(scope="module")
def nano() -> Path:
    return bundled.folder()


def test_it_is_whole_small_and_licensed(nano: Path) -> None:
    assert nano == ROOT / "core/m31/data/nano"
    about = bundled.check(nano)["about"]
    files = [path for path in nano.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= bundled.MAX_BYTES <= 16_000_000
    licence = (nano / "LICENSE").read_text(encoding="utf-8")
    for words in ("Apache-2.0", "Python Software Foundation", "PSF License Agreement", about["text"]):
        assert words in licence


def test_it_is_the_model_of_its_configuration(nano: Path) -> None:
    config = training_config.load(CONFIG)
    raw, target = config.target()
    found = Checkpoint.open(nano)
    assert found.notes == ()
    assert json.loads((nano / "config.json").read_text()) == raw
    assert found.config.text == target.text
    assert config.quantisation.arithmetic in NAMED


def test_a_newcomer_gets_indented_code_and_a_line_of_figures() -> None:
    words = ["run", "def fibonacci(n):", "--max-tokens", "40", "--temperature", "0", "--backend", "reference"]
    command = [sys.executable, "-m", "m31", *words]
    paths = os.pathsep.join([str(ROOT / "core"), *(path for path in sys.path if path)])
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=120, env={**os.environ, "PYTHONPATH": paths}
    )
    assert re.search(r"^ {4,}\w", done.stdout, re.MULTILINE), done.stdout
    lines = done.stderr.splitlines()
    assert lines[0].startswith("m31: no checkpoint is named: this is the bundled nano")
    assert re.search(r"9 prompt tokens, \d+ generated; prefill [\d.]+ tokens/s, decode [\d.]+ tokens/s", lines[-1])
