"""Whether a backend keeps the contract (DESIGN.md §7). So far: a check for each rule that no type can state."""

from __future__ import annotations

from m31.conformance.bounds import bound, roundoff
from m31.conformance.contract import (
    RULES,
    Checked,
    check_fixed_buffers,
    check_layout_id,
    check_linear_arithmetic,
    check_losses,
    check_op,
    check_ops,
    check_release,
)

__all__ = [
    "RULES",
    "Checked",
    "bound",
    "check_fixed_buffers",
    "check_layout_id",
    "check_linear_arithmetic",
    "check_losses",
    "check_op",
    "check_ops",
    "check_release",
    "roundoff",
]
