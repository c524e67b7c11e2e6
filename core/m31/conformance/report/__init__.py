"""Reports of a run: JSON for programs, JUnit for build servers, Markdown for people, and one HTML page to show."""

from __future__ import annotations

import datetime
import json
import os
from pathlib import Path
from typing import Any

from m31.conformance.files import writing
from m31.conformance.report import document, junit, markdown, page
from m31.conformance.running.journal import Run

JSON, JUNIT, MARKDOWN, HTML = "report.json", "junit.xml", "report.md", "report.html"


def render(report: dict[str, Any]) -> dict[str, bytes]:
    """The files of a report, by name, from its JSON form alone."""
    text = {
        JSON: json.dumps(report, indent=1, allow_nan=False, ensure_ascii=True) + "\n",
        JUNIT: junit.render(report),
        MARKDOWN: markdown.render(report),
        HTML: page.render(report),
    }
    return {name: value.encode() for name, value in text.items()}


def write(run: Run, folder: Path, *, today: datetime.date | None = None) -> dict[str, Any]:
    """Write every report of a run into a folder, each whole or not at all.

    Args:
        run: see `journal.read`.
        folder: where; it is there.
        today: see `conclude`.

    Returns: the report in its JSON form (docs/conformance/report.schema.json).

    Raises: SuiteError: the folder cannot be written.
    """
    report = document.build(run, today=today)
    for name, data in render(report).items():
        partial = folder / "report.partial"
        with writing(folder):
            with partial.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(folder / name)
    return report
