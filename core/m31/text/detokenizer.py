"""Token ids to text, one token at a time, never half a character."""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from typing import Protocol


class Pieces(Protocol):
    """What a detokenizer needs to know about a tokenizer (m31.text.tokenizer.Tokenizer is one)."""

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids that `skip_special` removes."""
        ...

    @property
    def strip_start(self) -> tuple[str, int] | None:
        """(character, count) removed from the start of a text, or None."""
        ...

    def piece(self, token_id: int, *, first: bool) -> bytes:
        """Bytes of a token; raises TokenizerError for an id outside the vocabulary."""
        ...


class Detokenizer:
    """Incremental decoding: the strings that `push` and `flush` return, joined, are the text of all pushed ids.

    A character whose bytes are spread over several tokens comes out with the last of them. Bytes that cannot be
    UTF-8 become U+FFFD as soon as that is certain (one per maximal ill-formed part, the Unicode recommendation), an
    unfinished character at the end becomes one U+FFFD in `flush`. The state is at most three bytes and one counter,
    so a token costs the same however long the text is.

    Args:
        tokenizer: gives the bytes of each token.
        skip_special: leave special tokens out. Markers that are added but not special stay (MODEL.md §7.1).
        continuing: the text continues another one (a reply after its prompt), so nothing is stripped at the start.
    """

    def __init__(self, tokenizer: Pieces, *, skip_special: bool = True, continuing: bool = False) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special else frozenset()
        self._first = not continuing
        self._strip = None if continuing else tokenizer.strip_start
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """The text that is certain after this token and was not before; often one token's, sometimes empty.

        Raises:
            TokenizerError: the id is outside the vocabulary. The state is unchanged.
        """
        piece = self._tokenizer.piece(token_id, first=self._first)  # refuses what is no id, True for example
        if token_id in self._skipped:
            return ""
        self._first = False
        return self._stripped(self._utf8.decode(piece))

    def flush(self) -> str:
        """What is still held, at the end of the text; the detokenizer is then as after the same text anew."""
        return self._stripped(self._utf8.decode(b"", True))

    def _stripped(self, text: str) -> str:
        if self._strip is None or not text:
            return text
        char, left = self._strip
        count = min(left, len(text) - len(text.lstrip(char)))
        # The first other character ends the stripping; until then the remaining allowance is kept.
        self._strip = None if count < len(text) or count == left else (char, left - count)
        return text[count:]


def decode_all(tokenizer: Pieces, ids: Iterable[int], *, skip_special: bool) -> str:
    """The text of `ids`, through the same code that streams it, so that the two cannot disagree."""
    detokenizer = Detokenizer(tokenizer, skip_special=skip_special)
    pieces = [detokenizer.push(token_id) for token_id in ids]
    pieces.append(detokenizer.flush())
    return "".join(pieces)
