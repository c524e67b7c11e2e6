"""What a kernel factory gets of the session."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from m31.formats.arithmetic import ArithmeticSpec
from m31.graph import Arithmetic, OpInstance, Refusal, StepClass
from m31_cpu.isa import Isa
from m31_cpu.program import NativeKernel, Runner, Works, native_kernel


@dataclass(frozen=True)
class Binding:
    """Where and for what a kernel is bound.

    Args:
        step: the step class.
        isa: the instruction set.
        runner: what runs programs.
        why: the end of the reason that `m31 explain` shows.
        numerics: the session's arithmetic.
    """

    step: StepClass
    isa: Isa
    runner: Runner
    why: str
    numerics: ArithmeticSpec

    @property
    def threads(self) -> int:
        """How many run a program."""
        return self.runner.crew.count

    def kernel(
        self,
        op: OpInstance,
        works: Works,
        arithmetic: Arithmetic,
        *,
        reason: str = "",
        workspace_bytes: int = 0,
        after: Callable[[Any], None] | None = None,
    ) -> NativeKernel:
        """The kernel of an op instance; `works` as in `NativeKernel`."""
        return native_kernel(
            self.runner,
            op,
            works,
            name=f"m31_cpu.{op.spec.name}.{self.isa.name}",
            arithmetic=arithmetic,
            why=f"{reason}, {self.why}" if reason else self.why,
            workspace_bytes=workspace_bytes,
            after=after,
        )


Factory = Callable[[OpInstance, Binding], "NativeKernel | Refusal"]
Factories = Mapping[str, Factory]
EXACT = Arithmetic("float32", "float32", "float32")


def rows_of(op: OpInstance) -> Any:
    """The dimension that counts the rows of an op's first input."""
    return op.inputs[0].shape[0]  # type: ignore[union-attr]
