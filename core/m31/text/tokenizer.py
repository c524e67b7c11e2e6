"""The checkpoint's tokenizer.json, validated before it is used. Never reaches for a network.

The `tokenizers` library repairs or ignores much in silence: it gives added tokens other ids than the file says,
drops characters that a vocabulary cannot express, truncates a prompt when the file was saved so. All of that is
either refused here or switched off and noted.
"""

from __future__ import annotations

import difflib
import json
import operator
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import tokenizers

from m31.errors import TokenizerError
from m31.text._files import parse_object, read_text
from m31.text._pieces import PieceDecoder, byte_alphabet, read_decoder
from m31.text.detokenizer import decode_all

FILE_NAME = "tokenizer.json"
_MAX_BYTES = 512 * 2**20
_DOWNLOAD = "download the checkpoint's tokenizer.json again"


class Tokenizer:
    """Text to token ids and back. Build one with `Tokenizer.load`; it is safe to share between threads.

    Attributes:
        vocab_size: number of logits of the model; every id is below it.
        special_tokens: string -> id of the tokens that `skip_special` removes.
        added_tokens: string -> id of all added tokens, also those that are not special (reasoning markers, tool
            namespace; MODEL.md §7.1).
        notes: what was changed or found odd while loading, one sentence each, for the user to read.
    """

    def __init__(self, data: dict[str, Any], *, where: str, vocab_size: int, needed: Mapping[str, int]) -> None:
        self.vocab_size = vocab_size
        self._where = where
        self._data = data
        added = _added_tokens(data, where)
        self._decoder: PieceDecoder = read_decoder(data.get("decoder"), where)
        self._parser = _build(data, where)
        self._strings = _id_strings(self._parser, vocab_size, where)
        _check_added(self._parser, added, where)
        for name, token_id in needed.items():
            if token_id not in self._strings:
                raise TokenizerError(
                    f"config.json's {name} {token_id} is not in the vocabulary",
                    where=where,
                    expected=f"one of {len(self._strings):,} ids",
                    fix="config.json and tokenizer.json must come from the same checkpoint",
                )
        self.added_tokens: dict[str, int] = {token["content"]: token["id"] for token in added}
        self.special_tokens: dict[str, int] = {token["content"]: token["id"] for token in added if token["special"]}
        self._added_ids = frozenset(self.added_tokens.values())
        self._special_ids = frozenset(self.special_tokens.values())
        self._pieces: dict[int, bytes] = {}
        self._plain: tokenizers.Tokenizer | None = None
        self._plain_lock = threading.Lock()
        self._total = _expresses_all_text(data, self._parser)
        self._unk_id = _unknown_id(data, self._parser)
        self.notes = tuple(_notes(data, vocab_size - len(self._strings)))

    @classmethod
    def load(
        cls, folder: str | Path, *, vocab_size: int, bos: int | None = None, eos: tuple[int, ...] = ()
    ) -> Tokenizer:
        """Read `folder`/tokenizer.json.

        Args:
            folder: the checkpoint folder.
            vocab_size, bos, eos: what config.json says; the file has to agree with it.

        Raises:
            TokenizerError: the file is missing, corrupt or not a regular file; an id is not below `vocab_size`;
                `bos` or one of `eos` has no token; two added tokens share an id or the library would move one; the
                decoder cannot be streamed.
        """
        path = Path(folder) / FILE_NAME
        text = read_text(path, TokenizerError, max_bytes=_MAX_BYTES)
        if text is None:
            raise TokenizerError(
                "the checkpoint has no tokenizer",
                where=str(path),
                expected=f"a {FILE_NAME} of the `tokenizers` library",
                fix="download it beside config.json, or give token ids instead of text",
            )
        data = parse_object(text, path, TokenizerError)
        needed = {} if bos is None else {"bos_token_id": bos}
        needed |= {"eos_token_id" if i == 0 else f"eos_token_id[{i}]": token for i, token in enumerate(eos)}
        return cls(data, where=str(path), vocab_size=vocab_size, needed=needed)

    # -- encoding

    def encode(self, text: str, *, special: bool, post_process: bool = False) -> list[int]:
        """Token ids of `text`.

        Args:
            text: any Unicode text. "" gives [].
            special: True: the strings of added tokens in `text` become their ids (rendered templates). False: they
                are encoded as the ordinary characters that they are written with (text from strangers must not be
                able to end a message or close a reasoning block). This holds for all added tokens, special or not.
            post_process: also add what the file's post-processor adds (usually BOS). Templates write their own.

        Raises:
            TokenizerError: lone surrogates, or characters that this vocabulary cannot express.
        """
        if not isinstance(text, str):
            raise TokenizerError(f"cannot encode {type(text).__name__}", where=self._where, expected="a str")
        _refuse_surrogates(text)
        parser = self._parser if special else self._plain_parser()
        try:
            encoding = parser.encode(text, add_special_tokens=post_process)
        except Exception as exc:
            raise TokenizerError(
                f"this text cannot be encoded ({exc})", where=self._where, fix="remove unusual characters"
            ) from exc
        ids = list(encoding.ids)
        if not self._total:
            self._refuse_lost(text, ids, encoding.offsets)
        if not special and not self._special_ids.isdisjoint(ids) and not post_process:
            found = sorted(name for name, token_id in self.special_tokens.items() if token_id in set(ids))
            raise TokenizerError(
                f"the vocabulary cannot write {found} as ordinary text",
                where=self._where,
                fix="remove these strings from the text",
            )
        return ids

    def _plain_parser(self) -> tokenizers.Tokenizer:
        """A second parser in which no string is special. Built on first use; a shared switch would be a race."""
        with self._plain_lock:
            if self._plain is None:
                data = dict(self._data)
                data["added_tokens"] = [{**token, "special": True} for token in self._data.get("added_tokens") or []]
                plain = _build(data, self._where)
                plain.encode_special_tokens = True
                self._plain = plain
            return self._plain

    def _refuse_lost(self, text: str, ids: list[int], offsets: list[tuple[int, int]]) -> None:
        """Refuse what an incomplete vocabulary turned into `unk` or dropped; only such vocabularies come here."""
        covered = bytearray(len(text))
        for token_id, (start, end) in zip(ids, offsets, strict=True):
            if token_id != self._unk_id:
                covered[start:end] = b"\1" * (end - start)
        lost = sorted({char for char, seen in zip(text, covered, strict=True) if not seen and not char.isspace()})
        if lost:
            shown = ", ".join(f"{char!r} (U+{ord(char):04X})" for char in lost[:8])
            more = f" and {len(lost) - 8} more" if len(lost) > 8 else ""
            raise TokenizerError(
                f"the vocabulary cannot express {shown}{more}",
                where=self._where,
                expected="characters that the tokenizer knows (it has no byte fallback)",
                fix="remove these characters",
            )

    # -- decoding

    def decode(self, ids: Iterable[int], *, skip_special: bool = False) -> str:
        """The text of `ids`; the same text that `Detokenizer` streams.

        Ids below vocab_size without a token (padding of the vocabulary) give no text. Bytes that are not UTF-8 give
        U+FFFD, one per maximal ill-formed part.

        Raises:
            TokenizerError: an id outside 0 .. vocab_size-1.
        """
        return decode_all(self, ids, skip_special=skip_special)

    def piece(self, token_id: int, *, first: bool = False) -> bytes:
        """The bytes that one token stands for; `first`: at the start of a text. Raises as `decode` does."""
        if token_id.__class__ is not int:  # a bool or a numpy integer must not reach the cache unchecked
            token_id = self._checked(token_id)
        if not first and (known := self._pieces.get(token_id)) is not None:
            return known
        token_id = self._checked(token_id)
        string = self._strings.get(token_id)
        if string is None:
            return b""
        piece = self._decoder.piece(string, added=token_id in self._added_ids, first=first)
        if not first:
            self._pieces[token_id] = piece
        return piece

    def _checked(self, token_id: int) -> int:
        try:
            value = operator.index(token_id)
        except TypeError:
            value = -1
        if isinstance(token_id, bool) or not 0 <= value < self.vocab_size:
            raise TokenizerError(
                f"token id {token_id!r} is out of range", where=self._where, expected=f"0 to {self.vocab_size - 1:,}"
            )
        return value

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids of `special_tokens`."""
        return self._special_ids

    @property
    def strip_start(self) -> tuple[str, int] | None:
        """(character, count) that decoding removes from the start of a text, or None."""
        return self._decoder.strip_start

    # -- names

    def special_id(self, string: str) -> int:
        """The id of an added token, by its exact string.

        Raises:
            TokenizerError: no such token; the message names the nearest ones.
        """
        found = self.added_tokens.get(string)
        if found is not None:
            return found
        near = difflib.get_close_matches(string, self.added_tokens, n=3, cutoff=0.5)
        raise TokenizerError(
            f"unknown special token {string!r}",
            where=self._where,
            fix=f"did you mean {' or '.join(repr(name) for name in near)}?"
            if near
            else f"this tokenizer has {len(self.added_tokens)} added tokens: see Tokenizer.added_tokens",
        )

    def token_string(self, token_id: int) -> str | None:
        """The vocabulary's own spelling of an id (for inspection), None for an id without a token."""
        return self._strings.get(self._checked(token_id))


