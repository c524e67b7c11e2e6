"""Binding a graph to a backend, and the default plan: the bound graph as one straight line over fixed buffers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from m31.errors import GraphError, NoKernel
from m31.graph.step import StepBatch, StepClass, StepSize
from m31.graph.trace import ModelGraph, OpInstance
from m31.ops import StateType, TensorType


@dataclass(frozen=True)
class Arithmetic:
    """What a kernel computes with; the conformance suite derives its bound from this and from nothing else."""

    operands: str  # format of the operands as multiplied, e.g. "float32", "bfloat16", "e2m1*e4m3"
    accumulate: str
    output: str


class WeightHandle(Protocol):
    """Weights of one op instance in a backend's own layout."""

    layout_id: str

    def dequantise(self) -> dict[str, torch.Tensor]:
        """The values that the kernel really uses, slot by slot, in float64 or the exact storage dtype."""


RunKernel = Callable[[Sequence[Any], Sequence[Any], Any, "torch.Tensor | None"], None]


@dataclass(frozen=True, eq=False)
class Kernel:
    """A bound kernel: `run(outs, ins, weights, workspace)`, `outs` destinations, `ins` the data and state inputs."""

    run: RunKernel
    arithmetic: Arithmetic
    workspace_bytes: int


@dataclass(frozen=True)
class Refusal:
    """Why a backend has no kernel for an op instance."""

    reason: str


class Binder(Protocol):
    """The part of a session that binding needs."""

    def kernel(self, op: OpInstance, step: StepClass) -> Kernel | Refusal:
        """A kernel for this op at this step class, or the reason why not."""


@dataclass(frozen=True, eq=False)
class BoundGraph:
    """A graph with a kernel for every call and the weights of every op that has some."""

    graph: ModelGraph
    kernels: Mapping[str, Kernel]  # by op instance name
    handles: Mapping[str, WeightHandle]  # by weight name


def bind(
    graph: ModelGraph, session: Binder, step: StepClass, handles: Mapping[str, WeightHandle], who: str
) -> BoundGraph:
    """Ask the session for every kernel.

    Raises:
        NoKernel: lists every op that the backend refused, with its reason.
    """
    kernels: dict[str, Kernel] = {}
    refused: dict[str, str] = {}
    for call in graph.calls:
        found = session.kernel(call.op, step)
        if isinstance(found, Refusal):
            refused[call.op.spec.name] = found.reason
        else:
            kernels[call.op.name] = found
    if refused:
        reasons = ", ".join(f"{op} ({reason})" for op, reason in sorted(refused.items()))
        raise NoKernel(f"no kernel for {reasons}", where=f"backend {who}", fix="choose another backend with --backend")
    missing = sorted(name for name in graph.weights if name not in handles)
    if missing:
        raise GraphError(f"{len(missing)} weights were not prepared, e.g. '{missing[0]}'")
    return BoundGraph(graph, kernels, handles)


class Plan(Protocol):
    """A compiled step."""

    def run(self, batch: StepBatch, cache: Any) -> torch.Tensor:
        """Run one step; returns logits [rows, V], valid until the next run."""


Buffers = list[Any]


class DefaultPlan:
    """Straight line over buffers that are allocated once at capacity.

    A value's buffer is reused as soon as its last reader has run. Each run narrows the symbolic dimensions to the
    step's real size, so padding costs nothing and cannot be read; narrowed views are kept for the sizes in use.
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
        self._line = [
            (
                bound.kernels[c.op.name].run,
                tuple(self._index[n] for n in c.writes),
                tuple(self._index[n] for n in c.reads),
                bound.handles[c.op.weights.name] if c.op.weights is not None else None,
            )
            for c in bound.graph.calls
        ]
        need = max((bound.kernels[c.op.name].workspace_bytes for c in bound.graph.calls), default=0)
        self._workspace = torch.empty(need, dtype=torch.uint8, device=device) if need else None
        self._buffers = self._allocate(dtypes, device)
        self._views: dict[StepSize, Buffers] = {}

    def _allocate(self, dtypes: Mapping[str, torch.dtype], device: torch.device) -> dict[str, torch.Tensor]:
        """One buffer per computed value, shared between values whose lives do not overlap."""
        last = {name: i for i, call in enumerate(self._graph.calls) for name in call.reads}
        last[self._graph.output] = len(self._graph.calls)
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

    def run(self, batch: StepBatch, cache: Any) -> torch.Tensor:
        """See `Plan.run`."""
        env = list(self._narrow(batch.size))
        for name, buffer in batch.named().items():
            value = self._graph.types[name]
            assert isinstance(value, TensorType)
            env[self._index[name]] = _narrowed(buffer, value, batch.size)
        env[self._index["kv"]] = cache
        for run, writes, reads, handle in self._line:
            run([env[i] for i in writes], [env[i] for i in reads], handle, self._workspace)
        logits: torch.Tensor = env[self._index[self._graph.output]]
        return logits


def _narrowed(buffer: torch.Tensor, value: TensorType, size: StepSize) -> torch.Tensor:
    for axis, dim in enumerate(value.shape):
        if isinstance(dim, str):
            buffer = buffer.narrow(axis, 0, size.within(dim, buffer.shape[axis]))
    return buffer
