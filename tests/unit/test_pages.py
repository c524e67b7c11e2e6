"""Pages of one sequence and its forks, rule by rule: promised, placed, appended, drafted, rewound, copied, refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.support.fake_pages import PAGE, POISON, TEXT, add, contents, make, start

from m31.engine.pages import PageTable
from m31.engine.pool import PagePool
from m31.engine.seals import PLAIN
from m31.errors import PageError, PagesExhausted
from m31.sdk.backend import KVSpec
from m31_reference.cache import PagedLayout

# --- pages are promised, taken lowest first, and come back -----------------------------------------------------------


def test_a_table_is_promised_all_that_it_may_need_and_takes_it_when_it_needs_it() -> None:
    pool = make(6)
    table = start(pool, TEXT[:3], room=10)
    assert (pool.free, table.pages) == (2, [0])
    add(pool, table, TEXT[3:9])
    assert (pool.free, table.pages) == (2, [0, 1, 2])
    assert contents(pool, table) == TEXT[:9]
    table.release()
    assert (pool.free, table.pages, table.length) == (6, [], 9)


def test_fewer_pages_than_asked_for_are_never_given() -> None:
    pool = make(4)
    first = start(pool, TEXT[:5])
    with pytest.raises(
        PagesExhausted, match=r"page pool: 3 pages asked for, 2 free; expected at most what is free of its 4; wait"
    ):
        start(pool, TEXT[1:4], room=6)
    with pytest.raises(PagesExhausted, match="3 pages asked for, 2 free"):
        first.fork(capacity=13)
    assert pool.free == 2
    assert start(pool, TEXT[1:4], room=5).capacity == 8
    assert pool.free == 0


def test_pages_are_taken_lowest_first_whatever_the_order_of_return() -> None:
    pool = make(6, prefix_cache=False)
    tables = [start(pool, TEXT[:2]) for _ in range(6)]
    for at in (4, 1, 2, 5):
        tables[at].release()
    assert start(pool, TEXT[:13]).pages == [1, 2, 4, 5]


def test_a_table_is_released_once() -> None:
    pool = make()
    table = start(pool, TEXT[:5], room=3)
    table.release()
    uses: list[Callable[[], object]] = [
        table.release,
        table.withdraw,
        lambda: table.place(1),
        lambda: table.append([1]),
        lambda: table.draft([1]),
        lambda: table.rewind(0),
        lambda: table.commit(0),
        lambda: table.fork(capacity=8),
    ]
    for use in uses:
        with pytest.raises(PageError, match="page table: the table was released; open another one"):
            use()
    assert pool.free == 8


def test_free_pages_are_poisoned() -> None:
    """From the start, after a release without seal, after a rewind, after an eviction (BUG-5)."""
    pool = make(4)
    values = pool._cache.values  # type: ignore[attr-defined]
    assert (values == POISON).all()
    table = start(pool, TEXT[:3], room=8)
    pool._cache.write(table.place(8), TEXT[3:11])  # type: ignore[attr-defined]
    table.draft(TEXT[3:11])
    table.rewind(6)
    assert (values[2] == POISON).all()
    table.commit(2)
    table.release()
    assert values[0].tolist() == TEXT[:4]  # cached
    assert (values[1:] == POISON).all()
    start(pool, TEXT[5:7], room=14, run=False).place(16)
    assert (values == POISON).all()


# --- placing, appending, drafting ------------------------------------------------------------------------------------


def test_slots_follow_the_pages() -> None:
    pool = make()
    other = start(pool, [5] * 6)
    table = start(pool, TEXT[:3], room=8)
    assert (other.pages, table.pages) == ([0, 1], [2])
    assert table.place(6) == [11, 12, 13, 14, 15, 16]
    assert table.slots(1, 5) == [9, 10, 11, 12]
    for bad in ((-1, 2), (3, 2), (0, 10)):
        with pytest.raises(PageError, match=rf"positions {bad[0]} to {bad[1]}; expected positions from 0 to 9"):
            table.slots(*bad)


def test_a_step_that_failed_is_placed_again() -> None:
    pool = make()
    table = start(pool, TEXT[:3], room=8)
    first = table.place(5)
    assert table.place(5) == first
    assert table.place(2) == first[:2]
    assert (table.length, table.sealed) == (3, 0)
    add(pool, table, TEXT[3:8])
    assert contents(pool, table) == TEXT[:8]


def test_what_was_not_placed_is_not_appended() -> None:
    table = start(make(), TEXT[:3], room=8)
    table.place(2)
    for add_ in (table.append, table.draft):
        with pytest.raises(
            PageError, match="page table: 3 tokens after 3; expected at most 2, as many as are placed; place"
        ):
            add_([1, 2, 3])
    assert table.length == 3


@pytest.mark.parametrize("count", [0, -1, 9])
def test_nothing_is_placed_beyond_the_capacity(count: int) -> None:
    table = start(make(), TEXT[:3], room=8)
    with pytest.raises(
        PageError, match=f"page table: {count} tokens after 3; expected 1 to 8, what the capacity of 11 leaves"
    ):
        table.place(count)


def test_a_capacity_holds_the_tokens() -> None:
    pool = make()
    with pytest.raises(PageError, match="capacity for 3 tokens; expected at least 4"):
        PageTable.open(pool, PLAIN, TEXT[:4], capacity=3, share=True)
    with pytest.raises(PageError, match="capacity for 0 tokens; expected at least 1"):
        PageTable.open(pool, PLAIN, [], capacity=0, share=True)
    with pytest.raises(PageError, match="capacity for 5 tokens; expected at least 6"):
        start(pool, TEXT[:6]).fork(capacity=5)


def test_drafted_tokens_seal_nothing_until_they_are_committed() -> None:
    pool = make()
    table = start(pool, TEXT[:3], room=9)
    pool._cache.write(table.place(6), TEXT[3:9])  # type: ignore[attr-defined]
    table.draft(TEXT[3:9])
    assert (table.length, table.committed, table.sealed, len(table.pages)) == (9, 3, 0, 3)
    assert pool.find(PLAIN, TEXT) == []
    table.commit(2)
    assert (table.committed, table.sealed) == (5, 1)
    free = pool.free
    table.rewind(3)
    assert (table.length, table.committed, len(table.pages)) == (6, 5, 2)
    assert pool.free == free  # its third page may be needed again: it is promised, and free for nobody else
    table.commit(1)
    add(pool, table, [50, 51])
    assert contents(pool, table) == [*TEXT[:6], 50, 51]
    assert pool.find(PLAIN, [*TEXT[:6], 50, 51, 1]) == table.pages
    assert pool.find(PLAIN, TEXT) == table.pages[:1]  # the rejected page was never known (BUG-67)


def test_committed_tokens_are_not_rewound_and_undecided_ones_stand_in_the_way() -> None:
    table = start(make(), TEXT[:7], room=5)
    with pytest.raises(PageError, match="page table: 1 drafted tokens; expected 0 to 0, as many as there are"):
        table.rewind(1)
    table.place(3)
    table.draft([1, 2])
    for call in (table.rewind, table.commit):
        with pytest.raises(PageError, match="3 drafted tokens; expected 0 to 2"):
            call(3)
        with pytest.raises(PageError, match="-1 drafted tokens"):
            call(-1)
    for other in (lambda: table.append([3]), lambda: table.fork(capacity=12)):
        with pytest.raises(PageError, match="page table: 2 drafted tokens are undecided; commit or rewind them first"):
            other()
    table.rewind(2)
    assert (table.length, table.committed) == (7, 7)


# --- forks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("parent_writes", [True, False])
def test_whoever_writes_first_into_a_shared_page_copies_it(parent_writes: bool) -> None:
    pool = make(5)
    parent = start(pool, TEXT[:6], room=2)
    child = parent.fork(capacity=12)
    assert child.pages == parent.pages == [0, 1]
    assert pool.free == 1  # the third page of the child, and a copy of the second by whoever makes it
    first, second = (parent, child) if parent_writes else (child, parent)
    add(pool, first, [50, 51])
    assert (first.pages, second.pages) == ([0, 2], [0, 1])
    assert pool._cache.copies == [(1, 2)]  # type: ignore[attr-defined]
    add(pool, second, [60])
    assert second.pages == [0, 1]
    assert len(pool._cache.copies) == 1  # type: ignore[attr-defined]
    assert contents(pool, first) == [*TEXT[:6], 50, 51]
    assert contents(pool, second) == [*TEXT[:6], 60]
    assert pool.free == 1
    parent.release()
    child.release()
    assert pool.free == 5


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
def test_a_fork_that_ends_early_gives_up_the_copy_that_it_was_promised(order: tuple[int, ...]) -> None:
    pool = make(8)
    tables = [start(pool, TEXT[:6], room=2)]
    tables += [tables[0].fork(capacity=8), tables[0].fork(capacity=8)]
    assert pool.free == 4
    for at, free in zip(order, (5, 6, 8), strict=True):
        tables[at].release()
        assert pool.free == free


def test_a_fork_at_the_end_of_a_page_copies_nothing() -> None:
    pool = make(4)
    parent = start(pool, TEXT[:8], room=4)
    child = parent.fork(capacity=12)
    assert pool.free == 0
    add(pool, parent, [50])
    add(pool, child, [60])
    assert (parent.pages, child.pages) == ([0, 1, 2], [0, 1, 3])
    assert pool._cache.copies == []  # type: ignore[attr-defined]


def test_what_was_placed_before_a_fork_is_placed_again() -> None:
    """Otherwise a step that was prepared would write into the page that is now shared."""
    pool = make(8)
    parent = start(pool, TEXT[:6], room=2)
    parent.place(2)
    parent.fork(capacity=8)
    with pytest.raises(PageError, match="2 tokens after 6; expected at most 0"):
        parent.append([50, 51])
    assert parent.place(2) == [10, 11]


@pytest.mark.parametrize("kv", ["float32", "nvfp4"])
def test_a_copy_holds_all_layers_and_the_pages_of_a_backend_are_poisoned(kv: str) -> None:
    spec = KVSpec(
        indexed=(True, False),
        kv_heads=2,
        head_dim=32,
        index_dim=48,
        page_tokens=PAGE,
        kv_format=kv,  # type: ignore[arg-type]
        index_format="float32",
    )
    cache = PagedLayout(spec, torch.device("cpu"), read="exact").allocate(3)
    pool = PagePool(cache, page_tokens=PAGE, prefix_cache=True, poison=True)

    def write(table: PageTable, tokens: list[int]) -> None:
        slots = torch.tensor(table.place(len(tokens)))
        for _, store in cache._stores():
            dim = next(iter(store.exact(0).unbind(0))).shape[-1]
            store.write(
                slots // PAGE, slots % PAGE, torch.tensor(tokens).view(-1, 1, 1).expand(-1, store.heads, dim) / 1.0
            )
        table.append(tokens)

    parent = PageTable.open(pool, PLAIN, [1, 2, 3], capacity=4, share=True)
    write(parent, [1, 2])
    child = parent.fork(capacity=4)
    write(child, [4, 6])
    write(parent, [3])
    for layer in range(2):
        for kind, x in cache.read(layer, parent.pages[0]).items():
            tokens = x[..., :3, 0].reshape(-1, 3)
            assert torch.equal(tokens.round(), torch.tensor([1.0, 2.0, 3.0]).expand_as(tokens)), kind
        for kind, x in cache.read(layer, child.pages[0]).items():
            tokens = x[..., :4, 0].reshape(-1, 4)
            assert torch.equal(tokens.round(), torch.tensor([1.0, 2.0, 4.0, 6.0]).expand_as(tokens)), kind
    page = parent.pages[0]
    parent.release()
    assert all(bool(x.isnan().all()) for layer in range(2) for x in cache.read(layer, page).values())


# --- interrupts ------------------------------------------------------------------------------------------------------


class Interrupted(BaseException):
    """From outside."""


def test_an_append_that_is_interrupted_while_it_seals_is_finished_by_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = make()
    table = start(pool, TEXT[:3], room=9)
    table.place(6)

    def interrupted(*args: Any) -> Any:
        raise Interrupted

    with monkeypatch.context() as patch:
        patch.setattr(pool, "make_seal", interrupted)
        with pytest.raises(Interrupted):
            table.append(TEXT[3:9])
    assert (table.committed, table.sealed) == (9, 0)
    child = table.fork(capacity=12)
    assert (table.sealed, child.sealed) == (2, 2)
    table.release()
    child.release()
    assert pool.free == pool.pages
