"""Choosing a backend: a pure function of the hardware, the installed backends and the user's wish.

No file, no environment, no clock: every row of its table can be a test (BUG-91). Rules (DESIGN.md §3): an explicit
choice is never replaced; the highest score wins; a tie is the user's to settle; a machine with an accelerator never
falls back to its processor unasked; every candidate gets one line that says what became of it.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Any, Literal

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from m31.errors import (
    BackendError,
    BackendLoadFailed,
    BackendRefused,
    BackendTie,
    DuplicateBackend,
    NoUsableBackend,
    UnknownBackend,
)
from m31.sdk.discovery import Candidate
from m31.sdk.inventory import Device, Inventory
from m31.sdk.manifest import DeviceMatch, Manifest, normalise
from m31.sdk.version import API_VERSION

AUTO = "auto"

VerdictKind = Literal[
    "chosen",
    "outscored",
    "not asked for",
    "tie",
    "no matching device",
    "missing package",
    "software too old",
    "API mismatch",
    "duplicate",
    "failed",
    "claims no ops",
    "declined",
    "blocked",
]


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What became of one candidate. `str()` is the one line that users see."""

    name: str
    origin: str  # distribution and version
    score: int | None  # None: no manifest could be read
    kind: VerdictKind
    text: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}" if self.text else self.kind


@dataclass(frozen=True, kw_only=True)
class NoChoice:
    """Why nothing was chosen, as the error that `Decision.require` raises."""

    error: type[BackendError]
    what: str
    where: str | None = None
    expected: str | None = None
    fix: str | None = None

    def exception(self) -> BackendError:
        """A fresh exception, so that raising twice does not pile up tracebacks."""
        return self.error(self.what, where=self.where, expected=self.expected, fix=self.fix)


@dataclass(frozen=True, kw_only=True)
class Decision:
    """The outcome. Exactly one of `name` and `refusal` is set; `verdicts[i]` belongs to `candidates[i]`."""

    name: str | None
    reason: str
    source: str  # who asked: "argument", "m31.use", "M31_BACKEND" or "auto"
    verdicts: tuple[Verdict, ...]
    candidates: tuple[Candidate, ...]
    refusal: NoChoice | None

    def require(self) -> Candidate:
        """The chosen candidate.

        Raises:
            BackendError: the subclass that says why there is none; exit code 3.
        """
        if self.refusal is not None:
            raise self.refusal.exception()
        index = [v.kind for v in self.verdicts].index("chosen")
        return self.candidates[index]

    def __str__(self) -> str:
        if self.name is None:
            return f"no backend: {self.reason}"
        return f"{self.name} ({self.require().origin}): {self.reason}"

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "chosen": self.name,
            "reason": self.reason,
            "source": self.source,
            "error": None if self.refusal is None else self.refusal.error.__name__,
            "backends": [
                {
                    "name": v.name,
                    "distribution": c.distribution,
                    "version": c.version,
                    "builtin": c.builtin,
                    "score": v.score,
                    "verdict": v.kind,
                    "text": v.text,
                }
                for v, c in zip(self.verdicts, self.candidates, strict=True)
            ],
        }


@dataclass(frozen=True)
class _Obstacle:
    kind: VerdictKind
    text: str
    ranks: bool = False  # it would be usable but for this: passing over it silently would replace it (BUG-77)


def select(
    inventory: Inventory, candidates: tuple[Candidate, ...], choice: str | None = None, *, source: str = "argument"
) -> Decision:
    """Choose.

    Args:
        inventory: the machine.
        candidates: what `discover` lists, with the facts that `choosing.gather` adds.
        choice: a backend's name; None or "auto" for the highest score. Names are never aliases (BUG-86).
        source: who made the choice, for messages; ignored for an automatic one.
    """
    obstacles = [_obstacle(c, inventory, candidates) for c in candidates]
    if choice is None or normalise(choice) == AUTO:
        return _Table(inventory, candidates, obstacles, "auto").automatic()
    return _Table(inventory, candidates, obstacles, source).explicit(choice)


