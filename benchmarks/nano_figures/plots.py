"""Plots as small SVG files. They stand on a white card of their own, so that a dark page shows them as a light one."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")

import numpy as np
from matplotlib.figure import Figure as Canvas

from .curves import Curves, smooth
from .stats import Figure
from .store import write_atomically

_INK, _GRID = "#24292f", "#d0d7de"
_COLOURS = {"nano": "#2563a8", "twin": "#d9772b", "draft": "#2f8f5b", "with": "#2563a8", "without": "#9a9a9a"}
_POINTS = 200  # most points of a curve; more would only make the file bigger
_SMOOTH = 15  # steps
_STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "nano",  # the same figures give the same file
    "font.family": "sans-serif",
    "font.size": 9,
    "text.color": _INK,
    "axes.labelcolor": _INK,
    "axes.edgecolor": _GRID,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": _GRID,
    "grid.linewidth": 0.5,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "legend.frameon": False,
    "path.simplify": True,
}


@contextmanager
def _canvas(path: Path, columns: int = 1, width: float = 6.4, height: float = 3.2) -> Iterator[list[Any]]:
    """Axes side by side, written to `path` at the end."""
    with mpl.rc_context(_STYLE):
        canvas = Canvas(figsize=(width, height), facecolor="white", layout="constrained")
        yield list(np.atleast_1d(canvas.subplots(1, columns)))
        buffer = io.BytesIO()
        canvas.savefig(buffer, format="svg", metadata={"Date": None})
    write_atomically(path, buffer.getvalue())


def _line(axes: Any, curves: Curves, kind: str, name: str, width: int = _SMOOTH, **style: Any) -> None:
    if kind in curves.series:
        steps, values = curves.series[kind]
        step = -(-len(steps) // _POINTS)
        axes.plot(steps[::step], smooth(values, width)[::step], color=_COLOURS[name], linewidth=1.2, **style)


def draw_curves(folder: Path, found: dict[str, Curves]) -> list[Path]:
    """What the logs show, as files of the given folder.

    loss.svg: losses of training and validation; index.svg: divergence of the index branch, and speed; load.svg: shares
    of the experts; draft.svg: the draft head's loss, and how many of its tokens would be kept.
    """
    written = [folder / "loss.svg", folder / "index.svg"]
    models = {name: curves for name, curves in found.items() if name != "draft"}
    with _canvas(written[0]) as (axes,):
        for name, curves in models.items():
            _losses(axes, curves, name)
        axes.set(xlabel="step", ylabel="loss, nats per token")
        axes.legend()
    with _canvas(written[1], 2) as axes:
        for name, curves in found.items():
            _line(axes[0], curves, "kl", name, label=name)
            _line(axes[1], curves, "tokens_per_second", name, label=name)
        axes[0].set(xlabel="step", ylabel="divergence of the index branch, nats", yscale="log")
        axes[1].set(xlabel="step", ylabel="tokens per second", ylim=(0, None))
        for at in axes:
            at.legend()
    if "nano" in found and found["nano"].load:
        written.append(folder / "load.svg")
        with _canvas(written[-1], len(found["nano"].load)) as axes:
            for at, (layer, shares) in zip(axes, found["nano"].load.items(), strict=True):
                _load(at, layer, shares)
            axes[0].set(ylabel="share of the tokens, mean over 15 steps")
    if "draft" in found:
        written.append(folder / "draft.svg")
        with _canvas(written[-1], 2) as axes:
            _losses(axes[0], found["draft"], "draft")
            axes[0].set(xlabel="step", ylabel="loss")
            _line(axes[1], found["draft"], "accepted", "draft", label="kept at temperature 1")
            _line(axes[1], found["draft"], "greedy", "nano", label="kept greedily")
            axes[1].set(xlabel="step", ylabel="tokens of a draft", ylim=(0, None))
            for at in axes:
                at.legend()
    return written


def _losses(axes: Any, curves: Curves, name: str) -> None:
    _line(axes, curves, "loss", name, label=f"{name}, training")
    if "validation" in curves.series:
        axes.plot(*curves.series["validation"], "o", ms=3, color=_COLOURS[name], label=f"{name}, validation")


def _load(axes: Any, layer: str, shares: Any) -> None:
    """From the least to the greatest share of an expert over the steps, the middle half, and an equal share."""
    step = -(-3 * len(shares) // _POINTS)  # every layer has four edges
    steps = np.arange(1, len(shares) + 1)[::step]
    smoothed = np.sort(np.stack([smooth(expert, _SMOOTH)[::step] for expert in shares.T]), axis=0)
    for out, alpha in ((0, 0.25), (len(smoothed) // 4, 0.5)):
        low, high = smoothed[out], smoothed[len(smoothed) - 1 - out]
        axes.fill_between(steps, low, high, color=_COLOURS["nano"], alpha=alpha, linewidth=0)
    axes.axhline(1 / shares.shape[1], color=_INK, linewidth=0.8, linestyle="--")
    axes.set(xlabel="step", title=f"layer {layer}", ylim=(0, None))


def _errors(axes: Any, x: Any, shown: list[Figure], **style: Any) -> None:
    values = np.array([figure["value"] for figure in shown])
    low = values - [figure["low"] for figure in shown]
    high = [figure["high"] for figure in shown] - values
    axes.errorbar(x, values, yerr=[low, high], capsize=3, linewidth=1.2, **style)


def draw_recall(path: Path, found: dict[str, Any]) -> None:
    """Questions answered, by distance."""
    with _canvas(path) as (axes,):
        for kind in ("with", "without"):
            rows = {int(distance): row[kind]["right"] for distance, row in found.items() if kind in row}
            label = f"{kind} the definition"
            _errors(axes, list(rows), list(rows.values()), marker="o", ms=4, color=_COLOURS[kind], label=label)
        axes.set(xlabel="tokens since the definition", ylabel="answers right", ylim=(-0.02, 1.02))
        axes.legend()


def draw_drafting(path: Path, found: dict[str, Any]) -> None:
    """How often the draft's j-th token is kept."""
    with _canvas(path) as (axes,):
        for kind, label, colour in (("greedy", "greedy", "nano"), ("temperature_1", "temperature 1", "twin")):
            kept = found[kind]["kept_at_position"]
            axes.plot(range(1, len(kept) + 1), kept, marker="o", ms=4, color=_COLOURS[colour], label=label)
        axes.set(xlabel="drafted token", ylabel="share of verifications that keep it", ylim=(0, 1))
        axes.legend()
