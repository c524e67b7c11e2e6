"""The life of pages as a state machine against a model that knows what every sequence must read.

The model writes into each slot a number that stands for everything its keys and values depend on: all tokens up to
there, adapter, salt, and media that have begun. A page that reaches a sequence which differs in any of it shows as a
wrong number, a page that was freed under a reader as poison.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tests.support.fake_pages import PAGE, POISON, FakeCache

from m31.engine.pages import PageTable
from m31.engine.pool import PagePool
from m31.engine.seals import PLAIN, Context, Digest, Media, Seal, make_seal, sha256
from m31.errors import PageError, PagesExhausted

PAGES = 10
HALF_DONE = -7  # what a step that failed has left in its slots

# Ids that are equal in their low byte or low sixteen bits (BUG-63). Two texts part in their second page; the third has
# the tokens of their first page in every page.
COMMON = [65, 321, 65601, 65, 321]
TEXTS = [COMMON + [65, 321, 65601] * 9, COMMON + [321, 65, 65601] * 9, COMMON[:PAGE] * 8]
CONTEXTS = [
    *[PLAIN] * 5,
    Context(adapter="x", salt=None, media=()),
    Context(adapter=None, salt="x", media=()),  # BUG-65
    Context(adapter=None, salt=None, media=(Media(start=1, end=6, digest=b"x"),)),
    Context(adapter=None, salt=None, media=(Media(start=5, end=6, digest=b"x"),)),
    Context(adapter=None, salt=None, media=(Media(start=5, end=6, digest=b"y"),)),
]
PICK = st.integers(0, 50)


@dataclass(eq=False)
class Held:
    """A table and what the model knows about it."""

    table: PageTable
    context: Context
    share: bool
    text: list[int]  # all tokens that it will ever have
    drafts: int = 0
    failed: bool = False  # its pages must not be found


class PagesMachine(RuleBasedStateMachine):
    """One pool, several sequences."""

    digest: Digest = staticmethod(sha256)
    exact = True  # digests differ where contents do
    prefix_cache = True

    def __init__(self) -> None:
        super().__init__()
        self.cache = FakeCache(PAGES, PAGE)
        self.pool = PagePool(
            self.cache, page_tokens=PAGE, prefix_cache=self.prefix_cache, poison=True, digest=type(self).digest
        )
        self.held: list[Held] = []
        self.numbers: dict[object, int] = {}  # what a slot stands for -> its number
        self.sealed: dict[int, tuple[Seal, list[int]]] = {}  # page -> its seal and values when first seen
        self.ever: dict[bytes, list[int]] = {}  # digest -> values

    # --- the model ---------------------------------------------------------------------------------------------------

    def value(self, context: Context, text: list[int], at: int) -> int:
        media = tuple(m for m in context.media if m.start <= at)
        key = (context.adapter, context.salt, media, tuple(text[: at + 1]))
        return self.numbers.setdefault(key, len(self.numbers) + 1)

    def values(self, held: Held, start: int, end: int) -> list[int]:
        return [self.value(held.context, held.text, at) for at in range(start, end)]

    def pages_of(self, tokens: int) -> int:
        return -(-tokens // PAGE)

    def findable(self, context: Context, text: list[int], n: int) -> list[int]:
        """Pages whose values are those of the first n tokens, the last token excepted."""
        known = {tuple(self.cache.values[page].tolist()): page for page in self.pool._index.values()}
        found: list[int] = []
        while (len(found) + 1) * PAGE < n:
            start = len(found) * PAGE
            page = known.get(tuple(self.value(context, text, at) for at in range(start, start + PAGE)))
            if page is None:
                break
            found.append(page)
        return found

    def pick(self, at: int) -> Held:
        return self.held[at % len(self.held)]

    def compute(self, held: Held, count: int) -> list[int]:
        """What a step does with the next tokens; their ids."""
        start = held.table.length
        slots = held.table.place(count)
        for page in {slot // PAGE for slot in slots}:
            assert page not in self.pool._seals, "a sealed page is written"
            assert self.pool._refs[page] == 1, "a shared page is written"
        self.cache.write(slots, self.values(held, start, start + count))
        return held.text[start : start + count]

    def room(self, held: Held) -> int:
        return held.table.capacity - held.table.length

    # --- rules -------------------------------------------------------------------------------------------------------

    @rule(
        which=st.integers(0, 2),
        n=st.integers(1, 16),
        room=st.integers(0, 12),
        kind=st.integers(0, len(CONTEXTS) - 1),
        share=st.sampled_from([True, True, True, False]),
        runs=st.integers(0, 16),
    )
    def open(self, which: int, n: int, room: int, kind: int, share: bool, runs: int) -> None:
        """A sequence is admitted or refused; some of its tokens are computed at once."""
        held = self.admit(TEXTS[which], n, room, CONTEXTS[kind], share)
        if held is not None and min(runs, self.room(held)):
            held.table.append(self.compute(held, min(runs, self.room(held))))

    @rule(which=st.integers(0, 2), n=st.integers(9, 20), kind=st.integers(0, len(CONTEXTS) - 1))
    def a_whole_request(self, which: int, n: int, kind: int) -> None:
        """It comes, is computed and goes; what it leaves is cached, and evicted sooner or later."""
        held = self.admit(TEXTS[which], n, 0, CONTEXTS[kind], True)
        if held is not None:
            held.table.append(self.compute(held, self.room(held)))
            self.everybody_reads_his_own_tokens()
            self.sealed_pages_are_full_of_committed_tokens_and_never_change()
            self.held.remove(held)
            held.table.release()

    def admit(self, text: list[int], n: int, room: int, context: Context, share: bool) -> Held | None:
        free, active = self.pool.free, set(self.pool._refs)
        found = self.findable(context, text, n) if share and self.prefix_cache else []
        need = self.pages_of(n + room) - len(active.intersection(found))
        try:
            table = PageTable.open(self.pool, context, text[:n], capacity=n + room, share=share)
        except PagesExhausted:
            assert need > free or not self.exact
            assert self.pool.free == free
            return None
        assert need <= free
        assert table.pages == found[: len(table.pages)]
        assert len(table.pages) == len(found) or not self.exact
        assert table.length == len(table.pages) * PAGE < n
        assert self.pool.free == free - self.pages_of(n + room) + len(active.intersection(table.pages))
        held = Held(table, context, share, text)
        self.held.append(held)
        return held

    @precondition(lambda self: self.held)
    @rule(at=PICK, count=st.integers(1, 9))
    def append(self, at: int, count: int) -> None:
        held = self.pick(at)
        count = min(count, self.room(held))
        if count and not held.drafts:
            free = self.pool.free
            held.table.append(self.compute(held, count))
            assert self.pool.free >= free, "an admitted sequence takes no more than it was promised"

    @precondition(lambda self: self.held)
    @rule(at=PICK, count=st.integers(1, 5))
    def a_step_fails(self, at: int, count: int) -> None:
        """It has written something, and nobody appends it."""
        held = self.pick(at)
        count = min(count, self.room(held))
        if count:
            self.compute(held, count)
            length = held.table.length
            self.cache.write(held.table.slots(length, length + count), [HALF_DONE] * count)

    @precondition(lambda self: self.held)
    @rule(at=PICK, count=st.integers(1, 6))
    def draft(self, at: int, count: int) -> None:
        held = self.pick(at)
        count = min(count, self.room(held))
        if count:
            held.table.draft(self.compute(held, count))
            held.drafts += count

    @precondition(lambda self: any(held.drafts for held in self.held))
    @rule(at=PICK, accepted=st.integers(0, 6), rejected=st.integers(0, 6))
    def decide(self, at: int, accepted: int, rejected: int) -> None:
        """Some of the drafted tokens are accepted, some rejected; others may stay undecided."""
        drafting = [held for held in self.held if held.drafts]
        held = drafting[at % len(drafting)]
        accepted = min(accepted, held.drafts)
        held.table.commit(accepted)
        rejected = min(rejected, held.drafts - accepted)
        held.table.rewind(rejected)
        held.drafts -= accepted + rejected
        if rejected and not held.drafts:  # the text goes another way
            end = held.table.length
            held.text = held.text[:end] + TEXTS[at % 3][end:]

    @precondition(lambda self: self.held)
    @rule(at=PICK, room=st.integers(0, 9), which=st.integers(0, 2))
    def fork(self, at: int, room: int, which: int) -> None:
        held, text = self.pick(at), TEXTS[which]
        length, free = held.table.length, self.pool.free
        if held.drafts or length + room == 0:
            return
        need = self.pages_of(length + room) - length // PAGE  # a last page that is not full will be copied
        try:
            table = held.table.fork(capacity=length + room)
        except PagesExhausted:
            assert need > free
            return
        assert need <= free
        assert self.pool.free == free - need
        self.held.append(Held(table, held.context, held.share, held.text[:length] + text[length:], failed=held.failed))

    @precondition(lambda self: self.held)
    @rule(at=PICK)
    def release(self, at: int) -> None:
        held = self.pick(at)
        self.held.remove(held)
        held.table.release()
        assert held.table.pages == []

    @precondition(lambda self: self.held)
    @rule(at=PICK)
    def withdraw(self, at: int) -> None:
        """What it referred to, and what was computed from it, is not found again, now or later."""
        held = self.pick(at)
        bad = {id(self.pool._seals[page]) for page in held.table.pages[: held.table.sealed]}
        held.table.withdraw()
        for page in self.pool._index.values():
            seal: Seal | None = self.pool._seals[page]
            while seal is not None:
                assert id(seal) not in bad
                seal = seal.parent
        held.failed = True

    @precondition(lambda self: self.held)
    @rule(at=PICK, more=st.integers(1, 3))
    def what_is_against_the_rules_changes_nothing(self, at: int, more: int) -> None:
        held = self.pick(at)
        table = held.table
        before = (self.pool.free, table.length, table.committed, list(table.pages), list(self.pool._free))
        placed = table._placed - table.length
        refused = [
            lambda: table.rewind(held.drafts + more),
            lambda: table.commit(held.drafts + more),
            lambda: table.place(self.room(held) + more),
            lambda: table.draft([65] * (placed + more)),
            lambda: table.append([65] * (1 if held.drafts else placed + more)),
            lambda: table.fork(capacity=table.length - 1),
            lambda: table.slots(0, table._placed + more),
        ]
        for call in refused:
            try:
                call()
            except PageError:
                continue
            raise AssertionError("not refused")
        assert before == (self.pool.free, table.length, table.committed, list(table.pages), list(self.pool._free))

    # --- invariants --------------------------------------------------------------------------------------------------

    @invariant()
    def every_page_is_in_one_state(self) -> None:
        pool = self.pool
        states = [*pool._free, *pool._refs, *pool._cached]
        assert sorted(states) == list(range(PAGES))
        assert pool.cached == len(pool._cached)

    @invariant()
    def references_are_those_of_the_tables(self) -> None:
        assert Counter(self.pool._refs) == Counter(page for held in self.held for page in held.table.pages)

    @invariant()
    def promises_can_be_kept(self) -> None:
        pool = self.pool
        open_ = sum(self.pages_of(held.table.capacity) - len(held.table.pages) for held in self.held)
        copies = sum(count - 1 for page, count in pool._refs.items() if page not in pool._seals)
        assert pool._reserved == open_ + copies
        assert pool.free == len(pool._free) + len(pool._cached) - open_ - copies
        assert pool.free >= 0

    @invariant()
    def everybody_reads_his_own_tokens(self) -> None:
        for held in self.held:
            length = held.table.length
            assert held.table.committed == length - held.drafts
            assert self.cache.at(held.table.slots(0, length)) == self.values(held, 0, length)

    @invariant()
    def free_pages_are_poisoned(self) -> None:
        assert (self.cache.values[self.pool._free] == POISON).all()

    @invariant()
    def sealed_pages_are_full_of_committed_tokens_and_never_change(self) -> None:
        pool = self.pool
        assert set(pool._seals) <= set(pool._refs) | set(pool._cached)
        for page, seal in pool._seals.items():
            values = self.cache.values[page].tolist()
            assert POISON not in values
            assert HALF_DONE not in values
            first_seen = self.sealed.get(page)
            if first_seen is not None and first_seen[0] is seal:
                assert first_seen[1] == values
            if self.exact:
                assert self.ever.setdefault(seal.digest, values) == values
            self.sealed[page] = (seal, values)
        for held in self.held:
            table = held.table
            assert table.sealed == table.committed // PAGE
            parent = None
            for i in range(table.sealed):
                seal = pool._seals[table.pages[i]]
                want = make_seal("fake:v1", held.context, i * PAGE, held.text[i * PAGE :][:PAGE], parent, pool._digest)
                assert (seal.content, seal.digest, seal.parent) == (want.content, want.digest, parent)
                parent = seal
            assert not set(table.pages[table.sealed :]) & set(pool._seals)

    @invariant()
    def what_can_be_found_is_whole(self) -> None:
        """Every known page is sealed, and all pages before it are known too, also after evictions."""
        pool = self.pool
        known = {id(pool._seals[page]) for page in pool._index.values()}
        assert len(known) == len(pool._index)
        for page in pool._index.values():
            parent = pool._seals[page].parent
            assert parent is None or id(parent) in known
        assert set(pool._cached) <= set(pool._index.values())
        if not self.prefix_cache:
            assert not known

    @invariant()
    def who_failed_or_keeps_to_himself_is_not_found(self) -> None:
        for held in self.held:
            if held.failed or not held.share:
                assert not any(map(self.pool.known, held.table.pages))

    def teardown(self) -> None:
        for held in self.held:
            held.table.release()
        self.held = []
        assert self.pool.free == PAGES
        assert self.pool._reserved == 0


class CollidingMachine(PagesMachine):
    """There are two digests (BUG-62, BUG-64): pages are compared, so a collision may cost a hit and nothing else."""

    digest: Digest = staticmethod(lambda content: bytes([sha256(content)[0] & 1]))
    exact = False


class PrivateMachine(PagesMachine):
    """No prefix cache: sealed pages of a sequence and its forks only."""

    prefix_cache = False


SETTINGS = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestPages = PagesMachine.TestCase
TestPages.settings = SETTINGS
TestColliding = CollidingMachine.TestCase
TestColliding.settings = SETTINGS
TestPrivate = PrivateMachine.TestCase
TestPrivate.settings = SETTINGS
