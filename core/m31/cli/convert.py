"""`m31 convert SRC DST --format F`: a checkpoint in another format, with a progress bar on a terminal."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from m31.cli.output import Output

if TYPE_CHECKING:
    from m31.checkpoint.conversion import Step

MAX_SHARD_BYTES = 5_000_000_000  # what the published folders use
_EVERY = 0.2  # seconds between two drawings
_WIDTH = 30


def duration(seconds: float) -> str:
    """A time to wait, with as much detail as helps."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02} min"


def bar(step: Step, elapsed: float) -> str:
    """One line: part done, amounts, and the time left at the speed so far (of this run, not of what it found done)."""
    part = step.finished / step.total if step.total else 1.0
    fresh = step.finished - step.reused
    left = duration((step.total - step.finished) * elapsed / fresh) if fresh and elapsed else "unknown"
    filled = int(part * _WIDTH)
    amounts = f"{step.finished / 1e9:,.1f} of {step.total / 1e9:,.1f} GB"
    return f"[{'=' * filled}{' ' * (_WIDTH - filled)}] {part:4.0%}  {amounts}, {left} left"


class Bar:
    """Redraws one line on standard error, at most a few times a second; nothing where that is no terminal."""

    def __init__(self, out: Output) -> None:
        self._out, self._start, self._drawn, self._length = out, time.monotonic(), 0.0, 0
        self._shown = sys.stderr is not None and sys.stderr.isatty()

    def __call__(self, step: Step) -> None:
        """Take note of a step."""
        now = time.monotonic()
        if self._shown and (now - self._drawn >= _EVERY or step.finished == step.total):
            line = bar(step, now - self._start)
            self._out.prompt("\r" + line + " " * (self._length - len(line)))
            self._drawn, self._length = now, len(line)

    def clear(self) -> None:
        """Remove the line."""
        if self._length:
            self._out.prompt("\r" + " " * self._length + "\r")
            self._length = 0


def input_scales(path: str | None) -> dict[str, float]:
    """The calibration file: a JSON object from logical weight name to a number; nothing without a file.

    Raises: CheckpointError when it cannot be read or holds something else.
    """
    from m31.config.jsonfile import decode_object
    from m31.errors import CheckpointError

    if path is None:
        return {}
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise CheckpointError(f"cannot be read ({error.strerror})", where=path, fix="check --input-scales") from error
    values = decode_object(data, where=path, error=CheckpointError)
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise CheckpointError(f"the scale of '{name}' is {value!r}", where=path, expected="a number")
    return values


def command(args: argparse.Namespace, out: Output) -> int:
    """Run the command; the exit code.

    Raises: CheckpointError or ConfigError when the source cannot be read or the destination not be written.
    """
    from m31.checkpoint import convert

    shown = Bar(out)

    def note(text: str) -> None:
        shown.clear()
        out.note(text)

    try:
        written = convert(
            Path(args.source),
            Path(args.destination),
            target=args.format,
            max_shard_bytes=MAX_SHARD_BYTES,
            input_scales=input_scales(args.input_scales),
            joint_gate_up=args.joint_gate_up,
            input_scales_from=args.input_scales or "--input-scales",
            adapter=args.adapter,
            progress=shown,
            note=note,
        )
    finally:
        shown.clear()
    out.note(
        f"wrote {args.destination}: {written.total_bytes / 1e9:,.3f} GB in {len(written.declared):,} tensors "
        f"({args.format}), {len(written.files)} file(s)"
    )
    return 0
