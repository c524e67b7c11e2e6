"""Binding a graph to a backend, and the default plan: the bound graph as one straight line over fixed buffers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from m31.errors import NoKernel
from m31.graph.step import StepBatch, StepClass, StepSize
from m31.graph.trace import ModelGraph, OpInstance
from m31.ops import StateType, TensorType

if TYPE_CHECKING:
    from m31.formats.transforms import Loss


@dataclass(frozen=True)
class Arithmetic:
    """What a kernel computes with; the conformance suite derives its bound from this and from nothing else."""

    operands: str  # format of the operands as multiplied, e.g. "float32", "bfloat16", "e2m1*e4m3"
    accumulate: str
    output: str


class WeightHandle(Protocol):
    """Weights of one op instance in a backend's own layout."""

    @property
    def layout_id(self) -> str:
        """Name and version of the layout."""

    @property
    def losses(self) -> Mapping[str, Loss]:
        """What preparing them cost: name of a transform of `m31.formats.transforms` -> measured loss, worst slot.
        Empty if the values are exactly the checkpoint's."""

    @property
    def in_place(self) -> frozenset[str]:
        """Slots whose stored bytes it goes on reading where the checkpoint maps them. Everything else that it was
        given must be free once `prepare` has returned: two copies of the weights do not fit most machines."""

    def dequantise(self) -> Mapping[str, torch.Tensor]:
        """The values that the kernel really uses, slot by slot, in any dtype that holds them exactly. Not all at once:
        the experts of one published layer are 14 GB in float32."""


RunKernel = Callable[[Sequence[Any], Sequence[Any], Any, "torch.Tensor | None"], None]


@dataclass(frozen=True, eq=False, kw_only=True)
class Kernel:
    """A bound kernel.

    Args:
        name: of the kernel, for people: `m31_reference.experts`.
        run: `run(outs, ins, weights, workspace)`; `outs` destinations, `ins` the data and state inputs in the order
            of the op's signature, `weights` the handle or None.
        arithmetic: what it computes with.
        workspace_bytes: scratch that it needs while it runs.
        why: why this one was chosen for this op, step and device, in one line.
    """

    name: str
    run: RunKernel
    arithmetic: Arithmetic
    workspace_bytes: int
    why: str


@dataclass(frozen=True)
class Refusal:
    """Why a backend has no kernel for an op instance."""

    reason: str


@dataclass(frozen=True, eq=False)
class Assigned:
    """Who serves an op instance, and with what.

    Args:
        by: name of the backend.
        kernel: its kernel.
        fallback: the chosen backend's reason for not serving the op itself; None if it does.
    """

    by: str
    kernel: Kernel
    fallback: str | None


class Binder(Protocol):
    """What binding needs of whoever serves the ops (`m31.sdk.Serving`)."""

    name: str

    def assign(self, op: OpInstance, step: StepClass) -> Assigned | Refusal:
        """A kernel for this op at this step class, or the reason why there is none."""


class Handles(Protocol):
    """Where binding gets prepared weights."""

    def handle(self, op: OpInstance, by: str) -> WeightHandle:
        """The weights of an op, prepared by the backend that serves it; prepared once."""


@dataclass(frozen=True, eq=False)
class BoundGraph:
    """A graph with a kernel for every call and the weights of every op that has some."""

    graph: ModelGraph
    assigned: Mapping[str, Assigned]  # by op instance name
    handles: Mapping[str, WeightHandle]  # by op instance name

    @property
    def fallbacks(self) -> Counter[str]:
        """How many calls of which op one run hands to another backend."""
        return Counter(c.op.spec.name for c in self.graph.calls if self.assigned[c.op.name].fallback is not None)


def assign(graph: ModelGraph, binder: Binder, step: StepClass) -> dict[str, Assigned]:
    """A kernel for every op instance, by instance name.

    Raises:
        NoKernel: lists every op that was refused, with the reason.
    """
    assigned: dict[str, Assigned] = {}
    refused: dict[str, str] = {}
    for call in graph.calls:
        found = binder.assign(call.op, step)
        if isinstance(found, Refusal):
            refused[call.op.spec.name] = found.reason
        else:
            assigned[call.op.name] = found
    if refused:
        reasons = ", ".join(f"{op} ({reason})" for op, reason in sorted(refused.items()))
        raise NoKernel(
            f"no kernel for {reasons}", where=f"backend {binder.name}", fix="choose another backend with --backend"
        )
    return assigned


def bind(graph: ModelGraph, binder: Binder, step: StepClass, handles: Handles) -> BoundGraph:
    """Choose every kernel and have the weights of every op prepared.

    Raises:
        NoKernel: see `assign`.
    """
    assigned = assign(graph, binder, step)
    prepared = {
        call.op.name: handles.handle(call.op, assigned[call.op.name].by)
        for call in graph.calls
        if call.op.weights is not None
    }
    return BoundGraph(graph, assigned, prepared)


class Plan(Protocol):
    """A compiled step."""

    def run(self, batch: StepBatch, cache: Any) -> torch.Tensor:
        """Run one step; returns logits [rows, V], valid until the next run."""


class ExtraOutputs(Protocol):
    """What a plan of a graph with `extras` gives besides; only backends that draft make such plans."""

    def extra(self, name: str) -> torch.Tensor:
        """An extra output of the last run, as large as that step was; valid until the next run."""


Buffers = list[Any]


