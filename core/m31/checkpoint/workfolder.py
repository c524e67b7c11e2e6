"""The folder beside a destination in which a conversion grows until it is whole: lock, state, and what can be reused.

    .NAME.m31-lock      held (flock) by the one process that writes; gone when nobody does
    .NAME.m31-convert/  finished files, and state.json, which lists each with its size and hash

The kernel drops the lock of a process that dies, however it dies. A file enters state.json only after it is complete
and on the disk, so what state.json does not list is not trusted.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Set
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from m31.config.jsonfile import read_object
from m31.errors import CheckpointError, ConfigError, DestinationBusy

STATE = "m31-convert-state.json"
_VERSION = 1  # raise it when the same job would give other bytes


def fingerprint(job: dict[str, Any]) -> str:
    """A hash of everything that the bytes of a conversion depend on."""
    text = json.dumps({"version": _VERSION, **job}, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def file_hash(path: Path) -> str:
    """BLAKE2b of a file."""
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


@contextmanager
def locked(destination: Path) -> Iterator[None]:
    """Be the only process that writes `destination`.

    Raises:
        DestinationBusy: another one is.
        CheckpointError: the lock file cannot be made.
    """
    path = destination.parent / f".{destination.name}.m31-lock"
    handle = _acquire(path, destination)
    try:
        yield
    finally:
        with suppress(OSError):
            path.unlink()  # while it is held: whoever opened it meanwhile sees that it is no longer the file's name
        os.close(handle)


def _acquire(path: Path, destination: Path) -> int:
    while True:
        try:
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as exc:
            raise CheckpointError(f"cannot be locked ({exc})", where=str(destination)) from exc
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with suppress(FileNotFoundError):
                named, held = os.stat(path), os.fstat(handle)
                if (named.st_dev, named.st_ino) == (held.st_dev, held.st_ino):
                    return handle
            os.close(handle)  # its last holder removed it between our open and our lock
        except BlockingIOError:
            os.close(handle)
            raise DestinationBusy(
                "is being written by another process",
                where=str(destination),
                expected="one writer",
                fix="wait for it, or choose another destination",
            ) from None
        except OSError as exc:
            os.close(handle)
            raise CheckpointError(
                f"cannot be locked ({exc})", where=str(destination), fix="choose a file system with file locks"
            ) from exc


class WorkFolder:
    """The growing folder of one job. Open it with the lock held.

    Args:
        destination: what it becomes.
        job: `fingerprint` of everything that the bytes of the reusable files depend on.
        reusable: names of the files that may be taken over from an earlier run of the same job; others are removed.

    Attributes:
        path: where it is.
        done: finished files, name -> [size, hash]; verified when they come from an earlier run.
    """

    def __init__(self, destination: Path, job: str, *, reusable: Set[str]) -> None:
        self.path = destination.parent / f".{destination.name}.m31-convert"
        self.done: dict[str, list[Any]] = {}
        self._job = job
        existed = self.path.exists()
        self.path.mkdir(exist_ok=True)
        if existed:
            self._take_over(reusable)
        self._save()

    def _take_over(self, reusable: Set[str]) -> None:
        """Keep what an earlier run of the same job finished, remove the rest."""
        state = self.path / STATE
        if state.exists():
            try:
                found = read_object(state)
            except ConfigError as exc:
                raise self._foreign(f"is unusable ({exc.what})") from exc
            files = found.get("files")
            if found.get("job") != self._job or not isinstance(files, dict):
                raise self._foreign(
                    "belongs to another job: source, format, input scales (--input-scales), joint gate and up "
                    "(--joint-gate-up), shard size or version of m31 differ"
                )
            self.done = {name: entry for name, entry in files.items() if name in reusable and self._intact(name, entry)}
        for path in sorted(self.path.rglob("*"), reverse=True):
            name = path.relative_to(self.path).as_posix()
            if path.is_file() and name not in self.done and name != STATE:
                path.unlink()

    def _foreign(self, what: str) -> CheckpointError:
        return CheckpointError(
            f"the unfinished conversion there {what}",
            where=str(self.path),
            expected="a conversion that this one can continue",
            fix="delete that folder, or choose another destination",
        )

    def _intact(self, name: str, entry: Any) -> bool:
        path = self.path / name
        if not isinstance(entry, list) or len(entry) != 2 or ".." in name or not path.is_file():
            return False
        return [path.stat().st_size, file_hash(path)] == entry

    def draft(self, name: str) -> Path:
        """Where to write a file before it is complete."""
        path = self.path / f"{name}.tmp"
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def finish(self, name: str) -> None:
        """The draft of `name` is complete and synced: give it its name and remember it."""
        path = self.path / name
        os.rename(self.draft(name), path)
        sync_folder(path.parent)
        self.done[name] = [path.stat().st_size, file_hash(path)]
        self._save()

    def _save(self) -> None:
        draft = self.path / f"{STATE}.tmp"
        write_file(draft, json.dumps({"job": self._job, "files": self.done}, indent=1).encode())
        os.rename(draft, self.path / STATE)
        sync_folder(self.path)

    def discard_if_empty(self) -> None:
        """Leave nothing behind when no file was finished."""
        if not self.done and self.path.exists():
            shutil.rmtree(self.path)

    def publish(self, destination: Path) -> None:
        """Turn the finished folder into the destination, in one step."""
        (self.path / STATE).unlink()
        os.rename(self.path, destination)  # replaces an empty folder, fails on any other
        sync_folder(destination.parent)


def write_file(path: Path, data: bytes) -> None:
    """Write and sync a small file."""
    with path.open("wb") as handle:
        handle.write(data)
        handle.flush()
        os.fsync(handle.fileno())


def copy_file(source: Path, path: Path) -> None:
    """Copy a file's contents and sync them."""
    with source.open("rb") as reader, path.open("wb") as writer:
        shutil.copyfileobj(reader, writer, 8 * 2**20)
        writer.flush()
        os.fsync(writer.fileno())


def sync_folder(folder: Path) -> None:
    """Make renames inside a folder durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
