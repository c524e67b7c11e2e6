"""Paged attention: block-sparse, dense, and that of a drafted block (MODEL.md §2.4, §5.2), for decode, verify and
prefill alike.

A task is a tile of queries and a KV head. It goes through the blocks that any of its queries sees in ascending order;
each query joins its parts as it comes to their ends: four entries of its list, or so many tokens of the context. Where
there are fewer tasks than keep all threads busy, a task is a part as well, and a second kernel joins them. The result
is the same bit for bit either way, and the same alone and in company.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from m31.errors import BackendRefused
from m31.graph import Arithmetic, OpInstance, Refusal
from m31.ops import StateType
from m31_cpu.binding import EXACT, Binding, Factory
from m31_cpu.kernels.attend import LANES, Geometry, Tile
from m31_cpu.kernels.rows import count_of
from m31_cpu.lang import F32, I64, PTR, Val
from m31_cpu.native import Kernel, Native
from m31_cpu.program import NativeKernel, Sizes, Work, span

PART_ENTRIES = 4  # of a block list
PART_TOKENS = 2048  # of a context
_LOG2E = 1.4426950408889634
_MOST_GROUP = 16
_MOST_PAGE = 128  # tokens, MODEL.md §8
_MOST_PARTIAL = 192 << 20  # bytes of parts that wait to be joined
_NONE = 1 << 62  # no block

_FIELDS = {
    "q": PTR,
    "out": PTR,
    "positions": PTR,
    "cu": PTR,
    "lengths": PTR,
    "table": PTR,
    "table_width": I64,
    "k0": PTR,
    "k1": PTR,
    "v0": PTR,
    "v1": PTR,
    "blocks": PTR,
    "own_k": PTR,
    "own_v": PTR,
    "window": I64,
    "seqs": PTR,
    "parts": I64,
    "scale": F32,
    "room": PTR,
    "partial": PTR,
}


@dataclass(frozen=True)
class _Task:
    """A task while it runs.

    Args:
        g, a, split, topk: of the kernel: its record's fields, whether parts are tasks, entries of a block list.
        tile: of queries.
        sequence, first, count, head, part: which.
    """

    k: Kernel
    g: Geometry
    a: Any
    split: bool
    topk: int
    tile: Tile
    sequence: Val
    first: Val
    count: Val
    head: Val
    part: Val

    @property
    def part_blocks(self) -> int:
        """Blocks of a part of a context."""
        return max(1, PART_TOKENS // self.g.page)

    def position(self, query: Val | int) -> Val:
        """Of a query of the tile."""
        return self.k.load(I64, self.a.positions + (self.first + query) * 8, align=8)

    # --- states ---

    def _out(self, query: Val) -> Val:
        size = 4 * self.g.group * self.g.dim
        out: Val = self.a.out
        return out + ((self.first + query) * self.g.heads + self.head) * size

    def _pairs(self, query: Val) -> Val:
        return self.tile.at("pairs") + query * (8 * self.g.group)

    def _state(self, query: Val) -> Val:
        return self.tile.state + query * self.tile.state_stride

    def begin(self) -> None:
        """Nothing seen yet."""
        k, g = self.k, self.g
        for j in k.range(self.count):
            g.states.clear(k, self._state(j))
            if not self.split:
                k.fill(self._out(j), 0, k.i64(4 * g.group * g.dim))
                for head in k.range(g.group):
                    g.states.reset(k, self._pairs(j) + head * 8)

    def join(self, query: Val) -> None:
        """A query's part is complete."""
        if not self.split:
            states = self.g.states
            states.join(self.k, self._out(query), self._pairs(query), self._state(query))
            states.clear(self.k, self._state(query))

    def end(self) -> None:
        """All parts are joined."""
        if not self.split:
            for j in self.k.range(self.count):
                self.g.states.finish(self.k, self._out(j), self._pairs(j))

    # --- pages ---

    def pages(self, block: Val) -> tuple[tuple[Val, Val], tuple[Val, Val]]:
        """Keys and values of a block."""
        k, g, a = self.k, self.g, self.a
        page = k.load(I64, a.table + (self.sequence * a.table_width + block) * 8, align=8)
        at = page * g.heads + self.head
        (x, y), (z, w) = g.page_bytes("k"), g.page_bytes("v")
        return (a.k0 + at * x, a.k1 + at * y), (a.v0 + at * z, a.v1 + at * w)

    def attend(self, block: Val, count: Val) -> None:
        """Of the queries that are listed."""
        with self.k.when(count > 0):
            self.tile.block(self.k, count, *self.pages(block))

    # --- blocks ---

    def sparse(self) -> None:
        """The union of the queries' block lists, ascending."""
        k, tile = self.k, self.tile
        start = self.part * PART_ENTRIES if self.split else k.i64(0)
        stop = k.min(start + PART_ENTRIES, k.i64(self.topk)) if self.split else k.i64(self.topk)
        cursors, heads = tile.at("cursor"), tile.at("block")
        for j in k.range(self.count):
            self._advance(j, start, stop)
        block = k.var(self._least())
        for _ in k.repeat(lambda: block.get() < _NONE):
            now = block.get()
            count = k.var(k.i64(0))
            for j in k.range(self.count):
                with k.when(k.load(I64, heads + j * 8, align=8).eq(now)):
                    tile.put(k, count.get(), j, k.min(self.position(j) - now * self.g.page + 1, self.g.page))
                    count.add(1)
            self.attend(now, count.get())
            for i in k.range(count.get()):
                j = tile.listed(k, "listed", i)
                before = k.load(I64, cursors + j * 8, align=8)
                self._advance(j, before + 1, stop)
                after = k.load(I64, cursors + j * 8, align=8)
                left = (after // PART_ENTRIES).ne(before // PART_ENTRIES)
                with k.when(left | (after >= stop)):
                    self.join(j)
            block.set(self._least())

    def _advance(self, query: Val, start: Val, stop: Val) -> None:
        """Find a query's next block from an entry of its list on; entries of no block, or of one after it, are none."""
        k = self.k
        entries = self.a.blocks + ((self.first + query) * self.g.heads + self.head) * (8 * self.topk)
        own = self.position(query) // self.g.page
        at, found = k.var(start), k.var(k.i64(_NONE))
        for _ in k.repeat(lambda: (at.get() < stop) & found.get().eq(_NONE)):
            entry = k.load(I64, entries + at.get() * 8, align=8)
            good = (entry >= 0) & (entry <= own)
            found.set(good.select(entry, _NONE))
            at.set(good.select(at.get(), at.get() + 1))
        k.store(at.get(), self.tile.at("cursor") + query * 8, align=8)
        k.store(found.get(), self.tile.at("block") + query * 8, align=8)

    def _least(self) -> Val:
        k = self.k
        least = k.var(k.i64(_NONE))
        for j in k.range(self.count):
            least.set(k.min(least.get(), k.load(I64, self.tile.at("block") + j * 8, align=8)))
        return least.get()

    def dense(self) -> None:
        """Every block up to the last query."""
        last = self.position(self.count - 1) // self.g.page + 1
        self._context(self.k.i64(0), last, self.part, self._causal)

    def _causal(self, query: Val, start: Val) -> tuple[Val, None]:
        return self.k.min(self.position(query) - start + 1, self.g.page), None

    def drafted(self) -> None:
        """The blocks of the context from the window on, then the drafted block itself."""
        k, g, a = self.k, self.g, self.a
        rows = self._cu(self.sequence)
        drafted = self._cu(self.sequence + 1) - rows
        context = k.load(I64, a.lengths + self.sequence * 8, align=8) - drafted
        first = k.max(self.position(0) - a.window + 1, 0) // g.page
        end = (context + (g.page - 1)) // g.page

        def seen(query: Val, start: Val) -> tuple[Val, Val]:
            least = k.max(self.position(query) - a.window + 1 - start, 0)
            return k.min(context - start, g.page), least

        self._context(first, end, first // self.part_blocks + self.part, seen)
        own = self.part.eq(a.parts - 1) if self.split else k.i64(1).eq(1)
        with k.when(own):
            self._own(rows, drafted)

    def _cu(self, at: Val) -> Val:
        return self.k.load(I64, self.a.cu + at * 8, align=8)

    def _context(self, first: Val, end: Val, part: Val, seen: Callable[[Val, Val], tuple[Val, Val | None]]) -> None:
        """Blocks `first` to `end`, or those of them in a part.

        Args:
            seen: of a query and a block's first token: it sees so many tokens of it, from which on.
        """
        k, size = self.k, self.part_blocks
        if self.split:
            first, end = k.max(first, part * size), k.min(end, (part + 1) * size)
        for block in k.range(first, end):
            count = k.var(k.i64(0))
            for j in k.range(self.count):
                limit, least = seen(j, block * self.g.page)
                with k.when(limit > (least if least is not None else 0)):
                    self.tile.put(k, count.get(), j, limit, least)
                    count.add(1)
            self.attend(block, count.get())
            if not self.split:
                with k.when(((block + 1) % size).eq(0) | (block + 1).eq(end)):
                    for j in k.range(self.count):
                        self.join(j)

    def _own(self, rows: Val, drafted: Val) -> None:
        """The drafted block: its keys go into lanes as many at a time as a page has, its values are read in place."""
        k, g, a, tile = self.k, self.g, self.a, self.tile
        most = LANES * g.groups
        for start in k.range(0, drafted, most):
            limit = k.min(drafted - start, most)
            for j in k.range(self.count):
                tile.put(k, j, j, limit, k.i64(0))
            keys = tile.at("keys")
            for token in k.range(limit):
                source = a.own_k + ((rows + start + token) * g.heads + self.head) * (4 * g.dim)
                lane = keys + token // LANES * (4 * LANES * g.dim) + token % LANES * 4
                for c in k.range(g.dim):
                    k.store(k.load(F32, source + c * 4, align=4), lane + c * (4 * LANES), align=4)
            values = a.own_v + ((rows + start) * g.heads + self.head) * (4 * g.dim)
            tile.panels(k, self.count, "single", keys, values, 4 * g.heads * g.dim)
        for j in k.range(self.count):
            self.join(j)


def _attention(kind: str, g: Geometry, *, split: bool, topk: int) -> Native:
    """The kernel: `sparse`, `dense` or `drafted`."""

    def emit(k: Kernel, a: Any) -> None:
        seqs, size = count_of(k, a.seqs), g.queries
        queries = g.group * g.dim * 4

        def count_in(s: Val) -> Val:
            rows = k.load(I64, a.cu + s * 8, 8, align=8) - k.load(I64, a.cu + s * 8, align=8)
            return (rows + (size - 1)) // size

        tiles = k.var(k.i64(0))
        for s in k.range(seqs):
            tiles.add(count_in(s))
        parts = a.parts if split else k.i64(1)
        room = a.room + k.thread * g.room()[""][1]
        tasks = k.var(tiles.get() * g.heads * parts)
        for task in k.tasks(tasks.get()):
            back = tasks.get() - 1 - task  # long ones first
            head, rest = back % g.heads, back // g.heads
            part, left = rest % parts, k.var(rest // parts)
            sequence, tile = k.var(k.i64(-1)), k.var(k.i64(0))
            for s in k.range(seqs):
                count = count_in(s)
                here = (left.get() < count) & (sequence.get() < 0)
                tile.set(here.select(left.get(), tile.get()))
                sequence.set(here.select(s, sequence.get()))
                left.add(-1 * count)
            at = a.cu + sequence.get() * 8
            first = k.load(I64, at, align=8) + tile.get() * size
            count = k.min(k.load(I64, at, 8, align=8) - first, size)
            if split:
                state = a.partial + ((first * g.heads + head) * parts + part) * g.states.size
                stride = parts * (g.heads * g.states.size)
            else:
                state, stride = room + g.room()["states"][0], k.i64(g.states.size)
            made = Tile(
                g=g,
                q=a.q + (first * g.heads + head) * queries,
                stride=g.heads * queries,
                scale=a.scale,
                room=room,
                state=state,
                state_stride=stride,
                windowed=kind == "drafted",
            )
            task_ = _Task(k, g, a, split, topk, made, sequence.get(), first, count, head, part)
            if g.dots:
                made.pairs_of_queries(k, count)
            task_.begin()
            getattr(task_, kind)()
            task_.end()

    ending = f"-top{topk}" if kind == "sparse" else ""
    return Native(f"{kind}-{g.name}{ending}{'-parts' if split else ''}", _FIELDS, emit)


def _joined(g: Geometry) -> Native:
    """Joins the parts of every query, in order."""

    def emit(k: Kernel, a: Any) -> None:
        pairs = k.room(8 * g.group)
        size = 4 * g.group * g.dim
        for task in k.tasks(k.load(I64, a.cu + count_of(k, a.seqs) * 8, align=8) * g.heads):
            out = a.out + task * size
            k.fill(out, 0, k.i64(size))
            for head in k.range(g.group):
                g.states.reset(k, pairs + head * 8)
            for part in k.range(a.parts):
                g.states.join(k, out, pairs, a.partial + (task * a.parts + part) * g.states.size)
            g.states.finish(k, out, pairs)

    fields = {"out": PTR, "cu": PTR, "seqs": PTR, "parts": I64, "partial": PTR}
    return Native(f"joined-h{g.heads}g{g.group}d{g.dim}", fields, emit)


# --- factories ---


def _unserved(op: OpInstance, at: Binding, form: str, group: int, dim: int) -> str | None:
    """Why there is no kernel."""
    if form not in ("float32", "bfloat16", "fp8", "nvfp4"):
        return f"pages of {form or 'no format'}"
    if group > _MOST_GROUP:
        return f"{group} query heads for a KV head, at most {_MOST_GROUP} are served"
    if dim % {"float32": 1, "bfloat16": 2, "fp8": 2, "nvfp4": 16}[form]:
        return f"heads of {dim} channels in {form} pages"
    spec = at.numerics
    if op.spec.name != "draft_attention":
        if spec.query == "e4m3" or spec.probability is not None:
            return f"rounds neither queries nor softmax weights to E4M3, as '{spec.name}' asks"
        if form == "nvfp4" and spec.kv_read != "exact":
            return f"reads NVFP4 pages exactly, not as '{spec.kv_read}'"
    return None


def _factory(kind: str) -> Factory:
    def factory(op: OpInstance, at: Binding) -> NativeKernel | Refusal:
        names = [arg.name for arg in op.spec.inputs]
        given: dict[str, Any] = dict(zip(names, op.inputs, strict=True))
        q, pages, attrs = given["q"], next(x for x in op.inputs if isinstance(x, StateType)), op.attrs
        heads, dim = attrs["kv_heads"], q.shape[2]
        group = q.shape[1] // heads
        reason = _unserved(op, at, pages.kv_format, group, dim)
        if reason is not None:
            return Refusal(reason)
        topk = given["blocks"].shape[2] if kind == "sparse" else 0
        largest = Geometry(pages.kv_format, heads, group, dim, _MOST_PAGE, at.isa)
        parts = _parts(kind, topk, at.step.pages, _MOST_PAGE, attrs) + (kind == "drafted")
        partial = at.step.tokens * heads * parts * largest.states.size
        tiles = min(at.step.tokens, at.step.seqs + at.step.tokens // largest.queries)
        split = parts > 1 and tiles * heads < 2 * at.threads and partial <= _MOST_PARTIAL and at.threads > 1
        room = at.threads * largest.room()[""][1] + 64

        def works(outs: Sequence[Any], ins: Sequence[Any], w: Any, space: Any, sizes: Sizes) -> list[Work]:
            buffers = dict(zip(names, ins, strict=True))
            cache = buffers.pop(next(name for name, value in given.items() if value is pages))
            g = Geometry(pages.kv_format, heads, group, dim, cache.page_tokens, at.isa)
            if g.page > _MOST_PAGE:
                raise BackendRefused(f"pages of {g.page} tokens", where="backend cpu", expected=f"{_MOST_PAGE} at most")
            stored = [_parts_of(cache, attrs["layer"], name) for name in ("k", "v")]
            base = -(-space.data_ptr() // 64) * 64
            n = _parts(kind, topk, buffers["page_table"].shape[1], g.page, attrs)
            addresses = {name: tensor.data_ptr() for name, tensor in buffers.items()}
            values = {
                "q": addresses["q"],
                "out": outs[0].data_ptr(),
                "positions": addresses["positions"],
                "cu": addresses["cu_q"],
                "lengths": addresses["seq_lens"],
                "table": addresses["page_table"],
                "table_width": buffers["page_table"].shape[1],
                **{f"{name}{i}": x.data_ptr() for name, pair in zip("kv", stored, strict=True) for i, x in pair},
                "blocks": addresses.get("blocks", 0),
                "own_k": addresses.get("k", 0),
                "own_v": addresses.get("v", 0),
                "window": attrs.get("window", 0),
                "seqs": sizes.at(given["seq_lens"].shape[0]),
                "parts": n,
                "scale": attrs["scale"] * _LOG2E,
                "room": base,
                "partial": base + room - 64,
            }
            reads = tuple(span(x) for x in (*buffers.values(), *(x for pair in stored for _, x in pair)))
            native = _attention(kind, g, split=split, topk=topk)
            held = (sizes, space, *buffers.values())
            if not split:
                return [Work(native, values, reads, (span(outs[0]), span(space)), held)]
            joined = {name: values[name] for name in ("out", "cu", "seqs", "parts", "partial")}
            return [
                Work(native, values, reads, (span(space),), held),
                Work(_joined(g), joined, (span(buffers["cu_q"]),), (span(outs[0]), span(space)), held),
            ]

        return at.kernel(
            op,
            works,
            Arithmetic("bfloat16", "float32", "float32") if largest.dots else EXACT,
            reason=f"{pages.kv_format} pages" + (", parts of a context side by side" if split else ""),
            workspace_bytes=room + (partial if split else 0),
        )

    return factory


def _parts(kind: str, topk: int, pages: int, page: int, attrs: Mapping[str, Any]) -> int:
    """How many parts a query has at most."""
    if kind == "sparse":
        return -(-topk // PART_ENTRIES)
    blocks = max(1, PART_TOKENS // page)
    if kind == "dense":
        return -(-pages // blocks)
    return int((attrs["window"] // page + 2) // blocks + 3)  # those that a window touches, and the drafted block


def _parts_of(cache: Any, layer: int, name: str) -> list[tuple[int, torch.Tensor]]:
    """Numbers or codes, and scales (the same where there are none)."""
    parts = cache.components()
    main = parts.get(f"{layer}.{name}.values", parts.get(f"{layer}.{name}.codes"))
    return [(0, main), (1, parts.get(f"{layer}.{name}.scale", main))]


ATTENTION: Mapping[str, Factory] = {
    "sparse_attention": _factory("sparse"),
    "dense_attention": _factory("dense"),
    "draft_attention": _factory("drafted"),
}
__all__ = ["ATTENTION", "PART_ENTRIES", "PART_TOKENS"]
