"""What bytes a token stands for, read from the decoder that tokenizer.json describes.

Streaming needs a decoder that works token by token. Every decoder accepted here is one: a token gives bytes of its
own, the text is the UTF-8 reading of their concatenation, and the only effect beyond one token is at the very start
of the text. A decoder of another kind is refused when it is loaded, rather than streamed wrongly.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from m31.errors import TokenizerError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")

PieceText = Callable[[str, bool], str]  # (token's string, is it the first token of the text) -> its text


def byte_alphabet() -> dict[str, int]:
    """The 256 printable characters that byte-level vocabularies write instead of bytes: character -> byte.

    Printable Latin-1 bytes stand for themselves; the other 68 are numbered upwards from U+0100 in byte order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(rest)}


@dataclass(frozen=True)
class PieceDecoder:
    """How one token becomes bytes.

    Attributes:
        byte_level: vocabulary strings are written in the byte alphabet.
        byte_fallback: a vocabulary string like `<0xE2>` is that byte.
        steps: text rewrites of one token, in order (unused when byte_level).
        strip_start: (character, count): up to count such characters are removed from the start of the whole text.
    """

    byte_level: bool
    byte_fallback: bool
    steps: tuple[PieceText, ...]
    strip_start: tuple[str, int] | None

    def piece(self, string: str, *, added: bool, first: bool) -> bytes:
        """Bytes of the token whose vocabulary string is `string`; added tokens are literal text (MODEL.md §7.1)."""
        if added:
            return string.encode("utf-8")
        if self.byte_level:
            try:
                return bytes(_ALPHABET[char] for char in string)
            except KeyError:  # an entry outside the alphabet can only mean itself
                return string.encode("utf-8")
        if self.byte_fallback and (match := _BYTE_TOKEN.fullmatch(string)):
            return bytes([int(match.group(1), 16)])
        for step in self.steps:
            string = step(string, first)
        return string.encode("utf-8")


_ALPHABET = byte_alphabet()


def _unsupported(what: str, where: str) -> TokenizerError:
    return TokenizerError(
        f"the decoder {what} cannot be streamed token by token",
        where=where,
        expected="ByteLevel, or Metaspace / ByteFallback with Replace, Fuse and Strip",
        fix="use the tokenizer.json published with the checkpoint",
    )


def _replace_step(node: Mapping[str, object], where: str) -> PieceText:
    pattern, content = node.get("pattern"), node.get("content")
    old = pattern.get("String") if isinstance(pattern, Mapping) else None
    if not isinstance(old, str) or not old or not isinstance(content, str):
        raise _unsupported("Replace with a regular expression", where)
    return lambda text, first: text.replace(old, content)


def _metaspace_step(node: Mapping[str, object], where: str) -> PieceText:
    mark = node.get("replacement")
    if not isinstance(mark, str) or len(mark) != 1:
        raise _unsupported("Metaspace without a one-character replacement", where)
    scheme = node.get("prepend_scheme", "always" if node.get("add_prefix_space", True) else "never")

    def step(text: str, first: bool) -> str:
        # The library removes every mark of the first token, not only the one that encoding put there.
        return text.replace(mark, "" if first and scheme != "never" else " ")

    return step


def _strip_counts(node: Mapping[str, object], where: str) -> tuple[str, int, int]:
    content, start, stop = node.get("content"), node.get("start"), node.get("stop")
    if not (isinstance(content, str) and len(content) == 1 and isinstance(start, int) and isinstance(stop, int)):
        raise _unsupported("Strip without content, start and stop", where)
    return content, start, stop


def _strip_step(content: str, start: int, stop: int) -> PieceText:
    def step(text: str, first: bool) -> str:
        head = min(start, len(text) - len(text.lstrip(content)))
        text = text[head:]
        tail = min(stop, len(text) - len(text.rstrip(content)))
        return text[: len(text) - tail]

    return step


def _flatten(node: object, where: str) -> list[Mapping[str, object]]:
    if not isinstance(node, Mapping):
        raise _unsupported("null", where)
    if node.get("type") != "Sequence":
        return [node]
    members = node.get("decoders")
    if not isinstance(members, Sequence) or isinstance(members, str):
        raise _unsupported("Sequence without decoders", where)
    return [leaf for member in members for leaf in _flatten(member, where)]


def read_decoder(node: object, where: str) -> PieceDecoder:
    """The decoder described by tokenizer.json's `decoder` node.

    Raises:
        TokenizerError: a decoder that does not work token by token.
    """
    leaves = _flatten(node, where)
    kinds = [str(leaf.get("type")) for leaf in leaves]
    if kinds == ["ByteLevel"]:
        return PieceDecoder(byte_level=True, byte_fallback=False, steps=(), strip_start=None)
    steps: list[PieceText] = []
    fallback = fused = False
    strip: tuple[str, int] | None = None
    for kind, leaf in zip(kinds, leaves, strict=True):
        if kind == "Fuse":
            fused = True
        elif kind == "Strip":
            content, start, stop = _strip_counts(leaf, where)
            if not fused:
                steps.append(_strip_step(content, start, stop))
            elif stop == 0 and strip is None:
                strip = (content, start)
            else:
                raise _unsupported("Strip at the end of the text", where)
        elif fused:
            raise _unsupported(f"{kind} after Fuse", where)
        elif kind == "Replace":
            steps.append(_replace_step(leaf, where))
        elif kind == "ByteFallback":
            fallback = True
        elif kind == "Metaspace":
            steps.append(_metaspace_step(leaf, where))
        else:
            raise _unsupported(kind, where)
    return PieceDecoder(byte_level=False, byte_fallback=fallback, steps=tuple(steps), strip_start=strip)
