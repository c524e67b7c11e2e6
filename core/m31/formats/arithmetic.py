"""Named arithmetics: what is rounded or quantised while the model runs (MODEL.md §3.1 to §3.6).

A backend declares the arithmetic of its kernels by name; the reference computes the same one, so that a kernel is
compared with its twin and not with a wider tolerance. Stored weights are decoded exactly except where a transform is
named. This module imports neither torch nor anything else heavy.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, fields, replace

from m31.errors import OpRefused

_CHOICES: dict[str, tuple[str | None, ...]] = {
    "linear_weights": (None, "mxfp8-to-block-fp8"),
    "linear_activation": (None, "bfloat16", "mxfp8"),
    "expert_weights": (None, "nvfp4-to-mxfp8", "nvfp4-shared-scale"),
    "expert_input": (None, "bfloat16", "nvfp4-token", "mxfp8"),
    "expert_middle": (None, "bfloat16", "nvfp4-static", "mxfp8"),
    "query": (None, "bfloat16", "e4m3"),
    "kv_read": ("exact", "e4m3", "e4m3-shift3"),
    "probability": (None, "e4m3"),
}


@dataclass(frozen=True, kw_only=True)
class ArithmeticSpec:
    """What is rounded, and how. None: not at all.

    Args:
        name: as `parse` takes it.
        linear_weights, expert_weights: a lossy transform of `m31.formats.transforms`, applied to weights that are
            stored in the format that it starts from (MXFP8 projections, NVFP4 experts) and to no others.
        linear_activation: inputs of attention projections, dense MLP and shared experts. "mxfp8" is `mxfp8.quantise`,
            for weights that are MXFP8 too (§3.1). Either way the output is rounded to BF16.
        expert_input, expert_middle: inputs of the routed experts' first and second matrix product: "nvfp4-token" is
            `nvfp4.quantise_per_token`, "nvfp4-static" `nvfp4.quantise_static` with w2's `input_global_scale` (§3.2).
            FC1's and FC2's results are rounded to BF16.
        query: q and index q; "e4m3" with unit scale (§3.4).
        kv_read: what attention multiplies with when the pages are NVFP4: the exact product of code and scale, that
            product rounded to E4M3, or the product with E4M3(scale / 8) rounded to E4M3, times 8 (§3.4, "shift 3").
        probability: softmax weights before they meet V: "e4m3" is E4M3(448 * p) / 448 with p = exp(score - maximum);
            their sum is taken before the rounding (§3.4).

    Raises OpRefused for a value that is not one of these.
    """

    name: str
    linear_weights: str | None = None
    linear_activation: str | None = None
    expert_weights: str | None = None
    expert_input: str | None = None
    expert_middle: str | None = None
    query: str | None = None
    kv_read: str = "exact"
    probability: str | None = None

    def __post_init__(self) -> None:
        for field, allowed in _CHOICES.items():
            if getattr(self, field) not in allowed:
                raise OpRefused(
                    f"{field} is {getattr(self, field) or 'none'}",
                    where=f"arithmetic '{self.name}'",
                    expected=" or ".join(value or "none" for value in allowed),
                )

    @property
    def exact(self) -> bool:
        """Nothing is rounded while the model runs."""
        return self.same_numbers(NAMED["exact"])

    def same_numbers(self, other: ArithmeticSpec) -> bool:
        """The two differ at most by name."""
        return all(getattr(self, f.name) == getattr(other, f.name) for f in fields(self) if f.name != "name")


_BF16 = ArithmeticSpec(
    name="w16a16", linear_activation="bfloat16", expert_input="bfloat16", expert_middle="bfloat16", query="bfloat16"
)
_W8A8 = ArithmeticSpec(
    name="w8a8-mxfp8",
    linear_activation="mxfp8",
    expert_weights="nvfp4-to-mxfp8",
    expert_input="mxfp8",
    expert_middle="mxfp8",
    query="bfloat16",
)
_W4A4 = ArithmeticSpec(
    name="w4a4-megamoe",
    linear_activation="mxfp8",
    expert_input="nvfp4-token",
    expert_middle="nvfp4-static",
    query="bfloat16",
)


def _q8kv4(base: ArithmeticSpec, name: str, kv_read: str = "e4m3") -> ArithmeticSpec:
    return replace(base, name=name, query="e4m3", kv_read=kv_read, probability="e4m3")


NAMED: dict[str, ArithmeticSpec] = {
    spec.name: spec
    for spec in (
        ArithmeticSpec(name="exact"),
        _BF16,
        replace(_BF16, name="w4a16"),
        replace(_BF16, name="w4a16-shared-scale", expert_weights="nvfp4-shared-scale"),
        replace(_BF16, name="w4a16-block-fp8", linear_weights="mxfp8-to-block-fp8"),
        _W8A8,
        _q8kv4(_W8A8, "w8a8-q8kv4"),
        _W4A4,
        _q8kv4(_W4A4, "w4a4-q8kv4"),
        _q8kv4(_W4A4, "w4a4-q8kv4-shift3", "e4m3-shift3"),
    )
}
"""Arithmetics by name; "exact" is the default. "w16a16" and "w4a16" compute the same numbers (weights decoded exactly,
activations in BF16); they are names under which backends declare it."""


def parse(name: str) -> ArithmeticSpec:
    """The arithmetic called `name`, for example `w4a4-megamoe` or `w4a16+kv_read=e4m3`.

    After a known name, each `+field=value` replaces a field of `ArithmeticSpec`; the value `none` switches it off. In
    the name, case does not matter, and a space or underscore is a hyphen.

    Raises OpRefused for an unknown name or field, with the nearest one, for a field given twice, and for a value that
    the field does not take.
    """
    base, *changes = name.split("+")
    key = "-".join(base.lower().replace("_", " ").replace("-", " ").split())
    if key not in NAMED:
        raise _unknown("arithmetic", base.strip(), key, list(NAMED))
    if not changes:
        return NAMED[key]
    values: dict[str, str | None] = {}
    for change in changes:
        field, equals, value = (part.strip() for part in change.partition("="))
        if field not in _CHOICES:
            raise _unknown("field of an arithmetic", field, field, list(_CHOICES))
        if not equals or not value:
            raise OpRefused(f"'{change}' has no value", where="arithmetic", expected=f"+{field}=value")
        if field in values:
            raise OpRefused(f"'{field}' is given twice", where="arithmetic", expected="each field once")
        values[field] = None if value == "none" else value
    spelled = "".join(f"+{field}={value or 'none'}" for field, value in sorted(values.items()))
    return replace(NAMED[key], name=key + spelled, **values)  # type: ignore[arg-type]


def _unknown(what: str, given: str, key: str, known: list[str]) -> OpRefused:
    nearest = difflib.get_close_matches(key, known, n=1, cutoff=0.4)
    return OpRefused(
        f"unknown {what} '{given}'",
        where="arithmetic",
        expected=f"one of {', '.join(known)}",
        fix=f"did you mean '{nearest[0]}'?" if nearest else None,
    )
