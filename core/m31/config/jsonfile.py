"""Strict JSON reading: one place that decides what a readable JSON file is.

`json.load` accepts duplicate keys, NaN and unbounded sizes. A file that two readers can read differently is refused.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NoReturn

from m31.errors import ConfigError, M31Error

CONFIG_LIMIT = 16 * 2**20  # bytes; the published config.json has about 10 kB


class _DuplicateKeyError(ValueError):
    pass


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Object hook that refuses a repeated key, of which `json` would silently keep the last."""
    built = dict(pairs)
    if len(built) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _DuplicateKeyError(key)
            seen.add(key)
    return built


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a JSON number")


def decode_object(data: bytes, *, where: str, error: type[M31Error] = ConfigError) -> dict[str, Any]:
    """Decode UTF-8 JSON bytes whose top level is an object.

    Raises:
        error: byte order mark, bad UTF-8, bad JSON, NaN or Infinity, duplicate key, nesting too deep, not an object.
    """
    if data.startswith(b"\xef\xbb\xbf"):
        raise error("starts with a byte order mark", where=where, expected="plain UTF-8", fix="save it without a BOM")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as exc:
        raise error(f"is not UTF-8 (byte {exc.start})", where=where, fix="save the file as UTF-8") from exc
    try:
        value = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
    except _DuplicateKeyError as exc:
        raise error(f"duplicate key {exc.args[0]!r}", where=where, fix="keep one of the two") from exc
    except json.JSONDecodeError as exc:
        raise error(
            f"is not valid JSON: {exc.msg} at line {exc.lineno}, column {exc.colno}",
            where=where,
            fix="the file is damaged or only partly downloaded; fetch it again",
        ) from exc
    except ValueError as exc:  # NaN, Infinity, or an integer with thousands of digits
        raise error(f"is not valid JSON: {exc}", where=where, fix="write ordinary finite numbers") from exc
    except RecursionError as exc:
        raise error("is nested too deeply", where=where, expected="at most a few levels") from exc
    if not isinstance(value, dict):
        raise error(f"holds a {type(value).__name__} at the top", where=where, expected="a JSON object")
    return value


def read_bytes(path: Path, *, limit: int, error: type[M31Error] = ConfigError) -> bytes:
    """Read a regular file of at most `limit` bytes.

    Raises:
        error: absent, unreadable, not a regular file, or larger than the limit.
    """
    where = str(path)
    try:
        if not path.is_file():
            kind = "is not a regular file" if path.exists() else "does not exist"
            raise error(kind, where=where, expected="a readable file")
        with path.open("rb") as handle:
            data = handle.read(limit + 1)
    except (OSError, ValueError) as exc:  # ValueError: a NUL in the path
        raise error(f"cannot be read ({exc})", where=where, fix="check the path and its permissions") from exc
    if len(data) > limit:
        raise error(f"is larger than {limit:,} bytes", where=where, fix="this is not the file that m31 looks for")
    return data


def read_object(path: Path, *, limit: int = CONFIG_LIMIT, error: type[M31Error] = ConfigError) -> dict[str, Any]:
    """`read_bytes`, then `decode_object`."""
    return decode_object(read_bytes(path, limit=limit, error=error), where=str(path), error=error)
