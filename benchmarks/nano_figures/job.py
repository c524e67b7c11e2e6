"""What every measurement gets."""

from __future__ import annotations

import functools
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import m31
from m31.checkpoint import Checkpoint
from m31.config import SparseAttention, Text
from m31.training.cache import Entry, TokenCache
from m31.training.corpus import Corpus

from .served import Setting
from .store import Store, folder_digest

HEAD = "dspark"  # folder of the draft head in a checkpoint
_QUICK_FILES = slice(4, None, 10)  # of the test split


@dataclass(frozen=True)
class Job:
    """One run of `benchmarks/nano.py`.

    Attributes:
        checkpoint, twin: folders; the twin may be missing.
        served: how the checkpoint is served.
        texts: the corpus.
        cache: its tokens.
        store: of finished measurements.
        length, overlap: of the windows, in tokens: the longest length of training, and what only serves as context.
        quick: small sizes, to try the pipeline.
        seed: of resampling and sampling.
    """

    checkpoint: Path
    twin: Path | None
    served: Setting
    texts: Corpus
    cache: TokenCache
    store: Store
    length: int
    overlap: int
    quick: bool
    seed: int

    def entries(self) -> tuple[Entry, ...]:
        """The files that are measured on."""
        entries = self.cache.split("test")
        return entries[_QUICK_FILES] if self.quick else entries

    @functools.cached_property
    def _text(self) -> Text:
        return Checkpoint.open(self.checkpoint).config.text

    @property
    def head(self) -> Path | None:
        """Folder of the checkpoint's draft head, if it has one."""
        folder = self.checkpoint / HEAD
        return folder if folder.is_dir() else None

    @property
    def sparse(self) -> SparseAttention:
        """How the checkpoint chooses blocks.

        Raises:
            ValueError: it does not.
        """
        if self._text.sparse is None:
            raise ValueError(f"{self.checkpoint} has no sparse attention")
        return self._text.sparse

    @property
    def layers(self) -> int:
        """Layers that choose blocks."""
        return self._text.attention.count("sparse")

    @property
    def sparse_from(self) -> int:
        """The first position whose query sees more blocks than it may read."""
        return self.sparse.topk_blocks * self.sparse.block_size

    def key(self, folder: Path | None, **more: Any) -> dict[str, Any]:
        """What a measurement depends on: a checkpoint (None: no model), the text, versions, and `more`.

        A draft head is not part of the checkpoint here: it changes nothing that is measured without it.
        """
        return {
            "checkpoint": None if folder is None else folder_digest(folder, without=HEAD),
            "text": self.cache.key,
            "files": [entry.path for entry in self.entries()],
            "seed": self.seed,
            "versions": versions(),
            **more,
        }


def versions() -> dict[str, str]:
    """Of what computes the figures."""
    return {"m31": m31.__version__, "torch": torch.__version__, "python": platform.python_version()}
