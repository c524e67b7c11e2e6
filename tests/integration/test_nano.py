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
from m31.conformance import golden
from m31.conformance.golden.__main__ import EXACT, NANO, stored
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
    assert re.search(r"^ {4,}\S", done.stdout, re.MULTILINE), done.stdout
    lines = done.stderr.splitlines()
    assert lines[0].startswith("m31: no checkpoint is named: this is the bundled nano")
    assert re.search(r"9 prompt tokens, \d+ generated; prefill [\d.]+ tokens/s, decode [\d.]+ tokens/s", lines[-1])


@pytest.mark.parametrize("recipe", [NANO, EXACT], ids=lambda recipe: recipe.arithmetic)
def test_its_golden_values_are_here(nano: Path, recipe: golden.Recipe) -> None:
    assert stored(recipe).stat().st_size < 1_000_000
    values = golden.read(stored(recipe))
    assert (values.recipe, values.checkpoint) == (recipe, golden.digest(nano))
    lengths = [len(prompt.ids) for prompt in values.prompts]
    assert (len(lengths), min(lengths), max(lengths)) == (10, 1, 4000)
    assert sum(prompt.blocks.shape[1] for prompt in values.prompts) > 2000  # positions at which blocks are left out


# Measured: a KL divergence of 1e-12 at most, and no other set, for float32 against float64 where nothing is rounded.
CLOSE = golden.Tolerance(
    kl=1e-10,
    kl_worst=1e-9,
    top1=0.999,
    top1_widest=1e-3,
    expert_share=1e-3,
    expert_gap=1e-5,
    block_share=1e-3,
    block_gap=1e-3,
)


@pytest.mark.parametrize(
    ("recipe", "backend", "dtype", "longest"),
    [
        pytest.param(NANO, "reference", "float64", 129, id="what it is trained for, computed again"),
        pytest.param(EXACT, "reference", "float32", 2300, id="float32"),
        pytest.param(EXACT, "cpu", "float32", 600, id="the native kernels"),
        pytest.param(EXACT, "cpu", "float32", 4000, id="the native kernels, everything", marks=pytest.mark.nightly),
    ],
)
def test_backends_agree_with_its_golden_values(
    nano: Path, recipe: golden.Recipe, backend: str, dtype: str, longest: int
) -> None:
    values = golden.read(stored(recipe))
    model = golden.open_for(values, nano, backend=backend, dtype=dtype)
    found = list(golden.compare(values, model, longest=longest))
    assert max(agreement.tokens for agreement in found) == longest
    faults = golden.faults(found, CLOSE)
    if backend == "cpu":  # one native program a step: there is nothing between kernels to look at
        assert len(faults) == 2
        assert all("ids were not observed" in fault for fault in faults)
    else:
        assert faults == []
