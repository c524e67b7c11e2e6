"""A run as a whole: what is asked, in which processes, and a journal that is right at every moment of it."""

from __future__ import annotations

import datetime
import json
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from m31.conformance import catalog, claims, expectations, provenance
from m31.conformance.expectations import Expectations
from m31.conformance.files import writing
from m31.conformance.item import LEVELS, Item, Result
from m31.conformance.running import journal, records
from m31.conformance.running.attempt import lost
from m31.conformance.running.pool import Pool
from m31.conformance.running.setup import Setup, manifest_of
from m31.errors import NothingSelected, SuiteError

if TYPE_CHECKING:
    from m31.sdk.manifest import Manifest

EVIDENCE = "evidence"
OWN_FILES = (journal.NAME, "report.json", "report.md", "report.html", "junit.xml", "report.partial")
"""What a run leaves in its folder, beside the evidence of a recorded one."""


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a run is, after `last`. `seconds_left` is None while there is nothing to estimate it from."""

    done: int
    total: int
    failed: int
    seconds: float
    seconds_left: float | None
    last: Result


Watcher = Callable[[Progress], None]


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A run before its first item: all items of the catalog that could be asked, and those that will be."""

    setup: Setup
    manifest: Manifest
    everything: list[Item]
    chosen: list[Item]
    expected: Expectations


def plan(setup: Setup, *, expect: Path | None = None) -> Planned:
    """Collect, select and check, without running anything.

    Raises:
        BackendError: the backend is not there or cannot be used here.
        SuiteError: the catalog or `expect.toml` is at fault; NothingSelected if no item was selected, as when L4 is
            asked for without a checkpoint.
        RequestError: the level or the expression is malformed.
    """
    levels = catalog.upto(setup.level)
    if setup.level == "L4" and setup.folder is None:
        raise NothingSelected("L4 runs a real checkpoint", where="--level L4", fix="give its folder with --checkpoint")
    manifest = manifest_of(setup.backend)
    everything = catalog.collect(manifest, LEVELS, checkpoint=setup.folder, source=setup.source)
    asked = [item for item in everything if item.level in levels]
    if setup.expression is not None:
        asked = catalog.chosen(asked, setup.expression)
    what = f"--level {setup.level}" + (f" -k '{setup.expression}'" if setup.expression is not None else "")
    expected = Expectations()
    if expect is not None:
        expected = expectations.parse(_text(expect), where=str(expect))
        expected.require([item.id for item in everything], datetime.date.today())
    chosen = catalog.required(asked, what)
    return Planned(setup=setup, manifest=manifest, everything=everything, chosen=chosen, expected=expected)


def header(planned: Planned, command: Sequence[str]) -> dict[str, Any]:
    """The first line of a journal: all that judging the run needs beside its results."""
    setup, manifest = planned.setup, planned.manifest
    return {
        "setup": setup.to_dict(),
        "manifest": manifest.model_dump(mode="json"),
        "ids": [item.id for item in planned.chosen],
        "catalog": catalog.digest([item.id for item in planned.everything]),
        "claims": claims.first_levels(manifest, planned.everything),
        "expect": planned.expected.text,
        "provenance": provenance.gather(setup.backend, manifest, command=command, device=setup.device, salt=setup.salt),
    }


def run(
    planned: Planned, folder: Path, *, record: bool = False, command: Sequence[str] = (), watch: Watcher | None = None
) -> journal.Run:
    """Run what was planned.

    Args:
        planned: see `plan`.
        folder: gets the journal; one of an earlier run is replaced, one with anything else is refused.
        record: keep the evidence in it instead of judging it.
        command: the command line, for the provenance.
        watch: told of each result.

    Returns: the run, incomplete if Ctrl-C or `fail_fast` stopped it.

    Raises:
        WorkerFailed: the backend cannot be opened here.
        SuiteError: the folder cannot be used.
    """
    clear(folder)
    setup = planned.setup
    where = folder / EVIDENCE
    top = header(planned, command) | {"recorded": record}
    kept = _Keeper(journal.Journal(folder, top), planned, watch, where if record else None)
    pool = Pool(
        setup,
        planned.manifest,
        seeds=_seeds(setup.salt),
        evidence=(lambda item: where / records.file_name(item.id)) if record else None,
    )
    waiting = []
    for item in planned.chosen:
        entry = planned.expected.of(item.id)
        if entry is not None and entry.kind == "skip":
            seed = _seeds(setup.salt)(item.id)
            kept(lost(item, "skipped", f"{entry.reason} ({entry.link})", seed=seed, seconds=0.0))
        else:
            waiting.append(item)
    return kept.finish(lambda: pool.run(waiting, kept), folder)


