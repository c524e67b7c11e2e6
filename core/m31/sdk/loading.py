"""Loading: importing the one chosen backend and constructing it. Only here does plugin code run in this process."""

from __future__ import annotations

import contextlib
import importlib.metadata as metadata
import sys
import threading
from typing import TYPE_CHECKING, Any

from m31.errors import BackendLoadFailed, BackendRefused
from m31.sdk.child import TRIAL_SECONDS, Outcome, chain_text, run_child
from m31.sdk.discovery import GROUP, Candidate

if TYPE_CHECKING:
    from m31.sdk.backend import Backend

_trials: dict[tuple[str | None, str | None, str], Outcome] = {}
_lock = threading.Lock()
_FIX = (
    "repair or uninstall that distribution, name another backend (--backend NAME; `m31 backends` lists them), or set "
    "M31_NO_PLUGINS=1 to use only those that come with m31"
)


class TrialError(Exception):
    """The cause of a `BackendLoadFailed` that happened in the child process; its text is the child's own report."""


def try_import(candidate: Candidate, seconds: float = TRIAL_SECONDS) -> Outcome:
    """Import a candidate's entry point in a child process, once per process and distribution version.

    What comes with m31 itself is not tried: it would double the start of every run to guard against our own code.
    """
    if candidate.builtin:
        return Outcome(ok=True, text="")
    key = (candidate.distribution, candidate.version, candidate.entry)
    with _lock:
        if key not in _trials:
            _trials[key] = run_child("import", candidate.entry, seconds)
        return _trials[key]


def load(candidate: Candidate) -> Backend:
    """Import and construct a backend.

    The first load of a backend from another distribution is preceded by an import in a child process, so that a package
    which aborts, exits or hangs at import ends that child and nothing else. That costs its import time once more.

    Raises:
        BackendRefused: the candidate has no manifest (`failure` or `blocked` says why).
        BackendLoadFailed: import or construction failed in any way, including SystemExit; the cause is chained.
    """
    if candidate.instance is not None:
        return candidate.instance
    if candidate.manifest is None:
        raise BackendRefused(f"cannot be loaded: {candidate.failure or candidate.blocked}", where=_where(candidate))
    trial = try_import(candidate)
    if not trial.ok:
        raise load_failed(candidate, trial) from TrialError(trial.detail or trial.text)
    try:
        # A plugin that prints at import must not end up in output that somebody pipes or parses.
        with contextlib.redirect_stdout(sys.stderr):
            plugin = _import(candidate)
            _check_class(candidate, plugin)
            instance: Backend = plugin(candidate.manifest)
    except (KeyboardInterrupt, BackendLoadFailed):
        raise
    except BaseException as error:  # SystemExit and AssertionError too: a plugin must not end the program
        raise BackendLoadFailed(
            f"loading it raised {chain_text(exception_lines(error))}", where=_where(candidate), fix=_FIX
        ) from error
    return instance


def load_failed(candidate: Candidate, trial: Outcome) -> BackendLoadFailed:
    """The error for a backend whose import was tried in a child process and failed."""
    return BackendLoadFailed(f"importing it failed: {trial.text}", where=_where(candidate), fix=_FIX)


def exception_lines(error: BaseException) -> list[str]:
    """`Type: text` of an exception and of each of its causes, outermost first."""
    chain = [error]
    while True:
        last = chain[-1]
        inner = last.__cause__ or (None if last.__suppress_context__ else last.__context__)
        if inner is None or inner in chain:
            return [f"{type(e).__name__}: {e}" for e in chain]
        chain.append(inner)


def _where(candidate: Candidate) -> str:
    return f"backend '{candidate.name}' of {candidate.origin}"


def _import(candidate: Candidate) -> Any:
    """The object behind the entry point, through stevedore's DriverManager.

    The manager is given exactly the entry point that discovery has chosen: by default it would look the name up in a
    cache that can be stale and that knows neither the distribution nor every duplicate (BUG-94, BUG-95).
    """
    from stevedore.driver import DriverManager

    chosen = metadata.EntryPoint(candidate.raw_name, candidate.entry, GROUP)

    class OneEntry(DriverManager[Any]):
        def list_entry_points(self) -> list[metadata.EntryPoint]:
            return [chosen]

    manager = OneEntry(namespace=GROUP, name=candidate.raw_name, invoke_on_load=False)
    return manager.extensions[0].plugin


def _check_class(candidate: Candidate, plugin: Any) -> None:
    from m31.sdk.backend import Backend

    if not (isinstance(plugin, type) and issubclass(plugin, Backend)):
        raise BackendLoadFailed(
            f"its entry point '{candidate.entry}' is {plugin!r}",
            where=_where(candidate),
            expected="a subclass of m31.sdk.Backend",
            fix="report this to the distribution's authors",
        )
