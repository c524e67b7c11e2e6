"""The routed experts: rows sorted by expert, one product per expert, everything between for all rows at once."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from m31.training.fakequant import Quantise, straight_through


@dataclass(frozen=True)
class ExpertSteps:
    """What happens around the two products.

    Args:
        enter: quantises the input of FC1, leave: the results of both products, middle: the input of FC2 (None: not).
        activate: from gate and up to the activation.
    """

    enter: Quantise | None
    leave: Quantise | None
    middle: Quantise | None
    activate: Callable[[Tensor, Tensor], Tensor]


class Added(Protocol):
    """What an adapter adds to the two products, for rows that are sorted by expert; `ends` are those of the experts."""

    def first(self, x_MC: Tensor, ends: list[int]) -> Tensor | None:
        """To gate and up side by side [M, 2I], of an input that is not quantised; None: nothing."""

    def second(self, act_MI: Tensor, ends: list[int]) -> Tensor | None:
        """To the result [M, C], of an activation that is not quantised; None: nothing."""


class _Grouped(torch.autograd.Function):
    """y[i] = x[i] W[e(i)]^T for rows that are sorted by expert."""

    @staticmethod
    def forward(ctx: Any, x_MC: Tensor, w_EOC: Tensor, ends: list[int]) -> Tensor:
        out = x_MC.new_empty(len(x_MC), w_EOC.shape[1])
        for expert, (start, end) in enumerate(itertools.pairwise([0, *ends])):
            if start < end:
                torch.mm(x_MC[start:end], w_EOC[expert].t(), out=out[start:end])
        ctx.save_for_backward(x_MC, w_EOC)
        ctx.ends = ends
        return out

    @staticmethod
    def backward(ctx: Any, *grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x_MC, w_EOC = ctx.saved_tensors
        g = grad[0].contiguous()
        dx, dw = torch.empty_like(x_MC), torch.zeros_like(w_EOC)
        for expert, (start, end) in enumerate(itertools.pairwise([0, *ctx.ends])):
            if start < end:
                torch.mm(g[start:end], w_EOC[expert], out=dx[start:end])
                torch.mm(g[start:end].t(), x_MC[start:end], out=dw[expert])
        return dx, dw, None


def grouped(x_MC: Tensor, w_EOC: Tensor, ends: list[int]) -> Tensor:
    """y[i] = x[i] W[e(i)]^T for rows that are sorted by expert; expert e's rows end at `ends[e]`."""
    out: Tensor = _Grouped.apply(x_MC, w_EOC, ends)  # type: ignore[no-untyped-call]
    return out


class _Spread(torch.autograd.Function):
    """Row i of the result is row `order[i] // k` of x: its gradient is a sum of k gathered rows, without a scatter."""

    @staticmethod
    def forward(ctx: Any, x_NC: Tensor, order: Tensor, k: int) -> Tensor:
        ctx.save_for_backward(order)
        ctx.k = k
        return x_NC.index_select(0, order // k)

    @staticmethod
    def backward(ctx: Any, *grad: Tensor) -> tuple[Tensor, None, None]:
        (order,) = ctx.saved_tensors
        return grad[0].index_select(0, _inverse(order)).view(-1, ctx.k, grad[0].shape[1]).sum(1), None, None


class _Unsort(torch.autograd.Function):
    """The rows of y in the order from before sorting."""

    @staticmethod
    def forward(ctx: Any, y_MC: Tensor, order: Tensor) -> Tensor:
        ctx.save_for_backward(order)
        return y_MC.index_select(0, _inverse(order))

    @staticmethod
    def backward(ctx: Any, *grad: Tensor) -> tuple[Tensor, None]:
        (order,) = ctx.saved_tensors
        return grad[0].index_select(0, order), None


def _inverse(order: Tensor) -> Tensor:
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))


def mixture(
    h_NC: Tensor,
    ids_NK: Tensor,
    weights_NK: Tensor,
    w13: Tensor,
    w2: Tensor,
    steps: ExpertSteps,
    added: Added | None = None,
) -> Tensor:
    """sum over the chosen experts of weight * expert(h) (MODEL.md §2.5): [N, C].

    Args:
        h_NC: input, before it is quantised.
        ids_NK, weights_NK: chosen experts, and their weights, into which the routed factor is folded.
        w13: [E, 2I, C], gate above up; w2: [E, C, I].
        steps: what is rounded in between.
        added: an adapter of these experts.
    """
    flat, k = ids_NK.flatten(), ids_NK.shape[1]
    order = torch.argsort(flat, stable=True)
    ends = torch.bincount(flat, minlength=len(w13)).cumsum(0).tolist()
    x = _spread(straight_through(h_NC, steps.enter), order, k)
    both = straight_through(grouped(x, w13, ends), steps.leave)
    if added is not None:
        both = _sum(both, added.first(_spread(h_NC, order, k), ends))
    gate, up = both.chunk(2, -1)
    act = steps.activate(gate, up)
    y = straight_through(grouped(straight_through(act, steps.middle), w2, ends), steps.leave)
    if added is not None:
        y = _sum(y, added.second(act, ends))
    out: Tensor = _Unsort.apply(y, order)  # type: ignore[no-untyped-call]
    return (out.view(-1, k, out.shape[1]) * weights_NK[..., None]).sum(1)


def _spread(x_NC: Tensor, order: Tensor, k: int) -> Tensor:
    out: Tensor = _Spread.apply(x_NC, order, k)  # type: ignore[no-untyped-call]
    return out


def _sum(x: Tensor, more: Tensor | None) -> Tensor:
    return x if more is None else x + more
