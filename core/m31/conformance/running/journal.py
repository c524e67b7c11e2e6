"""`results.jsonl`: the run as it happens, a line per event, so that whatever ends it leaves what was found so far."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from m31.conformance.files import writing
from m31.conformance.item import Result, Verdict
from m31.errors import SuiteError

NAME = "results.jsonl"
FORMAT = 1


def plain(value: Any) -> Any:
    """A value in plain JSON: numbers that are not finite become their names, anything unknown its text."""
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(inner) for inner in (sorted(value, key=str) if isinstance(value, (set, frozenset)) else value)]
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return value
    if isinstance(value, int):
        return int(value)
    try:  # numpy's numbers as well
        number = float(value)
    except (TypeError, ValueError):
        return str(value)
    return number if math.isfinite(number) else str(number)


def result_dict(result: Result) -> dict[str, Any]:
    """A result in plain JSON values."""
    values: dict[str, Any] = plain(asdict(result))
    return values


def result_from(values: Mapping[str, Any]) -> Result:
    """The inverse of `result_dict`."""
    entries = dict(values)
    entries["verdict"] = Verdict(**entries["verdict"])
    entries["claims"] = tuple(entries["claims"])
    return Result(**entries)


class Journal:
    """Writes a run's lines; each is on the disk when `write` returns.

    Args:
        folder: where `results.jsonl` lies; made if it is not there.
        header: what the run is, known before its first item.
    """

    def __init__(self, folder: Path, header: Mapping[str, Any]) -> None:
        self.path = folder / NAME
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("w", encoding="utf-8")
        self._line({"kind": "run", "format": FORMAT, **plain(header)})

    def write(self, result: Result, **also: Any) -> None:
        """Note a result, and facts about it that are no part of the report."""
        self._line({"kind": "result", "result": result_dict(result), **plain(also)})

    def close(self, *, complete: bool, seconds: float) -> None:
        """Note how the run ended. Without this line it is incomplete."""
        self._line({"kind": "end", "complete": complete, "seconds": seconds})
        self._file.close()

    def _line(self, value: Mapping[str, Any]) -> None:
        with writing(self.path):
            self._file.write(json.dumps(value, allow_nan=False, ensure_ascii=True) + "\n")
            self._file.flush()
            os.fsync(self._file.fileno())


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run as its journal has it.

    Args:
        header: what it was asked, of whom, with which software.
        results: in the order of the catalog, whatever the order in which they came.
        evidence: id -> file and digest of recorded evidence.
        complete: it came to its end.
        seconds: it took, if it came to an end.
    """

    header: Mapping[str, Any]
    results: tuple[Result, ...]
    evidence: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    complete: bool
    seconds: float | None


def read(folder: Path) -> Run:
    """Read a journal. A last line that a kill cut short is left out.

    Raises: SuiteError: there is none, or it is damaged elsewhere than at its end.
    """
    path = folder / NAME if folder.is_dir() else folder
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SuiteError(f"no journal can be read: {error}", where=str(path), fix="give the folder of a run") from error
    return parse(text, where=str(path))


def parse(text: str, *, where: str) -> Run:
    """The run that the text of a journal tells of: see `read`."""
    lines = text.split("\n")
    entries = []
    for number, line in enumerate(lines[:-1], 1):  # what follows the last line break was cut short
        try:
            entry = json.loads(line)
            assert isinstance(entry, dict)
        except (ValueError, AssertionError) as error:
            raise SuiteError("a line is damaged", where=f"{where}, line {number}", expected="a JSON object") from error
        entries.append(entry)
    if not entries or entries[0].get("kind") != "run":
        raise SuiteError("this is no journal of a run", where=where)
    header = entries[0]
    if header.get("format") != FORMAT:
        raise SuiteError(f"the journal has format {header.get('format')}", where=where, expected=str(FORMAT))
    try:
        results = {e["result"]["id"]: result_from(e["result"]) for e in entries if e["kind"] == "result"}
    except (KeyError, TypeError) as error:
        raise SuiteError(f"a result is malformed: {error}", where=where) from error
    order = {name: place for place, name in enumerate(header["ids"])}
    if strangers := [name for name in results if name not in order]:
        raise SuiteError(f"it has a result of '{strangers[0]}', which was not selected", where=where)
    end = entries[-1] if entries[-1]["kind"] == "end" else {}
    return Run(
        header=header,
        results=tuple(sorted(results.values(), key=lambda result: order[result.id])),
        evidence={e["result"]["id"]: e["evidence"] for e in entries if e.get("evidence")},
        complete=bool(end.get("complete")) and len(results) == len(order),
        seconds=end.get("seconds"),
    )
