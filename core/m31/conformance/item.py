"""What the suite is made of: an item makes evidence on a device, and judges it there or on another machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, get_args

if TYPE_CHECKING:  # the types below are read by programs that never open a backend, and need no torch for it
    from m31.conformance.bench import Bench

Level = Literal["L0", "L1", "L2", "L3", "L4"]
LEVELS: tuple[Level, ...] = get_args(Level)

Criterion = Literal["rule", "exact", "bound", "likeness", "ids", "distribution", "agreement"]
"""How an item is judged.

rule: something is done, or refused, or not. exact: the same numbers. bound: within the bound that follows from the
declared arithmetic, element by element. likeness: much nearer to the definition than nonsense is, where no bound is
known. ids: equal, but where two scores are nearer to each other than their bounds. distribution: a test of goodness of
fit. agreement: of a whole model with the reference under the same arithmetic (divergence, choice of the next token).
"""

Outcome = Literal["passed", "failed", "refused", "fallback", "unclaimed", "skipped", "recorded", "interrupted"]
"""What became of an item.

refused: the backend has no kernel for this shape or this combination, which it may say, as long as everything that it
claims is exercised by other items. fallback: the op is left to the reference, as the manifest says. unclaimed: the
manifest does not claim what it needs. skipped: an entry of `expect.toml` says not to run it. recorded: run here, to be
judged elsewhere. interrupted: it was running when the run was stopped.
"""


class NotRun(Exception):
    """Raised by `Item.execute` where there is nothing to judge. `outcome` is one of refused, fallback, unclaimed."""

    def __init__(self, outcome: Outcome, reason: str) -> None:
        super().__init__(reason)
        self.outcome, self.reason = outcome, reason


@dataclass(frozen=True)
class Evidence:
    """What a device did for an item. It can be stored, and says everything that a judge needs beyond the item's id.

    Args:
        arrays: results and what they depend on besides the case: numpy arrays as they came from the device.
        facts: plain JSON values: kernels, declared arithmetic, dtypes.
    """

    arrays: Mapping[str, Any] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Of evidence that passes.

    Args:
        margin: the largest error as a part of what is allowed, 0 to 1; None where nothing is measured.
        max_error, allowed: at that place, in the unit of the result.
        where: the place: output and element.
        note: one sentence for the report.
    """

    margin: float | None = None
    max_error: float | None = None
    allowed: float | None = None
    where: str = ""
    note: str = ""


@dataclass(frozen=True, eq=False, kw_only=True)
class Item:
    """One thing that a backend is asked.

    Args:
        id: `LEVEL/subject/case[/format...]`, unique, stable over releases; every random number derives from it.
        level: see DESIGN.md §7.
        subject: op, rule or feature: a row of the report.
        format: of weights or pages, as the manifest names it; "" where there is none. A column of the report.
        criterion: how it is judged.
        claims: what of the manifest it exercises, such as `op:linear`, `weights:nvfp4`, `kv:fp8`, `arithmetic:exact`,
            `limit:draft_tokens`; a claim that no passed item exercises makes the backend not conformant by omission.
        attributes: attribute -> value, for the coverage.
        seconds: what it costs on the reference, roughly, to share items out.
        execute: run it. Raises `NotRun`; whatever else it raises is a failure.
        judge: raise `ContractViolation`, or say how good it was. Uses the item and the evidence, and no backend but the
            reference.
    """

    id: str
    level: Level
    subject: str
    format: str
    criterion: Criterion
    claims: tuple[str, ...]
    execute: Callable[[Bench], Evidence]
    judge: Callable[[Evidence], Verdict]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 0.1


@dataclass(frozen=True, kw_only=True)
class Result:
    """What became of one item: a line of the report.

    Args:
        message: why, where it did not pass.
        error: class of the exception of a failure.
        seed: of the item; `inputs` is the hash of what it gave to the backend ("" if it gave nothing that is hashed).
        kernel, arithmetic: of the backend, as declared.
        seconds: of execution and judgement.
    """

    id: str
    level: Level
    subject: str
    format: str
    criterion: Criterion
    outcome: Outcome
    claims: tuple[str, ...]
    attributes: Mapping[str, Any]
    seed: int
    seconds: float
    verdict: Verdict
    message: str = ""
    error: str = ""
    inputs: str = ""
    kernel: str = ""
    arithmetic: str = ""


def gist(message: str, *, lines: int = 5, width: int = 300) -> list[str]:
    """The first lines of a failure's message that are not empty: what was raised, then where, innermost first."""
    return [line[:width] for line in message.split("\n") if line.strip()][:lines]
