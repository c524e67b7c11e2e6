"""A step without torch: one block of memory, planned once, and the ops in a straight line over views into it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from m31.graph import BoundGraph, StepBatch, StepClass, StepSize
from m31.ops import StateType, TensorType
from m31_numpy.codes import Array

DTYPES = {"model": np.float32, "accum": np.float32, "int64": np.int64}  # what the op dtypes are here
_ALIGN = 64


class NumpyPlan:
    """See `m31.graph.Plan`. Every value has its place in one array at the step class's capacity; values whose lives do
    not overlap share it. A run narrows the places to the step's real size and calls the kernels in order."""

    def __init__(self, bound: BoundGraph, step: StepClass) -> None:
        graph = bound.graph
        self._types, self._output = graph.types, graph.output
        self._calls = [
            (bound.assigned[call.op.name].kernel.run, call.reads, call.writes, bound.handles.get(call.op.name))
            for call in graph.calls
        ]
        # A state that an op returns is the cache itself, under another name.
        self._states = [n for n, t in graph.types.items() if isinstance(t, StateType)]
        shapes = {
            name: (step.shape(t.shape), np.dtype(DTYPES[t.dtype]))
            for call in graph.calls
            for name in call.writes
            if isinstance(t := graph.types[name], TensorType)
        }
        lives = _lives(graph.calls, graph.output)
        sizes = {name: math.prod(shape) * dtype.itemsize for name, (shape, dtype) in shapes.items()}
        places, total = _places({name: (*lives[name], sizes[name]) for name in shapes})
        self._arena = np.empty(total, np.uint8)
        self._values: dict[str, Array] = {
            name: self._arena[places[name] :][: sizes[name]].view(dtype).reshape(shape)
            for name, (shape, dtype) in shapes.items()
        }
        self._size: StepSize | None = None
        self._views: dict[str, Any] = {}

    def run(self, batch: StepBatch, cache: Any) -> torch.Tensor:
        """See `m31.graph.Plan.run`."""
        if batch.size != self._size:
            self._views = {name: self._narrowed(name, array, batch.size) for name, array in self._values.items()}
            self._size = batch.size
        env = dict(self._views)
        env |= {name: self._narrowed(name, np.asarray(t), batch.size) for name, t in batch.named().items()}
        env |= dict.fromkeys(self._states, cache)
        for run, reads, writes, handle in self._calls:
            run([env[n] for n in writes], [env[n] for n in reads], handle, None)
        return torch.from_numpy(env[self._output])

    def _narrowed(self, name: str, array: Array, size: StepSize) -> Array:
        dims = self._types[name].shape  # type: ignore[union-attr]
        return array[tuple(slice(size.within(dim, n)) for dim, n in zip(dims, array.shape, strict=True))]


def _lives(calls: Any, output: str) -> dict[str, tuple[int, int]]:
    """Name -> index of the call that writes it, index of the last that reads it."""
    lives: dict[str, tuple[int, int]] = {}
    for i, call in enumerate(calls):
        lives |= dict.fromkeys(call.writes, (i, i))
        lives |= {name: (lives[name][0], i) for name in call.reads if name in lives}
    lives[output] = (lives[output][0], len(calls))
    return lives


def _places(lives: Mapping[str, tuple[int, int, int]]) -> tuple[dict[str, int], int]:
    """Name -> offset of a block that no value alive at the same time overlaps, and the bytes of all; largest first.

    Args:
        lives: name -> (first call, last call, bytes).
    """
    places: dict[str, int] = {}
    taken: list[tuple[int, int, int, int]] = []  # offset, end, first, last
    for name, (first, last, size) in sorted(lives.items(), key=lambda item: -item[1][2]):
        at = 0
        for start, end, born, dead in sorted(taken):
            if born <= last and first <= dead:
                if at + size <= start:
                    break
                at = max(at, end)
        places[name] = at
        taken.append((at, at + -(-size // _ALIGN) * _ALIGN, first, last))
    return places, max((end for _, end, _, _ in taken), default=0)
