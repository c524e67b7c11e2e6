"""Faults of ops on pages: scores, selection, writing."""

from __future__ import annotations

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
    result,
    when_square,
)
from m31.conformance.faults.dense_ops import fault
from m31.conformance.faults.fault import Break, Call, Fault
from m31.ops import StateType

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
        inputs("block_scores", page_table=identity),
    ),
    fault(
        "scores-of-the-first-sequence",
        "all sequences have the page table of the first",
        "BUG-64",
        "block_scores",
        "mixed",
        inputs("block_scores", page_table=first_table),
    ),
    fault(
        "scores-of-head-0",
        "all index heads have the scores of the first",
        "BUG-29",
        "block_scores",
        "prefill",
        result("block_scores", of_head_0),
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
    names = [arg.name for arg in flowing(call)]
    kv = call.ins[names.index("kv")]
    table = call.ins[names.index("page_table")]
    positions, cu_q = call.ins[names.index("positions")], call.ins[names.index("cu_q")].tolist()
    page = page_of(call)
    for s, (lo, hi) in enumerate(pairwise(cu_q)):
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
        result("block_select", of_head_0),
    ),
    fault(
        "selection-one-less",
        "one block fewer than top-k is chosen",
        "DESIGN §7",
        "block_select",
        "beyond-topk",
        result("block_select", last_dropped),
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


def written_in_bf16(op: str, name: str) -> Break:
    """The value of a page-writing op rounded."""
    return inputs(op, ("decode", "verify", "mixed"), **{name: in_bf16})


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
            f"{short}-nothing", "nothing is written", "DESIGN §7", op, "two-sequences", instead(op, lambda call: None)
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
            written_in_bf16(op, value),
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

PAGED = (*SCORES, *SELECTION, *WRITING)
