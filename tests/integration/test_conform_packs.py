"""Archives: the same bytes from the same run, refused when they show nothing, and every way to tamper with one seen."""

from __future__ import annotations

import datetime
import gzip
import io
import json
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.support.fake_runs import result
from tests.support.fake_runs import run as fake_run
from tests.support.fake_suite import HERE

from m31.conformance import comparing, packing, report, verifying
from m31.conformance.item import Result
from m31.conformance.running import journal, runner
from m31.conformance.running.setup import Setup
from m31.errors import SuiteError

TODAY = datetime.date(2027, 1, 15)
CLEAN = {"commit": "a" * 40, "dirty": False}
WAIVER = '[[expect]]\nid = "L1/linear/x"\nkind = "waiver"\nreason = "r"\nlink = "l"\nexpires = 2027-03-31\n'


def written(folder: Path, *, dirty: bool = False, complete: bool = True, **header: Any) -> Path:
    """The journal of a run that nobody ran, from committed sources."""
    results = [result("L0/rule/x"), result("L1/linear/x", outcome="failed", message="known"), result("L1/linear/y")]
    base = fake_run(results).header
    base = {**base, "expect": WAIVER, "claims": {}, **header}
    software = {**base["provenance"]["software"], "checkout": {**CLEAN, "dirty": dirty}}
    base["provenance"] = {**base["provenance"], "software": software}
    base["provenance"]["backend"] = {**base["provenance"]["backend"], "checkout": CLEAN}
    log = journal.Journal(folder, base)
    for one in results if complete else results[:-1]:
        log.write(one)
    log.close(complete=complete, seconds=1.0)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return written(tmp_path / "run")


def test_the_same_run_packs_to_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    packing.pack(folder, tmp_path / "one.tar.gz", today=TODAY)
    (tmp_path / "two").mkdir()
    packing.pack(folder, tmp_path / "two" / "one.tar.gz", today=TODAY)
    assert (tmp_path / "one.tar.gz").read_bytes() == (tmp_path / "two" / "one.tar.gz").read_bytes()
    files = packing.unpack(tmp_path / "one.tar.gz")
    assert set(files) == {*packing.REQUIRED, packing.EXPECT}
    assert files[packing.EXPECT].decode() == WAIVER
    text = files[packing.STATEMENT].decode()
    assert "Verdict: conformant: level L1 is reached with 1 waiver" in text
    assert "Waived: L1/linear/x" in text
    assert comparing.load(tmp_path / "one.tar.gz") == json.loads(files[report.JSON])


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"complete": False}, "incomplete"),
        ({"recorded": True}, "recorded and not judged"),
        ({"setup": Setup(backend="reference", level="L1", expression="linear").to_dict()}, "of a selection"),
        ({"dirty": True}, "m31 had changes"),
        ({"expect": WAIVER.replace("2027-03-31", "2027-01-14")}, "has expired"),
    ],
)
def test_what_shows_nothing_is_not_packed(how: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(SuiteError, match=said):
        packing.pack(written(tmp_path / "run", **how), tmp_path / "x.tar.gz", today=TODAY)
    assert not (tmp_path / "x.tar.gz").exists()


def test_changed_sources_can_be_packed_and_the_archive_says_so(tmp_path: Path) -> None:
    packing.pack(written(tmp_path / "run", dirty=True), tmp_path / "x.tar.gz", allow_dirty=True, today=TODAY)
    done = verifying.verify(tmp_path / "x.tar.gz", sample=0, today=TODAY)
    assert done.ok
    assert {check.name: check.ok for check in done.checks}["sources"] is None
    assert "Not reproducible" in packing.unpack(tmp_path / "x.tar.gz")[packing.STATEMENT].decode()


def test_an_archive_that_was_not_touched_holds(folder: Path, tmp_path: Path) -> None:
    packing.pack(folder, tmp_path / "x.tar.gz", today=TODAY)
    done = verifying.verify(tmp_path / "x.tar.gz", sample=0, today=TODAY)
    assert done.ok, done.checks
    assert done.verdict == "conformant: level L1 is reached with 1 waiver"
    late = verifying.verify(tmp_path / "x.tar.gz", sample=0, today=datetime.date(2027, 4, 1))
    assert [check.name for check in late.checks if check.ok is False] == ["expectations"]


def edited(name: str, change: Callable[[Any], Any]) -> Callable[[dict[str, bytes]], None]:
    """Changes a JSON file."""

    def edit(files: dict[str, bytes]) -> None:
        value = json.loads(files[name])
        change(value)
        files[name] = (json.dumps(value, indent=1) + "\n").encode()

    return edit


def flattered(files: dict[str, bytes]) -> None:
    """A failure in the journal becomes a pass; all else is made again from it but the reports."""
    files[journal.NAME] = files[journal.NAME].replace(b'"outcome": "failed"', b'"outcome": "passed"')


def forged(files: dict[str, bytes]) -> None:
    """A margin is changed in the report and nowhere else."""
    files[report.JSON] = files[report.JSON].replace(b'"margin": 0.5', b'"margin": 0.1')


TAMPERED: dict[str, tuple[Callable[[dict[str, bytes]], None], str]] = {
    "a byte": (lambda f: f.update({report.MARKDOWN: f[report.MARKDOWN] + b" "}), "verdict"),
    "the journal": (flattered, "verdict"),
    "the report": (forged, "verdict"),
    "the page": (lambda f: f.update({report.HTML: f[report.HTML].replace(b"waiver", b"triumph")}), "verdict"),
    "the level": (edited(report.JSON, lambda d: d["verdict"].update(level="L4")), "verdict"),
    "the schema": (edited(report.JSON, lambda d: d.update(note="x")), "schema"),
    "the statement": (lambda f: f.update({packing.STATEMENT: b"All is well.\n"}), "statement"),
    "the expectations": (lambda f: f.update({packing.EXPECT: b""}), "statement"),
    "the flag": (edited(packing.ABOUT, lambda d: d.update(dirty=["m31"])), "sources"),
    "no journal": (lambda f: f.update({journal.NAME: b"{}\n"}), "content"),
    "no JSON": (lambda f: f.update({report.JSON: b"{"}), "content"),
    "a file less": (lambda f: f.pop(report.JUNIT), "files"),  # type: ignore[dict-item, func-returns-value]
}


@pytest.mark.parametrize("consistent", [False, True], ids=["digests as they were", "digests made again"])
@pytest.mark.parametrize("what", TAMPERED)
def test_tampering_is_seen(what: str, consistent: bool, folder: Path, tmp_path: Path) -> None:
    files = packing.pack(folder, tmp_path / "x.tar.gz", today=TODAY)
    change, by = TAMPERED[what]
    change(files)
    if consistent:
        files[packing.DIGESTS] = packing.digests(files)
    (tmp_path / "y.tar.gz").write_bytes(packing.archive(files, "y"))
    done = verifying.verify(tmp_path / "y.tar.gz", sample=3, today=TODAY)
    wrong = {check.name for check in done.checks if check.ok is False}
    assert not done.ok
    assert by in wrong
    assert consistent or what == "a file less" or "digests" in wrong
    assert done.sample == [], "nothing is run of an archive that does not hold"


def odd_archive(*entries: tarfile.TarInfo) -> bytes:
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w") as tar:
        for entry in entries:
            tar.addfile(entry, io.BytesIO(b"x" * entry.size))
    return gzip.compress(raw.getvalue())


def entry(name: str, **changes: Any) -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    for key, value in changes.items():
        setattr(made, key, value)
    return made


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"no archive",
        gzip.compress(b"no tar"),
        odd_archive(entry("x/report.json", size=3))[:-12],
        odd_archive(entry("x/evil.py", size=3)),
        odd_archive(entry("x/report.json", type=tarfile.SYMTYPE, linkname="/etc/passwd")),
        odd_archive(entry("x/report.json", size=3), entry("y/report.json", size=3)),
    ],
    ids=["empty", "text", "gzip of text", "cut short", "stranger", "link", "twice"],
)
def test_what_is_no_archive_is_refused(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "x.tar.gz").write_bytes(data)
    with pytest.raises(SuiteError):
        packing.unpack(tmp_path / "x.tar.gz")


