"""Synthetic documents in which something is defined, and asked for 100 to 3,500 tokens later.

Source code alone teaches a small model little about looking far back: what a line needs is mostly near it. Here, names
and values are random, so the definition is the only place that an answer can come from. Between definitions and
questions stand lines of real code. Every document is a pure function of (seed, index, length).

Documents are made line by line and counted in tokens as they grow. That the tokens of the text are the tokens of its
lines in a row is a property of the tokenizer (`m31.training.bpe`); answers, too, begin and end where pieces do.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from m31.errors import CorpusError, RequestError
from m31.text import demo
from m31.text.tokenizer import Tokenizer
from m31.training.draws import Draws, Purpose

MIN_DISTANCE, MAX_DISTANCE = 100, 3500
MIN_LENGTH = 256  # of a document: a definition, the least distance, a question

_VERSION = 1  # raise it when the same arguments would give other documents
_TOKENS_PER_FACT = 64  # of a document's length; about half of a document is then code between facts
# What is planned; a line before a question may delay it, so the promise (MIN_DISTANCE, MAX_DISTANCE) has slack.
_NEAREST, _FARTHEST = 110, 3300
_LONGEST_LINE = 100  # characters of a line of code that is taken over
_FEWEST_LINES = 100

_CONSONANTS, _VOWELS = "bdfgklmnprstvz", "aeiou"


@dataclass(frozen=True)
class Fact:
    """One question of a document, in tokens from the document's start.

    Attributes:
        source: where the value last stood before: in its definition, or in an earlier question.
        answer, stop: the answer is the tokens answer .. stop-1; everything before it is the question.
        name: what it is asked by.
        value: the answer's text, with the sign before it that belongs to the same piece (a space, or none).
    """

    source: int
    answer: int
    stop: int
    name: str
    value: str

    @property
    def distance(self) -> int:
        """Tokens from the value at its source to the answer."""
        return self.answer - self.source


@dataclass(frozen=True)
class RecallDocument:
    """A document to train on.

    Attributes:
        ids: token ids, beginning with BOS; as many as asked for (the last line may be cut).
        facts: its questions, in order; every distance is from `MIN_DISTANCE` to `MAX_DISTANCE`.
    """

    ids: tuple[int, ...]
    facts: tuple[Fact, ...]


@dataclass(frozen=True)
class Probe:
    """The same question with and without its definition in the context. Both sequences end with the answer.

    Attributes:
        ids, fact: with the definition.
        ids_without: the definition's line is missing, nothing else.
        answer_without: where the answer begins in `ids_without`; it ends with the sequence.
    """

    ids: tuple[int, ...]
    fact: Fact
    ids_without: tuple[int, ...]
    answer_without: int


@dataclass(frozen=True)
class _Kind:
    """How a fact is written. {} is the name; the value's text follows, then the tail."""

    name: Callable[[Draws], str]
    value: Callable[[Draws], str]
    definition: tuple[str, str, str]  # before the value, the sign joined to the value, after the value
    question: tuple[str, str, str]


@dataclass(frozen=True)
class _Secret:
    kind: _Kind
    name: str
    value: str


def _word(draws: Draws, syllables: int = 3) -> str:
    return "".join(draws.choice(_CONSONANTS) + draws.choice(_VOWELS) for _ in range(syllables))


def _snake(draws: Draws) -> str:
    return f"{_word(draws)}_{_word(draws, 2)}"


def _upper(draws: Draws) -> str:
    return _snake(draws).upper()


def _camel(draws: Draws) -> str:
    return (_word(draws) + _word(draws, 2).capitalize()).capitalize()


def _number(draws: Draws) -> str:
    return str(draws.between(1000, 99999))


