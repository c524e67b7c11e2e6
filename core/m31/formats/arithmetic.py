"""Named arithmetics: what is quantised while the model runs (MODEL.md §3.2 to §3.6).

A backend declares the arithmetic of its kernels by name; the reference computes the same one, so that a kernel is
compared with its twin and not with a wider tolerance. Weights are not part of it: they are decoded from whatever the
checkpoint holds. This module imports neither torch nor anything else heavy.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, fields

from m31.errors import OpRefused

_CHOICES: dict[str, tuple[str | None, ...]] = {
    "linear_activation": (None, "mxfp8"),
    "expert_input": (None, "nvfp4-token", "mxfp8"),
    "expert_middle": (None, "nvfp4-static", "mxfp8"),
    "query": (None, "e4m3"),
    "kv_read": ("exact", "e4m3"),
}


@dataclass(frozen=True)
class ArithmeticSpec:
    """Which activations are quantised, and how. None: not at all.

    `linear_activation`: inputs of attention projections, dense MLP and shared experts (those whose weights are MXFP8);
    "mxfp8" is `mxfp8.quantise`. `expert_input`, `expert_middle`: inputs of the routed experts' first and second matrix
    product; "nvfp4-token" is `nvfp4.quantise_per_token`, "nvfp4-static" `nvfp4.quantise_static` with w2's
    `input_global_scale`. `query`: q and index q, "e4m3" with unit scale. `kv_read`: what attention multiplies with
    when the cache is NVFP4, the exact product of code and scale, or that product rounded to E4M3.

    Raises OpRefused for a value that is not one of these.
    """

    name: str
    linear_activation: str | None
    expert_input: str | None
    expert_middle: str | None
    query: str | None
    kv_read: str

    def __post_init__(self) -> None:
        for field, allowed in _CHOICES.items():
            if getattr(self, field) not in allowed:
                raise OpRefused(
                    f"{field} is {getattr(self, field)!r}",
                    where=f"arithmetic '{self.name}'",
                    expected=" or ".join(repr(value) for value in allowed),
                )

    @property
    def exact(self) -> bool:
        """Nothing is quantised while the model runs."""
        return self.same_numbers(NAMED["exact"])

    def same_numbers(self, other: ArithmeticSpec) -> bool:
        """The two differ at most by name."""
        return all(getattr(self, f.name) == getattr(other, f.name) for f in fields(self) if f.name != "name")


NAMED: dict[str, ArithmeticSpec] = {
    spec.name: spec
    for spec in (
        ArithmeticSpec("exact", None, None, None, None, "exact"),
        ArithmeticSpec("w16a16", None, None, None, None, "exact"),
        ArithmeticSpec("w4a16", None, None, None, None, "exact"),
        ArithmeticSpec("w8a8-mxfp8", "mxfp8", "mxfp8", "mxfp8", None, "exact"),
        ArithmeticSpec("w8a8-q8kv4", "mxfp8", "mxfp8", "mxfp8", "e4m3", "e4m3"),
        ArithmeticSpec("w4a4-megamoe", "mxfp8", "nvfp4-token", "nvfp4-static", None, "exact"),
        ArithmeticSpec("w4a4-q8kv4", "mxfp8", "nvfp4-token", "nvfp4-static", "e4m3", "e4m3"),
    )
}
"""Arithmetics by name; "exact" is the default. "w16a16" and "w4a16" compute the same numbers: weights are decoded
exactly and nothing else is quantised; they are names under which backends declare it."""


def parse(name: str) -> ArithmeticSpec:
    """The arithmetic called `name`; case does not matter, and a space or underscore is a hyphen.

    Raises OpRefused for an unknown name, with the nearest one.
    """
    key = "-".join(name.lower().replace("_", " ").replace("-", " ").split())
    if key in NAMED:
        return NAMED[key]
    nearest = difflib.get_close_matches(key, NAMED, n=1, cutoff=0.4)
    raise OpRefused(
        f"unknown arithmetic '{name}'",
        where="arithmetic",
        expected=f"one of {', '.join(NAMED)}",
        fix=f"did you mean '{nearest[0]}'?" if nearest else None,
    )
