"""Softmax that is taken block by block: the state of a query's heads and how states of parts become one.

Scores are in units of log2, so that weights are powers of two. A state is the greatest score so far, the sum of weights
and the sum of weighted values, both relative to it; one without keys has the least number as its greatest score, and
joining it changes nothing. A query's blocks are cut into parts in a way that only they decide; parts are joined in
order, by one thread or by many.
"""

from __future__ import annotations

from m31_cpu.lang import F32, I32, Val, vec
from m31_cpu.native import Kernel
from m31_cpu.simd import fma

LOWEST = -3.4028234663852886e38
# 2^x = 1 + x p(x) on |x| <= 1/2, least greatest relative error, about 1e-7 in float32; highest power first.
_EXP2 = (
    0.00015353359091896217,
    0.0013398875421086684,
    0.009618437377029741,
    0.05550332467938644,
    0.24022647913340697,
    0.6931472028570791,
)
_ROUNDER = 12582912.0  # 1.5 * 2^23: adding it rounds to an integer, which its low bits then hold
_LEAST = -126.0


def exp2(k: Kernel, x: Val) -> Val:
    """2^x for x <= 127, to about one unit in the last place; 0 below -126, and of -inf; 1 of 0; NaN of NaN."""
    kind = x.type
    small = x < _LEAST
    bounded = small.select(_LEAST, x)
    shifted = bounded + _ROUNDER
    r = bounded - (shifted - _ROUNDER)
    p = k.const(kind, _EXP2[0])
    for c in _EXP2[1:]:
        p = fma(k, p, r, k.const(kind, c))
    y = fma(k, p, r, k.const(kind, 1.0))
    power = ((shifted.bits(vec(I32, kind.count)) << 23) + (127 << 23)).bits(kind)
    return small.select(0.0, y * power)


def _widths(count: int, lanes: int) -> list[tuple[int, int]]:
    """(offset, lanes) of vectors that cover `count` numbers."""
    return [(i, min(lanes, count - i)) for i in range(0, count, lanes)]


def scaled(k: Kernel, row: Val, dim: int, by: Val) -> None:
    """row *= by."""
    for i, lanes in _widths(dim, k.isa.lanes):
        value = k.load(vec(F32, lanes), row, 4 * i, align=4)
        k.store(value * by.splat(lanes), row, 4 * i, align=4)


class States:
    """Layout of a query's state: values float32 [group, dim], then greatest score and sum, [group, 2].

    Args:
        group: query heads.
        dim: channels.
    """

    def __init__(self, group: int, dim: int) -> None:
        self.group, self.dim = group, dim
        self.size = 4 * group * (dim + 2)

    def values(self, state: Val, head: Val | int) -> Val:
        """Where the values of a head are."""
        return state + head * (4 * self.dim)

    def pair(self, state: Val, head: Val | int) -> Val:
        """Where the greatest score of a head is; the sum follows."""
        return state + head * 8 + 4 * self.group * self.dim

    def clear(self, k: Kernel, state: Val) -> None:
        """No key seen."""
        k.fill(state, 0, k.i64(4 * self.group * self.dim))
        for head in k.range(self.group):
            self.reset(k, self.pair(state, head))

    def reset(self, k: Kernel, pair: Val) -> None:
        """Of one head."""
        k.store(k.f32(LOWEST), pair, align=4)
        k.store(k.f32(0.0), pair, 4, align=4)

    def join(self, k: Kernel, values: Val, pairs: Val, state: Val) -> None:
        """Add a state to a total.

        Args:
            values, pairs: of the total: [group, dim] and [group, 2].
            state: of a part.
        """
        lanes = k.isa.lanes
        for head in k.range(self.group):
            mine, other = pairs + head * 8, self.pair(state, head)
            m, n = k.load(F32, mine, align=4), k.load(F32, other, align=4)
            most = (n > m).select(n, m)
            a, b = (exp2(k, (x - most).splat(lanes)).lane(0) for x in (m, n))
            k.store(most, mine, align=4)
            sums = k.load(F32, mine, 4, align=4) * a + k.load(F32, other, 4, align=4) * b
            k.store(sums, mine, 4, align=4)
            for i, width in _widths(self.dim, lanes):
                at, add = values + head * (4 * self.dim), self.values(state, head)
                total = k.load(vec(F32, width), at, 4 * i, align=4) * a.splat(width)
                part = k.load(vec(F32, width), add, 4 * i, align=4) * b.splat(width)
                k.store(total + part, at, 4 * i, align=4)

    def finish(self, k: Kernel, values: Val, pairs: Val) -> None:
        """Divide the values of a total by their sums."""
        for head in k.range(self.group):
            sums = k.load(F32, pairs + head * 8, 4, align=4)
            row = values + head * (4 * self.dim)
            for i, width in _widths(self.dim, k.isa.lanes):
                value = k.load(vec(F32, width), row, 4 * i, align=4)
                k.store(value / sums.splat(width), row, 4 * i, align=4)
