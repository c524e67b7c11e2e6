"""`m31`: parse, run one command, and turn every way to fail into one message and one exit code.

Nothing here imports torch, pydantic or a plugin: `m31 --help` must work when any of them is broken (BUG-81).
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import traceback
from collections.abc import Sequence

from m31.cli.arguments import parse
from m31.cli.output import Output, OutputClosed, OutputFailed, error_fields
from m31.errors import M31Error

INTERNAL = 70
INTERRUPTED = 130
CLOSED = 141  # 128 + SIGPIPE: what a shell reports for a program that the signal ended

_MODULES = {
    "run": "m31.cli.run",
    "chat": "m31.cli.chat",
    "backends": "m31.cli.show",
    "inspect": "m31.cli.show",
    "convert": "m31.cli.convert",
    "demo": "m31.cli.demo",
    "explain": "m31.cli.explain",
    "train": "m31.cli.train",
    "new-backend": "m31.cli.new_backend",
    "lint-backend": "m31.cli.lint_backend",
    "conform": "m31.cli.conform",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: the words after the program's name; `sys.argv[1:]` if None.

    Returns: the exit code (`m31 --help` lists them). Never raises, except SystemExit from a signal handler of others.
    """
    out = Output()
    return _finish(out, _guarded(argv, out))


def _guarded(argv: Sequence[str] | None, out: Output) -> int:
    try:
        try:
            args = parse(argv)
        except SystemExit as stop:
            return stop.code if isinstance(stop.code, int) else 2
        out.json_lines = args.command in ("run", "chat") and args.json
        return _dispatch(args, out)
    except OutputClosed:
        out.abandon()
        return CLOSED
    except KeyboardInterrupt:
        return INTERRUPTED
    except M31Error as error:
        if isinstance(error, OutputFailed):
            out.abandon_stdout()
        return _report(error, str(error), error.exit_code, out)
    except Exception as error:  # noqa: BLE001  # the last line of defence: whatever it is becomes one message
        text = f"{type(error).__name__}: {error}".rstrip(": ")
        message = (
            f"{text}\nThis is a bug of m31, or of the backend in use if that comes from another distribution "
            "(`m31 backends` tells). Please report it there, with the command and its output under M31_DEBUG=1."
        )
        return _report(error, message, INTERNAL, out, label="internal error")


def _dispatch(args: argparse.Namespace, out: Output) -> int:
    module = importlib.import_module(_MODULES[args.command])
    code: int = module.command(args, out)
    return code


def _report(error: Exception, message: str, code: int, out: Output, *, label: str = "error") -> int:
    """Say what went wrong on standard error (and as a JSON event); the exit code, or CLOSED if nobody listens."""
    try:
        if os.environ.get("M31_DEBUG") == "1":
            out.prompt("".join(traceback.format_exception(error)))
        if not isinstance(error, OutputFailed):
            if out.json_lines:
                out.event("error", **error_fields(error))
            else:
                out.end_line()
        out.note(f"{label}: {message}")
    except OutputClosed:
        out.abandon()
        return CLOSED
    except OutputFailed:
        out.abandon()
    return code


def _finish(out: Output, code: int) -> int:
    """Flush what is left; a reader that went away before changes the exit code of an otherwise good run."""
    try:
        out.close()
    except OutputClosed:
        out.abandon()
        return CLOSED
    except OutputFailed as error:
        out.abandon_stdout()
        return _report(error, str(error), error.exit_code, out)
    return code


if __name__ == "__main__":
    sys.exit(main())
