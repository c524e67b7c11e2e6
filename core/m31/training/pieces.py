"""A batch in pieces, each computed by one thread on one core.

Cores share pieces, not products: two threads inside each product would wait for each other thousands of times per step,
which costs most of the speed wherever another process runs beside the training. Gradients are added in the order of
the pieces, so that the result does not depend on the number of threads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType

import torch

from m31.training.data import Batch
from m31.training.task import Piece, Sum, Task


class Pieces:
    """Computes losses and gradients of batches. Use it as a context: it holds threads, and sets torch to one each.

    Args:
        task: what computes.
        threads: pieces at a time.
        micro_tokens: a piece is whole sequences up to this many tokens, at least one.
        stopped: once set, no new piece begins.
    """

    def __init__(self, task: Task, *, threads: int, micro_tokens: int, stopped: threading.Event) -> None:
        self.task, self.micro_tokens, self.stopped = task, micro_tokens, stopped
        self._threads, self._before = threads, 1

    def __enter__(self) -> Pieces:
        self._before = torch.get_num_threads()
        torch.set_num_threads(1)
        self._pool = ThreadPoolExecutor(self._threads, initializer=torch.set_num_threads, initargs=(1,))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown(cancel_futures=True)
        torch.set_num_threads(self._before)

    def gradient(self, step: int, batch: Batch) -> Sum | None:
        """Loss and gradient of the batch of a step; None if it was stopped before the end."""
        return self._total(self.task.gradient, list(self._cut(step, batch)))

    def measure(self, batches: Sequence[Batch]) -> Sum | None:
        """Loss of validation batches, without gradients; None if it was stopped before the end."""
        return self._total(
            self.task.measure, [piece for at, batch in enumerate(batches) for piece in self._cut(-1 - at, batch)]
        )

    def _cut(self, step: int, batch: Batch) -> Iterator[Piece]:
        tokens, targets = batch
        rows = max(1, self.micro_tokens // tokens.shape[1])
        for start in range(0, len(tokens), rows):
            yield Piece(tokens[start : start + rows], targets[start : start + rows], batch, step, start)

    def _total(self, compute: Callable[[Piece], Sum], pieces: list[Piece]) -> Sum | None:
        """Added in the order of the pieces, whichever is ready first."""

        def run(piece: Piece) -> Sum | None:
            return None if self.stopped.is_set() else compute(piece)

        whole = Sum()
        for found in self._pool.map(run, pieces):
            if found is None:
                return None
            whole.add(found)
        return whole
