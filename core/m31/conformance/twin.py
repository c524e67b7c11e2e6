"""What a kernel is compared with that declares to quantise what it multiplies: a definition that does so, in float64.

A kernel that declares `mxfp8*float32` is not given more room: it is compared with a definition that quantises the same
values (MODEL.md §3.1, §3.2, §3.4) by the encoders of `m31.formats`. Inputs are exact, so their codes are; what a kernel
computes first and quantises then (the activation between the products of an expert, the weights of a softmax) may
come out one code off where it lies within its own error of the middle between two (`m31.conformance.intervals`).

Operands of a kernel are named as an arithmetic names them (`m31.formats.arithmetic`): the first of each product is the
activation. What is said of the second, the weight or the page, is no reason for an error: both are given as decoded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from m31.conformance import intervals
from m31.conformance.bounds import F64, KNOWN
from m31.conformance.op_bounds import Given, activated, visible
from m31.errors import ContractViolation
from m31.formats import fp8, mxfp8, nvfp4
from m31.graph import Arithmetic
from m31.ops.moe import activation

READERS = ("block_scores", "sparse_attention", "dense_attention")
INPUTS: Mapping[str, Callable[[F64], F64]] = {
    "mxfp8": lambda x: intervals.array(mxfp8.quantise(intervals.tensor(x))),
    "nvfp4-token": lambda x: intervals.array(nvfp4.quantise_per_token(intervals.tensor(x))),
    "e4m3": intervals.e4m3,
}
"""By name: quantised and decoded values of exact ones [..., K]."""
_MIDDLE = ("mxfp8", "nvfp4-static", "bfloat16")
_DECODED = ("mxfp8", "nvfp4", "e2m1", "e4m3", "int8")
"""Formats that a weight or a page is given in, decoded."""
_SHIFTED = "e4m3-shift3"
FORMATS = KNOWN | {*_DECODED, *INPUTS, *_MIDDLE, _SHIFTED}
"""Every name that an operand may be declared with."""
_TAKEN = {
    "linear": (tuple(INPUTS),),
    "experts": (tuple(INPUTS), _MIDDLE),
    **dict.fromkeys(READERS, (("e4m3",), ("e4m3",))),
}
"""By op: what a definition quantises, product by product."""
INPUT_GLOBAL_SCALE = 300.0
"""Of the second product of the suite's experts that are stored in NVFP4; others have none, and take the default."""


@dataclass(frozen=True)
class Product:
    """One matrix product as a kernel declares it."""

    activation: str
    weight: str


def products(arithmetic: Arithmetic) -> list[Product]:
    """The products of a declaration; one format alone is that of both operands."""
    made = []
    for product in arithmetic.operands.split(", "):
        x, _, w = product.partition("*")
        made.append(Product(x, w or x))
    return made


def quantises(arithmetic: Arithmetic) -> bool:
    """Whether a format occurs whose error is relative to a block or a range, not to the element."""
    return any(name not in KNOWN or name in _DECODED for p in products(arithmetic) for name in (p.activation, p.weight))


def require(op: str, arithmetic: Arithmetic, where: str, *, fused: bool) -> None:
    """A declaration that nobody can hold a kernel to would free it of its bound.

    Raises:
        ContractViolation: an operand has a name that is no format's, or the op, unless it is a fused one, has no
            definition that quantises.
    """
    names = [name for p in products(arithmetic) for name in (p.activation, p.weight)]
    if strange := [name for name in names if name not in FORMATS]:
        raise ContractViolation(
            "arithmetic",
            f"declares operands in {strange[0]!r}, which is the name of no format",
            where=where,
            expected=f"one of {', '.join(sorted(FORMATS))}",
        )
    if quantises(arithmetic) and op not in _TAKEN and not fused:
        raise ContractViolation(
            "arithmetic",
            f"declares operands in {arithmetic.operands}, and no definition of {op} quantises its operands",
            where=where,
            expected=f"one of {', '.join(sorted(KNOWN - set(_DECODED)))}",
        )


def unknown(op: str, arithmetic: Arithmetic) -> str | None:
    """Why there is no twin of a kernel of an op, or None."""
    for at, product in enumerate(products(arithmetic)):
        plain = product.activation in KNOWN and product.activation not in _DECODED
        known = _TAKEN[op][at] if at < len(_TAKEN.get(op, ())) else ()
        if not plain and product.activation not in known:
            return f"no definition of {op} quantises {product.activation} ({arithmetic.operands})"
        weight = product.weight in KNOWN or product.weight in _DECODED
        if not weight and not (op in READERS and product.weight == _SHIFTED):
            return f"no definition of {op} reads {product.weight} ({arithmetic.operands})"
    return None


def plain(given: Given) -> Given:
    """With an arithmetic whose operands are what the twin multiplies: nothing of them is rounded any more."""
    keep = {"mxfp8", "e2m1", "e4m3"}
    parts = [
        "*".join(n if n in KNOWN and n not in keep else given.format for n in (p.activation, p.weight))
        for p in products(given.arithmetic)
    ]
    return replace(given, arithmetic=replace(given.arithmetic, operands=", ".join(parts)))


