"""Counter-based random numbers: Philox4x32-10.

A random number is a pure function of what it is for, (seed, request, position, purpose), and of nothing else: not of
how many numbers were drawn before, nor of which other requests share the batch (DESIGN.md §5). Only 32-bit integer
arithmetic is involved, so a kernel in any language draws the same numbers.

Algorithm and constants: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

import enum

import numpy as np
import numpy.typing as npt

from m31.errors import RequestError

_ROUNDS = 10
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (0x9E3779B9, 0xBB67AE85)
_MASK = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)

U64 = npt.NDArray[np.uint64]


class Purpose(enum.IntEnum):
    """What a number decides. The values are part of the contract: changing one changes every sampled text."""

    SAMPLE = 0  # the target model's token
    DRAFT = 1  # a token of the draft head (MODEL.md §5.3)
    ACCEPT = 2  # whether a drafted token is kept (MODEL.md §5.4)
    RESIDUAL = 3  # the token after a rejection, from (p - q)+


def philox4x32(counter: npt.NDArray[np.uint32], key: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    """Ten rounds of Philox4x32.

    Args:
        counter: uint32 [..., 4].
        key: uint32 [..., 2], broadcast against counter.

    Returns:
        uint32 [..., 4].
    """
    words: list[U64] = [counter[..., i].astype(np.uint64) for i in range(4)]
    keys: list[U64] = [key[..., i].astype(np.uint64) for i in range(2)]
    for round_index in range(_ROUNDS):
        if round_index:
            keys = [(k + np.uint64(w)) & _MASK for k, w in zip(keys, _WEYL, strict=True)]
        even, odd = words[0] * _MULTIPLIERS[0], words[2] * _MULTIPLIERS[1]
        words = [
            (odd >> _SHIFT) ^ words[1] ^ keys[0],
            odd & _MASK,
            (even >> _SHIFT) ^ words[3] ^ keys[1],
            even & _MASK,
        ]
    return np.stack(np.broadcast_arrays(*words), axis=-1).astype(np.uint32)


def _bounded(name: str, value: object, bits: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or not 0 <= int(value) < 2**bits:
        raise RequestError(f"{name} is {value!r}", where=name, expected=f"an integer from 0 to 2**{bits} - 1")
    return int(value)


def uniforms(seed: int, request: int, positions: npt.NDArray[np.integer], purpose: Purpose) -> npt.NDArray[np.float64]:
    """Uniform numbers in [0, 1), one per position.

    Args:
        seed: 0 .. 2**64-1; the Philox key, low word first.
        request: 0 .. 2**64-1; counter words 2 and 3. It tells apart requests that share a seed.
        positions: integers [N], 0 .. 2**32-1; counter word 0. Counter word 1 is the purpose.
        purpose: what the numbers decide.

    Returns:
        float64 [N], multiples of 2**-53 made of the high 27 bits of output word 0 and the high 26 of word 1.

    Raises:
        RequestError: an argument outside its range.
    """
    seed, request = _bounded("seed", seed, 64), _bounded("request", request, 64)
    spots = np.asarray(positions)
    if spots.ndim != 1 or spots.dtype.kind not in "iu" or (spots.size and not 0 <= spots.min() <= spots.max() < 2**32):
        raise RequestError(f"positions are {positions!r}", where="positions", expected="integers from 0 to 2**32 - 1")
    counter = np.empty((spots.size, 4), dtype=np.uint32)
    counter[:, 0] = spots
    counter[:, 1] = Purpose(purpose)
    counter[:, 2], counter[:, 3] = request & 0xFFFFFFFF, request >> 32
    key = np.array([seed & 0xFFFFFFFF, seed >> 32], dtype=np.uint32)
    words = philox4x32(counter, key).astype(np.uint64)
    bits = ((words[:, 0] >> np.uint64(5)) << np.uint64(26)) | (words[:, 1] >> np.uint64(6))
    return bits.astype(np.float64) * 2.0**-53


def uniform(seed: int, request: int, position: int, purpose: Purpose) -> float:
    """One number of `uniforms`, as a float."""
    spot = np.array([_bounded("position", position, 32)], dtype=np.int64)
    return float(uniforms(seed, request, spot, purpose)[0])
