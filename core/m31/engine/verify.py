"""Lossless acceptance of drafted tokens (MODEL.md §5.4): the text is distributed as if nothing had been drafted.

Row j of the verify step gives p for the token at position L+j+1. A drafted token is kept with probability
min(1, p/q); the first that is not is replaced by one from the normalised (p - q)+, and behind the last kept one comes a
token from p itself. Greedy rows keep a token if it is the argmax. Each number drawn depends on seed, request, position
and purpose alone, so that a text never depends on which other sequences share its steps.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from m31.engine.philox import Purpose, uniform
from m31.engine.sampling import F64, RowState, Sampled, check_finite, choose, distribution, draw, penalise, report
from m31.errors import M31Error


@dataclass(frozen=True, kw_only=True, eq=False)
class Drafted:
    """Tokens that a draft head proposes.

    Attributes:
        tokens: in order of position.
        chances: the distribution that each was drawn from, float64 [V], sum 1; empty for a greedy request.
        confidence: how sure the head is of each, 0 to 1; for reports only, may be empty.
    """

    tokens: tuple[int, ...]
    chances: tuple[F64, ...] = ()
    confidence: tuple[float, ...] = ()


def verify(logits: torch.Tensor, drafted: Drafted, state: RowState) -> list[Sampled]:
    """The tokens that a verify step gives: the drafted ones that are kept and one more.

    Args:
        logits: float32 [n+1,V]: of the anchor and of the n drafted tokens.
        drafted: the n tokens.
        state: of the first row.

    Returns:
        1 to n+1 tokens. Where logits behind kept tokens are not finite, those tokens alone: the next step finds out.

    Raises:
        NonFiniteLogits: the first row's are not finite.
        RequestError: see `penalise`.
    """
    table: npt.NDArray[np.float32] = logits.detach().to("cpu").numpy()
    out: list[Sampled] = []
    for at, values in enumerate(table):
        before = (*state.output_ids, *drafted.tokens[:at]) if state.params.penalised else ()
        row = replace(state, position=state.position + at, output_ids=before)
        try:
            check_finite(values, row)
            token, kept = _settle(values.astype(np.float64), drafted, at, row)
        except M31Error:
            if out:
                return out
            raise
        out.append(report(values.astype(np.float64), token, row.params))
        if not kept:
            break
    return out


def _settle(logits: F64, drafted: Drafted, at: int, row: RowState) -> tuple[int, bool]:
    """The token of one row, and whether it is the drafted one."""
    if at == len(drafted.tokens):
        return choose(logits, row), False
    token = drafted.tokens[at]
    if row.params.greedy:
        best = choose(logits, row)
        return best, best == token
    p, q = distribution(penalise(logits, row), row.params), drafted.chances[at]
    if keeps(p, q, token, uniform(row.seed, row.request, row.position, Purpose.ACCEPT)):
        return token, True
    return replacement(p, q, uniform(row.seed, row.request, row.position, Purpose.RESIDUAL)), False


def keeps(p: F64, q: F64, token: int, u: float) -> bool:
    """Whether a token drawn from q is kept at `u` in [0, 1): with probability min(1, p/q)."""
    return bool(u * q[token] < p[token])


def replacement(p: F64, q: F64, u: float) -> int:
    """A token from the normalised (p - q)+ at `u` in [0, 1); from p where rounding alone made p and q differ."""
    rest = np.maximum(p - q, 0.0)
    return draw(rest if rest.any() else p, u)