def matches(candidate: Candidate, inventory: Inventory, candidates: tuple[Candidate, ...]) -> bool:
    """Whether all that is known without running its code speaks for a candidate, so that its probe is worth running."""
    found = _obstacle(candidate, inventory, candidates)
    return found is None or found.ranks or found.kind == "declined"


def _obstacle(c: Candidate, inventory: Inventory, candidates: tuple[Candidate, ...]) -> _Obstacle | None:
    """The first thing that keeps a candidate from being used, in the order in which a user would have to mend it."""
    if c.blocked is not None:
        return _Obstacle("blocked", c.blocked)
    if c.manifest is None:
        return _Obstacle("failed", c.failure or "no manifest was read")
    found = _static(c, c.manifest, inventory) or _asked(c, c.manifest)
    if found is not None:
        return found
    rivals = [o for o in candidates if o is not c and o.name == c.name and o.blocked is None]
    if rivals:
        also = ", ".join(sorted({o.origin for o in rivals}))
        return _Obstacle("duplicate", f"'{c.name}' is registered by {c.origin} and by {also}", ranks=True)
    if c.trial is not None and not c.trial.ok:
        return _Obstacle("failed", f"importing it failed: {c.trial.text}", ranks=True)
    return None


def _static(c: Candidate, manifest: Manifest, inventory: Inventory) -> _Obstacle | None:
    if not SpecifierSet(manifest.requires).contains(API_VERSION, prereleases=True):
        return _Obstacle("API mismatch", f"needs the m31 backend API {manifest.requires}, this is {API_VERSION}")
    problem = _device_problem(manifest.device, inventory)
    if problem is not None:
        return _Obstacle("no matching device", problem)
    if not manifest.ops:
        return _Obstacle("claims no ops", f"{c.name} claims no ops yet in this release")
    if c.missing:
        return _Obstacle("missing package", "; ".join(c.missing))
    problem = _software_problem(manifest.device, inventory)
    return None if problem is None else _Obstacle("software too old", problem)


def _asked(c: Candidate, manifest: Manifest) -> _Obstacle | None:
    """What its probe said."""
    if manifest.probe is None or (c.probed is not None and c.probed.ok):
        return None
    if c.probed is None:
        return _Obstacle("declined", "its probe was not run")
    if c.probed.declined:
        return _Obstacle("declined", f"its probe says: {c.probed.text}")
    return _Obstacle("failed", f"its probe failed: {c.probed.text}")


def _matching(match: DeviceMatch, devices: tuple[Device, ...]) -> list[Device]:
    return [d for d in devices if d.vendor == match.vendor and d.arch in match.architectures]


def _device_problem(match: DeviceMatch, inventory: Inventory) -> str | None:
    if match.kind != "gpu" or match.min_count is None:
        return None
    usable = len(_matching(match, inventory.usable_devices))
    if usable >= match.min_count:
        return None
    archs = " or ".join(match.architectures)
    return f"needs {match.min_count} usable device(s) of {match.vendor} {archs}; this machine has {_summary(inventory)}"


def _summary(inventory: Inventory) -> str:
    """How many of which device, or the fact that there is none."""
    counts: dict[str, int] = {}
    for d in inventory.devices:
        label = f"{d.vendor} {d.arch or d.name}" + ("" if d.usable else f" (present but unusable: {d.problem})")
        counts[label] = counts.get(label, 0) + 1
    return ", ".join(f"{n} of {label}" for label, n in counts.items()) or "no accelerator"


