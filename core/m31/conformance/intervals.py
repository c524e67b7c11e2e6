"""What rounding makes of a value that is not known exactly: x lies within `error` of a centre, element by element.

A rounding keeps order, so that what it makes of the ends of an interval bounds what it makes of everything between
them. Where nothing flips, the result is exact again; where the centre lies within its error of the middle between two
codes, the error becomes one step of the format. A block's scale that may flip is tried both ways.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from m31.conformance.bounds import F64
from m31.formats import e2m1, e8m0, fp8, int8, mxfp8, nvfp4
from m31.ops.rounding import to_bf16

Pair = tuple[F64, F64]
"""Centre and error."""
Round = Callable[[F64], F64]


def tensor(x: F64) -> torch.Tensor:
    """In float32, on which encoders are defined."""
    return torch.from_numpy(np.ascontiguousarray(x, np.float64)).float()


def array(x: torch.Tensor) -> F64:
    """In float64."""
    made: F64 = x.double().numpy()
    return made


def e4m3(x: F64) -> F64:
    """To E4M3 at unit scale, saturating."""
    return array(fp8.decode(fp8.encode(tensor(x), saturate=True)))


def elementwise(rounding: Round, x: F64, error: F64) -> Pair:
    """Through a rounding that looks at one element."""
    centre = rounding(x)
    return centre, np.maximum(rounding(x + error) - centre, centre - rounding(x - error))


def bfloat16(x: F64, error: F64) -> Pair:
    """Through BF16."""
    return elementwise(to_bf16, x, error)


def _amax(x: F64, error: F64, group: int) -> tuple[F64, F64, F64]:
    """Of each group [..., G, 1]: the smallest that its largest magnitude may be, what it is, and the largest."""
    blocks, off = (v.reshape(*v.shape[:-1], v.shape[-1] // group, group) for v in (np.abs(x), error))
    least = np.maximum(blocks - off, 0)
    return least.max(-1, keepdims=True), blocks.max(-1, keepdims=True), (blocks + off).max(-1, keepdims=True)


def _blocks(x: F64, error: F64, group: int, scale: Callable[[F64], F64], code: Callable[[F64, F64], F64]) -> Pair:
    """Through a block format.

    Args:
        scale: of the largest magnitude of a block, not decreasing.
        code: value of an element under a scale; for one scale not decreasing.
    """
    if not x.size:
        return x, error
    low, amax, high = (scale(value) for value in _amax(x, error, group))
    split, off = (v.reshape(*v.shape[:-1], v.shape[-1] // group, group) for v in (x, error))
    centre = code(split, amax)
    width = np.zeros_like(centre)
    for chosen in (low, amax, high):
        for end in (split - off, split + off):
            width = np.maximum(width, np.abs(code(end, chosen) - centre))
    return centre.reshape(x.shape), width.reshape(x.shape)


def through_mxfp8(x: F64, error: F64) -> Pair:
    """Through MXFP8 (MODEL.md §3.1)."""

    def scale(amax: F64) -> F64:
        return e8m0.encode_round_up(tensor(amax)).double().numpy() - e8m0.BIAS

    return _blocks(x, error, mxfp8.GROUP, scale, lambda v, s: e4m3(v * 2.0**-s) * 2.0**s)


def through_nvfp4_static(x: F64, error: F64, input_global_scale: float) -> Pair:
    """Through the static NVFP4 of the second product's input (MODEL.md §3.2)."""
    s = 1.0 / torch.tensor([input_global_scale], dtype=torch.float32)

    def scale(amax: F64) -> F64:
        return e4m3(array((tensor(amax) / (6.0 * s)).clamp(fp8.E4M3_MIN, fp8.E4M3_MAX)))

    def code(v: F64, sf: F64) -> F64:
        unit = tensor(sf) * s
        return array(_e2m1(tensor(v) / unit).double() * tensor(sf).double() * s.double())

    return _blocks(x, error, nvfp4.GROUP, scale, code)


def _e2m1(x: torch.Tensor) -> torch.Tensor:
    return e2m1.decode(e2m1.encode_unchecked(x))


def _nvfp4_page(x: F64, error: F64) -> Pair:
    def code(v: F64, sf: F64) -> F64:
        with np.errstate(divide="ignore", invalid="ignore"):
            return array(_e2m1(tensor(v) / tensor(sf)).double()) * sf

    return _blocks(x, error, nvfp4.GROUP, lambda amax: e4m3(amax / 6.0), code)


def _int8_page(x: F64, error: F64) -> Pair:
    """The scale is any float32: a value is a code of one or two, times a scale that may be a little off."""
    low, amax, high = (np.maximum(v[..., 0], 2.0**-140) / int8.MAX for v in _amax(x, error, x.shape[-1]))
    centre = stored("int8", x)
    known = (error == 0) & (high == low)
    width = np.zeros_like(x)
    slack = np.abs(x) * 2.0**-22  # of a quotient in float32, beside the middle of two codes
    for scale in (low, amax, high):
        for other in (low, amax, high):
            for end in (x - error - slack, x + error + slack):
                made = np.clip(np.round(end / scale), -int8.MAX, int8.MAX) * other
                width = np.maximum(width, np.abs(made - centre))
    # The scale and its product with a code are rounded to float32.
    return centre, np.where(known, 0, width + 2.0**-22 * np.abs(centre))


def through_pages(form: str, x: F64, error: F64) -> Pair:
    """What pages hold of vectors [..., D]; NaN where there is none."""
    empty = np.isnan(x)
    x, error = np.where(empty, 0, x), np.where(empty, 0, error)
    if form == "nvfp4":
        centre, width = _nvfp4_page(x, error)
    elif form == "int8":
        centre, width = _int8_page(x, error)
    else:
        centre, width = elementwise(lambda v: stored(form, v), x, error)
    return np.where(empty, np.nan, centre), width


def stored(form: str, x: F64) -> F64:
    """What pages of a format hold of vectors [..., D] that are given exactly; NaN stays."""
    if form == "fp8":
        return np.where(np.isnan(x), np.nan, e4m3(np.nan_to_num(x)))
    if form in ("nvfp4", "int8"):
        empty = np.isnan(x)
        values = tensor(np.where(empty, 0, x))
        if form == "int8":
            made = int8.decode(*int8.encode(values))
        else:
            made = nvfp4.decode_kv(*nvfp4.encode_kv(values, nonfinite="propagate"))
        return np.where(empty, np.nan, array(made))
    plain: torch.dtype = getattr(torch, form)
    return array(torch.from_numpy(np.ascontiguousarray(x, np.float64)).to(plain))
