"""`report.html`: one page, without any other resource, whose first screen is a slide."""

from __future__ import annotations

import json
from collections import Counter
from html import escape
from importlib import resources
from typing import Any

from m31.conformance.report import heat
from m31.conformance.report.markdown import source_of, worst

FAILURES, WORST, VALUES = 100, 20, 24
"""Failures, worst cases and values of an attribute that are written out; `report.json` has all."""


def render(report: dict[str, Any]) -> str:
    """The page, from `report.json`."""
    name = report["provenance"]["backend"]["name"]
    style = resources.files("m31.conformance.report").joinpath("page.css").read_text(encoding="utf-8")
    levels = heat.by_level(report)
    parts = [
        _slide(report, levels),
        _failures(report),
        _nearest(report),
        _cases(levels),
        _claims(report),
        _expected(report),
        _coverage(report),
        _provenance(report),
    ]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>Conformance of {escape(name)}</title>\n<style>\n{style}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(part for part in parts if part)
        + "\n</main>\n</body>\n</html>\n"
    )


def _table(heads: list[tuple[str, bool]], rows: list[list[str]]) -> str:
    """A list: heads with whether the column holds numbers; cells are HTML already."""
    kinds = [' class="num"' if number else "" for _, number in heads]
    top = "".join(f'<th scope="col"{kind}>{head}</th>' for (head, _), kind in zip(heads, kinds, strict=True))
    body = "\n".join(
        "<tr>" + "".join(f"<td{kind}>{text}</td>" for text, kind in zip(row, kinds, strict=True)) + "</tr>"
        for row in rows
    )
    return f'<table class="list"><thead><tr>{top}</tr></thead><tbody>\n{body}\n</tbody></table>'


def _slide(report: dict[str, Any], levels: dict[str, Any]) -> str:
    backend, verdict = report["provenance"]["backend"], report["verdict"]
    version = f" {escape(backend['version'])}" if backend["version"] and backend["distribution"] else ""
    sentence = verdict["sentence"]
    return f"""<section class="slide">
<header class="top"><div><p class="kicker">m31 conformance, MiniMax-M3.1-Flash</p>
<h1>{escape(backend["name"])}{version}</h1>
<p class="sentence">{escape(sentence[0].upper() + sentence[1:])}</p></div>{_badge(report)}</header>
<div class="board"><div>{_ladder(report)}{_facts(report)}</div>
<div><div class="matrices scroll">{heat.matrices(levels)}</div>{heat.key()}</div></div>
</section>"""


def _badge(report: dict[str, Any]) -> str:
    verdict = report["verdict"]
    level, code = verdict["level"], verdict["exit_code"]
    reached = level is not None and level == report["selection"]["level"]
    kind, sign, words = {
        0: ("good", level or "✓", "conformant" if reached else "as expected"),
        1: ("bad", "✕", "not conformant"),
        2: ("warn", "?", "not conformant by omission"),
        3: ("warn", "!", "cannot be judged"),
    }.get(code, ("warn", "…", "incomplete"))
    if report["recorded"]:
        kind, sign, words = "warn", "…", "recorded, not judged"
    return f'<p class="badge {kind}"><b>{sign}</b><span>{words}</span></p>'


def _ladder(report: dict[str, Any]) -> str:
    verdict, lines = report["verdict"], []
    for level, name in heat.NAMES.items():
        own = [r for r in report["results"] if r["level"] == level]
        counts = Counter(r["outcome"] for r in own)
        failed = sum(r["outcome"] == "failed" and r["expectation"] != "waiver" for r in own)
        if verdict["level"] is not None and level <= verdict["level"]:
            kind, sign, said = "yes", "✓", "reached"
        elif failed:
            kind, sign, said = "no", "✕", "not reached"
        else:
            kind, sign, said = "open", "–", "not reached" if own else "not run"
        text = f"{counts['passed']:,} of {len(own):,} passed" if own else "not run"
        lines.append(
            f'<li class="{kind}"><span class="mark" title="{said}">{sign}<span class="hidden">{said}</span></span>'
            f"<b>{level}</b><span>{name}<br><small>{text}</small></span></li>"
        )
    return f'<ol class="ladder" aria-label="levels">{"".join(lines)}</ol>'


