"""What a run's log.jsonl shows over its steps."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from m31.training.state import LOG

F64 = npt.NDArray[np.float64]
RUNS = {"nano": "nano", "twin": "nano-twin", "draft": "nano-draft"}
"""Name -> folder of the run below the one that is given."""
_LAST = 25  # steps that the figures at the end are means of


@dataclass(frozen=True)
class Curves:
    """One run: what was logged per step, as (steps, values), and per validation; `load` [steps, experts] by layer."""

    series: dict[str, tuple[F64, F64]]
    load: dict[str, F64] = field(default_factory=dict)


def read(path: Path) -> Curves:
    """The curves of a log. A last line that is not whole yet is left out.

    Raises:
        ValueError: another line is not what a trainer writes, or there is none.
    """
    *lines, rest = path.read_text().split("\n")
    rows: list[dict[str, Any]] = [json.loads(line) for line in lines]
    if not rows:
        raise ValueError(f"{path}: no step is logged (last line: {rest!r})")
    series = {}
    for name in ("loss", "validation", "kl", "accepted", "greedy", "tokens_per_second"):
        found = [(row["step"], row[name]) for row in rows if name in row]
        if found:
            steps, values = np.array(found, dtype=np.float64).T
            series[name] = steps, values
    load: dict[str, list[list[float]]] = {}
    for row in rows:
        for layer, shares in row.get("load", {}).items():
            load.setdefault(layer, []).append(shares)
    return Curves(series, {layer: np.array(shares) for layer, shares in load.items()})


def runs(folder: Path) -> dict[str, Curves]:
    """The runs that are there, by the names of `RUNS`."""
    return {name: read(path) for name, below in RUNS.items() if (path := folder / below / LOG).is_file()}


def figures(found: dict[str, Curves]) -> dict[str, Any]:
    """Per run: steps, means over its last 25 steps, and the lowest validation loss and where it was."""
    out: dict[str, Any] = {}
    for name, curves in found.items():
        row: dict[str, Any] = {"steps": int(curves.series["loss"][0][-1])}
        for kind in ("loss", "kl", "accepted", "greedy"):
            if kind in curves.series:
                row[kind] = float(curves.series[kind][1][-_LAST:].mean())
        row["tokens_per_second"] = float(np.median(curves.series["tokens_per_second"][1]))
        if "validation" in curves.series:
            steps, values = curves.series["validation"]
            row |= {"validation": float(values.min()), "validation_step": int(steps[values.argmin()])}
        row["load"] = {
            layer: [float(shares[-_LAST:].mean(0).min()), float(shares[-_LAST:].mean(0).max())]
            for layer, shares in curves.load.items()
        }
        out[name] = row
    return out


def smooth(values: F64, width: int) -> F64:
    """The mean of each value and up to `width` - 1 before it."""
    sums = np.concatenate([[0.0], values.cumsum()])
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(0, ends - width)
    return np.asarray((sums[ends] - sums[starts]) / (ends - starts))
