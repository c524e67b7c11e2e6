"""What is trained, as the loop sees it (`m31.training.trainer`): weights, what a piece of a batch gives, an export."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from m31.training.data import Batch
from m31.training.weights import Weights


@dataclass(frozen=True)
class Piece:
    """Whole sequences of a batch.

    Attributes:
        tokens, targets: int64 [B, T]; target -1: no loss there.
        batch: the batch that it is cut from.
        step: number of the batch: the optimiser step, or -1 - i for validation batch i.
        row: of its first sequence in the batch.
    """

    tokens: Tensor
    targets: Tensor
    batch: Batch
    step: int
    row: int


@dataclass
class Sum:
    """Over pieces.

    Attributes:
        loss: nats, summed.
        count: what the loss is divided by, such as the number of targets.
        figures: further sums, by name; a task makes of them what is logged.
        grads: of the mean loss of the whole batch, by the names of `Weights.masters`.
    """

    loss: float = 0.0
    count: float = 0
    figures: dict[str, Tensor] = field(default_factory=dict)
    grads: dict[str, Tensor] = field(default_factory=dict)

    def add(self, other: Sum) -> None:
        """Add a piece. Its gradients are taken over: do not use it afterwards."""
        self.loss += other.loss
        self.count += other.count
        for name, value in other.figures.items():
            self.figures[name] = self.figures[name] + value if name in self.figures else value
        for name, grad in other.grads.items():
            if name in self.grads:
                self.grads[name] += grad
            else:
                self.grads[name] = grad

    @property
    def mean(self) -> float:
        """The loss over its count."""
        return self.loss / max(1, self.count)


class Task(Protocol):
    """What a run trains."""

    @property
    def parameters(self) -> Weights:
        """The weights; the loop moves the masters of `learned` ones, and stores all of them."""

    @property
    def identity(self) -> str:
        """Changes when data or anything else outside the configuration does that the losses depend on."""

    def gradient(self, piece: Piece) -> Sum:
        """Loss, figures and gradients of a piece; called by several threads at a time.

        Gradients are those of the loss of the whole `piece.batch` as far as this piece contributes: they add up.
        """

    def measure(self, piece: Piece) -> Sum:
        """Loss and figures of a piece of the validation, without gradients."""

    def after_step(self, found: Sum, fall: float) -> None:
        """Move what no gradient moves. `fall` is 1 during the warmup, then the learning rate by its peak."""

    def shown(self, found: Sum, tokens: int) -> dict[str, Any]:
        """What to log of the figures of a batch, or of a validation, of so many tokens."""

    def export(self, folder: Path) -> None:
        """Write what the masters are into an absent folder, which appears complete or not at all."""
