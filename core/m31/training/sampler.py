"""Training batches as a pure function of (seed, step), and the fixed windows that models are measured on.

Text of an epoch: the documents of the train split in a random order, each as BOS, text, EOS, in one long ring. The
ring is cut into blocks of the longest length; the blocks of an epoch, again in a random order, are used one after
another, so that every token is seen once per epoch whatever the lengths are (the last block fills up from the start).
A row that begins inside a document has no BOS, like a prompt that is served as it was typed.

Batches come in cycles. In a cycle each length has as many batches as gives the wanted shares of sequences; each takes a
whole number of blocks. A random tenth of the cycle's blocks is not text but recall documents (`m31.training.recall`).
A block of a shorter length is cut into rows, and rows of one length are shuffled between the batches of the cycle, so
that a batch mixes files. All random choices are `m31.training.draws` of (seed, cycle or epoch): any batch can be had
without those before it.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from m31.errors import RequestError
from m31.training.cache import TokenCache
from m31.training.corpus import Split
from m31.training.draws import Purpose, permutation
from m31.training.recall import MIN_LENGTH, RecallWriter

IGNORE = -1  # a target without a loss
_VERSION = 1  # raise it when the same arguments would give other batches
SHARES: Mapping[int, int] = {1024: 75, 2048: 15, 4096: 10}
"""Length -> per cent of the sequences."""

I64 = npt.NDArray[np.int64]


class Row(NamedTuple):
    """Where one sequence comes from.

    Attributes:
        length: its tokens.
        part: which of its block's rows it is.
        block: the number of the text block since the start of training; None for a recall document.
        recall: the number of the recall document; None for text.
    """

    length: int
    part: int
    block: int | None
    recall: int | None


@dataclass(frozen=True)
class _Epoch:
    """The ring of an epoch: documents in order, where each begins in the ring, and the order of the blocks."""

    order: I64
    starts: I64
    blocks: I64


class Sampler:
    """Training batches by number.

    Args:
        cache: whose train split is trained on.
        seed: 0 .. 2**64-1.
        tokens: of every batch; a multiple of the longest length.
        shares: length -> share of the sequences, in any unit; each length divides the longest.
        recall: fraction of the tokens that are recall documents, below 1.
        recall_writer: writes them; may be None when `recall` is 0.

    Attributes:
        cycle: batches in a cycle.
        identity: a hash of everything that the batches depend on.

    Raises:
        RequestError: an argument outside its range.
    """

    def __init__(
        self,
        cache: TokenCache,
        *,
        seed: int,
        tokens: int,
        shares: Mapping[int, int],
        recall: float,
        recall_writer: RecallWriter | None,
    ) -> None:
        self.longest = _longest(shares, tokens)
        if not 0 <= recall < 1:
            raise RequestError(f"recall is {recall!r}", where="recall", expected="a fraction from 0, below 1")
        if recall and (recall_writer is None or min(shares) < MIN_LENGTH):
            raise RequestError(
                "recall documents need a writer and room",
                where="recall",
                expected=f"a recall_writer, and lengths of at least {MIN_LENGTH}",
            )
        self.seed, self.tokens = seed, tokens
        self._cache, self._writer = cache, recall_writer
        self._documents = cache.split("train")
        self._sizes = np.array([entry.stop - entry.start for entry in self._documents], dtype=np.int64)
        self._ring = int(self._sizes.sum())
        self._blocks = -(-self._ring // self.longest)
        # Batches of a length: its share of the sequences times its length, because a batch is a number of tokens.
        weights = {length: shares[length] * length for length in sorted(shares) if shares[length]}
        divisor = math.gcd(*weights.values())
        self._batches = {length: weight // divisor for length, weight in weights.items()}
        self.cycle = sum(self._batches.values())
        self._per_batch = tokens // self.longest
        self._slots = self.cycle * self._per_batch
        self._recalls = round(recall * self._slots)
        parts = [
            _VERSION,
            cache.key,
            seed,
            tokens,
            self._batches,
            self._recalls,
            recall_writer and recall_writer.digest,
        ]
        self.identity = hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()
        # Bound methods are cached on the instance, so that the caches go when it goes.
        self._epoch = functools.lru_cache(maxsize=3)(self._make_epoch)
        self._plan = functools.lru_cache(maxsize=2)(self._make_plan)

    def batch(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and targets of a step, counted from 0: int64 [sequences, length] each; `tokens` in all.

        A target is the token that follows, or `IGNORE` behind the last token of a document: what the next document in
        the row is does not follow from it. BOS is never a target.

        Raises:
            RequestError: a negative step.
        """
        ids = np.stack([self._row(row) for row in self.rows(step)])
        tokens, targets = ids[:, :-1], ids[:, 1:].copy()
        targets[tokens == self._cache.eos] = IGNORE
        return torch.from_numpy(tokens.copy()), torch.from_numpy(targets)

    def rows(self, step: int) -> tuple[Row, ...]:
        """Where the sequences of a step come from; raises as `batch` does."""
        if step < 0:
            raise RequestError(f"step is {step}", where="step", expected="0 or more")
        return self._plan(step // self.cycle)[step % self.cycle]

    def epochs(self, steps: int) -> float:
        """How often the train split is seen in so many steps, on average over a cycle."""
        return steps / self.cycle * (self._slots - self._recalls) * self.longest / self._ring

    def _make_plan(self, cycle: int) -> tuple[tuple[Row, ...], ...]:
        """The batches of a cycle."""
        order = permutation(self.seed, Purpose.SLOTS, cycle, self._slots)
        recalls = set(order[: self._recalls].tolist())
        block = cycle * (self._slots - self._recalls)
        slot = 0
        batches: list[tuple[Row, ...]] = []
        for number, (length, count) in enumerate(self._batches.items()):
            parts = self.longest // length
            rows: list[Row] = []
            for _ in range(count * self._per_batch):
                if slot in recalls:
                    first = (cycle * self._slots + slot) * (self.longest // min(self._batches))
                    rows += [Row(length, part, None, first + part) for part in range(parts)]
                else:
                    rows += [Row(length, part, block, None) for part in range(parts)]
                    block += 1
                slot += 1
            mixed = permutation(self.seed, Purpose.ROWS, cycle * len(self._batches) + number, len(rows))
            size = self.tokens // length
            rows = [rows[i] for i in mixed]
            batches += [tuple(rows[i : i + size]) for i in range(0, len(rows), size)]
        turns = permutation(self.seed, Purpose.BATCHES, cycle, len(batches))
        return tuple(batches[i] for i in turns)

    def _row(self, row: Row) -> I64:
        """int64 [length + 1]: the row and the token behind it."""
        if row.recall is not None and self._writer is not None:
            return np.array(self._writer.document(row.recall, row.length + 1).ids, dtype=np.int64)
        assert row.block is not None  # _make_plan gives a row one of the two
        number, place = divmod(row.block, self._blocks)
        epoch = self._epoch(number)
        return self._read(epoch, int(epoch.blocks[place]) * self.longest + row.part * row.length, row.length + 1)

    def _make_epoch(self, number: int) -> _Epoch:
        order = permutation(self.seed, Purpose.DOCUMENTS, number, len(self._documents))
        starts = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(self._sizes[order])])
        blocks = permutation(self.seed, Purpose.BLOCKS, number, self._blocks)
        return _Epoch(order, starts, blocks)

    def _read(self, epoch: _Epoch, start: int, count: int) -> I64:
        """int64 [count]: the ring from `start` on."""
        pieces: list[I64] = []
        place = start % self._ring
        document = int(np.searchsorted(epoch.starts, place, side="right")) - 1
        while count:
            entry = self._documents[epoch.order[document]]
            first = entry.start + place - int(epoch.starts[document])
            piece = self._cache.ids[first : min(entry.stop, first + count)].astype(np.int64)
            pieces.append(piece)
            count -= len(piece)
            document = (document + 1) % len(self._documents)
            place = int(epoch.starts[document])
        return np.concatenate(pieces)


