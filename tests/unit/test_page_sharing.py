"""Which pages are found by whom: seals, the longest known beginning, eviction, and what a failed sequence leaves."""

from __future__ import annotations

import pytest
from tests.support.fake_pages import TEXT, add, contents, make, start

from m31.engine.seals import PLAIN, Context, Media, make_seal, sha256
from m31.errors import PageError, PagesExhausted

# --- finding ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "found"), [(3, 0), (4, 0), (5, 1), (8, 1), (9, 2), (12, 2), (13, 2), (14, 2)])
def test_the_longest_known_beginning_is_found_and_the_last_token_left_to_compute(n: int, found: int) -> None:
    """The last of a text has to run, for its logits, even where its page is known."""
    pool = make(12)
    first = start(pool, TEXT[:10])
    second = start(pool, TEXT[:n], run=False)
    assert second.pages == first.pages[:found]
    assert (second.length, second.committed, second.sealed) == (4 * found, 4 * found, found)
    add(pool, second, TEXT[second.length : n])
    assert contents(pool, second) == TEXT[:n]


def test_a_released_page_is_found_and_a_shared_one_costs_nothing() -> None:
    pool = make(5)
    first = start(pool, TEXT[:13])
    assert pool.free == 1
    second = start(pool, TEXT[:9], run=False)  # two known pages, one of its own
    assert pool.free == 0
    first.release()
    assert (pool.free, pool.cached) == (2, 1)
    second.release()
    assert (pool.free, pool.cached) == (5, 3)
    third = start(pool, TEXT[:13], room=7, run=False)
    assert (third.length, pool.free, pool.cached) == (12, 0, 0)
    assert contents(pool, third) == TEXT[:12]


def other_token(text: list[int], at: int, token: int) -> list[int]:
    return [*text[:at], token, *text[at + 1 :]]


@pytest.mark.parametrize(("at", "found"), [(0, 0), (3, 0), (4, 1), (7, 1), (8, 2)])
@pytest.mark.parametrize("token", [1, 7 + 256, 12 + 65_536, 12 + 2**32])
def test_one_other_token_ends_the_run(at: int, found: int, token: int) -> None:
    """Also one whose low bytes are equal (BUG-63)."""
    pool = make()
    start(pool, TEXT[:12])
    assert len(pool.find(PLAIN, other_token(TEXT, at, token))) == found


def media(*spans: tuple[int, int, bytes]) -> tuple[Media, ...]:
    return tuple(Media(start=start, end=end, digest=digest) for start, end, digest in spans)


CONTEXTS = [
    PLAIN,
    Context(adapter="x", salt=None, media=()),
    Context(adapter=None, salt="x", media=()),
    Context(adapter="x", salt="x", media=()),
    Context(adapter="", salt=None, media=()),
    Context(adapter=None, salt="", media=()),
    Context(adapter=None, salt="y", media=()),
    Context(adapter="xS", salt=None, media=()),
    Context(adapter=None, salt=None, media=media((0, 2, b"x"))),
    Context(adapter=None, salt=None, media=media((0, 2, b"y"))),
    Context(adapter=None, salt=None, media=media((0, 3, b"x"))),
    Context(adapter=None, salt=None, media=media((1, 2, b"x"))),
    Context(adapter=None, salt=None, media=media((0, 1, b"x"), (1, 2, b"x"))),
]


@pytest.mark.parametrize("theirs", range(len(CONTEXTS)))
def test_other_salt_adapter_or_media_never_match(theirs: int) -> None:
    """Fields are tagged: an adapter, a salt and a picture of the same name are three things (BUG-65)."""
    for mine in range(len(CONTEXTS)):
        pool = make()
        start(pool, TEXT[:12], context=CONTEXTS[theirs])
        assert len(pool.find(CONTEXTS[mine], TEXT)) == (3 if mine == theirs else 0)


def test_media_count_from_the_page_in_which_they_begin() -> None:
    """A picture of eight placeholders from position 6 on: what is before it is shared, nothing from it on."""
    pictures = [Context(adapter=None, salt=None, media=media((6, 14, digest))) for digest in (b"cat", b"dog")]
    pool = make(20)
    text = [*TEXT[:6], *[99] * 8, *TEXT[:6]]
    cat = start(pool, text, context=pictures[0])
    assert pool.find(pictures[0], text) == cat.pages[:4]
    assert pool.find(pictures[1], text) == cat.pages[:1]
    assert pool.find(PLAIN, text) == cat.pages[:1]


