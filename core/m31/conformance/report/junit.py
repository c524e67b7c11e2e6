"""JUnit XML: one suite per level, one case per item; what was refused or left to the reference counts as skipped."""

from __future__ import annotations

import re
from collections import defaultdict
from typing import Any
from xml.sax.saxutils import escape, quoteattr

_FORBIDDEN = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")  # no XML 1.0 document may hold them


def _attribute(text: object) -> str:
    return quoteattr(_FORBIDDEN.sub("\ufffd", str(text)))


def _text(text: object) -> str:
    return escape(_FORBIDDEN.sub("\ufffd", str(text)))


def render(report: dict[str, Any]) -> str:
    """The document, from `report.json`."""
    levels: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for result in report["results"]:
        levels[result["level"]].append(result)
    name = report["provenance"]["backend"]["name"]
    every = [case for cases in levels.values() for case in cases]
    lines = ['<?xml version="1.0" encoding="UTF-8"?>']
    lines.append(f"<testsuites name={_attribute('m31 conformance of ' + name)} {_totals(every)}>")
    for level, cases in levels.items():
        stamp = report["provenance"]["started"].removesuffix("Z")
        lines.append(f'  <testsuite name={_attribute(f"{name} {level}")} timestamp="{stamp}" {_totals(cases)}>')
        lines += [_case(case) for case in cases]
        lines.append("  </testsuite>")
    return "\n".join([*lines, "</testsuites>"]) + "\n"


def _failed(case: dict[str, Any]) -> bool:
    return case["outcome"] == "failed" and case["expectation"] is None


def _skipped(case: dict[str, Any]) -> bool:
    return not _failed(case) and case["outcome"] not in ("passed", "interrupted")


def _totals(cases: list[dict[str, Any]]) -> str:
    failed, skipped = sum(map(_failed, cases)), sum(map(_skipped, cases))
    errors = sum(case["outcome"] == "interrupted" for case in cases)
    seconds = sum(case["seconds"] for case in cases)
    return f'tests="{len(cases)}" failures="{failed}" errors="{errors}" skipped="{skipped}" time="{seconds:.3f}"'


def _case(case: dict[str, Any]) -> str:
    level, subject, *rest = case["id"].split("/")
    start = f"    <testcase classname={_attribute(f'{level}.{subject}')} name={_attribute('/'.join(rest) or subject)}"
    start += f' time="{case["seconds"]:.3f}">'
    inner = [f"<system-out>{_text(case['command'])}</system-out>"]
    first = case["message"].split("\n")[0]
    if _failed(case):
        inner.insert(
            0,
            f"<failure type={_attribute(case['error'])} message={_attribute(first)}>{_text(case['message'])}</failure>",
        )
    elif case["outcome"] == "interrupted":
        inner.insert(0, f'<error type="interrupted" message={_attribute(first)}/>')
    elif _skipped(case):
        why = f"{case['expectation'] or case['outcome']}: {first}"
        inner.insert(0, f"<skipped message={_attribute(why)}/>")
    return f"{start}{''.join(inner)}</testcase>"
