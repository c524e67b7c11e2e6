"""`m31 train [--draft | --lora] CONFIG.toml`: train, or continue, with a progress bar on a terminal."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from m31.cli.convert import duration
from m31.cli.output import Output

if TYPE_CHECKING:
    from m31.training.trainer import Report

INTERRUPTED = 130
_EVERY = 0.5  # seconds between two drawings
_WIDTH = 30


def bar(report: Report) -> str:
    """One line: part done, loss of the batch and of the last validation, speed, time left."""
    part = report.step / report.total if report.total else 0.0
    filled = int(part * _WIDTH)
    of = f"{report.total:,}" if report.total else "?"
    validation = "" if report.validation is None else f" (validation {report.validation:.4f})"
    left = "unknown" if report.seconds_left is None else duration(report.seconds_left)
    return (
        f"[{'=' * filled}{' ' * (_WIDTH - filled)}] {part:4.0%}  step {report.step:,} of {of}, "
        f"loss {report.loss:.4f}{validation}, {report.tokens_per_second:,.0f} tokens/s, {left} left"
    )


class Bar:
    """Redraws one line on standard error; nothing where that is no terminal."""

    def __init__(self, out: Output) -> None:
        self._out, self._drawn, self._length = out, 0.0, 0
        self._shown = sys.stderr is not None and sys.stderr.isatty()

    def __call__(self, report: Report) -> None:
        """Take note of a step."""
        now = time.monotonic()
        if self._shown and (now - self._drawn >= _EVERY or report.step == report.total):
            line = bar(report)
            self._out.prompt("\r" + line + " " * (self._length - len(line)))
            self._drawn, self._length = now, len(line)

    def clear(self) -> None:
        """Remove the line."""
        if self._length:
            self._out.prompt("\r" + " " * self._length + "\r")
            self._length = 0


def command(args: argparse.Namespace, out: Output) -> int:
    """Run the command; the exit code.

    Raises: ConfigError for the configuration, TrainingError for the run's folder or a loss that is not finite,
    CheckpointError for the target of a draft head or an adapter.
    """
    from m31.training import config as text_config
    from m31.training import lora
    from m31.training.data import provided
    from m31.training.draft import config as draft_config
    from m31.training.trainer import Trainer

    path = Path(args.config)
    kind = draft_config if args.draft else lora if args.lora else text_config
    config: text_config.RunConfig = kind.load(path)
    folder = path.parent / config.run.folder
    data = provided(config.data.provider, config.data.options, where=f"{path}: [data]")
    shown = Bar(out)
    trainer = Trainer(config, data, folder, shown)
    try:
        outcome = trainer.run()
    finally:
        shown.clear()
    best = "none yet" if outcome.best_loss is None else f"{outcome.best_loss:.4f} nats per token"
    if outcome.finished:
        out.note(f"trained {outcome.step:,} steps, best validation loss {best}: wrote {outcome.folder}")
        return 0
    out.note(
        f"stopped after step {outcome.step:,}, best validation loss {best}. "
        f"The state is in {folder}: the same command continues."
    )
    return INTERRUPTED
