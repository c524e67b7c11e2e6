"""How far the result of a fused op may be from its definition: the bounds of its parts, passed on through its body.

Every value of the body has a centre, which the definition gives, and an error, element by element. A part adds the
bound of its own arithmetic (`m31.conformance.op_bounds`) and passes on the errors of what it is given:

    linear            |w| e: a sum
    add               e_x + e_y
    norms             |1 + w| (e r + |x| r^3 mean((|x| + e/2) e)), r the largest reciprocal root within the error
    rope              a rotation of the errors, with absolute values
    swiglu_oai        |u + beta| e_s + |s| e_u + e_s e_u, e_s what s = g sigmoid(alpha g) does within the error of g
    round_*           what rounding makes of the ends of the interval
    kv_write, ...     the same, by the format of the pages

A fused kernel may keep a value between two parts in the coarsest format that it declares for its operands, once, and
need not: one rounding of that format is added to what a part gives to the next. Inputs of the op are exact.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from m31.conformance import intervals
from m31.conformance.bounds import F64, roundoff
from m31.conformance.op_bounds import BOUNDS, Given, activated
from m31.ops import Attrs, OpSpec
from m31.ops.body import FusedOp, Part

Errors = Sequence[F64 | None]
"""Of each argument; None of one that is exact."""
_STORED = ("kv_write", "index_write")


def _linear(attrs: Attrs, args: Sequence[Any], errors: Errors) -> F64 | None:
    return None if errors[0] is None else errors[0] @ np.abs(args[1]["weight"]).T


def _add(attrs: Attrs, args: Sequence[Any], errors: Errors) -> F64 | None:
    given = [e for e in errors if e is not None]
    return sum(given[1:], given[0]) if given else None


def _norm(attrs: Attrs, args: Sequence[Any], errors: Errors) -> F64 | None:
    if errors[0] is None:
        return None
    heads = (len(args[0]), attrs["heads"], -1) if "heads" in attrs else args[0].shape
    x, e = np.abs(args[0]).reshape(heads) if args[0].size else _empty(args, attrs), errors[0]
    e = e.reshape(x.shape)
    least = np.maximum(x - e, 0)
    r = 1 / np.sqrt(np.mean(least * least, -1, keepdims=True) + attrs["eps"])
    passed: F64 = np.abs(1 + args[1]["weight"]) * (e * r + x * r**3 * np.mean((x + e / 2) * e, -1, keepdims=True))
    return passed


def _empty(args: Sequence[Any], attrs: Attrs) -> F64:
    """No tokens: a shape that `reshape` cannot infer."""
    heads = attrs.get("heads")
    return np.zeros((0, heads, args[0].shape[1] // heads) if heads else args[0].shape)


def _rope(attrs: Attrs, args: Sequence[Any], errors: Errors) -> F64 | None:
    if errors[0] is None:
        return None
    e, cos, sin = errors[0], np.abs(args[1])[:, None], np.abs(args[2])[:, None]
    half = cos.shape[-1]
    out = e.copy()
    a, b = e[..., :half], e[..., half : 2 * half]
    out[..., :half], out[..., half : 2 * half] = a * cos + b * sin, b * cos + a * sin
    return out


def _swiglu(attrs: Attrs, args: Sequence[Any], errors: Errors) -> F64 | None:
    off_gate, off_up = (np.zeros_like(args[0]) if e is None else e for e in errors)
    return activated(attrs, args[0], off_gate, args[1], off_up)


def _experts(attrs: Attrs, args: Sequence[Any], errors: Errors) -> F64 | None:
    return None  # its inputs are the fused op's


PASSED: Mapping[str, Callable[[Attrs, Sequence[Any], Errors], F64 | None]] = {
    "linear": _linear,
    "add": _add,
    "gemma_rmsnorm": _norm,
    "head_rmsnorm": _norm,
    "rope": _rope,
    "swiglu_oai": _swiglu,
    "experts": _experts,
}
"""What a part makes of the errors of its arguments."""
_TAKES_EXACT = ("experts",)


def unknown(spec: FusedOp, attrs: Attrs) -> str | None:
    """Why the bound of a fused op does not follow from its body, or None."""
    body = spec.parts(attrs)
    for part in body.parts:
        name = part.spec.name
        if name not in PASSED and name not in _STORED and not name.startswith("round_"):
            return f"nothing says how {name} passes an error on"
        if name in _TAKES_EXACT and not set(part.args) <= set(body.parameters):
            return f"nothing says how {name} passes an error on, and its inputs are computed"
    return None


def bounds(spec: FusedOp, given: Given, formats: tuple[str, str]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Results and allowed errors of each output; of pages by (layer, kind), as what is stored, and -1 where nothing is.

    Args:
        given: the call; `expected` is not looked at.
        formats: of keys and values, and of index keys, in pages.
    """
    body = spec.parts(given.attrs)
    known: dict[str, Any] = dict(zip(body.parameters, given.args, strict=True))
    errors: dict[str, Any] = dict.fromkeys(body.parameters)
    inner = max([given.u, *(roundoff(n) for n in given.arithmetic.operands.replace(", ", "*").split("*"))])
    last = set(body.outputs)
    marked: Mapping[Any, F64] = {}
    state = next((at for at, arg in enumerate(spec.inputs) if arg.kind == "state"), -1)
    if state >= 0:
        marked = {key: np.zeros_like(array) for key, array in given.args[state].items()}
    for part in body.parts:
        args = [known[name] for name in part.args]
        off = [errors[name] for name in part.args]
        if part.spec.name in _STORED:
            made: Any = _store(part, args, off)
            marked = written(part, args[-1], marked)
        elif part.spec.name.startswith("round_"):
            made = intervals.bfloat16(args[0], np.zeros_like(args[0]) if off[0] is None else off[0])
        else:
            exact = all(name in body.parameters for name in part.args)
            made = _computed(part.spec, part.attrs, args, off, given, inner, exact=exact, last=part.results[0] in last)
        known[part.results[0]], errors[part.results[0]] = made
    out = []
    for name in body.outputs:
        value = known[name]
        if isinstance(value, dict):
            out.append(_pages(given.args[state], value, errors[name], marked, formats))
        else:
            off = np.zeros_like(value) if errors[name] is None else errors[name]
            out.append((value, off + given.out * np.abs(value)))
    return tuple(value for value, _ in out), tuple(allowed for _, allowed in out)


