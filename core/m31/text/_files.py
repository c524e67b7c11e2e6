"""Reading a checkpoint's small text files without ever blocking on, or being flooded by, something else."""

from __future__ import annotations

import json
import stat
from pathlib import Path

from m31.errors import M31Error


def read_text(path: Path, error: type[M31Error], *, max_bytes: int) -> str | None:
    """The UTF-8 text of `path`, or None when nothing is there.

    Links are followed (download caches keep links), but the target has to be a regular file: opening a FIFO or a
    device would block or never end.

    Raises:
        error: not a regular file, larger than `max_bytes`, unreadable, or not UTF-8.
    """
    try:
        info = path.stat()
    except FileNotFoundError:
        if path.is_symlink():
            raise error(
                "is a link to a file that does not exist",
                where=str(path),
                expected="a regular file",
                fix="download the checkpoint again",
            ) from None
        return None
    except OSError as exc:
        raise error(f"cannot be read ({exc.strerror})", where=str(path), fix="check the path and its rights") from exc
    if not stat.S_ISREG(info.st_mode):
        raise error("is not a regular file", where=str(path), expected="a regular file", fix="download it again")
    if info.st_size > max_bytes:
        raise error(
            f"has {info.st_size:,} bytes",
            where=str(path),
            expected=f"at most {max_bytes:,}",
            fix="this is not a file that m31 can use; download it again",
        )
    try:
        return path.read_bytes().decode("utf-8")
    except OSError as exc:
        raise error(f"cannot be read ({exc.strerror})", where=str(path), fix="check the file's rights") from exc
    except UnicodeDecodeError as exc:
        raise error(
            f"is not UTF-8 (byte {exc.start})", where=str(path), expected="UTF-8 text", fix="download it again"
        ) from exc


def parse_object(text: str, path: Path, error: type[M31Error]) -> dict[str, object]:
    """The JSON object in `text`; anything else is refused in the name of `path`."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise error(
            f"is not valid JSON ({exc})", where=str(path), expected="one JSON object", fix="download it again"
        ) from exc
    if not isinstance(value, dict):
        raise error(
            f"holds a JSON {type(value).__name__}", where=str(path), expected="a JSON object", fix="download it again"
        )
    return value
