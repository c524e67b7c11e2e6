"""Whether results are within the bound of a declared arithmetic, and whether that bound means something."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from m31.conformance import composition, intervals, twin
from m31.conformance.bounds import F64, underflow
from m31.conformance.item import Verdict
from m31.conformance.op_bounds import BOUNDS, Given, score_bound
from m31.errors import ContractViolation, SuiteError
from m31.graph import Arithmetic
from m31.ops import OpSpec
from m31.ops.body import FusedOp

_CLEAN = Arithmetic("float32", "float32", "float32")
"""A bound that lets nonsense through even under this arithmetic is a fault of the suite, not of a declaration."""


@dataclass(frozen=True)
class Context:
    """What of a case a judge knows besides its numbers.

    Args:
        stored: how the weights are stored.
        formats: of keys and values, and of index keys, in pages.
        written: what was written to the pages before the call.
    """

    stored: str
    formats: tuple[str, str]
    written: Mapping[tuple[int, str], F64]


def unjudged(spec: OpSpec, arithmetic: Arithmetic, attrs: Any) -> str | None:
    """Why the bound of a kernel is not known, or None."""
    if spec.criterion == "exact":
        return None
    if isinstance(spec, FusedOp):
        reason = composition.unknown(spec, attrs)
        if reason or not twin.quantises(arithmetic):
            return reason
        return f"which product of a fused op quantises what is not said ({arithmetic.operands})"
    if twin.quantises(arithmetic):
        return twin.unknown(spec.name, arithmetic)
    return None


def require_likeness(spec: OpSpec, given: Given, got: Sequence[Any], where: str) -> Verdict:
    """Where no bound is known: on the whole, each output is less than half as far from the definition as zeros, a
    constant or a shuffled result would be.

    Raises:
        ContractViolation: one is not.
    """
    worst = Verdict()
    for arg, have, want in zip(spec.outputs, got, given.expected, strict=True):
        if isinstance(want, dict):
            (before,) = (x for a, x in zip(spec.inputs, given.args, strict=True) if a.kind == "state")
            for key, array in want.items():
                written = array != before[key]
                written &= ~(np.isnan(array) & np.isnan(before[key]))
                place = f"{where}, pages '{key[1]}'"
                require_exact(np.where(written, 0, have[key]), np.where(written, 0, array), place)
                worst = _worse(worst, _likeness(have[key][written], array[written], given.arithmetic, place))
        elif arg.dtype != "int64" and np.isfinite(want).all():
            worst = _worse(worst, _likeness(have, want, given.arithmetic, f"{where}, output '{arg.name}'"))
    return worst


def _likeness(got: F64, want: F64, arithmetic: Arithmetic, where: str) -> Verdict:
    off, worst = float(np.linalg.norm(got - want)), Verdict()
    for name, impostor in _impostors(want):
        allowed = float(np.linalg.norm(impostor - want)) / 2
        if not off < allowed:
            raise ContractViolation(
                "arithmetic",
                f"declares {arithmetic.operands}, and its result is hardly nearer than {name}",
                where=where,
                expected="less than half as far from the definition",
            )
        worst = _worse(worst, Verdict(margin=off / allowed, max_error=off, allowed=allowed, where=_place(where)))
    return worst


def require(spec: OpSpec, given: Given, got: Sequence[Any], where: str, context: Context) -> Verdict:
    """Judge the outputs of an op, the kernel of which has a bound (`unjudged`).

    Raises:
        ContractViolation: one is outside, or the declaration lets anything through.
        SuiteError: the bound would let anything through under any arithmetic.
    """
    if spec.name == "router":
        return _require_router(given, got, where)
    given, measured = _expected(spec, given, context)
    clean: list[Any] | None = None
    worst = Verdict(margin=0.0, max_error=0.0, allowed=0.0) if spec.criterion == "exact" else Verdict()
    for at, (arg, have, (want, bound)) in enumerate(zip(spec.outputs, got, measured, strict=True)):
        place = f"{where}, output '{arg.name}'"
        if isinstance(want, dict):
            for key, array in want.items():
                place = f"{where}, pages '{key[1]}'"
                if bound is None:
                    require_exact(have[key], array, place)
                    continue
                written = bound[key] >= 0
                require_exact(np.where(written, 0, have[key]), np.where(written, 0, array), place)
                part = have[key][written], array[written], bound[key][written]
                worst = _worse(worst, within(*part, given.arithmetic, place))
        elif bound is None:
            require_exact(have, want, place)
        else:

            def strict(at: int = at) -> F64:
                nonlocal clean
                clean = clean or [b for _, b in _expected(spec, _cleaned(given), context)[1]]
                found: F64 = clean[at]
                return found

            worst = _worse(worst, within(have, want, bound, given.arithmetic, place, strict=strict))
    return worst


def _cleaned(given: Given) -> Given:
    return replace(given, arithmetic=_CLEAN, format="float32")


def _expected(spec: OpSpec, given: Given, context: Context) -> tuple[Given, list[tuple[Any, Any]]]:
    """The call as the kernel declares to compute it, with result and allowed error of each output; None for exact."""
    if isinstance(spec, FusedOp) and spec.criterion == "bound":
        want, allowed = composition.bounds(spec, given, context.formats)
        return given, list(zip(want, allowed, strict=True))
    if spec.criterion == "exact":
        return given, [(_as_stored(value, context), None) for value in given.expected]
    if twin.quantises(given.arithmetic):
        return _twin(spec, given, context)
    return given, list(zip(given.expected, BOUNDS[spec.name](given), strict=True))


def _twin(spec: OpSpec, given: Given, context: Context) -> tuple[Given, list[tuple[Any, Any]]]:
    if spec.name == "experts":
        want, allowed = twin.experts(given, context.stored)
        return given, list(zip(want, allowed, strict=True))
    if spec.name == "linear":
        clean = twin.linear(given)
    else:
        read = twin.reader(given, context.written, context.formats[spec.name == "block_scores"])
        if twin.probabilities(given.arithmetic) and spec.name != "block_scores":
            want, allowed = twin.attention(read)
            return given, list(zip(want, allowed, strict=True))
        plain = [v["weight"] if isinstance(v, dict) and set(v) == {"weight"} else v for v in read.args]
        clean = replace(twin.plain(read), expected=spec.naive(given.attrs, *plain))
    return given, list(zip(clean.expected, BOUNDS[spec.name](clean), strict=True))


def _as_stored(value: Any, context: Context) -> Any:
    """Pages as they hold what was written; anything else as it is."""
    if not isinstance(value, dict):
        return value
    return {key: intervals.stored(context.formats[key[1] == "index"], array) for key, array in value.items()}


def within(
    got: F64,
    want: F64,
    allowed: F64,
    arithmetic: Arithmetic,
    where: str,
    *,
    strict: Callable[[], F64] | None = None,
) -> Verdict:
    """Every element within its bound, infinities equal, and no impostor within it as well.

    Args:
        strict: what would be allowed under float32, to tell a vague declaration from a vague bound.

    Raises:
        ContractViolation: the first kind names the worst element, the second the impostor.
        SuiteError: an impostor would pass under float32 too.
    """
    declared = f"{arithmetic.operands}, accumulated in {arithmetic.accumulate}, written in {arithmetic.output}"
    allowed = np.where(allowed > 0, allowed + underflow(arithmetic), allowed)
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
            if strict is not None and not _outside(impostor, want, strict()).any():
                raise SuiteError(
                    f"{name} would pass under any arithmetic", where=where, expected="a case and a bound that say more"
                )
            raise ContractViolation(
                "arithmetic",
                f"declares {declared}, which {name} would pass",
                where=where,
                expected="a declaration that says something about the result",
            )
    return _margin(got, want, allowed, where)


def _margin(got: F64, want: F64, allowed: F64, where: str) -> Verdict:
    counts = np.isfinite(want) & (allowed > 0)
    if not counts.any():
        return Verdict()
    error = np.where(counts, np.abs(got - np.where(counts, want, 0)), 0)
    ratio = error / np.where(counts, allowed, 1)
    at = np.unravel_index(int(ratio.argmax()), ratio.shape)
    place = f"{_place(where)}{[int(i) for i in at]}"
    return Verdict(margin=float(ratio[at]), max_error=float(error[at]), allowed=float(allowed[at]), where=place)


def _place(where: str) -> str:
    """The output's name, from a full label."""
    return where.rpartition(", ")[2]


