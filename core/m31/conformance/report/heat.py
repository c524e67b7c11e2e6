"""The two heat maps of the HTML page: an op and a format in one cell each, and every case in a square of its own.

Colour says how much of what is allowed was used up, on a logarithmic scale. Whatever is not a measured pass also has a
sign, so that nothing is told by colour alone.
"""

from __future__ import annotations

from collections import defaultdict
from html import escape
from typing import Any

EDGES = (1e-3, 1e-2, 3e-2, 0.1, 0.3, 0.6)
"""Upper edges of the colours `m0` to `m5`; what is above is `m6`."""

NAMES = {
    "L0": "contract",
    "L1": "ops",
    "L2": "state",
    "L3": "small models",
    "L4": "a real checkpoint",
}
_SIGNS = {"eq": "=", "ko": "✕", "xf": "!", "rf": "–", "fb": "↩", "un": "·"}
_WORDS = {
    "eq": "passed, nothing to measure",
    "ko": "failed",
    "xf": "failed as expected",
    "rf": "refused",
    "fb": "left to the reference",
    "un": "not claimed, or not run",
}
_ORDER = ("ko", "xf")  # what decides the class of a cell of several items, before any that passed

Results = list[dict[str, Any]]
Rows = dict[str, dict[str, Results]]

FORMATS = ("", "float64", "float32", "bfloat16", "float16", "fp8", "int8", "mxfp8", "nvfp4")
"""The order of columns; others follow in the order of the catalog."""
SHORT = {"float64": "f64", "float32": "f32", "bfloat16": "bf16", "float16": "f16"}
MOST = 7
"""Columns of a table; what a level has beyond the formats above shares the last one then."""
OTHERS = "others"
COLUMNS = 3
"""Side by side on the slide."""
_HEAD_ROWS = 3  # what a table's caption, head and margin take, in rows


def class_of(result: dict[str, Any]) -> str:
    """The style of a result."""
    outcome, margin = result["outcome"], result["verdict"]["margin"]
    if outcome == "failed":
        return "xf" if result["expectation"] else "ko"
    if outcome == "passed":
        return "eq" if margin is None else f"m{sum(margin > edge for edge in EDGES)}"
    return {"refused": "rf", "fallback": "fb"}.get(outcome, "un")


def by_level(report: dict[str, Any]) -> dict[str, Rows]:
    """Level -> subject -> format -> results, in the order of the catalog."""
    found: dict[str, dict[str, dict[str, Results]]] = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    forms: dict[str, set[str]] = defaultdict(set)
    for result in report["results"]:
        forms[result["level"]].add(result["format"])
    for result in report["results"]:
        level, form = result["level"], result["format"]
        shared = len(forms[level]) > MOST and form not in FORMATS
        found[level][result["subject"]][OTHERS if shared else form].append(result)
    return found


def _formats(rows: Rows) -> list[str]:
    """The formats of a level, without the empty one where whole rows have no other."""
    found = list(dict.fromkeys(form for cells in rows.values() if set(cells) != {""} for form in cells)) or [""]
    return sorted(found, key=lambda form: FORMATS.index(form) if form in FORMATS else len(FORMATS))


def _head(form: str) -> str:
    if not form:
        return '<th scope="col">any</th>'
    return f'<th scope="col" title="{escape(form)}">{escape(SHORT.get(form, form))}</th>'


def _top(level: str, forms: list[str], kind: str, more: str = "") -> str:
    return (
        f'<table class="{kind}"><caption>{level} <small>{NAMES[level]}{more}</small></caption><thead><tr>'
        f'<th scope="col"><span class="hidden">subject</span></th>{"".join(map(_head, forms))}</tr></thead><tbody>'
    )


def _summary(results: Results) -> tuple[str, str, str]:
    """Class, text and words of several results together: the worst of them speaks."""
    classes = [class_of(result) for result in results]
    passed = [r for r in results if r["outcome"] == "passed"]
    words = f"{len(passed)} of {len(results)} passed"
    for kind in _ORDER:
        if kind in classes:
            number = classes.count(kind)
            return kind, f"{_SIGNS[kind]} {number}", f"{words}, {number} {_WORDS[kind]}"
    measured = [r for r in passed if r["verdict"]["margin"] is not None]
    if measured:
        worst = max(measured, key=lambda r: r["verdict"]["margin"])
        share = short(worst["verdict"]["margin"])
        return class_of(worst), share, f"{words}, worst error {share} of its bound in {worst['id']}"
    kind = "eq" if passed else classes[0]
    return kind, "=" if passed else _SIGNS[kind], f"{words}, {_WORDS[kind]}"


