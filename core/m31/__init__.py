"""m31: hardware-abstracted runtime for MiniMax-M3.1-Flash.

    import m31
    model = m31.load(path)  # without a path: the bundled nano
    for piece in model.generate("..."):
        print(piece, end="")

`m31.backend` is the Decision: which backend runs here, and why. Everything beyond the errors is resolved on first use,
so that the import costs a few milliseconds and loads no torch, no pydantic and no plugin (DESIGN.md §3).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from m31.errors import (
    BackendError,
    BackendLoadFailed,
    BackendRefused,
    BackendTie,
    CheckpointError,
    ConfigError,
    ContextLimitExceeded,
    M31Error,
    MemoryBudgetExceeded,
    NoUsableBackend,
    RequestError,
    UnknownBackend,
)

if TYPE_CHECKING:
    from m31.engine.api import load
    from m31.sdk.choosing import use
    from m31.sdk.selection import Decision

    backend: Decision

__version__ = "0.1.0"  # a constant: reading the installed metadata costs more than the rest of this import

__all__ = [
    "BackendError",
    "BackendLoadFailed",
    "BackendRefused",
    "BackendTie",
    "CheckpointError",
    "ConfigError",
    "ContextLimitExceeded",
    "M31Error",
    "MemoryBudgetExceeded",
    "NoUsableBackend",
    "RequestError",
    "UnknownBackend",
    "__version__",
    "backend",
    "load",
    "use",
]

if not TYPE_CHECKING:  # hidden from type checkers, so that a misspelt name is an error for them

    def __getattr__(name: str) -> object:
        if name == "backend":
            from m31.sdk.choosing import decide

            return decide()  # not stored: `use` may change it, and `decide` remembers it by itself
        if name == "use":
            from m31.sdk.choosing import use

            return use
        if name == "load":
            from m31.engine.api import load

            return load
        raise AttributeError(f"module 'm31' has no attribute '{name}'")

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
