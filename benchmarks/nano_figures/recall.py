"""Recall of what was defined far back: documents of `m31.training.recall` that no training has seen.

A question's answer is counted as recalled if every one of its tokens is the most probable one, given those before it.
The same question without the line of the definition shows what guessing gives. Filler lines are of the test split.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from m31.training.recall import Probe, RecallWriter

from .job import Job
from .served import by_layer, load, watched
from .stats import ratio, wilson
from .store import Progress

DISTANCES = {500: 24, 1000: 24, 2000: 24, 3000: 60, 3500: 24}
"""Tokens between definition and question -> questions."""
WITHOUT = (500, 3000)  # distances at which the definition is also left out
_QUICK = 2  # questions per distance


@dataclass(frozen=True)
class Answer:
    """One question answered: every token right; those right; the answer's log-probability in nats; its tokens."""

    right: bool
    hits: int
    nats: float
    tokens: int


def answer(model: Any, ids: tuple[int, ...], start: int) -> Answer:
    """Judge the tokens ids[start:], the answer, one after another, each given all before it.

    Args:
        model: anything with `logits(ids) -> [T, V]`.
        ids: a document that ends with its answer.
        start: where the answer begins, 1 or later.
    """
    logits: Tensor = model.logits(list(ids[:-1]))[start - 1 :].double()
    wanted = torch.tensor(ids[start:])
    hits = int((logits.argmax(-1) == wanted).sum())
    chosen = torch.log_softmax(logits, -1).gather(1, wanted[:, None])
    return Answer(hits == len(wanted), hits, float(chosen.sum()), len(wanted))


def block_kept(blocks: list[Tensor], probe: Probe, block: int) -> Tensor:
    """bool [layers, heads]: whether the query that predicts the answer's first token may read the block in which the
    value stands in the definition."""
    rows = torch.stack([layer[probe.fact.answer - 1] for layer in blocks])
    return (rows == probe.fact.source // block).any(-1)


def recall(job: Job) -> dict[str, Any]:
    """By distance: with and without the definition, and how often its block was among those that were read."""
    sizes = dict.fromkeys(DISTANCES, _QUICK) if job.quick else DISTANCES
    return {str(distance): _figures(job, distance, count) for distance, count in sizes.items()}


def _figures(job: Job, distance: int, count: int) -> dict[str, Any]:
    def compute() -> dict[str, Any]:
        wanted = {entry.path for entry in job.entries()}
        lines = (document.text for document in job.texts.split("test") if document.path in wanted)
        writer = RecallWriter(job.cache.tokenizer, lines, seed=job.seed)
        rows: dict[str, list[list[float]]] = {"with": [], "without": []}
        kept = []
        with watched() as seen, Progress(f"recall at {distance:,}", count) as progress:
            model = load(job.checkpoint, job.served)
            for number in range(count):
                probe = writer.probe(number, distance=distance)
                seen.clear()
                rows["with"].append(_row(answer(model, probe.ids, probe.fact.answer)))
                kept.append(block_kept(by_layer(seen, job.layers), probe, job.sparse.block_size).double().numpy())
                if distance in WITHOUT:
                    rows["without"].append(_row(answer(model, probe.ids_without, probe.answer_without)))
                progress.add(1)
        return {**rows, "kept": np.stack(kept).tolist()}

    key = job.key(job.checkpoint, setting=job.served.key(), distance=distance, count=count)
    return summary(job.store.get(f"recall-{distance}", key, compute), job.seed)


def _row(found: Answer) -> list[float]:
    return [float(found.right), found.hits, found.nats, found.tokens]


def summary(found: dict[str, Any], seed: int) -> dict[str, Any]:
    """Figures of rows (right, right tokens, nats, tokens) with and without, and kept blocks [n, layers, heads]."""
    kept = np.array(found["kept"])
    out: dict[str, Any] = {
        "block_kept": ratio(kept.mean((1, 2)), np.ones(len(kept)), of="questions", seed=seed),
        "block_kept_by_layer": kept.mean((0, 2)).tolist(),
        "block_kept_somewhere": wilson(int((kept.max((1, 2)) > 0).sum()), len(kept), of="questions"),
    }
    for kind in ("with", "without"):
        if found[kind]:
            right, hits, nats, tokens = np.array(found[kind]).T
            out[kind] = {
                "right": wilson(int(right.sum()), len(right), of="questions"),
                "tokens_right": ratio(hits, tokens, of="questions", seed=seed),
                "nats_per_token": ratio(-nats, tokens, of="questions", seed=seed),
            }
    return out
