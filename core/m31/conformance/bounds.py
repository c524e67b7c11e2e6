"""How far a kernel may be from the real result, from the arithmetic that it declares and from nothing else.

    |y - ref| <= u_out * |ref| + c * sqrt(K) * u_acc * (|x| . |w|) + (u_x + u_w) * (|x| . |w|)

for a sum of K products: a rounding of the result, K roundings of the accumulation that add up like a random walk, and
one of each operand if the kernel rounds them (DESIGN.md §7).
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from m31.errors import OpRefused
from m31.graph import Arithmetic

F64 = NDArray[np.float64]

_SIGNIFICAND = {
    "float64": 53,
    "float32": 24,
    "tf32": 11,
    "float16": 11,
    "bfloat16": 8,
    "e4m3": 4,
    "mxfp8": 4,
    "e2m1": 2,
}
KNOWN = frozenset(_SIGNIFICAND)
"""Formats with a precision."""
CONSTANT = 4.0
"""c: standard deviations of the random walk that are allowed: a choice, not yet held against measured distributions."""


def roundoff(name: str) -> float:
    """The largest relative error of rounding to a format: half a unit in the last place.

    Raises:
        OpRefused: a format without one.
    """
    if name not in _SIGNIFICAND:
        raise OpRefused(f"'{name}' has no known precision", where="arithmetic", expected=", ".join(_SIGNIFICAND))
    return float(2.0 ** -_SIGNIFICAND[name])


def underflow(arithmetic: Arithmetic) -> float:
    """An absolute error that any result may have: some devices take what lies below the smallest normal number for 0,
    in operands, partial sums and results. A thousand such numbers; of float16, whose smallest are not that small, one.
    """
    allowed = {"float64": 2.0**-1012, "float16": 2.0**-24}
    return max(allowed.get(name, 2.0**-116) for name in (arithmetic.accumulate, arithmetic.output))


def bound(arithmetic: Arithmetic, reference: F64, magnitude: F64, terms: int, *, given: str) -> F64:
    """The largest error, element by element, of sums of `terms` products.

    Args:
        arithmetic: as the kernel declares it; `operands` is `x*w`, or one format that both have.
        reference: the sums in float64, of the values that the kernel was given.
        magnitude: the sums of |x| * |w|.
        terms: K.
        given: format of the values that it was given: an operand format at least as fine rounds nothing.
    """
    allowed: F64 = roundoff(arithmetic.output) * np.abs(reference) + unit(arithmetic, terms, given=given) * magnitude
    return allowed


def unit(arithmetic: Arithmetic, terms: int, *, given: str) -> float:
    """The part of the bound that the sum of magnitudes is multiplied with. Of several products (`a*b, c*d`) the
    coarsest counts."""
    rounding = 0.0
    for product in arithmetic.operands.split(", "):
        x, _, w = product.partition("*")
        rounding = max(rounding, sum(roundoff(o) for o in (x, w or x) if roundoff(o) > roundoff(given)))
    return CONSTANT * math.sqrt(max(terms, 1)) * roundoff(arithmetic.accumulate) + rounding
