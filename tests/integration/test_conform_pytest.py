"""The plugin of pytest: one test per item, and nothing at all without its option."""

from __future__ import annotations

import importlib.metadata as metadata
import os
import subprocess
import sys
from pathlib import Path

from tests.support.fake_suite import HERE

PLUGIN = "m31.conformance.plugin"
INSTALLED = any(point.value == PLUGIN for point in metadata.entry_points(group="pytest11"))


def pytest_run(tmp_path: Path, *words: str, source: str = "healthy") -> subprocess.CompletedProcess[str]:
    """pytest in an empty folder with one test of its own, the suite's catalog being a fake one."""
    (tmp_path / "test_own.py").write_text("def test_own(): pass\n")
    (tmp_path / "conftest.py").write_text(
        "from m31.conformance.running import setup\n"
        "import dataclasses\n"
        f"setup.Setup.__init__.__kwdefaults__['source'] = '{HERE}:{source}'\n"
    )
    plugin = () if INSTALLED else ("-p", PLUGIN)
    return subprocess.run(
        [sys.executable, "-m", "pytest", *plugin, "-q", "-rs", "-p", "no:cacheprovider", *words],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        capture_output=True,
        text=True,
        timeout=240,
    )


def test_every_item_is_a_test_and_claims_are_the_last(tmp_path: Path) -> None:
    done = pytest_run(tmp_path, "--m31-backend", "reference")
    assert done.returncode == 0, done.stdout
    last = done.stdout.splitlines()[-1]
    assert "skipped" in last
    assert "failed" not in last
    assert "refused: K is odd" in done.stdout
    assert "only a selection" not in done.stdout


def test_failures_say_what_the_suite_says_and_selections_work(tmp_path: Path) -> None:
    words = ("--m31-backend", "reference", "--m31-level", "L1", "-k", "violation or rope")
    done = pytest_run(tmp_path, *words, source="troubled")
    assert done.returncode == 1, done.stdout
    assert "kernel k: breaks the rule 'arithmetic': off by 3" in done.stdout
    assert "again: m31 conform run --backend reference --level L1 -k L1/bad/violation" in done.stdout
    assert "attempt.py" not in done.stdout
    assert "1 failed" in done.stdout


def test_a_claim_that_nothing_exercises_fails(tmp_path: Path) -> None:
    done = pytest_run(tmp_path, "--m31-backend", "reference", "-k", "quick or claims", source="slow")
    assert "only a selection" in done.stdout
    done = pytest_run(tmp_path, "--m31-backend", "reference", "--m31-level", "L0", source="odd_claims")
    assert done.returncode == 1, done.stdout
    assert "not conformant by omission, never exercised: op:embedding" in done.stdout


def test_mistakes_are_told_as_usage_errors(tmp_path: Path) -> None:
    for words in (("--m31-backend", "nothing"), ("--m31-backend", "reference", "--m31-level", "L9")):
        done = pytest_run(tmp_path, *words)
        assert done.returncode == 4, done.stdout
        assert "ERROR" in done.stderr + done.stdout


def test_without_its_option_it_costs_nothing(tmp_path: Path) -> None:
    (tmp_path / "test_own.py").write_text(
        "import sys\n"
        "def test_own():\n"
        "    ours = {name for name in sys.modules if name.split('.')[0] == 'm31'}\n"
        "    assert ours <= {'m31', 'm31.errors', 'm31.conformance', 'm31.conformance.plugin'}, ours\n"
        "    assert not {'torch', 'numpy', 'pydantic'} & set(sys.modules)\n"
    )
    words = [sys.executable, "-m", "pytest", *(() if INSTALLED else ("-p", PLUGIN)), "-q", "-p", "no:cacheprovider"]
    plain = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    words += ["-p", PLUGIN] if INSTALLED else []
    environment = {**plain, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout
    assert "1 passed" in done.stdout
