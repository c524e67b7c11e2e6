"""Block scores, block selection and paged attention in float32.

A step is a list of sequences; each is taken in tiles of consecutive queries, small enough that a tile's intermediate
arrays stay below a fixed size however long the context is. A page that no visible token lies on is never used, and
tokens that a query may not see count for nothing, whatever their memory holds (NaN included).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from m31.ops import Attrs
from m31_numpy.codes import Array

_TILE = 1 << 22  # elements of the largest intermediate array of a tile: 16 MB


def tiles(cu_q: Array, positions: Array, per_query: int, per_token: int) -> Iterator[tuple[int, slice, int]]:
    """(sequence, its query rows, tokens visible to the last of them).

    Args:
        per_query, per_token: elements that the caller makes per query, and per query and visible token.
    """
    for s in range(len(cu_q) - 1):
        row, end = int(cu_q[s]), int(cu_q[s + 1])
        if row == end:
            continue
        context = int(positions[end - 1]) + 1
        step = max(1, _TILE // max(1, per_query + per_token * context))
        for lo in range(row, end, step):
            hi = min(end, lo + step)
            yield s, slice(lo, hi), int(positions[hi - 1]) + 1


def block_scores(attrs: Attrs, outs: Sequence[Any], ins: Sequence[Any], w: Any) -> None:
    """The best product with a visible key of each block; NaN counts as -inf."""
    q, pages, positions, cu_q, _, table = ins
    outs[0][...] = -np.inf
    for s, rows, context in tiles(cu_q, positions, 0, q.shape[1]):
        blocks = -(-context // pages.page_tokens)
        keys = pages.take(attrs["layer"], "index", table[s, :blocks])  # [blocks, page, D]
        written = q[rows] @ keys.reshape(-1, keys.shape[-1])[:context].T  # [n, heads, tokens]
        score = np.full((*written.shape[:2], blocks * pages.page_tokens), -np.inf, np.float32)
        hidden = np.arange(context) > positions[rows, None]
        score[..., :context] = np.where(np.isnan(written) | hidden[:, None], -np.inf, written)
        outs[0][rows, :, :blocks] = score.reshape(*score.shape[:2], blocks, -1).max(-1)


def block_select(attrs: Attrs, outs: Sequence[Any], ins: Sequence[Any], w: Any) -> None:
    """Forced blocks first, then by score; ascending ids, -1 at the tail."""
    scores, positions = ins
    own = (positions // attrs["block"])[:, None, None]
    ids = np.arange(scores.shape[-1])
    forced = (ids > own - attrs["local_blocks"]) | (ids < attrs["init_blocks"])
    score = np.where(ids > own, -np.inf, np.where(forced, np.inf, scores))
    # Stable: of equal scores the lower id comes first.
    best = np.argsort(-score, axis=-1, kind="stable")[..., : attrs["topk"]]
    real = np.take_along_axis(score, best, axis=-1) > -np.inf
    chosen = np.sort(np.where(real, best, len(ids)), axis=-1)  # those that are not there sort to the tail
    outs[0][...] = -1
    outs[0][..., : chosen.shape[-1]] = np.where(chosen < len(ids), chosen, -1)


def sparse_attention(attrs: Attrs, outs: Sequence[Any], ins: Sequence[Any], w: Any) -> None:
    """Each query gathers the blocks that each KV head selected for it."""
    q, pages, blocks, positions, cu_q, _, table = ins
    layer, heads, page = attrs["layer"], attrs["kv_heads"], pages.page_tokens
    head = np.arange(heads)[:, None]
    gathered = blocks.shape[1] * blocks.shape[2] * page * q.shape[2]  # keys of one query, all heads
    for s, rows, _ in tiles(cu_q, positions, gathered, 0):
        chosen = blocks[rows]  # [n, heads, K]; -1 is no block
        token = np.maximum(chosen, 0)[..., None] * page + np.arange(page)
        visible = (chosen[..., None] >= 0) & (token <= positions[rows, None, None, None])
        where = table[s, np.maximum(chosen, 0)]
        k, v = (pages.take(layer, part, where, head).reshape(*chosen.shape[:2], -1, q.shape[2]) for part in "kv")
        o = _attend(_grouped(q[rows], heads), k, v, visible.reshape(*chosen.shape[:2], -1), attrs["scale"])
        outs[0][rows] = o.reshape(len(o), -1)


def dense_attention(attrs: Attrs, outs: Sequence[Any], ins: Sequence[Any], w: Any) -> None:
    """All tokens up to the query."""
    q, pages, positions, cu_q, _, table = ins
    layer, heads = attrs["layer"], attrs["kv_heads"]
    for s, rows, context in tiles(cu_q, positions, 0, q.shape[1]):
        where = table[s, : -(-context // pages.page_tokens)]
        k, v = (_by_head(pages.take(layer, part, where)) for part in "kv")  # [heads, tokens, D]
        visible = np.arange(k.shape[1]) <= positions[rows, None, None]
        o = _attend(_grouped(q[rows], heads), k, v, visible, attrs["scale"])
        outs[0][rows] = o.reshape(len(o), -1)


def _grouped(q: Array, kv_heads: int) -> Array:
    """[n, heads, D] to [n, kv_heads, heads of that KV head, D]."""
    return q.reshape(len(q), kv_heads, -1, q.shape[-1])


def _by_head(pages: Array) -> Array:
    """[pages, page, heads, D] to [heads, tokens, D]."""
    return pages.reshape(-1, *pages.shape[2:]).swapaxes(0, 1)


def _attend(q: Array, k: Array, v: Array, visible: Array, scale: float) -> Array:
    """softmax(q k^T * scale) v, per KV head.

    Args:
        q: [n, heads, group, D].
        k, v: [heads, tokens, D], or [n, heads, tokens, D] where every query has its own.
        visible: [n, heads or 1, tokens].
    """
    # What no query of the tile sees may hold anything, and a weight of zero does not hide a NaN.
    seen: Array = np.asarray(visible if v.ndim == 4 else visible.any(0))[..., None]
    logits = q @ np.where(seen, k, np.float32(0)).swapaxes(-1, -2) * np.float32(scale)
    logits = np.where(visible[:, :, None], logits, -np.inf)
    p = np.exp(logits - logits.max(-1, keepdims=True))
    o: Array = p @ np.where(seen, v, np.float32(0)) / p.sum(-1, keepdims=True)
    return o


ATTENTION = {
    "block_scores": block_scores,
    "block_select": block_select,
    "sparse_attention": sparse_attention,
    "dense_attention": dense_attention,
}
