"""What a run's results amount to: the level reached, what failed, what was claimed and never exercised."""

from __future__ import annotations

import datetime
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from m31.conformance import expectations
from m31.conformance.catalog import upto
from m31.conformance.claims import exercised_by
from m31.conformance.item import Level
from m31.conformance.running.attempt import SUITE_ERRORS
from m31.conformance.running.journal import Run

PASSED, FAILED, OMITTED, TROUBLE, INTERRUPTED = 0, 1, 2, 3, 130
UNSERVED = ("refused", "fallback", "unclaimed")
"""Outcomes of items that the backend, as its manifest says, does not compute."""


@dataclass(frozen=True, kw_only=True)
class Conclusion:
    """The verdict of a run.

    Args:
        exit_code: 0 as it should be, 1 failures or entries of `expect.toml` that are not true, 2 not conformant by
            omission, 3 the suite could not judge, 130 interrupted.
        level: the highest level reached: every item of it and of those below was asked and passed, or was refused or
            left to the reference as the manifest says, or has a waiver, and every claim was exercised. None if none, or
            if the run was of a selection.
        sentence: all this in one sentence.
        whole: the run was of whole levels, and came to its end.
        counts: outcome -> items.
        failures: ids that failed unexpectedly.
        suite_faults: ids whose criterion or item is at fault, not the backend.
        omissions: claims that no passed item exercised; `level:L` where no item of a level passed, `conformance:L`
            where the manifest says more than the run shows.
        claims: claim -> (first level that could exercise it, passed items that did).
        expected: id -> kind of the entry of `expect.toml` about it.
        stale: entries of `expect.toml` that are not true (any more), in words.
        waived: ids that failed and have a waiver.
    """

    exit_code: int
    level: Level | None
    sentence: str
    whole: bool
    counts: Mapping[str, int]
    failures: tuple[str, ...]
    suite_faults: tuple[str, ...]
    omissions: tuple[str, ...]
    claims: Mapping[str, tuple[Level | None, int]]
    expected: Mapping[str, str]
    stale: tuple[str, ...]
    waived: tuple[str, ...]


def conclude(run: Run, *, today: datetime.date | None = None) -> Conclusion:
    """Judge a run by its journal alone.

    Args:
        run: see `journal.read`.
        today: entries of `expect.toml` that expired before it are stale; None: none is.
    """
    expected = expectations.parse(run.header["expect"])
    kinds = {r.id: entry.kind for r in run.results if (entry := expected.of(r.id)) is not None}
    failed = [r for r in run.results if r.outcome == "failed"]
    faults = tuple(r.id for r in failed if r.error in SUITE_ERRORS)
    failures = tuple(r.id for r in failed if r.id not in kinds and r.id not in faults)
    waived = tuple(r.id for r in failed if kinds.get(r.id) == "waiver")
    stale = tuple(expected.broken_by(run.results)) + (tuple(expected.expired(today)) if today else ())
    levels = upto(run.header["setup"]["level"])
    whole = run.complete and run.header["setup"]["expression"] is None and not run.header.get("recorded")
    claims = _claims(run)
    omissions = [
        claim for claim, (level, passed) in claims.items() if not passed and (level is None or level in levels)
    ]
    reached = _reached(run, claims, waived, levels) if whole else None
    promised = run.header["manifest"]["conformance"]
    levels_passed = {result.level for result in run.results if result.outcome == "passed"}
    omissions += [f"level:{level}" for level in levels if level not in levels_passed]
    if whole and promised in levels and (reached is None or reached < promised):
        omissions.append(f"conformance:{promised}")
    if not whole:
        omissions = []
    code = _code(run, failures, stale, faults, omissions)
    return Conclusion(
        exit_code=code,
        level=reached,
        sentence=_sentence(run, code, reached, failures, stale, faults, omissions, waived, whole),
        whole=whole,
        counts=dict(Counter(result.outcome for result in run.results)),
        failures=failures,
        suite_faults=faults,
        omissions=tuple(omissions),
        claims=claims,
        expected=kinds,
        stale=stale,
        waived=waived,
    )


