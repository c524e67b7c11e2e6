"""Faults of attention over pages, dense and block-sparse."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor

from m31.conformance.faults.breaks import (
    attrs,
    first_table,
    flowing,
    identity,
    in_bf16,
    inputs,
    instead,
    last_dropped,
    of_head_0,
    page_of,
    when_square,
)
from m31.conformance.faults.dense_ops import fault
from m31.conformance.faults.fault import Call, Fault


def _moved(change: Callable[[Tensor, int], Tensor]) -> Callable[[Call], None]:
    """Other positions for each sequence: `change(last position, page)` says how far it moves."""

    def run(call: Call) -> None:
        names = [arg.name for arg in flowing(call)]
        positions, cu_q = call.ins[names.index("positions")].clone(), call.ins[names.index("cu_q")].tolist()
        for lo, hi in pairwise(cu_q):
            if lo < hi:
                positions[lo:hi] += change(positions[hi - 1].clone(), page_of(call))
        call.real([positions if name == "positions" else x for name, x in zip(names, call.ins, strict=True)])

    return run


def _one_ahead(last: Tensor, page: int) -> Tensor:
    return (last % page != page - 1).to(last.dtype)


def _to_the_end(last: Tensor, page: int) -> Tensor:
    return page - 1 - last % page


def _grouped(call: Call) -> None:
    """Query head j reads KV head j modulo their number."""
    q = call.ins[0]
    tokens, heads, dim = q.shape
    kv_heads = call.op.attrs["kv_heads"]
    call.real([q.view(tokens, -1, kv_heads, dim).transpose(1, 2).reshape(q.shape), *call.ins[1:]])
    out = call.outs[0].clone().view(tokens, kv_heads, heads // kv_heads, dim)
    call.outs[0].copy_(out.transpose(1, 2).reshape(tokens, heads * dim))


def _less_one_block(blocks: Tensor) -> Tensor:
    second = torch.where(blocks[..., 1:2] < 0, blocks[..., :1], blocks[..., 1:2])
    return torch.cat([second, blocks[..., 1:]], -1)


def _of_the_neighbour(blocks: Tensor) -> Tensor:
    """Those of the token before, where they are visible."""
    before = blocks.roll(1, 0)
    return torch.where(before.amax(-1, keepdim=True) <= blocks.amax(-1, keepdim=True), before, blocks)


def _sink(call: Call) -> None:
    """One empty place more in the softmax."""
    call.real()
    call.outs[0].mul_(0.999)


def _dense_instead(call: Call) -> None:
    """All blocks up to the query's own."""
    q, kv, blocks, positions, *rest = call.ins
    page = page_of(call)
    pages = max(int(positions.max()) // page + 1 if len(positions) else 1, blocks.shape[-1])
    ids = torch.arange(pages, device=blocks.device).expand(*blocks.shape[:2], pages)
    call.real([q, kv, torch.where(ids <= (positions // page)[:, None, None], ids, -1), positions, *rest])


def _attention(op: str, short: str) -> tuple[Fault, ...]:
    """Faults that both kinds of attention can have."""
    return (
        fault(
            f"{short}-sees-the-next",
            "the token after the query is visible inside its block",
            "DESIGN §7",
            op,
            "prefill",
            instead(op, _moved(_one_ahead)),
        ),
        fault(
            f"{short}-not-itself",
            "a query does not see its own token",
            "DESIGN §7",
            op,
            "prefill",
            inputs(op, positions=lambda p: (p - 1).clamp(min=0)),
        ),
        fault(
            f"{short}-whole-last-page",
            "the partly filled page is read to its end",
            "BUG-5",
            op,
            "chunk-of-long",
            instead(op, _moved(_to_the_end)),
        ),
        fault(
            f"{short}-scale-twice",
            "the softmax scale is applied to the queries and to the logits",
            "DESIGN §7",
            op,
            "chunk-of-long",
            attrs(op, scale=lambda s: s * s),
        ),
        fault(
            f"{short}-no-scale",
            "logits are not scaled",
            "DESIGN §7",
            op,
            "chunk-of-long",
            attrs(op, scale=lambda _: 1.0),
        ),
        fault(
            f"{short}-groups-interleaved",
            "query head j reads KV head j modulo their number",
            "BUG-37",
            op,
            "chunk-of-long",
            instead(op, _grouped),
        ),
        fault(
            f"{short}-page-for-page",
            "the page table is taken for the identity",
            "BUG-5, DESIGN §7",
            op,
            "chunk-of-long",
            inputs(op, page_table=identity),
        ),
        fault(
            f"{short}-of-the-first-sequence",
            "all sequences read the pages of the first",
            "BUG-64",
            op,
            "mixed",
            inputs(op, page_table=first_table),
        ),
        fault(
            f"{short}-with-a-sink",
            "the weights of a query add up to less than one",
            "DESIGN §7",
            op,
            "chunk-of-long",
            instead(op, _sink),
        ),
        fault(
            f"{short}-queries-in-bf16",
            "queries are rounded to BF16, and float32 is declared",
            "A12",
            op,
            "chunk-of-long",
            inputs(op, q=in_bf16),
        ),
        fault(
            f"{short}-heads-for-tokens",
            "tokens and heads are exchanged where there are as many of both",
            "BUG-1",
            op,
            "",
            inputs(op, q=when_square),
        ),
    )


ATTENTION = (
    *_attention("dense_attention", "dense"),
    *_attention("sparse_attention", "sparse"),
    fault(
        "sparse-first-block-missing",
        "the first selected block is not read",
        "DESIGN §7",
        "sparse_attention",
        "choice",
        inputs("sparse_attention", blocks=_less_one_block),
    ),
    fault(
        "sparse-last-block-missing",
        "the last selected block is not read",
        "DESIGN §7",
        "sparse_attention",
        "choice",
        inputs("sparse_attention", blocks=last_dropped),
    ),
    fault(
        "sparse-sentinel-followed",
        "an absent block is read as block 0, once more",
        "BUG-6",
        "sparse_attention",
        "",
        instead("sparse_attention", lambda call: _sentinel(call)),
    ),
    fault(
        "sparse-blocks-of-head-0",
        "all KV heads read the blocks of the first",
        "BUG-29",
        "sparse_attention",
        "choice",
        inputs("sparse_attention", blocks=of_head_0),
    ),
    fault(
        "sparse-heads-exchanged",
        "block lists of the KV heads are in reverse order",
        "BUG-1",
        "sparse_attention",
        "choice",
        inputs("sparse_attention", blocks=lambda b: b.flip(1)),
    ),
    fault(
        "sparse-is-dense",
        "all blocks are read, which the model was not trained for",
        "BUG-7",
        "sparse_attention",
        "choice",
        instead("sparse_attention", _dense_instead),
    ),
    fault(
        "sparse-blocks-of-the-next-token",
        "queries read the blocks of their neighbours",
        "BUG-1",
        "sparse_attention",
        "choice",
        inputs("sparse_attention", blocks=_of_the_neighbour),
    ),
)


def _sentinel(call: Call) -> None:
    """Block 0 counts twice where a block is absent: half of each weight moves there."""
    call.real()
    out, blocks = call.outs[0].clone(), call.ins[2]
    absent = (blocks < 0).any(-1)
    if not bool(absent.any()):
        return
    first = torch.where(torch.arange(blocks.shape[-1], device=blocks.device) == 0, 0, -1).expand_as(blocks)
    positions, page = call.ins[3], page_of(call)
    names = [arg.name for arg in flowing(call)]
    head = call.outs[0].clone()
    call.run([head], [first if n == "blocks" else x for n, x in zip(names, call.ins, strict=True)], None, None)
    heads = call.op.attrs["kv_heads"]
    mixed = torch.where(absent[..., None], (out.unflatten(1, (heads, -1)) + head.unflatten(1, (heads, -1))) / 2, 0)
    kept = torch.where(absent[..., None], mixed, out.unflatten(1, (heads, -1)))
    call.outs[0].copy_(torch.where((positions >= page)[:, None, None], kept, out.unflatten(1, (heads, -1))).flatten(1))
