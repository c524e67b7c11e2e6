"""Products of a few rows with a panel: the one loop of attention, for scores and for values.

A panel is a strip of a matrix, as wide as a few vectors and as long as there are channels (keys of a page) or tokens
(values). It is read where it lies, in one of three forms:

    "single"  float32, one number a lane
    "pairs"   bfloat16, two numbers that follow each other along the strip in a lane; products are exact in float32
    "dots"    the same bytes, where the instruction set multiplies pairs: rows are pairs of bfloat16 as well

A row's sum runs along the strip in one order whatever the rows beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from m31_cpu.lang import F32, I32, Val, Var, vec
from m31_cpu.native import Kernel
from m31_cpu.simd import dot_pairs, fma

Form = Literal["single", "pairs", "dots"]
_UNROLLED = 4  # numbers along a strip


@dataclass(frozen=True)
class Panel:
    """Args:
    form: see the module.
    base: of the strip.
    step: bytes from one number, or pair, to the next along the strip.
    places: bytes and lanes of each vector across the strip.
    """

    form: Form
    base: Val
    step: int
    places: Sequence[tuple[int, int]]

    @property
    def unit(self) -> int:
        """Numbers that lie in a lane."""
        return 1 if self.form == "single" else 2


Sums = list[list[Var]]  # by row, by vector


def cleared(k: Kernel, rows: int, panel: Panel) -> Sums:
    """Sums of nothing."""
    return [[k.var(k.const(vec(F32, lanes), 0.0)) for _, lanes in panel.places] for _ in range(rows)]


def loaded(k: Kernel, rows: int, panel: Panel, at: Val, row: int) -> Sums:
    """Sums so far: float32 where the vectors of each row belong, `row` bytes from row to row."""
    found, offset = [], 0
    for r in range(rows):
        offset, sums = r * row, []
        for _, lanes in panel.places:
            sums.append(k.var(k.load(vec(F32, lanes), at, offset, align=4)))
            offset += 4 * lanes
        found.append(sums)
    return found


def stored(k: Kernel, sums: Sums, at: Val, row: int) -> None:
    """The counterpart of `loaded`."""
    for r, vectors in enumerate(sums):
        offset = r * row
        for total in vectors:
            value = total.get()
            k.store(value, at, offset, align=4)
            offset += 4 * value.type.count


def multiply(k: Kernel, sums: Sums, a: Val, row: int, panel: Panel, start: Val | int, stop: Val | int) -> None:
    """Add rows times panel, units `start` to `stop` along the strip.

    Args:
        sums: added to.
        a: the rows: float32, or pairs of bfloat16 for "dots".
        row: bytes from row to row.
        panel: see there.
        start, stop: in numbers for "single", in pairs for the others.
    """
    first = start if isinstance(start, Val) else k.i64(start)
    last = stop if isinstance(stop, Val) else k.i64(stop)
    most = _UNROLLED // panel.unit
    many = last - first
    whole = first + k.max(many - many % most, 0)
    for i in k.range(first, whole, most):
        _step(k, sums, a, row, panel, i, most)
    for i in k.range(whole, last):
        _step(k, sums, a, row, panel, i, 1)


def _step(k: Kernel, sums: Sums, a: Val, row: int, panel: Panel, i: Val, count: int) -> None:
    at = panel.base + i * panel.step
    size = 8 if panel.form == "pairs" else 4  # bytes of a row for each unit
    rows = a + i * size
    for x in range(count):
        vectors = [_raw(k, panel, at, x * panel.step + offset, lanes) for offset, lanes in panel.places]
        if panel.form == "pairs":
            _add(k, sums, rows, row, 8 * x, [_even(v) for v in vectors])
            _add(k, sums, rows, row, 8 * x + 4, [_odd(v) for v in vectors])
        else:
            _add(k, sums, rows, row, 4 * x, vectors)


def half(k: Kernel, sums: Sums, a: Val, row: int, panel: Panel, i: Val, *, odd: bool) -> None:
    """Add what one number of the pair `i` makes; the other may be anything."""
    at = panel.base + i * panel.step
    for_dots = panel.form == "dots"
    rows = a + i * (4 if for_dots else 8)
    vectors = [_raw(k, panel, at, offset, lanes) for offset, lanes in panel.places]
    if for_dots:
        _add(k, sums, rows, row, 0, [v & (-65536 if odd else 65535) for v in vectors])
    else:
        _add(k, sums, rows, row, 4 if odd else 0, [_odd(v) if odd else _even(v) for v in vectors])


def _raw(k: Kernel, panel: Panel, at: Val, offset: int, lanes: int) -> Val:
    return k.load(vec(F32 if panel.form == "single" else I32, lanes), at, offset, align=2)


def _even(pairs: Val) -> Val:
    return (pairs << 16).bits(vec(F32, pairs.type.count))


def _odd(pairs: Val) -> Val:
    return (pairs & -65536).bits(vec(F32, pairs.type.count))


def _add(k: Kernel, sums: Sums, rows: Val, row: int, offset: int, vectors: Sequence[Val]) -> None:
    dots = not vectors[0].floating
    for r, totals in enumerate(sums):
        one = k.load(I32 if dots else F32, rows, r * row + offset, align=4)
        for total, v in zip(totals, vectors, strict=True):
            x = one.splat(v.type.count)
            total.set(dot_pairs(k, total.get(), x, v) if dots else fma(k, x, v, total.get()))