# The value never shares a piece with what is before it, except for the sign that the middle field names.
_KINDS = (
    _Kind(_upper, _number, ("{} = ", "", ""), ("assert {} == ", "", "")),
    _Kind(_snake, _word, ('{} = "', "", '"'), ('assert {} == "', "", '"')),
    _Kind(_snake, _number, ("def {}():\n    return ", "", ""), ("assert {}() == ", "", "")),
    _Kind(_camel, _camel, ("class {}", "(", "):\n    pass"), ("assert issubclass({},", " ", ")")),
    _Kind(_snake, _number, ('"{}": ', "", ","), ('check("{}", ', "", ")")),
    _Kind(_snake, _camel, ("from {} import", " ", ""), ("# {} provides", " ", "")),
    _Kind(_snake, _word, ("def {}", "(", "=None):\n    ..."), ("{}", "(", "=1)")),
)


class _Page:
    """A growing document: token ids, and lines of code to fill it with."""

    def __init__(self, writer: RecallWriter, draws: Draws) -> None:
        self._writer, self._draws = writer, draws
        self._line, self._left = 0, 0
        self.ids: list[int] = [writer.bos]

    def put(self, text: str) -> None:
        """A line, or several."""
        self.ids += self._writer.encode(text if len(self.ids) == 1 else "\n" + text)

    def fill(self) -> None:
        """One line of code; runs of up to a dozen come from one place."""
        lines = self._writer.lines
        if not self._left:
            self._left, self._line = self._draws.between(3, 12), self._draws.below(len(lines))
        line = lines[self._line % len(lines)]
        self.put(line.strip() if len(self.ids) == 1 else line)
        self._left, self._line = self._left - 1, self._line + 1

    def fact(self, secret: _Secret, parts: tuple[str, str, str]) -> tuple[int, int]:
        """A definition or a question; returns where the value's tokens begin and end."""
        before, sign, after = parts
        self.put(before.format(secret.name))
        start = len(self.ids)
        self.ids += self._writer.encode(sign + secret.value)
        stop = len(self.ids)
        if after:
            self.ids += self._writer.encode(after)
        return start, stop


