"""`m31 conform bisect` and `selftest` from the command line; what they call has tests of its own."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from m31.cli import conform_tools
from m31.cli.main import main
from m31.conformance import faults
from m31.conformance.item import NotRun
from m31.conformance.running.setup import manifest_of


class Found:
    """What `bisect` finds, as far as the command line looks at it."""

    def __init__(self, first: object) -> None:
        self.first = first

    def table(self) -> str:
        return "layer 3, linear"

    def svg(self) -> str:
        return "<svg/>"


@pytest.fixture
def bisecting(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A fake `bisect` and tokenizer; what it was given, and what it is to find."""
    seen: dict[str, Any] = {"first": None}

    def bisect(a: Any, b: Any, folder: Path, ids: list[int]) -> Found:
        seen.update(names=(a.manifest.name, b.manifest.name), folder=folder, ids=ids, scratch=a.scratch == b.scratch)
        if isinstance(seen["first"], NotRun):
            raise seen["first"]
        return Found(seen["first"])

    module = ModuleType("m31.conformance.bisect")
    module.bisect = bisect  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "m31.conformance.bisect", module)
    return seen


def test_bisect_compares_on_a_small_checkpoint(
    bisecting: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["conform", "bisect", "--backend", "reference", "--prompt", "hello"]
    assert main([*words, "--out", str(tmp_path / "out")]) == 0
    assert bisecting["names"] == ("reference", "reference")
    assert bisecting["folder"].name == conform_tools.SMALL
    assert len(bisecting["ids"]) > 0
    assert bisecting["scratch"]
    assert capsys.readouterr().out == "layer 3, linear\n"
    assert (tmp_path / "out" / "bisect.txt").read_text() == "layer 3, linear\n"
    assert (tmp_path / "out" / "bisect.svg").read_text() == "<svg/>"
    bisecting["first"] = object()
    assert main(words) == 1
    bisecting["first"] = NotRun("refused", "no kernel")
    assert main(words) == 1
    assert "the two cannot be compared: no kernel" in capsys.readouterr().err


def test_a_survivor_fails_the_selftest(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[str] = []

    def selftest(chosen: Any, items: Any, make: Any, *, said: Any) -> Any:
        asked.extend(fault.name for fault in chosen)
        assert len(items(manifest_of("reference"))) > 100
        said("one: caught")
        return Done()

    class Done:
        ok, healthy = False, {"L1/a/b": "why"}

        def __str__(self) -> str:
            return "one: caught\n1 faults, 0 caught"

    monkeypatch.setattr(faults, "FAULTS", (SimpleNamespace(name="one"), SimpleNamespace(name="two")))
    monkeypatch.setattr(faults, "selftest", selftest)
    assert main(["conform", "selftest", "-k", "one"]) == 1
    out = capsys.readouterr()
    assert asked == ["one"]
    assert out.out == "one: caught\n1 faults, 0 caught\n"
    assert "the healthy backend does not pass L1/a/b: why" in out.err
    Done.ok = True
    assert main(["conform", "selftest"]) == 0
    assert main(["conform", "selftest", "-k", "three"]) == 2


def test_the_matrix_is_written_and_a_survivor_fails_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "new" / "faults.csv"
    words = ["conform", "selftest", "-k", "taps-other-way", "--matrix", str(file)]
    assert main(words) == 0
    lines = file.read_text().splitlines()
    assert lines[0] == "fault,item,outcome,said"
    assert any(line.startswith("taps-other-way,L1/concat/") and ",caught," in line for line in lines)
    assert "wrote" in capsys.readouterr().err
    monkeypatch.setattr(faults, "seen", lambda fault, row: False)
    assert main(words) == 1
    assert "survived taps-other-way" in capsys.readouterr().out
