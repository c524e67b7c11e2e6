"""What the formats of the pages and the choice of blocks cost.

K and V in NVFP4 or FP8 against BF16, on all of the test split. Index keys in NVFP4, int8 and FP8 against BF16, and
reading the chosen blocks against reading all, where they differ: queries that see more blocks than they may read.
Block recall is end to end: below the first layer, other index keys also mean other inputs.
"""

from __future__ import annotations

from collections import defaultdict
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from m31.config import SparseAttention

from .job import Job
from .served import by_layer, load, nats, reading_everything, watched
from .stats import Figure, ratio
from .store import Progress
from .text import held_out, score

_INDEX = ("nvfp4", "int8", "fp8")
_BASE = "bfloat16"


def kv_formats(job: Job) -> dict[str, Any]:
    """Loss per token by format of K and V, and the relative difference from BF16; index keys as served."""
    tables = {
        kv: score(job, "served" if kv == job.served.kv else f"kv {kv}", job.checkpoint, replace(job.served, kv=kv))
        for kv in (_BASE, "fp8", "nvfp4")
    }
    return _against(tables, "nats", "tokens", job.seed)


def dense(job: Job) -> dict[str, Any]:
    """Loss of the queries that see more blocks than they may read, as served and reading all of them."""
    served = score(job, "served", job.checkpoint, job.served)
    with reading_everything(job.checkpoint, job.length) as folder:
        everything = score(job, "dense", folder, job.served, far_only=True)
    far = {path: i for i, path in enumerate(served["path"])}
    rows = [far[path] for path in everything["path"]]
    sparse = {name: [served[name][i] for i in rows] for name in served}
    return _against({"dense": everything, "sparse": sparse}, "far_nats", "far_tokens", job.seed, base="dense")


def index_formats(job: Job) -> dict[str, Any]:
    """Loss and block recall by format of the index keys, where blocks are chosen at all; K and V as served.

    Recall also in contexts of twice the length of the windows, which training has never seen.
    """
    found, longer = _index(job, job.length), _index(job, 2 * job.length)
    return {
        "loss": _against(found["loss"], "far_nats", "far_tokens", job.seed),
        "recall": _recalls(found["recall"] + longer["recall"], job.seed),
    }


def _against(
    tables: dict[str, dict[str, list[Any]]], nats_: str, tokens: str, seed: int, *, base: str = _BASE
) -> dict[str, Any]:
    """Per table the loss, and for all but the base the relative difference from it."""
    out: dict[str, Any] = {"tokens": int(sum(tables[base][tokens]))}
    for name, table in tables.items():
        row: dict[str, Figure] = {"loss": ratio(table[nats_], table[tokens], of="files", seed=seed)}
        if name != base:
            row[f"over_{base}"] = ratio(table[nats_], tables[base][nats_], of="files", seed=seed, less=1.0)
        out[name] = row
    return out