def _facts(report: dict[str, Any]) -> str:
    about, counts = report["provenance"], report["verdict"]["counts"]
    measured = [r["verdict"]["margin"] for r in worst(report, 1)]
    claimed = report["claims"]
    facts = {
        "items": f"{len(report['results']):,}"
        + "".join(f", {number:,} {name}" for name, number in counts.items() if name != "passed"),
        "claims": f"{sum(c['passed'] > 0 for c in claimed):,} of {len(claimed):,} exercised",
        "worst": f"{measured[0]:.2g} of the bound" if measured else "nothing measured",
        "device": about["device"] or "; ".join(about["machine"]["devices"]) or about["machine"]["processor"] or "?",
        "m31": f"{about['software']['m31']}, suite {about['software']['suite']}",
        "date": about["started"][:10],
    }
    return '<dl class="facts">' + "".join(f"<dt>{k}</dt><dd>{escape(v)}</dd>" for k, v in facts.items()) + "</dl>"


def _failures(report: dict[str, Any]) -> str:
    failed = [r for r in report["results"] if r["outcome"] == "failed" and r["expectation"] is None]
    if not failed:
        return ""
    rows = []
    for r in failed[:FAILURES]:
        first, _, rest = r["message"].partition("\n")
        more = f"<details><summary>more</summary><pre><code>{escape(rest)}</code></pre></details>" if rest else ""
        what = f"{escape(r['error'])}: {escape(first[:400])}{more}"
        rows.append([f"<code>{escape(r['id'])}</code>", what, f"<code>{escape(r['command'])}</code>"])
    left = f"<p>and {len(failed) - FAILURES:,} more, in report.json</p>" if len(failed) > FAILURES else ""
    heads = [("item", False), ("what", False), ("again", False)]
    return f"<section><h2>Failures ({len(failed):,})</h2>{_table(heads, rows)}{left}</section>"


def _nearest(report: dict[str, Any]) -> str:
    rows = []
    for r in worst(report, WORST):
        verdict = r["verdict"]
        error = f"{verdict['max_error']:.2e}" if isinstance(verdict["max_error"], float) else ""
        rows.append(
            [
                f"<code>{escape(r['id'])}</code>",
                f"{verdict['margin']:.3g}",
                error,
                escape(str(verdict["where"])),
                escape(r["kernel"]),
                f"<code>{escape(r['command'])}</code>",
            ]
        )
    if not rows:
        return ""
    heads = [
        ("item", False),
        ("of the bound", True),
        ("error", True),
        ("where", False),
        ("kernel", False),
        ("again", False),
    ]
    lead = "The items that passed with the largest error, as a part of what their declared arithmetic allows."
    return f'<section><h2>Nearest to their bounds</h2><p class="lead">{lead}</p>{_table(heads, rows)}</section>'


def _cases(levels: dict[str, Any]) -> str:
    maps = "\n".join(heat.squares(level, rows) for level, rows in levels.items())
    lead = "Each square is one item; its title says which, and how much of what is allowed it used up."
    return (
        f'<section><h2>Every case</h2><p class="lead">{lead}</p>{heat.key()}<div class="scroll">{maps}</div></section>'
    )


def _claims(report: dict[str, Any]) -> str:
    rows = []
    for claim in sorted(report["claims"], key=lambda c: c["passed"] > 0):
        chip = "chip" if claim["passed"] else "chip never"
        said = f"{claim['passed']:,} passed" if claim["passed"] else "never exercised"
        level = claim["level"] or "no item of the suite exercises it"
        rows.append([f'<span class="{chip}">{escape(claim["claim"])}</span>', escape(level), said])
    omitted = report["verdict"]["omissions"]
    lead = (
        f"Omitted: {', '.join(omitted)}."
        if omitted
        else "What the manifest says, and how many passed items exercised it."
    )
    return (
        f'<section><h2>Claims</h2><p class="lead">{escape(lead)}</p><details{" open" if omitted else ""}>'
        f"<summary>{len(rows):,} claims</summary>{_table([('claim', False), ('from level', False), ('', False)], rows)}"
        "</details></section>"
    )