def _longest(shares: Mapping[int, int], tokens: int) -> int:
    """The longest length, after checking that everything divides."""
    used = [length for length, share in shares.items() if share]
    if not used or min(used) < 2 or min(shares.values()) < 0 or any(max(used) % length for length in used):
        raise RequestError(
            f"shares are {dict(shares)}",
            where="shares",
            expected="length -> share, with lengths of 2 or more that divide the longest",
        )
    if tokens < max(used) or tokens % max(used):
        raise RequestError(
            f"a batch of {tokens} tokens", where="tokens", expected=f"a multiple of the longest length, {max(used)}"
        )
    return max(used)


@dataclass(frozen=True)
class Window:
    """A piece of a file, to measure a model with.

    Attributes:
        path: of the file.
        tokens, targets: int64 [T], T at most the length asked for. Targets are the tokens that follow, `IGNORE` where
            an earlier window has them already. EOS is not a target: it stands for no bytes.
        bytes: of the text that the targets stand for.
    """

    path: str
    tokens: torch.Tensor
    targets: torch.Tensor
    bytes: int


def windows(cache: TokenCache, split: Split, *, length: int, overlap: int) -> Iterator[Window]:
    """Whole files of a split, in their order, cut into windows: each token of the text is a target exactly once.

    The bytes of all windows of a file add up to the file's size, so that bits per byte is the sum of the targets'
    losses, in bits, over the sum of `bytes`.

    Args:
        cache: of the corpus.
        split: usually "validation" or "test".
        length: most tokens of a window.
        overlap: tokens of a window, but the first of a file, that only serve as context.

    Raises:
        RequestError: `overlap` does not leave room for a target.
    """
    if length < 1 or not 0 <= overlap < length:
        raise RequestError(
            f"length {length}, overlap {overlap}", where="overlap", expected="from 0 to less than a positive length"
        )
    sizes = np.array([len(cache.tokenizer.piece(token)) for token in range(cache.tokenizer.vocab_size)])
    for entry in cache.split(split):
        ids = cache.ids[entry.start : entry.stop - 1].astype(np.int64)  # BOS and the text
        done = 0  # targets so far
        while done < len(ids) - 1:
            first = max(0, done - overlap) if done else 0
            stop = min(first + length, len(ids) - 1)
            tokens, targets = ids[first:stop].copy(), ids[first + 1 : stop + 1].copy()
            targets[: done - first] = IGNORE
            counted = int(sizes[ids[done + 1 : stop + 1]].sum())
            yield Window(entry.path, torch.from_numpy(tokens), torch.from_numpy(targets), counted)
            done = stop
