"""Faults of ops without pages: norms, rotation, projections, rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from m31.conformance.faults.breaks import after, attrs, in_bf16, in_e4m3, inputs, instead, result, values, when_square
from m31.conformance.faults.fault import Break, Call, Fault
from m31.graph import Arithmetic

_TILE = 16


def fault(name: str, what: str, source: str, op: str, case: str, break_: Break) -> Fault:
    """A fault that an item of the op's cases catches."""
    return Fault(name=name, what=what, source=source, level="L1", subject=op, catches=f"L1/{op}/{case}*", break_=break_)


def _over_all_heads(call: Call) -> None:
    x = call.ins[0]
    w = next(iter(call.weights.dequantise().values())).to(x.dtype)
    scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + call.op.attrs["eps"])
    call.outs[0].copy_((x * scale).unflatten(1, (call.op.attrs["heads"], -1)) * (1 + w))


def _interleaved(call: Call) -> None:
    x, cos, sin = call.ins
    n = 2 * cos.shape[-1]
    a, b, c, s = x[..., 0:n:2], x[..., 1:n:2], cos[:, None], sin[:, None]
    out = x.clone()
    out[..., 0:n:2], out[..., 1:n:2] = a * c - b * s, b * c + a * s
    call.outs[0].copy_(out)


def _all_channels(call: Call) -> None:
    x, cos, sin = call.ins
    more = x.shape[-1] // 2 // max(1, cos.shape[-1])
    call.real([x, cos.repeat(1, more), sin.repeat(1, more)])


def _last_half(call: Call) -> None:
    """The pass-through channels are taken for the rotated ones."""
    x, cos, sin = call.ins
    n = 2 * cos.shape[-1]
    call.real([x.roll(n - x.shape[-1], -1), cos, sin])
    call.outs[0].copy_(call.outs[0].clone().roll(x.shape[-1] - n, -1))


