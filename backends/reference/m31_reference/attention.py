"""Block scores, block selection and paged attention in plain torch.

Queries of a sequence are taken in tiles of 128 positions. A tile of block-sparse attention reads the union of the
blocks that its queries selected and masks the rest per query, so prefill does not touch blocks that nobody chose.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from m31.graph import RunKernel
from m31.ops import Attrs

Outs = Sequence[Any]
Ins = Sequence[Any]
TILE = 128  # query positions; tiles start at multiples of it, so that a tile's own block is its only partial one
_FEW = 8  # queries of a sequence below which each is attended alone: decode and short verifies


def _spans(cu_q: Tensor, positions: Tensor, tile: int) -> Iterator[tuple[int, int, int, int, int]]:
    """(sequence, first row, end row, first position, last position) of every tile of every sequence."""
    bounds = cu_q.tolist()
    for s, (lo, hi) in enumerate(itertools.pairwise(bounds)):
        if lo == hi:
            continue
        first = int(positions[lo])
        row = lo
        while row < hi:
            end = min(hi, row + tile - (first + row - lo) % tile)
            yield s, row, end, first + row - lo, first + end - 1 - lo
            row = end


def _take(pages: Tensor, ids: list[int]) -> Tensor:
    """Pages `ids` of a page tensor: a view when they are consecutive, else a copy."""
    if ids == list(range(ids[0], ids[0] + len(ids))):
        return pages[ids[0] : ids[0] + len(ids)]
    return pages[torch.tensor(ids, device=pages.device)]


def _block_scores(attrs: Attrs) -> RunKernel:
    layer = attrs["layer"]

    def run(outs: Outs, ins: Ins, w: None, workspace: Tensor | None) -> None:
        q_ThD, cache, positions, cu_q, _, page_table = ins
        scores_ThP = outs[0].fill_(-torch.inf)
        index, page = cache.index[layer], cache.page_tokens
        table = page_table.tolist()
        for s, lo, hi, first, last in _spans(cu_q, positions, TILE):
            blocks = last // page + 1
            keys = _take(index, table[s][:blocks]).reshape(blocks * page, -1).to(q_ThD.dtype)
            q = q_ThD[lo:hi]
            score = (q.reshape(-1, q.shape[-1]) @ keys.t()).view(*q.shape[:2], blocks * page)
            # From the first query's position on, a key may lie after the query, or was never written at all.
            column = torch.arange(first + 1, blocks * page, device=q.device)
            hidden = column > positions[lo:hi, None]
            score[:, :, first + 1 :].masked_fill_(hidden[:, None], -torch.inf)
            best = score.unflatten(2, (blocks, page)).amax(-1)
            if bool(best.isnan().any()):  # NaN counts as -inf
                best = score.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
                best = best.unflatten(2, (blocks, page)).amax(-1)
            scores_ThP[lo:hi, :, :blocks] = best

    return run


def _block_select(attrs: Attrs) -> RunKernel:
    topk, block = attrs["topk"], attrs["block"]
    local, init = attrs["local_blocks"], attrs["init_blocks"]

    def run(outs: Outs, ins: Ins, w: None, workspace: Tensor | None) -> None:
        scores_ThP, positions = ins
        count = scores_ThP.shape[2]
        own = (positions // block)[:, None, None]
        ids = torch.arange(count, device=scores_ThP.device)
        forced = ((ids > own - local) | (ids < init)) & (ids <= own)
        score = scores_ThP.masked_fill(forced, torch.inf)
        if count > topk:
            # A stable sort lets the lower id win a tie; torch.topk leaves that open.
            order = torch.sort(score, dim=-1, descending=True, stable=True)
            best, ids = order.values[..., :topk], order.indices[..., :topk]
        else:
            best, ids = score, ids.expand(score.shape)
        chosen = torch.where(best > -torch.inf, ids, count).sort(-1).values  # absent ones sort to the tail
        outs[0].fill_(-1)
        outs[0][..., : chosen.shape[-1]] = torch.where(chosen < count, chosen, -1)

    return run


def _sparse_attention(attrs: Attrs) -> RunKernel:
    layer, kv_heads, scale = attrs["layer"], attrs["kv_heads"], attrs["scale"]

    def run(outs: Outs, ins: Ins, w: None, workspace: Tensor | None) -> None:
        q_ThD, cache, blocks_ThK, positions, cu_q, _, page_table = ins
        k, v, page = cache.k[layer], cache.v[layer], cache.page_tokens
        o = outs[0]
        bounds = cu_q.tolist()
        for s, lo, hi, first, last in _spans(cu_q, positions, TILE):
            table = page_table[s]
            if bounds[s + 1] - bounds[s] < _FEW:
                for t in range(lo, hi):
                    own = first + t - lo
                    o[t] = _one_query(q_ThD[t], k, v, blocks_ThK[t], table, own, page, kv_heads, scale).flatten()
                continue
            position = positions[lo:hi]
            visible = last // page + 1
            for h in range(kv_heads):
                keep = _selected(blocks_ThK[lo:hi, h], visible)
                union = keep.any(0).nonzero().flatten()
                ids = table[union].tolist()
                # Blocks ascend, so only the last one can reach past the last query; what lies there is not written.
                valid = len(ids) * page - max(0, (int(union[-1]) + 1) * page - last - 1)
                allowed = _allowed(keep[:, union], union, position, page, valid)
                out = _attend(
                    q_ThD[lo:hi], _take(k[:, h], ids), _take(v[:, h], ids), h, kv_heads, valid, allowed, scale
                )
                o[lo:hi].unflatten(1, (kv_heads, -1))[:, h] = out

    return run


def _selected(blocks_nK: Tensor, visible: int) -> Tensor:
    """[n, visible] bool: which blocks each query selected; -1 selects nothing (BUG-6)."""
    keep = torch.zeros(len(blocks_nK), visible + 1, dtype=torch.bool, device=blocks_nK.device)
    keep.scatter_(1, torch.where(blocks_nK < 0, visible, blocks_nK), True)
    return keep[:, :visible]


def _allowed(keep: Tensor, union: Tensor, position: Tensor, page: int, valid: int) -> Tensor:
    """[n, valid] bool: selected and not after the query."""
    column = (union[:, None] * page + torch.arange(page, device=union.device)).flatten()[:valid]
    return keep.repeat_interleave(page, 1)[:, :valid] & (column <= position[:, None])


def _attend(
    q_nhD: Tensor,
    k: Tensor,
    v: Tensor,
    head: int,
    kv_heads: int,
    valid: int,
    allowed: Tensor,
    scale: float,
) -> Tensor:
    """Query heads of KV head `head` over `valid` tokens of pages k, v [pages, page, D]; returns [n, heads * D]."""
    group = q_nhD.shape[1] // kv_heads
    q = q_nhD[:, head * group : (head + 1) * group].transpose(0, 1)
    k = k.reshape(-1, k.shape[-1])[:valid].to(q.dtype).expand(group, -1, -1)
    v = v.reshape(-1, v.shape[-1])[:valid].to(q.dtype).expand(group, -1, -1)
    o = functional.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=allowed[None, None], scale=scale)
    return o[0].transpose(0, 1).flatten(1)


def _one_query(
    q_hD: Tensor,
    k: Tensor,
    v: Tensor,
    blocks_hK: Tensor,
    table: Tensor,
    position: int,
    page: int,
    kv_heads: int,
    scale: float,
) -> Tensor:
    """One query over its own blocks, all KV heads at once where they have equally many."""
    counts = (blocks_hK >= 0).sum(-1).tolist()
    own = position // page
    count = counts[0]
    last = blocks_hK[:, count - 1].tolist()
    if any(n != count for n in counts) or any(b != last[0] for b in last):
        group = q_hD.shape[0] // kv_heads
        parts = [
            _one_query(
                q_hD[h * group : (h + 1) * group],
                k[:, h : h + 1],
                v[:, h : h + 1],
                blocks_hK[h : h + 1],
                table,
                position,
                page,
                1,
                scale,
            )
            for h in range(kv_heads)
        ]
        return torch.cat(parts)
    valid = count * page - (page - 1 - position % page if last[0] == own else 0)
    heads = torch.arange(kv_heads, device=k.device)[:, None]
    pages = table[blocks_hK[:, :count]]
    keys = k[pages, heads].flatten(1, 2)[:, :valid].to(q_hD.dtype)
    values = v[pages, heads].flatten(1, 2)[:, :valid].to(q_hD.dtype)
    logits = torch.bmm(q_hD.view(kv_heads, -1, q_hD.shape[-1]), keys.transpose(1, 2)) * scale
    return torch.bmm(torch.softmax(logits, -1), values).view(q_hD.shape)


def _dense_attention(attrs: Attrs) -> RunKernel:
    layer, kv_heads, scale = attrs["layer"], attrs["kv_heads"], attrs["scale"]

    def run(outs: Outs, ins: Ins, w: None, workspace: Tensor | None) -> None:
        q_ThD, cache, positions, cu_q, _, page_table = ins
        k, v, page = cache.k[layer], cache.v[layer], cache.page_tokens
        table = page_table.tolist()
        for s, lo, hi, _, last in _spans(cu_q, positions, TILE):
            ids = table[s][: last // page + 1]
            allowed = torch.arange(last + 1, device=q_ThD.device) <= positions[lo:hi, None]
            for h in range(kv_heads):
                out = _attend(
                    q_ThD[lo:hi], _take(k[:, h], ids), _take(v[:, h], ids), h, kv_heads, last + 1, allowed, scale
                )
                outs[0][lo:hi].unflatten(1, (kv_heads, -1))[:, h] = out

    return run


ATTENTION = {
    "block_scores": _block_scores,
    "block_select": _block_select,
    "sparse_attention": _sparse_attention,
    "dense_attention": _dense_attention,
}
