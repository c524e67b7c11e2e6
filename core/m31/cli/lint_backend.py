"""`m31 lint-backend PATH`: what a backend names of the core that it should not, and whether its manifest is found."""

from __future__ import annotations

import argparse
from pathlib import Path

from m31.cli.output import Output


def command(args: argparse.Namespace, out: Output) -> int:
    """Run the command; 1 if there is an error among the findings.

    Raises: RequestError when there is no package.
    """
    from m31.conformance.lint import lint

    found = lint(Path(args.path))
    errors = [finding for finding in found if finding.kind == "error"]
    if args.json:
        rows = [
            {"kind": f.kind, "path": str(f.path), "line": f.line, "what": f.what, "instead": f.instead} for f in found
        ]
        out.json({"findings": rows, "errors": len(errors)}, indent=2)
    else:
        for finding in found:
            out.line(str(finding))
        notes = len(found) - len(errors)
        out.note(f"{args.path}: {_count(len(errors), 'error')}, {_count(notes, 'note')}")
    return int(bool(errors))


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