def _worse(a: Verdict, b: Verdict) -> Verdict:
    """The one nearer to its bound."""
    return max(a, b, key=lambda v: -1.0 if v.margin is None else v.margin)


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """The one nearest to its bound."""
    found = Verdict()
    for verdict in verdicts:
        found = _worse(found, verdict)
    return found


def _outside(got: F64, want: F64, allowed: F64) -> Any:
    real = np.isfinite(want)
    with np.errstate(invalid="ignore"):
        same = (got == want) | (np.isnan(got) & np.isnan(want))
        return np.where(real, ~(np.abs(got - np.where(real, want, 0)) <= allowed), ~same)


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


def require_exact(got: Any, want: Any, where: str) -> None:
    """The same numbers, NaN where the definition has it.

    Raises:
        ContractViolation: names the first that is not.
    """
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


def _require_router(g: Given, got: Sequence[Any], where: str) -> Verdict:
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
    # The definition's own weights where its choice was made; so a wrong definition shows as well.
    want = np.where((ids == wanted).all(1, keepdims=True), g.expected[1], chosen / total)
    allowed = g.out * want + (wide + want * wide.sum(1, keepdims=True)) / total + (4 + ids.shape[1]) * g.u * want
    return within(weights, want, allowed, g.arithmetic, f"{where}, output 'weights'")


__all__ = [
    "Context",
    "require",
    "require_exact",
    "require_likeness",
    "unjudged",
    "within",
    "worst",
]
