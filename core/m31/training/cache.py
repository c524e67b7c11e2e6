"""The corpus as token ids on the disk: encoded once, then mapped into memory.

    tokens-KEY/ids.npy       uint16 [tokens], documents in the corpus' order, each with BOS before and EOS behind it
    tokens-KEY/index.json    where each document begins, its path, split and size, and the hash of ids.npy

KEY is a hash of the corpus' digest, the tokenizer's bytes and the format's version, so a cache never goes stale:
another text or tokenizer has another folder. It appears in one step, whole or not at all.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from m31.checkpoint.workfolder import file_hash, sync_folder, write_file
from m31.errors import CorpusError
from m31.text import demo
from m31.text.tokenizer import Tokenizer
from m31.training import bpe
from m31.training.corpus import SPLITS, Corpus, Split

_VERSION = 1  # raise it when the same text and tokenizer would give other files
_IDS, _INDEX = "ids.npy", "index.json"

Ids = npt.NDArray[np.uint16]


@dataclass(frozen=True)
class Entry:
    """One document: ids[start:stop] are BOS, its text, EOS; `size` are the bytes of its text."""

    path: str
    split: Split
    start: int
    stop: int
    size: int


@dataclass(frozen=True)
class TokenCache:
    """An open cache. Open one with `open_cache`.

    Attributes:
        key: identifies text and tokenizer.
        ids: uint16 [tokens], mapped read-only.
        documents: in the corpus' order.
        tokenizer: that made it.
        bos, eos: the ids around every document.
    """

    key: str
    ids: Ids
    documents: tuple[Entry, ...]
    tokenizer: Tokenizer
    bos: int
    eos: int

    def split(self, split: Split) -> tuple[Entry, ...]:
        """The documents of one split."""
        return tuple(entry for entry in self.documents if entry.split == split)

    def describe(self) -> dict[str, dict[str, int]]:
        """Split -> {"files", "bytes", "tokens"}; BOS and EOS of each file are not among the tokens."""
        return {
            split: {
                "files": len(members),
                "bytes": sum(entry.size for entry in members),
                "tokens": sum(entry.stop - entry.start - 2 for entry in members),
            }
            for split in SPLITS
            for members in [self.split(split)]
        }


def open_cache(folder: Path, corpus: Corpus, files: dict[str, bytes]) -> TokenCache:
    """Open the cache of a corpus below `folder`; make it if it is not there.

    Args:
        folder: for caches; made if needed.
        corpus: the text.
        files: of the tokenizer (`bpe.build`).

    Raises:
        CorpusError: the folder cannot be written, or the cache there is damaged.
        TokenizerError: the tokenizer's file is not usable.
    """
    tokenizer = bpe.open_files(files)
    bos, eos = tokenizer.special_id(demo.BOS), tokenizer.special_id(demo.EOS)
    parts = json.dumps([_VERSION, corpus.digest, hashlib.sha256(files["tokenizer.json"]).hexdigest()])
    key = hashlib.blake2b(parts.encode(), digest_size=16).hexdigest()
    path = folder / f"tokens-{key}"
    if not path.is_dir():
        try:
            _make(path, corpus, tokenizer, (bos, eos))
        except OSError as exc:
            raise CorpusError(
                f"the token cache cannot be written ({exc.strerror})", where=str(path), fix="choose another folder"
            ) from exc
    index, ids = _read(path)
    bounds = index["bounds"]
    documents = tuple(
        Entry(name, split, start, stop, size)
        for (name, split, size), start, stop in zip(index["documents"], bounds[:-1], bounds[1:], strict=True)
    )
    return TokenCache(key, ids, documents, tokenizer, bos, eos)


def _make(path: Path, corpus: Corpus, tokenizer: Tokenizer, ends: tuple[int, int]) -> None:
    if tokenizer.vocab_size > 2**16:
        raise CorpusError(
            f"a vocabulary of {tokenizer.vocab_size:,}", where="tokenizer.json", expected="ids that 16 bits can hold"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    bos, eos = ends
    pieces, bounds, documents = [], [0], []
    for document in corpus.documents:
        ids = [bos, *tokenizer.encode(document.text, special=False), eos]
        pieces.append(np.array(ids, dtype=np.uint16))
        bounds.append(bounds[-1] + len(ids))
        documents.append((document.path, document.split, document.size))
    draft = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        with (draft / _IDS).open("wb") as handle:
            np.save(handle, np.concatenate(pieces), allow_pickle=False)
            handle.flush()
            os.fsync(handle.fileno())
        index = {"hash": file_hash(draft / _IDS), "bounds": bounds, "documents": documents}
        write_file(draft / _INDEX, json.dumps(index).encode())
        sync_folder(draft)
        draft.chmod(0o755)  # mkdtemp's folders are private; this one may be shared
        try:
            draft.rename(path)
        except OSError:
            if not path.is_dir():  # otherwise another process finished the same bytes first
                raise
        sync_folder(path.parent)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _read(path: Path) -> tuple[dict[str, Any], Ids]:
    try:
        index: dict[str, Any] = json.loads((path / _INDEX).read_bytes())
        whole = file_hash(path / _IDS) == index["hash"]
        ids = cast(Ids, np.load(path / _IDS, mmap_mode="r", allow_pickle=False))
    except (OSError, ValueError, KeyError, TypeError) as exc:
        raise _damaged(path, str(exc)) from exc
    if not whole or ids.dtype != np.uint16 or ids.shape != (index["bounds"][-1],):
        raise _damaged(path, "its content is not what was written")
    return index, ids


def _damaged(path: Path, detail: str) -> CorpusError:
    return CorpusError(
        f"the token cache is damaged ({detail})",
        where=str(path),
        expected="a cache as m31 writes it",
        fix="delete that folder; it is made again",
    )
