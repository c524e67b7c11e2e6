"""How far the result of each op may be from its definition, element by element, from the declared arithmetic.

Where an op is not a sum of products the bound of its parts is passed on, to first order and with absolute values. u is
the rounding of the accumulation, u_out that of the result, and unit(K) = c sqrt(K) u + rounding of operands, as in
`m31.conformance.bounds`:

    add, all_reduce   u_out |z| + u (|x| + |y|)
    norms             (u_out + unit(K) + 8 u) |x / rms| (1 + |w|): the mean, its root, the product
    rope              bound of a sum of two products; channels that are not rotated are exact
    rope_table        4 x 2^-24, whatever the compute dtype: the table is defined in float32
    swiglu_oai        (8 u (1 + |alpha g|) + u_out) (|u| + beta) |g| sigmoid: an exponential magnifies by its argument
    block_scores      that of the largest product of the block
    router            a score: unit(K) |h|.|w| / 4 + 4 u, the slope of a sigmoid being at most 1/4; ids may differ where
                      two scores are closer than that, and not equal
    lora_logits       a sum, and the logits that it is added to
    experts           gate and up as sums, passed on through the activation (`activated`), then w2 as a sum
    lora_experts      the same; of each product with an adapter, A and B as sums one after the other
    attention         logits as sums; a softmax passes an error d on as 2 d of each weight; values as a sum
    markov_bias       a sum of one product more
    confidence        the error of its sum, times the slope of a sigmoid

What lies between two products is an operand of the second and may be rounded as one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from m31.conformance.bounds import CONSTANT, F64, roundoff, unit
from m31.graph import Arithmetic
from m31.ops import Attrs
from m31.ops.moe import activation
from m31.ops.select import sequences

_LOWEST = -1.2784645427610738
"""Where x sigmoid(x) is lowest; it falls before and rises after."""
_DEFINITION = 2.0**-51
"""How far the definition's own sigmoid may be off: 1 + tanh cancels where it is small."""


@dataclass(frozen=True)
class Given:
    """One call: what the kernel was given, in float64, and how it computes.

    Args:
        attrs: of the op.
        args: its inputs in order; a weight by slot, a state as in `Case.state`.
        expected: what `naive` makes of them.
        arithmetic: as declared.
        format: of the data that it was given.
    """

    attrs: Attrs
    args: Sequence[Any]
    expected: Sequence[Any]
    arithmetic: Arithmetic
    format: str

    @property
    def u(self) -> float:
        """Of the accumulation."""
        return roundoff(self.arithmetic.accumulate)

    @property
    def out(self) -> float:
        """Of the result."""
        return roundoff(self.arithmetic.output)

    def unit(self, terms: int) -> float:
        """See `bounds.unit`."""
        return unit(self.arithmetic, terms, given=self.format)

    def inner(self, terms: int) -> float:
        """The same of a product of values that the kernel computed itself, in the accumulation's format."""
        return unit(self.arithmetic, terms, given=self.arithmetic.accumulate)

    @property
    def rounding(self) -> float:
        """Of values between two products: they are operands of what follows, and rounded as such."""
        return self.inner(1) - CONSTANT * self.u


def _add(g: Given) -> tuple[F64, ...]:
    return (g.out * np.abs(g.expected[0]) + g.u * sum(np.abs(x) for x in g.args),)


def _linear(g: Given) -> tuple[F64, ...]:
    x, w = g.args
    magnitude = np.abs(x) @ np.abs(w["weight"]).T
    return (g.out * np.abs(g.expected[0]) + g.unit(x.shape[1]) * magnitude,)


def _norm(g: Given) -> tuple[F64, ...]:
    x, w = g.args
    x = x.reshape(g.expected[0].shape)
    ratio = np.abs(x) / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + g.attrs["eps"])
    return ((g.out + g.unit(x.shape[-1]) + 8 * g.u) * ratio * (1 + np.abs(w["weight"])),)