def _build(data: Mapping[str, Any], where: str) -> tokenizers.Tokenizer:
    try:
        parser = tokenizers.Tokenizer.from_str(json.dumps(data))
    except Exception as exc:
        raise _corrupt(str(exc), where) from exc
    except BaseException as exc:
        # A panic inside the library is a BaseException, so that a plain `except Exception` would let it end m31.
        if type(exc).__name__ != "PanicException":
            raise
        raise _corrupt(str(exc), where) from exc
    parser.no_truncation()
    parser.no_padding()
    return parser


def _corrupt(detail: str, where: str) -> TokenizerError:
    return TokenizerError(
        f"is not a usable tokenizer ({detail})", where=where, expected="a `tokenizers` file", fix=_DOWNLOAD
    )


def _added_tokens(data: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    """The file's added tokens, checked for shape and for doubles (the library keeps one of two and says nothing)."""
    tokens = data.get("added_tokens") or []
    if not isinstance(tokens, list):
        raise _corrupt("added_tokens is not a list", where)
    by_id: dict[int, str] = {}
    by_content: dict[str, int] = {}
    for token in tokens:
        if not (
            isinstance(token, dict)
            and type(token.get("id")) is int
            and isinstance(token.get("content"), str)
            and token["content"]
            and isinstance(token.get("special"), bool)
        ):
            raise _corrupt(f"added token {token!r} lacks id, content or special", where)
        token_id, content = token["id"], token["content"]
        if token_id in by_id:
            raise TokenizerError(
                f"the added tokens {by_id[token_id]!r} and {content!r} both have id {token_id}",
                where=where,
                fix=_DOWNLOAD,
            )
        if content in by_content:
            raise TokenizerError(
                f"the added token {content!r} has two ids, {by_content[content]} and {token_id}",
                where=where,
                fix=_DOWNLOAD,
            )
        by_id[token_id], by_content[content] = content, token_id
    return tokens


def _id_strings(parser: tokenizers.Tokenizer, vocab_size: int, where: str) -> dict[int, str]:
    vocabulary: dict[str, int] = parser.get_vocab(with_added_tokens=True)
    strings: dict[int, str] = {}
    for string, token_id in vocabulary.items():
        if token_id >= vocab_size:
            raise TokenizerError(
                f"token {string!r} has id {token_id:,}",
                where=where,
                expected=f"ids below config.json's vocab_size {vocab_size:,}",
                fix="config.json and tokenizer.json must come from the same checkpoint",
            )
        if token_id in strings:
            pair = sorted((strings[token_id], string))
            raise TokenizerError(f"the tokens {pair} both have id {token_id}", where=where, fix=_DOWNLOAD)
        strings[token_id] = string
    if not strings:
        raise TokenizerError("the vocabulary is empty", where=where, fix=_DOWNLOAD)
    return strings


def _check_added(parser: tokenizers.Tokenizer, added: list[dict[str, Any]], where: str) -> None:
    """The library renumbers added tokens that do not continue the vocabulary; ids in the file are the model's."""
    for token in added:
        got = parser.token_to_id(token["content"])
        if got != token["id"]:
            raise TokenizerError(
                f"the added token {token['content']!r} should have id {token['id']} and would get {got}",
                where=where,
                expected="added tokens that continue the vocabulary without a gap and do not reuse its ids",
                fix=_DOWNLOAD,
            )


def _node_types(node: object) -> set[str]:
    """All `type` values in a component tree of tokenizer.json."""
    if isinstance(node, dict):
        own = {node["type"]} if isinstance(node.get("type"), str) else set()
        return own.union(*(_node_types(value) for value in node.values()))
    if isinstance(node, list):
        return set().union(*(_node_types(value) for value in node))
    return set()


def _expresses_all_text(data: Mapping[str, Any], parser: tokenizers.Tokenizer) -> bool:
    """True when no character can be lost: all 256 bytes are in the vocabulary and the parser works on bytes."""
    model = data["model"]
    in_bytes = _node_types([data.get("pre_tokenizer"), data.get("normalizer")])
    if "ByteLevel" in in_bytes:
        return all(parser.token_to_id(char) is not None for char in byte_alphabet())
    if isinstance(model, dict) and model.get("byte_fallback"):
        return all(parser.token_to_id(f"<0x{byte:02X}>") is not None for byte in range(256))
    return False


def _unknown_id(data: Mapping[str, Any], parser: tokenizers.Tokenizer) -> int | None:
    model = data["model"]
    if isinstance(model.get("unk_id"), int):  # Unigram
        return int(model["unk_id"])
    token = model.get("unk_token")
    found: int | None = None if token is None else parser.token_to_id(token)
    return found


def _notes(data: Mapping[str, Any], holes: int) -> list[str]:
    notes = []
    if data.get("truncation") is not None:
        notes.append("tokenizer.json asks to truncate prompts; m31 does not, and refuses too long ones instead")
    if data.get("padding") is not None:
        notes.append("tokenizer.json asks to pad prompts; m31 does not")
    if holes:
        notes.append(f"{holes:,} ids below vocab_size have no token; they decode to nothing")
    return notes


def _refuse_surrogates(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as exc:
        raise TokenizerError(
            f"the text has a lone surrogate, U+{ord(text[exc.start]):04X}, at character {exc.start}",
            expected="Unicode text that UTF-8 can write",
            fix="decode the input with errors='replace', or remove the character",
        ) from None
