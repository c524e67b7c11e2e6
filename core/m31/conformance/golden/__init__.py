"""End-to-end values of the float64 reference for a checkpoint, and a backend's agreement with them (DESIGN.md §7, L3).

python -m m31.conformance.golden write                     # for the bundled nano, under the arithmetic it is made for
python -m m31.conformance.golden check --backend NAME
"""

from __future__ import annotations

from m31.conformance.golden.comparing import Agreement, Sets, Tolerance, compare, faults, open_for
from m31.conformance.golden.values import Golden, Prompt, Recipe, compute, digest, dump, read

__all__ = [
    "Agreement",
    "Golden",
    "Prompt",
    "Recipe",
    "Sets",
    "Tolerance",
    "compare",
    "compute",
    "digest",
    "dump",
    "faults",
    "open_for",
    "read",
]
