"""The data of the bundled model: the standard library's sources and recall documents (`m31.training.corpus`)."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

from m31.errors import RequestError
from m31.training import bpe, corpus
from m31.training.cache import TokenCache, open_cache
from m31.training.data import Batch, Data
from m31.training.recall import RecallWriter
from m31.training.sampler import SHARES, Sampler, windows


def provide(
    *, cache: str, seed: int, tokens: int, recall: float, validation_length: int, validation_windows: int
) -> Data:
    """The provider that `nano.toml` names.

    Args:
        cache: folder of the token cache, below the user's home if it begins with `~`; made if needed.
        seed: of the order of the text, and of the recall documents.
        tokens: of a batch, a multiple of 4,096.
        recall: fraction of the tokens that are recall documents.
        validation_length: most tokens of a window of the validation split.
        validation_windows: how many of its windows are used, spread over the split.

    Raises:
        CorpusError: there is no corpus here, or its cache cannot be written.
        RequestError: an argument out of range.
    """
    text = corpus.load()
    files = bpe.build(text)
    return of_corpus(
        text,
        files,
        open_cache(Path(cache).expanduser(), text, files),
        seed=seed,
        tokens=tokens,
        recall=recall,
        validation_length=validation_length,
        validation_windows=validation_windows,
    )


def of_corpus(
    text: corpus.Corpus,
    files: dict[str, bytes],
    cache: TokenCache,
    *,
    seed: int,
    tokens: int,
    recall: float,
    validation_length: int,
    validation_windows: int,
) -> Data:
    """`provide`, for a corpus, its tokenizer's files and its cache that are open already."""
    if validation_windows < 1:
        raise RequestError(f"{validation_windows}", where="validation_windows", expected="at least 1")
    writer = RecallWriter(cache.tokenizer, (document.text for document in text.split("train")), seed=seed)
    sampler = Sampler(cache, seed=seed, tokens=tokens, shares=SHARES, recall=recall, recall_writer=writer)
    held_out = list(windows(cache, "validation", length=validation_length, overlap=validation_length // 4))
    step = max(1, len(held_out) // validation_windows)
    chosen: list[Batch] = [
        (window.tokens[None], window.targets[None]) for window in islice(held_out[::step], validation_windows)
    ]
    generation = {"bos_token_id": cache.bos, "eos_token_id": cache.eos}
    extra = {"generation_config.json": (json.dumps(generation, indent=2) + "\n").encode()}
    identity = f"{sampler.identity}/{validation_length}/{validation_windows}"
    return Data(train=sampler, validation=chosen, identity=identity, files=files | extra)
