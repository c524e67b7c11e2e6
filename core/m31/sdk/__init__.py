"""The plugin SDK: what a backend's author imports, and what chooses among backends.

Names are resolved on first use (PEP 562): importing this package costs nothing and loads neither pydantic nor torch.
`m31.sdk.inventory` is the module; its function `inventory()` takes an inventory, `this_machine()` takes it once.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from m31.sdk.version import API_VERSION

if TYPE_CHECKING:
    from m31.sdk.awaiting import AwaitingKernels
    from m31.sdk.backend import (
        Backend,
        ExportedPages,
        IndexFormat,
        KVCache,
        KVFormat,
        KVLayout,
        KVSpec,
        LazyTensor,
        Limits,
        Session,
        StoredPart,
        stored_as,
    )
    from m31.sdk.choosing import decide, given, open_backend, refresh, this_machine, use
    from m31.sdk.discovery import Candidate, Policy, discover
    from m31.sdk.inventory import Cpu, Device, Inventory
    from m31.sdk.loading import load
    from m31.sdk.machine import Machine, Note
    from m31.sdk.manifest import DeclaredLimits, Determinism, Formats, Manifest, parse_manifest, read_manifest
    from m31.sdk.memory import host_memory_free
    from m31.sdk.rendering import backends_dict, render_backends
    from m31.sdk.selection import Decision, NoChoice, Verdict, select
    from m31.sdk.serving import Serving

_HOMES = {
    "awaiting": ("AwaitingKernels",),
    "backend": (
        *("Backend", "ExportedPages", "IndexFormat", "KVCache", "KVFormat", "KVLayout", "KVSpec", "LazyTensor"),
        *("Limits", "Session", "StoredPart", "stored_as"),
    ),
    "choosing": ("decide", "given", "open_backend", "refresh", "this_machine", "use"),
    "discovery": ("Candidate", "Policy", "discover"),
    "inventory": ("Cpu", "Device", "Inventory"),
    "loading": ("load",),
    "machine": ("Machine", "Note"),
    "memory": ("host_memory_free",),
    "manifest": ("DeclaredLimits", "Determinism", "Formats", "Manifest", "parse_manifest", "read_manifest"),
    "rendering": ("backends_dict", "render_backends"),
    "serving": ("Serving",),
    "selection": ("Decision", "NoChoice", "Verdict", "select"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [  # noqa: RUF022 - in the order of _HOMES; a test compares the two
    "API_VERSION",
    "AwaitingKernels",
    "Backend",
    "ExportedPages",
    "IndexFormat",
    "KVCache",
    "KVFormat",
    "KVLayout",
    "KVSpec",
    "LazyTensor",
    "Limits",
    "Session",
    "StoredPart",
    "stored_as",
    "decide",
    "given",
    "open_backend",
    "refresh",
    "this_machine",
    "use",
    "Candidate",
    "Policy",
    "discover",
    "Cpu",
    "Device",
    "Inventory",
    "load",
    "Machine",
    "Note",
    "host_memory_free",
    "DeclaredLimits",
    "Determinism",
    "Formats",
    "Manifest",
    "parse_manifest",
    "read_manifest",
    "backends_dict",
    "render_backends",
    "Serving",
    "Decision",
    "NoChoice",
    "Verdict",
    "select",
]

if not TYPE_CHECKING:  # hidden from type checkers, so that a misspelt name is an error for them

    def __getattr__(name: str) -> object:
        home = _HOME_OF.get(name)
        if home is None:
            raise AttributeError(f"module 'm31.sdk' has no attribute '{name}'")
        return getattr(import_module(f"m31.sdk.{home}"), name)

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
