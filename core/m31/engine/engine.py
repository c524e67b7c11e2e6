"""Sequences, scheduling, and one forward step at a time (DESIGN.md §5).

A sequence is admitted when the pages for its prompt and all the tokens that it may still generate can be promised, so
an admitted sequence always finishes. Each step takes one token of every decoding sequence and fills the rest of its
token budget with prefill chunks; a chunk may end anywhere.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from dataclasses import dataclass, field

import torch

from m31.engine.compiler import Compiler
from m31.engine.pages import PageTable
from m31.engine.pool import PagePool
from m31.engine.sampling import RowState, Sampled, SamplingParams, sample
from m31.engine.seals import PLAIN, Context
from m31.errors import M31Error, PagesExhausted
from m31.graph import StepClass
from m31.sdk.backend import KVCache

_LOGITS_CHUNK = 256  # tokens of a step whose every row gets full-vocabulary logits
_MIN_PAGES = 16  # smallest page-table width of a plan


@dataclass(eq=False)
class Sequence:
    """One sequence in the engine. With `params` None it generates nothing: the caller wants the logits of its tokens.

    What a step produces is added by one append, so an interrupt at any moment leaves a sequence that can go on.

    Attributes:
        params: resolved parameters (`max_tokens` and seed are set), or None.
        request: tells apart sequences of one seed, see RowState.
        stop_ids: tokens that end the text.
        context: what its pages depend on besides tokens; PLAIN is text of a tenant without salt, without adapter.
        table: its pages, from admission on.
        sampled: the generated tokens; the owner reads them from where it last stopped.
        rows: float32 logits [n,V] by the position of their first row, when `params` is None.
        reason: "stop" or "length" once no more tokens will come.
        error: why the sequence ended, if it failed; raised to its owner and to nobody else.
    """

    prompt: tuple[int, ...]
    params: SamplingParams | None
    seed: int
    request: int
    stop_ids: frozenset[int]
    context: Context = PLAIN
    table: PageTable | None = None
    sampled: list[Sampled] = field(default_factory=list)
    rows: dict[int, torch.Tensor] = field(default_factory=dict)
    done: bool = False
    reason: str | None = None
    error: M31Error | None = None

    @property
    def length(self) -> int:
        """Tokens that are known: prompt and generated."""
        return len(self.prompt) + len(self.sampled)

    @property
    def computed(self) -> int:
        """How many of its tokens are in the cache."""
        return self.table.length if self.table is not None else 0

    @property
    def pages(self) -> list[int]:
        """The physical pages that it holds."""
        return self.table.pages if self.table is not None else []

    @property
    def pending(self) -> int:
        """Tokens that are known and not computed."""
        return self.length - self.computed

    def ids(self, start: int, end: int) -> list[int]:
        """Tokens at positions start .. end - 1."""
        n = len(self.prompt)
        return [*self.prompt[start:end], *(s.token_id for s in self.sampled[max(0, start - n) : max(0, end - n)])]

    def logits(self) -> torch.Tensor:
        """All rows so far, in order of position."""
        return torch.cat([self.rows[start] for start in sorted(self.rows)])

    @property
    def max_new(self) -> int:
        """Tokens to generate at most; 0 without `params`."""
        if self.params is None:
            return 0
        assert self.params.max_tokens is not None, "resolve the parameters first"
        return self.params.max_tokens

    @property
    def capacity(self) -> int:
        """Tokens that the sequence may ever hold in the cache. The last sampled token is never run."""
        return len(self.prompt) + max(0, self.max_new - 1)


class Engine:
    """Runs sequences on one session.

    Args:
        compiler: makes the plans.
        cache: allocated pages.
        page_tokens: tokens of a page.
        chunk_tokens: most tokens of one step.
        prefix_cache: whether sequences use pages that others have computed for the same beginning. A sequence whose
            logits are wanted for every token never does, and its own pages are not used by others.
    """

    def __init__(
        self,
        *,
        compiler: Compiler,
        cache: KVCache,
        page_tokens: int,
        chunk_tokens: int,
        prefix_cache: bool,
    ) -> None:
        self.compiler, self.cache, self.page_tokens, self.chunk_tokens = compiler, cache, page_tokens, chunk_tokens
        self.fallback_calls: Counter[str] = Counter()  # calls of which op ran on another backend than the chosen one
        self.pool = PagePool(cache, page_tokens=page_tokens, prefix_cache=prefix_cache, poison=False)
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self.lock = threading.RLock()  # one step at a time, whichever thread asks for it
        self._at_work = False
        self._leaving: list[Sequence] = []  # removed; their pages go back when nothing is at work with them

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence. It must fit the pool; `m31.engine.model` checks the limits that users know by name."""
        if self._pages_for(sequence) > self.pool.pages:
            raise M31Error(
                f"a sequence of {sequence.capacity:,} tokens needs {self._pages_for(sequence):,} pages",
                where="engine",
                expected=f"at most the pool's {self.pool.pages:,}",
            )
        with self.lock:
            self._waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, finished or not, and free its pages. Removing twice does nothing."""
        with self.lock:
            sequence.done = True
            # The lock does not keep out this thread's own garbage collector, which may end an abandoned generation at
            # any allocation: whatever uses pages or changes the pool finishes first.
            self._leaving.append(sequence)
            if not self._at_work:
                self._let_go()

    def _let_go(self) -> None:
        while self._leaving:
            self._at_work = True
            try:
                while self._leaving:
                    self._drop(self._leaving.pop())
            finally:
                self._at_work = False

    def _drop(self, sequence: Sequence) -> None:
        if sequence in self._waiting:
            self._waiting.remove(sequence)
        if sequence in self._running:
            self._running.remove(sequence)
        if sequence.table is not None and not sequence.table.released:
            if sequence.error is not None:
                sequence.table.withdraw()
            sequence.table.release()

    @property
    def busy(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._waiting or self._running)

    def step(self) -> None:
        """One forward step. If it raises, or is interrupted, every sequence can still go on."""
        with self.lock:
            self._step()

    def _step(self) -> None:
        self._at_work = True
        try:
            self._admit()
            work = self._schedule()
            if not work:
                raise M31Error(
                    "no sequence can run", where="engine", fix="report this: an admitted sequence must always run"
                )
            logits, owners = self._forward(work)
            results = [self._result(sequence, logits[row]) for sequence, row in owners]
            for (sequence, _), result in zip(owners, results, strict=True):
                if not sequence.done:
                    self._deliver(sequence, result)
            # Last: a sequence that lags behind what it was given computes the same again, one that ran ahead would wait
            # for a token that never comes.
            for sequence, count in work:
                self._commit(sequence, count)
        finally:
            self._at_work = False
            self._let_go()

    def _commit(self, sequence: Sequence, count: int) -> None:
        """The pages hold the next `count` tokens. Those of a sequence that failed are withdrawn when it is let go."""
        assert sequence.table is not None, "a running sequence has its pages"
        sequence.table.append(sequence.ids(sequence.computed, sequence.computed + count))
        if sequence.params is None and not sequence.pending:
            self._finish(sequence, "length")

    def _pages_for(self, sequence: Sequence) -> int:
        return self.pool.pages_for(sequence.capacity)

    def _admit(self) -> None:
        while self._waiting:
            sequence = self._waiting[0]
            try:
                sequence.table = PageTable.open(
                    self.pool,
                    sequence.context,
                    sequence.prompt,
                    capacity=sequence.capacity,
                    share=sequence.params is not None,  # otherwise every row is wanted, and found pages give none
                )
            except PagesExhausted:
                return  # the others wait behind it
            self._running.append(self._waiting.popleft())

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
            tokens += s.ids(start, end)
            positions += range(start, end)
            assert s.table is not None, "a running sequence has its pages"
            slots += s.table.place(count)
            tables.append(s.table.pages[: self.pool.pages_for(end)])
            wanted = (
                range(first_row, first_row + count)
                if s.params is None
                else range(first_row + count - 1, first_row + count)
            )
            if s.params is None or end == s.length:
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
        plan, batch, fallbacks = self.compiler.plan(step)
        batch.fill(
            tokens=tokens,
            positions=positions,
            q_lens=q_lens,
            seq_lens=[s.computed + n for s, n in work],
            slot_map=slots,
            page_table=tables,
            out_rows=out_rows,
        )
        logits = plan.run(batch, self.cache)
        self.fallback_calls.update(fallbacks)
        return logits, owners

    def _result(self, sequence: Sequence, logits: torch.Tensor) -> Sampled | torch.Tensor | M31Error:
        """What the logits mean for their sequence; a fault of one sequence is its own (BUG-70)."""
        if sequence.params is None:
            return logits.float().clone()
        state = RowState(
            params=sequence.params,
            seed=sequence.seed,
            request=sequence.request,
            position=sequence.length,
            prompt_ids=sequence.prompt,
            output_ids=[s.token_id for s in sequence.sampled] if sequence.params.penalised else (),
        )
        try:
            return sample(logits.float(), [state])[0]
        except M31Error as error:
            return error

    def _deliver(self, sequence: Sequence, result: Sampled | torch.Tensor | M31Error) -> None:
        if isinstance(result, M31Error):
            sequence.error = result
            self.remove(sequence)
        elif isinstance(result, torch.Tensor):
            sequence.rows[sequence.computed] = result
        else:
            sequence.sampled.append(result)
            if result.token_id in sequence.stop_ids:
                self._finish(sequence, "stop")
            elif len(sequence.sampled) >= sequence.max_new:
                self._finish(sequence, "length")

    def _finish(self, sequence: Sequence, reason: str) -> None:
        sequence.reason = reason
        self.remove(sequence)


def _bucket(count: int) -> int:
    """The next power of two, at least 1."""
    return 1 << max(0, count - 1).bit_length()
