"""From a graph to plans: weights prepared once per backend that needs them, one plan per step class."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from m31.config import Text
from m31.errors import ContractViolation
from m31.graph import (
    Assigned,
    BoundGraph,
    FusionReport,
    ModelGraph,
    OpInstance,
    Plan,
    StepBatch,
    StepClass,
    WeightHandle,
    fuse,
)
from m31.graph import assign as assign_kernels
from m31.graph import bind as bind_graph
from m31.ops.fused import FUSED
from m31.parallel import WHOLE, Shard
from m31.sdk.backend import LazyTensor
from m31.sdk.serving import Serving

Look = Callable[[OpInstance, Sequence[Any], Sequence[Any], "WeightHandle | None"], None]
"""Sees an op after its kernel has run: the op, what it wrote, what it read (states too), its weights. The tensors are
the plan's buffers: keep copies."""
_KEPT_PLANS = 8
MIN_PAGES = 16  # smallest page-table width of a plan


def bucket(count: int) -> int:
    """The capacity that serves `count`: the next power of two, at least 1."""
    return 1 << max(0, count - 1).bit_length()


class PreparedWeights:
    """Weights as the backends hold them, prepared when they are first asked for.

    Args:
        serving: the sessions.
        tensor: the checkpoint's tensor by canonical name, narrowed to this rank.
        shard: which rank this is.
    """

    def __init__(self, serving: Serving, tensor: Callable[[str], LazyTensor], shard: Shard) -> None:
        self._serving, self._tensor, self._shard = serving, tensor, shard
        self._handles: dict[tuple[str, str, tuple[str, ...]], WeightHandle] = {}
        self._sealed = False

    def slots(self, op: OpInstance) -> dict[str, LazyTensor]:
        """The tensors of an op by slot, unread."""
        assert op.weights is not None
        return {slot: self._tensor(decl.name) for slot, decl in op.weights.slots.items()}

    def handle(self, op: OpInstance, by: str) -> WeightHandle:
        """See `m31.graph.Handles`."""
        key = _key(op, by)
        if key not in self._handles:
            if self._sealed:
                raise ContractViolation(
                    "prepared-at-load",
                    f"needs the weights of {op.name} ({op.spec.name}), which were neither counted nor prepared",
                    where=f"backend {by}",
                    expected="the same ops served at every step class of one kind (decode, verify, mixed)",
                )
            self._handles[key] = self._serving.sessions[by].prepare(op, self.slots(op), self._shard)
        return self._handles[key]

    def seal(self) -> None:
        """Everything is prepared: what is asked for from now on and is not there was not in the memory budget."""
        self._sealed = True

    def bytes_needed(self, assigned: Iterable[tuple[OpInstance, Assigned]]) -> int:
        """What preparing the weights of these will allocate beside their files."""
        seen: set[tuple[str, str, tuple[str, ...]]] = set()
        total = 0
        for op, found in assigned:
            if op.weights is None:
                continue
            key = _key(op, found.by)
            if key not in seen:
                seen.add(key)
                total += self._serving.sessions[found.by].weight_bytes(op, self.slots(op))
        return total


def _key(op: OpInstance, by: str) -> tuple[str, str, tuple[str, ...]]:
    """What a handle is for: a backend, a kind of op (whose layout of the weights is its own), and the tensors."""
    return by, op.spec.name, tuple(decl.name for decl in op.slots.values())


class Compiler:
    """Plans by step class, the least recently used one dropped when there are too many.

    Args:
        serving: who serves the ops.
        graph: the traced model of this rank.
        text: the description that it was traced from, or None for a graph in which nothing is fused.
        weights: its weights.
        batch: what holds the buffers of a step.
    """

    def __init__(
        self,
        serving: Serving,
        graph: ModelGraph,
        text: Text | None,
        weights: PreparedWeights,
        batch: type[StepBatch] = StepBatch,
    ) -> None:
        self.serving, self.graph, self.weights, self._text, self._batch = serving, graph, weights, text, batch
        self._plans: OrderedDict[StepClass, tuple[Plan, StepBatch, Mapping[str, int]]] = OrderedDict()
        self._look: Look | None = None

    def watch(self, look: Look | None) -> None:
        """Have `look` called after every kernel from now on, or, with None, no longer; plans are made anew.

        It sees what a backend's plan runs kernel by kernel, as the default plan does, and nothing of a captured plan.
        """
        self._look = look
        self._plans.clear()

    def assigned(self, steps: Iterable[StepClass]) -> Iterator[tuple[OpInstance, Assigned]]:
        """Every op instance of these step classes with who serves it; nothing is prepared."""
        for step in steps:
            graph, _ = self.fused(step)
            found = assign_kernels(graph, self.serving, step)
            yield from ((call.op, found[call.op.name]) for call in graph.calls)

    def fused(self, step: StepClass) -> tuple[ModelGraph, FusionReport]:
        """The graph with the fused ops that the backend wants and has a kernel for at this step class."""
        if self._text is None:
            return self.graph, FusionReport(())
        unknown = [name for name in self.serving.session.fusions() if name not in FUSED]
        if unknown:
            raise ContractViolation(
                "opened",
                f"wants the fusion '{unknown[0]}'",
                where=f"backend {self.serving.name}",
                expected=" or ".join(FUSED),
            )
        return fuse(
            self.graph, self.serving.session.fusions(), lambda op: self.serving.wants(op, step), text=self._text
        )

    def bind(self, step: StepClass) -> BoundGraph:
        """The fused graph with kernels and prepared weights."""
        return bind_graph(self.fused(step)[0], self.serving, step, self.weights)

    def plan(self, step: StepClass) -> tuple[Plan, StepBatch, Mapping[str, int]]:
        """The plan of a step class, its buffers, and how many calls of which op it hands to another backend."""
        if step not in self._plans:
            bound, session = self.bind(step), self.serving.session
            if self._look is not None:
                bound = _watched(bound, self._look)
            self._plans[step] = (
                session.compile(bound, step),
                self._batch.allocate(step, session.device),
                bound.fallbacks,
            )
            if len(self._plans) > _KEPT_PLANS:
                self._plans.popitem(last=False)
        self._plans.move_to_end(step)
        return self._plans[step]


def _watched(bound: BoundGraph, look: Look) -> BoundGraph:
    """The same graph with kernels that are looked at."""

    def watched(op: OpInstance, found: Assigned) -> Assigned:
        run = found.kernel.run

        def looked_at(outs: Sequence[Any], ins: Sequence[Any], weights: Any, workspace: Any) -> None:
            run(outs, ins, weights, workspace)
            look(op, outs, ins, weights)

        return replace(found, kernel=replace(found.kernel, run=looked_at))

    assigned = {call.op.name: watched(call.op, bound.assigned[call.op.name]) for call in bound.graph.calls}
    return replace(bound, assigned=assigned)


def whole(serving: Serving, tensor: Callable[[str], LazyTensor]) -> PreparedWeights:
    """The weights of one rank that has everything."""
    return PreparedWeights(serving, tensor, WHOLE)
