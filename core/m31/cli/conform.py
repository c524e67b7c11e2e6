"""`m31 conform ACTION`: run the suite, show and compare what it found. Each action imports what it needs."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from m31.cli import conform_tools
from m31.cli.convert import duration
from m31.cli.output import Output

if TYPE_CHECKING:
    from m31.conformance.running.journal import Run
    from m31.conformance.running.runner import Progress

SOURCE = "m31.conformance.catalog:built_in"
SHOWN = 10
"""Failures that are printed; the reports have them all."""
_EVERY = 0.3  # seconds between two drawings on a terminal
_LINES_EVERY = 30.0  # seconds between two lines elsewhere
_WIDTH = 30


def bar(progress: Progress) -> str:
    """One line: part done, failures, and the time left by the items' own estimates."""
    part = progress.done / progress.total if progress.total else 1.0
    filled = int(part * _WIDTH)
    left = "unknown" if progress.seconds_left is None else duration(progress.seconds_left)
    failed = f", {progress.failed:,} failed" if progress.failed else ""
    return (
        f"[{'=' * filled}{' ' * (_WIDTH - filled)}] {part:4.0%}  {progress.done:,} of {progress.total:,} items"
        f"{failed}, {left} left"
    )


class Bar:
    """Redraws one line of a terminal; elsewhere writes a line now and then, and one for each failure."""

    def __init__(self, out: Output) -> None:
        self._out, self._drawn, self._length = out, time.monotonic(), 0
        self._terminal = sys.stderr is not None and sys.stderr.isatty()

    def __call__(self, progress: Progress) -> None:
        """Take note of a result."""
        if progress.last.outcome == "failed":
            self.clear()
            from m31.conformance.item import gist

            said = "\n".join(gist(progress.last.message))
            self._out.note(f"failed {progress.last.id}: {said}")
        now = time.monotonic()
        due = now - self._drawn >= (_EVERY if self._terminal else _LINES_EVERY)
        if not due and progress.done < progress.total:
            return
        line = bar(progress)
        if self._terminal:
            self._out.prompt("\r" + line + " " * (self._length - len(line)))
            self._length = len(line)
        else:
            self._out.note(line.partition("] ")[2].strip())
        self._drawn = now

    def clear(self) -> None:
        """Remove the line."""
        if self._length:
            self._out.prompt("\r" + " " * self._length + "\r")
            self._length = 0


def command(args: argparse.Namespace, out: Output) -> int:
    """Run the action; the exit code."""
    actions: dict[str, Callable[[argparse.Namespace, Output], int]] = {
        "run": run,
        "list": list_items,
        "judge": judge,
        "report": report,
        "pack": pack,
        "verify": verify,
        "diff": diff,
        "bisect": conform_tools.bisect,
        "selftest": conform_tools.selftest,
    }
    return actions[args.action](args, out)


def _level(args: argparse.Namespace) -> Any:
    return args.level or ("L4" if args.checkpoint is not None else "L3")


def run(args: argparse.Namespace, out: Output) -> int:
    """Run the suite.

    Raises: BackendError when the backend cannot be used here, SuiteError for the files that were given.
    """
    from m31.conformance.running import journal, runner
    from m31.conformance.running.pool import WorkerFailed
    from m31.conformance.running.setup import TIMEOUT, Setup

    setup = Setup(
        backend=args.backend,
        device=args.device,
        level=_level(args),
        expression=args.k,
        checkpoint=args.checkpoint,
        salt=args.seed_salt,
        timeout=args.timeout or TIMEOUT,
        jobs=int(args.j),
        fail_fast=args.fail_fast,
        source=SOURCE,
    )
    planned = runner.plan(setup, expect=None if args.expect is None else Path(args.expect))
    folder = Path(args.record or args.out or f"conformance-{planned.manifest.name}")
    shown = Bar(out)
    try:
        found = runner.run(planned, folder, record=args.record is not None, watch=shown)
    except WorkerFailed:
        partial = journal.read(folder)
        if partial.results:  # what was found before is worth reading
            _conclude(partial, folder, out)
        raise
    finally:
        shown.clear()
    return _conclude(found, folder, out)


def judge(args: argparse.Namespace, out: Output) -> int:
    """Judge a record. Raises: SuiteError when it is damaged or of another catalog."""
    from m31.conformance.running import runner

    shown, folder = Bar(out), Path(args.out)
    try:
        found = runner.judge(
            Path(args.record),
            folder,
            jobs=int(args.j),
            timeout=args.timeout,
            checkpoint=args.checkpoint,
            source=SOURCE,
            watch=shown,
        )
    finally:
        shown.clear()
    return _conclude(found, folder, out)


