"""`report.md`: the verdict and what needs attention, for a pull request or a terminal."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

from m31.conformance.item import gist

SHOWN = 40
"""Failures in full; the rest is counted. `report.json` has them all."""


def cell(text: object) -> str:
    """Text that is safe inside a table."""
    return str(text).replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;").replace("\n", " ").replace("`", "'")


def source_of(about: dict[str, Any] | None) -> str:
    """Commit of a checkout, for people."""
    if about is None:
        return "installed"
    return f"commit {about['commit'][:12]}" + (" with changes" if about["dirty"] else "")


def margin_of(result: dict[str, Any]) -> str:
    """The part of what is allowed that an item used up."""
    margin = result["verdict"]["margin"]
    return "" if margin is None else f"{margin:.3g}"


def worst(report: dict[str, Any], number: int) -> list[dict[str, Any]]:
    """The passed items nearest to their bounds."""
    passed = [r for r in report["results"] if r["outcome"] == "passed" and r["verdict"]["margin"] is not None]
    return sorted(passed, key=lambda r: (-r["verdict"]["margin"], r["id"]))[:number]


def render(report: dict[str, Any]) -> str:
    """The document, from `report.json`."""
    about, verdict = report["provenance"], report["verdict"]
    backend, software, machine = about["backend"], about["software"], about["machine"]
    version = backend["version"] or "not installed"
    lines = [f"# Conformance of `{backend['name']}`", "", f"**{verdict['sentence']}**", ""]
    lines += [
        f"- backend: {backend['name']} {version} ({backend['distribution'] or backend['entry']}), "
        f"{source_of(backend['checkout'])}",
        f"- m31 {software['m31']} ({source_of(software['checkout'])}), suite {software['suite']}, "
        f"Python {software['python']}, "
        + ", ".join(f"{name} {found}" for name, found in software["packages"].items() if found),
        f"- machine: {machine['processor'] or machine['architecture']}, {machine['cores']} cores, {machine['system']}"
        + "".join(f"; {device}" for device in machine["devices"]),
        f"- started {about['started']}" + (f", took {report['seconds']:.0f} s" if report["seconds"] else ""),
        "",
    ]
    lines += ["| Level | Items | Passed | Failed | Refused | Fallback | Unclaimed | Other |", "|---|" + "---:|" * 7]
    counted: dict[str, Counter[str]] = defaultdict(Counter)
    for result in report["results"]:
        counted[result["level"]][result["outcome"]] += 1
    for level, counts in sorted(counted.items()):
        named = [counts[name] for name in ("passed", "failed", "refused", "fallback", "unclaimed")]
        numbers = [counts.total(), *named, counts.total() - sum(named)]
        lines.append(f"| {level} | " + " | ".join(f"{number:,}" for number in numbers) + " |")
    lines += _failures(report)
    if verdict["omissions"]:
        lines += ["", "## Claimed and never exercised", "", *(f"- `{claim}`" for claim in verdict["omissions"])]
    if report["expectations"]:
        lines += [
            "",
            "## Expected failures",
            "",
            "| Pattern | Kind | Items | Reason | Expires |",
            "|---|---|---:|---|---|",
        ]
        lines += [
            f"| `{cell(e['id'])}` | {e['kind']} | {len(e['items'])} | {cell(e['reason'])} ({cell(e['link'])}) "
            f"| {e['expires']} |"
            for e in report["expectations"]
        ]
        lines += [f"- not true: {cell(text)}" for text in verdict["stale_expectations"]]
    near = worst(report, 10)
    if near:
        lines += [
            "",
            "## Nearest to their bounds",
            "",
            "| Item | Error / bound | Error | Where |",
            "|---|---:|---:|---|",
        ]
        lines += [
            f"| `{cell(r['id'])}` | {margin_of(r)} | {_number(r['verdict']['max_error'])} "
            f"| {cell(r['verdict']['where'])} |"
            for r in near
        ]
    return "\n".join(lines) + "\n"


def _failures(report: dict[str, Any]) -> list[str]:
    failed = [r for r in report["results"] if r["outcome"] == "failed" and r["expectation"] is None]
    if not failed:
        return []
    lines = ["", f"## Failures ({len(failed):,})", ""]
    for result in failed[:SHOWN]:
        said = "; ".join(line.strip() for line in gist(result["message"]))
        name = "" if said.startswith(f"{result['error']}:") else f"{cell(result['error'])}: "
        lines += [f"- `{cell(result['id'])}`: {name}{cell(said)}", f"  `{cell(result['command'])}`"]
    if len(failed) > SHOWN:
        lines.append(f"- and {len(failed) - SHOWN:,} more")
    return lines


def _number(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else ""
