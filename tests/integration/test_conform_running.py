"""Runs in processes of their own: what items may do to them, and what a run leaves behind however it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from tests.support.fake_suite import HERE

from m31.conformance import report
from m31.conformance.conclusion import conclude
from m31.conformance.item import Result, gist
from m31.conformance.running import journal, records, runner
from m31.conformance.running.pool import WorkerFailed
from m31.conformance.running.setup import Setup
from m31.errors import SuiteError

ROOT = Path(__file__).resolve().parents[2]


def setup(source: str, **changes: object) -> Setup:
    return replace(Setup(backend="reference", source=f"{HERE}:{source}", timeout=60.0), **changes)  # type: ignore[arg-type]


def made(folder: Path, asked: Setup, **also: object) -> journal.Run:
    return runner.run(runner.plan(asked), folder, command=["m31", "conform"], **also)  # type: ignore[arg-type]


def outcomes(run: journal.Run) -> dict[str, str]:
    return {result.id: result.outcome for result in run.results}


def judged(result: Result) -> tuple[object, ...]:
    """What of a result does not depend on the clock."""
    return result.id, result.outcome, result.verdict, result.seed, result.message, result.kernel


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("healthy")
    report.write(made(folder, setup("healthy")), folder)
    return folder


def test_a_healthy_backend_is_conformant_and_several_processes_find_the_same(healthy: Path, tmp_path: Path) -> None:
    one = journal.read(healthy)
    found = conclude(one)
    assert (found.exit_code, found.level, found.omissions) == (0, "L3", ())
    seen: list[int] = []
    two = made(tmp_path, setup("healthy", jobs=2), watch=lambda progress: seen.append(progress.done))
    assert [judged(r) for r in one.results] == [judged(r) for r in two.results]
    assert seen == list(range(1, len(two.results) + 1))
    assert one.header["ids"] == two.header["ids"]


def test_whatever_an_item_does_costs_that_item_only(tmp_path: Path) -> None:
    run = made(tmp_path, setup("troubled", jobs=2, timeout=4.0, level="L1"))
    assert run.complete
    failed = {r.id.removeprefix("L1/bad/"): r for r in run.results if r.outcome == "failed"}
    assert {name: r.error for name, r in failed.items()} == {
        "violation": "ContractViolation",
        "refusal": "OpRefused",
        "bug": "KeyError",
        "exit": "SystemExit",
        "crash": "WorkerCrashed",
        "hang": "TimedOut",
        "vacuous": "VacuousCriterion",
        "quits": "WorkerCrashed",
    }
    assert "off by 3" in failed["violation"].message
    assert "SIGSEGV" in failed["crash"].message
    assert "fake_suite.py" in failed["crash"].message, "the fault handler says where"
    for name in ("crash", "bug"):
        assert "fake_suite.py" in "".join(gist(failed[name].message)), "where it was is among the first lines"
    assert "exited with 7" in failed["quits"].message
    assert "did not end within 4 s" in failed["hang"].message
    assert all(r.seed for r in failed.values())
    assert sum(r.outcome == "passed" for r in run.results) == len(run.results) - len(failed) - 2
    found = conclude(run)
    assert (found.exit_code, found.level, found.suite_faults) == (1, "L0", ("L1/bad/vacuous",))


def test_the_first_failure_can_stop_a_run(tmp_path: Path) -> None:
    run = made(tmp_path, setup("troubled", level="L1", expression="L0 or bad or rope", fail_fast=True))
    assert outcomes(run)["L1/bad/violation"] == "failed"
    assert "L1/bad/bug" not in outcomes(run)
    assert not run.complete
    assert conclude(run).exit_code == 1


def test_an_expected_failure_does_not_stop_it_and_a_skipped_item_does_not_run(tmp_path: Path) -> None:
    ends = 'reason = "r"\nlink = "l"\nexpires = 2099-01-01\n'
    expect = tmp_path / "expect.toml"
    others, deadly = (
        '[[expect]]\nid = "L1/bad/[!hc]*"\nkind = "xfail"\n',
        '[[expect]]\nid = "L1/bad/[hc]*"\nkind = "skip"\n',
    )
    expect.write_text(f"{others}{ends}{deadly}{ends}")
    planned = runner.plan(setup("troubled", level="L1", expression="bad", fail_fast=True), expect=expect)
    run = runner.run(planned, tmp_path / "out")
    assert run.complete
    assert {name for name, outcome in outcomes(run).items() if outcome == "skipped"} == {"L1/bad/crash", "L1/bad/hang"}
    expect.write_text(f'[[expect]]\nid = "L9/*"\nkind = "skip"\n{ends}')
    with pytest.raises(SuiteError, match="matches no item"):
        runner.plan(setup("troubled"), expect=expect)
    with pytest.raises(SuiteError, match="cannot be read"):
        runner.plan(setup("troubled"), expect=tmp_path / "none.toml")


def test_another_salt_gives_other_values_that_are_right_as_well(healthy: Path, tmp_path: Path) -> None:
    run = made(tmp_path, setup("healthy", salt="fresh", expression="linear"))
    usual = {r.id: r for r in journal.read(healthy).results}
    passed = [r for r in run.results if r.outcome == "passed"]
    assert passed
    for result in passed:
        assert result.seed != usual[result.id].seed
        assert result.verdict != usual[result.id].verdict
    lucky = made(tmp_path, setup("salted_only", salt="fresh", expression="resume"))
    assert outcomes(lucky) == {"L2/pages/resume": "failed"}
    assert outcomes(made(tmp_path, setup("salted_only", expression="resume"))) == {"L2/pages/resume": "passed"}


def test_a_run_is_recorded_here_and_judged_there(healthy: Path, tmp_path: Path) -> None:
    asked = setup("healthy", level="L1", expression="linear or sane")
    recorded = made(tmp_path / "record", asked, record=True)
    assert set(outcomes(recorded).values()) == {"recorded", "refused", "fallback"}
    assert conclude(recorded).exit_code == 0
    there = runner.judge(tmp_path / "record", tmp_path / "out", source=asked.source)
    usual = {r.id: judged(r) for r in journal.read(healthy).results}
    assert there.complete
    assert [judged(r) for r in there.results] == [usual[r.id] for r in there.results]
    assert there.header["provenance"]["judged"]["machine"]["cores"] >= 1
    with pytest.raises(SuiteError, match="was judged where it ran"):
        runner.judge(tmp_path / "out", tmp_path / "again", source=asked.source)
    with pytest.raises(SuiteError, match="folder of the record"):
        runner.judge(tmp_path / "record", tmp_path / "record", source=asked.source)
    with pytest.raises(SuiteError, match="another catalog"):
        runner.judge(tmp_path / "record", tmp_path / "again", source=f"{HERE}:slow")
    file = next((tmp_path / "record" / runner.EVIDENCE).iterdir())
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    with pytest.raises(SuiteError, match="is not what was recorded"):
        runner.judge(tmp_path / "record", tmp_path / "again", source=asked.source)


def test_evidence_that_no_file_holds_is_a_fault_of_the_suite(tmp_path: Path) -> None:
    run = made(tmp_path, setup("odd_evidence", level="L0"), record=True)
    assert {r.error for r in run.results} == {"SuiteError"}
    assert conclude(run).exit_code == 3


def test_evidence_comes_back_as_it_was(tmp_path: Path) -> None:
    import numpy as np

    from m31.conformance.item import Evidence

    arrays = {"x": np.array([[1.5, -0.0], [np.inf, np.nan]], np.float32), "i": np.arange(3), "empty": np.zeros((0, 4))}
    records.store(tmp_path / "e.npz", "L1/a/b", Evidence(arrays=arrays, facts={"kernel": "k", "n": [1, 2]}))
    back = records.load(tmp_path / "e.npz", "L1/a/b")
    assert back.facts == {"kernel": "k", "n": [1, 2]}
    for name, value in arrays.items():
        assert back.arrays[name].dtype == value.dtype
        assert back.arrays[name].tobytes() == value.tobytes()
    with pytest.raises(SuiteError, match="the evidence is of 'L1/a/b'"):
        records.load(tmp_path / "e.npz", "L1/a/c")
    with pytest.raises(SuiteError, match="cannot be read"):
        records.load(tmp_path / "none.npz", "L1/a/b")


def test_a_backend_that_cannot_be_opened_is_trouble_of_the_environment(tmp_path: Path) -> None:
    with pytest.raises(WorkerFailed) as caught:
        made(tmp_path, setup("healthy", device="no-such-device"))
    assert caught.value.exit_code == 3
    left = journal.read(tmp_path)
    assert not left.complete
    assert left.results == ()


def test_a_folder_with_anything_else_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("precious")
    with pytest.raises(SuiteError, match=r"thesis\.txt"):
        made(tmp_path, setup("healthy"))
    assert (tmp_path / "thesis.txt").read_text() == "precious"


def _default_signals() -> None:
    # A background job of a shell inherits "ignore" for SIGINT, which m31 respects and this test must not.
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def started(tmp_path: Path, began: Path) -> subprocess.Popen[bytes]:
    """A run by the command line whose last item does not end; returns when that item is running."""
    code = (
        "import sys, m31.cli.conform as c; c.SOURCE = sys.argv.pop(1); from m31.cli.main import main; sys.exit(main())"
    )
    words = ["conform", "run", "--backend", "reference", "--level", "L0", "--out", str(tmp_path / "out")]
    child = subprocess.Popen(
        [sys.executable, "-c", code, f"{HERE}:slow", *words],
        cwd=ROOT,
        env={**os.environ, "FAKE_SUITE_BEGAN": str(began), "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        preexec_fn=_default_signals,
    )
    deadline = time.monotonic() + 120
    while not began.exists():
        assert child.poll() is None, child.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return child


def processes_of(folder: str) -> list[str]:
    """Command lines of living processes of a session, by its id."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, _, fields = path.read_text().partition(") ")
        except OSError:
            continue
        if fields.split()[3] == folder and fields.split()[0] != "Z":
            found.append(name)
    return found