def _rope(g: Given) -> tuple[F64, ...]:
    x, cos, sin = (np.abs(value) for value in g.args)
    half = cos.shape[1]
    both = x[..., :half] * cos[:, None] + x[..., half : 2 * half] * sin[:, None]
    crossed = x[..., half : 2 * half] * cos[:, None] + x[..., :half] * sin[:, None]
    allowed = np.zeros_like(x)
    allowed[..., : 2 * half] = g.unit(2) * np.concatenate([both, crossed], axis=-1)
    allowed[..., : 2 * half] += g.out * np.abs(g.expected[0])[..., : 2 * half]
    return (allowed,)


def _rope_table(g: Given) -> tuple[F64, ...]:
    return tuple(np.full(value.shape, 4 * 2.0**-24) for value in g.expected)


def _swiglu(g: Given) -> tuple[F64, ...]:
    gate, up = g.args
    bounded = np.minimum(gate, g.attrs["limit"])
    opened = np.abs(np.clip(up, -g.attrs["limit"], g.attrs["limit"])) + abs(g.attrs["beta"])
    sigmoid = 0.5 * (1 + np.tanh(0.5 * g.attrs["alpha"] * bounded))
    relative = 8 * g.u * (1 + np.abs(g.attrs["alpha"] * bounded)) + g.out + g.rounding
    return (opened * np.abs(bounded) * (relative * sigmoid + _DEFINITION),)


def activated(attrs: Attrs, gate: F64, off_gate: F64, up: F64, off_up: F64) -> F64:
    """How far SwiGLU-OAI may be off if gate and up are off by so much: x sigmoid(alpha x) has one lowest point, so that
    its extremes over an interval lie there or at the ends; a clamp keeps order."""
    alpha, limit = attrs["alpha"], attrs["limit"]

    def shape(x: F64) -> F64:
        bounded = np.minimum(x, limit)
        made: F64 = bounded * 0.5 * (1 + np.tanh(0.5 * alpha * bounded))
        return made

    here, lowest = shape(gate), np.full_like(gate, _LOWEST / alpha)
    off = np.maximum(np.abs(shape(gate + off_gate) - here), np.abs(shape(gate - off_gate) - here))
    within = np.abs(gate - lowest) <= off_gate
    off = np.maximum(off, np.where(within, np.abs(shape(lowest) - here), 0))
    clipped, high, low = (np.clip(x, -limit, limit) for x in (up, up + off_up, up - off_up))
    off_clipped = np.maximum(high - clipped, clipped - low)
    passed: F64 = np.abs(clipped + attrs["beta"]) * off + np.abs(here) * off_clipped + off * off_clipped
    return passed


def _experts(g: Given) -> tuple[F64, ...]:
    h, ids, weights, w = g.args
    alpha, limit, factor = g.attrs["alpha"], g.attrs["limit"], g.attrs["routed_scaling_factor"]
    allowed = g.out * np.abs(g.expected[0])
    for t in range(len(h)):
        for e, p in zip(ids[t], weights[t], strict=True):
            w1, w3, w2 = (w[f"{m}.{e}"] for m in ("w1", "w3", "w2"))
            gate, up = w1 @ h[t], w3 @ h[t]
            off_gate, off_up = (
                g.unit(len(h[t])) * (np.abs(m) @ np.abs(h[t])) + g.rounding * np.abs(x)
                for m, x in ((w1, gate), (w3, up))
            )
            if any(slot.startswith("lora_") for slot in w):
                low_gate, more_gate = _low_rank(g, w, f"w1.{e}", h[t], given=True)
                low_up, more_up = _low_rank(g, w, f"w3.{e}", h[t], given=True)
                gate, up, off_gate, off_up = gate + low_gate, up + low_up, off_gate + more_gate, off_up + more_up
            act, bounded = activation(gate, up, g.attrs), np.minimum(gate, limit)
            off = activated(g.attrs, gate, off_gate, up, off_up)
            off += (8 * g.u * (1 + np.abs(alpha * bounded)) + g.rounding) * np.abs(act)
            product = np.abs(w2) @ (off + g.inner(len(act)) * np.abs(act))
            down = w2 @ act
            if f"lora_A.w2.{e}" in w:
                low, more = _low_rank(g, w, f"w2.{e}", act, given=False)
                product += more + np.abs(w[f"lora_B.w2.{e}"]) @ (np.abs(w[f"lora_A.w2.{e}"]) @ off)
                down = down + low
            allowed[t] += abs(factor * p) * (product + (4 * g.u + g.rounding) * np.abs(down))
    return (allowed,)


