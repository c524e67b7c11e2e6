"""The ten prompts of the nano's golden values: files that it was not trained on, and recall documents made of them."""

from __future__ import annotations

from pathlib import Path

from m31.errors import CorpusError
from m31.training import bpe, corpus
from m31.training.cache import TokenCache, open_cache
from m31.training.recall import RecallWriter

TEXT_LENGTHS = (1, 2, 65, 128, 129, 600, 2300, 4000)
"""Around the ends of a page, and beyond the 2,048 tokens after which blocks are left out."""
RECALL_LENGTHS = (1000, 2600)
SEED = 31


def nano_prompts(folder: Path) -> list[tuple[str, list[int]]]:
    """(name, token ids), the shortest first. They are stored with the values, so that checking needs no corpus.

    Args:
        folder: for the token cache.

    Raises:
        CorpusError: there is no corpus here, its cache cannot be written, or it has too few long files.
    """
    text = corpus.load()
    return of_corpus(text, open_cache(folder, text, bpe.build(text)))


def of_corpus(text: corpus.Corpus, cache: TokenCache) -> list[tuple[str, list[int]]]:
    """`nano_prompts`, for a corpus and its cache that are open already."""
    found: list[tuple[str, list[int]]] = []
    unused = list(cache.split("test"))
    for length in sorted(TEXT_LENGTHS, reverse=True):  # the longest first: most files have enough tokens for the others
        entry = next((entry for entry in unused if entry.stop - 1 - entry.start >= length), None)
        if entry is None:
            raise CorpusError(
                f"no unused file of the test split has {length:,} tokens",
                where="test split",
                expected=f"files for prompts of {', '.join(map(str, TEXT_LENGTHS))} tokens",
            )
        unused.remove(entry)
        found.append((f"{length} tokens of {entry.path}", cache.ids[entry.start : entry.start + length].tolist()))
    writer = RecallWriter(cache.tokenizer, (document.text for document in text.split("test")), seed=SEED)
    for index, length in enumerate(RECALL_LENGTHS):
        found.append((f"{length} tokens of recall document {index}", list(writer.document(index, length).ids)))
    return sorted(found, key=lambda prompt: len(prompt[1]))
