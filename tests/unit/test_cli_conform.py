"""`m31 conform`: its grammar, its exit codes, and what it prints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.support.fake_runs import result
from tests.support.fake_runs import run as fake_run
from tests.support.fake_suite import HERE

from m31.cli import conform
from m31.cli.arguments import parse
from m31.cli.conform_arguments import ACTIONS
from m31.cli.main import main
from m31.cli.output import Output
from m31.conformance import catalog
from m31.conformance.item import Result
from m31.conformance.running import journal, pool
from m31.conformance.running.runner import Progress
from m31.conformance.running.setup import DEFAULT_LEVEL, TIMEOUT

TEXT = (Path(__file__).resolve().parents[2] / "docs/cli.md").read_text()


@pytest.fixture(autouse=True)
def fake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conform, "SOURCE", f"{HERE}:healthy")


def journaled(folder: Path, results: list[Result], *, complete: bool = True) -> Path:
    made = fake_run(results)
    log = journal.Journal(folder, made.header)
    for one in results:
        log.write(one)
    log.close(complete=complete, seconds=1.0)
    return folder


def test_the_suite_of_the_command_line_is_the_one_of_the_library() -> None:
    assert Path(conform.__file__).read_text().count(f'SOURCE = "{catalog.SOURCE}"') == 1


@pytest.mark.parametrize("action", ACTIONS)
def test_every_action_has_help_and_is_documented(action: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["conform", action, "--help"]) == 0
    assert f"m31 conform {action}" in capsys.readouterr().out
    assert f"- `{action}" in TEXT


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["conform"], "ACTION"),
        (["conform", "rum"], "invalid choice"),
        (["conform", "run"], "--backend"),
        (["conform", "run", "--backend", "x", "--levl", "L1"], "did you mean '--level'?"),
        (["conform", "run", "--backend", "x", "--level", "L9"], "invalid choice"),
        (["conform", "run", "--backend", "x", "-j", "0"], "a whole number above 0"),
        (["conform", "run", "--backend", "x", "--timeout", "inf"], "a number of seconds above 0"),
        (["conform", "run", "--backend", "x", "--out", "a", "--record", "b"], "not allowed with"),
        (["conform", "selftest", "-k", "a or"], "ends too early"),
        (["conform", "verify", "p", "--sample", "-2"], "a number of items"),
        (["conform", "diff", "a"], "B"),
        (["conform", "report", "a", "b"], "unexpected argument 'b'"),
    ],
)
def test_wrong_command_lines(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert said in capsys.readouterr().err


def test_defaults_of_the_grammar_are_those_of_the_library() -> None:
    args = parse(["conform", "run", "--backend", "x"])
    assert (args.level, args.j, args.seed_salt, args.timeout) == (None, 1, "", None)
    assert conform._level(args) == DEFAULT_LEVEL
    assert conform._level(parse(["conform", "run", "--backend", "x", "--checkpoint", "d"])) == "L4"
    assert f"default: {TIMEOUT:.0f})" in "".join(Path(conform.__file__).with_name("conform_arguments.py").read_text())


def test_items_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["conform", "list", "--backend", "reference", "-k", "rope/ordinary"]) == 0
    out = capsys.readouterr()
    first = out.out.splitlines()[0]
    assert first.split() == ["L1/rope/ordinary/bfloat16", "bound", "op:rope", "weights:bfloat16"]
    assert "4 items" in out.err
    assert main(["conform", "list", "--backend", "reference", "--level", "L0", "--json"]) == 0
    (only,) = json.loads(capsys.readouterr().out)
    assert (only["id"], only["level"], only["criterion"]) == ("L0/manifest/sane", "L0", "bound")


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["--backend", "reference", "-k", "nothing-like-it"], 2),
        (["--backend", "reference", "-k", "and"], 2),
        (["--backend", "no-such-backend"], 3),
        (["--backend", "no_such_package:Class"], 3),
        (["--backend", "reference", "--level", "L4"], 2),
    ],
)
def test_what_cannot_be_run_says_why(words: list[str], code: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["conform", "run", *words]) == code
    assert "m31: error:" in capsys.readouterr().err


def test_a_run_from_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["conform", "run", "--backend", "reference", "-k", "linear", "--level", "L1"]) == 0
    out = capsys.readouterr()
    assert "L1  4 passed, 1 refused, 1 fallback" in out.out
    assert "all 6 selected passed or are allowed; a selection reaches no level" in out.out
    assert "6 of 6 items" in out.err
    folder = tmp_path / "conformance-reference"
    assert {path.name for path in folder.iterdir()} == {
        "results.jsonl",
        "report.json",
        "report.html",
        "report.md",
        "junit.xml",
    }
    assert main(["conform", "pack", str(folder)]) == 3
    assert "of a selection" in capsys.readouterr().err


def test_a_device_that_no_item_survives_ends_the_run_with_what_was_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(conform, "SOURCE", f"{HERE}:deadly")
    monkeypatch.setattr(pool, "LOST_IN_A_ROW", 2)
    out = tmp_path / "out"
    assert main(["conform", "run", "--backend", "reference", "--level", "L0", "--out", str(out)]) == 3
    said = capsys.readouterr()
    assert "L0  1 passed, 2 failed" in said.out
    assert "the last 2 items all crashed or hung" in said.err
    assert json.loads((out / "report.json").read_text())["complete"] is False


def test_reports_are_made_again_with_the_exit_code_of_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = [result("L0/a/x"), result("L1/a/x")]
    assert main(["conform", "report", str(journaled(tmp_path / "good", good))]) == 0
    assert "reference: conformant: level L1 is reached" in capsys.readouterr().out
    failed = [result(f"L0/a/{n}", outcome="failed", message="m") for n in range(12)] + good
    assert main(["conform", "report", str(journaled(tmp_path / "bad", failed))]) == 1
    out = capsys.readouterr().out
    assert "again: m31 conform run --backend reference --level L0 -k L0/a/0" in out
    assert "and 2 more failures" in out
    assert main(["conform", "report", str(journaled(tmp_path / "part", good, complete=False))]) == 130
    assert main(["conform", "report", str(journaled(tmp_path / "thin", good[:1]))]) == 2
    assert "never exercised: level:L1" in capsys.readouterr().out
    assert main(["conform", "report", str(tmp_path)]) == 3

    assert main(["conform", "diff", str(tmp_path / "good"), str(tmp_path / "bad")]) == 0
    assert "only in B (12)" in capsys.readouterr().out
    assert main(["conform", "diff", str(tmp_path / "good"), str(tmp_path / "thin"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["disappeared"] == ["L1/a/x"]
    assert main(["conform", "diff", str(tmp_path / "good"), str(tmp_path)]) == 3
    assert main(["conform", "verify", str(tmp_path / "good" / "report.json")]) == 3


def test_progress_has_the_time_left(capsys: pytest.CaptureFixture[str]) -> None:
    last = result("L0/a/x", outcome="failed", message="ValueError: too far off\n\nkernel.py:7 in run: raise")
    progress = Progress(done=3, total=12, failed=1, seconds=6.0, seconds_left=90.0, last=last)
    assert conform.bar(progress) == "[=======                       ]  25%  3 of 12 items, 1 failed, 1 min 30 s left"
    shown = conform.Bar(Output())
    shown(progress)
    assert capsys.readouterr().err == "m31: failed L0/a/x: ValueError: too far off\n     kernel.py:7 in run: raise\n"
    shown._drawn -= 31
    shown(progress)
    assert "25%  3 of 12 items, 1 failed" in capsys.readouterr().err


def test_a_place_that_cannot_be_written_is_no_bug(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    inside = str(tmp_path / "file" / "out")  # also root cannot make a folder in a file
    run = ["conform", "run", "--backend", "reference", "-k", "linear/odd"]
    good = str(journaled(tmp_path / "good", [result("L0/a/x"), result("L1/a/x")]))
    for words in (
        [*run, "--out", inside],
        [*run, "--record", inside],
        ["conform", "pack", good, "--allow-dirty", "--out", inside],
    ):
        assert main(words) == 3
        said = capsys.readouterr().err
        assert inside in said
        assert "cannot be written" in said


@pytest.mark.parametrize(
    ("backend", "said"),
    [
        ("no_such_package:Class", "finds no module 'no_such_package'"),
        ("m31_reference:", "the class is missing"),
        ("m31_reference:NoSuchClass", "module 'm31_reference' has no 'NoSuchClass'"),
    ],
)
def test_a_wrong_import_path_is_told_as_such(
    backend: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["conform", "run", "--backend", backend, "-k", "linear/odd", "--out", str(tmp_path / "out")]) == 3
    err = capsys.readouterr().err
    assert said in err
    assert err.count(backend) == 1
