"""What a run is made of on disk: written so that the death of the process at any moment leaves a usable state.

    state.json                 which step, which files, and what the files must belong to
    state-STEP.safetensors     float32 masters and AdamW's moments
    best-STEP.safetensors      masters of the lowest validation loss
    log.jsonl                  one line per step and validation

A tensor file is complete and on the disk before state.json, replaced in one rename, names it; what it no longer names
is deleted after that.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from m31.checkpoint.workfolder import file_hash, sync_folder, write_file
from m31.config.jsonfile import read_object
from m31.errors import TrainingStateError

STATE = "state.json"
LOG = "log.jsonl"
_VERSION = 1
_OWN = re.compile(r"(state|best)-\d+\.safetensors(\.tmp)?")


@dataclass
class Progress:
    """Everything about a run that is not a tensor.

    Attributes:
        fingerprint: of the configuration and data.
        step: optimiser steps that are done.
        validated: step of the last validation.
        total: steps in all; None until they are planned.
        seconds: of training so far, over all processes.
        log_bytes: length of log.jsonl at this step: what a dead process wrote later is dropped.
        tensors: file of the masters and moments, and its hash.
        best, best_loss, best_step: file of the best masters; None before the first validation.
    """

    fingerprint: str
    step: int = 0
    validated: int = 0
    total: int | None = None
    seconds: float = 0.0
    log_bytes: int = 0
    tensors: str | None = None
    tensors_hash: str | None = None
    best: str | None = None
    best_loss: float | None = None
    best_step: int | None = None


class StateFolder:
    """The folder of one run. Raises TrainingStateError for what is not readable."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self, fingerprint: str) -> Progress | None:
        """The stored progress, or None where nothing was trained yet.

        Raises:
            TrainingStateError: the state is damaged or belongs to another configuration.
        """
        path = self.path / STATE
        if not path.exists():
            return None
        raw = read_object(path, error=TrainingStateError)
        try:
            if raw.pop("version") != _VERSION:
                raise TypeError("another version")
            Progress(**raw)  # no key is missing, and none unknown
            progress = TypeAdapter(Progress).validate_python(raw)
        except (KeyError, TypeError, ValidationError) as exc:
            raise self._damaged(f"is not a training state ({exc})") from exc
        if progress.fingerprint != fingerprint:
            raise TrainingStateError(
                f"the run there belongs to another configuration (step {progress.step})",
                where=str(path),
                expected="the configuration and data that it was started with",
                fix="restore them, or give another [run] folder",
            )
        return progress

    def tensors(self, progress: Progress) -> dict[str, Tensor]:
        """Masters and moments of a progress that was read."""
        name = progress.tensors
        path = self.path / str(name)
        if name is None or not path.is_file() or file_hash(path) != progress.tensors_hash:
            raise self._damaged(f"names {name}, which is missing or was changed")
        return load_file(path)

    def best(self, progress: Progress) -> dict[str, Tensor]:
        """The best masters."""
        try:
            return load_file(self.path / str(progress.best))
        except (OSError, SafetensorError) as exc:
            raise self._damaged(f"names {progress.best}, which cannot be read ({exc})") from exc

    def write_best(self, step: int, masters: Mapping[str, Tensor]) -> str:
        """Store masters; they count once `write` names them."""
        return self._save(f"best-{step}.safetensors", masters)

    def write(self, progress: Progress, tensors: Mapping[str, Tensor]) -> None:
        """Make `progress`, with these tensors, the state."""
        progress.tensors = self._save(f"state-{progress.step}.safetensors", tensors)
        progress.tensors_hash = file_hash(self.path / progress.tensors)
        draft = self.path / f"{STATE}.tmp"
        write_file(draft, (json.dumps({"version": _VERSION, **asdict(progress)}, indent=1) + "\n").encode())
        os.replace(draft, self.path / STATE)
        sync_folder(self.path)
        kept = {progress.tensors, progress.best}
        for path in self.path.iterdir():
            if _OWN.fullmatch(path.name) and path.name not in kept:  # the folder may hold files of others
                path.unlink()

    def _save(self, name: str, tensors: Mapping[str, Tensor]) -> str:
        draft = self.path / f"{name}.tmp"
        save_file({key: value.contiguous() for key, value in tensors.items()}, draft)
        with draft.open("rb") as handle:
            os.fsync(handle.fileno())
        os.replace(draft, self.path / name)
        sync_folder(self.path)
        return name

    def open_log(self, progress: Progress) -> int:
        """File descriptor of the log, at the length that belongs to `progress`."""
        handle = os.open(self.path / LOG, os.O_RDWR | os.O_CREAT, 0o644)
        os.ftruncate(handle, min(progress.log_bytes, os.fstat(handle).st_size))
        os.lseek(handle, 0, os.SEEK_END)
        return handle

    def _damaged(self, what: str) -> TrainingStateError:
        return TrainingStateError(
            what, where=str(self.path / STATE), fix="restore the folder from a copy, or start in another one"
        )


def append(handle: int, row: dict[str, Any]) -> int:
    """Write one JSON line; how many bytes it has."""
    line = (json.dumps(row) + "\n").encode()
    os.write(handle, line)
    return len(line)
