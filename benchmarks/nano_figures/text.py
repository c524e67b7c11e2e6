"""Bits per byte on the test split: the model as served, its twin, a 5-gram model, and general compressors.

Windows of 4,096 tokens, of which the first 1,024 of all but a file's first only serve as context: every token of a file
is scored once. Intervals are bootstraps over files, paired where two models are compared.
"""

from __future__ import annotations

import lzma
import math
import zlib
from collections import defaultdict
from pathlib import Path
from typing import Any

from m31.training.sampler import Window, windows

from .job import Job
from .kneser_ney import KneserNey
from .served import TWIN, Setting, load, nats
from .stats import ratio
from .store import Progress

ORDER = 5


def held_out(job: Job, length: int, *, longer_than: int) -> list[Window]:
    """Windows of up to `length` tokens of the files that are measured on, those of more than `longer_than` tokens."""
    wanted = {entry.path for entry in job.entries()}
    return [
        window
        for window in windows(job.cache, "test", length=length, overlap=job.overlap)
        if window.path in wanted and len(window.tokens) > longer_than
    ]


def score(job: Job, name: str, folder: Path, setting: Setting, *, far_only: bool = False) -> dict[str, list[Any]]:
    """Losses per file of a served checkpoint; kept in the store.

    Args:
        name: of the measurement.
        folder, setting: what is served, and how.
        far_only: only windows with queries that cannot read every block; `bytes` then does not cover the files.
    Returns:
        path, bytes, tokens, nats; and, for the queries that cannot read every block, far_tokens and far_nats.
    """

    def compute() -> dict[str, list[Any]]:
        model = load(folder, setting)
        far = job.sparse_from
        sums: dict[str, list[float]] = defaultdict(lambda: [0.0] * 5)
        chosen = held_out(job, job.length, longer_than=far if far_only else 0)
        if not chosen:
            raise ValueError(f"{name}: no window is long enough")
        with Progress(name, sum(len(window.tokens) for window in chosen)) as progress:
            for window in chosen:
                losses = nats(model, window.tokens, window.targets)
                counted = (window.targets >= 0).numpy()
                parts = (window.bytes, counted.sum(), losses.sum(), counted[far:].sum(), losses[far:].sum())
                sums[window.path] = [a + float(b) for a, b in zip(sums[window.path], parts, strict=True)]
                progress.add(len(window.tokens))
        if not far_only:
            _refuse_gaps(job, {path: int(values[0]) for path, values in sums.items()})
        columns = [list(column) for column in zip(*sums.values(), strict=True)]
        return {
            "path": list(sums),
            **dict(zip(("bytes", "tokens", "nats", "far_tokens", "far_nats"), columns, strict=True)),
        }

    windows_ = {"length": job.length, "overlap": job.overlap, "far": job.sparse_from, "far_only": far_only}
    key = job.key(folder, setting=setting.key(), **windows_)
    found: dict[str, list[Any]] = job.store.get(name.replace(" ", "-"), key, compute)
    return found


def _refuse_gaps(job: Job, counted: dict[str, int]) -> None:
    sizes = {entry.path: entry.size for entry in job.entries()}
    if counted != sizes:
        raise ValueError(f"bytes of {sorted(sizes.items() ^ counted.items())[0][0]} are not those of the file")


def bits_per_byte(job: Job) -> dict[str, Any]:
    """The figures; a compressor sees all files as one stream, so that it has no interval."""
    served = score(job, "served", job.checkpoint, job.served)
    scale = [size * math.log(2) for size in served["bytes"]]
    figures: dict[str, Any] = {
        "files": len(served["path"]),
        "bytes": int(sum(served["bytes"])),
        "tokens": int(sum(served["tokens"])),
        "model": ratio(served["nats"], scale, of="files", seed=job.seed),
        "five_gram": ratio(_five_gram(job), served["bytes"], of="files", seed=job.seed),
        **_compressors(job),
    }
    if job.twin is not None:
        twin = score(job, "twin", job.twin, TWIN)
        figures["twin"] = ratio(twin["nats"], scale, of="files", seed=job.seed)
        figures["over_twin"] = ratio(served["nats"], twin["nats"], of="files", seed=job.seed, less=1.0)
    return figures


def _five_gram(job: Job) -> list[float]:
    """Bits per file of a token-level 5-gram model of the train split."""

    def compute() -> list[float]:
        cache = job.cache
        with Progress("5-gram model", 1) as progress:
            model = KneserNey(
                (cache.ids[entry.start : entry.stop] for entry in cache.split("train")),
                order=ORDER,
                vocabulary=cache.tokenizer.vocab_size,
                bos=cache.bos,
            )
            bits = [float(-model.score(cache.ids[e.start : e.stop - 1]).sum()) for e in job.entries()]
            progress.add(1)
        return bits

    found: list[float] = job.store.get("five-gram", job.key(None, order=ORDER), compute)
    return found


def _compressors(job: Job) -> dict[str, float]:
    """Bits per byte of the test text as one stream: alone, and behind the train text."""

    def compute() -> dict[str, float]:
        wanted = {entry.path for entry in job.entries()}
        test = "".join(d.text for d in job.texts.split("test") if d.path in wanted).encode()
        train = "".join(document.text for document in job.texts.split("train")).encode()
        with Progress("xz and gzip", 3) as progress:
            alone = _xz(test)
            progress.add(1)
            before = _xz(train)
            progress.add(1)
            behind = _xz(train + test) - before
            progress.add(1)
        per_byte = 8 / len(test)
        gzip = len(zlib.compress(test, 9, wbits=31))
        return {"xz": alone * per_byte, "xz_after_train": behind * per_byte, "gzip": gzip * per_byte}

    found: dict[str, float] = job.store.get("compressors", job.key(None), compute)
    return found


def _xz(data: bytes) -> int:
    """Bytes of `xz -9e`; its dictionary of 64 MiB holds the whole corpus."""
    return len(lzma.compress(data, preset=9 | lzma.PRESET_EXTREME))