class RecallWriter:
    """Writes recall documents.

    Args:
        tokenizer: with the pieces of `m31.training.bpe`.
        texts: where lines of code between facts are taken from: of the train split to train, of others to measure.
        seed: 0 .. 2**64-1.

    Attributes:
        digest: of everything that the documents depend on, but the tokenizer.

    Raises:
        CorpusError: the texts have too few usable lines.
    """

    def __init__(self, tokenizer: Tokenizer, texts: Iterable[str], *, seed: int) -> None:
        self._tokenizer, self._seed = tokenizer, seed
        self.bos = tokenizer.special_id(demo.BOS)
        self.lines = [
            line
            for text in texts
            for raw in text.split("\n")
            if (line := raw.rstrip()) and len(line) <= _LONGEST_LINE and "\r" not in line
        ]
        if len(self.lines) < _FEWEST_LINES:
            raise CorpusError(
                f"{len(self.lines)} lines of code to put between facts",
                where="texts",
                expected=f"at least {_FEWEST_LINES} lines of 1 to {_LONGEST_LINE} characters",
            )

        content = "\n".join((str(_VERSION), str(seed), *self.lines))
        self.digest = hashlib.blake2b(content.encode(), digest_size=16).hexdigest()

    def encode(self, text: str) -> list[int]:
        """Token ids of a text that begins and ends at pieces' ends."""
        return self._tokenizer.encode(text, special=False)

    def document(self, index: int, length: int) -> RecallDocument:
        """A document of exactly `length` tokens.

        Definitions are spread evenly, distances are spread evenly in their logarithm, as far as `length` lets them.

        Raises:
            RequestError: `length` is below `MIN_LENGTH`.
        """
        if length < MIN_LENGTH:
            raise RequestError(
                f"a recall document of {length} tokens", where="length", expected=f"at least {MIN_LENGTH}"
            )
        draws = Draws(self._seed, Purpose.RECALL, index * 2**16 + length)
        page = _Page(self, draws)
        secrets = _secrets(draws, length // _TOKENS_PER_FACT)
        starts = sorted(draws.below(length - _NEAREST - 2 * _LONGEST_LINE // 3) for _ in secrets)
        # (when, where its value stood last, secret, asked before?); no two sources are equal, so secrets never compare.
        # Questions come before definitions that are due as well: only a definition can wait without harm.
        due: list[tuple[int, int, _Secret, bool]] = []
        facts: list[Fact] = []
        waiting = list(zip(starts, secrets, strict=True))[::-1]

        def ask_later(secret: _Secret, source: int, again: bool) -> None:
            when = source + _far(draws, min(_FARTHEST, length - source))
            heapq.heappush(due, (when, source, secret, again))

        while len(page.ids) < length:
            here = len(page.ids)
            if due and due[0][0] <= here:
                _, source, secret, again = heapq.heappop(due)
                start, stop = page.fact(secret, secret.kind.question)
                facts.append(Fact(source, start, stop, secret.name, secret.kind.question[1] + secret.value))
                if not again and draws.below(2):
                    ask_later(secret, start, True)
            elif waiting and waiting[-1][0] <= here:
                _, secret = waiting.pop()
                ask_later(secret, page.fact(secret, secret.kind.definition)[0], False)
            else:
                page.fill()
        kept = tuple(fact for fact in facts if fact.stop <= length)
        return RecallDocument(tuple(page.ids[:length]), kept)

    def probe(self, index: int, *, distance: int = 3000) -> Probe:
        """A question `distance` tokens (or one line more) behind its definition, among other definitions.

        Names, values and places differ from those of every document to train on with the same seed.

        Raises:
            RequestError: `distance` is outside `MIN_DISTANCE` .. `MAX_DISTANCE`.
        """
        if not MIN_DISTANCE <= distance <= MAX_DISTANCE:
            raise RequestError(
                f"a distance of {distance} tokens",
                where="distance",
                expected=f"from {MIN_DISTANCE} to {MAX_DISTANCE}",
            )
        draws = Draws(self._seed, Purpose.PROBE, index * 2**16 + distance)
        page = _Page(self, draws)
        secret, *others = _secrets(draws, 1 + min(8, distance // 64))
        lead = draws.between(16, 96)
        while len(page.ids) < lead:
            page.fill()
        page.fact(others[0], others[0].kind.definition)
        first = len(page.ids)
        defined, _ = page.fact(secret, secret.kind.definition)
        last = len(page.ids)
        asking = len(self.encode("\n" + secret.kind.question[0].format(secret.name)))
        places = sorted((last + draws.below(distance - 64), i) for i in range(1, len(others)))[::-1]
        while len(page.ids) < defined + distance - asking:
            if places and places[-1][0] <= len(page.ids):
                other = others[places.pop()[1]]
                page.fact(other, other.kind.definition)
            else:
                page.fill()
        start, stop = page.fact(secret, secret.kind.question)
        ids = tuple(page.ids[:stop])
        fact = Fact(defined, start, stop, secret.name, secret.kind.question[1] + secret.value)
        return Probe(ids, fact, ids[:first] + ids[last:], start - (last - first))


def _secrets(draws: Draws, count: int) -> list[_Secret]:
    """Facts whose names and values all differ."""
    found: list[_Secret] = []
    seen: set[str] = set()
    while len(found) < count:
        kind = draws.choice(_KINDS)
        name, value = kind.name(draws), kind.value(draws)
        if name.lower() not in seen and value.lower() not in seen and name != value:
            seen |= {name.lower(), value.lower()}
            found.append(_Secret(kind, name, value))
    return found


def _far(draws: Draws, farthest: int) -> int:
    """A distance from `_NEAREST` to `farthest`: each doubling of it as likely as the last."""
    farthest = max(_NEAREST, farthest)
    octaves = (farthest // _NEAREST).bit_length()
    while True:
        low = _NEAREST << draws.below(octaves)
        if (value := low + draws.below(low)) <= farthest:
            return value