def test_ctrl_c_leaves_an_orderly_partial_report(tmp_path: Path) -> None:
    child = started(tmp_path, tmp_path / "began")
    os.killpg(child.pid, signal.SIGINT)  # as a terminal does: to the whole group
    out, err = child.communicate(timeout=240)
    assert child.returncode == 130, err
    run = journal.read(tmp_path / "out")
    assert outcomes(run) == {f"L0/quick/{n}": "passed" for n in range(3)} | {"L0/slow/endless": "interrupted"}
    stated = json.loads((tmp_path / "out" / report.JSON).read_text())
    assert stated["complete"] is False
    assert stated["verdict"]["sentence"] == "incomplete: stopped after 4 of 4 items"
    assert b"incomplete" in out
    assert processes_of(str(child.pid)) == []


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at processes through /proc")
def test_a_killed_run_leaves_a_journal_that_reports_can_be_made_of_and_no_process(tmp_path: Path) -> None:
    child = started(tmp_path, tmp_path / "began")
    child.kill()
    child.communicate(timeout=240)
    deadline = time.monotonic() + 30
    while processes_of(str(child.pid)):  # the worker notices that nobody listens, and goes
        assert time.monotonic() < deadline
        time.sleep(0.1)
    run = journal.read(tmp_path / "out")
    assert outcomes(run) == {f"L0/quick/{n}": "passed" for n in range(3)}
    assert not run.complete
    with (tmp_path / "out" / journal.NAME).open("a") as file:
        file.write('{"kind": "result", "result": {"id": "L0/qu')  # cut short in the midst of a line
    assert journal.read(tmp_path / "out") == run
    made_ = report.write(run, tmp_path / "out")
    assert made_["verdict"]["exit_code"] == 130


def test_a_damaged_journal_is_refused(healthy: Path, tmp_path: Path) -> None:
    lines = (healthy / journal.NAME).read_text().splitlines(keepends=True)

    def read(*changed: str) -> journal.Run:
        (tmp_path / journal.NAME).write_text("".join(changed))
        return journal.read(tmp_path)

    assert read(*lines).complete
    assert not read(*lines[:-1]).complete
    assert not read(*lines[:3], *lines[4:]).complete, "an item without a result"
    for broken in (
        ["{\n", *lines],
        [lines[1]],
        [lines[0], "[]\n"],
        [lines[0].replace('"format": 1', '"format": 9')],
        [],
    ):
        with pytest.raises(SuiteError):
            read(*broken)
    stranger = json.loads(lines[1])
    stranger["result"]["id"] = "L0/not/selected"
    with pytest.raises(SuiteError, match="was not selected"):
        read(lines[0], json.dumps(stranger) + "\n")