def judge(
    recorded: Path,
    folder: Path,
    *,
    jobs: int = 1,
    timeout: float | None = None,
    checkpoint: str | None = None,
    source: str = catalog.SOURCE,
    command: Sequence[str] = (),
    watch: Watcher | None = None,
) -> journal.Run:
    """Judge what was recorded on another machine; the backend is not needed.

    Args:
        recorded: the folder of a run with `record`.
        folder: gets the journal of the judged run.
        jobs, timeout: see `Setup`; the recorded run's timeout unless given.
        checkpoint: where the real checkpoint is on this machine, if items of L4 were recorded.
        source: of the items; the record's own is not imported, since the record is somebody else's.
        command, watch: see `run`.

    Raises: SuiteError: the record is damaged, or of another catalog than this m31's.
    """
    from m31.sdk.manifest import Manifest

    if folder.resolve() == recorded.resolve():
        raise SuiteError("this is the folder of the record", where=str(folder), fix="choose another for the judgement")
    before = journal.read(recorded)
    if not before.header.get("recorded"):
        raise SuiteError("this run was judged where it ran", where=str(recorded), expected="a run with --record")
    setup = replace(Setup.from_dict(before.header["setup"]), jobs=jobs, source=source, fail_fast=False)
    setup = replace(setup, timeout=timeout or setup.timeout, checkpoint=checkpoint or setup.checkpoint)
    manifest = Manifest.model_validate_json(json.dumps(before.header["manifest"]))
    everything = catalog.collect(manifest, LEVELS, checkpoint=setup.folder, source=setup.source)
    if catalog.digest([item.id for item in everything]) != before.header["catalog"]:
        raise SuiteError(
            "the record is of another catalog of items",
            where=str(recorded),
            fix="judge with the m31 version that recorded: " + str(before.header["provenance"]["software"]["m31"]),
        )
    items = {item.id: item for item in everything}
    top = {**before.header, "recorded": False, "record_complete": before.complete}
    top["provenance"] = {
        **before.header["provenance"],
        "judged": {
            "software": provenance.software(),
            "machine": provenance.machine(),
            "environment": provenance.environment(),
            "started": provenance.now(),
            "command": list(command) or provenance.command_line(),
        },
    }
    clear(folder)
    expected = expectations.parse(before.header["expect"])
    chosen = [items[name] for name in before.header["ids"]]
    planned = Planned(setup=setup, manifest=manifest, everything=everything, chosen=chosen, expected=expected)
    kept = _Keeper(journal.Journal(folder, top), planned, watch, None)
    waiting, files = [], dict[str, Path]()
    for result in before.results:
        if result.outcome != "recorded":
            kept(result)
            continue
        about = before.evidence[result.id]
        files[result.id] = recorded / EVIDENCE / about["file"]
        if not files[result.id].exists() or records.sha256(files[result.id]) != about["sha256"]:
            raise SuiteError(f"the evidence of '{result.id}' is not what was recorded", where=str(files[result.id]))
        waiting.append(items[result.id])
    seeds = _seeds(setup.salt)
    pool = Pool(setup, manifest, seeds=seeds, evidence=lambda item: files[item.id], judging=True)
    return kept.finish(lambda: pool.run(waiting, kept), folder)


class _Keeper:
    """Takes results as they come: journal, estimate of the time left, and whether to go on."""

    def __init__(self, log: journal.Journal, planned: Planned, watch: Watcher | None, evidence: Path | None) -> None:
        self._log, self._planned, self._watch, self._evidence = log, planned, watch, evidence
        self._costs = {item.id: max(item.seconds, 1e-3) for item in planned.chosen}
        self._start = time.monotonic()
        self._done = self._failed = 0
        self._cost_done = 0.0

    def __call__(self, result: Result) -> bool:
        also: dict[str, Any] = {}
        if result.outcome == "recorded" and self._evidence is not None:
            file = self._evidence / records.file_name(result.id)
            also["evidence"] = {"file": file.name, "sha256": records.sha256(file)}
        self._log.write(result, **also)
        unexpected = result.outcome == "failed" and self._planned.expected.of(result.id) is None
        self._done += 1
        self._failed += result.outcome == "failed"
        self._cost_done += self._costs.pop(result.id, 0.0)
        if self._watch is not None:
            self._watch(self._progress(result))
        return not (unexpected and self._planned.setup.fail_fast)

    def _progress(self, last: Result) -> Progress:
        seconds = time.monotonic() - self._start
        left = sum(self._costs.values()) * seconds / self._cost_done if self._cost_done else None
        total = len(self._planned.chosen)
        return Progress(
            done=self._done, total=total, failed=self._failed, seconds=seconds, seconds_left=left, last=last
        )

    def finish(self, work: Callable[[], bool], folder: Path) -> journal.Run:
        complete = False
        try:
            complete = work()
        except KeyboardInterrupt:
            pass  # what was found so far is in the journal, which says that it is not all
        finally:
            self._log.close(complete=complete, seconds=time.monotonic() - self._start)
        return journal.read(folder)


def clear(folder: Path) -> None:
    """Make a folder ready for a run.

    Raises: SuiteError: it holds what is no earlier run, or that cannot be removed.
    """
    if not folder.exists():
        return
    if not folder.is_dir():
        raise SuiteError("this is no folder", where=str(folder))
    found = sorted(path.name for path in folder.iterdir())
    strangers = [name for name in found if name not in (*OWN_FILES, EVIDENCE)]
    if strangers or (found and journal.NAME not in found):
        raise SuiteError(
            f"it holds '{(strangers or found)[0]}'",
            where=str(folder),
            expected="a new or empty folder, or one of an earlier run",
            fix="choose another with --out",
        )
    with writing(folder):
        for name in found:
            path = folder / name
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def _seeds(salt: str) -> Callable[[str], int]:
    def seed(item_id: str) -> int:
        from m31.ops.cases import salted, seed_of

        with salted(salt):
            return seed_of(item_id)

    return seed


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SuiteError(f"cannot be read: {error}", where=str(path)) from error
