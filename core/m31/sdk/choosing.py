"""The glue around the pure selection: the environment, the process-wide override, the facts that need code.

Precedence: the caller's argument > `m31.use` > `M31_BACKEND` > automatic.
"""

from __future__ import annotations

import os
import sys
import threading
from dataclasses import replace
from typing import TYPE_CHECKING

from m31.errors import BackendRefused, UnknownBackend
from m31.sdk.child import PROBE_SECONDS, run_child
from m31.sdk.discovery import Candidate, Policy, discover
from m31.sdk.inventory import Inventory, inventory
from m31.sdk.loading import load, try_import
from m31.sdk.manifest import Manifest, normalise
from m31.sdk.selection import AUTO, Decision, Verdict, matches, select

if TYPE_CHECKING:
    from m31.sdk.backend import Backend

VARIABLE = "M31_BACKEND"

_lock = threading.RLock()
_override: str | None = None
_machine: Inventory | None = None
_cached: tuple[tuple[object, ...], Decision] | None = None


def this_machine() -> Inventory:
    """The inventory, taken once per process."""
    global _machine
    with _lock:
        if _machine is None:
            _machine = inventory()
        return _machine


def decide(choice: str | None = None, *, try_load: bool = False) -> Decision:
    """List, match and select; load nothing.

    Never raises for a backend's sake: a refusal is a `Decision` whose `require()` raises, so that `m31 backends` can
    show it.

    Args:
        choice: a backend's name, or "auto"; None: `m31.use`, then `M31_BACKEND`, then automatic.
        try_load: also import the usable backends of other distributions, in child processes, so that the verdicts tell
            which of them are broken. Costs their import times; `m31 backends` does it, a run does not need it.

    Raises:
        BackendError: one of m31's own environment variables is malformed.
    """
    global _cached
    with _lock:
        wish, source = _wish(choice)
        policy = Policy.from_environment()
        key = (wish, source, policy, try_load, tuple(sys.path))
        if _cached is None or _cached[0] != key:
            candidates = gather(discover(policy), this_machine(), wish, try_load=try_load)
            _cached = (key, select(this_machine(), candidates, wish, source=source))
        return _cached[1]


def refresh() -> None:
    """Forget the decision and the inventory: something was installed, or plugged in, while this process runs."""
    global _cached, _machine
    with _lock:
        _cached = _machine = None


def use(name: str | None) -> Decision:
    """Choose a backend for this process; None takes the choice back.

    Raises:
        BackendError: `name` is unknown or cannot be used here; the earlier choice then stands.
    """
    global _override
    if name is not None and not isinstance(name, str):
        raise UnknownBackend(f"{name!r} is no backend's name", where="m31.use", expected="a string, or None")
    with _lock:
        if name is not None:
            decision = decide(name)
            decision.require()
        _override = name
        return decide()


def given(backend: object) -> Decision:
    """The decision for a backend that the caller has made: a plugin under development, or a wrapped one.

    Raises:
        BackendRefused: it is no `Backend`, or has no manifest.
    """
    from m31.sdk.backend import Backend as Base

    manifest = getattr(backend, "manifest", None)
    if not isinstance(backend, Base) or not isinstance(manifest, Manifest):
        raise BackendRefused(
            f"{backend!r} is no backend", where="backend", expected="a name, or an m31.sdk.Backend with its manifest"
        )
    kind = type(backend)
    candidate = Candidate(
        name=manifest.name,
        raw_name=manifest.name,
        entry=f"{kind.__module__}:{kind.__qualname__}",
        distribution="given as an object",
        version=kind.__qualname__,
        builtin=False,
        location=None,
        manifest=manifest,
        instance=backend,
    )
    verdict = Verdict(
        name=manifest.name, origin=candidate.origin, score=manifest.score, kind="chosen", text="the caller made it"
    )
    return Decision(
        name=manifest.name,
        reason="the caller made it",
        source="argument",
        verdicts=(verdict,),
        candidates=(candidate,),
        refusal=None,
    )


def open_backend(decision: Decision | None = None) -> Backend:
    """Load the decided backend (by default that of `decide()`).

    Raises:
        BackendError: nothing was chosen (the reason is the text), or loading failed. No other backend is tried.
    """
    decision = decide() if decision is None else decision
    return load(decision.require())


def gather(
    candidates: tuple[Candidate, ...], machine: Inventory, wish: str | None, *, try_load: bool
) -> tuple[Candidate, ...]:
    """Add what only running code can tell, in child processes: probes, and trial imports if asked for.

    A candidate that the static facts rule out, or that was not asked for, is not run.
    """
    gathered = []
    for candidate in candidates:
        asked = wish is None or normalise(wish) in (AUTO, candidate.name)
        manifest = candidate.manifest
        if manifest is not None and asked and matches(candidate, machine, candidates):
            if manifest.probe is not None:
                candidate = replace(candidate, probed=run_child("probe", manifest.probe, PROBE_SECONDS))
            if try_load:
                candidate = replace(candidate, trial=try_import(candidate))
        gathered.append(candidate)
    return tuple(gathered)


def _wish(choice: str | None) -> tuple[str | None, str]:
    if choice is not None:
        return choice, "argument"
    if _override is not None:
        return _override, "m31.use"
    named = os.environ.get(VARIABLE, "").strip()  # set to nothing is the shell's way of unsetting for one command
    return (named, VARIABLE) if named else (None, AUTO)
