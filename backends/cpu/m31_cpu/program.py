"""From bound ops to programs: what a kernel is given, what it touches, and where threads must wait for each other.

A native kernel of the backend turns an op instance and its buffers into `Work`: one or more kernels with their records,
and the memory that each reads and writes. `NativePlan` strings the works of a whole step together, once; threads meet
only where a work touches what another of the same stretch writes. Running a step is then one call.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from m31.graph import BoundGraph, DefaultPlan, Kernel, OpInstance, PlannedCall, StepBatch, StepClass
from m31.ops import TensorType
from m31_cpu.crew import Crew, Program
from m31_cpu.native import Native, packed
from m31_cpu.stored import Stored

Span = tuple[int, int]  # first address, and the one behind the last

DIMS = ("T", "S", "S+1", "R", "P")


def span(tensor: torch.Tensor) -> Span:
    """The memory of a tensor, gaps between its rows included."""
    if tensor.numel() == 0:
        return tensor.data_ptr(), tensor.data_ptr()
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return start, start + (last + 1) * tensor.element_size()


class Sizes:
    """Where kernels find how much of a capacity a step uses: an int64 for each symbolic dimension."""

    def __init__(self) -> None:
        self._cells = (ctypes.c_int64 * len(DIMS))()
        self._fixed: dict[int, ctypes.c_int64] = {}

    def at(self, dim: int | str) -> int:
        """The address of the number behind a dimension."""
        if isinstance(dim, str):
            return ctypes.addressof(self._cells) + 8 * DIMS.index(dim)
        return ctypes.addressof(self._fixed.setdefault(dim, ctypes.c_int64(dim)))

    def set(self, sizes: Mapping[str, int]) -> None:
        """The numbers of the next step."""
        for dim, size in sizes.items():
            self._cells[DIMS.index(dim)] = size


@dataclass(frozen=True, eq=False)
class Work:
    """A kernel with what it is given.

    Args:
        native: the kernel.
        values: of its fields.
        reads, writes: memory that other works may write or read. Weights need not be named: nobody writes them.
        held: what must live as long as the work: buffers behind addresses among the values.
    """

    native: Native
    values: Mapping[str, int | float]
    reads: tuple[Span, ...]
    writes: tuple[Span, ...]
    held: tuple[Any, ...] = ()


Works = Callable[[Sequence[Any], Sequence[Any], Any, "torch.Tensor | None", Sizes], Sequence[Work]]


def meetings(works: Sequence[Work]) -> list[bool]:
    """After which works threads must meet before the next one begins: where it touches what a work since the last
    meeting writes, or writes what one of them reads; and after the last."""
    out: list[bool] = []
    reads: list[Span] = []
    writes: list[Span] = []
    for work in works:
        if _touch(work.reads, writes) or _touch(work.writes, writes) or _touch(work.writes, reads):
            out[-1] = True
            reads, writes = [], []
        reads += work.reads
        writes += work.writes
        out.append(False)
    if out:
        out[-1] = True
    return out


def _touch(some: Sequence[Span], others: Sequence[Span]) -> bool:
    return any(a < d and c < b for a, b in some for c, d in others)


class Runner:
    """Makes programs of works and runs them."""

    def __init__(self, crew: Crew) -> None:
        self.crew = crew

    def program(self, works: Sequence[Work]) -> Program:
        """Works in order; the code of all of them is compiled now."""
        address = self.crew.library.address
        rows = [
            (address(work.native), packed(work.native, work.values), meet)
            for work, meet in zip(works, meetings(works), strict=True)
        ]
        program = Program.of(rows)
        return Program(program.entries, program.count, (program.held, works))


@dataclass(frozen=True, eq=False, kw_only=True)
class NativeKernel(Kernel):
    """A kernel of this backend: besides `run` it says how it becomes part of a whole step.

    Args:
        works: `works(outs, ins, handle, workspace, sizes)`; buffers are whole, at capacity, or as `run` gets them;
            `sizes` says how much of them is used.
        after: looks at what the kernels found once they have run, and raises what is wrong.
    """

    works: Works
    after: Callable[[Any], None] | None = None


def native_kernel(
    runner: Runner,
    op: OpInstance,
    works: Works,
    *,
    name: str,
    arithmetic: Any,
    why: str,
    workspace_bytes: int = 0,
    after: Callable[[Any], None] | None = None,
) -> NativeKernel:
    """A kernel whose `run` is a program of its own, made for the buffers of that call."""

    def run(outs: Sequence[Any], ins: Sequence[Any], handle: Any, workspace: torch.Tensor | None) -> None:
        # Kernels take rows that lie side by side, as the buffers of a plan do; other views are copied.
        sizes = Sizes()
        sizes.set(_used(op, outs, ins))
        given = [x.contiguous() if isinstance(x, torch.Tensor) else x for x in ins]
        made = [torch.empty_like(y, memory_format=torch.contiguous_format) if _gaps(y) else y for y in outs]
        runner.crew.run(runner.program(list(works(made, given, handle, workspace, sizes))))
        for out, value in zip(outs, made, strict=True):
            if out is not value:
                out.copy_(value)
        if after is not None:
            after(handle)

    return NativeKernel(
        name=name, run=run, arithmetic=arithmetic, workspace_bytes=workspace_bytes, why=why, works=works, after=after
    )


def _gaps(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not value.is_contiguous()


def _used(op: OpInstance, outs: Sequence[Any], ins: Sequence[Any]) -> dict[str, int]:
    """What the symbolic dimensions of an op are in the tensors of a call."""
    data = [value for value in op.inputs if value.__class__.__name__ != "WeightDecl"]
    found: dict[str, int] = {}
    for kind, tensor in (*zip(data, ins, strict=True), *zip(op.outputs, outs, strict=True)):
        if isinstance(kind, TensorType):
            found |= {dim: tensor.shape[axis] for axis, dim in enumerate(kind.shape) if isinstance(dim, str)}
    return found


@dataclass(eq=False)
class _Stretch:
    """Native works between two calls of other backends."""

    kernels: list[tuple[NativeKernel, PlannedCall]] = field(default_factory=list)
    program: Program | None = None

    def look(self) -> None:
        """Raise what the first kernel has found that found anything. What others found in the same step is dropped: it
        may follow from the first, and the next step may not need what they found damaged."""
        try:
            for kernel, call in self.kernels:
                if kernel.after is not None:
                    kernel.after(call.handle)
        except BaseException:
            for _, call in self.kernels:
                if isinstance(call.handle, Stored):
                    call.handle.forget()
            raise


class NativePlan(DefaultPlan):
    """A step as one program; calls that other backends serve stand between programs.

    Programs are made for the addresses of the buffers of the first step, and again where those change.
    """

    def __init__(
        self,
        bound: BoundGraph,
        step: StepClass,
        dtypes: Mapping[str, torch.dtype],
        device: torch.device,
        runner: Runner,
    ) -> None:
        super().__init__(bound, step, dtypes, device)
        self._runner, self._sizes = runner, Sizes()
        self._parts: list[_Stretch | PlannedCall] = []
        for call in self.calls:
            if isinstance(call.kernel, NativeKernel):
                if not self._parts or not isinstance(self._parts[-1], _Stretch):
                    self._parts.append(_Stretch())
                part = self._parts[-1]
                assert isinstance(part, _Stretch)
                part.kernels.append((call.kernel, call))
            else:
                self._parts.append(call)
        self._addresses: tuple[int, ...] = ()
        self._cache: Any = None

    def run(self, batch: StepBatch, cache: Any) -> torch.Tensor:
        """See `Plan.run`."""
        size = batch.size
        self._sizes.set({"T": size.tokens, "S": size.seqs, "S+1": size.seqs + 1, "R": size.rows, "P": size.pages})
        addresses = tuple(buffer.data_ptr() for buffer in batch.named().values())
        if addresses != self._addresses or cache is not self._cache:
            self._write(batch, cache)
            self._addresses, self._cache = addresses, cache  # held: another cache could get its place in memory
        narrowed = self.values(batch, cache)
        for part in self._parts:
            if isinstance(part, PlannedCall):
                part.run(narrowed, self.workspace)
            else:
                assert part.program is not None
                self._runner.crew.run(part.program)
                part.look()
        self._extras = {name: narrowed[self._index[value]] for name, value in self._graph.extras.items()}
        return self.logits(narrowed)

    def _write(self, batch: StepBatch, cache: Any) -> None:
        """Make the programs for these buffers."""
        whole = self.values(batch, cache, at_capacity=True)
        for part in self._parts:
            if isinstance(part, _Stretch):
                works: list[Work] = []
                for kernel, call in part.kernels:
                    outs, ins = ([whole[i] for i in places] for places in (call.writes, call.reads))
                    works += kernel.works(outs, ins, call.handle, self.workspace, self._sizes)
                part.program = self._runner.program(works)
