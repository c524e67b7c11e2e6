"""The task of training a draft head: blocks behind random places of each sequence, all in one pass."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from m31.checkpoint.draft import require_fit
from m31.training.data import Data
from m31.training.draft.config import DraftConfig
from m31.training.draft.export import export
from m31.training.draft.losses import expected_length, rows
from m31.training.draft.model import HeadWeights, TrainedHead
from m31.training.draft.target import FrozenTarget
from m31.training.task import Piece, Sum


class DraftTraining:
    """The task of `DraftConfig`; see `m31.training.task.Task`.

    Args:
        config: what to do.
        data: texts; the target says what follows in them.

    Raises:
        ConfigError: the head does not fit the target, or the target is computed otherwise when it is served.
        NotACheckpoint, CheckpointError: the target's folder is not sound.
    """

    def __init__(self, config: DraftConfig, data: Data) -> None:
        self.config, self.draft, scheme = config, config.draft(), config.scheme()
        self.target = FrozenTarget(config.target.checkpoint, scheme)
        require_fit(self.draft, self.target.checkpoint.config, where="[head]")
        self.parameters = HeadWeights(self.draft, dtype=torch.float32, quantise=True)
        self.head = TrainedHead(
            self.parameters, scheme.arithmetic, embedding=self.target.embedding, head=self.target.head
        )
        self.identity = f"{data.identity}/{self.target.identity}"

    def gradient(self, piece: Piece) -> Sum:
        """Of the mean loss over rows, by their weights, and of the confidence head's."""
        leaves = self.parameters.leaves
        count = sum(
            float(self._weights(targets, self._places(piece.step, row, targets)).sum())
            for row, targets in enumerate(piece.batch[1])
        )
        found = Sum(grads={name: torch.zeros_like(leaf) for name, leaf in leaves.items()})
        for part, total in self._sequences(piece):
            part.grads = dict(zip(leaves, torch.autograd.grad(total / count, list(leaves.values())), strict=True))
            found.add(part)
        return found

    def measure(self, piece: Piece) -> Sum:
        """The same without gradients; the places of a validation batch are always the same."""
        found = Sum()
        with torch.no_grad():
            for part, _ in self._sequences(piece):
                found.add(part)
        return found

    def after_step(self, found: Sum, fall: float) -> None:
        """Nothing: gradients move every weight."""

    def shown(self, found: Sum, tokens: int) -> dict[str, Any]:
        """What a draft is worth, on the text's own tokens.

        `accepted`: expected tokens kept per draft at temperature 1; `greedy`: first tokens of a draft that are the
        target's most likely ones; `acceptance`: of each row, given that the rows before it are kept; `confidence`: the
        confidence head's cross-entropy in nats.
        """
        figures = found.figures
        if not figures:
            return {}
        blocks, valid = figures["blocks"].clamp(min=1), figures["valid"].clamp(min=1)
        return {
            "accepted": float(figures["accepted"] / blocks),
            "greedy": float(figures["greedy"] / blocks),
            "acceptance": [round(x, 4) for x in (figures["acceptance"] / valid).tolist()],
            "confidence": float(figures["confidence"] / valid.sum()),
        }

    def export(self, folder: Path) -> None:
        """The target's files, with the head in `dspark/`."""
        export(folder, self.target.checkpoint, self.config.head, self.parameters)

    # -- one sequence ----------------------------------------------------------------------------------------------

    def _sequences(self, piece: Piece) -> Iterator[tuple[Sum, Tensor]]:
        """(sums, what is minimised) of each sequence that has room for a block; one graph at a time."""
        taps, hidden = self.target(piece.tokens, self.draft.target_layer_ids)
        for at, (tokens, targets) in enumerate(zip(piece.tokens, piece.targets, strict=True)):
            places = self._places(piece.step, piece.row + at, targets)
            if len(places):
                yield self._sequence(tokens, targets, places, taps[at], hidden[at])

    def _sequence(
        self, tokens: Tensor, targets: Tensor, places: Tensor, taps: Tensor, hidden: Tensor
    ) -> tuple[Sum, Tensor]:
        losses, shape = self.config.losses, (len(places), self.draft.block_size)
        # Row i of a block stands where the target has read the anchor and i tokens more.
        at = (places[:, None] + torch.arange(shape[1])).flatten()
        prev, labels = tokens[at], targets[at]
        u = self.head.block(self.head.context(taps), tokens[places], places, shape[1])
        target_logits = functional.linear(hidden[at], self.target.head)
        found = rows(self.head.logits(u, prev), target_logits, labels.clamp(min=0), losses.hard_labels)
        sure = functional.binary_cross_entropy_with_logits(
            self.head.confidence(u, prev), found.acceptance, reduction="none"
        )
        weights = self._weights(targets, places).flatten()
        loss = (weights * found.loss).sum()
        valid = (labels >= 0).view(shape)
        whole = valid.all(-1)
        acceptance = found.acceptance.double().view(shape)
        figures = {
            "blocks": whole.sum().double(),
            "accepted": expected_length(acceptance[whole]).sum(),
            "greedy": expected_length(found.agreement.view(shape)[whole]).sum(),
            "valid": valid.sum(0).double(),
            "acceptance": (acceptance * valid).sum(0),
            "confidence": (sure.detach().double() * valid.flatten()).sum(),
        }
        total = loss + losses.confidence_weight * (weights * sure).sum()
        return Sum(float(loss.detach()), float(weights.sum()), figures), total

    def _places(self, step: int, row: int, targets: Tensor) -> Tensor:
        """Where blocks begin in a sequence: positions of their anchors, ascending, of which none comes twice."""
        room = len(targets) - self.draft.block_size
        wanted = -(-self.config.losses.blocks * len(targets) // 1024)
        # An anchor has at least one token before it, as the first token of a text is the prompt's.
        free = (targets[1 : room + 1] >= 0).nonzero().flatten() + 1 if room > 0 else torch.empty(0, dtype=torch.int64)
        digest = hashlib.sha256(f"{self.config.seed}/{step}/{row}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        order = torch.randperm(len(free), generator=generator)
        return free[order[:wanted]].sort().values

    def _weights(self, targets: Tensor, places: Tensor) -> Tensor:
        """Of the rows of blocks, [A, g]; 0 where the text has no target."""
        rows = torch.arange(self.draft.block_size)
        return self.config.losses.row_decay**rows * (targets[places[:, None] + rows] >= 0)