def short(margin: float) -> str:
    """A margin in a few characters."""
    if margin == 0:
        return "0"
    if margin < 0.001:
        return f"{margin:.0e}".replace("e-0", "e-")
    return f"{margin:.2f}".lstrip("0") if margin >= 0.095 else f"{margin:.3f}".lstrip("0")


def matrices(levels: dict[str, Rows]) -> str:
    """Every level in tables, a row per subject and a column per format, packed into columns of about equal height."""
    tables = len(levels) + COLUMNS - 1  # a table that goes on in the next column has a second head
    height = (sum(map(len, levels.values())) + tables * _HEAD_ROWS) / COLUMNS
    columns: list[list[str]] = [[]]
    used = 0.0
    for level, rows in levels.items():
        names, begun = list(rows), False
        while names:
            room = round(height - used - _HEAD_ROWS)
            if room < 2 and len(columns) < COLUMNS:
                columns.append([])
                used = 0.0
                continue
            room = len(names) if len(columns) == COLUMNS or len(names) <= room + 2 else room
            part, names = names[:room], names[room:]
            columns[-1].append(_matrix(level, rows, part, ", continued" if begun else ""))
            begun, used = True, used + len(part) + _HEAD_ROWS
    return "\n".join(f"<div>{''.join(tables)}</div>" for tables in columns)


def _matrix(level: str, rows: Rows, names: list[str], more: str) -> str:
    forms = _formats({name: rows[name] for name in names})
    lines = [_top(level, forms, "matrix", more)]
    for subject in names:
        tds = []
        for form, results, span in _cells(rows[subject], forms):
            if not results:
                tds.append("<td></td>")
                continue
            kind, text, words = _summary(results)
            title = escape(f"{subject}{' ' + form if form else ''}: {words}", quote=True)
            tds.append(f'<td class="{kind}"{span} title="{title}">{text}</td>')
        name = escape(subject)
        lines.append(f'<tr><th scope="row" title="{name}">{name}</th>{"".join(tds)}</tr>')
    return "\n".join([*lines, "</tbody></table>"])


def squares(level: str, rows: Rows) -> str:
    """One level: a square per item."""
    forms = _formats(rows)
    lines = [_top(level, forms, "cases")]
    for subject, cells in rows.items():
        tds = []
        for _, results, span in _cells(cells, forms):
            if not results:
                tds.append("<td></td>")
                continue
            words = f'<span class="hidden">{escape(_summary(results)[2])}</span>'
            tds.append(f"<td{span}>{words}{''.join(map(_square, results))}</td>")
        lines.append(f'<tr><th scope="row">{escape(subject)}</th>{"".join(tds)}</tr>')
    return "\n".join([*lines, "</tbody></table>"])


def _cells(cells: dict[str, Results], forms: list[str]) -> list[tuple[str, Results, str]]:
    """The cells of a row; what has no format at all spans the formats of the others."""
    if set(cells) == {""}:
        return [("", cells[""], f' colspan="{len(forms)}"' if len(forms) > 1 else "")]
    return [(form, cells.get(form, []), "") for form in forms]


def _square(result: dict[str, Any]) -> str:
    kind = class_of(result)
    case = "/".join(result["id"].split("/")[2:]) or result["subject"]
    margin = result["verdict"]["margin"]
    if result["outcome"] == "passed" and margin is not None:
        text = f"{case}: {short(margin)}"
    else:
        why = result["message"].split("\n")[0][:80]
        text = f"{case}: {result['outcome']}" + (f", {why}" if why else "")
    return f'<i class={kind} title="{escape(text, quote=True)}"></i>'


def key() -> str:
    """What colours and signs mean."""
    scale = "".join(f"<i class=m{n}></i>" for n in range(len(EDGES) + 1))
    edges = "error as a part of what is allowed, logarithmic"
    signs = "".join(f"<span><i class={kind}></i>{words}</span>" for kind, words in _WORDS.items())
    bar = f'<span>0.001</span><span class="scale" title="{edges}">{scale}</span><span>1</span><span>{edges}</span>'
    return f'<p class="key">{bar}{signs}</p>'
