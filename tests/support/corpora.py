"""A corpus that is made up: the same bytes under every release of Python, unlike the standard library's."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from m31.training.corpus import Corpus, Document, Split, split_of

_NOUNS = (
    *("table", "row", "index", "cache", "block", "token", "page", "head"),
    *("queue", "frame", "buffer", "stream", "record", "field", "value"),
)
_VERBS = (
    *("read", "write", "find", "merge", "split", "count", "check", "open"),
    *("close", "push", "pop", "trim", "join", "scan"),
)


def _numbers(name: str) -> Iterator[int]:
    """Random 16-bit numbers, from a hash and not from a library whose algorithm may change."""
    counter = 0
    while True:
        block = hashlib.blake2b(f"{name}/{counter}".encode(), digest_size=64).digest()
        yield from (int.from_bytes(block[i : i + 2], "little") for i in range(0, 64, 2))
        counter += 1


def _source(name: str, size: int) -> str:
    """Something like Python, at least `size` characters."""
    numbers = _numbers(name)

    def pick(words: tuple[str, ...]) -> str:
        return words[next(numbers) % len(words)]

    lines = [f'"""{pick(_VERBS).capitalize()} a {pick(_NOUNS)}."""', "", "import os", ""]
    while sum(map(len, lines)) < size:
        verb, noun, other = pick(_VERBS), pick(_NOUNS), pick(_NOUNS)
        lines += [f"def {verb}_{noun}({other}, limit={next(numbers) % 100}):", f"    {noun} = []"]
        for _ in range(next(numbers) % 4):
            kind = next(numbers) % 3
            if kind == 0:
                lines += [f"    for {pick(_NOUNS)} in {other}:", f"        {noun}.append({pick(_VERBS)}({other}))"]
            elif kind == 1:
                lines += [f"    if len({noun}) > limit + {next(numbers) % 10}:", f"        return {noun}[:limit]"]
            else:
                lines.append(f"    {pick(_NOUNS)} = {other}.{pick(_VERBS)}_{pick(_NOUNS)}(limit)")
        lines += [f"    return {noun}", "", ""]
    return "\n".join(lines)


def invented(sizes: dict[Split, list[int]]) -> Corpus:
    """A corpus with files of these sizes in each split, in characters."""
    wanted = {split: list(reversed(lengths)) for split, lengths in sizes.items()}
    documents = []
    number = 0
    while any(wanted.values()):
        path = f"made/up_{number:04}.py"
        number += 1
        if left := wanted.get(split_of(path)):
            text = _source(path, left.pop())
            documents.append(Document(path, split_of(path), text, len(text.encode())))
    content = "\0".join(f"{document.path}\0{document.text}" for document in documents)
    digest = hashlib.blake2b(content.encode(), digest_size=16).hexdigest()
    return Corpus(tuple(documents), digest, "invented", ())
