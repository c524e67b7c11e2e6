"""Expressions that select items by their ids: `and`, `or`, `not` and parentheses over parts of an id."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from m31.errors import RequestError

Predicate = Callable[[str], bool]
_TOKEN = re.compile(r"\s*(\(|\)|[^\s()]+)")


def parse(text: str) -> Predicate:
    """What an expression says of an id.

    A word holds for every id that contains it, whatever the case of letters. `not` binds tighter than `and`, `and`
    tighter than `or`.

    Raises: RequestError where it is malformed.
    """
    words = [match.group(1) for match in _TOKEN.finditer(text)]
    reader = _Reader(text, words)
    found = reader.either()
    if reader.next is not None:
        reader.fail(f"'{reader.next}' is one too many")
    return found


def select(ids: list[str], text: str) -> list[str]:
    """The ids that an expression holds for, in their order; an expression that is an id selects that one only.

    Raises: RequestError where it is malformed.
    """
    if text in ids:
        return [text]
    holds = parse(text)
    return [name for name in ids if holds(name)]


class _Reader:
    def __init__(self, text: str, words: list[str]) -> None:
        self._text, self._words = text, iter(words)
        self.next: str | None = None
        self._step()

    def _step(self) -> str | None:
        seen = self.next
        self.next = next(self._words, None)
        return seen

    def fail(self, what: str) -> None:
        raise RequestError(
            what, where=f"-k '{self._text}'", expected="parts of ids joined by and, or, not and parentheses"
        )

    def either(self) -> Predicate:
        return self._joined("or", self._both, any)

    def _both(self) -> Predicate:
        return self._joined("and", self._one, all)

    def _joined(
        self, word: str, part: Callable[[], Predicate], together: Callable[[Iterator[bool]], bool]
    ) -> Predicate:
        parts = [part()]
        while self.next == word:
            self._step()
            parts.append(part())
        return lambda name: together(holds(name) for holds in parts)

    def _one(self) -> Predicate:
        word = self._step()
        if word == "not":
            inner = self._one()
            return lambda name: not inner(name)
        if word == "(":
            found = self.either()
            if self._step() != ")":
                self.fail("a parenthesis is not closed")
            return found
        if word is None or word in (")", "and", "or"):
            self.fail(f"something is missing before '{word}'" if word else "it ends too early")
        lowered = str(word).lower()
        return lambda name: lowered in name.lower()