def _software_problem(match: DeviceMatch, inventory: Inventory) -> str | None:
    devices = _matching(match, inventory.usable_devices)
    for what, minimum, found in (
        ("driver", match.min_driver, {d.driver for d in devices}),
        ("toolkit", match.min_toolkit, {d.toolkit for d in devices}),
    ):
        if minimum is None:
            continue
        for version in sorted(found, key=str):
            if version is None:
                return f"needs {what} {minimum} or newer; the installed version is unknown"
            if not _at_least(version, minimum):
                return f"needs {what} {minimum} or newer; {version} is installed"
    return None


def _at_least(version: str, minimum: str) -> bool:
    """Compare by the leading dotted number; drivers append build tags ("7.2.0-43")."""
    try:
        return Version(version.split("-")[0]) >= Version(minimum)
    except InvalidVersion:
        return False


@dataclass(frozen=True)
class _Table:
    """The candidates with their obstacles, and the two ways of choosing among them."""

    inventory: Inventory
    candidates: tuple[Candidate, ...]
    obstacles: list[_Obstacle | None]
    source: str

    # --- the user named one ---

    def explicit(self, choice: str) -> Decision:
        name = normalise(choice)
        named = [i for i, c in enumerate(self.candidates) if c.name == name]
        if not named:
            return self._refuse(self._unknown(choice), {})
        open_to_us = [i for i in named if self.candidates[i].blocked is None] or named
        if len(open_to_us) > 1:
            return self._refuse(_duplicate(self.candidates[open_to_us[0]], self.candidates), {})
        index = open_to_us[0]
        obstacle = self.obstacles[index]
        if obstacle is None:
            return self._accept(index, f"asked for by {self.source}", "not asked for")
        return self._refuse(self._refused(self.candidates[index], obstacle), {})

    def _unknown(self, choice: str) -> NoChoice:
        names = sorted({c.name for c in self.candidates})
        near = difflib.get_close_matches(normalise(choice), names, n=1)
        return NoChoice(
            error=UnknownBackend,
            what=f"no backend named '{choice}' is installed (asked for by {self.source})",
            expected=f"one of {', '.join(names)}, or {AUTO}" if names else "an installed backend; there is none",
            fix=f"did you mean '{near[0]}'?" if near else "`m31 backends` lists what is installed",
        )

    def _refused(self, c: Candidate, obstacle: _Obstacle) -> NoChoice:
        if c.trial is not None and not c.trial.ok and obstacle.kind == "failed":
            return _trial_failed(c)
        return NoChoice(
            error=BackendRefused,
            what=f"installed ({c.origin}) but cannot be used here: {obstacle.kind}: {obstacle.text}",
            where=f"backend '{c.name}'",
            fix=f"mend that, or choose another backend; an explicit choice ({self.source}) is never replaced",
        )

    # --- highest score ---

    def automatic(self) -> Decision:
        ranked = [i for i, o in enumerate(self.obstacles) if o is None or o.ranks]
        best = max((self._score(i) for i in ranked), default=None)
        top = [i for i in ranked if self._score(i) == best]
        if not top:
            return self._refuse(self._none_usable(), {})
        first = self.obstacles[top[0]]
        contested = [i for i in top if (o := self.obstacles[i]) is not None and o.kind == "duplicate"]
        if contested:
            return self._refuse(_duplicate(self.candidates[contested[0]], self.candidates), {})
        if len(top) == 1 and first is not None:
            return self._refuse(_trial_failed(self.candidates[top[0]]), {})
        usable = [i for i in ranked if self.obstacles[i] is None]
        if self.inventory.devices and all(self._kind(i) == "cpu" for i in usable):
            return self._refuse(self._none_usable(), dict.fromkeys(usable, _CPU_ONLY))
        if len(top) > 1:
            return self._refuse(self._tie(top, best), dict.fromkeys(top, ("tie", f"score {best}, {len(top)} backends")))
        others = len([i for i in ranked if i != top[0]])
        reason = f"highest score ({best}) of {others + 1} usable backends" if others else "the only usable backend"
        return self._accept(top[0], reason, "outscored")

    def _tie(self, top: list[int], score: int | None) -> NoChoice:
        who = " and ".join(f"'{self.candidates[i].name}' of {self.candidates[i].origin}" for i in top)
        return NoChoice(
            error=BackendTie,
            what=f"{who} have the same score {score}",
            fix=f"set M31_BACKEND={self.candidates[top[0]].name} (or the other name), or pass --backend",
        )

    def _none_usable(self) -> NoChoice:
        if not self.candidates:
            return NoChoice(
                error=NoUsableBackend,
                what="no backend is installed, not even the reference that comes with m31",
                fix="install m31 with pip (in a source tree: `pip install -e .`); having it on the path is not enough",
            )
        lines = [
            f"  {c.name} ({c.origin}): " + (f"{o.kind}: {o.text}" if o else "usable, but on the processor only")
            for c, o in zip(self.candidates, self.obstacles, strict=True)
        ]
        on_cpu = [c.name for c, o in zip(self.candidates, self.obstacles, strict=True) if o is None]
        fix = (
            f"to run on the processor nevertheless, say so: --backend {on_cpu[0]} or M31_BACKEND={on_cpu[0]}"
            if on_cpu
            else "mend one of the reasons above"
        )
        return NoChoice(
            error=NoUsableBackend,
            what=f"this machine has {_summary(self.inventory)}, and no installed backend can use it",
            fix="\n".join([fix, *lines]),
        )

    # --- common ---

    def _score(self, index: int) -> int:
        manifest = self.candidates[index].manifest
        return -1 if manifest is None else manifest.score

    def _kind(self, index: int) -> str | None:
        manifest = self.candidates[index].manifest
        return None if manifest is None else manifest.device.kind

    def _accept(self, index: int, reason: str, others: Literal["outscored", "not asked for"]) -> Decision:
        won = self.candidates[index]
        rest = f"by {won.name} ({self._score(index)})" if others == "outscored" else ""
        return self._decision(index, reason, None, {index: ("chosen", reason)}, (others, rest))

    def _refuse(self, refusal: NoChoice, special: dict[int, tuple[VerdictKind, str]]) -> Decision:
        return self._decision(None, str(refusal.exception()), refusal, special, ("not asked for", "usable"))

    def _decision(
        self,
        index: int | None,
        reason: str,
        refusal: NoChoice | None,
        special: dict[int, tuple[VerdictKind, str]],
        rest: tuple[VerdictKind, str],
    ) -> Decision:
        verdicts = []
        for i, (c, o) in enumerate(zip(self.candidates, self.obstacles, strict=True)):
            kind, text = special.get(i, rest) if o is None or i in special else (o.kind, o.text)
            score = None if c.manifest is None else c.manifest.score
            verdicts.append(Verdict(name=c.name, origin=c.origin, score=score, kind=kind, text=text))
        return Decision(
            name=None if index is None else self.candidates[index].name,
            reason=reason,
            source=self.source,
            verdicts=tuple(verdicts),
            candidates=self.candidates,
            refusal=refusal,
        )


_CPU_ONLY: tuple[VerdictKind, str] = (
    "not asked for",
    "usable on the processor, which is never chosen unasked on a machine with an accelerator",
)


def _duplicate(c: Candidate, candidates: tuple[Candidate, ...]) -> NoChoice:
    origins = sorted(o.origin for o in candidates if o.name == c.name and o.blocked is None)
    return NoChoice(
        error=DuplicateBackend,
        what=f"the name '{c.name}' is registered more than once: by {' and by '.join(origins)}",
        fix="uninstall one of them, or set M31_NO_PLUGINS=1 to use m31's own backends only",
    )


def _trial_failed(c: Candidate) -> NoChoice:
    from m31.sdk.loading import load_failed

    assert c.trial is not None
    error = load_failed(c, c.trial)
    return NoChoice(error=BackendLoadFailed, what=error.what, where=error.where, fix=error.fix)
