"""What a run is asked to do, in plain values that another process, or another machine, can be given."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from m31.conformance.catalog import SOURCE
from m31.conformance.item import Level
from m31.errors import BackendLoadFailed

if TYPE_CHECKING:
    from m31.sdk.backend import Backend
    from m31.sdk.manifest import Manifest
    from m31.sdk.selection import Decision

DEFAULT_LEVEL: Level = "L3"
TIMEOUT = 300.0
"""Seconds that an item may take. The slowest takes a few on the reference; one that takes this long hangs."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A run.

    Args:
        backend: a name, or `module:Class` of one that is not installed, with its manifest in its package.
        device: see `Backend.open`; None lets the backend decide.
        level: the highest; those below it run too.
        expression: selects among their items (`-k`); None: all.
        checkpoint: folder of a real checkpoint, for L4.
        salt: of the seeds; "" are the usual ones.
        timeout: seconds that one item may take.
        jobs: worker processes.
        fail_fast: stop at the first failure that is not expected.
        source: of the items: see `catalog.collect`.
    """

    backend: str
    device: str | None = None
    level: Level = DEFAULT_LEVEL
    expression: str | None = None
    checkpoint: str | None = None
    salt: str = ""
    timeout: float = TIMEOUT
    jobs: int = 1
    fail_fast: bool = False
    source: str = SOURCE

    @property
    def folder(self) -> Path | None:
        """The checkpoint's folder."""
        return None if self.checkpoint is None else Path(self.checkpoint)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Setup:
        """The inverse of `to_dict`; keys that it does not have are ignored: they are of a later version."""
        known = {entry.name for entry in fields(cls)}
        return cls(**{name: value for name, value in values.items() if name in known})


def manifest_of(backend: str) -> Manifest:
    """The manifest of a backend, without importing its code.

    Raises: BackendError: there is none, or it cannot be used here.
    """
    from m31.sdk.discovery import manifest_path
    from m31.sdk.manifest import read_manifest

    if ":" in backend:
        module, _, name = backend.partition(":")
        if not _found(module) or not name:
            raise BackendLoadFailed(
                f"Python finds no module '{module}'" if name else "the class is missing",
                where=f"--backend {backend}",
                expected="MODULE:CLASS of a package that Python finds, or the name of an installed backend",
                fix="install the package, or put the folder that it is in on PYTHONPATH",
            )
        return read_manifest(manifest_path(backend))
    manifest = decision_of(backend).require().manifest
    assert manifest is not None, "a backend without a manifest is never chosen"
    return manifest


def _found(module: str) -> bool:
    """Whether Python finds the package of a module; nothing is imported."""
    from importlib.util import find_spec

    return bool(module) and find_spec(module.partition(".")[0]) is not None


def decision_of(backend: str) -> Decision:
    """The decision for a backend by name."""
    from m31 import sdk

    return sdk.decide(backend)


def backend_of(backend: str) -> str | Backend:
    """A backend's name as it is; an object of the class that `module:Class` names.

    Raises: BackendLoadFailed: importing or making it raised.
    """
    if ":" not in backend:
        return backend
    from importlib import import_module

    manifest = manifest_of(backend)
    module, _, name = backend.partition(":")
    try:
        found = import_module(module)
        made: Backend = getattr(found, name)(manifest)
    except Exception as error:
        if isinstance(error, AttributeError) and error.name == name and error.obj is found:
            raise BackendLoadFailed(f"module '{module}' has no '{name}'", expected="MODULE:CLASS") from error
        raise BackendLoadFailed(f"making it raised {type(error).__name__}: {error}", where=backend) from error
    return made
