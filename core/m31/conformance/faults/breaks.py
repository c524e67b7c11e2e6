"""The small vocabulary in which faults are told: changed inputs, outputs, attributes, weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from m31.conformance.faults.fault import Break, Call
from m31.conformance.weights import Held, HeldQuantised
from m31.formats import mxfp8, nvfp4
from m31.graph import OpInstance
from m31.sdk.backend import LazyTensor

Change = Callable[[Tensor], Tensor]
ALWAYS = ("decode", "verify", "mixed")


def after(op: str, change: Callable[[Sequence[Any]], None], kinds: tuple[str, ...] = ALWAYS) -> Break:
    """The right result, then changed in place."""

    def run(call: Call) -> None:
        call.real()
        change(call.outs)

    return Break(op=op, run=run, kinds=kinds)


def result(op: str, change: Change, at: int = 0, kinds: tuple[str, ...] = ALWAYS) -> Break:
    """One output replaced by something made of it."""
    return after(op, lambda outs: outs[at].copy_(change(outs[at].clone())), kinds)


def inputs(op: str, kinds: tuple[str, ...] = ALWAYS, **changes: Change) -> Break:
    """The right kernel on other inputs, by the names of the signature."""

    def run(call: Call) -> None:
        names = [arg.name for arg in call.op.spec.inputs if arg.kind != "weight"]
        call.real(
            [
                changes[name](value.clone()) if name in changes else value
                for name, value in zip(names, call.ins, strict=True)
            ]
        )

    return Break(op=op, run=run, kinds=kinds)


def instead(op: str, run: Callable[[Call], None], kinds: tuple[str, ...] = ALWAYS) -> Break:
    """Something else in the place of the kernel."""
    return Break(op=op, run=run, kinds=kinds)


def attrs(op: str, **changes: Callable[[Any], Any]) -> Break:
    """The kernel for other attributes."""
    return Break(
        op=op, attrs=lambda given: {**given, **{name: change(given[name]) for name, change in changes.items()}}
    )


def other(instance: OpInstance, **changes: Any) -> OpInstance:
    """The instance with other attributes."""
    return replace(instance, attrs={**instance.attrs, **changes})


def values(op: str, change: Change, slot: str = "", honest: bool = False) -> Break:
    """Other plain weights in all slots, or in those that start so; the handle tells of it, or does not."""

    def weights(name: str, slots: Mapping[str, LazyTensor]) -> LazyTensor:
        tensor = slots[name]
        if tensor.format != "plain" or not name.startswith(slot):
            return tensor
        return Held(tensor.name, change(tensor.load().clone()))

    return Break(op=op, weights=weights, honest=honest)


def stored(op: str, form: str, honest: bool = False, **changes: Change) -> Break:
    """Other stored tensors of quantised weights, by role."""

    def weights(name: str, slots: Mapping[str, LazyTensor]) -> LazyTensor:
        tensor = slots[name]
        if tensor.format != form:
            return tensor
        parts = {role: part.load().clone() for role, part in tensor.parts().items()}
        for role, change in changes.items():
            parts[role] = change(parts[role])
        return quantised(tensor.name, form, parts)

    return Break(op=op, weights=weights, honest=honest)


def quantised(name: str, form: str, parts: dict[str, Tensor]) -> HeldQuantised:
    """A quantised weight of these stored tensors."""
    if form == "mxfp8":
        value = mxfp8.decode(parts["codes"], parts["scale"])
    else:
        value = nvfp4.decode(parts["packed"], parts["scale"], parts["global_scale"])
    return HeldQuantised(name, value, form, parts)


def slots(op: str, change: Callable[[str, Mapping[str, LazyTensor]], LazyTensor]) -> Break:
    """Tensors of an op exchanged for each other; the handle tells of the right ones."""
    return Break(op=op, weights=change)


def in_bf16(x: Tensor) -> Tensor:
    """Rounded to BF16."""
    return x.bfloat16().to(x.dtype)


def in_e4m3(x: Tensor) -> Tensor:
    """Rounded to E4M3 with one scale for each row."""
    scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 448
    return (x / scale).to(torch.float8_e4m3fn).to(x.dtype) * scale


def when_square(x: Tensor) -> Tensor:
    """The first two axes exchanged where that cannot be seen in the shape."""
    return x.transpose(0, 1) if x.dim() > 2 and x.shape[0] == x.shape[1] else x


def page_of(call: Call) -> int:
    """Tokens of a page of the call's cache."""
    cache = next(x for x, arg in zip(call.ins, flowing(call), strict=True) if arg.kind == "state")
    spec = cache.layout.inner.spec if hasattr(cache.layout, "inner") else cache.layout.spec
    return int(spec.page_tokens)


def flowing(call: Call) -> list[Any]:
    """The inputs that a kernel gets, in order."""
    return [arg for arg in call.op.spec.inputs if arg.kind != "weight"]


def identity(table: Tensor) -> Tensor:
    """Physical pages in the order of the logical ones."""
    return torch.where(table < 0, table, torch.arange(table.numel(), device=table.device).view(table.shape) % 3)


def first_table(table: Tensor) -> Tensor:
    """The first sequence's pages for all, where it has as many."""
    return torch.where((table < 0) | (table[:1] < 0), table, table[:1])


def of_head_0(x: Tensor) -> Tensor:
    """The first head's for all."""
    return x[:, :1].expand_as(x).clone()


def last_dropped(blocks: Tensor) -> Tensor:
    """The last of two blocks and more is left out: the partly filled one."""
    count = (blocks >= 0).sum(-1, keepdim=True)
    at = torch.arange(blocks.shape[-1], device=blocks.device)
    return torch.where((at == count - 1) & (count > 1), -1, blocks)
