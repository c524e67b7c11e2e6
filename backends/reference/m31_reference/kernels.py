"""All ops of the text model except attention, in plain torch.

Each maker takes the op's attributes and returns `run(outs, ins, weights, workspace)`. Outputs are written in place;
inputs and outputs may be strided views. Formulas and sources are in the op declarations (m31.ops).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from m31.graph import RunKernel
from m31.ops import Attrs

if TYPE_CHECKING:
    from m31_reference.weights import Weights

Maker = Callable[[Attrs], RunKernel]
Outs = Sequence[Any]
Ins = Sequence[Any]


def _embedding(attrs: Attrs) -> RunKernel:
    def run(outs: Outs, ins: Ins, w: Weights, workspace: Tensor | None) -> None:
        outs[0].copy_(w.tensors["weight"][ins[0]])

    return run


def _normalise(x: Tensor, w: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * (1.0 + w)


def _gemma_rmsnorm(attrs: Attrs) -> RunKernel:
    eps = attrs["eps"]

    def run(outs: Outs, ins: Ins, w: Weights, workspace: Tensor | None) -> None:
        outs[0].copy_(_normalise(ins[0], w.tensors["weight"], eps))

    return run


def _head_rmsnorm(attrs: Attrs) -> RunKernel:
    eps, heads = attrs["eps"], attrs["heads"]

    def run(outs: Outs, ins: Ins, w: Weights, workspace: Tensor | None) -> None:
        x_ThD = ins[0].unflatten(1, (heads, -1))
        outs[0].copy_(_normalise(x_ThD, w.tensors["weight"], eps))

    return run


def _rope_table(attrs: Attrs) -> RunKernel:
    theta, dim = attrs["theta"], attrs["rotary_dim"]

    def run(outs: Outs, ins: Ins, w: None, workspace: Tensor | None) -> None:
        # Every step rounds to float32, whatever the compute dtype: MODEL.md §2.3 defines the table so.
        exponent = torch.arange(0, dim, 2, dtype=torch.float32) / dim
        # The power is the nearest float32: torch's own differs by an ulp for some widths, and with the machine.
        power = torch.pow(torch.tensor(theta).double(), exponent.double()).float()
        inv_freq = (1.0 / power).to(ins[0].device)
        angle = ins[0].to(torch.float32)[:, None] * inv_freq
        outs[0].copy_(angle.cos())
        outs[1].copy_(angle.sin())

    return run


def _rope(attrs: Attrs) -> RunKernel:
    def run(outs: Outs, ins: Ins, w: None, workspace: Tensor | None) -> None:
        x, cos, sin = ins[0], ins[1][:, None, :], ins[2][:, None, :]
        half = cos.shape[-1]
        a, b = x[..., :half], x[..., half : 2 * half]
        outs[0][..., :half] = a * cos - b * sin
        outs[0][..., half : 2 * half] = b * cos + a * sin
        outs[0][..., 2 * half :] = x[..., 2 * half :]

    return run


def _round_bf16(attrs: Attrs) -> RunKernel:
    def run(outs: Outs, ins: Ins, w: None, workspace: Tensor | None) -> None:
        outs[0].copy_(ins[0].to(torch.bfloat16))

    return run


def _linear(attrs: Attrs) -> RunKernel:
    def run(outs: Outs, ins: Ins, w: Weights, workspace: Tensor | None) -> None:
        torch.mm(ins[0], w.tensors["weight"].t(), out=outs[0])

    return run


def _kv_write(attrs: Attrs) -> RunKernel:
    layer = attrs["layer"]

    def run(outs: Outs, ins: Ins, w: None, workspace: Tensor | None) -> None:
        cache, k_ThD, v_TC, slots = ins
        page, offset, keep = _places(slots, cache.page_tokens)
        v_ThD = v_TC.unflatten(1, k_ThD.shape[1:])
        cache.k[layer].write(page, offset, k_ThD if keep is None else k_ThD[keep])
        cache.v[layer].write(page, offset, v_ThD if keep is None else v_ThD[keep])

    return run


def _index_write(attrs: Attrs) -> RunKernel:
    layer = attrs["layer"]

    def run(outs: Outs, ins: Ins, w: None, workspace: Tensor | None) -> None:
        cache, k_T1D, slots = ins
        page, offset, keep = _places(slots, cache.page_tokens)
        cache.index[layer].write(page, offset, k_T1D if keep is None else k_T1D[keep])

    return run


def _places(slots: Tensor, page_tokens: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """Page and offset of every slot; the third is the mask of real slots if some are padding."""
    keep = None
    if bool((slots < 0).any()):
        keep = slots >= 0
        slots = slots[keep]
    return slots // page_tokens, slots % page_tokens, keep


def _router(attrs: Attrs) -> RunKernel:
    topk = attrs["topk"]

    def run(outs: Outs, ins: Ins, w: Weights, workspace: Tensor | None) -> None:
        score = torch.sigmoid(ins[0] @ w.tensors["weight"].t())
        # A stable sort lets the lower id win a tie; torch.topk leaves that open.
        order = torch.sort(score + w.tensors["bias"], dim=-1, descending=True, stable=True).indices[:, :topk]
        chosen = score.gather(1, order)
        outs[0].copy_(order)
        outs[1].copy_(chosen / chosen.sum(-1, keepdim=True))

    return run


def activate(gate: Tensor, up: Tensor, alpha: float, beta: float, limit: float) -> Tensor:
    """SwiGLU-OAI of gate and up (MODEL.md §2.5), elementwise; no lower clamp on the gate."""
    gate = gate.clamp(max=limit)
    return (up.clamp(min=-limit, max=limit) + beta) * gate * torch.sigmoid(alpha * gate)


def _swiglu_oai(attrs: Attrs) -> RunKernel:
    params = (attrs["alpha"], attrs["beta"], attrs["limit"])

    def run(outs: Outs, ins: Ins, w: None, workspace: Tensor | None) -> None:
        outs[0].copy_(activate(ins[0], ins[1], *params))

    return run


def _experts(attrs: Attrs) -> RunKernel:
    params = (attrs["alpha"], attrs["beta"], attrs["limit"])
    factor = attrs["routed_scaling_factor"]

    def run(outs: Outs, ins: Ins, w: Weights, workspace: Tensor | None) -> None:
        h_TC, ids_TK, weights_TK = ins
        out = outs[0].zero_()
        for expert in ids_TK.unique().tolist():
            token, slot = (ids_TK == expert).nonzero(as_tuple=True)
            x = h_TC[token]
            gate = x @ w.tensors[f"w1.{expert}"].t()
            up = x @ w.tensors[f"w3.{expert}"].t()
            y = activate(gate, up, *params) @ w.tensors[f"w2.{expert}"].t()
            out.index_add_(0, token, y * (weights_TK[token, slot] * factor)[:, None])

    return run


def low_rank(w: Weights, slot: str, x: Tensor, rounded: Callable[[Tensor], Tensor] | None = None) -> Tensor | None:
    """B (A x) of the adapter of a slot, the input and both results through `rounded`; None where it has none."""
    a = w.tensors.get(f"lora_A.{slot}")
    if a is None:
        return None
    b = w.tensors[f"lora_B.{slot}"]
    if rounded is None:
        return x @ a.t() @ b.t()
    return rounded(rounded(rounded(x) @ a.t()) @ b.t())


def _lora_experts(attrs: Attrs) -> RunKernel:
    params = (attrs["alpha"], attrs["beta"], attrs["limit"])
    factor = attrs["routed_scaling_factor"]

    def product(w: Weights, slot: str, x: Tensor) -> Tensor:
        y = x @ w.tensors[slot].t()
        low = low_rank(w, slot, x)
        return y if low is None else y + low

    def run(outs: Outs, ins: Ins, w: Weights, workspace: Tensor | None) -> None:
        h_TC, ids_TK, weights_TK = ins
        out = outs[0].zero_()
        for expert in ids_TK.unique().tolist():
            token, slot = (ids_TK == expert).nonzero(as_tuple=True)
            x = h_TC[token]
            middle = activate(product(w, f"w1.{expert}", x), product(w, f"w3.{expert}", x), *params)
            y = product(w, f"w2.{expert}", middle)
            out.index_add_(0, token, y * (weights_TK[token, slot] * factor)[:, None])

    return run


def _lora_logits(attrs: Attrs) -> RunKernel:
    def run(outs: Outs, ins: Ins, w: Weights, workspace: Tensor | None) -> None:
        torch.add(ins[0], ins[1] @ w.tensors["weight"].t(), out=outs[0])

    return run


def _add(attrs: Attrs) -> RunKernel:
    def run(outs: Outs, ins: Ins, w: None, workspace: Tensor | None) -> None:
        torch.add(ins[0], ins[1], out=outs[0])

    return run


def _gather_rows(attrs: Attrs) -> RunKernel:
    def run(outs: Outs, ins: Ins, w: None, workspace: Tensor | None) -> None:
        outs[0].copy_(ins[0][ins[1]])

    return run


KERNELS: dict[str, Maker] = {
    "embedding": _embedding,
    "gemma_rmsnorm": _gemma_rmsnorm,
    "head_rmsnorm": _head_rmsnorm,
    "rope_table": _rope_table,
    "rope": _rope,
    "round_channels": _round_bf16,
    "round_heads": _round_bf16,
    "linear": _linear,
    "lm_head": _linear,
    "kv_write": _kv_write,
    "index_write": _index_write,
    "router": _router,
    "experts": _experts,
    "swiglu_oai": _swiglu_oai,
    "add": _add,
    "gather_rows": _gather_rows,
}

ADAPTER: dict[str, Maker] = {"lora_experts": _lora_experts, "lora_logits": _lora_logits}
