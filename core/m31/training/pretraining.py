"""Training a text model from nothing: cross-entropy, the index branch's divergence, and the routing bias."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from m31.training.config import TrainConfig
from m31.training.data import Data
from m31.training.export import export
from m31.training.model import TrainedText
from m31.training.parameters import BIAS, Parameters
from m31.training.task import Piece, Sum

_LOAD = "load/"


class Pretraining:
    """The task of `TrainConfig`; see `m31.training.task.Task`.

    Args:
        config: what to do.
        data: whose files go into the checkpoint.
    """

    def __init__(self, config: TrainConfig, data: Data) -> None:
        self.raw, target = config.target()
        self.parameters = Parameters(target, dtype=torch.float32, quantise=config.quantised)
        self.model = TrainedText(self.parameters, config.scheme())
        self.identity = data.identity
        self._losses, self._files = config.losses, data.files

    def gradient(self, piece: Piece) -> Sum:
        """Of the mean cross-entropy over targets, and of the mean divergence over tokens."""
        tokens, targets = piece.batch
        leaves = {name: leaf for name, leaf in self.parameters.leaves.items() if leaf.requires_grad}
        out = self.model(piece.tokens)
        loss = self.model.loss(out.hidden, piece.targets.flatten())
        count = max(1, int((targets >= 0).sum()))
        total = loss / count + self._losses.index_weight * out.kl / tokens.numel()
        grads = torch.autograd.grad(total, list(leaves.values()))
        figures = {"kl": out.kl.detach().double()} | {f"{_LOAD}{layer}": n for layer, n in out.load.items()}
        return Sum(float(loss.detach()), _targets(piece), figures, dict(zip(leaves, grads, strict=True)))

    def measure(self, piece: Piece) -> Sum:
        """The cross-entropy."""
        with torch.no_grad():
            loss = float(self.model.loss(self.model(piece.tokens).hidden, piece.targets.flatten()))
        return Sum(loss, _targets(piece))

    def after_step(self, found: Sum, fall: float) -> None:
        """Move the routing bias of overloaded experts down and of the others up; no gradient is involved.

        The steps are whole during the warmup, when routers move fastest, and fall with the learning rate after it.
        """
        for name, count in found.figures.items():
            if name.startswith(_LOAD):
                bias = self.parameters.masters[f"model.layers.{name.removeprefix(_LOAD)}.block_sparse_moe{BIAS}"]
                bias += fall * self._losses.balance_rate * torch.sign(count.float().mean() - count)

    def shown(self, found: Sum, tokens: int) -> dict[str, Any]:
        """kl in nats per token, and the share of each expert; nothing of a validation."""
        if "kl" not in found.figures:
            return {}
        load = {
            name.removeprefix(_LOAD): [round(x, 4) for x in (n / n.sum()).tolist()]
            for name, n in found.figures.items()
            if name.startswith(_LOAD)
        }
        return {"kl": float(found.figures["kl"]) / tokens, "load": load}

    def export(self, folder: Path) -> None:
        """The checkpoint in the official layout."""
        export(folder, self.raw, self.parameters, extra_files=self._files)


def _targets(piece: Piece) -> int:
    return int((piece.targets >= 0).sum())
