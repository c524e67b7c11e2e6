"""`report.json`: a run, its verdict, its coverage. The other reports are made from it and from nothing else."""

from __future__ import annotations

import datetime
import json
import shlex
from collections import defaultdict
from collections.abc import Iterable
from importlib import resources
from typing import Any

from m31.conformance import catalog, expectations
from m31.conformance.conclusion import as_dict, conclude
from m31.conformance.running.journal import Run, result_dict

SCHEMA, VERSION = "m31-conformance-report", 1


def build(run: Run, *, today: datetime.date | None = None) -> dict[str, Any]:
    """The report of a run, in plain JSON values; see `conclude` for the arguments."""
    header = run.header
    conclusion = conclude(run, today=today)
    expected = expectations.parse(header["expect"])
    setup = header["setup"]
    return {
        "schema": SCHEMA,
        "schema_version": VERSION,
        "complete": run.complete,
        "recorded": bool(header.get("recorded")),
        "seconds": run.seconds,
        "selection": {
            "level": setup["level"],
            "expression": setup["expression"],
            "items": len(header["ids"]),
            "digest": catalog.digest(header["ids"]),
            "catalog": header["catalog"],
        },
        "verdict": as_dict(conclusion),
        "provenance": header["provenance"],
        "setup": setup,
        "manifest": header["manifest"],
        "claims": [
            {"claim": claim, "level": level, "passed": passed} for claim, (level, passed) in conclusion.claims.items()
        ],
        "expectations": [
            {
                "id": entry.id,
                "kind": entry.kind,
                "reason": entry.reason,
                "link": entry.link,
                "expires": entry.expires.isoformat(),
                "items": [name for name, kind in conclusion.expected.items() if entry.matches(name)],
            }
            for entry in expected.entries
        ],
        "coverage": coverage(run),
        "results": [
            result_dict(result) | {"expectation": conclusion.expected.get(result.id), "command": again(run, result.id)}
            for result in run.results
        ],
    }


def coverage(run: Run) -> dict[str, dict[str, dict[str, dict[str, int]]]]:
    """Subject -> attribute -> value -> how many items passed, of how many: what was exercised, and what never."""
    found: dict[str, dict[str, dict[str, dict[str, int]]]] = defaultdict(lambda: defaultdict(dict))
    for result in run.results:
        given = {**result.attributes, **({"format": result.format} if result.format else {})}
        for attribute, value in given.items():
            for one in value if isinstance(value, (list, tuple)) else (value,):
                cell = found[result.subject][attribute].setdefault(_key(one), {"passed": 0, "items": 0})
                cell["items"] += 1
                cell["passed"] += result.outcome == "passed"
    if run.header["setup"]["expression"] is None:  # of a selection, what it left out is no news
        for subject, attribute, value in _declared(run, found):
            found[subject][attribute].setdefault(_key(value), {"passed": 0, "items": 0})
    return {
        subject: {name: dict(sorted(values.items(), key=_natural)) for name, values in sorted(attributes.items())}
        for subject, attributes in found.items()
    }


def _declared(run: Run, subjects: Iterable[str]) -> list[tuple[str, str, Any]]:
    """The values that matter, by `levels.coverage`, of the ops that were asked for at all."""
    from m31.conformance.levels.coverage import SPACE, space_of
    from m31.sdk.manifest import Manifest

    manifest = Manifest.model_validate_json(json.dumps(run.header["manifest"]))
    ops = [subject for subject in subjects if subject in SPACE]
    return [(op, name, value) for op in ops for name, values in space_of(op, manifest).items() for value in values]


def _key(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _natural(entry: tuple[str, Any]) -> tuple[int, float, str]:
    """Numbers by size, then words."""
    try:
        return 0, float(entry[0]), ""
    except ValueError:
        return 1, 0.0, entry[0]


def again(run: Run, item_id: str) -> str:
    """The command that runs one item as it was run here."""
    setup = run.header["setup"]
    words = ["m31", "conform", "run", "--backend", setup["backend"]]
    for flag, key in (("--device", "device"), ("--seed-salt", "salt"), ("--checkpoint", "checkpoint")):
        words += [flag, setup[key]] if setup[key] else []
    words += ["--level", item_id.split("/")[0], "-k", item_id]
    return shlex.join(words)


def schema() -> dict[str, Any]:
    """The JSON Schema of `report.json`, as published."""
    text = resources.files("m31.conformance.report").joinpath("report.schema.json").read_text(encoding="utf-8")
    found: dict[str, Any] = json.loads(text)
    return found
