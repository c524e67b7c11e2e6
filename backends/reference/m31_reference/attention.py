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

from m31.formats import fp8
from m31.graph import RunKernel
from m31.ops import Attrs
from m31_reference.cache import Store

Outs = Sequence[Any]
Ins = Sequence[Any]
TILE = 128  # query positions; tiles start at multiples of it, so that a tile's own block is its only partial one
_SKINNY = 16  # rows of queries and index heads
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


def _block_scores(attrs: Attrs, probability: str | None = None) -> RunKernel:
    layer = attrs["layer"]

    def run(outs: Outs, ins: Ins, w: None, workspace: Tensor | None) -> None:
        q_ThD, cache, positions, cu_q, _, page_table = ins
        scores_ThP = outs[0].fill_(-torch.inf)
        index, page = cache.index[layer], cache.page_tokens
        table = page_table.tolist()
        for s, lo, hi, first, last in _spans(cu_q, positions, TILE):
            blocks = last // page + 1
            keys = index.head(table[s][:blocks], 0, q_ThD.dtype)
            q = q_ThD[lo:hi].flatten(0, 1)
            # The tall matrix goes first where the other is a few rows: 2.6 times as fast for one query.
            product = (keys @ q.t()).t() if len(q) < _SKINNY else q @ keys.t()
            score = product.reshape(hi - lo, -1, blocks * page)
            # From the first query's position on, a key may lie after the query, or was never written at all.
            column = torch.arange(first + 1, blocks * page, device=keys.device)
            hidden = column > positions[lo:hi, None]
            score[:, :, first + 1 :].masked_fill_(hidden[:, None], -torch.inf)
            best = score.unflatten(2, (blocks, page)).amax(-1)
            if bool(best.isnan().any()):  # NaN counts as -inf
                best = score.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
                best = best.unflatten(2, (blocks, page)).amax(-1)
            scores_ThP[lo:hi, :, :blocks] = best

    return run


def _block_select(attrs: Attrs, probability: str | None = None) -> RunKernel:
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


def _sparse_attention(attrs: Attrs, probability: str | None = None) -> RunKernel:
    layer, kv_heads, scale = attrs["layer"], attrs["kv_heads"], attrs["scale"]

    def run(outs: Outs, ins: Ins, w: None, workspace: Tensor | None) -> None:
        q_ThD, cache, blocks_ThK, positions, cu_q, _, page_table = ins
        k, v, page = cache.k[layer], cache.v[layer], cache.page_tokens
        o_ThN = outs[0].unflatten(1, (kv_heads, -1))
        bounds = cu_q.tolist()
        for s, lo, hi, first, last in _spans(cu_q, positions, TILE):
            table = page_table[s]
            if bounds[s + 1] - bounds[s] < _FEW:
                for t in range(lo, hi):
                    o_ThN[t] = _one_query(q_ThD[t], k, v, blocks_ThK[t], table, first + t - lo, scale, probability)
                continue
            visible = last // page + 1
            causal = torch.arange(visible * page, device=q_ThD.device) <= positions[lo:hi, None]
            everything: Tensor | None = None  # the mask of heads whose queries all selected all blocks
            for h in range(kv_heads):
                keep = _selected(blocks_ThK[lo:hi, h], visible)
                union = keep.any(0).nonzero().flatten()
                ids = table[union].tolist()
                # Blocks ascend, so only the last one can reach past the last query; what lies there is not written.
                valid = len(ids) * page - max(0, (int(union[-1]) + 1) * page - last - 1)
                if bool(keep.all()):
                    everything = _additive(causal[:, :valid], q_ThD.dtype) if everything is None else everything
                    mask = everything
                else:
                    mask = _additive(_allowed(keep, causal, union, page, valid), q_ThD.dtype)
                pages = k.head(ids, h, q_ThD.dtype), v.head(ids, h, q_ThD.dtype)
                o_ThN[lo:hi, h] = _attend(q_ThD[lo:hi], *pages, h, kv_heads, valid, mask, scale, probability)

    return run


def _selected(blocks_nK: Tensor, visible: int) -> Tensor:
    """[n, visible] bool: which blocks each query selected; -1 selects nothing (BUG-6)."""
    keep = torch.zeros(len(blocks_nK), visible + 1, dtype=torch.bool, device=blocks_nK.device)
    keep.scatter_(1, torch.where(blocks_nK < 0, visible, blocks_nK), True)
    return keep[:, :visible]


def _allowed(keep: Tensor, causal: Tensor, union: Tensor, page: int, valid: int) -> Tensor:
    """[n, valid] bool over the tokens of the blocks in `union`: block selected, token not after the query."""
    allowed = causal.view(len(causal), -1, page) & keep[:, :, None]
    return allowed[:, union].flatten(1)[:, :valid]


