"""One item, from execution to a line of the report, whatever happens on the way."""

from __future__ import annotations

import math
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from m31.conformance.item import Evidence, Item, NotRun, Outcome, Result, Verdict
from m31.conformance.running import records
from m31.errors import ContractViolation, M31Error, SuiteError

if TYPE_CHECKING:
    from m31.conformance.bench import Bench

MESSAGE_CHARACTERS = 4000
_FRAMES = 6
VACUOUS = "VacuousCriterion"
"""`Result.error` where a criterion would accept nonsense: a fault of the suite, not of the backend."""
SUITE_ERRORS = (VACUOUS, SuiteError.__name__)


def attempt(item: Item, bench: Bench, *, salt: str = "", record: Path | None = None) -> Result:
    """Execute and judge an item.

    Args:
        item: what is asked.
        bench: of whom.
        salt: of the seeds.
        record: keep the evidence in this file instead of judging it.
    """
    facts: dict[str, Any] = {}

    def run() -> tuple[Outcome, Verdict]:
        evidence = item.execute(bench)
        facts.update(evidence.facts)
        if record is None:
            return "passed", _judged(item, evidence)
        records.store(record, item.id, evidence)
        return "recorded", Verdict()

    return _result(item, run, salt, facts)


def judge(item: Item, path: Path, *, salt: str = "") -> Result:
    """Judge what was recorded of an item: see `attempt`."""
    facts: dict[str, Any] = {}

    def run() -> tuple[Outcome, Verdict]:
        evidence = records.load(path, item.id)
        facts.update(evidence.facts)
        return "passed", _judged(item, evidence)

    return _result(item, run, salt, facts)


def _judged(item: Item, evidence: Evidence) -> Verdict:
    verdict = item.judge(evidence)
    margin = verdict.margin
    if margin is not None and not (math.isfinite(margin) and 0 <= margin <= 1):
        raise SuiteError(f"the judgement says 'passed' with a margin of {margin}", where=item.id, expected="0 to 1")
    return verdict


def _result(item: Item, run: Callable[[], tuple[Outcome, Verdict]], salt: str, facts: dict[str, Any]) -> Result:
    from m31.ops.cases import salted, seed_of

    start = time.perf_counter()
    verdict, message, error = Verdict(), "", ""
    outcome: Outcome
    with salted(salt):
        seed = seed_of(item.id)
        try:
            outcome, verdict = run()
        except NotRun as reason:
            outcome, message = reason.outcome, reason.reason
        except ContractViolation as fault:
            outcome, message = "failed", str(fault)
            error = VACUOUS if fault.rule == "vacuous" else type(fault).__name__
        except M31Error as fault:
            outcome, message, error = "failed", str(fault), type(fault).__name__
        except (Exception, SystemExit) as fault:  # noqa: BLE001 - a kernel may raise anything; it costs its item only
            outcome, message, error = "failed", _tail(fault), type(fault).__name__
    return Result(
        **described(item),
        outcome=outcome,
        seed=seed,
        seconds=time.perf_counter() - start,
        verdict=verdict,
        message=message[:MESSAGE_CHARACTERS],
        error=error,
        inputs=str(facts.get("inputs", "")),
        kernel=str(facts.get("kernel", "")),
        arithmetic=str(facts.get("arithmetic", "")),
    )


def lost(item: Item, outcome: Outcome, message: str, *, seed: int, seconds: float, error: str = "") -> Result:
    """The result of an item whose process did not live to give one."""
    return Result(
        **described(item),
        outcome=outcome,
        seed=seed,
        seconds=seconds,
        verdict=Verdict(),
        message=message[:MESSAGE_CHARACTERS],
        error=error,
    )


def described(item: Item) -> dict[str, Any]:
    """What a result repeats of its item."""
    return {
        "id": item.id,
        "level": item.level,
        "subject": item.subject,
        "format": item.format,
        "criterion": item.criterion,
        "claims": item.claims,
        "attributes": dict(item.attributes),
    }


def _tail(fault: BaseException) -> str:
    """The exception and the last frames that led to it, innermost first, as the fault handler has them."""
    frames = [frame for frame in traceback.extract_tb(fault.__traceback__) if frame.filename != __file__][-_FRAMES:]
    lines = [f"{Path(frame.filename).name}:{frame.lineno} in {frame.name}: {frame.line}" for frame in reversed(frames)]
    last = "".join(traceback.format_exception_only(fault)).strip()
    return "\n".join([last, *lines])