def linear(g: Given) -> Given:
    """A projection of the quantised input."""
    (product,) = products(g.arithmetic)
    x, w = g.args
    x = INPUTS[product.activation](x) if product.activation in INPUTS else x
    return plain(replace(g, args=[x, w], expected=(x @ w["weight"].T,)))


def experts(g: Given, stored: str) -> tuple[tuple[F64, ...], tuple[F64, ...]]:
    """Results and allowed errors of experts: FC1 on the quantised input, its result in BF16, the activation quantised,
    FC2 on it, its result in BF16 (MODEL.md §3.2).

    Args:
        stored: how the weights are stored.
    """
    default = nvfp4.default_input_scale(g.attrs["limit"], g.attrs["beta"])
    static = INPUT_GLOBAL_SCALE if stored == "nvfp4" else default
    first, *rest = products(g.arithmetic)
    second = rest[0] if rest else first
    clean = plain(g)
    h, ids, weights, w = g.args
    x = INPUTS[first.activation](h) if first.activation in INPUTS else h
    out, allowed = np.zeros_like(h), np.zeros_like(h)
    for t in range(len(h)):
        total = np.zeros(h.shape[1])
        for e, p in zip(ids[t], weights[t], strict=True):
            middle, off = _middle(clean, x[t], w[f"w1.{e}"], w[f"w3.{e}"])
            middle, off = _quantised(second.activation, middle, off, static)
            y, room = w[f"w2.{e}"] @ middle, np.abs(w[f"w2.{e}"]) @ (off + clean.inner(len(middle)) * np.abs(middle))
            y, room = intervals.bfloat16(y, room)
            factor = abs(g.attrs["routed_scaling_factor"] * p)
            out[t] += g.attrs["routed_scaling_factor"] * p * y
            allowed[t] += factor * room
            total += factor * np.abs(y)
        allowed[t] += 4 * g.u * total
    return (out,), (allowed + g.out * np.abs(out),)


def _middle(g: Given, x: F64, w1: F64, w3: F64) -> tuple[F64, F64]:
    """Activation of one token in one expert, and how far it may be off."""
    (gate, off_gate), (up, off_up) = (
        intervals.bfloat16(m @ x, g.unit(len(x)) * (np.abs(m) @ np.abs(x))) for m in (w1, w3)
    )
    act, bounded = activation(gate, up, g.attrs), np.minimum(gate, g.attrs["limit"])
    off = activated(g.attrs, gate, off_gate, up, off_up)
    return act, off + 8 * g.u * (1 + np.abs(g.attrs["alpha"] * bounded)) * np.abs(act)


def _quantised(kind: str, x: F64, off: F64, static: float) -> tuple[F64, F64]:
    if kind == "mxfp8":
        return intervals.through_mxfp8(x, off)
    if kind == "nvfp4-static":
        return intervals.through_nvfp4_static(x, off, static)
    return intervals.bfloat16(x, off) if kind == "bfloat16" else (x, off)


def reader(g: Given, given_pages: Mapping[tuple[int, str], F64], form: str) -> Given:
    """What attention or block scores multiply with: the query and the pages as the declaration reads them.

    Args:
        given_pages: what was written to the pages, for a rule that reads the scale of a block apart.
        form: of the pages.
    """
    first = products(g.arithmetic)[0]
    q, kv, *rest = g.args
    q = INPUTS[first.activation](q) if first.activation in INPUTS else q
    read = {key: _read(first.weight, form, value, given_pages[key]) for key, value in kv.items()}
    return replace(g, args=[q, read, *rest])


def _read(kind: str, form: str, decoded: F64, written: F64) -> F64:
    if kind not in ("e4m3", "e4m3-shift3"):
        return decoded
    empty = np.isnan(decoded)
    if kind == "e4m3-shift3" and form == "nvfp4":
        packed, scale = nvfp4.encode_kv(intervals.tensor(np.where(empty, 0, written)), nonfinite="propagate")
        made = intervals.array(nvfp4.decode_kv_e4m3(packed, scale, scale_shift=3))
    else:
        made = intervals.e4m3(np.where(empty, 0, decoded))
    return np.where(empty, np.nan, made)


def attention(g: Given) -> tuple[tuple[F64, ...], tuple[F64, ...]]:
    """Results and allowed errors of attention whose softmax weights are E4M3 of 448 times the exponential (§3.4); their
    sum is taken before."""
    clean = plain(g)
    out, allowed = np.zeros(g.expected[0].shape), np.zeros(g.expected[0].shape)
    for row, part, logits, off, v in visible(clean):
        p = np.exp(logits - logits.max())
        spread = p * np.expm1(off + off.max())
        weight, flip = intervals.elementwise(lambda x: intervals.e4m3(x * fp8.E4M3_MAX) / fp8.E4M3_MAX, p, spread)
        total = p.sum()
        out[row, part] = weight @ v / total
        size = (weight @ np.abs(v)) / total
        allowed[row, part] = flip @ np.abs(v) / total
        allowed[row, part] += size * (clean.inner(len(p)) + spread.sum() / total + 8 * g.u)
    return (out,), (allowed + g.out * np.abs(out),)


def probabilities(arithmetic: Arithmetic) -> bool:
    """Whether a declaration quantises the weights of a softmax."""
    found: Sequence[Product] = products(arithmetic)
    return len(found) > 1 and found[1].activation == "e4m3"
