"""The plan of a Triton session: its launches are recorded in the first run and replayed in every other one.

Launches work at capacity, on whole buffers, and skip padding by themselves. What falls back on another backend runs
between the recorded parts, on views of the same buffers that are narrowed to the step: it must not see padding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from m31.graph import BoundGraph, DefaultPlan, PlannedCall, StepBatch, StepClass
from m31.sdk import KVCache
from m31_triton.capture import Capture, Pointer, frozen
from m31_triton.errors import CaptureMismatch
from m31_triton.launch import Launch, Runner

LaunchAll = Callable[[Runner, Sequence[Any], Sequence[Any], Any, "Tensor | None"], None]


@dataclass(frozen=True, eq=False)
class Launched:
    """The `run` of a kernel that does nothing but launch, so that it can be recorded.

    Args:
        run: what launches where nothing is recorded.
        launch: `launch(run, outs, ins, weights, workspace)` launches with any runner.
    """

    run: Runner
    launch: LaunchAll

    def __call__(self, outs: Sequence[Any], ins: Sequence[Any], weights: Any, workspace: Tensor | None) -> None:
        """See `m31.graph.RunKernel`."""
        self.launch(self.run, outs, ins, weights, workspace)


class CapturedPlan(DefaultPlan):
    """Recorded launches, and calls of other backends between them.

    Buffers are those of the default plan, at the capacity of the step class. Between two runs only the contents and the
    size of the batch may change.

    Args:
        bound, step, dtypes, device: as for `DefaultPlan`.
        run: what executes a launch, recorded or not.
    """

    def __init__(
        self,
        bound: BoundGraph,
        step: StepClass,
        dtypes: Mapping[str, torch.dtype],
        device: torch.device,
        run: Runner,
    ) -> None:
        super().__init__(bound, step, dtypes, device)
        self._parts = [
            (Capture(run) if launched else None, tuple(calls)) for launched, calls in groupby(self.calls, _is_launched)
        ]
        self._buffers_given: Mapping[str, Pointer] = {}

    @property
    def launches(self) -> tuple[Launch, ...]:
        """What is recorded so far, in order."""
        return tuple(launch for capture, _ in self._parts if capture for launch in capture.launches)

    def run(self, batch: StepBatch, cache: KVCache) -> Tensor:
        """See `Plan.run`. Recorded launches read the buffers of the batch and the cache of the run that recorded them.

        Raises:
            CaptureMismatch: the batch or the cache has other buffers than then, a recorded tensor has been given other
                memory, an argument of a recorded launch has changed, or a kernel does more than launching.
        """
        self._require_same(batch, cache)
        used = self.values(batch, cache)
        for capture, calls in self._parts:
            if capture is None:
                for call in calls:
                    call.run(used, self.workspace)
            elif capture.recorded:
                capture.replay()
            else:
                self._launch(capture.record(), calls, batch, cache)
        return self.logits(used)

    def check(self, batch: StepBatch, cache: KVCache) -> None:
        """Compare what would be launched now with what is recorded; nothing runs.

        Raises:
            CaptureMismatch: the first launch that differs, and the argument, the grid or the option in which it does.
        """
        for capture, calls in self._parts:
            if capture is not None:
                self._launch(capture.check(), calls, batch, cache)

    def _launch(
        self, under: AbstractContextManager[Runner], calls: Sequence[PlannedCall], batch: StepBatch, cache: KVCache
    ) -> None:
        values = self.values(batch, cache, at_capacity=True)
        with under as run:
            for call in calls:
                assert isinstance(call.kernel.run, Launched)
                outs, ins = [values[i] for i in call.writes], [values[i] for i in call.reads]
                call.kernel.run.launch(run, outs, ins, call.handle, self.workspace)

    def _require_same(self, batch: StepBatch, cache: KVCache) -> None:
        now = {f"batch.{name}": frozen(tensor) for name, tensor in batch.named().items()}
        now |= {f"pages {name}": frozen(tensor) for name, tensor in cache.components().items()}
        if not any(capture and capture.recorded for capture, _ in self._parts):
            self._buffers_given = now
        before = self._buffers_given
        for name in sorted(before.keys() | now.keys()):
            if before.get(name) != now.get(name):
                raise CaptureMismatch(
                    f"{name}: {now.get(name, 'absent')}",
                    where="captured plan",
                    expected=f"as recorded: {before.get(name, 'absent')}",
                    fix="refill the batch that the plan was first run with, and keep its cache",
                )


def _is_launched(call: PlannedCall) -> bool:
    return isinstance(call.kernel.run, Launched)
