"""The experts in two passes over the chosen weights: gate and up with the activation, then down (MODEL.md §2.5).

Each pass is split by output rows into parts that share nothing but their inputs, so that the result does not depend on
how many parts there are. Numba compiles the loops; the products come from `codegen`. No function here holds the GIL.

Buffers are float32 vectors, addressed in bytes where products are called. An input row is stored in the order that the
products want (`codegen.columns`), padded with zeros to whole chunks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numba import njit, types

from m31_cpu.codegen import CHUNK, DECODED_BYTES, MOST_TOKENS, Isa, Stored, products

BLOCK_ROWS = 32  # of gate, then of up: long enough runs for the memory, small enough results for the nearest cache
WEIGHT_FIELDS = 4  # of a weight table's row: address and row stride of the codes, address and row stride of the scales

_I, _F = types.int64, types.float32
_INTS, _FLOATS, _TABLE = types.int64[::1], types.float32[::1], types.int64[:, ::1]


@dataclass(frozen=True)
class Compiled:
    """The compiled passes for one way of storing; see the functions that are compiled."""

    gate_up: Callable[..., int]
    down: Callable[..., int]


def padded(width: int) -> int:
    """Elements of an input row of `width` columns."""
    return -(-width // CHUNK) * CHUNK


def decoded_bytes(stored: Stored, width: int) -> int:
    """Bytes of one decoded row."""
    return padded(width) // CHUNK * DECODED_BYTES[stored]


def _group(ids: Any, experts: int, chosen: Any, start: Any, order: Any) -> int:
    """Sort choices by expert, in the order of tokens within one.

    Args:
        ids: [T*K] expert of each choice.
        experts: how many there are.
        chosen: [at least min(T*K, experts)], gets the experts that occur, ascending.
        start: [that + 1], gets where each one's choices begin in `order`.
        order: [T*K], gets the choices.
    Returns:
        how many experts occur, or -1 if an id is out of range.
    """
    counts = np.zeros(experts + 1, np.int64)
    for choice in range(len(ids)):
        if ids[choice] < 0 or ids[choice] >= experts:
            return -1
        counts[ids[choice] + 1] += 1
    found = 0
    for expert in range(experts):
        if counts[expert + 1] > 0:
            chosen[found] = expert
            start[found] = counts[expert]
            found += 1
        counts[expert + 1] += counts[expert]
    start[found] = len(ids)
    for choice in range(len(ids)):
        order[counts[ids[choice]]] = choice
        counts[ids[choice]] += 1
    return found


def _pack(x: Any, width: int, place: Any, out: Any, stride: int) -> int:
    """Rows of `width` columns from x, one behind the other, into rows of `stride` in the order of `place`."""
    rows = len(x) // width
    for t in range(rows):
        for i in range(width // CHUNK * CHUNK, stride):  # the padding lies anywhere in the last chunk
            out[t * stride + i] = 0.0
        for c in range(width):
            out[t * stride + place[c]] = x[t * width + c]
    return rows


group = njit([_I(_INTS, _I, _INTS, _INTS, _INTS)], nogil=True)(_group)
pack = njit([_I(_FLOATS, _I, _INTS, _FLOATS, _I)], nogil=True)(_pack)


@lru_cache(maxsize=8)
def compiled(isa: Isa, stored: Stored) -> Compiled:
    """Compile the passes for weights stored this way; takes seconds the first time."""
    code = products(isa, stored)
    one, two, three = code.fused
    decode = code.decode
    tile_one, tile_two, tile_three = code.tile
    size = DECODED_BYTES[stored]
    most = MOST_TOKENS

    def few(w: int, s: int, inputs: Any, first: int, n: int, chunks: int, rest: int, out: int) -> int:
        """One stored row with n <= 3 inputs."""
        if n == 1:
            return one((w, s, inputs[first], chunks, rest, out))  # type: ignore[no-any-return]
        if n == 2:
            return two((w, s, inputs[first], inputs[first + 1], chunks, rest, out))  # type: ignore[no-any-return]
        return three(  # type: ignore[no-any-return]
            (w, s, inputs[first], inputs[first + 1], inputs[first + 2], chunks, rest, out)
        )

    few_ = njit(nogil=True)(few)

    def rows(weights: Any, r0: int, r1: int, width: int, inputs: Any, first: int, n: int, room: int, out: int) -> int:
        """Products of rows r0 to r1 with inputs first to first + n, to out[row - r0, input], not yet divided."""
        chunks, rest = width // CHUNK, width % CHUNK
        whole = chunks + (1 if rest else 0)
        w, per_w, s, per_s = weights[0], weights[1], weights[2], weights[3]
        bad = 0
        if n <= most:
            for r in range(r0, r1):
                bad |= few_(w + r * per_w, s + r * per_s, inputs, first, n, chunks, rest, out + 4 * (r - r0) * n)
            return bad
        a, b = room, room + whole * size
        for r in range(r0, r1, 2):
            last = r + 1 == r1
            bad |= decode((w + r * per_w, s + r * per_s, a, chunks, rest))
            if not last:
                bad |= decode((w + (r + 1) * per_w, s + (r + 1) * per_s, b, chunks, rest))
            other = a if last else b  # a lone row is multiplied twice, to the same place
            to = out + 4 * (r - r0) * n
            to2 = to if last else to + 4 * n
            m = 0
            while m < n:
                i = first + m
                if n - m >= 3:
                    tile_three((a, other, inputs[i], inputs[i + 1], inputs[i + 2], whole, to + 4 * m, to2 + 4 * m))
                elif n - m == 2:
                    tile_two((a, other, inputs[i], inputs[i + 1], whole, to + 4 * m, to2 + 4 * m))
                else:
                    tile_one((a, other, inputs[i], whole, to + 4 * m, to2 + 4 * m))
                m += 3
        return bad

    rows_ = njit(nogil=True)(rows)

    def gate_up(
        part: int,
        parts: int,
        table: Any,
        divisors: Any,
        chosen: Any,
        start: Any,
        inputs: Any,
        width: int,
        inner: int,
        place: Any,
        act: Any,
        stride: int,
        room: Any,
        alpha: float,
        beta: float,
        limit: float,
    ) -> int:
        """act[choice, place[row]] of this part's rows of all chosen experts.

        Args:
            table: [3 * experts, WEIGHT_FIELDS], w1, w3 and w2 of each; divisors: [3 * experts].
            chosen, start: see `_group`; inputs: addresses of the choices' inputs, in the order of the groups.
            act: rows of `stride`; room: this part's scratch, decoded rows behind two blocks of results.
        Returns:
            nonzero if a weight read is damaged.
        """
        total = 0
        for i in range(len(chosen)):
            total += inner * (most + start[i + 1] - start[i])
        low, high, before, bad = total * part // parts, total * (part + 1) // parts, 0, 0
        for i in range(len(chosen)):
            n = start[i + 1] - start[i]
            cost = most + n
            r0 = min(inner, max(0, -(-(low - before) // cost)))
            r1 = min(inner, max(0, -(-(high - before) // cost)))
            before += inner * cost
            gate_at = room.ctypes.data
            up_at = gate_at + 4 * BLOCK_ROWS * n
            rest_at = up_at + 4 * BLOCK_ROWS * n
            w1, w3 = 3 * chosen[i], 3 * chosen[i] + 1
            for b0 in range(r0, r1, BLOCK_ROWS):
                b1 = min(r1, b0 + BLOCK_ROWS)
                bad |= rows_(table[w1], b0, b1, width, inputs, start[i], n, rest_at, gate_at)
                bad |= rows_(table[w3], b0, b1, width, inputs, start[i], n, rest_at, up_at)
                for r in range(b1 - b0):
                    for m in range(n):
                        # Comparisons that leave NaN alone; no lower clamp on the gate.
                        g = room[r * n + m] / divisors[w1]
                        u = room[BLOCK_ROWS * n + r * n + m] / divisors[w3]
                        if g > limit:
                            g = limit
                        if u > limit:
                            u = limit
                        if u < -limit:
                            u = -limit
                        value = (u + beta) * (g / (np.float32(1.0) + math.exp(-alpha * g)))
                        act[(start[i] + m) * stride + place[b0 + r]] = value
        return bad

    def down(
        part: int,
        parts: int,
        table: Any,
        divisors: Any,
        chosen: Any,
        start: Any,
        inputs: Any,
        inner: int,
        width: int,
        order: Any,
        topk: int,
        weights: Any,
        factor: float,
        room: Any,
        out: Any,
    ) -> int:
        """out[token, row] of this part's rows, summed over the chosen experts in ascending order.

        Args:
            inputs: addresses of the activations, by choice; weights: [T*K]; order: see `_group`; out: [T*width].
        """
        r0, r1, bad = width * part // parts, width * (part + 1) // parts, 0
        for t in range(len(weights) // topk):
            for r in range(r0, r1):
                out[t * width + r] = 0.0
        for i in range(len(chosen)):
            n = start[i + 1] - start[i]
            w2 = 3 * chosen[i] + 2
            results = room.ctypes.data
            rest_at = results + 4 * BLOCK_ROWS * n
            for b0 in range(r0, r1, BLOCK_ROWS):
                b1 = min(r1, b0 + BLOCK_ROWS)
                bad |= rows_(table[w2], b0, b1, inner, inputs, start[i], n, rest_at, results)
                for m in range(n):
                    choice = order[start[i] + m]
                    share, token = weights[choice] * factor, choice // topk
                    for r in range(b1 - b0):
                        out[token * width + b0 + r] += room[r * n + m] / divisors[w2] * share
        return bad

    shared = (_I, _I, _TABLE, _FLOATS, _INTS, _INTS, _INTS, _I, _I)
    return Compiled(
        gate_up=njit([_I(*shared, _INTS, _FLOATS, _I, _FLOATS, _F, _F, _F)], nogil=True)(gate_up),
        down=njit([_I(*shared, _INTS, _I, _FLOATS, _F, _FLOATS, _FLOATS)], nogil=True)(down),
    )