def test_a_context_that_makes_no_sense_is_refused() -> None:
    with pytest.raises(PageError, match="media: a placeholder from 3 to 3; expected 0 <= start < end"):
        Media(start=3, end=3, digest=b"x")
    with pytest.raises(PageError, match="media: an empty digest"):
        Media(start=3, end=4, digest=b"")
    with pytest.raises(PageError, match="media: a placeholder starts at 4; expected 5 or later"):
        Context(adapter=None, salt=None, media=media((0, 5, b"x"), (4, 6, b"y")))


def test_a_seal_covers_the_layout_and_the_page_before() -> None:
    first = make_seal("a:v1", PLAIN, 0, TEXT[:4], None, sha256)
    seals = [
        first,
        make_seal("a:v2", PLAIN, 0, TEXT[:4], None, sha256),
        make_seal("a:v1", PLAIN, 4, TEXT[:4], first, sha256),
        make_seal("a:v1", PLAIN, 8, TEXT[:4], make_seal("a:v1", PLAIN, 4, TEXT[4:8], first, sha256), sha256),
    ]
    assert len({seal.digest for seal in seals}) == 4
    assert make_seal("a:v1", PLAIN, 0, TEXT[:4], None, sha256).digest == first.digest


def test_colliding_digests_cost_a_hit_and_nothing_else() -> None:
    """BUG-62, BUG-64: what a digest finds is compared. Also its parent: equal tokens after others are another page."""
    pool = make(12, digest=lambda content: b"same")
    first = start(pool, [1, 1, 1, 1, 2, 2, 2, 2, 3])
    assert pool.find(PLAIN, [1, 1, 1, 1, 2, 2, 2, 2, 3]) == first.pages[:1]
    assert pool.find(PLAIN, [2, 2, 2, 2, 1]) == []
    second = start(pool, [2, 2, 2, 2, 1, 1, 1, 1, 3])
    assert not set(first.pages) & set(second.pages)
    assert contents(pool, second) == [2, 2, 2, 2, 1, 1, 1, 1, 3]
    assert pool.find(PLAIN, [1] * 9) == first.pages[:1]


def test_two_that_compute_the_same_page_end_on_one() -> None:
    """The one that seals later goes on with the known page, and its own becomes free."""
    pool = make(6)
    first, second = start(pool, TEXT[:9], run=False), start(pool, TEXT[:9], run=False)
    assert pool.free == 0
    add(pool, first, TEXT[:6])
    add(pool, second, TEXT[:5])
    assert (first.pages, second.pages) == ([0, 1], [0, 3])
    assert pool.free == 1
    add(pool, second, TEXT[5:9])
    add(pool, first, TEXT[6:9])
    assert first.pages[:2] == second.pages[:2] == [0, 3]
    assert pool.free == 2
    assert contents(pool, first) == contents(pool, second) == TEXT[:9]
    first.release()
    assert contents(pool, second) == TEXT[:9]


def test_the_known_page_is_taken_also_where_nothing_is_free() -> None:
    """It was only cached: for a moment the sequence holds two pages, of which it was promised one."""
    pool = make(3)
    second = start(pool, TEXT[:8], run=False)
    second.place(4)
    first = start(pool, TEXT[:4])
    first.release()
    fill = start(pool, [5], run=False)
    assert (pool.free, pool.cached, second.pages) == (0, 1, [0])
    add(pool, second, TEXT[:4])
    assert (pool.free, pool.cached, second.pages) == (0, 0, [1])
    add(pool, second, TEXT[4:8])
    add(pool, fill, [5])
    assert contents(pool, second) == TEXT[:8]


def test_who_does_not_share_neither_finds_nor_is_found() -> None:
    pool = make(12)
    known = start(pool, TEXT[:9])
    alone = start(pool, TEXT[:9], share=False)
    assert not set(alone.pages) & set(known.pages)
    assert alone.sealed == 2
    known.release()
    alone.release()
    assert pool.cached == 2
    only = make(12)
    start(only, TEXT[:9], share=False)
    assert only.find(PLAIN, TEXT) == []


