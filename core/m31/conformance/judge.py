"""Whether results are within the bound of a declared arithmetic, and whether that bound means something."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from m31.conformance.bounds import F64, KNOWN
from m31.conformance.op_bounds import BOUNDS, Given, score_bound
from m31.errors import ContractViolation
from m31.graph import Arithmetic, Kernel
from m31.ops import OpSpec
from m31.ops.body import FusedOp

_BLOCKS = ("mxfp8", "e2m1", "e4m3")
"""Formats whose error is relative to a block or a range, not to the element."""


def unjudged(spec: OpSpec, kernel: Kernel) -> str | None:
    """Why the bound of a kernel is not known, or None."""
    if spec.criterion == "exact":
        return None
    if isinstance(spec, FusedOp):
        return "a fused op has no bound yet: compare with its body (`m31.graph.unfused`)"
    for name in kernel.arithmetic.operands.replace(", ", "*").split("*"):
        if name in _BLOCKS or name not in KNOWN:
            return f"no elementwise bound for operands in {name} ({kernel.arithmetic.operands})"
    return None


def require_likeness(spec: OpSpec, given: Given, got: Sequence[Any], where: str) -> None:
    """Where no bound is known: on the whole, each output is less than half as far from the definition as zeros, a
    constant or a shuffled result would be.

    Raises:
        ContractViolation: one is not.
    """
    for arg, have, want in zip(spec.outputs, got, given.expected, strict=True):
        if isinstance(want, dict):
            (before,) = (x for a, x in zip(spec.inputs, given.args, strict=True) if a.kind == "state")
            for key, array in want.items():
                written = array != before[key]
                written &= ~(np.isnan(array) & np.isnan(before[key]))
                place = f"{where}, pages '{key[1]}'"
                _require_exact(np.where(written, 0, have[key]), np.where(written, 0, array), place)
                _require_likeness(have[key][written], array[written], given.arithmetic, place)
        elif arg.dtype != "int64" and np.isfinite(want).all():
            _require_likeness(have, want, given.arithmetic, f"{where}, output '{arg.name}'")


def _require_likeness(got: F64, want: F64, arithmetic: Arithmetic, where: str) -> None:
    off = np.linalg.norm(got - want)
    for name, impostor in _impostors(want):
        if not off < np.linalg.norm(impostor - want) / 2:
            raise ContractViolation(
                "arithmetic",
                f"declares {arithmetic.operands}, and its result is hardly nearer than {name}",
                where=where,
                expected="less than half as far from the definition",
            )


def require(spec: OpSpec, given: Given, got: Sequence[Any], where: str, stored: Callable[[Any], Any]) -> None:
    """Judge the outputs of an op.

    Args:
        stored: float64 values as the pages of the case hold them.

    Raises:
        ContractViolation: one is outside, or the bound lets anything through.
    """
    if spec.name == "router":
        _require_router(given, got, where)
        return
    allowed = BOUNDS[spec.name](given) if spec.criterion == "bound" else [None] * len(got)
    for arg, have, want, bound in zip(spec.outputs, got, given.expected, allowed, strict=True):
        if isinstance(want, dict):
            for key, array in want.items():
                _require_exact(have[key], stored(array), f"{where}, pages '{key[1]}'")
        elif bound is None:
            _require_exact(have, want, f"{where}, output '{arg.name}'")
        else:
            within(have, want, bound, given.arithmetic, f"{where}, output '{arg.name}'")


def within(got: F64, want: F64, allowed: F64, arithmetic: Arithmetic, where: str) -> None:
    """Every element within its bound, infinities equal, and no impostor within it as well.

    Raises:
        ContractViolation: the first kind names the worst element, the second the impostor.
    """
    declared = f"{arithmetic.operands}, accumulated in {arithmetic.accumulate}, written in {arithmetic.output}"
    real = np.isfinite(want)
    outside = _outside(got, want, allowed)
    if outside.any():
        error = np.where(real, np.abs(got - np.where(real, want, 0)), np.inf)
        excess = np.where(outside, np.where(np.isnan(error), np.inf, error - allowed), -1)
        at = np.unravel_index(int(excess.argmax()), excess.shape)
        raise ContractViolation(
            "arithmetic",
            f"declares {declared}, and is off by {error[at]:.3g} at {[int(i) for i in at]},"
            f" where the result is {want[at]:.6g} and it gives {got[at]:.6g}",
            where=where,
            expected=f"at most {allowed[at]:.3g} there",
        )
    for name, impostor in _impostors(want):
        if not _outside(impostor, want, allowed).any():
            raise ContractViolation(
                "arithmetic",
                f"declares {declared}, which {name} would pass",
                where=where,
                expected="a declaration that says something about the result",
            )


def _outside(got: F64, want: F64, allowed: F64) -> Any:
    real = np.isfinite(want)
    with np.errstate(invalid="ignore"):
        return np.where(real, ~(np.abs(got - np.where(real, want, 0)) <= allowed), got != want)


def _impostors(want: F64) -> Iterator[tuple[str, F64]]:
    """Results that must not pass; not those that happen to be right, as a constant is where all elements are equal."""
    real = np.isfinite(want)
    if not real.any():
        return
    mean = np.where(real, want[real].mean(), want)
    shuffled = want.copy()
    shuffled[real] = np.roll(want[real], 1)
    scale = np.abs(want[real]).max()
    for name, made in (
        ("zeros", np.where(real, 0.0, want)),
        ("a constant", mean),
        ("a shuffled result", shuffled),
    ):
        if np.abs(made[real] - want[real]).max() > 1e-5 * scale:
            yield name, made


def _require_exact(got: Any, want: Any, where: str) -> None:
    if np.array_equal(got, want, equal_nan=True):
        return
    wrong = ~((got == want) | (np.isnan(got) & np.isnan(want)))
    at = np.argwhere(wrong)[0]
    raise ContractViolation(
        "arithmetic",
        f"{int(wrong.sum())} elements are not exact, the first at {at.tolist()}: {got[tuple(at)]}",
        where=where,
        expected=f"{np.asarray(want)[tuple(at)]}",
    )


def _require_router(g: Given, got: Sequence[Any], where: str) -> None:
    """Ids in order, but for two scores that are closer than their bounds and not equal; weights for the ids given."""
    ids, weights = got[0].astype(np.int64), got[1]
    score, off = score_bound(g)
    choice = score + g.args[1]["bias"]
    wanted = g.expected[0]
    for t, k in np.argwhere(ids != wanted):
        a, b = ids[t, k], wanted[t, k]
        known = 0 <= a < score.shape[1] and len(set(ids[t])) == ids.shape[1]
        gap = abs(choice[t, a] - choice[t, b]) if known else np.inf
        if not 0 < gap <= off[t, a] + off[t, b] + 2 * g.u * abs(choice[t, a]):
            raise ContractViolation(
                "arithmetic",
                f"chooses {a} at [{t}, {k}], whose score is {gap:.3g} from that of {b}",
                where=f"{where}, output 'ids'",
                expected=f"{b}: the best first, the lower id of equals first, each once",
            )
    chosen, wide = np.take_along_axis(score, ids, 1), np.take_along_axis(off, ids, 1)
    total = chosen.sum(1, keepdims=True)
    want = chosen / total
    allowed = g.out * want + (wide + want * wide.sum(1, keepdims=True)) / total + (4 + ids.shape[1]) * g.u * want
    within(weights, want, allowed, g.arithmetic, f"{where}, output 'weights'")
