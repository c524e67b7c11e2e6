"""The text that the bundled model is trained on: the sources of Python's standard library, as installed.

Every interpreter that can run m31 has them, so nothing has to be downloaded or bundled. They are
Copyright (c) Python Software Foundation and their contributors, under the PSF License Agreement (LICENSE.txt beside
the library); m31 distributes none of them. Releases of Python differ: `Corpus.digest` tells which text was used.

Left out: tests, installed packages, files that are not UTF-8, what depends on the machine that built the interpreter,
and tables that a program wrote. The code pages in `encodings` are alike from file to file, so that some of them in the
test split would say nothing about unseen text; `pydoc_data` is one file of reference manual.
"""

from __future__ import annotations

import hashlib
import os
import platform
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from m31.errors import CorpusError

Split = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = get_args(Split)

MIN_BYTES = 4_000_000  # the libraries of 3.11 to 3.13 have twice as much; less is not an ordinary installation
MIN_SPLIT_BYTES = 50_000

_FOLDERS = frozenset(("test", "tests", "idle_test", "__pycache__", "site-packages", "dist-packages", "lib-dynload"))
_TABLES = frozenset(("encodings", "pydoc_data"))
_TABLE_FILES = frozenset(("stringprep.py", "html/entities.py"))
_OF_THE_BUILD = ("config-", "_sysconfigdata")  # prefixes, at the top
_OF_THE_SITE = frozenset(("sitecustomize.py", "usercustomize.py"))

# Splits are drawn per file from the hash of its path alone, so a file stays where it is in every release of Python.
# Files differ much in size: the number in the key was chosen, before anything was trained, so that validation and test
# have 3 % of the bytes each in 3.11, 3.12 and 3.13, and none of their files more than 30 % of its split.
_KEY = b"m31 nano: split 150"
_BOUNDS: tuple[tuple[float, Split], ...] = ((0.94, "train"), (0.97, "validation"), (1.0, "test"))


@dataclass(frozen=True)
class Document:
    """One source file.

    Attributes:
        path: relative to the library, with forward slashes.
        split: which split it belongs to.
        text: its content. Line ends are as stored, so that `size` is exact.
        size: bytes of the file.
    """

    path: str
    split: Split
    text: str
    size: int


@dataclass(frozen=True)
class Corpus:
    """All documents, in the order of their paths.

    Attributes:
        documents: sorted by the UTF-8 bytes of `path`.
        digest: 32 hexadecimal digits; depends on the paths and bytes of the documents and on nothing else.
        python: implementation and release whose library it is, for logs.
        skipped: paths of files that are not UTF-8.
    """

    documents: tuple[Document, ...]
    digest: str
    python: str
    skipped: tuple[str, ...]

    def split(self, split: Split) -> tuple[Document, ...]:
        """The documents of one split."""
        return tuple(document for document in self.documents if document.split == split)

    def describe(self) -> dict[str, dict[str, int]]:
        """Split -> {"files": ..., "bytes": ...}."""
        return {
            split: {"files": len(members), "bytes": sum(document.size for document in members)}
            for split in SPLITS
            for members in [self.split(split)]
        }


def split_of(path: str) -> Split:
    """The split of a file, from its relative path alone: 94 % train, 3 % validation, 3 % test in expectation."""
    word = hashlib.blake2b(_bytes_of(path), key=_KEY, digest_size=8).digest()
    place = int.from_bytes(word, "big") / 2.0**64
    return next((split for bound, split in _BOUNDS if place < bound), "test")


def load(root: Path | None = None, *, min_bytes: int = MIN_BYTES, min_split_bytes: int = MIN_SPLIT_BYTES) -> Corpus:
    """Read the corpus.

    Args:
        root: the folder of the library; None: that of the running interpreter.
        min_bytes: the least text to accept, all splits together.
        min_split_bytes: the least text to accept in each split.

    Raises:
        CorpusError: there is no such folder (an embedded or zipped interpreter), a file cannot be read, or the text is
            smaller than asked.
    """
    folder = Path(sysconfig.get_path("stdlib")) if root is None else root
    if not folder.is_dir():
        raise CorpusError(
            "the Python standard library is not a folder of files here",
            where=str(folder),
            expected="an interpreter that was installed with the library's sources, not zipped or embedded",
            fix="train with another Python, or give the path of an unpacked library",
        )
    documents: list[Document] = []
    skipped: list[str] = []
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(_paths(folder), key=_bytes_of):
        data = _read(folder / path)
        try:
            text = data.decode("utf-8")
        except UnicodeDecodeError:
            skipped.append(path)
            continue
        if not text:
            continue
        for part in (_bytes_of(path), data):
            digest.update(len(part).to_bytes(8, "big"))
            digest.update(part)
        documents.append(Document(path, split_of(path), text, len(data)))
    release = f"{platform.python_implementation()} {platform.python_version()}" if root is None else str(root)
    corpus = Corpus(tuple(documents), digest.hexdigest(), release, tuple(skipped))
    _refuse_small(corpus, folder, min_bytes, min_split_bytes)
    return corpus


def _bytes_of(path: str) -> bytes:
    """A path for sorting and hashing, whatever the locale's encoding of file names is."""
    return path.encode("utf-8", "surrogateescape")


def _paths(folder: Path) -> Iterator[str]:
    """Relative paths of the sources that belong to the corpus, in no particular order."""

    def refuse(exc: OSError) -> None:
        raise CorpusError(f"cannot be listed ({exc.strerror})", where=str(exc.filename), fix="check its rights")

    for here, folders, names in os.walk(folder, onerror=refuse):
        base = Path(here).relative_to(folder)
        top = base == Path()
        folders[:] = [
            name
            for name in folders
            if name not in _FOLDERS and not (top and (name in _TABLES or name.startswith(_OF_THE_BUILD)))
        ]
        for name in names:
            path = (base / name).as_posix()
            local = top and (name.startswith(_OF_THE_BUILD) or name in _OF_THE_SITE)
            if name.endswith(".py") and not local and path not in _TABLE_FILES:
                yield path


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as exc:
        raise CorpusError(f"cannot be read ({exc.strerror})", where=str(path), fix="check the file's rights") from exc


def _refuse_small(corpus: Corpus, folder: Path, min_bytes: int, min_split_bytes: int) -> None:
    counts = {split: numbers["bytes"] for split, numbers in corpus.describe().items()}
    total = sum(counts.values())
    if total < min_bytes:
        raise CorpusError(
            f"the Python sources there have {total:,} bytes",
            where=str(folder),
            expected=f"at least {min_bytes:,}",
            fix="use a Python that was installed with its library's sources",
        )
    for split, size in counts.items():
        if size < min_split_bytes:
            raise CorpusError(
                f"the {split} split has {size:,} bytes", where=str(folder), expected=f"at least {min_split_bytes:,}"
            )
