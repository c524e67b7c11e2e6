"""Opening the CPU backend, choosing its kernels, handing them the checkpoint's own bytes."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch

from m31.errors import BackendRefused
from m31.formats.arithmetic import NAMED, ArithmeticSpec
from m31.graph import BoundGraph, Kernel, OpInstance, Plan, Refusal, Shard, StepClass
from m31.sdk import Backend, KVLayout, KVSpec, LazyTensor, Session, host_memory_free, this_machine
from m31_cpu.binding import Binding, Factories
from m31_cpu.crew import Crew, thread_count
from m31_cpu.held import hold
from m31_cpu.isa import choose
from m31_cpu.kernels.attention import ATTENTION
from m31_cpu.kernels.experts import EXPERTS
from m31_cpu.kernels.insert import INSERT
from m31_cpu.kernels.linear import LINEAR
from m31_cpu.kernels.rows import ROWS
from m31_cpu.kernels.scores import SCORES
from m31_cpu.kernels.select import SELECT
from m31_cpu.kernels.table import TABLES
from m31_cpu.native import Library
from m31_cpu.pages import CpuLayout
from m31_cpu.program import NativePlan, Runner
from m31_cpu.stored import copied_bytes, stored

FACTORIES: Factories = {**ATTENTION, **EXPERTS, **INSERT, **LINEAR, **ROWS, **SCORES, **SELECT, **TABLES}
_VECTORS = ("gemma_rmsnorm", "head_rmsnorm", "confidence")  # ops whose weights are held


class CpuSession(Session):
    """Everything between ops is float32. What an op has no native kernel for falls back as the manifest says."""

    def __init__(self, numerics: ArithmeticSpec) -> None:
        self.device, self.numerics = torch.device("cpu"), numerics
        self.dtypes = {"model": torch.float32, "accum": torch.float32, "int64": torch.int64}
        self.isa, reason = choose(this_machine().cpu.flags)
        self.runner = Runner(Crew(thread_count(), Library(self.isa, report=_Told())))
        self._why = f"{self.isa.name} ({reason}), threads: {self.runner.crew.count}"

    def kernel(self, op: OpInstance, step: StepClass) -> Kernel | Refusal:
        """A native kernel, if there is one for this instance."""
        factory = FACTORIES.get(op.spec.name)
        if factory is None:
            return Refusal("no native kernel in this release")
        return factory(op, Binding(step, self.isa, self.runner, self._why, self.numerics))

    def prepare(self, op: OpInstance, slots: Mapping[str, LazyTensor], shard: Shard) -> Any:
        """Vectors are held in float32; matrices stay where the checkpoint has them."""
        if op.spec.name in _VECTORS:
            return hold(slots)
        if op.spec.name in FACTORIES:
            return stored(slots, self.isa)
        raise BackendRefused(f"op {op.name} has no weights here", where="backend cpu")

    def kv_layout(self, spec: KVSpec) -> KVLayout:
        """Pages of this backend's own, in every format that the manifest lists."""
        return CpuLayout(spec)

    def memory_free(self) -> int:
        """What the host has free within its control group."""
        return host_memory_free()

    def weight_bytes(self, op: OpInstance, slots: Mapping[str, LazyTensor]) -> int:
        """Copies of small vectors, and of what lies misaligned in its file; usually nothing else."""
        if op.spec.name in _VECTORS:
            return sum(4 * _elements(tensor.shape) for tensor in slots.values())
        return copied_bytes(slots)

    def compile(self, graph: BoundGraph, step: StepClass) -> Plan:
        """The whole step as one native program, see `NativePlan`."""
        return NativePlan(graph, step, self.dtypes, self.device, self.runner)


def _elements(shape: tuple[int, ...]) -> int:
    count = 1
    for n in shape:
        count *= n
    return count


class _Told:
    """Shows on a terminal what is compiled, once there is something: it happens at first use of a machine only."""

    def __init__(self) -> None:
        self._count = 0

    def __call__(self, name: str) -> None:
        self._count += 1
        if sys.stderr.isatty():
            told = f"\r\033[Kcompiling kernels for this processor, once: {self._count} ({name})\033[K\r"
            sys.stderr.write(told)
            sys.stderr.flush()


class CpuBackend(Backend):
    """See the package docstring."""

    def open(
        self,
        *,
        device: str | None,
        dtype: str,
        rank: int,
        world: int,
        arithmetic: ArithmeticSpec = NAMED["exact"],
        options: Mapping[str, int] | None = None,
    ) -> CpuSession:
        """See `Backend.open`. Takes no options: weights are read in place, so there is nothing to keep decoded."""
        if device not in (None, "cpu"):
            raise BackendRefused(f"device '{device}' is not served", where="backend cpu", expected="cpu")
        if world != 1:
            raise BackendRefused(f"a world of {world} ranks is not served", where="backend cpu", expected="1")
        return CpuSession(arithmetic)
