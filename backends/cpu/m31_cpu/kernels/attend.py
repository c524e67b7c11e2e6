"""Attention of a tile of queries over a block of keys: scores, softmax, values.

A tile is some consecutive queries of one sequence with the query heads of one KV head. Everything is done query by
query, so that a query's result does not depend on the tile: only the order of loops is shared, so that a strip of a
page is used by several queries while it is in the cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from m31_cpu.isa import Isa
from m31_cpu.kernels.panels import Form, Panel, cleared, half, loaded, multiply, stored
from m31_cpu.kernels.softmax import LOWEST, States, exp2
from m31_cpu.kernels.unpacking import keys_of, values_of
from m31_cpu.lang import F32, I32, I64, Val, vec
from m31_cpu.native import Kernel
from m31_cpu.simd import greatest, narrow, total, wide

LANES = 16  # keys that lie side by side in pages
_STRETCH = 64  # tokens whose values are used by all queries before the next ones are read; even
_TOGETHER = 16  # rows whose scores are held at once
_ROWS = 256  # rows of a tile


def _up(count: int, to: int) -> int:
    return -(-count // to) * to


@dataclass(frozen=True)
class Geometry:
    """What a kernel is written for.

    Args:
        form: of the pages.
        heads, group: KV heads, and query heads for each.
        dim: channels of a head.
        page: tokens of a page.
        isa: the instruction set.
    """

    form: str
    heads: int
    group: int
    dim: int
    page: int
    isa: Isa

    @property
    def name(self) -> str:
        """For names of kernels."""
        return f"{self.form}-h{self.heads}g{self.group}d{self.dim}p{self.page}"

    @property
    def queries(self) -> int:
        """Of a tile, at most."""
        return max(1, min(64, _ROWS // self.group))

    @property
    def dots(self) -> bool:
        """Whether operands are pairs of bfloat16; float32 pages are multiplied as they are."""
        return self.isa.dots and self.form != "float32"

    @property
    def unpacked(self) -> bool:
        """Whether pages are decoded first, to what bfloat16 pages are."""
        return self.form in ("fp8", "nvfp4")

    @property
    def panel(self) -> Form:
        """How pages, decoded where necessary, are multiplied."""
        if self.dots:
            return "dots"
        return "single" if self.form == "float32" else "pairs"

    @property
    def groups(self) -> int:
        """Of 16 keys in a page."""
        return -(-self.page // LANES)

    @property
    def width(self) -> int:
        """Keys of a strip: two vectors where a group is only one."""
        return 2 * LANES if self.isa.lanes == LANES and self.groups % 2 == 0 else LANES

    @property
    def row(self) -> int:
        """Bytes of a row of scores."""
        return 4 * LANES * self.groups

    @property
    def together(self) -> int:
        """Queries whose scores are held at once."""
        return max(1, _TOGETHER // self.group)

    @property
    def rows(self) -> int:
        """Of a product: as many sums as registers hold."""
        return 2 if self.isa.name == "portable" else 4

    @property
    def states(self) -> States:
        """Of a query."""
        return States(self.group, self.dim)

    def page_bytes(self, kind: str) -> tuple[int, int]:
        """Of a head's page: of numbers or codes, and of scales."""
        keys, d = LANES * self.groups, self.dim
        tokens = keys if kind == "k" else self.page
        if self.form == "nvfp4":
            return tokens * d // 2, tokens * d // 16
        if self.form == "bfloat16" and kind == "v":
            tokens = _up(tokens, 2)
        return tokens * d * {"float32": 4, "bfloat16": 2, "fp8": 1}[self.form], 0

    def room(self) -> dict[str, tuple[int, int]]:
        """Scratch of a thread: name -> (offset, bytes), and "" -> (0, all)."""
        tokens, n = LANES * self.groups, self.queries
        sizes = {
            "keys": tokens * self.dim * 4,
            "values": tokens * self.dim * 4,
            "scores": self.together * self.group * self.row,
            "query": n * self.group * self.dim * 2 + 64 if self.dots else 0,
            "states": n * self.states.size,
            "pairs": n * self.group * 8,
            "listed": n * 8,
            "limit": n * 8,
            "least": n * 8,
            "cursor": n * 8,
            "block": n * 8,
        }
        found, offset = {}, 0
        for name, size in sizes.items():
            found[name] = (offset, size)
            offset += _up(size, 64)
        return {**found, "": (0, offset)}


