"""Catalogs of fake items, cheap and of every temper, for tests of the machine around the items.

A catalog is a function of this module; worker processes import it by its name. What a worker must be told beyond that
is in environment variables.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from m31.conformance.bench import Bench
from m31.conformance.claims import of_manifest
from m31.conformance.item import Evidence, Item, Level, NotRun, Verdict
from m31.errors import ContractViolation, OpRefused
from m31.ops.cases import rng_for
from m31.sdk.manifest import Manifest

Execute = Callable[[Bench], Evidence]
HERE = "tests.support.fake_suite"


def item(item_id: str, execute: Execute | None = None, **also: Any) -> Item:
    """An item whose result is a random number of its id, within a bound of 2."""
    level, subject, *_ = item_id.split("/")

    def numbers(bench: Bench) -> Evidence:
        return Evidence(arrays={"y": rng_for(item_id).random(3)}, facts={"kernel": "fake", "arithmetic": "exact"})

    def judge(evidence: Evidence) -> Verdict:
        error = float(np.max(evidence.arrays["y"]))
        return Verdict(margin=error / 2, max_error=error, allowed=2.0, where="y[0]")

    values: dict[str, Any] = {
        "level": level,
        "subject": subject,
        "format": "",
        "criterion": "bound",
        "claims": (),
        "execute": execute or numbers,
        "judge": judge,
        "seconds": 0.01,
    }
    return Item(id=item_id, **{**values, **also})


def healthy(manifest: Manifest, level: Level, checkpoint: Path | None) -> Iterator[Item]:
    """Exercises every claim once, and has a few items of every outcome that is allowed."""
    claims = of_manifest(manifest)
    if level == "L0":
        yield item("L0/manifest/sane", claims=tuple(c for c in claims if not c.startswith(("op:", "weights:"))))
    elif level == "L1":
        for op in [c for c in claims if c.startswith("op:") and "/" not in c]:
            for form in manifest.formats.weights:
                name = f"L1/{op[3:]}/ordinary/{form}"
                yield item(name, claims=(op, f"weights:{form}"), format=form, attributes={"tokens": 3, "gaps": False})
        yield item("L1/linear/odd", refusing("refused", "K is odd"))
        yield item("L1/linear/left", refusing("fallback", "left to the reference"))
    elif level == "L2":
        yield item("L2/pages/resume", attributes={"tokens": 128})
    elif level == "L3":
        yield item("L3/model/likeness", criterion="agreement")


def troubled(manifest: Manifest, level: Level, checkpoint: Path | None) -> Iterator[Item]:
    """`healthy`, and at L1 an item of every way to fail."""
    yield from healthy(manifest, level, checkpoint)
    if level == "L1":
        yield item("L1/bad/violation", raising(lambda: ContractViolation("arithmetic", "off by 3", where="kernel k")))
        yield item("L1/bad/refusal", raising(lambda: OpRefused("no such thing", where="op linear")))
        yield item("L1/bad/bug", raising(lambda: KeyError("<script>alert('x')</script>")))
        yield item("L1/bad/exit", raising(lambda: SystemExit(3)))
        yield item("L1/bad/crash", crash)
        yield item("L1/bad/hang", hang)
        yield item("L1/bad/vacuous", raising(lambda: ContractViolation("vacuous", "zeros pass", where="judge")))
        yield item("L1/bad/quits", lambda bench: os._exit(7))


def twice(manifest: Manifest, level: Level, checkpoint: Path | None) -> Iterator[Item]:
    """Two items with one id."""
    if level == "L0":
        yield item("L0/a/b")
        yield item("L0/a/b")


def slow(manifest: Manifest, level: Level, checkpoint: Path | None) -> Iterator[Item]:
    """Three quick ones and one that runs until it is stopped; it says in a file that it began."""
    if level == "L0":
        for number in range(3):
            yield item(f"L0/quick/{number}")
        yield item("L0/slow/endless", endless, seconds=0.0)


def salted_only(manifest: Manifest, level: Level, checkpoint: Path | None) -> Iterator[Item]:
    """`healthy`, but an item fails with every seed except the usual one: what fresh seeds are for."""
    from m31.ops.cases import seed_of

    usual = seed_of("L2/pages/resume")

    def lucky(bench: Bench) -> Evidence:
        y = 0.5 if seed_of("L2/pages/resume") == usual else 5.0
        if y > 1:
            raise ContractViolation("arithmetic", "right for the usual seed only", where="kernel lucky")
        return Evidence(arrays={"y": np.array([y])})

    for made in healthy(manifest, level, checkpoint):
        yield item(made.id, lucky) if made.id == "L2/pages/resume" else made


def odd_evidence(manifest: Manifest, level: Level, checkpoint: Path | None) -> Iterator[Item]:
    """Evidence that no file holds, and facts that are no JSON."""
    if level == "L0":
        yield item("L0/odd/array", lambda bench: Evidence(arrays={"y": np.array([object()])}))
        yield item("L0/odd/facts", lambda bench: Evidence(facts={"x": object()}))


def raising(made: Callable[[], BaseException]) -> Execute:
    """An execution that raises."""

    def execute(bench: Bench) -> Evidence:
        raise made()

    return execute


def refusing(outcome: Any, reason: str) -> Execute:
    """An execution that gives nothing to judge."""
    return raising(lambda: NotRun(outcome, reason))  # type: ignore[arg-type, return-value]


def crash(bench: Bench) -> Evidence:
    """A segmentation fault, as a kernel's."""
    print("about to crash", file=sys.stderr, flush=True)
    ctypes.string_at(0)
    raise AssertionError("unreachable")


def hang(bench: Bench) -> Evidence:
    """Does not end."""
    while True:
        time.sleep(1)


def endless(bench: Bench) -> Evidence:
    """Like `hang`, after saying that it began."""
    Path(os.environ["FAKE_SUITE_BEGAN"]).write_text("began")
    return hang(bench)


def deadly(manifest: Manifest, level: Level, checkpoint: Path | None) -> Iterator[Item]:
    """One item that passes, and then only such as end their process."""
    if level == "L0":
        yield item("L0/a/fine")
        for number in range(30):
            yield item(f"L0/deadly/{number}", lambda bench: os._exit(9))


def odd_claims(manifest: Manifest, level: Level, checkpoint: Path | None) -> Iterator[Item]:
    """One item that exercises nothing."""
    if level == "L0":
        yield item("L0/a/b")
