"""Sequences, scheduling, and one forward step at a time (DESIGN.md §5).

A sequence is admitted when the pages for its prompt and all the tokens that it may still generate can be promised, so
an admitted sequence always finishes. Each step takes one token of every decoding sequence and fills the rest of its
token budget with prefill chunks; a chunk may end anywhere.

With a draft head each decoding sequence takes its anchor and a few drafted tokens instead of one token, and keeps what
verification leaves of them (MODEL.md §5.4). How many are drafted depends on the sequence alone, never on its company,
and so does its text. Drafts are made one sequence after the other; the target verifies them all in one step.
"""

from __future__ import annotations

import threading
from collections import Counter, deque

import torch

from m31.engine.compiler import MIN_PAGES, Compiler, bucket
from m31.engine.drafting import Drafter, extra
from m31.engine.pages import PageTable
from m31.engine.pool import PagePool
from m31.engine.sampling import RowState, sample
from m31.engine.sequence import Result, Sequence, Work
from m31.engine.verify import verify
from m31.errors import M31Error, PagesExhausted
from m31.graph import StepClass
from m31.sdk.backend import KVCache

__all__ = ["Engine", "Sequence"]

_LOGITS_CHUNK = 256  # tokens of a step whose every row gets full-vocabulary logits


class Engine:
    """Runs sequences on one session.

    Args:
        compiler: makes the plans.
        cache: allocated pages.
        page_tokens: tokens of a page.
        chunk_tokens: most tokens of one step.
        prefix_cache: whether sequences use pages that others have computed for the same beginning. A sequence whose
            logits are wanted for every token never does, and its own pages are not used by others.
        drafter: who drafts tokens, or None; the compiler's graph then has taps.
    """

    def __init__(
        self,
        *,
        compiler: Compiler,
        cache: KVCache,
        page_tokens: int,
        chunk_tokens: int,
        prefix_cache: bool,
        drafter: Drafter | None = None,
    ) -> None:
        self.compiler, self.cache, self.page_tokens, self.chunk_tokens = compiler, cache, page_tokens, chunk_tokens
        self.drafter = drafter
        # Calls of which op ran on another backend than the chosen one.
        self.fallback_calls = Counter[str]() if drafter is None else drafter.fallback_calls
        also = drafter.caches if drafter is not None else ()
        self.pool = PagePool(cache, page_tokens=page_tokens, prefix_cache=prefix_cache, poison=False, also=also)
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self.lock = threading.RLock()  # one step at a time, whichever thread asks for it
        self._at_work = False
        self._taps = torch.empty(0)  # of the last step, with a drafter
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
            self._undraft()
            self._admit()
            scheduled = self._schedule()
            if not scheduled:
                raise M31Error(
                    "no sequence can run", where="engine", fix="report this: an admitted sequence must always run"
                )
            work = [item for item in scheduled if self._draft(item)]
            if not work:
                return  # every draft failed; their sequences end with the reason
            logits, owners = self._forward(work)
            results = {item: self._result(item, logits[rows]) for item, rows in owners}
            kept = {item: item.kept(results[item]) if item in results else item.count for item in work}
            self._learn(kept)
            for item, result in results.items():
                if not item.sequence.done:
                    self._deliver(item, result)
            # Last: a sequence that lags behind what it was given computes the same again, one that ran ahead would wait
            # for a token that never comes.
            for item, count in kept.items():
                self._commit(item, count)
        finally:
            self._at_work = False
            self._let_go()

    def _undraft(self) -> None:
        """Drop drafts that an interrupt left undecided."""
        for sequence in self._running:
            if sequence.table is not None and (undecided := sequence.table.length - sequence.table.committed):
                sequence.table.rewind(undecided)

    def _commit(self, item: Work, kept: int) -> None:
        """The pages hold the next `kept` tokens. Those of a sequence that failed are withdrawn when it is let go."""
        sequence, table = item.sequence, item.sequence.table
        assert table is not None, "a running sequence has its pages"
        if item.drafted.tokens:
            table.draft(item.tokens)
            table.commit(kept)
            table.rewind(len(item.tokens) - kept)
        else:
            table.append(item.tokens)
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

    def _schedule(self) -> list[Work]:
        """Decodes first, then chunks in order of arrival. A draft is never cut to the budget: it waits."""
        budget = self.chunk_tokens
        work: list[Work] = []
        for sequence in sorted(self._running, key=lambda s: s.pending > 1):  # stable: order of arrival within each
            wanted = self._wanted(sequence)
            count = min(sequence.pending, budget, _LOGITS_CHUNK if sequence.params is None else budget)
            if count and count + wanted <= budget:
                work.append(Work(sequence, count, wanted))
                budget -= count + wanted
        return work

    def _wanted(self, sequence: Sequence) -> int:
        """How many tokens to draft for a sequence: as many as it may still generate, less the one that follows them.

        The first token is never drafted, whether its prompt was computed or found.
        """
        if self.drafter is None or not sequence.sampled or sequence.pending != 1:
            return 0
        return min(self.drafter.tokens, self.chunk_tokens - 1, sequence.max_new - len(sequence.sampled) - 1)

    def _draft(self, item: Work) -> bool:
        """Draft what is wanted. False if that failed, which ends the sequence."""
        sequence = item.sequence
        if item.wanted == 0 or self.drafter is None:
            return True
        assert sequence.table is not None, "a running sequence has its pages"
        (anchor,) = sequence.ids(sequence.computed, sequence.length)
        try:
            item.drafted = self.drafter.draft(anchor, item.wanted, sequence.table.pages, self._state(sequence))
        except M31Error as error:
            sequence.error = error
            self.remove(sequence)
            return False
        return True

    def _learn(self, kept: dict[Work, int]) -> None:
        """Show the draft head what the target made of the tokens that stay."""
        if self.drafter is None:
            return
        rows: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        first = 0
        for item, count in kept.items():
            rows += range(first, first + count)
            positions += range(item.start, item.start + count)
            slots += item.slots[:count]
            first += len(item.tokens)
        self.drafter.learn(self._taps[torch.tensor(rows, device=self._taps.device)], positions, slots)

    def _forward(self, work: list[Work]) -> tuple[torch.Tensor, list[tuple[Work, slice]]]:
        """Logits of the step and which of its rows belong to whom."""
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        tables: list[list[int]] = []
        out_rows: list[int] = []
        owners: list[tuple[Work, slice]] = []
        for item in work:
            s, start, known = item.sequence, item.start, item.start + item.count
            item.tokens = [*s.ids(start, known), *item.drafted.tokens]
            end = start + len(item.tokens)
            first_row = len(tokens)
            tokens += item.tokens
            positions += range(start, end)
            assert s.table is not None, "a running sequence has its pages"
            item.slots = s.table.place(len(item.tokens))
            slots += item.slots
            tables.append(s.table.pages[: self.pool.pages_for(end)])
            wanted = range(first_row if s.params is None else first_row + item.count - 1, first_row + len(item.tokens))
            if s.params is None or known == s.length:
                owners.append((item, slice(len(out_rows), len(out_rows) + len(wanted))))
                out_rows += wanted
        q_lens = [len(item.tokens) for item in work]
        decode = all(n == 1 for n in q_lens)
        verifies = len(set(q_lens)) == 1 and all(item.drafted.tokens for item in work)
        step = StepClass(
            kind="decode" if decode else "verify" if verifies else "mixed",
            q_len=q_lens[0] if decode or verifies else 0,
            tokens=bucket(len(tokens)),
            seqs=bucket(len(work)),
            rows=bucket(len(out_rows)),
            pages=max(MIN_PAGES, bucket(max(map(len, tables)))),
        )
        plan, batch, fallbacks = self.compiler.plan(step)
        batch.fill(
            tokens=tokens,
            positions=positions,
            q_lens=q_lens,
            seq_lens=[item.start + len(item.tokens) for item in work],
            slot_map=slots,
            page_table=tables,
            out_rows=out_rows,
        )
        logits = plan.run(batch, self.cache)
        if self.drafter is not None:
            self._taps = extra(plan, "taps")
        self.fallback_calls.update(fallbacks)
        return logits, owners

    def _state(self, sequence: Sequence) -> RowState:
        """Of the next token that the sequence gets."""
        assert sequence.params is not None, "a sequence that generates"
        return RowState(
            params=sequence.params,
            seed=sequence.seed,
            request=sequence.request,
            position=sequence.length,
            prompt_ids=sequence.prompt,
            output_ids=[s.token_id for s in sequence.sampled] if sequence.params.penalised else (),
        )

    def _result(self, item: Work, logits: torch.Tensor) -> Result:
        """What the logits mean for their sequence; a fault of one sequence is its own (BUG-70)."""
        sequence = item.sequence
        if sequence.params is None:
            return logits.float().clone()
        try:
            if not item.drafted.tokens:
                return sample(logits.float(), [self._state(sequence)])
            tokens = verify(logits.float(), item.drafted, self._state(sequence))
        except M31Error as error:
            return error
        stop = next((at for at, token in enumerate(tokens) if token.token_id in sequence.stop_ids), len(tokens))
        return tokens[: stop + 1]

    def _deliver(self, item: Work, result: Result) -> None:
        sequence, drafted = item.sequence, item.drafted
        if isinstance(result, M31Error):
            sequence.error = result
            self.remove(sequence)
        elif isinstance(result, torch.Tensor):
            sequence.rows[item.start] = result
        else:
            if drafted.tokens:
                tally = sequence.tally
                tally.verifies += 1
                tally.drafted += len(drafted.tokens)
                tally.accepted += sum(a.token_id == b for a, b in zip(result, drafted.tokens, strict=False))
                tally.confidence += sum(drafted.confidence)
            sequence.sampled.extend(result)
            if sequence.sampled[-1].token_id in sequence.stop_ids:
                self._finish(sequence, "stop")
            elif len(sequence.sampled) >= sequence.max_new:
                self._finish(sequence, "length")

    def _finish(self, sequence: Sequence, reason: str) -> None:
        sequence.reason = reason
        self.remove(sequence)