@dataclass(frozen=True)
class Tile:
    """A tile while a task runs.

    Args:
        g: what the kernel is written for.
        q: the first query's first head, float32.
        stride: bytes from query to query.
        scale: scores to log2.
        room: the thread's scratch.
        state, state_stride: of the first query, and from one to the next.
        windowed: queries have a least token as well.
    """

    g: Geometry
    q: Val
    stride: int
    scale: Val
    room: Val
    state: Val
    state_stride: Val
    windowed: bool

    def at(self, name: str) -> Val:
        """A piece of scratch."""
        return self.room + self.g.room()[name][0]

    def pairs_of_queries(self, k: Kernel, count: Val) -> None:
        """Round the tile's queries to pairs of bfloat16, for "dots"."""
        g = self.g
        size = g.group * g.dim
        for j in k.range(count):
            source, to = self.q + j * self.stride, self.at("query") + j * (2 * size)
            for c in range(0, size, k.isa.lanes):
                lanes = min(k.isa.lanes, size - c)
                k.store(narrow(k, k.load(vec(F32, lanes), source, 4 * c, align=4)), to, 2 * c, align=2)

    def put(self, k: Kernel, index: Val, query: Val, limit: Val, least: Val | None = None) -> None:
        """Write a query into the list of those that see a block.

        Args:
            index: place in the list.
            query: of the tile.
            limit: it sees that many tokens of the block,
            least: from this one on.
        """
        for name, value in (("listed", query), ("limit", limit), *((("least", least),) if least is not None else ())):
            k.store(value, self.at(name) + index * 8, align=8)

    def listed(self, k: Kernel, name: str, index: Val) -> Val:
        """What `put` wrote."""
        return k.load(I64, self.at(name) + index * 8, align=8)

    # --- a block ---

    def block(self, k: Kernel, count: Val, keys: tuple[Val, Val], values: tuple[Val, Val]) -> None:
        """Attention of the first `count` queries of the list over a head's page.

        Args:
            count: at least one.
            keys, values: numbers or codes, and scales.
        """
        g = self.g
        k_at, v_at = keys[0], values[0]
        if g.unpacked:
            most = self._most(k, k.i64(0), count)
            k_at, v_at = self.at("keys"), self.at("values")
            groups = (most + (g.width - 1)) // g.width * (g.width // LANES)
            keys_of(k, g.form, g.dim, keys, k_at, groups)
            values_of(k, g.form, g.dim, values, v_at, most)
        self.panels(k, count, g.panel, k_at, v_at, 4 * g.dim)

    def panels(self, k: Kernel, count: Val, form: Form, keys: Val, values: Val, step: int) -> None:
        """The same over decoded keys and values.

        Args:
            form: of both.
            step: bytes from one token's values, or pair's, to the next.
        """
        g = self.g
        panel_unit = 1 if form == "single" else 2
        for first in k.range(0, count, g.together):
            end = k.min(count, first + g.together)
            most = self._most(k, first, end)
            strips = (most + (g.width - 1)) // g.width
            ahead = (most * step // panel_unit + (64 * strips - 1)) // (64 * strips)
            for strip in k.range(strips):
                panel = self._keys(form, keys, strip)
                with k.when(first.eq(0)):  # values are read across: ask for them while keys are read along
                    for line in k.range(strip * ahead, (strip + 1) * ahead):
                        k.prefetch(values + line * 64)
                for i in k.range(first, end):
                    self._scores(k, panel, i, i - first, strip)
            for i in k.range(first, end):
                self._weights(k, i, i - first, strips, form)
            for start in k.range(0, most, _STRETCH):
                for panel, column in self._strips(k, form, values, step):
                    for i in k.range(first, end):
                        self._values(k, panel, column, i, i - first, start)

    def _most(self, k: Kernel, first: Val, end: Val) -> Val:
        """The greatest limit of some queries of the list."""
        most = k.var(k.i64(0))
        for i in k.range(first, end):
            most.set(k.max(most.get(), self.listed(k, "limit", i)))
        return most.get()

    def _rows(self, k: Kernel) -> Iterator[tuple[int, Val]]:
        """Query heads: (how many rows, the first); its body is written for whole products and for the rest."""
        group, rows = self.g.group, min(self.g.rows, self.g.group)
        whole = group - group % rows
        for head in k.range(0, whole, rows):
            yield rows, head
        if group % rows:
            yield group % rows, k.i64(whole)

    # --- scores ---

    def _keys(self, form: Form, keys: Val, strip: Val) -> Panel:
        g = self.g
        size = 4 if form == "single" else 2
        lanes = g.isa.lanes
        places = [
            (at // LANES * LANES * g.dim * size + at % LANES * 4, lanes) for at in range(0, g.width, lanes)
        ]  # a lane is four bytes in every form: one number or a pair
        return Panel(form, keys + strip * (g.width * g.dim * size), 4 * LANES, places)

    def _scores(self, k: Kernel, panel: Panel, i: Val, row: Val, strip: Val) -> None:
        g = self.g
        query, limit = self.listed(k, "listed", i), self.listed(k, "limit", i)
        least = self.listed(k, "least", i) if self.windowed else None
        size = 2 if panel.form == "dots" else 4
        source = self.at("query") + query * (2 * g.group * g.dim) if size == 2 else self.q + query * self.stride
        masks = self._masks(k, panel, strip, limit, least)
        for rows, head in self._rows(k):
            sums = cleared(k, rows, panel)
            a = source + head * (size * g.dim)
            multiply(k, sums, a, size * g.dim, panel, 0, g.dim // panel.unit)
            to = self.at("scores") + (row * g.group + head) * g.row + strip * (4 * g.width)
            for r, vectors in enumerate(sums):
                offset = r * g.row
                for value, seen in zip(vectors, masks, strict=True):
                    lanes = seen.type.count
                    score = value.get() * self.scale.splat(lanes)
                    k.store(seen.select(score, float("-inf")), to, offset, align=4)
                    offset += 4 * lanes

    def _masks(self, k: Kernel, panel: Panel, strip: Val, limit: Val, least: Val | None) -> list[Val]:
        """Which keys of a strip a query sees."""
        found, at = [], 0
        for _, lanes in panel.places:
            column = k.listed(I32, list(range(at, at + lanes)))
            start = strip * self.g.width
            seen = column < (limit - start).trunc(I32).splat(lanes)
            if least is not None:
                seen = seen & (column >= (least - start).trunc(I32).splat(lanes))
            found.append(seen)
            at += lanes
        return found

    # --- softmax ---

    def _weights(self, k: Kernel, i: Val, row: Val, strips: Val, form: Form) -> None:
        """Scores to weights in place, the state's sums and values to the new greatest score."""
        g = self.g
        lanes = g.isa.lanes
        kind = vec(F32, lanes)
        state = self._state(k, i)
        end = strips * (4 * g.width)
        for head in k.range(g.group):
            scores = self.at("scores") + (row * g.group + head) * g.row
            pair = g.states.pair(state, head)
            before = k.load(F32, pair, align=4)
            highest = k.var(k.const(kind, LOWEST))
            for at in k.range(0, end, 4 * lanes):
                score, best = k.load(kind, scores + at, align=4), highest.get()
                highest.set((score > best).select(score, best))
            now = greatest(k, highest.get())
            now = (now > before).select(now, before)
            sums = k.var(k.const(kind, 0.0))
            for at in k.range(0, end, 4 * lanes):
                weight = exp2(k, k.load(kind, scores + at, align=4) - now.splat(lanes))
                if form == "dots":
                    bits = narrow(k, weight)
                    weight = wide(bits)
                    k.store(bits, scores + at // 2, align=2)
                else:
                    k.store(weight, scores + at, align=4)
                sums.set(sums.get() + weight)
            factor = exp2(k, (before - now).splat(lanes)).lane(0)
            k.store(now, pair, align=4)
            k.store(k.load(F32, pair, 4, align=4) * factor + total(sums.get()), pair, 4, align=4)
            with k.when(factor.ne(1.0)):
                values = g.states.values(state, head)
                for c in range(0, g.dim, lanes):
                    some = min(lanes, g.dim - c)
                    value = k.load(vec(F32, some), values, 4 * c, align=4)
                    k.store(value * factor.splat(some), values, 4 * c, align=4)

    def _state(self, k: Kernel, i: Val) -> Val:
        return self.state + self.listed(k, "listed", i) * self.state_stride

    # --- values ---

    def _strips(self, k: Kernel, form: Form, values: Val, step: int) -> Iterator[tuple[Panel, Val]]:
        """Strips of channels; whole ones in a loop, then the rest in vectors that fit."""
        dim, lanes = self.g.dim, self.g.isa.lanes
        vectors = max(2, LANES // lanes)
        width = lanes * vectors
        whole = dim - dim % width
        if whole:
            places: Sequence[tuple[int, int]] = [(4 * lanes * x, lanes) for x in range(vectors)]
            for column in k.range(0, whole, width):
                yield Panel(form, values + column * 4, step, places), column
        if dim % width:
            places = [(4 * c, min(lanes, dim - whole - c)) for c in range(0, dim - whole, lanes)]
            yield Panel(form, values + 4 * whole, step, places), k.i64(whole)

    def _values(self, k: Kernel, panel: Panel, column: Val, i: Val, row: Val, start: Val) -> None:
        g = self.g
        stop = k.min(self.listed(k, "limit", i), start + _STRETCH)
        begin = k.min(k.max(self.listed(k, "least", i), start), stop) if self.windowed else start
        with k.when(begin < stop):
            state = self._state(k, i)
            for rows, head in self._rows(k):
                weights = self.at("scores") + (row * g.group + head) * g.row
                to = g.states.values(state, head) + column * 4
                sums = loaded(k, rows, panel, to, 4 * g.dim)
                if panel.unit == 1:
                    multiply(k, sums, weights, g.row, panel, begin, stop)
                else:
                    if self.windowed:
                        with k.when((begin % 2).ne(0)):
                            half(k, sums, weights, g.row, panel, begin // 2, odd=True)
                    multiply(k, sums, weights, g.row, panel, (begin + 1) // 2, stop // 2)
                    with k.when((stop % 2).ne(0)):
                        half(k, sums, weights, g.row, panel, stop // 2, odd=False)
                stored(k, sums, to, 4 * g.dim)
