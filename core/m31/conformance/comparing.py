"""`m31 conform diff`: what changed between two reports."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from m31.conformance import packing, report
from m31.errors import SuiteError

FACTOR = 1.5
"""A margin that grew or shrank by less is noise of the order of sums."""
_SHOWN = 80  # characters of a value of the provenance
FLOOR = 0.01
"""Margins below it are not compared: an error of a hundredth of what is allowed is no news."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """What B has that A has not, and the other way round.

    Args:
        broken: ids that passed in A and fail in B, or are not judged there any more.
        fixed: ids that failed in A and pass in B.
        changed: (id, outcome in A, outcome in B) of the others.
        margins: (id, A, B) where both passed and the margin changed a lot, the largest growth first.
        appeared, disappeared: ids of one of the two only.
        claims: claims that only one of the two has, `+` in B, `-` in A.
        provenance: (what, A, B).
        verdicts: sentences of A and B.
    """

    broken: tuple[str, ...]
    fixed: tuple[str, ...]
    changed: tuple[tuple[str, str, str], ...]
    margins: tuple[tuple[str, float, float], ...]
    appeared: tuple[str, ...]
    disappeared: tuple[str, ...]
    claims: tuple[str, ...]
    provenance: tuple[tuple[str, str, str], ...]
    verdicts: tuple[str, str]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


def load(path: Path) -> dict[str, Any]:
    """A report: of a run's folder, a `report.json`, or an archive of `pack`.

    Raises: SuiteError: it is none of them.
    """
    try:
        if path.is_dir():
            text = (path / report.JSON).read_text(encoding="utf-8")
        elif path.name.endswith(".json"):
            text = path.read_text(encoding="utf-8")
        else:
            text = packing.unpack(path)[report.JSON].decode()
        found = json.loads(text)
        if found["schema"] != report.document.SCHEMA or found["schema_version"] != report.document.VERSION:
            raise SuiteError(
                f"a report of version {found['schema_version']}", where=str(path), expected=str(report.document.VERSION)
            )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SuiteError(f"no report can be read: {error}", where=str(path)) from error
    loaded: dict[str, Any] = found
    return loaded


def compare(a: dict[str, Any], b: dict[str, Any]) -> Difference:
    """Compare two reports."""
    before, after = ({r["id"]: r for r in one["results"]} for one in (a, b))
    both = [name for name in before if name in after]
    outcomes = {name: (before[name]["outcome"], after[name]["outcome"]) for name in both}
    broken = tuple(n for n, (was, now) in outcomes.items() if was == "passed" and now != "passed")
    fixed = tuple(n for n, (was, now) in outcomes.items() if was == "failed" and now == "passed")
    changed = tuple(
        (n, was, now) for n, (was, now) in outcomes.items() if was != now and n not in broken and n not in fixed
    )
    had, has = ({c["claim"] for c in one["claims"]} for one in (a, b))
    return Difference(
        broken=broken,
        fixed=fixed,
        changed=changed,
        margins=_margins(before, after, both),
        appeared=tuple(name for name in after if name not in before),
        disappeared=tuple(name for name in before if name not in after),
        claims=(*(f"+{claim}" for claim in sorted(has - had)), *(f"-{claim}" for claim in sorted(had - has))),
        provenance=tuple(_provenance(a["provenance"], b["provenance"])),
        verdicts=(a["verdict"]["sentence"], b["verdict"]["sentence"]),
    )


def _margins(before: dict[str, Any], after: dict[str, Any], both: list[str]) -> tuple[tuple[str, float, float], ...]:
    found = []
    for name in both:
        was, now = before[name]["verdict"]["margin"], after[name]["verdict"]["margin"]
        if was is None or now is None:
            continue
        low, high = sorted((max(was, FLOOR), max(now, FLOOR)))
        if high > FACTOR * low:
            found.append((name, was, now))
    return tuple(sorted(found, key=lambda entry: -max(entry[2], FLOOR) / max(entry[1], FLOOR)))


def _provenance(a: Any, b: Any, at: str = "") -> list[tuple[str, str, str]]:
    if isinstance(a, dict) and isinstance(b, dict):
        keys = dict.fromkeys((*a, *b))
        return [entry for key in keys for entry in _provenance(a.get(key), b.get(key), f"{at}.{key}".lstrip("."))]
    if a == b or at in ("started", "command"):
        return []
    return [(at, json.dumps(a), json.dumps(b))]


def _cut(text: str) -> str:
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."


def render(difference: Difference, *, limit: int = 40) -> str:
    """A difference for people."""
    d = difference
    lines = [f"A: {d.verdicts[0]}", f"B: {d.verdicts[1]}"]

    def part(title: str, entries: list[str]) -> None:
        if entries:
            lines.append(f"{title} ({len(entries):,}):")
            lines.extend(f"  {entry}" for entry in entries[:limit])
            if len(entries) > limit:
                lines.append(f"  and {len(entries) - limit:,} more")

    part("passed in A, not in B", list(d.broken))
    part("failed in A, passed in B", list(d.fixed))
    part("other outcomes", [f"{name}: {was} -> {now}" for name, was, now in d.changed])
    part("error as a part of the bound", [f"{name}: {was:.3g} -> {now:.3g}" for name, was, now in d.margins])
    part("only in B", list(d.appeared))
    part("only in A", list(d.disappeared))
    part("claims", list(d.claims))
    part("provenance", [f"{what}: {_cut(was)} -> {_cut(now)}" for what, was, now in d.provenance])
    if len(lines) == 2:
        lines.append("no difference")
    return "\n".join(lines)
