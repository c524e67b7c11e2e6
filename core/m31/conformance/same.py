"""Two runs of the same tokens by the same kernels: equal bit for bit where that is declared, else within the bound."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from m31.conformance.item import Evidence, Verdict
from m31.errors import ContractViolation

FINE = 1e-3
"""Slack below which no choice of experts or blocks is expected to change."""
MAY_CHANGE = 0.1
"""The part of the rows that may be off where the slack is larger: choices of experts and blocks are not continuous."""


def require_same(
    got: Any, want: Any, facts: Mapping[str, Any], *, bitwise: bool, where: str, rule: str = "order"
) -> Verdict:
    """Logits of the same tokens.

    Args:
        got, want: [rows, V].
        facts: `slack`, see `m31.conformance.rig.Rig.slack`.
        bitwise: they are declared to be equal.
        where: for messages.
        rule: that is broken where they are too far off.

    Raises:
        ContractViolation: a row is not finite, not equal though declared so, or further off than the slack; or
            different rows are as near as that, so that nothing would be said.
    """
    got, want = np.asarray(got), np.asarray(want)
    if got.shape != want.shape or not np.isfinite(got).all() or not np.isfinite(want).all():
        raise ContractViolation(
            rule,
            f"gives logits {list(got.shape)} and {list(want.shape)}, of which {int((~np.isfinite(got)).sum())} and"
            f" {int((~np.isfinite(want)).sum())} are not finite",
            where=where,
            expected="numbers; poisoned memory reads as NaN",
        )
    off = np.abs(got.astype(np.float64) - want).max(-1)
    largest = float(np.abs(want).max())
    allowed = facts["slack"] * largest
    worst = int(off.argmax())
    place = f"row {worst} of {len(off)}"
    if bitwise:
        if not np.array_equal(got, want):
            raise ContractViolation(
                "determinism",
                f"declares equal bits, and {int((off > 0).sum())} of {len(off)} rows differ, one by {off[worst]:.3g}",
                where=where,
                expected="the same bits, or a manifest that does not promise them",
            )
        return Verdict(margin=0.0, max_error=0.0, allowed=0.0, where=place, note="equal bit for bit, as declared")
    strays = int((off > allowed).sum())
    if strays > (0 if facts["slack"] < FINE else int(MAY_CHANGE * len(off))):
        raise ContractViolation(
            rule,
            f"differs by {off[worst]:.3g} in {place}, and in {strays} rows by more than allowed",
            where=where,
            expected=f"at most {allowed:.3g}, {facts['slack']:.2g} of the largest logit",
        )
    if len(want) > 1 and not (np.abs(np.diff(want, axis=0)).max(-1) > allowed).all():
        raise ContractViolation(
            rule,
            "different tokens give logits that are as near as the same tokens may be",
            where=where,
            expected=f"more than {allowed:.3g} between them, or a declared arithmetic that says something",
        )
    known = off[off <= allowed]
    return Verdict(
        margin=float(known.max() / allowed) if allowed and len(known) else 0.0,
        max_error=float(off[worst]),
        allowed=float(allowed),
        where=place,
        note=f"{strays} rows with another choice of experts or blocks" if strays else "",
    )


def judge_pair(where: str, *, bitwise: bool, rule: str = "order") -> Any:
    """A judge of evidence with the arrays `got` and `want`."""

    def judge(evidence: Evidence) -> Verdict:
        arrays = evidence.arrays
        return require_same(arrays["got"], arrays["want"], evidence.facts, bitwise=bitwise, where=where, rule=rule)

    return judge