def _table_in_double(call: Call) -> None:
    dim = call.op.attrs["rotary_dim"]
    inv = 1.0 / call.op.attrs["theta"] ** (torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    angle = call.ins[0].double()[:, None] * inv.to(call.ins[0].device)
    call.outs[0].copy_(angle.cos())
    call.outs[1].copy_(angle.sin())


def _accumulated_in_bf16(call: Call) -> None:
    x = call.ins[0]
    w = next(iter(call.weights.dequantise().values())).to(x.dtype)
    total = torch.zeros(call.outs[0].shape, dtype=torch.bfloat16, device=x.device)
    for start in range(0, x.shape[1], 64):
        total += (x[:, start : start + 64] @ w[:, start : start + 64].t()).bfloat16()
    call.outs[0].copy_(total)


def _first_tile(call: Call) -> None:
    call.run([call.outs[0][:_TILE]], [call.ins[0][:_TILE]], call.weights, call.workspace)


def _taken_for_contiguous(call: Call) -> None:
    x = call.ins[0]
    call.real([x.as_strided(x.shape, (x.shape[1], 1))])


def _into_the_input(call: Call) -> None:
    call.real()
    call.ins[0].mul_(2)


def _past_the_end(outs: Any) -> None:
    x = outs[0]
    last = sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
    if x.numel():
        torch.as_strided(x, (1,), (1,), x.storage_offset() + last + 1).zero_()


def _one_element(outs: Any) -> None:
    if outs[0].numel():
        outs[0][-1, -1] += 0.25


def _rows(change: Callable[[Call], Tensor]) -> Callable[[Call], None]:
    return lambda call: call.real([call.ins[0], change(call)])


def _coarse(call_kernel: Any, op: Any) -> Any:
    from dataclasses import replace

    return replace(call_kernel, arithmetic=Arithmetic("float32", "e2m1", "float32"))


NORMS = (
    fault(
        "norm-without-one",
        "the norm multiplies by w instead of 1 + w",
        "DESIGN §7",
        "gemma_rmsnorm",
        "one",
        values("gemma_rmsnorm", lambda w: w - 1),
    ),
    fault(
        "norm-two-ones",
        "1 is added to a weight to which it had been added when it was stored",
        "DESIGN §7",
        "gemma_rmsnorm",
        "one",
        values("gemma_rmsnorm", lambda w: w + 1),
    ),
    fault(
        "head-norm-without-one",
        "the norm of heads multiplies by w instead of 1 + w",
        "DESIGN §7",
        "head_rmsnorm",
        "one",
        values("head_rmsnorm", lambda w: w - 1),
    ),
    fault(
        "norm-other-eps",
        "eps is 1e-5, which other models have",
        "BUG-2",
        "gemma_rmsnorm",
        "tiny",
        attrs("gemma_rmsnorm", eps=lambda _: 1e-5),
    ),
    fault(
        "norm-in-bf16",
        "1 + w is rounded to BF16 before the product",
        "DESIGN §7",
        "gemma_rmsnorm",
        "one",
        values("gemma_rmsnorm", lambda w: in_bf16(1 + w.float()) - 1),
    ),
    fault(
        "head-norm-over-all-heads",
        "the mean is taken over all heads together, as M2's norm of queries and keys does",
        "BUG-17",
        "head_rmsnorm",
        "many",
        instead("head_rmsnorm", _over_all_heads),
    ),
)

ROTATION = (
    fault(
        "rope-interleaved",
        "neighbouring channels are a pair, instead of d and d + half",
        "BUG-16",
        "rope",
        "partial",
        instead("rope", _interleaved),
    ),
    fault(
        "rope-all-channels",
        "all channels of a head are rotated, although half of them pass",
        "BUG-13, BUG-16",
        "rope",
        "partial",
        instead("rope", _all_channels),
    ),
    fault(
        "rope-other-half",
        "the last channels are rotated, and the first ones pass",
        "DESIGN §7",
        "rope",
        "partial",
        instead("rope", _last_half),
    ),
    fault(
        "rope-backwards",
        "the rotation turns the other way",
        "DESIGN §7",
        "rope",
        "partial",
        inputs("rope", sin=lambda s: -s),
    ),
    fault(
        "rope-heads-for-tokens",
        "tokens and heads are exchanged where there are as many of both",
        "BUG-1",
        "rope",
        "full",
        inputs("rope", x=when_square),
    ),
    fault(
        "rope-theta-default",
        "theta is 10,000, whatever the configuration says",
        "BUG-2",
        "rope_table",
        "1e+07",
        attrs("rope_table", theta=lambda _: 1e4),
    ),
    fault(
        "rope-width-default",
        "frequencies are spread over the whole head instead of the rotated width",
        "BUG-14",
        "rope_table",
        "1e+07",
        instead("rope_table", lambda call: _wider_table(call)),
    ),
    fault(
        "rope-next-position",
        "the table is of the next position",
        "DESIGN §7",
        "rope_table",
        "1e+07",
        inputs("rope_table", positions=lambda p: p + 1),
    ),
    fault(
        "rope-in-double",
        "the table is computed in double precision, which is not what the model was trained with",
        "MODEL §2.3",
        "rope_table",
        "1e+07",
        instead("rope_table", _table_in_double),
    ),
    fault(
        "rope-positions-in-bf16",
        "positions are rounded to BF16 before the product",
        "DESIGN §7",
        "rope_table",
        "1e+07",
        inputs("rope_table", positions=lambda p: p.bfloat16().to(p.dtype)),
    ),
)


def _wider_table(call: Call) -> None:
    dim = call.op.attrs["rotary_dim"]
    exponent = torch.arange(0, dim, 2, dtype=torch.float32) / (2 * dim)
    angle = call.ins[0].float()[:, None] * (1.0 / call.op.attrs["theta"] ** exponent).to(call.ins[0].device)
    call.outs[0].copy_(angle.cos())
    call.outs[1].copy_(angle.sin())


def _zero_tail(x: Tensor) -> Tensor:
    x[:, x.shape[1] // _TILE * _TILE :] = 0
    return x


def _zero_last(x: Tensor) -> Tensor:
    x[:, -_TILE:] = 0
    return x


def _zero_row(x: Tensor) -> Tensor:
    x[-1:] = 0
    return x


def _zero_column(x: Tensor) -> Tensor:
    x[:, -1:] = 0
    return x


def _rotated_columns(x: Tensor) -> Tensor:
    x[:, :_TILE] = x[:, :_TILE].roll(1, 1)
    return x


PROJECTIONS = (
    fault(
        "linear-ragged-k",
        "what is left of K after its last whole tile of 16 is not added",
        "BUG-58",
        "linear",
        "ragged",
        inputs("linear", x=_zero_tail),
    ),
    fault(
        "linear-last-block", "the last 16 of K are not added", "A12", "linear", "long-k", inputs("linear", x=_zero_last)
    ),
    fault("linear-zero-row", "the last token's row is zero", "A12", "linear", "one", result("linear", _zero_row)),
    fault(
        "linear-zero-column", "the last output channel is zero", "A12", "linear", "one", result("linear", _zero_column)
    ),
    fault(
        "linear-rotated-columns",
        "sixteen output channels lie one place further",
        "A12, BUG-61",
        "linear",
        "one",
        result("linear", _rotated_columns),
    ),
    fault(
        "linear-one-element",
        "one element of the result is off by a quarter",
        "A12, BUG-121",
        "linear",
        "one",
        after("linear", _one_element),
    ),
    fault(
        "linear-accumulates-in-bf16",
        "sums are kept in BF16 between chunks of 64, and float32 is declared",
        "A12, BUG-122",
        "linear",
        "long-k",
        instead("linear", _accumulated_in_bf16),
    ),
    fault(
        "linear-quantises-unasked",
        "activations are rounded to E4M3, and float32 is declared",
        "A12",
        "linear",
        "one",
        inputs("linear", x=in_e4m3),
    ),
    fault(
        "linear-bf16-operands",
        "activations are rounded to BF16, and float32 is declared",
        "A12",
        "linear",
        "one",
        inputs("linear", x=in_bf16),
    ),
    fault(
        "linear-first-tile-only",
        "tokens after the sixteenth are not computed",
        "BUG-61",
        "linear",
        "tokens-17",
        instead("linear", _first_tile),
    ),
    fault(
        "linear-contiguous",
        "the strides of the input are not looked at",
        "A1",
        "linear",
        "",
        instead("linear", _taken_for_contiguous),
    ),
    fault(
        "linear-writes-its-input",
        "the input is used as scratch",
        "A14-6",
        "linear",
        "one",
        instead("linear", _into_the_input),
    ),
    fault(
        "linear-writes-past-the-end",
        "one element too many is written",
        "BUG-40",
        "linear",
        "one",
        after("linear", _past_the_end),
    ),
    fault(
        "linear-nothing",
        "the kernel does nothing at all",
        "BUG-97, BUG-119",
        "linear",
        "one",
        instead("linear", lambda call: None),
    ),
    fault(
        "linear-vague-declaration",
        "so coarse an accumulation is declared that zeros would pass",
        "BUG-119, A14-4",
        "linear",
        "one",
        Break(op="linear", kernel=_coarse),
    ),
    fault(
        "linear-tokens-shuffled",
        "rows come out in another order",
        "BUG-64",
        "linear",
        "ragged",
        result("linear", lambda y: y.roll(1, 0)),
    ),
    fault("head-in-bf16", "logits are rounded to BF16", "MODEL §2.1", "lm_head", "one", result("lm_head", in_bf16)),
    fault(
        "head-soft-cap",
        "logits are capped, as other models' are",
        "MODEL §2.1",
        "lm_head",
        "one",
        result("lm_head", lambda y: 30 * torch.tanh(y / 30)),
    ),
    fault(
        "head-of-the-row-before",
        "logits are those of the row before",
        "DESIGN §7",
        "lm_head",
        "ragged",
        inputs("lm_head", x=lambda x: x.roll(1, 0)),
    ),
    fault(
        "rows-off-by-one",
        "the rows before the asked ones are gathered",
        "DESIGN §7",
        "gather_rows",
        "last",
        instead("gather_rows", _rows(lambda call: (call.ins[1] - 1).clamp(min=0))),
    ),
    fault(
        "rows-ascending",
        "rows come out in ascending order, whatever was asked for",
        "DESIGN §7",
        "gather_rows",
        "",
        instead("gather_rows", _rows(lambda call: call.ins[1].sort().values)),
    ),
    fault(
        "rows-from-the-start",
        "the first rows are gathered, as many as were asked for",
        "DESIGN §7",
        "gather_rows",
        "last",
        instead("gather_rows", _rows(lambda call: torch.arange(len(call.ins[1])))),
    ),
    fault(
        "embedding-scaled",
        "embeddings are multiplied by the root of their width, as Gemma does",
        "MODEL §2.1",
        "embedding",
        "one",
        result("embedding", lambda x: x * x.shape[-1] ** 0.5),
    ),
    fault(
        "embedding-next-token",
        "the row after the token's is taken",
        "BUG-101",
        "embedding",
        "one",
        inputs("embedding", tokens=lambda t: (t - 1).clamp(min=0)),
    ),
    fault(
        "embedding-low-byte",
        "token ids are cut to their low bits",
        "BUG-63",
        "embedding",
        "many",
        inputs("embedding", tokens=lambda t: t & 15),
    ),
    fault(
        "residual-lost",
        "the sum is one of its terms",
        "DESIGN §7",
        "add",
        "one",
        instead("add", lambda call: call.outs[0].copy_(call.ins[1])),
    ),
    fault("residual-in-bf16", "the sum is rounded to BF16", "A12", "add", "one", result("add", in_bf16)),
    fault(
        "rounding-cuts",
        "BF16 is made by cutting bits off instead of rounding to nearest even",
        "BUG-50",
        "round_channels",
        "",
        inputs("round_channels", x=lambda x: (x.float().view(torch.int32) & -65536).view(torch.float32).to(x.dtype)),
    ),
    fault(
        "rounding-skipped",
        "values that are to be rounded pass as they are",
        "BUG-44",
        "round_heads",
        "",
        instead("round_heads", lambda call: call.outs[0].copy_(call.ins[0])),
    ),
)

DENSE = (*NORMS, *ROTATION, *PROJECTIONS)