def _expected(report: dict[str, Any]) -> str:
    if not report["expectations"]:
        return ""
    rows = [
        [
            f"<code>{escape(e['id'])}</code>",
            e["kind"],
            f"{len(e['items']):,}",
            escape(e["reason"]),
            escape(e["link"]),
            e["expires"],
        ]
        for e in report["expectations"]
    ]
    heads = [
        ("pattern", False),
        ("kind", False),
        ("items", True),
        ("reason", False),
        ("link", False),
        ("expires", False),
    ]
    stale = "".join(f"<li>{escape(text)}</li>" for text in report["verdict"]["stale_expectations"])
    untrue = f"<p>Not true:</p><ul>{stale}</ul>" if stale else ""
    return f"<section><h2>Expected failures and waivers</h2>{_table(heads, rows)}{untrue}</section>"


def _coverage(report: dict[str, Any]) -> str:
    rows = []
    for subject, attributes in report["coverage"].items():
        for attribute, values in attributes.items():
            chips = [
                f'<span class="chip{"" if count["passed"] else " never"}" '
                f'title="{count["passed"]} of {count["items"]} passed">{escape(value)}</span>'
                for value, count in sorted(values.items(), key=lambda entry: entry[1]["passed"] > 0)
            ]
            more = f"and {len(chips) - VALUES:,} more" if len(chips) > VALUES else ""
            rows.append([escape(subject), escape(attribute), "".join(chips[:VALUES]) + more])
    if not rows:
        return ""
    lead = "Values of attributes, sizes and formats with a passed item; those without are framed."
    table = _table([("subject", False), ("attribute", False), ("values", False)], rows)
    return (
        f'<section><h2>Coverage</h2><p class="lead">{lead}</p><details><summary>{len(rows):,} attributes</summary>'
        f"{table}</details></section>"
    )


def _provenance(report: dict[str, Any]) -> str:
    about = report["provenance"]
    backend, software, machine = about["backend"], about["software"], about["machine"]
    facts = {
        "backend": f"{backend['name']}, {backend['distribution'] or backend['entry']} {backend['version'] or ''}",
        "backend source": source_of(backend["checkout"]),
        "manifest": f"sha256 {backend['manifest_sha256']}",
        "m31": f"{software['m31']}, {source_of(software['checkout'])}, suite {software['suite']}",
        "catalog": f"sha256 {report['selection']['catalog']}",
        "selection": f"--level {report['selection']['level']}"
        + (f" -k '{report['selection']['expression']}'" if report["selection"]["expression"] else "")
        + f", {report['selection']['items']:,} items",
        "packages": f"Python {software['python']}, "
        + ", ".join(f"{name} {found or 'absent'}" for name, found in software["packages"].items()),
        "machine": f"{machine['processor'] or '?'}, {machine['architecture']}, {machine['cores']} cores, "
        + machine["system"],
        "devices": "; ".join(machine["devices"]) or "none",
        "environment": ", ".join(f"{k}={v}" for k, v in about["environment"].items()) or "nothing set",
        "seeds": f"salt '{about['salt']}'" if about["salt"] else "the usual ones",
        "started": about["started"] + (f", took {report['seconds']:,.0f} s" if report["seconds"] else ""),
        "command": " ".join(about["command"]),
    }
    if "judged" in about:
        judged = about["judged"]
        facts["judged by"] = f"m31 {judged['software']['m31']} on {judged['machine']['processor']}, {judged['started']}"
    lines = "".join(f"<dt>{k}</dt><dd>{escape(v)}</dd>" for k, v in facts.items())
    manifest = escape(json.dumps(report["manifest"], indent=1))
    return (
        f'<section><h2>Provenance</h2><dl class="facts">{lines}</dl>'
        f"<details><summary>manifest</summary><pre><code>{manifest}</code></pre></details></section>"
    )
