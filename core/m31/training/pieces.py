"""A batch in pieces, each computed by one thread on one core.

Cores share pieces, not products: two threads inside each product would wait for each other thousands of times per step,
which costs most of the speed wherever another process runs beside the training. Gradients are added in the order of
the pieces, so that the result does not depend on the number of threads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import TracebackType
from typing import TypeVar

import torch
from torch import Tensor

from m31.training.data import Batch
from m31.training.model import TrainedText

R = TypeVar("R")


@dataclass
class Sum:
    """Over a batch.

    Attributes:
        loss, kl: sums over its tokens, nats.
        load: tokens that each expert got, by layer.
        grads: of the mean loss, by the names of `Parameters.masters`.
    """

    loss: float = 0.0
    kl: float = 0.0
    load: dict[int, Tensor] = field(default_factory=dict)
    grads: dict[str, Tensor] = field(default_factory=dict)

    def add(self, other: Sum) -> None:
        """Add a piece."""
        self.loss += other.loss
        self.kl += other.kl
        for layer, count in other.load.items():
            self.load[layer] = self.load[layer] + count if layer in self.load else count
        for name, grad in other.grads.items():
            if name in self.grads:
                self.grads[name] += grad
            else:
                self.grads[name] = grad


class Pieces:
    """Computes losses and gradients of batches. Use it as a context: it holds threads, and sets torch to one each.

    Args:
        model: what computes.
        threads: pieces at a time.
        micro_tokens: a piece is whole sequences up to this many tokens, at least one.
        index_weight: factor of the index branch's divergence.
        stopped: once set, no new piece begins.
    """

    def __init__(
        self, model: TrainedText, *, threads: int, micro_tokens: int, index_weight: float, stopped: threading.Event
    ) -> None:
        self.model, self.micro_tokens, self.index_weight, self.stopped = model, micro_tokens, index_weight, stopped
        self._leaves = {name: leaf for name, leaf in model.parameters.leaves.items() if leaf.requires_grad}
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

    def gradient(self, tokens: Tensor, targets: Tensor) -> Sum | None:
        """Loss and gradient of a batch [B, T] (targets -1: no loss); None if it was stopped before the end."""
        count = max(1, int((targets >= 0).sum()))

        def compute(piece: Batch) -> Sum:
            out = self.model(piece[0])
            loss = self.model.loss(out.hidden, piece[1].flatten())
            total = loss / count + self.index_weight * out.kl / tokens.numel()
            grads = torch.autograd.grad(total, list(self._leaves.values()))
            named = dict(zip(self._leaves, grads, strict=True))
            return Sum(float(loss.detach()), float(out.kl.detach()), out.load, named)

        whole = Sum()
        for piece in self._each(compute, list(self._cut(tokens, targets))):
            if piece is None:
                return None
            whole.add(piece)
        return whole

    def loss(self, batches: Sequence[Batch]) -> float | None:
        """Mean loss of batches in nats per target, without gradients; None if it was stopped before the end."""

        def compute(piece: Batch) -> float:
            with torch.no_grad():
                return float(self.model.loss(self.model(piece[0]).hidden, piece[1].flatten()))

        total = 0.0
        for value in self._each(compute, [piece for batch in batches for piece in self._cut(*batch)]):
            if value is None:
                return None
            total += value
        return total / max(1, sum(int((targets >= 0).sum()) for _, targets in batches))

    def _cut(self, tokens: Tensor, targets: Tensor) -> Iterator[Batch]:
        rows = max(1, self.micro_tokens // tokens.shape[1])
        for start in range(0, len(tokens), rows):
            yield tokens[start : start + rows], targets[start : start + rows]

    def _each(self, compute: Callable[[Batch], R], pieces: list[Batch]) -> Iterator[R | None]:
        """Results in the order of the pieces, whichever is ready first."""

        def run(piece: Batch) -> R | None:
            return None if self.stopped.is_set() else compute(piece)

        yield from self._pool.map(run, pieces)