def _low_rank(g: Given, w: Mapping[str, Any], slot: str, x: F64, *, given: bool) -> tuple[Any, Any]:
    """B (A x) of a slot and how far it and its sum with the base's product may be off, x taken as exact; zeros without.

    Args:
        given: x is an input of the op, else the kernel computed it itself.
    """
    if f"lora_A.{slot}" not in w:
        return 0.0, 0.0
    a, b = w[f"lora_A.{slot}"], w[f"lora_B.{slot}"]
    low = a @ x
    off = (g.unit if given else g.inner)(len(x)) * (np.abs(a) @ np.abs(x)) + g.rounding * np.abs(low)
    value = b @ low
    base = np.abs(w[slot] @ x)
    return value, np.abs(b) @ (off + g.inner(len(low)) * np.abs(low)) + g.rounding * np.abs(value) + g.u * base


def _lora_logits(g: Given) -> tuple[F64, ...]:
    logits, a, w = g.args
    magnitude = np.abs(a) @ np.abs(w["weight"]).T
    return (g.out * np.abs(g.expected[0]) + g.u * np.abs(logits) + g.unit(a.shape[1]) * magnitude,)


def _block_scores(g: Given) -> tuple[F64, ...]:
    q, kv, positions, cu_q, _, table = g.args
    keys = kv[g.attrs["layer"], "index"]
    magnitude = np.zeros(g.expected[0].shape)
    for s, rows in sequences(cu_q):
        for t in rows:
            for b in range(int(positions[t]) // keys.shape[1] + 1):
                seen = keys[table[s, b], : int(positions[t]) - b * keys.shape[1] + 1]
                magnitude[t, :, b] = np.nan_to_num(np.abs(q[t]) @ np.abs(seen).T).max(-1)
    finite = np.where(np.isfinite(g.expected[0]), g.expected[0], 0)
    return (g.out * np.abs(finite) + g.unit(q.shape[2]) * magnitude,)


def visible(g: Given) -> Iterator[tuple[int, slice, F64, F64, F64]]:
    """Of every row and query head of an attention: row, channels of the result, logits [n], how far each of them may be
    off, and the values [n, D] of the tokens that it sees."""
    q, kv, *blocks, positions, cu_q, _, table = g.args
    keys, values, scale = kv[g.attrs["layer"], "k"], kv[g.attrs["layer"], "v"], g.attrs["scale"]
    page, dim, group = keys.shape[2], q.shape[2], q.shape[1] // g.attrs["kv_heads"]
    for s, rows in sequences(cu_q):
        for t in rows:
            for j in range(q.shape[1]):
                h, at = j // group, np.arange(int(positions[t]) + 1)
                at = at[np.isin(at // page, blocks[0][t, h])] if blocks else at
                k, v = (x[table[s, at // page], h, at % page] for x in (keys, values))
                yield t, slice(j * dim, (j + 1) * dim), *_logits(g, q[t, j], k, scale), v


def _drafted(g: Given) -> Iterator[tuple[int, slice, F64, F64, F64]]:
    """The same of the attention of a drafted block."""
    q, k, v, kv, positions, cu_q, seq_lens, table = g.args
    keys, values, scale = kv[g.attrs["layer"], "k"], kv[g.attrs["layer"], "v"], g.attrs["scale"]
    page, dim, group = keys.shape[2], q.shape[2], q.shape[1] // g.attrs["kv_heads"]
    own_v = v.reshape(k.shape)
    for s, rows in sequences(cu_q):
        context = int(seq_lens[s]) - len(rows)
        for t in rows:
            at = np.arange(max(0, int(positions[t]) - g.attrs["window"] + 1), max(context, 0))
            for j in range(q.shape[1]):
                h = j // group
                seen_k, seen_v = (
                    np.concatenate([x[table[s, at // page], h, at % page], own[list(rows), h]])
                    for x, own in ((keys, k), (values, own_v))
                )
                yield t, slice(j * dim, (j + 1) * dim), *_logits(g, q[t, j], seen_k, scale), seen_v


def _logits(g: Given, q: F64, k: F64, scale: float) -> tuple[F64, F64]:
    logits = k @ q * scale
    off = g.unit(len(q)) * scale * (np.abs(k) @ np.abs(q))
    return logits, off + 4 * g.u * (1 + np.abs(logits - logits.max()))


def _softmax(g: Given, rows: Iterator[tuple[int, slice, F64, F64, F64]]) -> tuple[F64, ...]:
    allowed = g.out * np.abs(g.expected[0])
    for row, part, logits, off, v in rows:
        weight = np.exp(logits - logits.max())
        weight /= weight.sum()
        share = weight * (off + off.max()) + weight * g.inner(len(v))
        allowed[row, part] += (share + 4 * g.u * weight) @ np.abs(v)
    return (allowed,)


def _attention(g: Given) -> tuple[F64, ...]:
    return _softmax(g, visible(g))


def _draft_attention(g: Given) -> tuple[F64, ...]:
    return _softmax(g, _drafted(g))


def _markov_bias(g: Given) -> tuple[F64, ...]:
    base, m, w2 = g.args
    magnitude = np.abs(base) + np.abs(m) @ np.abs(w2["weight"]).T
    return (g.out * np.abs(g.expected[0]) + g.unit(m.shape[1] + 1) * magnitude,)


def _confidence(g: Given) -> tuple[F64, ...]:
    u, m, w = g.args
    x = np.concatenate([u, m], axis=1) if g.attrs["with_markov"] else u
    magnitude = np.abs(x) @ np.abs(w["weight"][0]) + np.abs(w["bias"][0])
    c = g.expected[0]
    return (g.out * c + (g.unit(x.shape[1] + 1) * magnitude + 8 * g.u) * c * (1 - c) + 4 * g.u * c,)


def score_bound(g: Given) -> tuple[F64, F64]:
    """Of the router: scores [T,E], and how far each may be off."""
    h, w = g.args
    score = 0.5 * (1 + np.tanh(0.5 * (h @ w["weight"].T)))
    return score, g.unit(h.shape[1]) * (np.abs(h) @ np.abs(w["weight"]).T) / 4 + 4 * g.u


BOUNDS: Mapping[str, Callable[[Given], tuple[F64, ...]]] = {
    "add": _add,
    "all_reduce": _add,
    "linear": _linear,
    "lm_head": _linear,
    "gemma_rmsnorm": _norm,
    "head_rmsnorm": _norm,
    "rope": _rope,
    "rope_table": _rope_table,
    "swiglu_oai": _swiglu,
    "experts": _experts,
    "lora_experts": _experts,
    "lora_logits": _lora_logits,
    "block_scores": _block_scores,
    "sparse_attention": _attention,
    "dense_attention": _attention,
    "draft_attention": _draft_attention,
    "markov_bias": _markov_bias,
    "confidence": _confidence,
}
"""By op: all of the text model and of adapters with the criterion `bound` but the router, whose ids decide what its
weights are."""
