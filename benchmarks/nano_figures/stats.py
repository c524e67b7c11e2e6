"""Intervals and tests. Every figure is a `Figure`: a value, its 95 % interval, and how many of what it rests on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypedDict

import numpy as np
import numpy.typing as npt
import torch

F64 = npt.NDArray[np.float64]
ROUNDS = 10_000  # resamples of a bootstrap
_Z = 1.959963984540054  # of a two-sided 95 % interval


class Figure(TypedDict):
    """A measured value; `low` and `high` bound its 95 % interval, `n` counts the units of kind `of`."""

    value: float
    low: float
    high: float
    n: int
    of: str


def ratio(
    over: Sequence[float] | F64, under: Sequence[float] | F64, *, of: str, seed: int, less: float = 0.0
) -> Figure:
    """sum(over) / sum(under) - less, with a percentile bootstrap over the units.

    Where both are measured on the same units this is the paired interval: each resample takes both values of a unit.

    Args:
        over, under: one value per unit [n]; units whose `under` is 0 carry nothing and are left out.
        of: what a unit is.
        seed: of the resampling.
        less: is subtracted: 1 turns a ratio into a relative difference.
    Raises:
        ValueError: nothing is left to resample.
    """
    a, b = np.asarray(over, dtype=np.float64), np.asarray(under, dtype=np.float64)
    a, b = a[b != 0], b[b != 0]
    if not len(b):
        raise ValueError(f"no {of} to measure on")
    rng = np.random.default_rng(seed)
    times = rng.multinomial(len(b), np.full(len(b), 1 / len(b)), size=ROUNDS)
    values = (times @ a) / (times @ b) - less
    low, high = np.quantile(values, [0.025, 0.975])
    return {"value": float(a.sum() / b.sum() - less), "low": float(low), "high": float(high), "n": len(b), "of": of}


def wilson(hits: int, n: int, *, of: str) -> Figure:
    """A proportion with Wilson's score interval; n is 1 or more."""
    share, z2 = hits / n, _Z * _Z
    middle = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = _Z / (1 + z2 / n) * math.sqrt(share * (1 - share) / n + z2 / (4 * n * n))
    # At 0 and n one end is the share itself, which rounding must not pass.
    return {
        "value": share,
        "low": max(0.0, min(share, middle - half)),
        "high": min(1.0, max(share, middle + half)),
        "n": n,
        "of": of,
    }


def chi_square(counts: F64, expected: F64) -> dict[str, Any]:
    """Pearson's test of counts [n] against expected counts [n]; a count where none may be gives p = 0."""
    possible = expected > 0
    if counts[~possible].any():
        return {"statistic": math.inf, "freedom": int(possible.sum()) - 1, "p": 0.0}
    difference = counts[possible] - expected[possible]
    return _tail(float((difference**2 / expected[possible]).sum()), int(possible.sum()) - 1)


def same_source(a: F64, b: F64) -> dict[str, Any]:
    """Test of homogeneity: whether two samples, as counts [n], come from one distribution."""
    seen = a + b > 0
    rows = np.stack([a[seen], b[seen]])
    expected = rows.sum(1, keepdims=True) * rows.sum(0) / rows.sum()
    return _tail(float(((rows - expected) ** 2 / expected).sum()), int(seen.sum()) - 1)


def _tail(statistic: float, freedom: int) -> dict[str, Any]:
    if freedom < 1:  # one possible outcome: it always comes
        return {"statistic": statistic, "freedom": freedom, "p": 1.0}
    half = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    p = float(torch.special.gammaincc(half[0], half[1]))
    return {"statistic": statistic, "freedom": freedom, "p": p}
