"""Random choices of the data pipeline as pure functions of (seed, purpose, index): Philox, as in `m31.engine.philox`.

NumPy promises the same bits for its generators but not the same integers and permutations in every release; these are
made of integer arithmetic only.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from m31.engine.philox import philox4x32
from m31.errors import RequestError

T = TypeVar("T")
_BLOCKS = 64  # Philox blocks that `Draws` computes at a time


class Purpose(enum.IntEnum):
    """What a stream of numbers decides. The values are part of every batch: changing one changes what is trained on."""

    DOCUMENTS = 0  # the order of the documents in an epoch; index: the epoch
    BLOCKS = 1  # the order of the blocks of an epoch; index: the epoch
    SLOTS = 2  # which slots of a cycle hold recall documents; index: the cycle
    ROWS = 3  # which rows of a cycle share a batch; index: cycle and length
    BATCHES = 4  # the order of the batches of a cycle; index: the cycle
    RECALL = 5  # a synthetic document to train on
    PROBE = 6  # a synthetic document to measure recall with
    WINDOWS = 7  # the order of the windows of a text file; index: the epoch


def _words(seed: int, purpose: Purpose, index: int, first: int, blocks: int) -> npt.NDArray[np.uint32]:
    """uint32 [4 * blocks]. Counter: block number, purpose, index; key: seed."""
    for name, value in (("seed", seed), ("index", index)):
        if not 0 <= value < 2**64:
            raise RequestError(f"{name} is {value}", where=name, expected="an integer from 0 to 2**64 - 1")
    counter = np.empty((blocks, 4), dtype=np.uint32)
    counter[:, 0] = np.arange(first, first + blocks, dtype=np.uint32)
    counter[:, 1] = purpose
    counter[:, 2], counter[:, 3] = index & 0xFFFFFFFF, index >> 32
    return philox4x32(counter, np.array([seed & 0xFFFFFFFF, seed >> 32], dtype=np.uint32)).reshape(-1)


def permutation(seed: int, purpose: Purpose, index: int, n: int) -> npt.NDArray[np.int64]:
    """A random order of 0 .. n-1, int64 [n]: the stable order of n random 64-bit keys."""
    words = _words(seed, purpose, index, 0, (n + 1) // 2).astype(np.uint64).reshape(-1, 2)[:n]
    keys = ((words[:, 0] << np.uint64(32)) | words[:, 1])[:n]
    return np.argsort(keys, kind="stable").astype(np.int64)


class Draws:
    """A stream of random choices, one after another.

    Args:
        seed, index: 0 .. 2**64-1.
        purpose: what the stream decides.
    """

    def __init__(self, seed: int, purpose: Purpose, index: int) -> None:
        self._source = (seed, purpose, index)
        self._blocks = 0
        self._buffer: list[int] = []

    def below(self, n: int) -> int:
        """An integer from 0 to n-1, for n up to 2**32. Its bias is below n / 2**32."""
        if not self._buffer:
            self._buffer = _words(*self._source, self._blocks, _BLOCKS)[::-1].tolist()
            self._blocks += _BLOCKS
        return self._buffer.pop() * n >> 32

    def between(self, low: int, high: int) -> int:
        """An integer from low to high, both possible."""
        return low + self.below(high - low + 1)

    def choice(self, options: Sequence[T]) -> T:
        """One of the options."""
        return options[self.below(len(options))]
