"""Every fault against the items of its subject: a suite that lets one through has a gap (DESIGN.md §7)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal

from m31.conformance.bench import Bench
from m31.conformance.faults.fault import Break, Fault, FaultyBackend
from m31.conformance.item import LEVELS, Item, NotRun
from m31.errors import M31Error
from m31.sdk.backend import Backend
from m31.sdk.manifest import Manifest

MakeBench = Callable[[Break], Bench]
Collect = Callable[[Manifest], Sequence[Item]]
_OF_WRAPPERS = "L2/fallback/nothing-borrowed/*"
"""Items that see whether a backend calls into the reference, as one that is the reference with a fault always does."""

_NOT_RUN = "not run: "


@dataclass(frozen=True, kw_only=True)
class Caught:
    """What became of one fault.

    Args:
        fault: which.
        by: id of the item, or the claim; "" if it was not caught.
        how: what the item said.
        named: whether it is one that the fault names.
        crashed: whether it was no judgement of the suite that ended the item, but the faulty backend itself.
        ran: items that ran before it was caught.
        seconds: all of it.
    """

    fault: Fault
    by: str = ""
    how: str = ""
    named: bool = False
    crashed: bool = False
    ran: int = 0
    seconds: float = 0.0

    @property
    def survived(self) -> bool:
        """Nobody saw it."""
        return not self.by

    def __str__(self) -> str:
        if self.survived:
            return f"{self.fault.name}: SURVIVED {self.ran} items of {self.fault.level} {self.fault.subject}"
        other = "" if self.named else f" (named: {self.fault.catches})"
        return f"{self.fault.name}: caught by {self.by}{other}{', crashed' if self.crashed else ''}: {self.how}"


@dataclass(frozen=True)
class SelfTest:
    """A run of the self-test.

    Args:
        healthy: item -> why the healthy backend does not pass it; has to be empty.
        caught: of each fault.
        seconds: all of it.
    """

    healthy: dict[str, str]
    caught: tuple[Caught, ...]
    seconds: float

    @property
    def survivors(self) -> tuple[Caught, ...]:
        """Faults that nobody saw."""
        return tuple(found for found in self.caught if found.survived)

    @property
    def ok(self) -> bool:
        """The healthy backend passes, and no fault survives."""
        return not self.healthy and not self.survivors

    def __str__(self) -> str:
        elsewhere = sum(bool(c.by) and not c.named for c in self.caught)
        lines = [f"healthy backend fails {name}: {why}" for name, why in self.healthy.items()]
        lines += [str(found) for found in self.caught]
        count = len(self.caught)
        lines.append(
            f"{count} faults, {count - len(self.survivors)} caught, {elsewhere} of them by another item than named,"
            f" {len(self.survivors)} survived; {self.seconds:.0f} s"
        )
        return "\n".join(lines)


def bench_maker(backend: Backend, scratch: Path) -> MakeBench:
    """Benches of a healthy backend with one fault each; they share a folder of checkpoints.

    Args:
        backend: that the faults are put into.
        scratch: see `Bench`.
    """
    options = {"weight_cache_bytes": 0} if "weight_cache_bytes" in backend.manifest.options else {}

    def make(fault: Break) -> Bench:
        return Bench(FaultyBackend(backend, fault), options=options, scratch=scratch)

    return make


def selftest(
    faults: Iterable[Fault],
    items: Sequence[Item] | Collect,
    make: MakeBench,
    *,
    said: Callable[[str], None] = lambda line: None,
    check_healthy: bool = True,
) -> SelfTest:
    """Run every fault until an item catches it; the named items come first, cheap ones before dear ones.

    Args:
        faults: of `m31.conformance.faults.FAULTS`.
        items: of the suite, or fewer; or what makes them for a manifest, which a fault may have changed.
        make: see `bench_maker`.
        said: gets a line for each fault as it is done.
        check_healthy: whether the healthy backend runs the items that caught something; it has to pass them.
    """
    began = time.perf_counter()
    usual = items(make(Break()).manifest) if callable(items) else items
    caught = []
    for fault in faults:
        found = _caught(fault, items if fault.break_.manifest is not None else usual, make)
        said(str(found))
        caught.append(found)
    healthy = _healthy(caught, usual, make) if check_healthy else {}
    return SelfTest(healthy, tuple(caught), time.perf_counter() - began)


@dataclass(frozen=True, kw_only=True)
class Cell:
    """What one item said of one fault.

    Args:
        fault, item: names; the item is "opening" where the faulty backend could not even be opened.
        outcome: `not run` where the item did not apply, a kernel being refused for example.
        how: what was said, "" of what passed.
    """

    fault: str
    item: str
    outcome: Literal["caught", "passed", "not run"]
    how: str


def matrix(faults: Iterable[Fault], items: Sequence[Item] | Collect, make: MakeBench) -> Iterator[Cell]:
    """Fault x item: every item that a fault names or that is of its subject, without stopping at the first catch.

    Args: see `selftest`.
    """
    usual = items(make(Break()).manifest) if callable(items) else items
    for fault in faults:
        bench = _opened(fault, make)
        if isinstance(bench, Caught):
            yield Cell(fault=fault.name, item=bench.by, outcome="caught", how=bench.how)
            continue
        for item in _against(fault, items(bench.manifest) if callable(items) and fault.break_.manifest else usual):
            how, _ = _outcome(item, bench)
            outcome: Literal["caught", "passed", "not run"] = "passed" if how is None else "caught"
            if how is not None and how.startswith(_NOT_RUN):
                outcome = "not run"
            yield Cell(fault=fault.name, item=item.id, outcome=outcome, how=how or "")


def seen(fault: Fault, cells: Iterable[Cell]) -> bool:
    """Whether a row of the matrix catches its fault: an item failed, or, of a claim, none passed."""
    mine = [cell.outcome for cell in cells if cell.fault == fault.name]
    return bool(mine) and "passed" not in mine if fault.by == "omission" else "caught" in mine


def _against(fault: Fault, items: Sequence[Item]) -> list[Item]:
    """The items that a fault is run against: the named ones, then the rest of its subject."""
    items = [item for item in items if not fnmatchcase(item.id, _OF_WRAPPERS)]
    if fault.by == "omission":
        return [item for item in items if fault.catches in item.claims]
    named = [item for item in items if fnmatchcase(item.id, fault.catches)]
    known = {item.id for item in named}
    same = [item for item in items if item.id not in known and _about(item, fault)]
    return sorted(named, key=_cost) + sorted(same, key=_cost)


def _about(item: Item, fault: Fault) -> bool:
    return item.subject == fault.subject or item.id.startswith(f"{fault.level}/{fault.subject}/")


def _cost(item: Item) -> tuple[int, float]:
    return LEVELS.index(item.level), item.seconds


def _healthy(caught: Iterable[Caught], items: Sequence[Item], make: MakeBench) -> dict[str, str]:
    """Items that caught something and do not pass without it. Fused ops are served where the fault had them served."""
    known = {item.id: item for item in items}
    wanted = {(found.by, found.fault.break_.fused) for found in caught if found.by in known}
    benches = {fused: make(Break(fused=fused)) for _, fused in wanted}
    said = {by: _outcome(known[by], benches[fused])[0] for by, fused in sorted(wanted)}
    return {by: how for by, how in said.items() if how is not None}


def _opened(fault: Fault, make: MakeBench) -> Bench | Caught:
    try:
        return make(fault.break_)
    except M31Error as error:
        return Caught(fault=fault, by="opening", how=_line(error), named=False)


def _caught(fault: Fault, items: Sequence[Item] | Collect, make: MakeBench) -> Caught:
    began = time.perf_counter()
    bench = _opened(fault, make)
    if isinstance(bench, Caught):
        return bench
    against = _against(fault, items(bench.manifest) if callable(items) else items)
    found = _omission(fault, against, bench) if fault.by == "omission" else _failure(fault, against, bench)
    return Caught(**{**found.__dict__, "seconds": time.perf_counter() - began})


def _failure(fault: Fault, items: Sequence[Item], bench: Bench) -> Caught:
    for ran, item in enumerate(items, 1):
        how, crashed = _outcome(item, bench)
        if how is not None and not how.startswith(_NOT_RUN):
            named = fnmatchcase(item.id, fault.catches)
            return Caught(fault=fault, by=item.id, how=how, named=named, crashed=crashed, ran=ran)
    return Caught(fault=fault, ran=len(items))


def _omission(fault: Fault, items: Sequence[Item], bench: Bench) -> Caught:
    """A claim is redeemed by one item that passes."""
    reasons = []
    for item in items:
        how, _ = _outcome(item, bench)
        if how is None:
            return Caught(fault=fault, ran=len(items))
        reasons.append(how)
    why = f"none of {len(items)} items that exercise it passes, the first is {reasons[0]}" if reasons else ""
    return Caught(fault=fault, by=fault.catches if reasons else "", how=why, named=True, ran=len(items))


def _outcome(item: Item, bench: Bench) -> tuple[str | None, bool]:
    """None if it passed, else what was said; and whether that was the backend's own crash."""
    try:
        item.judge(item.execute(bench))
    except NotRun as told:
        return f"{_NOT_RUN}{told.outcome}: {told}", False
    except M31Error as error:
        return _line(error), False
    except Exception as error:  # noqa: BLE001  # a faulty backend may raise anything
        return f"{type(error).__name__}: {_line(error)}", True
    return None, False


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:240]