def _index(job: Job, length: int) -> dict[str, Any]:
    """One pass over the long windows with every format in turn.

    Returns:
        loss: format -> columns as of `text.score`, far ones only. recall: rows of format, layer, span of positions,
        file, blocks kept of how many, and how many of them chance would keep.
    """

    def compute() -> dict[str, Any]:
        loss: dict[str, dict[str, list[float]]] = {name: defaultdict(lambda: [0.0, 0.0]) for name in (_BASE, *_INDEX)}
        recall: dict[tuple[Any, ...], list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
        with ExitStack() as stack:
            seen = stack.enter_context(watched())
            models = {name: load(job.checkpoint, replace(job.served, index=name)) for name in (_BASE, *_INDEX)}
            layers = job.layers
            first = job.sparse_from if length == job.length else job.length
            chosen = held_out(job, length, longer_than=first)
            total = sum(len(window.tokens) for window in chosen) * len(models)
            progress = stack.enter_context(Progress(f"index keys at {length:,}", total))
            for window in chosen:
                base: list[Tensor] = []
                for name, model in models.items():
                    seen.clear()
                    losses = nats(model, window.tokens, window.targets)
                    sums = loss[name][window.path]
                    sums[0] += float(losses[first:].sum())
                    sums[1] += float((window.targets[first:] >= 0).sum())
                    blocks = by_layer(seen, layers)
                    base = base or blocks
                    for layer, (want, got) in enumerate(zip(base, blocks, strict=True)):
                        if name != _BASE:
                            for span, counts in kept_blocks(want, got, job.sparse, first).items():
                                row = recall[name, layer, *span, window.path]
                                row[:] = [a + b for a, b in zip(row, counts, strict=True)]
                    progress.add(len(window.tokens))
        return {
            "loss": {
                name: {
                    "path": list(files),
                    "far_nats": [sums[0] for sums in files.values()],
                    "far_tokens": [sums[1] for sums in files.values()],
                }
                for name, files in loss.items()
            },
            "recall": [[*key, *counts] for key, counts in recall.items()],
        }

    key = job.key(job.checkpoint, setting=job.served.key(), length=length, overlap=job.overlap)
    found: dict[str, Any] = job.store.get(f"index-{length}", key, compute)
    return found


def kept_blocks(
    want: Tensor, got: Tensor, sparse: SparseAttention, first: int
) -> dict[tuple[int, int], tuple[float, float, float]]:
    """How many of the freely chosen blocks two choices share, by span of positions.

    Args:
        want, got: block ids [T, heads, topk], -1 for none, of one sequence from position 0.
        sparse: the rule; forced blocks do not count.
        first: positions from here on count.
    Returns:
        (first, end) of spans that double -> blocks of `want` in `got`, blocks of `want`, and the expected number in a
        random choice of as many.
    """
    tokens = len(want)
    count = -(-tokens // sparse.block_size)
    own = torch.arange(tokens)[:, None, None] // sparse.block_size
    ids = torch.arange(count)
    free = (ids <= own - sparse.local_blocks) & (ids >= sparse.init_blocks)
    a, b = (_as_mask(ids_TK, count) & free for ids_TK in (want, got))
    shared, wanted = (a & b).sum((1, 2)).double(), a.sum((1, 2)).double()
    chance = wanted * (a.sum(-1).double() / free.sum(-1).clamp(min=1)).mean(-1)
    out = {}
    low = first
    while low < tokens:
        span = slice(low, min(tokens, 2 * low))
        out[low, 2 * low] = (float(shared[span].sum()), float(wanted[span].sum()), float(chance[span].sum()))
        low *= 2
    return out


def _as_mask(ids: Tensor, count: int) -> Tensor:
    mask = torch.zeros(*ids.shape[:2], count + 1, dtype=torch.bool)
    mask.scatter_(-1, torch.where(ids < 0, count, ids), True)
    return mask[..., :count]


def _recalls(rows: list[list[Any]], seed: int) -> dict[str, Any]:
    """Span -> format -> {"all", "layers", "chance"}."""
    out: dict[str, Any] = {}
    spans = sorted({(low, high) for _, _, low, high, *_ in rows})
    for low, high in spans:
        inside = [row for row in rows if row[2] == low]
        formats: dict[str, Any] = {}
        for name in _INDEX:
            own = [row for row in inside if row[0] == name]
            formats[name] = {
                "all": _share(own, 5, seed),
                "layers": [_share([r for r in own if r[1] == n], 5, seed) for n in sorted({r[1] for r in own})],
                "chance": _share(own, 7, seed)["value"],
            }
        out[f"{low}-{high}"] = formats
    return out


def _share(rows: list[list[Any]], column: int, seed: int) -> Figure:
    """Of the wanted blocks, paired by file."""
    files: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for row in rows:
        files[row[4]][0] += row[column]
        files[row[4]][1] += row[6]
    return ratio([a for a, _ in files.values()], [b for _, b in files.values()], of="files", seed=seed)
