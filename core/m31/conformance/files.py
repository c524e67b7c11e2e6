"""Folders that cannot be written, and disks that are full: the user's to mend, no fault of m31 or of a backend."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from m31.errors import SuiteError


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Around whatever writes a file, or into a folder.

    Raises: SuiteError: names the path, where the operating system refuses.
    """
    try:
        yield
    except OSError as error:
        why = error.strerror or str(error)
        raise SuiteError(f"it cannot be written: {why}", where=str(path), fix="choose another place") from error
