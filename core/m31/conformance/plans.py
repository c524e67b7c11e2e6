"""Rule `fixed-buffers`: a plan allocates when it is made, not when it runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from m31.errors import ContractViolation, OpRefused
from m31.graph import BoundGraph, DefaultPlan, RunKernel, StepBatch, StepClass
from m31.ops import TensorType
from m31.sdk.backend import KVCache, Session

_CLOSE = 1e-3
"""Of the largest logit: two plans run the same kernels, which may sum in another order; a stale result is far off."""


class _Places:
    """Where the values between kernels lay. What lay there is kept, so that no other value can get its place."""

    def __init__(self) -> None:
        self.seen: dict[str, set[int]] = {}
        self._alive: list[Any] = []

    def note(self, name: str, value: Any) -> None:
        """One value of one call."""
        if isinstance(value, torch.Tensor) and value.numel():
            self.seen.setdefault(name, set()).add(value.data_ptr())
            self._alive.append(value)
        elif isinstance(value, np.ndarray) and value.size:
            self.seen.setdefault(name, set()).add(value.ctypes.data)
            self._alive.append(value)

    def watched(self, bound: BoundGraph) -> BoundGraph:
        """The same graph, whose kernels tell where their values lie."""
        made = {
            name
            for call in bound.graph.calls
            for name in call.writes
            if isinstance(bound.graph.types[name], TensorType)
        }
        assigned = dict(bound.assigned)
        for call in bound.graph.calls:
            found = bound.assigned[call.op.name]
            run = self._telling(found.kernel.run, call.writes, call.reads, made)
            assigned[call.op.name] = replace(found, kernel=replace(found.kernel, run=run))
        return BoundGraph(bound.graph, assigned, bound.handles)

    def _telling(self, run: RunKernel, writes: Sequence[str], reads: Sequence[str], made: set[str]) -> RunKernel:
        def told(outs: Sequence[Any], ins: Sequence[Any], weights: Any, workspace: torch.Tensor | None) -> None:
            for names, values in ((writes, outs), (reads, ins)):
                for name, value in zip(names, values, strict=True):
                    if name in made:
                        self.note(name, value)
            if workspace is not None:
                self.note("workspace", workspace)
            run(outs, ins, weights, workspace)

        return told


def check_fixed_buffers(
    session: Session, bound: BoundGraph, step: StepClass, batches: Sequence[StepBatch], cache: KVCache
) -> int:
    """Rule `fixed-buffers`: over several steps of one class, every value between two kernels, the workspace and the
    logits stay where they are, and every run gives what a new straight line (`DefaultPlan`) of the same kernels gives.

    What a kernel allocates for itself is not seen. Neither is what lies between kernels if the plan does not run the
    kernels of the graph that it was made from: then only the place of the logits, and their values, are judged.

    Args:
        session: whose `compile` makes the plan.
        bound: a graph that it serves; its kernels take torch tensors.
        step: the class.
        batches: two steps or more whose results differ.
        cache: pages for them.

    Returns:
        How many values between kernels were seen; 0 if only the logits were judged.

    Raises:
        ContractViolation: names the values that moved, or a run whose logits are not those of its step.
        OpRefused: the batches cannot tell a constant from a result.
    """
    places = _Places()
    plan = session.compile(places.watched(bound), step)
    runs: list[torch.Tensor] = []
    for batch in batches:
        logits = plan.run(batch, cache)
        places.note("logits", logits)
        runs.append(logits.detach().cpu().clone())
    moved = {name: len(at) for name, at in places.seen.items() if len(at) > 1}
    if moved:
        raise ContractViolation(
            "fixed-buffers",
            ", ".join(f"{n} places of {name}" for name, n in list(moved.items())[:4]) + f" in {len(batches)} runs",
            where="plan",
            expected="one: whoever replays a captured plan reads where the first run wrote",
        )
    _require_results(session, bound, step, batches, cache, runs)
    return len(places.seen) - ("logits" in places.seen)


def _require_results(
    session: Session,
    bound: BoundGraph,
    step: StepClass,
    batches: Sequence[StepBatch],
    cache: KVCache,
    runs: Sequence[torch.Tensor],
) -> None:
    wanted = []
    for batch in batches:
        plan = DefaultPlan(bound, step, session.dtypes, session.device)
        wanted.append(plan.run(batch, cache).detach().cpu().clone())
    if len(wanted) < 2 or any(a.shape == b.shape and torch.allclose(a, b) for a, b in pairwise(wanted)):
        raise OpRefused(
            "two steps after each other give the same logits",
            where="check_fixed_buffers",
            expected="two batches or more, with different results",
        )
    for at, (got, want) in enumerate(zip(runs, wanted, strict=True)):
        scale = float(want.abs().max())
        if got.shape != want.shape or not bool((got - want).abs().max() <= _CLOSE * scale):
            raise ContractViolation(
                "fixed-buffers",
                f"the logits of run {at} are not those of its step",
                where="plan",
                expected="what a new plan computes from the same batch",
            )
