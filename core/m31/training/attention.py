"""Block scores, block selection and attention with gradients (MODEL.md §2.4), tiled by 128 queries.

No mask of the whole sequence is ever built: at 4,096 tokens it would take gigabytes. A tile whose queries all take
every visible block is one product for all heads; any other reads, head by head, the union of its queries' blocks.
Shapes: T tokens of one sequence, K KV heads (and index heads), G query heads per KV head, D channels, b blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from m31.training import fakequant

TILE = 128


def _tiles(tokens: int, block: int) -> Iterator[tuple[int, int, int]]:
    """(first row, end row, blocks that its last row sees)."""
    for low in range(0, tokens, TILE):
        high = min(tokens, low + TILE)
        yield low, high, (high - 1) // block + 1


def _later(low: int, high: int, width: int) -> Tensor:
    """[rows, width - low - 1] bool: which of the keys from `low + 1` on come after the query."""
    return torch.arange(low + 1, width) > torch.arange(low, high)[:, None]


def _padded(x_KTD: Tensor, block: int) -> Tensor:
    """[K, T, D] to whole blocks; what is added is always masked."""
    return torch.nn.functional.pad(x_KTD, (0, 0, 0, -x_KTD.shape[1] % block))


def visible(tokens: int, block: int) -> Tensor:
    """[T, b] bool: blocks that hold a token not after the query."""
    return torch.arange(-(-tokens // block)) <= (torch.arange(tokens) // block)[:, None]


class _BlockScores(torch.autograd.Function):
    """The gradient of a maximum goes to the token that is the maximum."""

    @staticmethod
    def forward(ctx: Any, iq_TKD: Tensor, ik_TD: Tensor, block: int) -> Tensor:
        tokens, heads, _ = iq_TKD.shape
        keys = _padded(ik_TD[None], block)[0]
        scores = iq_TKD.new_full((tokens, heads, len(keys) // block), -torch.inf)
        best = torch.zeros(scores.shape, dtype=torch.int64)
        first = torch.arange(0, len(keys), block)
        for low, high, blocks in _tiles(tokens, block):
            width = blocks * block
            product = (iq_TKD[low:high].flatten(0, 1) @ keys[:width].t()).view(high - low, heads, width)
            product[..., low + 1 :].masked_fill_(_later(low, high, width)[:, None], -torch.inf)
            top = product.view(high - low, heads, blocks, block).max(-1)
            scores[low:high, :, :blocks] = top.values
            best[low:high, :, :blocks] = top.indices + first[:blocks]
        ctx.save_for_backward(iq_TKD, keys, best)
        ctx.block = block
        return scores

    @staticmethod
    def backward(ctx: Any, *grad: Tensor) -> tuple[Tensor, Tensor, None]:
        iq_TKD, keys, best = ctx.saved_tensors
        diq, dkeys = torch.empty_like(iq_TKD), torch.zeros_like(keys)
        for low, high, blocks in _tiles(len(iq_TKD), ctx.block):
            at = best[low:high, :, :blocks]
            g = grad[0][low:high, :, :blocks].flatten(0, 1)
            rows, tokens = iq_TKD[low:high].flatten(0, 1), at.flatten()
            taken = keys.index_select(0, tokens).view(len(rows), blocks, -1)
            diq[low:high] = torch.bmm(g[:, None], taken).view(diq[low:high].shape)
            dkeys.index_add_(0, tokens, (g[..., None] * rows[:, None]).flatten(0, 1))
        return diq, dkeys[: len(iq_TKD)], None


def block_scores(iq_TKD: Tensor, ik_TD: Tensor, block: int) -> Tensor:
    """The largest product of each index query with the visible keys of each block: [T, K, b], -inf where none is."""
    out: Tensor = _BlockScores.apply(iq_TKD, ik_TD, block)  # type: ignore[no-untyped-call]
    return out


def select(scores_TKb: Tensor, *, topk: int, block: int, local_blocks: int, init_blocks: int) -> Tensor | None:
    """The blocks that each query and index head keeps, [T, K, b] bool, by the rule of the op `block_select`: forced
    ones first, the lower id winning ties. None where every query keeps all blocks that it sees."""
    tokens, _, count = scores_TKb.shape
    if count <= topk:
        return None
    own = (torch.arange(tokens) // block)[:, None, None]
    ids = torch.arange(count)
    forced = ((ids > own - local_blocks) | (ids < init_blocks)) & (ids <= own)
    score = scores_TKb.detach().masked_fill(forced, torch.inf)
    order = torch.sort(score, dim=-1, descending=True, stable=True)
    keep = torch.zeros(score.shape, dtype=torch.bool)
    keep.scatter_(-1, order.indices[..., :topk], order.values[..., :topk] > -torch.inf)
    return keep


class _Attend(torch.autograd.Function):
    """Softmax attention; the weights of every tile are kept for the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, q_TKGD: Tensor, k_TKD: Tensor, v_TKD: Tensor, keep: Tensor | None, block: int, scale: float, p8: bool
    ) -> tuple[Tensor, Tensor]:
        tokens, heads, group, _ = q_TKGD.shape
        q = q_TKGD.permute(1, 2, 0, 3).contiguous()  # [K, G, T, D]
        k, v = (_padded(x.transpose(0, 1), block) for x in (k_TKD, v_TKD))
        o = torch.empty_like(q)
        mass = q.new_zeros(heads, tokens, k.shape[1] // block)
        parts, kept = [], []
        for low, high, blocks in _tiles(tokens, block):
            for part in _parts(keep, low, high, blocks, heads):
                own, columns = part
                rows = q[own, :, low:high].flatten(1, 2)
                keys, values = (_taken(x[own], columns, blocks, block) for x in (k, v))
                s = torch.bmm(rows, keys.transpose(1, 2)).mul_(scale).view(len(rows), group, high - low, -1)
                _mask(s, keep, own, columns, low, high, block)
                p = s.sub_(s.amax(-1, keepdim=True)).exp_()
                total = p.sum(-1, keepdim=True)
                sent = fakequant.probability(p).div_(total) if p8 else None
                p.div_(total)
                used = p if sent is None else sent
                o[own, :, low:high] = torch.bmm(used.flatten(1, 2), values).view(len(rows), group, high - low, -1)
                by_block = p.view(*p.shape[:-1], -1, block).sum(-1).mean(1)
                if columns is None:
                    mass[own, low:high, :blocks] = by_block
                else:
                    mass[own, low:high] = mass[own, low:high].index_copy(-1, columns, by_block)
                parts.append((own, columns, low, high, blocks))
                kept += [p] if sent is None else [p, sent]
        ctx.save_for_backward(q, k, v, *kept)
        ctx.parts, ctx.block, ctx.scale, ctx.tokens = parts, block, scale, tokens
        out = o.permute(2, 0, 1, 3).flatten(1)
        mass = mass.transpose(0, 1)
        ctx.mark_non_differentiable(mass)
        return out, mass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, *kept = ctx.saved_tensors
        each = len(kept) // len(ctx.parts)
        heads, group, _, dim = q.shape
        do = grads[0].view(ctx.tokens, heads, group, dim).permute(1, 2, 0, 3).contiguous()
        dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for at, (own, columns, low, high, blocks) in enumerate(ctx.parts):
            # The softmax weights, and what was sent to V: the same unless the arithmetic rounds them.
            p, used = (kept[at * each + i].flatten(1, 2) for i in (0, each - 1))
            keys, values = (_taken(x[own], columns, blocks, ctx.block) for x in (k, v))
            rows, out = q[own, :, low:high].flatten(1, 2), do[own, :, low:high].flatten(1, 2)
            _give(dv[own], columns, ctx.block, torch.bmm(used.transpose(1, 2), out))
            ds = torch.bmm(out, values.transpose(1, 2))
            ds.sub_((ds * p).sum(-1, keepdim=True)).mul_(p).mul_(ctx.scale)
            dq[own, :, low:high] = torch.bmm(ds, keys).view(len(rows), group, high - low, -1)
            _give(dk[own], columns, ctx.block, torch.bmm(ds.transpose(1, 2), rows))
        whole = (x[:, : ctx.tokens].transpose(0, 1) for x in (dk, dv))
        return dq.permute(2, 0, 1, 3), *whole, None, None, None, None


def _parts(keep: Tensor | None, low: int, high: int, blocks: int, heads: int) -> Iterator[tuple[slice, Tensor | None]]:
    """(KV heads, block ids that they read; None for all visible ones) of one tile."""
    if keep is None:
        yield slice(0, heads), None
        return
    kept = keep[low:high, :, :blocks]
    if bool(kept[0].all()) and bool(kept.all()):
        yield slice(0, heads), None
        return
    for head in range(heads):
        yield slice(head, head + 1), kept[:, head].any(0).nonzero().flatten()


def _taken(x_KTD: Tensor, columns: Tensor | None, blocks: int, block: int) -> Tensor:
    if columns is None:
        return x_KTD[:, : blocks * block]
    return _by_block(x_KTD, block).index_select(1, columns).flatten(1, 2)


def _by_block(x_KTD: Tensor, block: int) -> Tensor:
    return x_KTD.view(len(x_KTD), -1, block, x_KTD.shape[-1])


def _give(x_KTD: Tensor, columns: Tensor | None, block: int, value: Tensor) -> None:
    """Add what `_taken` took back to where it came from."""
    if columns is None:
        x_KTD[:, : value.shape[1]] += value
    else:
        _by_block(x_KTD, block).index_add_(1, columns, _by_block(value, block))


def _mask(s: Tensor, keep: Tensor | None, own: slice, columns: Tensor | None, low: int, high: int, block: int) -> None:
    """-inf into s [k, G, rows, width] where a token lies after the query, or in a block that the query did not keep."""
    if columns is None:
        s[..., low + 1 :].masked_fill_(_later(low, high, s.shape[-1]), -torch.inf)
        return
    assert keep is not None
    dropped = ~keep[low:high, own.start].index_select(1, columns)
    token = (columns[:, None] * block + torch.arange(block)).flatten()
    hidden = dropped.repeat_interleave(block, 1) | (token > torch.arange(low, high)[:, None])
    s.masked_fill_(hidden, -torch.inf)


def attend(
    q_TKGD: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    keep: Tensor | None,
    *,
    block: int,
    scale: float,
    rounded_probability: bool,
) -> tuple[Tensor, Tensor]:
    """Causal attention over kept blocks.

    Args:
        q_TKGD, k_TKD, v_TKD: of one sequence, positions from 0.
        keep: of `select`; None for all.
        block: tokens of a block.
        scale: of the products.
        rounded_probability: softmax weights meet V as E4M3 (MODEL.md §3.4); their gradient passes straight through.
    Returns:
        [T, K * G * D]; and, without gradient, the weight of each block, averaged over the group's heads: [T, K, b].
    """
    out: tuple[Tensor, Tensor] = _Attend.apply(  # type: ignore[no-untyped-call]
        q_TKGD, k_TKD, v_TKD, keep, block, scale, rounded_probability
    )
    return out
