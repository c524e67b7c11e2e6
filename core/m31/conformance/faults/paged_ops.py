"""Faults of ops on pages: scores, selection, attention, writing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from m31.conformance.faults.breaks import attrs, in_bf16, inputs, instead, result, when_square
from m31.conformance.faults.dense_ops import fault
from m31.conformance.faults.fault import Call, Fault
from m31.ops import StateType


def _identity(table: Tensor) -> Tensor:
    """Physical pages in the order of the logical ones."""
    return torch.where(table < 0, table, torch.arange(table.numel(), device=table.device).view(table.shape) % 3)


def _first_of_all(table: Tensor) -> Tensor:
    return torch.where((table < 0) | (table[:1] < 0), table, table[:1])


def _page(call: Call) -> int:
    cache = next(x for x, arg in zip(call.ins, _flowing(call), strict=True) if arg.kind == "state")
    spec = cache.layout.inner.spec if hasattr(cache.layout, "inner") else cache.layout.spec
    return int(spec.page_tokens)


def _flowing(call: Call) -> list[Any]:
    return [arg for arg in call.op.spec.inputs if arg.kind != "weight"]


def _moved(change: Callable[[Tensor, int], Tensor]) -> Callable[[Call], None]:
    """Other positions for each sequence: `change(last position, page)` says how far it moves."""

    def run(call: Call) -> None:
        names = [arg.name for arg in _flowing(call)]
        positions, cu_q = call.ins[names.index("positions")].clone(), call.ins[names.index("cu_q")].tolist()
        for lo, hi in zip(cu_q, cu_q[1:], strict=False):
            if lo < hi:
                positions[lo:hi] += change(positions[hi - 1].clone(), _page(call))
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


def _last_dropped(blocks: Tensor) -> Tensor:
    """The last of two blocks and more is left out: the partly filled one."""
    count = (blocks >= 0).sum(-1, keepdim=True)
    at = torch.arange(blocks.shape[-1], device=blocks.device)
    return torch.where((at == count - 1) & (count > 1), -1, blocks)


def _of_the_neighbour(blocks: Tensor) -> Tensor:
    """Those of the token before, where they are visible."""
    before = blocks.roll(1, 0)
    return torch.where(before.amax(-1, keepdim=True) <= blocks.amax(-1, keepdim=True), before, blocks)


def _of_head_0(x: Tensor) -> Tensor:
    return x[:, :1].expand_as(x).clone()


def _sink(call: Call) -> None:
    """One empty place more in the softmax."""
    call.real()
    call.outs[0].mul_(0.999)


def _dense_instead(call: Call) -> None:
    """All blocks up to the query's own."""
    q, kv, blocks, positions, *rest = call.ins
    page = _page(call)
    pages = max(int(positions.max()) // page + 1 if len(positions) else 1, blocks.shape[-1])
    ids = torch.arange(pages, device=blocks.device).expand(*blocks.shape[:2], pages)
    call.real([q, kv, torch.where(ids <= (positions // page)[:, None, None], ids, -1), positions, *rest])


SCORES = (
    fault(
        "scores-scaled",
        "scores are divided by the root of the width, as attention's are",
        "BUG-29",
        "block_scores",
        "prefill",
        result("block_scores", lambda s: s * 0.25),
    ),
    fault(
        "scores-one-back",
        "a query's own token is not scored",
        "DESIGN §7",
        "block_scores",
        "prefill",
        inputs("block_scores", positions=lambda p: (p - 1).clamp(min=0)),
    ),
    fault(
        "scores-page-for-page",
        "the page table is taken for the identity",
        "BUG-5, DESIGN §7",
        "block_scores",
        "chunk-of-long",
        inputs("block_scores", page_table=_identity),
    ),
    fault(
        "scores-of-the-first-sequence",
        "all sequences have the page table of the first",
        "BUG-64",
        "block_scores",
        "mixed",
        inputs("block_scores", page_table=_first_of_all),
    ),
    fault(
        "scores-of-head-0",
        "all index heads have the scores of the first",
        "BUG-29",
        "block_scores",
        "prefill",
        result("block_scores", _of_head_0),
    ),
    fault(
        "scores-nan-decides",
        "a key that is NaN makes its block the best",
        "BUG-1, BUG-5",
        "block_scores",
        "nan-key",
        instead("block_scores", lambda call: _nan_wins(call)),
    ),
    fault(
        "scores-future-visible",
        "blocks after the query's own have a score",
        "BUG-29",
        "block_scores",
        "prefill",
        result("block_scores", lambda s: s.nan_to_num(neginf=-9.0)),
    ),
    fault(
        "scores-in-bf16",
        "queries of the index are rounded to BF16, and float32 is declared",
        "BUG-29",
        "block_scores",
        "prefill",
        inputs("block_scores", q=in_bf16),
    ),
    fault(
        "scores-heads-for-tokens",
        "tokens and heads are exchanged where there are as many of both",
        "BUG-1",
        "block_scores",
        "tokens-equal-heads",
        inputs("block_scores", q=when_square),
    ),
)


def _nan_wins(call: Call) -> None:
    call.real()
    names = [arg.name for arg in _flowing(call)]
    kv = call.ins[names.index("kv")]
    table = call.ins[names.index("page_table")]
    positions, cu_q = call.ins[names.index("positions")], call.ins[names.index("cu_q")].tolist()
    page = _page(call)
    for s, (lo, hi) in enumerate(zip(cu_q, cu_q[1:], strict=False)):
        for t in range(lo, hi):
            for b in range(int(positions[t]) // page + 1):
                seen = int(positions[t]) - b * page + 1
                keys = kv.read(call.op.attrs["layer"], int(table[s, b]))["index"][:seen]
                if bool(keys.isnan().any()):
                    call.outs[0][t, :, b] = torch.inf


def _ranked(call: Call, *, forced: bool = True, upwards: bool = False, union: bool = False) -> None:
    """A selection of its own."""
    scores, positions = call.ins
    topk, block, local, init = (call.op.attrs[n] for n in ("topk", "block", "local_blocks", "init_blocks"))
    count = scores.shape[2]
    own, ids = (positions // block)[:, None, None], torch.arange(count, device=scores.device)
    must = ((ids > own - local) | (ids < init)) & (ids <= own) & forced
    score = scores.masked_fill(must, torch.inf)
    if union:
        score = score.amax(1, keepdim=True).expand_as(score)
    order = torch.sort(score.flip(-1) if upwards else score, dim=-1, descending=True, stable=True)
    places = (count - 1 - order.indices if upwards else order.indices)[..., :topk]
    chosen = torch.where(order.values[..., :topk] > -torch.inf, places, count).sort(-1).values
    call.outs[0].fill_(-1)
    call.outs[0][..., : chosen.shape[-1]] = torch.where(chosen < count, chosen, -1)


def _by_score(call: Call) -> None:
    call.real()
    scores, blocks = call.ins[0], call.outs[0].clone()
    value = scores.gather(-1, blocks.clamp(min=0)).masked_fill(blocks < 0, -torch.inf)
    order = torch.sort(value, dim=-1, descending=True, stable=True).indices
    call.outs[0].copy_(blocks.gather(-1, order))


SELECTION = (
    fault(
        "selection-local-not-forced",
        "the query's own block has to earn its place",
        "BUG-29, DESIGN §7",
        "block_select",
        "local-is-worst",
        attrs("block_select", local_blocks=lambda _: 0),
    ),
    fault(
        "selection-init-forced",
        "the first block is always taken",
        "DESIGN §7",
        "block_select",
        "beyond-topk",
        attrs("block_select", init_blocks=lambda _: 1),
    ),
    fault(
        "selection-init-not-forced",
        "the first block is not forced where it should be",
        "DESIGN §7",
        "block_select",
        "init-block",
        attrs("block_select", init_blocks=lambda _: 0),
    ),
    fault(
        "selection-tie-upwards",
        "of equal scores the higher id wins",
        "DESIGN §7",
        "block_select",
        "all-equal",
        instead("block_select", lambda call: _ranked(call, upwards=True)),
    ),
    fault(
        "selection-by-score",
        "ids come in the order of their scores",
        "BUG-1",
        "block_select",
        "beyond-topk",
        instead("block_select", _by_score),
    ),
    fault(
        "selection-of-all-heads",
        "index heads share one selection, of the best scores of any",
        "BUG-29",
        "block_select",
        "beyond-topk",
        instead("block_select", lambda call: _ranked(call, union=True)),
    ),
    fault(
        "selection-of-head-0",
        "all heads have the selection of the first",
        "BUG-29",
        "block_select",
        "beyond-topk",
        result("block_select", _of_head_0),
    ),
    fault(
        "selection-one-less",
        "one block fewer than top-k is chosen",
        "DESIGN §7",
        "block_select",
        "beyond-topk",
        result("block_select", _last_dropped),
    ),
    fault(
        "selection-padded-with-zero",
        "absent blocks are 0 instead of -1",
        "BUG-6, BUG-41",
        "block_select",
        "below-topk",
        result("block_select", lambda b: b.clamp(min=0)),
    ),
    fault(
        "selection-heads-for-tokens",
        "tokens and heads are exchanged where there are as many of both",
        "BUG-1",
        "block_select",
        "tokens-equal-heads",
        result("block_select", when_square),
    ),
)


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
            inputs(op, page_table=_identity),
        ),
        fault(
            f"{short}-of-the-first-sequence",
            "all sequences read the pages of the first",
            "BUG-64",
            op,
            "mixed",
            inputs(op, page_table=_first_of_all),
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
        inputs("sparse_attention", blocks=_last_dropped),
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
        inputs("sparse_attention", blocks=_of_head_0),
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
    positions, page = call.ins[3], _page(call)
    names = [arg.name for arg in _flowing(call)]
    head = call.outs[0].clone()
    call.run([head], [first if n == "blocks" else x for n, x in zip(names, call.ins, strict=True)], None, None)
    heads = call.op.attrs["kv_heads"]
    mixed = torch.where(absent[..., None], (out.unflatten(1, (heads, -1)) + head.unflatten(1, (heads, -1))) / 2, 0)
    kept = torch.where(absent[..., None], mixed, out.unflatten(1, (heads, -1)))
    call.outs[0].copy_(torch.where((positions >= page)[:, None, None], kept, out.unflatten(1, (heads, -1))).flatten(1))


def _cyclic(slots: Tensor) -> Tensor:
    return torch.where(slots < 0, slots, (slots + 1) % 12)


def _normed(v: Tensor) -> Tensor:
    return v * torch.rsqrt(v.square().mean(-1, keepdim=True) + 1e-6)


def _exchanged(call: Call) -> None:
    kv, k, v, slots = call.ins
    call.real([kv, v.view(k.shape), k.flatten(1), slots])


def _channel_first(call: Call) -> None:
    """V is taken for channels first."""
    kv, k, v, slots = call.ins
    call.real([kv, k, v.view(len(v), k.shape[2], k.shape[1]).transpose(1, 2).flatten(1), slots])


def _scaled_again(call: Call) -> None:
    kv, k, v, slots = call.ins
    state = call.op.inputs[0]
    twice = isinstance(state, StateType) and state.kv_format in ("fp8", "nvfp4")
    call.real([kv, k * 2, v, slots] if twice else call.ins)


def _last_left(call: Call) -> None:
    call.real([*call.ins[:-1], torch.where(torch.arange(len(call.ins[-1])) < len(call.ins[-1]) - 1, call.ins[-1], -1)])


def _write(op: str, short: str, value: str) -> tuple[Fault, ...]:
    return (
        fault(
            f"{short}-next-slot",
            "keys are written one slot further",
            "DESIGN §7",
            op,
            "two-sequences",
            inputs(op, slot_map=_cyclic),
        ),
        fault(
            f"{short}-padding-written",
            "padding is written to slot 0",
            "BUG-5, BUG-59",
            op,
            "padding",
            inputs(op, slot_map=lambda s: s.clamp(min=0)),
        ),
        fault(
            f"{short}-nothing",
            "nothing is written",
            "DESIGN §7",
            op,
            "two-sequences",
            instead(op, lambda call: None),
        ),
        fault(
            f"{short}-last-left",
            "the last token of a step is not written",
            "BUG-69",
            op,
            "two-sequences",
            instead(op, _last_left),
        ),
        fault(
            f"{short}-cut-to-bf16",
            "pages of float32 hold BF16",
            "BUG-8",
            op,
            "two-sequences",
            inputs(op, **{value: in_bf16}),
        ),
    )


WRITING = (
    *_write("kv_write", "keys", "k"),
    *_write("index_write", "index-keys", "index_k"),
    fault(
        "keys-for-values",
        "keys and values are exchanged",
        "DESIGN §7",
        "kv_write",
        "two-sequences",
        instead("kv_write", _exchanged),
    ),
    fault(
        "values-normed",
        "values are normed as keys are",
        "DESIGN §7",
        "kv_write",
        "two-sequences",
        inputs("kv_write", v=_normed),
    ),
    fault(
        "values-channels-first",
        "heads and channels of values are exchanged",
        "BUG-1",
        "kv_write",
        "two-sequences",
        instead("kv_write", _channel_first),
    ),
    fault(
        "keys-heads-for-tokens",
        "tokens and heads are exchanged where there are as many of both",
        "BUG-1",
        "kv_write",
        "heads-equal-tokens",
        inputs("kv_write", k=when_square),
    ),
    fault(
        "keys-scale-twice",
        "keys in quantised pages are scaled once more than they are divided",
        "BUG-8",
        "kv_write",
        "",
        instead("kv_write", _scaled_again),
    ),
)

PAGED = (*SCORES, *SELECTION, *ATTENTION, *WRITING)
