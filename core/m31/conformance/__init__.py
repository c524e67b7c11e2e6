"""Whether a backend keeps the contract and computes the model (DESIGN.md §7).

Names are resolved on first use (PEP 562): the plugin of pytest and the programs that read reports need no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
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

if not TYPE_CHECKING:  # hidden from type checkers, so that a misspelt name is an error for them

    def __getattr__(name: str) -> object:
        if name not in __all__:
            raise AttributeError(f"module 'm31.conformance' has no attribute '{name}'")
        home = "bounds" if name in ("bound", "roundoff") else "contract"
        return getattr(import_module(f"m31.conformance.{home}"), name)

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
