"""The reference, as a judge uses it: it needs no device, and makes the synthetic checkpoints for itself."""

from __future__ import annotations

import tempfile
from functools import lru_cache
from pathlib import Path

from m31.conformance.bench import Bench

NAME = "reference"


@lru_cache(maxsize=1)
def _scratch() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="m31-oracle-")  # goes with the process


@lru_cache(maxsize=1)
def bench() -> Bench:
    """The reference on a bench of its own, one for the process: judges share what it has made."""
    return Bench(NAME, scratch=Path(_scratch().name))