def report(args: argparse.Namespace, out: Output) -> int:
    """Make the reports of a run again. Raises: SuiteError when there is no journal, or a damaged one."""
    from m31.conformance.running import journal

    folder = Path(args.folder)
    return _conclude(journal.read(folder), folder, out)


def _conclude(found: Run, folder: Path, out: Output) -> int:
    """Write the reports and say what they say."""
    import datetime

    from m31.conformance import report as reports

    made = reports.write(found, folder, today=datetime.date.today())
    verdict = made["verdict"]
    out.line(summary(made))
    code: int = verdict["exit_code"]
    out.note(f"reports: {folder / reports.HTML}, and .json, .md and {reports.JUNIT} beside it")
    return code


def summary(made: dict[str, Any]) -> str:
    """A report in a few lines."""
    verdict = made["verdict"]
    lines = []
    for level in dict.fromkeys(r["level"] for r in made["results"]):
        own = [r["outcome"] for r in made["results"] if r["level"] == level]
        counts = ", ".join(f"{own.count(name):,} {name}" for name in dict.fromkeys(sorted(own, key=_rank)))
        lines.append(f"{level}  {counts}")
    commands = {r["id"]: r["command"] for r in made["results"]}
    failed = verdict["failures"] + verdict["suite_faults"]
    lines += [f"failed {name}\n       again: {commands[name]}" for name in failed[:SHOWN]]
    lines += [f"and {len(failed) - SHOWN:,} more failures"] if len(failed) > SHOWN else []
    lines += [f"never exercised: {', '.join(verdict['omissions'])}"] if verdict["omissions"] else []
    lines += [f"expect.toml: {text}" for text in verdict["stale_expectations"]]
    return "\n".join([*lines, f"{made['provenance']['backend']['name']}: {verdict['sentence']}"])


def _rank(outcome: str) -> int:
    order = ("passed", "failed", "refused", "fallback", "unclaimed", "skipped", "recorded", "interrupted")
    return order.index(outcome)


def list_items(args: argparse.Namespace, out: Output) -> int:
    """List items; nothing is run."""
    from m31.conformance.running import runner
    from m31.conformance.running.setup import Setup

    level = _level(args)
    setup = Setup(backend=args.backend, level=level, expression=args.k, checkpoint=args.checkpoint, source=SOURCE)
    items = runner.plan(setup).chosen
    if args.json:
        out.json(
            [
                {
                    "id": item.id,
                    "level": item.level,
                    "subject": item.subject,
                    "format": item.format,
                    "criterion": item.criterion,
                    "claims": list(item.claims),
                    "seconds": item.seconds,
                }
                for item in items
            ],
            indent=1,
        )
        return 0
    width = min(60, max(len(item.id) for item in items))
    for item in items:
        out.line(f"{item.id:{width}}  {item.criterion:12}  {' '.join(item.claims)}".rstrip())
    seconds = duration(sum(item.seconds for item in items))
    out.note(f"{len(items):,} items, about {seconds} on the reference with one process")
    return 0


def pack(args: argparse.Namespace, out: Output) -> int:
    """Pack a run. Raises: SuiteError when it is none to be shown to others."""
    from m31.conformance import packing

    folder = Path(args.folder)
    path = Path(args.out) if args.out else folder.with_name(folder.resolve().name + ".tar.gz")
    files = packing.pack(folder, path, allow_dirty=args.allow_dirty)
    out.line(files[packing.STATEMENT].decode())
    out.note(f"wrote {path}: {len(files)} files, {path.stat().st_size:,} bytes")
    return 0


def verify(args: argparse.Namespace, out: Output) -> int:
    """Verify an archive; 1 if anything is wrong with it. Raises: SuiteError when it is no archive."""
    from m31.conformance import verifying

    done = verifying.verify(
        Path(args.pack),
        sample=args.sample,
        backend=args.backend,
        device=args.device,
        checkpoint=args.checkpoint,
        salt=args.seed_salt,
        source=SOURCE,
    )
    if args.json:
        out.json(done.to_dict(), indent=1)
        return 0 if done.ok else 1
    marks = {True: "ok", False: "WRONG", None: "note"}
    for check in done.checks:
        out.line(f"{marks[check.ok]:5}  {check.name}: {check.text}")
    for result in done.sample:
        out.line(f"       {result.outcome} {result.id} (seed {result.seed})")
    out.line(f"the archive {'holds' if done.ok else 'does not hold'}; it says: {done.verdict or 'nothing'}")
    return 0 if done.ok else 1


def diff(args: argparse.Namespace, out: Output) -> int:
    """Compare two reports; 1 if something passed in A and does not in B."""
    from m31.conformance import comparing

    found = comparing.compare(comparing.load(Path(args.a)), comparing.load(Path(args.b)))
    if args.json:
        out.json(found.to_dict(), indent=1)
    else:
        out.line(comparing.render(found))
    return 1 if found.broken else 0