def test_a_file_too_large_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x.tar.gz").write_bytes(odd_archive(entry("x/report.json", size=30)))
    monkeypatch.setattr(packing, "MAX_BYTES", 29)
    with pytest.raises(SuiteError, match="unpacks to more than 29 bytes"):
        packing.unpack(tmp_path / "x.tar.gz")


def packed(source: str, tmp_path: Path) -> Path:
    """A real run of a fake catalog, packed."""
    asked = Setup(backend="reference", source=f"{HERE}:{source}")
    runner.run(runner.plan(asked), tmp_path / "run")
    packing.pack(tmp_path / "run", tmp_path / "x.tar.gz", allow_dirty=True)
    return tmp_path / "x.tar.gz"


def test_a_sample_is_run_again_with_fresh_seeds(tmp_path: Path) -> None:
    path = packed("healthy", tmp_path)
    done = verifying.verify(path, sample=5, salt="s1", source=f"{HERE}:healthy")
    assert done.ok, done.checks
    assert len(done.sample) == 5
    first: dict[str, Result] = {r.id: r for r in journal.read(tmp_path / "run").results}
    for again in done.sample:
        assert again.outcome == "passed"
        assert again.seed != first[again.id].seed
        assert again.verdict != first[again.id].verdict
    other = replace(Setup(backend="reference"), salt="s2")
    assert other.salt != done.salt
    nowhere = verifying.verify(path, sample=5, backend="no-such-backend", source=f"{HERE}:healthy")
    assert nowhere.ok
    assert [(c.name, c.ok) for c in nowhere.checks][-1] == ("sample", None)
    assert "nothing could be run again here" in nowhere.checks[-1].text


def test_what_is_right_for_the_usual_seeds_only_is_found(tmp_path: Path) -> None:
    done = verifying.verify(packed("salted_only", tmp_path), sample=10**6, source=f"{HERE}:salted_only")
    assert not done.ok
    assert done.checks[-1].text.endswith("not passed: L2/pages/resume")
    assert len(done.salt) == 16
