"""The draft head's own ops in plain torch (m31.ops.draft)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from m31.graph import RunKernel
from m31.ops import Attrs

if TYPE_CHECKING:
    from m31_reference.weights import Weights

Outs = Sequence[Any]
Ins = Sequence[Any]


def _concat(attrs: Attrs) -> RunKernel:
    def run(outs: Outs, ins: Ins, w: None, workspace: Tensor | None) -> None:
        outs[0].copy_(torch.cat([ins[0], ins[1]], 1))

    return run


def _draft_attention(attrs: Attrs) -> RunKernel:
    layer, kv_heads, scale, window = attrs["layer"], attrs["kv_heads"], attrs["scale"], attrs["window"]

    def run(outs: Outs, ins: Ins, w: None, workspace: Tensor | None) -> None:
        q_ThD, k_ThD, v_TC, cache, positions, cu_q, seq_lens, page_table = ins
        page, table, lengths = cache.page_tokens, page_table.tolist(), seq_lens.tolist()
        v_ThD = v_TC.unflatten(1, k_ThD.shape[1:])
        o_ThN = outs[0].unflatten(1, (kv_heads, -1))
        for s, (lo, hi) in enumerate(itertools.pairwise(cu_q.tolist())):
            if lo == hi:
                continue
            context = lengths[s] - (hi - lo)
            first = max(0, int(positions[lo]) - window + 1) // page * page  # the page in which the window begins
            ids = table[s][first // page : -(-context // page)]
            at = torch.arange(first, max(first, context), device=q_ThD.device)
            hidden = at <= positions[lo:hi, None] - window
            hidden = torch.cat([hidden, hidden.new_zeros(hi - lo, hi - lo)], 1)  # the block sees itself, both ways
            for h in range(kv_heads):
                k, v = k_ThD[lo:hi, h], v_ThD[lo:hi, h]
                if len(at):
                    k = torch.cat([cache.k[layer].head(ids, h, q_ThD.dtype)[: len(at)], k])
                    v = torch.cat([cache.v[layer].head(ids, h, q_ThD.dtype)[: len(at)], v])
                q = q_ThD[lo:hi].unflatten(1, (kv_heads, -1))[:, h].transpose(0, 1)
                logits = (q @ k.t() * scale).masked_fill(hidden, -torch.inf)
                o_ThN[lo:hi, h] = (torch.softmax(logits, -1) @ v).transpose(0, 1).flatten(1)

    return run


def _markov_embedding(attrs: Attrs) -> RunKernel:
    def run(outs: Outs, ins: Ins, w: Weights, workspace: Tensor | None) -> None:
        outs[0].copy_(w.tensors["weight"][ins[0]])

    return run


def _markov_bias(attrs: Attrs) -> RunKernel:
    def run(outs: Outs, ins: Ins, w: Weights, workspace: Tensor | None) -> None:
        outs[0].copy_(torch.addmm(ins[0], ins[1], w.tensors["weight"].t()))

    return run


def _confidence(attrs: Attrs) -> RunKernel:
    with_markov = attrs["with_markov"]

    def run(outs: Outs, ins: Ins, w: Weights, workspace: Tensor | None) -> None:
        x = torch.cat([ins[0], ins[1]], 1) if with_markov else ins[0]
        outs[0].copy_(torch.sigmoid(x @ w.tensors["weight"][0] + w.tensors["bias"]))

    return run


DRAFT = {
    "concat": _concat,
    "draft_attention": _draft_attention,
    "markov_embedding": _markov_embedding,
    "markov_bias": _markov_bias,
    "confidence": _confidence,
}
