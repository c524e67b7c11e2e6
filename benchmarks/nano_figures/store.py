"""Finished measurements on the disk, and a progress bar."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from m31.checkpoint.workfolder import file_hash, write_file


def folder_digest(folder: Path, *, without: str | None = None) -> str:
    """A hash of the names and contents of every file below a folder, except those in its subfolder `without`."""
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = path.relative_to(folder)
        if name.parts[0] != without:
            digest.update(f"{name.as_posix()}\0{file_hash(path)}\n".encode())
    return digest.hexdigest()


def write_atomically(path: Path, data: bytes) -> None:
    """The file has the old or the new content at any moment."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    write_file(draft, data)
    os.replace(draft, path)


class Store:
    """Results by name and key: each is valid for what it was measured with only, and none replaces another.

    Args:
        folder: made if needed. Its files `NAME-HASH.json` hold {"key": ..., "result": ...}.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def get(self, name: str, key: Mapping[str, Any], compute: Callable[[], Any]) -> Any:
        """The result of `compute`, which runs only if there is none for this key.

        Args:
            name: what is measured; part of a file name.
            key: everything that the result depends on, as plain JSON.
            compute: returns plain JSON.
        """
        content = json.dumps(key, sort_keys=True)
        digest = hashlib.blake2b(content.encode(), digest_size=6).hexdigest()
        path, wanted = self.folder / f"{name}-{digest}.json", json.loads(content)
        found = _read(path)
        if found is not None and found["key"] == wanted:
            return found["result"]
        result = json.loads(json.dumps(compute()))
        write_atomically(path, (json.dumps({"key": wanted, "result": result}, indent=1) + "\n").encode())
        return result


def _read(path: Path) -> dict[str, Any] | None:
    """A stored result, or None where there is none or its file is not what `Store` writes."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and found.keys() == {"key", "result"} else None


class Progress:
    """One line per measurement on stderr: how far, and the time left. A terminal sees it move, a log its end only."""

    def __init__(self, name: str, total: int) -> None:
        self._name, self._total, self._done = name, max(1, total), 0
        self._start = time.monotonic()
        self._terminal = sys.stderr.isatty()

    def add(self, count: int) -> None:
        """`count` more units are done."""
        self._done += count
        spent = time.monotonic() - self._start
        share = min(1.0, self._done / self._total)
        if self._terminal:
            left = spent * (1 / share - 1) if share else 0.0
            bar = "#" * round(24 * share)
            print(f"\r{self._name:<28} [{bar:<24}] {share:4.0%}  {_clock(left)} left ", end="", file=sys.stderr)

    def __enter__(self) -> Progress:
        self.add(0)
        return self

    def __exit__(self, *exc: object) -> None:
        spent = _clock(time.monotonic() - self._start)
        start = "\r" if self._terminal else ""
        print(f"{start}{self._name:<28} {self._done:,} of {self._total:,} in {spent}{' ' * 30}", file=sys.stderr)


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
