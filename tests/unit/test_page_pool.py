"""The page pool: lowest pages first, each to one owner, all or nothing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from m31.engine.pool import PagePool
from m31.errors import M31Error


def test_pages_are_handed_out_lowest_first() -> None:
    pool = PagePool(6)
    assert (pool.pages, pool.free) == (6, 6)
    assert pool.take(3) == [0, 1, 2]
    assert pool.take(2) == [3, 4]
    assert pool.free == 1


def test_the_order_of_return_does_not_matter() -> None:
    pool = PagePool(6)
    pages = pool.take(6)
    pool.give_back([pages[4], pages[1]])
    pool.give_back([pages[2]])
    pool.give_back([pages[0], pages[5]])
    assert pool.take(5) == [0, 1, 2, 4, 5]


def test_no_page_has_two_owners_and_none_is_lost() -> None:
    pool = PagePool(4)
    first, second = pool.take(2), pool.take(2)
    assert sorted(first + second) == [0, 1, 2, 3]
    assert pool.take(0) == []
    pool.give_back(second)
    assert pool.free == 2
    assert not set(pool.take(2)) & set(first)


def test_more_than_free_is_refused_and_nothing_is_taken() -> None:
    pool = PagePool(4)
    held = pool.take(2)
    with pytest.raises(M31Error, match="page pool: 3 pages asked for, 2 free"):
        pool.take(3)
    assert pool.free == 2
    assert pool.take(2) == [2, 3]
    with pytest.raises(M31Error, match="page pool: 1 pages asked for, 0 free"):
        pool.take(1)
    pool.give_back(held)
    assert pool.take(2) == held


@pytest.mark.parametrize("page", [1, 3, -1, 4])
def test_a_page_that_was_not_taken_is_refused(page: int) -> None:
    """Page 1 was given back already, page 3 never taken, the others do not exist: no page becomes free twice."""
    pool = PagePool(4)
    pool.give_back([pool.take(2)[1]])
    with pytest.raises(M31Error, match=f"page pool: page {page} is given back but was not taken"):
        pool.give_back([page])
    assert pool.free == 3
    assert pool.take(3) == [1, 2, 3]


def test_a_page_twice_in_one_return_is_refused() -> None:
    pool = PagePool(4)
    pool.take(2)
    with pytest.raises(M31Error, match="page 1 is given back but was not taken"):
        pool.give_back([1, 1])


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5)), max_size=30))
def test_what_is_free_is_what_is_not_held(moves: list[tuple[bool, int]]) -> None:
    pool = PagePool(12)
    held: list[list[int]] = []
    for take, n in moves:
        if take and n <= pool.free:
            free = sorted(set(range(12)) - {page for pages in held for page in pages})
            held.append(pool.take(n))
            assert held[-1] == free[:n]
        elif held:
            pool.give_back(held.pop(n % len(held)))
        assert pool.free == 12 - sum(map(len, held))