@dataclass(frozen=True, eq=False)
class PlannedCall:
    """One call of a plan; `writes` and `reads` are places in the list that `DefaultPlan.values` makes."""

    kernel: Kernel
    writes: tuple[int, ...]
    reads: tuple[int, ...]
    handle: WeightHandle | None

    def run(self, values: Sequence[Any], workspace: torch.Tensor | None) -> None:
        """Run the kernel on these values."""
        self.kernel.run([values[i] for i in self.writes], [values[i] for i in self.reads], self.handle, workspace)


class DefaultPlan:
    """Straight line over buffers that are allocated once at capacity.

    A value's buffer is reused as soon as its last reader has run. Each run narrows the symbolic dimensions to the
    step's real size, so padding costs nothing and cannot be read; narrowed views are kept for the sizes in use.

    A plan that captures can be made of the same parts: it overrides `run` and takes `values` at capacity.

    Attributes:
        step: the capacities.
        calls: in order.
        workspace: scratch of all kernels, or None where none needs any.
    """

    _KEPT_SIZES = 8  # decode and the last few chunk sizes

    def __init__(
        self, bound: BoundGraph, step: StepClass, dtypes: Mapping[str, torch.dtype], device: torch.device
    ) -> None:
        self.step = step
        self._graph = bound.graph
        names = list(bound.graph.types)
        self._index = {name: i for i, name in enumerate(names)}
        for call in bound.graph.calls:  # a state output is the state itself
            for name, value in zip(call.writes, call.op.outputs, strict=True):
                if isinstance(value, StateType):
                    self._index[name] = self._index["kv"]
        self.calls = tuple(
            PlannedCall(
                bound.assigned[c.op.name].kernel,
                tuple(self._index[n] for n in c.writes),
                tuple(self._index[n] for n in c.reads),
                bound.handles.get(c.op.name),
            )
            for c in bound.graph.calls
        )
        need = max((found.kernel.workspace_bytes for found in bound.assigned.values()), default=0)
        self.workspace = torch.empty(need, dtype=torch.uint8, device=device) if need else None
        self._buffers = self._allocate(dtypes, device)
        self._views: dict[StepSize, Buffers] = {}
        self._extras: dict[str, torch.Tensor] = {}

    def _allocate(self, dtypes: Mapping[str, torch.dtype], device: torch.device) -> dict[str, torch.Tensor]:
        """One buffer per computed value, shared between values whose lives do not overlap."""
        last = {name: i for i, call in enumerate(self._graph.calls) for name in call.reads}
        for output in (self._graph.output, *self._graph.extras.values()):
            last[output] = len(self._graph.calls)
        free: dict[tuple[int, torch.dtype], list[torch.Tensor]] = {}
        buffers: dict[str, torch.Tensor] = {}
        for i, call in enumerate(self._graph.calls):
            for name, value in zip(call.writes, call.op.outputs, strict=True):
                if isinstance(value, TensorType):
                    shape, dtype = self.step.shape(value.shape), dtypes[value.dtype]
                    count = 1
                    for n in shape:
                        count *= n
                    pool = free.get((count, dtype))
                    flat = pool.pop() if pool else torch.empty(count, dtype=dtype, device=device)
                    buffers[name] = flat.view(shape)
            for name in {*call.reads, *call.writes}:
                if name in buffers and last.get(name, i) == i:
                    flat = buffers[name].view(-1)
                    free.setdefault((flat.numel(), flat.dtype), []).append(flat)
        return buffers

    @property
    def buffer_bytes(self) -> int:
        """Bytes of all distinct buffers."""
        return sum({b.data_ptr(): b.numel() * b.element_size() for b in self._buffers.values()}.values())

    def _narrow(self, size: StepSize) -> Buffers:
        views = self._views.get(size)
        if views is None:
            if len(self._views) >= self._KEPT_SIZES:
                self._views.pop(next(iter(self._views)))
            views = [None] * len(self._graph.types)
            for name, buffer in self._buffers.items():
                value = self._graph.types[name]
                assert isinstance(value, TensorType)
                views[self._index[name]] = _narrowed(buffer, value, size)
            self._views[size] = views
        return views

    def values(self, batch: StepBatch, cache: Any, *, at_capacity: bool = False) -> Buffers:
        """What the calls read and write, in the order of the graph's values; without a buffer: None.

        Args:
            batch, cache: as `run` gets them.
            at_capacity: whole buffers, the same memory for every step, padding included; else the used part of each.
        """
        size = (
            StepSize(self.step.tokens, self.step.seqs, self.step.rows, self.step.pages) if at_capacity else batch.size
        )
        values = list(self._narrow(size))
        for name, buffer in (batch.named() if at_capacity else batch.narrowed()).items():
            values[self._index[name]] = buffer
        values[self._index["kv"]] = cache
        return values

    def logits(self, values: Buffers) -> torch.Tensor:
        """The result among `values`."""
        found: torch.Tensor = values[self._index[self._graph.output]]
        return found

    def run(self, batch: StepBatch, cache: Any) -> torch.Tensor:
        """See `Plan.run`."""
        values = self.values(batch, cache)
        for call in self.calls:
            call.run(values, self.workspace)
        self._extras = {name: values[self._index[value]] for name, value in self._graph.extras.items()}
        return self.logits(values)

    def extra(self, name: str) -> torch.Tensor:
        """See `ExtraOutputs.extra`."""
        return self._extras[name]


def _narrowed(buffer: torch.Tensor, value: TensorType, size: StepSize) -> torch.Tensor:
    for axis, dim in enumerate(value.shape):
        if isinstance(dim, str):
            buffer = buffer.narrow(axis, 0, size.within(dim, buffer.shape[axis]))
    return buffer