def _claims(run: Run) -> dict[str, tuple[Level | None, int]]:
    passed: Counter[str] = Counter()
    for result in run.results:
        if result.outcome == "passed":
            passed.update(exercised_by(result.claims))
    return {claim: (level, passed[claim]) for claim, level in run.header["claims"].items()}


def _reached(
    run: Run, claims: Mapping[str, tuple[Level | None, int]], waived: tuple[str, ...], levels: tuple[Level, ...]
) -> Level | None:
    """The highest level without a gap below it."""
    if any(level is None and not passed for level, passed in claims.values()):
        return None  # nothing in the whole suite exercises it, at whatever level
    reached: Level | None = None
    for level in levels:
        own = [result for result in run.results if result.level == level]
        good = all(r.outcome in ("passed", *UNSERVED) or r.id in waived for r in own)
        omitted = any(first == level and not passed for first, passed in claims.values())
        if omitted or not good or not any(r.outcome == "passed" for r in own):
            break
        reached = level
    return reached


def _code(
    run: Run, failures: tuple[str, ...], stale: tuple[str, ...], faults: tuple[str, ...], omissions: list[str]
) -> int:
    if failures or stale:
        return FAILED
    if not run.complete:
        return INTERRUPTED
    if faults:
        return TROUBLE
    return OMITTED if omissions or _nothing_ran(run) else PASSED


def _nothing_ran(run: Run) -> bool:
    """Whether the backend computed nothing of all that was asked, by its own choice: such a selection shows nothing."""
    return all(result.outcome in UNSERVED for result in run.results)


def _sentence(
    run: Run,
    code: int,
    reached: Level | None,
    failures: tuple[str, ...],
    stale: tuple[str, ...],
    faults: tuple[str, ...],
    omissions: list[str],
    waived: tuple[str, ...],
    whole: bool,
) -> str:
    parts = []
    if failures:
        parts.append(f"{_count(len(failures), 'item')} failed")
    if stale:
        parts.append(f"{_count(len(stale), 'entry', 'entries')} of expect.toml not true")
    if faults:
        parts.append(f"the suite itself is at fault in {_count(len(faults), 'item')}")
    if omissions:
        parts.append(f"{_count(len(omissions), 'claim')} never exercised")
    elif code == OMITTED:
        counts = Counter(result.outcome for result in run.results)
        told = ", ".join(f"{number:,} {outcome}" for outcome, number in counts.items())
        hint = "" if set(counts) == {"refused"} else "; is the op in the manifest's ops?"
        parts.append(f"none of {_count(len(run.results), 'selected item')} ran on it ({told}){hint}")
    if not run.complete:
        parts.append(f"stopped after {len(run.results):,} of {_count(len(run.header['ids']), 'item')}")
    detail = "; ".join(parts)
    if code == PASSED:
        if run.header.get("recorded"):
            return f"recorded {_count(len(run.results), 'item')}, to be judged with `m31 conform judge`"
        if not whole:
            return f"all {len(run.results):,} selected passed or are allowed; a selection reaches no level"
        with_waivers = f" with {_count(len(waived), 'waiver')}" if waived else ""
        if reached != run.header["setup"]["level"]:
            return f"nothing failed unexpectedly; {f'level {reached}' if reached else 'no level'} is reached"
        return f"conformant: level {reached} is reached{with_waivers}"
    if code == INTERRUPTED:
        return f"incomplete: {detail}"
    if code == OMITTED:
        return ("not conformant by omission: " if omissions else "nothing was judged: ") + detail
    level = f"; level {reached} is reached" if reached else ""
    return ("cannot be judged: " if code == TROUBLE else "not conformant: ") + detail + level


def _count(number: int, one: str, many: str | None = None) -> str:
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def as_dict(conclusion: Conclusion) -> dict[str, Any]:
    """The `verdict` of a report."""
    return {
        "exit_code": conclusion.exit_code,
        "level": conclusion.level,
        "sentence": conclusion.sentence,
        "whole": conclusion.whole,
        "counts": dict(sorted(conclusion.counts.items())),
        "failures": list(conclusion.failures),
        "suite_faults": list(conclusion.suite_faults),
        "omissions": list(conclusion.omissions),
        "stale_expectations": list(conclusion.stale),
        "waived": list(conclusion.waived),
    }
