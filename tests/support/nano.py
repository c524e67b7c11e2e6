"""Stand-ins for the bundled checkpoint: random weights, installed as the trained ones are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tools import nano_install

from m31.cli import demo

ABOUT: dict[str, Any] = {"text": "the standard library of CPython 0.0"}


def small_checkpoint(folder: Path) -> Path:
    """A checkpoint of two layers with a tokenizer, 1 MB."""
    demo.write(folder, seed=1, layers=2)
    return folder


def small_nano(folder: Path) -> Path:
    """An installed nano of such weights, in `folder`/nano."""
    checkpoint = small_checkpoint(folder / "checkpoint")
    nano_install.install(checkpoint, folder / "nano", ABOUT)
    return folder / "nano"
