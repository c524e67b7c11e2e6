"""Kernels of a named arithmetic that rounds activations (MODEL.md §2.5, §3.1, §3.2, §3.4).

Each kernel quantises and dequantises what the hardware would quantise, multiplies in the compute dtype, and rounds to
BF16 what the hardware writes in BF16. Weights are the dequantised ones, after the arithmetic's transform if it has one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from m31.formats import fp8, mxfp8, nvfp4
from m31.formats.arithmetic import ArithmeticSpec
from m31.graph import Arithmetic, OpInstance, Refusal, RunKernel
from m31.ops import StateType
from m31_reference.attention import ATTENTION
from m31_reference.kernels import activate, low_rank

if TYPE_CHECKING:
    from m31_reference.weights import Weights

Outs = Sequence[Any]
Ins = Sequence[Any]
Quantise = Callable[..., Tensor]
_GROUPS = {"mxfp8": mxfp8.GROUP, "nvfp4-token": nvfp4.GROUP, "nvfp4-static": nvfp4.GROUP}
_DYNAMIC: dict[str | None, Quantise] = {"mxfp8": mxfp8.quantise, "nvfp4-token": nvfp4.quantise_per_token}
_READERS = ("block_scores", "sparse_attention", "dense_attention")


def emulated(
    op: OpInstance, spec: ArithmeticSpec, compute: str, *, plain: bool
) -> tuple[RunKernel, Arithmetic] | Refusal | None:
    """How an op is computed under `spec`, why it is not, or None where the arithmetic leaves the op exact.

    Args:
        op: the instance.
        spec: the arithmetic.
        compute: name of the compute dtype, in which products are formed and summed.
        plain: this is a projection that a quantised checkpoint stores plain: its product is a BF16 one.
    """
    name = op.spec.name
    if name == "linear" and spec.linear_activation is not None:
        if plain or spec.linear_activation == "bfloat16":
            return _plain_linear, Arithmetic(f"bfloat16*{compute}", compute, "bfloat16")
        width = op.inputs[0].shape[1]  # type: ignore[union-attr]
        return _refused(spec.linear_activation, int(width), "inputs") or (
            _linear,
            Arithmetic(f"{spec.linear_activation}*{compute}", compute, "bfloat16"),
        )
    if name in ("experts", "lora_experts") and (spec.expert_input is not None or spec.expert_middle is not None):
        decl = op.weights
        assert decl is not None
        inner, width = decl.slots["w1.0"].shape
        operands = ", ".join(f"{kind or compute}*{compute}" for kind in (spec.expert_input, spec.expert_middle))
        return (
            _refused(spec.expert_input, width, "inputs")
            or _refused(spec.expert_middle, inner, "inner channels")
            or (_experts(op, spec), Arithmetic(operands, compute, compute))
        )
    if name in _READERS and (spec.query, spec.kv_read, spec.probability) != (None, "exact", None):
        operands = f"{spec.query or compute}*{_read(op, spec, compute)}"
        if spec.probability and name != "block_scores":
            operands += f", {spec.probability}*{operands.partition('*')[2]}"
        run = ATTENTION[name](op.attrs, spec.probability)
        return run if spec.query != "e4m3" else _e4m3_query(run), Arithmetic(operands, compute, compute)
    return None


def _read(op: OpInstance, spec: ArithmeticSpec, compute: str) -> str:
    """The operand that attention multiplies with: only NVFP4 pages are read in a way of their own; E4M3 ones are E4M3.

    A graph that was traced without pages is taken to have those that the arithmetic is made for.
    """
    state = next(value for value in op.inputs if isinstance(value, StateType))
    stored = state.index_format if op.spec.name == "block_scores" else state.kv_format
    if stored == "fp8":
        return "e4m3"
    return spec.kv_read if spec.kv_read != "exact" and stored in ("", "nvfp4") else compute


def _refused(kind: str | None, size: int, what: str) -> Refusal | None:
    if kind not in _GROUPS or size % _GROUPS[kind] == 0:
        return None
    return Refusal(f"{kind} needs a multiple of {_GROUPS[kind]} {what}, this op has {size}")


def _bf16(x: Tensor) -> Tensor:
    return x.to(torch.bfloat16).to(x.dtype)


def _through(quantise: Quantise, x: Tensor) -> Tensor:
    """Quantised and dequantised values of `x`, in its dtype. Quantisers are defined on float32; what is not finite
    becomes NaN and is refused at the logits."""
    return quantise(x.float(), nonfinite="propagate").to(x.dtype)


def _linear(outs: Outs, ins: Ins, w: Weights, workspace: Tensor | None) -> None:
    outs[0].copy_(_bf16(_through(mxfp8.quantise, ins[0]) @ w.tensors["weight"].t()))


def _plain_linear(outs: Outs, ins: Ins, w: Weights, workspace: Tensor | None) -> None:
    outs[0].copy_(_bf16(_bf16(ins[0]) @ w.tensors["weight"].t()))


def _experts(op: OpInstance, spec: ArithmeticSpec) -> RunKernel:
    """FC1 on the quantised input (a BF16 one was rounded by the node before), its result in BF16, the activation in the
    compute dtype, FC2 on the quantised activation, its result in BF16, the weighted sum in the compute dtype.

    An adapter takes what was not quantised, as BF16 products like those of a plain projection, and is added after."""
    attrs = op.attrs
    params = (attrs["alpha"], attrs["beta"], attrs["limit"])
    factor = attrs["routed_scaling_factor"]

    def added(y: Tensor, w: Weights, slot: str, x: Tensor) -> Tensor:
        low = low_rank(w, slot, x, _bf16)
        return y if low is None else y + low

    def run(outs: Outs, ins: Ins, w: Weights, workspace: Tensor | None) -> None:
        h_TC, ids_TK, weights_TK = ins
        plain_TC = h_TC
        if spec.expert_input in _DYNAMIC:
            h_TC = _through(_DYNAMIC[spec.expert_input], h_TC)
        out = outs[0].zero_()
        for expert in ids_TK.unique().tolist():
            token, slot = (ids_TK == expert).nonzero(as_tuple=True)
            x = h_TC[token]
            given = plain_TC[token]
            gate = added(_bf16(x @ w.tensors[f"w1.{expert}"].t()), w, f"w1.{expert}", given)
            up = added(_bf16(x @ w.tensors[f"w3.{expert}"].t()), w, f"w3.{expert}", given)
            middle = given = activate(gate, up, *params)
            if spec.expert_middle == "nvfp4-static":
                scale = w.input_scale[f"w2.{expert}"]
                middle = nvfp4.quantise_static(middle.float(), scale, nonfinite="propagate").to(middle.dtype)
            elif spec.expert_middle == "bfloat16":
                middle = _bf16(middle)
            elif spec.expert_middle is not None:
                middle = _through(mxfp8.quantise, middle)
            y = added(_bf16(middle @ w.tensors[f"w2.{expert}"].t()), w, f"w2.{expert}", given)
            out.index_add_(0, token, y * (weights_TK[token, slot] * factor)[:, None])

    return run


def _e4m3_query(attend: RunKernel) -> RunKernel:
    """Query and index query cast to E4M3 at unit scale, saturating; the node before rounded them to BF16 (§3.4)."""

    def run(outs: Outs, ins: Ins, w: None, workspace: Tensor | None) -> None:
        q_ThD = ins[0]
        rounded = fp8.decode(fp8.encode(q_ThD.float(), saturate=True), q_ThD.dtype)
        attend(outs, [rounded, *ins[1:]], w, workspace)

    return run
