"""Physical pages: which are free, which are in use and how often, which can be found again (DESIGN.md §5).

A page is in one of three states:

- free: nobody's; its contents mean nothing (with `poison` they read as NaN).
- active: at least one page table refers to it.
- cached: sealed, and no table refers to it. It can be found again, and is evicted when no page is free.

Nothing here takes a lock: the engine calls it under its own. A call that is refused has changed nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from m31.engine.seals import Context, Digest, Seal, make_seal, sha256
from m31.errors import PagesExhausted
from m31.sdk.backend import KVCache


class PagePool:
    """The pages of a cache. `m31.engine.pages.PageTable` is its only user and keeps the rules of a sequence.

    Args:
        cache: the memory.
        page_tokens: tokens of a page.
        prefix_cache: whether sealed pages can be found by other sequences and outlive their own.
        poison: overwrite pages that become free, so that reading a stale one shows; for tests.
        digest: of a seal's bytes.
        also: further caches on the same page ids (a draft head's): what happens to a page happens there too.
    """

    def __init__(
        self,
        cache: KVCache,
        *,
        page_tokens: int,
        prefix_cache: bool,
        poison: bool,
        digest: Digest = sha256,
        also: Sequence[KVCache] = (),
    ) -> None:
        self.pages, self.page_tokens, self.prefix_cache, self.poison = cache.pages, page_tokens, prefix_cache, poison
        self._cache, self._digest, self._caches = cache, digest, (cache, *also)
        self._free = list(range(cache.pages - 1, -1, -1))  # the last one goes first
        self._refs: dict[int, int] = {}  # active pages
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._seals: dict[int, Seal] = {}  # of active and cached pages
        self._index: dict[bytes, int] = {}  # pages that can be found; a parent comes before its children
        self._reserved = 0  # pages promised to tables
        if poison:
            self._poison(range(cache.pages))

    @property
    def free(self) -> int:
        """Pages that can be reserved now: free or evictable, and not promised to anybody."""
        return len(self._free) + len(self._cached) - self._reserved

    @property
    def cached(self) -> int:
        """Pages in the state cached."""
        return len(self._cached)

    def pages_for(self, tokens: int) -> int:
        """Pages of so many tokens."""
        return -(-tokens // self.page_tokens)

    def reserve(self, count: int, found: Sequence[int] = ()) -> None:
        """Promise `count` pages to a table and let it refer to `found` ones, all or nothing.

        Raises:
            PagesExhausted: fewer are free; a cached page that is found counts as free until then.
        """
        need = count + sum(page in self._cached for page in found)
        if need > self.free:
            raise PagesExhausted(
                f"{need} pages asked for, {self.free} free",
                where="page pool",
                expected=f"at most what is free of its {self.pages}",
                fix="wait until a sequence ends, or make the pool larger",
            )
        for page in found:
            self._hold(page)
        self._reserved += count

    def unreserve(self, count: int) -> None:
        """Take a promise back."""
        self._reserved -= count

    def take(self) -> int:
        """A page that was promised; the least recently used cached one is evicted if none is free."""
        if not self._free:
            page, _ = self._cached.popitem(last=False)
            del self._index[self._seals.pop(page).digest]
            self._put_back([page])
        page = self._free.pop()
        self._refs[page] = 1
        self._reserved -= 1
        return page

    def shared(self, page: int) -> bool:
        """Whether more than one table refers to a page."""
        return self._refs[page] > 1

    def copy(self, page: int) -> int:
        """A promised page with the contents of another."""
        target = self.take()
        for cache in self._caches:
            cache.copy_pages([page], [target])
        return target

    def drop(self, pages: Iterable[int]) -> None:
        """One reference less to each. Children come before their parent, so that they are also evicted before it."""
        unused = []
        for page in pages:
            self._refs[page] -= 1
            if self._refs[page]:
                continue
            del self._refs[page]
            if self.known(page):
                self._cached[page] = None
            else:
                self._seals.pop(page, None)
                unused.append(page)
        self._put_back(unused)

    def find(self, context: Context, tokens: Sequence[int]) -> list[int]:
        """Known pages of the beginning of `tokens`, in order. At least the last token is left over."""
        found: list[int] = []
        parent: Seal | None = None
        for start in range(0, len(tokens) - self.page_tokens, self.page_tokens):
            wanted = self.make_seal(context, start, tokens, parent)
            page = self._index.get(wanted.digest)
            if page is None or not self._seals[page].same(wanted):
                break
            parent = self._seals[page]
            found.append(page)
        return found

    def make_seal(self, context: Context, start: int, tokens: Sequence[int], parent: Seal | None) -> Seal:
        """The seal of the page that begins at position `start` of `tokens`."""
        page = tokens[start : start + self.page_tokens]
        return make_seal(self._cache.layout.layout_id, context, start, page, parent, self._digest)

    def seal(self, page: int, seal: Seal, *, publish: bool) -> int:
        """Seal a page, or refer to the known page of the same content instead; the page to go on with.

        With a known page the caller drops its own one. Until then a cached one that is referred to may be one more than
        is free, which is no reason to refuse.

        Args:
            publish: whether it may be found, and replaced by a known one.
        """
        twin = self._index.get(seal.digest) if publish else None
        if twin is not None and self._seals[twin].same(seal):
            self._hold(twin)
            return twin
        self._seals[page] = seal
        if publish and twin is None:  # of two contents with one digest the first can be found
            self._index[seal.digest] = page
        return page

    def seal_of(self, page: int) -> Seal:
        """The seal of a sealed page."""
        return self._seals[page]

    def known(self, page: int) -> bool:
        """Whether a page can be found."""
        seal = self._seals.get(page)
        return seal is not None and self._index.get(seal.digest) == page

    def withdraw(self, seals: Iterable[Seal]) -> None:
        """Nobody finds the pages of these seals again, nor any page that was computed from them."""
        bad = set(seals)
        unused = []
        for digest, page in list(self._index.items()):
            seal = self._seals[page]
            if seal in bad or seal.parent in bad:
                bad.add(seal)
                del self._index[digest]
                if page in self._cached:
                    del self._cached[page], self._seals[page]
                    unused.append(page)
        self._put_back(unused)

    def _hold(self, page: int) -> None:
        """One more reference to a page that is active or cached."""
        self._cached.pop(page, None)
        self._refs[page] = self._refs.get(page, 0) + 1

    def _put_back(self, pages: list[int]) -> None:
        if not pages:
            return
        if self.poison:
            self._poison(pages)
        self._free.extend(pages)
        self._free.sort(reverse=True)

    def _poison(self, pages: Sequence[int]) -> None:
        for cache in self._caches:
            cache.poison(pages)
