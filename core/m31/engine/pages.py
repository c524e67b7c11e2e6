"""Page tables: the life of one sequence's pages (DESIGN.md §5).

A page is written by one sequence only. When its last token is committed it is sealed (`m31.engine.seals` says what a
seal covers) and never written again. Sequences with the same beginning refer to the same sealed pages; when two have
computed the same page, the one that seals it later goes on with the page that is known and frees its own. So whoever
refers to a known page refers to all pages before it, and a page that can be found has a parent that can be found. A
page that is not full is shared by forks only, and whoever writes first copies it.

Pages are promised before they are taken: a table reserves all that its capacity needs, and a fork also the copy of its
shared last page, whichever of the two will make it. An admitted sequence therefore always finishes, and pages that
nobody needs yet stay cached meanwhile.

Like the pool, tables take no lock: the engine calls them under its own. A call that is refused has changed nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from m31.engine.pool import PagePool
from m31.engine.seals import Context, Seal
from m31.errors import PageError

_WHERE = "page table"


class PageTable:
    """The pages of one sequence; made by `open` and `fork`.

    Tokens are placed (a step writes their keys and values), then appended, which commits them, or drafted, which leaves
    the choice between `commit` and `rewind`. Placing again without appending repeats a step that failed.

    Attributes:
        pages: physical pages in order of position; those after the tokens are placed and not yet filled.
        capacity: tokens that it may ever hold.
        released: whether it has given everything back.
    """

    def __init__(self, pool: PagePool, context: Context, *, capacity: int, share: bool) -> None:
        """An empty table without promises; `open` and `fork` make complete ones."""
        self.capacity, self.pages = capacity, list[int]()
        self._pool, self._context, self._share = pool, context, share
        self._tokens: list[int] = []  # committed
        self._drafts: list[int] = []  # after them
        self._seals: list[Seal] = []  # of the first pages
        self._placed = 0  # end of the positions that may be written
        self.released = False

    @classmethod
    def open(cls, pool: PagePool, context: Context, tokens: Sequence[int], *, capacity: int, share: bool) -> PageTable:
        """A table for a sequence that begins with `tokens`.

        It starts with the longest run of known pages, which leaves at least the last of `tokens` to compute: somebody
        wants its logits. `length` says how many tokens need not be computed.

        Args:
            context: what the pages depend on besides tokens.
            capacity: tokens that the sequence may ever hold.
            share: whether to use known pages and to make own ones known. Without it the sequence reads only what it
                has computed itself.

        Raises:
            PagesExhausted: its pages cannot be promised now.
            PageError: the capacity does not hold `tokens`.
        """
        least = max(1, len(tokens))
        if capacity < least:
            raise PageError(f"capacity for {capacity} tokens", where=_WHERE, expected=f"at least {least}")
        table = cls(pool, context, capacity=capacity, share=share and pool.prefix_cache)
        found = pool.find(context, tokens) if table._share else []
        pool.reserve(pool.pages_for(capacity) - len(found), found)
        table.pages = found
        table._seals = [pool.seal_of(page) for page in found]
        table._tokens = list(tokens[: len(found) * pool.page_tokens])
        table._placed = table.length
        return table

    @property
    def length(self) -> int:
        """Tokens in the pages, committed and drafted; still known after the release."""
        return len(self._tokens) + len(self._drafts)

    @property
    def committed(self) -> int:
        """Tokens that stay."""
        return len(self._tokens)

    @property
    def sealed(self) -> int:
        """Pages that are sealed: all that committed tokens fill."""
        return len(self._seals)

    def slots(self, start: int, end: int) -> list[int]:
        """Slots (page * page_tokens + offset) of the positions start .. end - 1, which must be placed."""
        if not 0 <= start <= end <= self._placed:
            raise PageError(
                f"positions {start} to {end}", where=_WHERE, expected=f"positions from 0 to {self._placed}, all placed"
            )
        size = self._pool.page_tokens
        return [self.pages[at // size] * size + at % size for at in range(start, end)]

    def place(self, count: int) -> list[int]:
        """Slots of the next `count` positions, in pages that no other sequence refers to.

        Raises:
            PageError: they are beyond the capacity.
        """
        self._check_open()
        start, pool = self.length, self._pool
        end = start + count
        if not start < end <= self.capacity:
            raise PageError(
                f"{count} tokens after {start}",
                where=_WHERE,
                expected=f"1 to {self.capacity - start}, what the capacity of {self.capacity} leaves",
            )
        at = start // pool.page_tokens
        if start % pool.page_tokens and pool.shared(self.pages[at]):
            shared, self.pages[at] = self.pages[at], pool.copy(self.pages[at])  # the fork reserved it
            pool.drop([shared])
        while len(self.pages) < pool.pages_for(end):
            self.pages.append(pool.take())
        self._placed = max(self._placed, end)
        return self.slots(start, end)

    def append(self, tokens: Sequence[int]) -> None:
        """Commit tokens that a step has computed at the next positions.

        Raises:
            PageError: they were not placed, or there are drafted tokens.
        """
        self._check_decided()
        self._check_placed(tokens)
        self._tokens += tokens
        self._seal()

    def draft(self, tokens: Sequence[int]) -> None:
        """Tokens that a step has computed at the next positions and that may be rejected. They seal nothing.

        Raises:
            PageError: they were not placed.
        """
        self._check_placed(tokens)
        self._drafts += tokens

    def commit(self, count: int) -> None:
        """Accept the first `count` drafted tokens."""
        self._check_drafted(count)
        accepted = self._drafts[:count]
        del self._drafts[:count]
        self._tokens += accepted
        self._seal()

    def rewind(self, count: int) -> None:
        """Drop the last `count` drafted tokens. Committed tokens stay, so a sealed page is never touched.

        Raises:
            PageError: fewer are drafted.
        """
        self._check_drafted(count)
        del self._drafts[len(self._drafts) - count :]
        self._placed = self.length
        keep = self._pool.pages_for(self.length)
        unused = self.pages[keep:]
        del self.pages[keep:]
        self._pool.drop(reversed(unused))
        self._pool.reserve(len(unused))  # they may be placed again

    def fork(self, *, capacity: int) -> PageTable:
        """Another sequence that goes on from the same tokens.

        Raises:
            PagesExhausted: its pages cannot be promised now.
            PageError: there are drafted tokens, or the capacity does not hold the tokens.
        """
        self._check_decided()
        if capacity < max(1, self.length):
            raise PageError(f"capacity for {capacity} tokens", where=_WHERE, expected=f"at least {max(1, self.length)}")
        self._seal()  # only the last page may be unsealed, also when something interrupted the last append
        pool, pages = self._pool, self.pages[: self._pool.pages_for(self.length)]
        pool.reserve(pool.pages_for(capacity) - len(pages) + self._partial, pages)
        other = PageTable(pool, self._context, capacity=capacity, share=self._share)
        other.pages, other._seals, other._tokens = pages, list(self._seals), list(self._tokens)
        other._placed = self._placed = self.length  # what was placed in the shared page no longer is
        return other

    def withdraw(self) -> None:
        """The sequence failed: its pages may hold anything, also those that it found.

        Nobody finds them again, nor what was computed from them. Sequences that already refer to them keep them.
        """
        self._check_open()
        self._share = False
        self._pool.withdraw(self._seals)

    def release(self) -> None:
        """Give everything back. Sealed pages that can be found stay cached."""
        self._check_open()
        pool, pages = self._pool, self.pages
        copy = self._partial and pool.shared(pages[self.length // pool.page_tokens])  # now one less will copy
        self.released, self.pages, self._placed = True, [], 0
        pool.unreserve(pool.pages_for(self.capacity) - len(pages) + copy)
        pool.drop(reversed(pages))

    @property
    def _partial(self) -> bool:
        """Whether the last page with tokens is not full."""
        return self.length % self._pool.page_tokens != 0

    def _seal(self) -> None:
        """Seal what committed tokens fill."""
        pool, size = self._pool, self._pool.page_tokens
        while (at := len(self._seals)) < self.committed // size:
            seal = pool.make_seal(self._context, at * size, self._tokens, self._seals[-1] if at else None)
            publish = self._share and (at == 0 or pool.known(self.pages[at - 1]))
            own = self.pages[at]
            self.pages[at] = pool.seal(own, seal, publish=publish)
            self._seals.append(pool.seal_of(self.pages[at]))
            if self.pages[at] != own:
                pool.drop([own])

    def _check_open(self) -> None:
        if self.released:
            raise PageError("the table was released", where=_WHERE, fix="open another one")

    def _check_placed(self, tokens: Sequence[int]) -> None:
        self._check_open()
        room = self._placed - self.length
        if len(tokens) > room:
            raise PageError(
                f"{len(tokens)} tokens after {self.length}",
                where=_WHERE,
                expected=f"at most {room}, as many as are placed",
                fix="place tokens before they are computed",
            )

    def _check_decided(self) -> None:
        self._check_open()
        if self._drafts:
            raise PageError(
                f"{len(self._drafts)} drafted tokens are undecided", where=_WHERE, fix="commit or rewind them first"
            )

    def _check_drafted(self, count: int) -> None:
        self._check_open()
        if not 0 <= count <= len(self._drafts):
            raise PageError(
                f"{count} drafted tokens", where=_WHERE, expected=f"0 to {len(self._drafts)}, as many as there are"
            )
