"""The bundled model's own tokenizer: 4,096 tokens, byte-level BPE, trained on the train split of the corpus.

Text is cut before merging: a line end together with the indentation behind it is one piece, so that depth costs one
token; so is a word with the space, dot, underscore or bracket before it; every digit stands alone, so that a number is
spelled the same way wherever it occurs. No piece reaches across the start of a line end: the tokens of a text are those
of its lines, one after another (`m31.training.recall` is built on that).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping

import tokenizers
from tokenizers import models, pre_tokenizers, trainers

from m31.errors import CorpusError
from m31.text import demo
from m31.text.tokenizer import Tokenizer
from m31.training.corpus import Corpus

VOCAB_SIZE = 4096
IDENTITY = "A small model that was trained on the sources of the Python standard library, bundled with m31."
# MODEL.md §7.1 gives the noise token of the draft head an id and no string; this vocabulary has no unnamed ids.
NOISE = "]<]noise[>["
ADDED_STRINGS: tuple[tuple[str, bool], ...] = (*demo.ADDED_STRINGS, (NOISE, True))

_PIECES = "|".join(
    (
        r"[ \t]*(?:\r?\n[ \t]*)+",  # line ends, with the blanks around them
        r"[^\r\n\p{L}\p{N}]?\p{L}+",  # a word, with one sign before it
        r"\p{N}",
        r" ?[^\s\p{L}\p{N}]+",  # other signs
        r"\s+(?!\S)",  # blanks before a word, without the last, which belongs to the word
        r"\s+",
    )
)


def special_ids() -> dict[str, int]:
    """String -> id of the added tokens: those of MODEL.md §7.1, then `NOISE`. `demo.BOS` and `demo.EOS` are two."""
    return {string: token_id for token_id, (string, _) in enumerate(ADDED_STRINGS)}


def train(texts: Iterable[str], *, vocab_size: int = VOCAB_SIZE) -> list[tuple[str, str]]:
    """Merges, in the byte alphabet, that fill a vocabulary: the most frequent pair first.

    Args:
        texts: what to count in. Their order does not matter.
        vocab_size: added tokens and the 256 bytes included.

    Raises:
        CorpusError: `vocab_size` is too small, or the texts too short to fill it.
    """
    room = vocab_size - len(ADDED_STRINGS)
    if room < 256:
        raise CorpusError(
            f"a vocabulary of {vocab_size} is too small", where="vocab_size", expected=f"{len(ADDED_STRINGS) + 256}"
        )
    parser = tokenizers.Tokenizer(models.BPE())
    parser.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(_PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=room,
        min_frequency=2,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    parser.train_from_iterator(iter(texts), trainer)
    found = parser.get_vocab_size()
    if found < room:
        raise CorpusError(
            f"the texts give {found + len(ADDED_STRINGS):,} tokens",
            where="texts",
            expected=f"enough text for {vocab_size:,}",
            fix="give more text or a smaller vocab_size",
        )
    return [tuple(pair) for pair in json.loads(parser.to_str())["model"]["merges"]]


def tokenizer_files(merges: Iterable[tuple[str, str]], *, identity: str = IDENTITY) -> dict[str, bytes]:
    """tokenizer.json, tokenizer_config.json and chat_template.jinja: file name -> content.

    Args:
        merges: from `train`.
        identity: what the chat template's system section says (`demo.chat_template`).
    """
    pieces = {
        "type": "Sequence",
        "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": _PIECES}, "behavior": "Isolated", "invert": False},
            {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        ],
    }
    # Without indentation: merges and vocabulary are 8,000 entries, and the file is part of the package.
    content = json.dumps(
        demo.tokenizer_json(ADDED_STRINGS, list(merges), pieces), ensure_ascii=False, separators=(",", ":")
    )
    return {
        "tokenizer.json": (content + "\n").encode("utf-8"),
        "tokenizer_config.json": demo.tokenizer_config(),
        "chat_template.jinja": demo.chat_template(identity),
    }


def build(corpus: Corpus, *, vocab_size: int = VOCAB_SIZE) -> dict[str, bytes]:
    """The files of the tokenizer of a corpus: `train` on its train split, `tokenizer_files`."""
    return tokenizer_files(train((document.text for document in corpus.split("train")), vocab_size=vocab_size))


def open_files(files: Mapping[str, bytes]) -> Tokenizer:
    """The tokenizer of `tokenizer_files`, without a folder."""
    data = json.loads(files["tokenizer.json"])
    ids = special_ids()
    size = 1 + max(data["model"]["vocab"].values())
    needed = {"bos_token_id": ids[demo.BOS], "eos_token_id": ids[demo.EOS]}
    return Tokenizer(data, where="tokenizer.json", vocab_size=size, needed=needed)


def bytes_per_token(tokenizer: Tokenizer, texts: Iterable[str]) -> float:
    """UTF-8 bytes per token over all texts together, end-of-text tokens not counted."""
    size = count = 0
    for text in texts:
        size += len(text.encode("utf-8"))
        count += len(tokenizer.encode(text, special=False))
    return size / count
