"""What the command line writes, and what happens when nobody reads it.

Text or JSON Lines go to standard output, everything about the run to standard error. Each write is flushed, so that a
token is visible as soon as it exists.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from collections.abc import Mapping
from typing import TextIO

from m31.errors import M31Error

# C0 and C1 control characters except tab and line feed, shown as symbols: text that a model wrote must not be able to
# command the terminal (move the cursor, set the title, fill the clipboard).
_VISIBLE = {code: chr(0x2400 + code) for code in range(0x20) if code not in (0x09, 0x0A)}
_VISIBLE |= {0x7F: "␡"} | dict.fromkeys(range(128, 160), "�")


class OutputClosed(Exception):
    """The reader of our output has gone (a closed pipe): there is nobody left to write to."""


class OutputFailed(M31Error):
    """Output could not be written, for example because the disk is full."""


def visible(text: str) -> str:
    """`text` with control characters (except tab and line feed) replaced by symbols."""
    return text.translate(_VISIBLE)


def discard(stream: TextIO | None) -> None:
    """Point a broken stream at the null device, so that the interpreter's own flush at exit cannot fail again."""
    if stream is None:
        return
    # Streams without a file descriptor (replaced by a program that embeds m31) have no such flush to guard.
    with contextlib.suppress(io.UnsupportedOperation):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)


class Output:
    """Standard output and standard error of one command.

    Args:
        json_lines: standard output carries JSON Lines; whoever writes there must use `event`.

    Raises (whatever writes to standard output): OutputClosed when the reader has gone, OutputFailed when writing fails
    otherwise.
    """

    def __init__(self, *, json_lines: bool = False) -> None:
        self.json_lines = json_lines
        self._out: TextIO | None = sys.stdout
        self._err: TextIO | None = sys.stderr
        self.terminal = self._out is not None and self._out.isatty()
        self._at_line_start = True
        if isinstance(self._out, io.TextIOWrapper):
            # A locale that cannot encode a character gets its escape instead of losing the whole answer.
            self._out.reconfigure(errors="backslashreplace")

    def text(self, piece: str) -> None:
        """Write model text to standard output as it is; a terminal sees control characters as symbols."""
        if piece:
            self._at_line_start = piece.endswith("\n")
            self._write(self._out, "standard output", visible(piece) if self.terminal else piece)

    def end_line(self) -> None:
        """Finish the current line of standard output, if it is not finished."""
        if not self._at_line_start:
            self.text("\n")

    def line(self, text: str) -> None:
        """Write one or more whole lines to standard output."""
        self.text(text if text.endswith("\n") else text + "\n")

    def event(self, kind: str, **fields: object) -> None:
        """Write one JSON object on a line of its own: {"event": kind, ...fields}."""
        self.json({"event": kind, **fields})

    def json(self, value: Mapping[str, object] | list[object], *, indent: int | None = None) -> None:
        """Write one JSON document, in ASCII whatever the locale, and a line feed."""
        self._write(self._out, "standard output", json.dumps(value, indent=indent, allow_nan=False) + "\n")

    def note(self, text: str) -> None:
        """Write lines about the run to standard error, each marked `m31:` or indented below it."""
        lines = [line for line in visible(text).splitlines() if line.strip()]
        self._aside("m31: " + "\n     ".join(lines) + "\n")

    def prompt(self, text: str) -> None:
        """Write an unfinished line to standard error (a REPL's prompt)."""
        self._aside(text)

    def _aside(self, text: str) -> None:
        """Standard error carries remarks. Where it is closed, broken or full there is nobody to tell that, and no
        reason to lose the answer: the stream is given up and the run goes on."""
        if self._err is None:
            return
        try:
            self._err.write(text)
            self._err.flush()
        except OSError:
            discard(self._err)
            self._err = None

    def close(self) -> None:
        """Flush what others (argparse, a library) left in standard output."""
        self._write(self._out, "standard output", "")

    def abandon(self) -> None:
        """Give up both streams after OutputClosed or OutputFailed; nothing written later can raise."""
        discard(self._out)
        discard(self._err)

    def abandon_stdout(self) -> None:
        """Give up standard output only, so that standard error can still carry the message."""
        discard(self._out)

    def _write(self, stream: TextIO | None, name: str, text: str) -> None:
        if stream is None:  # the descriptor was closed before the interpreter started
            raise OutputClosed(name)
        try:
            stream.write(text)
            stream.flush()
        except BrokenPipeError:
            raise OutputClosed(name) from None
        except OSError as error:
            raise OutputFailed(
                f"cannot write: {error.strerror}",
                where=name,
                expected="a terminal, pipe or file that takes the output",
                fix="check the free space and the permissions of where it goes",
            ) from error


def error_fields(error: Exception) -> dict[str, object]:
    """The JSON fields of an error event."""
    if isinstance(error, M31Error):
        answers = {"what": error.what, "where": error.where, "expected": error.expected, "fix": error.fix}
    else:
        answers = {"what": str(error), "where": None, "expected": None, "fix": None}
    return {"type": type(error).__name__, **answers}