def _computed(
    spec: OpSpec,
    attrs: Attrs,
    args: Sequence[Any],
    off: Errors,
    given: Given,
    inner: float,
    *,
    exact: bool,
    last: bool,
) -> tuple[F64, F64]:
    """Centre and error of a part that computes; what the caller reads is rounded to the output's format there."""
    plain = [v["weight"] if isinstance(v, dict) and set(v) == {"weight"} else v for v in args]
    (centre,) = spec.naive(attrs, *plain)
    coarsest = max(given.arithmetic.operands.replace(", ", "*").split("*"), key=roundoff)
    form = given.format if exact else coarsest
    # The result's own rounding is added below: once, in the format in which it is kept.
    arithmetic = replace(given.arithmetic, output="float64")
    call = replace(given, attrs=attrs, args=args, expected=(centre,), arithmetic=arithmetic, format=form)
    (own,) = BOUNDS[spec.name](call)
    passed = PASSED[spec.name](attrs, args, off)
    error = own if passed is None else own + passed
    return centre, error if last else error + inner * (np.abs(centre) + error)


def _store(part: Part, args: Sequence[Any], off: Errors) -> tuple[Any, Any]:
    """Pages and their errors before they are rounded to what pages hold."""
    kv, *values, slots = args
    zeros = {key: np.zeros_like(array) for key, array in kv.items()}
    before = zeros if off[0] is None else off[0]
    widths = [np.zeros_like(v) if e is None else e for v, e in zip(values, off[1:-1], strict=True)]
    (centre,) = part.spec.naive(part.attrs, kv, *values, slots)
    (error,) = part.spec.naive(part.attrs, before, *widths, slots)
    return centre, error


def written(part: Part, slots: Any, marked: Mapping[Any, F64]) -> Mapping[Any, F64]:
    """`marked`, with 1 where a part writes pages."""
    if part.spec.name == "index_write":
        given = [np.ones((len(slots), 1, marked[part.attrs["layer"], "index"].shape[-1]))]
    else:
        _, heads, _, dim = marked[part.attrs["layer"], "k"].shape
        given = [np.ones((len(slots), heads, dim)), np.ones((len(slots), heads * dim))]
    (made,) = part.spec.naive(part.attrs, marked, *given, slots)
    found: Mapping[Any, F64] = made
    return found


def _pages(
    before: Mapping[Any, F64],
    centre: Mapping[Any, F64],
    error: Mapping[Any, F64],
    marked: Mapping[Any, F64],
    formats: tuple[str, str],
) -> tuple[dict[Any, F64], dict[Any, F64]]:
    """Stored values and their errors, -1 where nothing was written."""
    values, widths = {}, {}
    for key, value in centre.items():
        here = marked[key] > 0
        made, width = intervals.through_pages(formats[key[1] == "index"], value, error[key])
        values[key], widths[key] = np.where(here, made, before[key]), np.where(here, width, -1.0)
    return values, widths
