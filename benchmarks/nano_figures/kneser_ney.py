"""An n-gram model over token ids with interpolated, modified Kneser-Ney smoothing.

Chen and Goodman, "An empirical study of smoothing techniques for language modeling", 1999. Per order k:

    p_k(w | h) = max(c(hw) - D(c(hw)), 0) / sum_v c(hv) + gamma(h) * p_{k-1}(w | h without its first token)

c counts occurrences in the highest order and distinct left neighbours below it; n-grams that begin with BOS have no
left neighbour and keep their occurrences. Three discounts per order, D(1), D(2) and D(3 and more), come from how many
n-grams have the counts 1 to 4. Below the unigrams stands the uniform distribution over all tokens but BOS.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]
Ids = Sequence[int] | npt.NDArray[np.integer]


@dataclass(frozen=True)
class _Order:
    """Counts of one order: n-grams [n] as sorted numbers, and per context [m] its mass and what it passes down."""

    grams: I64
    counts: I64
    contexts: I64
    totals: F64
    passed: F64
    discounts: F64  # by min(count, 3); D(0) is 0


class KneserNey:
    """A model of `order`-grams.

    Args:
        documents: token ids, each beginning with BOS, which occurs nowhere else.
        order: 1 or more; vocabulary ** order is below 2**63.
        vocabulary: ids are below it.
        bos: the token that a document begins with.
        discounts: D(1), D(2), D(3+) of every order, lowest first; None estimates them.
    Raises:
        ValueError: an argument out of range, or too little text to estimate discounts from.
    """

    def __init__(
        self,
        documents: Iterable[Ids],
        *,
        order: int,
        vocabulary: int,
        bos: int,
        discounts: Sequence[tuple[float, float, float]] | None = None,
    ) -> None:
        texts = [np.asarray(document, dtype=np.int64) for document in documents]
        if order < 1 or vocabulary**order >= 2**63:
            raise ValueError(f"order {order} with a vocabulary of {vocabulary:,} does not fit 63 bits")
        if not texts or any(text[0] != bos or (text[1:] == bos).any() for text in texts):
            raise ValueError("every document begins with BOS and has no other")
        self.order, self.vocabulary, self.bos = order, vocabulary, bos
        stream = np.concatenate(texts)
        place = np.concatenate([np.arange(len(text)) for text in texts])
        kinds = [self._kinds(stream, place, k) for k in range(1, order + 1)]
        self._orders = []
        for k, (grams, occurrences) in enumerate(kinds, start=1):
            counts = occurrences
            if k < order:
                counts = np.zeros_like(occurrences)
                longer = kinds[k][0] % vocabulary**k  # each distinct longer n-gram is one left neighbour
                np.add.at(counts, np.searchsorted(grams, longer), 1)
                first = grams // vocabulary ** (k - 1) == bos
                counts[first] = occurrences[first]
            given = None if discounts is None else discounts[k - 1]
            self._orders.append(_order(grams, counts, vocabulary, _discounts(counts, k) if given is None else given))

    def _kinds(self, stream: I64, place: I64, k: int) -> tuple[I64, I64]:
        """Distinct k-grams inside documents, and how often each occurs. BOS is context only."""
        ends = np.flatnonzero(place >= max(1, k - 1))
        keys = np.zeros(len(ends), dtype=np.int64)
        for back in range(k - 1, -1, -1):
            keys = keys * self.vocabulary + stream[ends - back]
        grams, counts = np.unique(keys, return_counts=True)
        return grams, counts.astype(np.int64)

    def score(self, document: Ids) -> F64:
        """log2 of the probability of every token after the first, float64 [len - 1]."""
        ids = np.asarray(document, dtype=np.int64)
        width = self.order - 1
        padded = np.concatenate([np.zeros(width, dtype=np.int64), ids])
        at = np.arange(1, len(ids))
        history = padded[at[:, None] + np.arange(width)]
        return np.log2(self._chances(history, np.minimum(at, width), ids[1:]))

    def distribution(self, context: Sequence[int]) -> F64:
        """Probabilities of every token after a context that is not empty: float64 [vocabulary], BOS 0."""
        width = self.order - 1
        last = list(context)[-width:] if width else []
        row = np.array([0] * (width - len(last)) + last, dtype=np.int64)
        words = np.arange(self.vocabulary, dtype=np.int64)
        lengths = np.full(self.vocabulary, len(last))
        p = self._chances(np.tile(row, (self.vocabulary, 1)), lengths, words)
        p[self.bos] = 0.0
        return p

    def _chances(self, history: I64, length: I64, words: I64) -> F64:
        """history [n, order - 1], right-aligned, of which the last `length` [n] tokens count; words [n]."""
        p = np.full(len(words), 1 / (self.vocabulary - 1))
        context = np.zeros(len(words), dtype=np.int64)
        for k, table in enumerate(self._orders, start=1):
            if k > 1:
                context = context + history[:, -(k - 1)] * self.vocabulary ** (k - 2)
            at, known = _find(table.contexts, context)
            known &= length >= k - 1
            spot, seen = _find(table.grams, context * self.vocabulary + words)
            count = np.where(seen, table.counts[spot], 0)
            kept = np.maximum(count - table.discounts[np.minimum(count, 3)], 0.0)
            p = np.where(known, kept / table.totals[at] + table.passed[at] * p, p)
        return p


def _find(table: I64, keys: I64) -> tuple[I64, npt.NDArray[np.bool_]]:
    """Where keys [n] stand in a sorted table, and whether they do; a place that is always in range."""
    at = np.minimum(np.searchsorted(table, keys), len(table) - 1)
    return at, table[at] == keys


def _discounts(counts: I64, k: int) -> tuple[float, float, float]:
    n1, n2, n3, n4 = (int((counts == c).sum()) for c in (1, 2, 3, 4))
    if not n1 * n2 * n3 * n4:
        raise ValueError(f"too little text: no {k}-grams with one of the counts 1 to 4")
    y = n1 / (n1 + 2 * n2)
    found = 1 - 2 * y * n2 / n1, 2 - 3 * y * n3 / n2, 3 - 4 * y * n4 / n3
    if not all(0 <= d <= count for count, d in enumerate(found, start=1)):
        raise ValueError(f"no text: the discounts of {k}-grams would be {found}")
    return found


def _order(grams: I64, counts: I64, vocabulary: int, discounts: tuple[float, float, float]) -> _Order:
    contexts, first = np.unique(grams // vocabulary, return_index=True)
    d = np.array([0.0, *discounts])
    totals = np.add.reduceat(counts, first).astype(np.float64)
    passed = np.add.reduceat(np.minimum(d[np.minimum(counts, 3)], counts), first) / totals
    return _Order(grams, counts, contexts, totals, passed, d)
