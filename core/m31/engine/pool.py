"""Physical pages: who has which."""

from __future__ import annotations

from m31.errors import M31Error


class PagePool:
    """Free pages of a cache, handed out lowest first and taken back once."""

    def __init__(self, pages: int) -> None:
        self.pages = pages
        self._free = list(range(pages - 1, -1, -1))
        self._taken: set[int] = set()

    @property
    def free(self) -> int:
        """Pages that can be taken now."""
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """`count` pages, or an error; never fewer."""
        if count > len(self._free):
            raise M31Error(f"{count} pages asked for, {len(self._free)} free", where="page pool")
        pages = [self._free.pop() for _ in range(count)]
        self._taken.update(pages)
        return pages

    def give_back(self, pages: list[int]) -> None:
        """Return pages; a page that was not taken is a fault of the caller."""
        for page in pages:
            if page not in self._taken:
                raise M31Error(f"page {page} is given back but was not taken", where="page pool")
            self._taken.remove(page)
        self._free.extend(sorted(pages, reverse=True))
        self._free.sort(reverse=True)
