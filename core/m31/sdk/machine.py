"""The narrow window through which the inventory sees the machine; a test puts another machine behind it."""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


def _affinity() -> int:
    """Cores this process may run on; on systems without affinity, all of them."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@dataclass(frozen=True, kw_only=True)
class Note:
    """Something that a probe could not find out.

    probe: the file, library or variable. problem: what it answered.
    """

    probe: str
    problem: str

    def __str__(self) -> str:
        return f"{self.probe}: {self.problem}"


@dataclass(kw_only=True)
class Machine:
    """Files under `root`, libraries through `dlopen`, the environment, the scheduler's affinity."""

    root: Path = Path("/")
    dlopen: Callable[[str], Any] = ctypes.CDLL
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    affinity: Callable[[], int] = _affinity
    arch: str = field(default_factory=platform.machine)
    notes: list[Note] = field(default_factory=list)

    def note(self, probe: str, problem: str) -> None:
        """Record that a probe failed, and how."""
        self.notes.append(Note(probe=probe, problem=problem))

    def read(self, path: str, *, quiet: bool = False) -> str | None:
        """The text of a file below the root, or None; the failure becomes a note unless `quiet`."""
        try:
            return (self.root / path).read_text(encoding="utf-8", errors="replace")
        except (OSError, ValueError) as error:  # ValueError: a path that another file named holds a null byte
            if not quiet:
                self.note(f"/{path}", getattr(error, "strerror", None) or str(error))
            return None

    def glob(self, pattern: str) -> list[Path]:
        """Paths below the root, sorted; an absent folder has none."""
        return sorted(self.root.glob(pattern))

    def library(self, name: str) -> Any | None:
        """A shared library opened by name, or None with a note that holds the loader's own words."""
        try:
            return self.dlopen(name)
        except OSError as error:
            self.note(name, str(error).removeprefix(f"{name}: "))
            return None
