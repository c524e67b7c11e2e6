"""All ops of the text model except attention, in float32.

Each kernel is `run(attrs, outs, ins, w)`: outputs are written in place, `w` holds the op's weights by slot, and arrays
may be strided views. Formulas are in the docstrings of the declarations, `m31.ops.ALL[name].doc`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from m31.ops import Attrs
from m31_numpy.attention import ATTENTION
from m31_numpy.codes import Array, from_bf16, to_bf16

Weights = Mapping[str, Array]
Run = Callable[[Attrs, Sequence[Any], Sequence[Any], Weights], None]


def embedding(attrs: Attrs, outs: Sequence[Any], ins: Sequence[Any], w: Weights) -> None:
    """Rows of the table, by token."""
    outs[0][...] = w["weight"][ins[0]]


def gather_rows(attrs: Attrs, outs: Sequence[Any], ins: Sequence[Any], w: Weights) -> None:
    """The rows that get logits."""
    outs[0][...] = ins[0][ins[1]]


def add(attrs: Attrs, outs: Sequence[Any], ins: Sequence[Any], w: Weights) -> None:
    """The residual sum."""
    np.add(ins[0], ins[1], out=outs[0])


def linear(attrs: Attrs, outs: Sequence[Any], ins: Sequence[Any], w: Weights) -> None:
    """x W^T; also the head."""
    np.matmul(ins[0], w["weight"].T, out=outs[0])


def gemma_rmsnorm(attrs: Attrs, outs: Sequence[Any], ins: Sequence[Any], w: Weights) -> None:
    """Root mean square norm, the weight stored around zero."""
    outs[0][...] = _normalised(ins[0], w["weight"], attrs["eps"])


def head_rmsnorm(attrs: Attrs, outs: Sequence[Any], ins: Sequence[Any], w: Weights) -> None:
    """The same over each head, all heads with one weight."""
    outs[0][...] = _normalised(ins[0].reshape(outs[0].shape), w["weight"], attrs["eps"])


def _normalised(x: Array, weight: Array, eps: float) -> Array:
    rms: Array = np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(eps))
    return x / rms * (np.float32(1) + weight)


def rope_table(attrs: Attrs, outs: Sequence[Any], ins: Sequence[Any], w: Weights) -> None:
    """Cosine and sine of position times frequency."""
    # The table is defined in float32, rounded at every step: first the power, then its reciprocal, then the angle.
    exponent = np.arange(0, attrs["rotary_dim"], 2, dtype=np.float32) / np.float32(attrs["rotary_dim"])
    power = np.power(float(np.float32(attrs["theta"])), exponent.astype(np.float64)).astype(np.float32)
    angle = ins[0].astype(np.float32)[:, None] * (np.float32(1) / power)
    outs[0][...] = np.cos(angle.astype(np.float64))
    outs[1][...] = np.sin(angle.astype(np.float64))


def rope(attrs: Attrs, outs: Sequence[Any], ins: Sequence[Any], w: Weights) -> None:
    """Rotate channel pairs (d, d + half); the rest passes."""
    x, cos, sin = ins[0], ins[1][:, None], ins[2][:, None]
    half = cos.shape[-1]
    a, b = x[..., :half], x[..., half : 2 * half]
    outs[0][..., :half] = a * cos - b * sin
    outs[0][..., half : 2 * half] = b * cos + a * sin
    outs[0][..., 2 * half :] = x[..., 2 * half :]


def round_bf16(attrs: Attrs, outs: Sequence[Any], ins: Sequence[Any], w: Weights) -> None:
    """The nearest bfloat16 value, in float32."""
    outs[0][...] = from_bf16(to_bf16(ins[0]))


def kv_write(attrs: Attrs, outs: Sequence[Any], ins: Sequence[Any], w: Weights) -> None:
    """Store this step's keys and values."""
    pages, k, v, slots = ins
    pages.write(attrs["layer"], "k", slots, k)
    pages.write(attrs["layer"], "v", slots, v.reshape(k.shape))


def index_write(attrs: Attrs, outs: Sequence[Any], ins: Sequence[Any], w: Weights) -> None:
    """Store this step's index keys, which have one head."""
    pages, k, slots = ins
    pages.write(attrs["layer"], "index", slots, k[:, 0])


def router(attrs: Attrs, outs: Sequence[Any], ins: Sequence[Any], w: Weights) -> None:
    """Top-k of sigmoid plus bias; weights from the sigmoid alone."""
    score = _sigmoid(ins[0] @ w["weight"].T)
    # Stable: of equal scores the lower id comes first.
    ids = np.argsort(-(score + w["bias"]), axis=1, kind="stable")[:, : attrs["topk"]]
    chosen = np.take_along_axis(score, ids, axis=1)
    outs[0][...] = ids
    outs[1][...] = chosen / chosen.sum(axis=1, keepdims=True)


def swiglu_oai(attrs: Attrs, outs: Sequence[Any], ins: Sequence[Any], w: Weights) -> None:
    """The gated activation."""
    outs[0][...] = _activated(ins[0], ins[1], attrs)


def experts(attrs: Attrs, outs: Sequence[Any], ins: Sequence[Any], w: Weights) -> None:
    """Expert by expert, over the tokens that chose it."""
    h, ids, weights = ins
    total = np.zeros(h.shape, np.float32)
    for expert in np.unique(ids):
        token, choice = np.nonzero(ids == expert)
        x = h[token]
        middle = _activated(x @ w[f"w1.{expert}"].T, x @ w[f"w3.{expert}"].T, attrs)
        share = weights[token, choice] * np.float32(attrs["routed_scaling_factor"])
        np.add.at(total, token, (middle @ w[f"w2.{expert}"].T) * share[:, None])
    outs[0][...] = total


def _activated(gate: Array, up: Array, attrs: Attrs) -> Array:
    alpha, beta, limit = (np.float32(attrs[name]) for name in ("alpha", "beta", "limit"))
    gate = np.minimum(gate, limit)  # no lower clamp on the gate
    return (np.clip(up, -limit, limit) + beta) * gate * _sigmoid(alpha * gate)


def _sigmoid(x: Array) -> Array:
    """Accurate for both signs, and without overflow."""
    e = np.exp(-np.abs(x))
    return np.where(x >= 0, np.float32(1), e) / (np.float32(1) + e)


KERNELS: dict[str, Run] = {
    "embedding": embedding,
    "gather_rows": gather_rows,
    "add": add,
    "linear": linear,
    "lm_head": linear,
    "gemma_rmsnorm": gemma_rmsnorm,
    "head_rmsnorm": head_rmsnorm,
    "rope_table": rope_table,
    "rope": rope,
    "round_channels": round_bf16,
    "round_heads": round_bf16,
    "kv_write": kv_write,
    "index_write": index_write,
    "router": router,
    "swiglu_oai": swiglu_oai,
    "experts": experts,
    **ATTENTION,
}
