"""Sequences, scheduling, and one forward step at a time (DESIGN.md §5).

A sequence is admitted when the pages for its prompt and all the tokens that it may still generate are free, so an
admitted sequence always finishes. Each step takes one token of every decoding sequence and fills the rest of its
token budget with prefill chunks; a chunk may end anywhere.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from m31.engine.pool import PagePool
from m31.engine.sampling import RowState, Sampled, SamplingParams, sample
from m31.errors import M31Error
from m31.graph import ModelGraph, Plan, StepBatch, StepClass, WeightHandle, bind
from m31.sdk.backend import KVCache, Session

_KEPT_PLANS = 8
_LOGITS_CHUNK = 256  # tokens of a step whose every row gets full-vocabulary logits
_MIN_PAGES = 16  # smallest page-table width of a plan


@dataclass(eq=False)
class Sequence:
    """One sequence in the engine. With `params` None it generates nothing: the caller wants the logits of its tokens.

    Attributes:
        request: tells apart sequences of one seed, see RowState.
        tokens: prompt and generated tokens.
        computed: how many of them are in the cache.
        outputs: sampled tokens that the owner has not taken yet.
        rows: float32 logits [n,V] of consecutive positions, when `params` is None.
        done: no more tokens will come.
    """

    prompt: tuple[int, ...]
    params: SamplingParams | None
    seed: int
    request: int
    stop_ids: frozenset[int]
    tokens: list[int] = field(default_factory=list)
    computed: int = 0
    pages: list[int] = field(default_factory=list)
    outputs: deque[Sampled] = field(default_factory=deque)
    rows: deque[torch.Tensor] = field(default_factory=deque)
    done: bool = False
    reason: str | None = None  # "stop" | "length"

    @property
    def capacity(self) -> int:
        """Tokens that the sequence may ever hold in the cache. The last sampled token is never run."""
        return len(self.prompt) + self.max_new - (1 if self.max_new else 0)

    @property
    def max_new(self) -> int:
        """Tokens to generate at most; 0 without `params`."""
        if self.params is None:
            return 0
        assert self.params.max_tokens is not None, "resolve the parameters first"
        return self.params.max_tokens

    @property
    def pending(self) -> int:
        """Tokens that are known and not computed."""
        return len(self.tokens) - self.computed


class Engine:
    """Runs sequences on one session.

    Args:
        session: an open backend.
        who: its name, for messages.
        graph, handles: the traced model and its prepared weights.
        cache: allocated pages.
        page_tokens: tokens of a page.
        chunk_tokens: most tokens of one step.
    """

    def __init__(
        self,
        *,
        session: Session,
        who: str,
        graph: ModelGraph,
        handles: Mapping[str, WeightHandle],
        cache: KVCache,
        page_tokens: int,
        chunk_tokens: int,
    ) -> None:
        self.session, self.cache, self.page_tokens, self.chunk_tokens = session, cache, page_tokens, chunk_tokens
        self._who, self._graph, self._handles = who, graph, handles
        self.pool = PagePool(cache.pages)
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._plans: OrderedDict[StepClass, tuple[Plan, StepBatch]] = OrderedDict()

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence. It must fit the pool; `m31.engine.model` checks the limits that users know by name."""
        if self._pages_for(sequence) > self.pool.pages:
            raise M31Error(
                f"a sequence of {sequence.capacity:,} tokens needs {self._pages_for(sequence):,} pages",
                where="engine",
                expected=f"at most the pool's {self.pool.pages:,}",
            )
        sequence.tokens = list(sequence.prompt)
        self._waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, finished or not, and free its pages. Removing twice does nothing."""
        sequence.done = True
        if sequence in self._waiting:
            self._waiting.remove(sequence)
        if sequence in self._running:
            self._running.remove(sequence)
            self.pool.give_back(sequence.pages)
            sequence.pages = []

    @property
    def busy(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._waiting or self._running)

    def step(self) -> None:
        """One forward step. If it raises, no sequence has moved and the step can be repeated."""
        self._admit()
        work = self._schedule()
        if not work:
            raise M31Error(
                "no sequence can run", where="engine", fix="report this: an admitted sequence must always run"
            )
        logits, owners = self._forward(work)
        sampled = iter(self._sample(logits, owners))
        for sequence, count in work:
            sequence.computed += count
        for sequence, row in owners:
            if sequence.params is None:
                sequence.rows.append(logits[row].float().clone())
                if not sequence.pending:
                    self._finish(sequence, "length")
            else:
                self._append(sequence, next(sampled))

    def _pages_for(self, sequence: Sequence) -> int:
        return -(-sequence.capacity // self.page_tokens)

    def _admit(self) -> None:
        while self._waiting and self._pages_for(self._waiting[0]) <= self.pool.free:
            sequence = self._waiting.popleft()
            sequence.pages = self.pool.take(self._pages_for(sequence))
            self._running.append(sequence)

    def _schedule(self) -> list[tuple[Sequence, int]]:
        """(sequence, tokens to compute): decodes first, then chunks in order of arrival."""
        budget = self.chunk_tokens
        work: list[tuple[Sequence, int]] = []
        for sequence in sorted(self._running, key=lambda s: s.pending > 1):  # stable: order of arrival within each
            count = min(sequence.pending, budget, _LOGITS_CHUNK if sequence.params is None else budget)
            if count:
                work.append((sequence, count))
                budget -= count
        return work

    def _forward(self, work: list[tuple[Sequence, int]]) -> tuple[torch.Tensor, list[tuple[Sequence, slice]]]:
        """Logits of the step and which of its rows belong to whom."""
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        tables: list[list[int]] = []
        out_rows: list[int] = []
        owners: list[tuple[Sequence, slice]] = []
        for s, count in work:
            start, end = s.computed, s.computed + count
            first_row = len(tokens)
            tokens += s.tokens[start:end]
            positions += range(start, end)
            slots += [
                s.pages[p // self.page_tokens] * self.page_tokens + p % self.page_tokens for p in range(start, end)
            ]
            tables.append(s.pages[: -(-end // self.page_tokens)])
            wanted = (
                range(first_row, first_row + count)
                if s.params is None
                else range(first_row + count - 1, first_row + count)
            )
            if s.params is None or end == len(s.tokens):
                owners.append((s, slice(len(out_rows), len(out_rows) + len(wanted))))
                out_rows += wanted
        q_lens = [count for _, count in work]
        decode = all(n == 1 for n in q_lens)
        step = StepClass(
            kind="decode" if decode else "mixed",
            q_len=1 if decode else 0,
            tokens=_bucket(len(tokens)),
            seqs=_bucket(len(work)),
            rows=_bucket(len(out_rows)),
            pages=max(_MIN_PAGES, _bucket(max(map(len, tables)))),
        )
        plan, batch = self._plan(step)
        batch.fill(
            tokens=tokens,
            positions=positions,
            q_lens=q_lens,
            seq_lens=[s.computed + n for s, n in work],
            slot_map=slots,
            page_table=tables,
            out_rows=out_rows,
        )
        return plan.run(batch, self.cache), owners

    def _plan(self, step: StepClass) -> tuple[Plan, StepBatch]:
        """The plan of a step class and its buffers; the least recently used one goes when there are too many."""
        if step not in self._plans:
            bound = bind(self._graph, self.session, step, self._handles, self._who)
            self._plans[step] = self.session.compile(bound, step), StepBatch.allocate(step, self.session.device)
            if len(self._plans) > _KEPT_PLANS:
                self._plans.popitem(last=False)
        self._plans.move_to_end(step)
        return self._plans[step]

    def _sample(self, logits: torch.Tensor, owners: list[tuple[Sequence, slice]]) -> list[Sampled]:
        rows = [(s, row) for s, row in owners if s.params is not None]
        if not rows:
            return []
        states = [
            RowState(
                params=s.params,
                seed=s.seed,
                request=s.request,
                position=len(s.tokens),
                prompt_ids=s.prompt,
                output_ids=s.tokens[len(s.prompt) :],
            )
            for s, _ in rows
            if s.params is not None
        ]
        return sample(torch.cat([logits[row] for _, row in rows]).float(), states)

    def _append(self, sequence: Sequence, sampled: Sampled) -> None:
        sequence.tokens.append(sampled.token_id)
        sequence.outputs.append(sampled)
        if sampled.token_id in sequence.stop_ids:
            self._finish(sequence, "stop")
        elif len(sequence.tokens) - len(sequence.prompt) >= sequence.max_new:
            self._finish(sequence, "length")

    def _finish(self, sequence: Sequence, reason: str) -> None:
        sequence.reason = reason
        self.remove(sequence)


def _bucket(count: int) -> int:
    """The next power of two, at least 1."""
    return 1 << max(0, count - 1).bit_length()