def test_without_a_prefix_cache_nothing_is_found_or_kept() -> None:
    pool = make(prefix_cache=False)
    first = start(pool, TEXT[:9])
    assert start(pool, TEXT[:9], run=False).length == 0
    assert first.sealed == 2
    first.release()
    assert pool.cached == 0


# --- eviction and withdrawal -----------------------------------------------------------------------------------------


def test_the_least_recently_used_page_goes_first_and_children_before_parents() -> None:
    pool = make(6)
    old, new = [1] * 8, [2] * 8
    for text in (old, new, old):  # the old one is used again
        start(pool, [*text, 9]).release()
    assert pool.cached == 4
    start(pool, [5] * 9, share=False).release()  # two free pages and one more: the end of the other text
    assert (len(pool.find(PLAIN, [*old, 9])), len(pool.find(PLAIN, [*new, 9]))) == (2, 1)
    start(pool, [5] * 13, share=False).release()
    assert (len(pool.find(PLAIN, [*old, 9])), len(pool.find(PLAIN, [*new, 9]))) == (2, 0)
    start(pool, [5] * 17, share=False).release()
    assert (len(pool.find(PLAIN, [*old, 9])), len(pool.find(PLAIN, [*new, 9]))) == (1, 0)
    start(pool, [5] * 24, share=False).release()
    assert pool.find(PLAIN, [*old, 9]) == []
    assert pool.cached == 0


def test_an_evicted_page_is_forgotten() -> None:
    """BUG-68, BUG-69: its next owner's tokens are not taken for the old ones, nor the old ones found."""
    pool = make(2)
    for text in (TEXT[:8], [3] * 8, TEXT[:8], TEXT[4:12], [3] * 8):
        table = start(pool, text)
        assert table.length == 8
        assert contents(pool, table) == text
        table.release()
        assert len(pool.find(PLAIN, [*text, 1])) == 2
        assert len(pool._index) == len(pool._seals) == 2
    start(pool, TEXT[:5], run=False).place(5)
    assert (pool._index, pool._seals) == ({}, {})


def test_a_known_page_that_is_not_in_use_counts_as_a_free_one_only_once() -> None:
    """Whoever takes it up leaves one free page less; two known and one new page are not to be had from two."""
    pool = make(4)
    start(pool, TEXT[:9]).release()
    start(pool, [5] * 5, share=False)
    assert (pool.free, pool.cached) == (2, 2)
    with pytest.raises(PagesExhausted, match="3 pages asked for, 2 free"):
        start(pool, TEXT[:9])
    assert (pool.free, pool.cached) == (2, 2)
    assert len(start(pool, TEXT[:8], run=False).pages) == 1


def test_a_page_in_use_is_not_evicted() -> None:
    pool = make(4)
    first = start(pool, TEXT[:9])
    second = start(pool, TEXT[:9], run=False)
    first.release()
    assert pool.free == 1
    with pytest.raises(PagesExhausted):
        start(pool, [5] * 5)
    start(pool, [5] * 4)
    assert contents(pool, second) == TEXT[:8]


def test_pages_of_a_sequence_that_failed_are_not_found() -> None:
    """Nor what others computed from them, now or later. Who has them keeps them, and good ones can take their place."""
    pool = make(12)
    bad = start(pool, TEXT[:9])
    later = start(pool, TEXT[:13], room=4)
    start(pool, [*TEXT[:4], *[3] * 5]).release()
    good = start(pool, [9] * 5)
    assert pool.cached == 1
    bad.withdraw()
    bad.release()
    assert pool.cached == 0
    add(pool, later, [1, 2, 3, 4])
    assert (later.sealed, contents(pool, later)) == (4, [*TEXT[:13], 1, 2, 3, 4])
    assert pool.find(PLAIN, [*TEXT[:13], 1, 2, 3, 4]) == []
    assert pool.find(PLAIN, [9] * 5) == good.pages[:1]
    again = start(pool, TEXT[:9])
    assert pool.find(PLAIN, TEXT[:9]) == again.pages[:2]
    assert not set(again.pages) & set(later.pages)
    later.release()
    again.release()
    assert (pool.free, pool.cached) == (10, 2)


def test_a_sequence_that_failed_before_its_first_page_was_full_stays_unknown() -> None:
    pool = make()
    table = start(pool, TEXT[:3], room=4)
    table.withdraw()
    add(pool, table, TEXT[3:7])
    assert (table.sealed, pool.find(PLAIN, TEXT)) == (1, [])
