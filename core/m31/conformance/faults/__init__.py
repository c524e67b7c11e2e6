"""Backends with one mistake each: each must be caught, or the suite has a gap (DESIGN.md §7).

A `Fault` is data: which mistake, where it was seen, and which item finds it. `FaultyBackend` wraps a healthy backend,
so that a bench takes it like any other.
"""

from __future__ import annotations

from m31.conformance.faults.attention import ATTENTION
from m31.conformance.faults.beyond import BEYOND
from m31.conformance.faults.contract import CONTRACT
from m31.conformance.faults.dense_ops import DENSE
from m31.conformance.faults.fault import Break, Call, Fault, FaultyBackend, FaultySession
from m31.conformance.faults.mixture import MIXTURE
from m31.conformance.faults.paged_ops import PAGED
from m31.conformance.faults.selftest import Caught, Cell, SelfTest, bench_maker, matrix, seen, selftest
from m31.conformance.faults.whole import WHOLE

FAULTS: tuple[Fault, ...] = (*DENSE, *MIXTURE, *PAGED, *ATTENTION, *BEYOND, *CONTRACT, *WHOLE)

__all__ = [
    "FAULTS",
    "Break",
    "Call",
    "Caught",
    "Cell",
    "Fault",
    "FaultyBackend",
    "FaultySession",
    "SelfTest",
    "bench_maker",
    "matrix",
    "seen",
    "selftest",
]