def _additive(allowed: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where allowed, -inf elsewhere: built once here, where a bool mask would be converted for every head."""
    return torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill_(~allowed, -torch.inf)


def _attend(
    q_nhD: Tensor,
    k: Tensor,
    v: Tensor,
    head: int,
    kv_heads: int,
    valid: int,
    mask: Tensor,
    scale: float,
    probability: str | None,
) -> Tensor:
    """Query heads of KV head `head` over the first `valid` tokens of k, v [tokens, D]; returns [n, heads * D]."""
    group = q_nhD.shape[1] // kv_heads
    q = q_nhD[:, head * group : (head + 1) * group].transpose(0, 1)
    k = k[:valid].expand(group, -1, -1)
    v = v[:valid].expand(group, -1, -1)
    if probability is not None:
        o = _weighted(torch.bmm(q, k.transpose(1, 2)) * scale + mask, v, probability)
        return o.transpose(0, 1).flatten(1)
    o = functional.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=mask[None, None], scale=scale)
    return o[0].transpose(0, 1).flatten(1)


def _weighted(logits: Tensor, v: Tensor, probability: str | None) -> Tensor:
    """Softmax of logits [n, m, tokens] times v [n, tokens, D], the weights rounded as the arithmetic says."""
    if probability is None:
        return torch.bmm(torch.softmax(logits, -1), v)
    p = torch.exp(logits - logits.amax(-1, keepdim=True))
    rounded = fp8.decode(fp8.encode((p * fp8.E4M3_MAX).float(), saturate=True), p.dtype) / fp8.E4M3_MAX
    return torch.bmm(rounded, v) / p.sum(-1, keepdim=True)


def _one_query(
    q_hD: Tensor,
    k: Store,
    v: Store,
    blocks_hK: Tensor,
    table: Tensor,
    position: int,
    scale: float,
    probability: str | None,
) -> Tensor:
    """One query over its own blocks. Returns [kv_heads, group * D].

    KV heads that selected equally many blocks, up to the same last one, are one batch; that is all of them unless
    scores were NaN or no local block is forced.
    """
    kv_heads, page = k.heads, k.page
    counts = (blocks_hK >= 0).sum(-1).tolist()
    lasts = [int(blocks_hK[h, n - 1]) for h, n in enumerate(counts)]
    out = torch.empty(kv_heads, q_hD.numel() // kv_heads, dtype=q_hD.dtype, device=q_hD.device)
    alike: dict[tuple[int, int], list[int]] = {}
    for h, key in enumerate(zip(counts, lasts, strict=True)):
        alike.setdefault(key, []).append(h)
    for (count, last), members in alike.items():
        valid = count * page - max(0, (last + 1) * page - position - 1)
        heads = torch.tensor(members, device=q_hD.device)
        rows = (table[blocks_hK[heads, :count]] * kv_heads + heads[:, None]).flatten()
        keys, values = (
            store.rows(rows, q_hD.dtype).view(len(members), count * page, -1)[:, :valid] for store in (k, v)
        )
        q = q_hD.reshape(kv_heads, -1, q_hD.shape[-1])[heads]
        logits = torch.bmm(q, keys.transpose(1, 2)) * scale
        out[heads] = _weighted(logits, values, probability).flatten(1)
    return out


def _dense_attention(attrs: Attrs, probability: str | None = None) -> RunKernel:
    layer, kv_heads, scale = attrs["layer"], attrs["kv_heads"], attrs["scale"]

    def run(outs: Outs, ins: Ins, w: None, workspace: Tensor | None) -> None:
        q_ThD, cache, positions, cu_q, _, page_table = ins
        k, v, page = cache.k[layer], cache.v[layer], cache.page_tokens
        table, o_ThN = page_table.tolist(), outs[0].unflatten(1, (kv_heads, -1))
        for s, lo, hi, _, last in _spans(cu_q, positions, TILE):
            ids = table[s][: last // page + 1]
            mask = _additive(torch.arange(last + 1, device=q_ThD.device) <= positions[lo:hi, None], q_ThD.dtype)
            for h in range(kv_heads):
                pages = k.head(ids, h, q_ThD.dtype), v.head(ids, h, q_ThD.dtype)
                o_ThN[lo:hi, h] = _attend(q_ThD[lo:hi], *pages, h, kv_heads, last + 1, mask, scale, probability)

    return run


ATTENTION = {
    "block_scores": _block_scores,
    "block_select": _block_select,
    "sparse_attention": _sparse_attention,
    "dense_attention": _dense_attention,
}
