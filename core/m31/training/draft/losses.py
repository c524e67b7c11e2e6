"""What a drafted row costs, and how much of a draft would be kept (MODEL.md §5.4)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True)
class Rows:
    """Of every row [N].

    Attributes:
        loss: nats; with gradient into the head's logits.
        acceptance: chance that a token drawn from the head's distribution is kept: sum of min(p, q), at temperature 1.
        agreement: whether the head's most likely token is the target's.
    """

    loss: Tensor
    acceptance: Tensor
    agreement: Tensor


def rows(logits_NV: Tensor, target_NV: Tensor, labels_N: Tensor, hard_labels: float) -> Rows:
    """Compare the head's rows with the target's.

    Args:
        logits_NV: of the head, with gradient.
        target_NV: logits of the target behind the same tokens, without.
        labels_N: the text's own tokens; read only where `hard_labels` is not 0.
        hard_labels: share of the cross-entropy with them; the rest is KL(target || head).
    """
    logq, logp = torch.log_softmax(logits_NV, -1), torch.log_softmax(target_NV, -1)
    p = logp.exp()
    loss = (p * (logp - logq)).sum(-1)
    if hard_labels:
        loss = (1 - hard_labels) * loss + hard_labels * functional.nll_loss(logq, labels_N, reduction="none")
    q = logq.detach().exp()
    return Rows(loss, torch.minimum(p, q).sum(-1), logits_NV.detach().argmax(-1) == target_NV.argmax(-1))


def expected_length(acceptance_Ag: Tensor) -> Tensor:
    """Accepted tokens per draft [A]: a row counts where all rows before it are accepted too."""
    return acceptance_Ag.double().cumprod(-1).sum(-1)
