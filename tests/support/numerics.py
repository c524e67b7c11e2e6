"""Number formats once more, in numpy float64 and by tables: what the naive whole model quantises with.

Nothing here uses `m31.formats`; formulas are MODEL.md §3.1, §3.2, §3.4. Every function returns the dequantised values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
E4M3 = np.array([(m / 8) * 2.0**-6 if e == 0 else (1 + m / 8) * 2.0 ** (e - 7) for e in range(16) for m in range(8)])[
    :-1
]


def nearest(x: Any, table: F64) -> F64:
    """The entry nearest to each |x|, with its sign; ties to the even code; saturating."""
    a = np.abs(np.asarray(x, np.float64))
    hi = np.searchsorted(table, a).clip(1, len(table) - 1)
    lo = hi - 1
    middle = (table[lo] + table[hi]) / 2
    even = np.where(lo % 2 == 0, lo, hi)
    pick = np.where(a > middle, hi, np.where(a < middle, lo, even))
    return np.copysign(table[pick], x)


def bf16(x: Any) -> F64:
    """Nearest BF16: 8 significant bits of the float32 value."""
    fraction, exponent = np.frexp(np.asarray(x, np.float32).astype(np.float64))
    return np.ldexp(np.rint(fraction * 256) / 256, exponent)


def e4m3(x: Any) -> F64:
    """E4M3 at unit scale, saturating."""
    return nearest(np.asarray(x, np.float32), E4M3)


def _groups(x: Any, size: int) -> F64:
    return np.asarray(x, np.float32).astype(np.float64).reshape(*x.shape[:-1], -1, size)


def mxfp8(x: Any) -> F64:
    """One power of two per 32, its exponent rounded up."""
    g = _groups(x, 32)
    amax = np.maximum(np.abs(g).max(-1, keepdims=True), np.finfo(np.float32).tiny)
    scale = 2.0 ** np.clip(np.ceil(np.log2(amax / 448)), -127, 127)
    return (nearest(g / scale, E4M3) * scale).reshape(x.shape)


def nvfp4_kv(x: Any) -> F64:
    """Per 16: scale E4M3(amax / 6) without a floor, global scale 1."""
    g = _groups(x, 16)
    scale = nearest(np.abs(g).max(-1, keepdims=True) / 6, E4M3)
    with np.errstate(divide="ignore", invalid="ignore"):
        codes = nearest(np.nan_to_num(g / scale), E2M1)
    return (codes * scale).reshape(x.shape)


def nvfp4_shift3(x: Any) -> F64:
    """Cached values x = code * scale, as a kernel reads them that rounds scale / 8 to E4M3 first.

    The scale is found again as amax / 6: the largest code of a group is 6 unless the scale is an E4M3 subnormal.
    """
    g = _groups(x, 16)
    scale = np.abs(g).max(-1, keepdims=True) / 6
    with np.errstate(divide="ignore", invalid="ignore"):
        codes = np.nan_to_num(g / scale)
    return (nearest(codes * nearest(scale / 8, E4M3), E4M3) * 8).reshape(x.shape)


def block_fp8(w: Any, block: int = 128) -> F64:
    """One float32 scale per square block: amax / 448."""
    out = np.zeros(w.shape)
    for i in range(0, w.shape[0], block):
        for j in range(0, w.shape[1], block):
            tile = np.asarray(w[i : i + block, j : j + block], np.float32)
            scale = np.abs(tile).max() / np.float32(448)
            out[i : i + block, j : j + block] = nearest(tile / scale, E4M3) * float(scale) if scale else 0
    return out


def shared_scale(parts: list[tuple[Any, Any, float]]) -> list[F64]:
    """Matrices (E2M1 values, E4M3 scales per 16, G) under the smallest G, whose reciprocal is rounded to BF16."""
    common = min(np.float32(g) for _, _, g in parts)
    out = []
    for values, scale, g in parts:
        new = (
            scale
            if np.float32(g) == common
            else nearest(np.asarray(scale, np.float32) * (common / np.float32(g)), E4M3)
        )
        out.append(np.asarray(values) * np.repeat(new, 16, -1) * float(bf16(np.float32(1) / common)))
    return out


def nvfp4_token(x: Any) -> F64:
    """FC1 input: an outer float32 scale per token, then per 16; in float32 as the rule says."""
    token = np.maximum(np.abs(np.asarray(x, np.float32)).max(-1, keepdims=True), np.float32(1e-12)) / np.float32(2688)
    v = (np.asarray(x, np.float32) / token).reshape(*x.shape[:-1], -1, 16)
    scale = nearest(np.clip(np.abs(v).max(-1, keepdims=True) / np.float32(6), 2.0**-9, 448), E4M3)
    codes = nearest(v / scale.astype(np.float32), E2M1)
    return (codes * scale).reshape(x.shape) * token.astype(np.float64)


def nvfp4_static(x: Any, encode_scale: float) -> F64:
    """FC2 input: the matrix's static scale, then per 16."""
    s = np.float32(1) / np.float32(encode_scale)
    g = np.asarray(x, np.float32).reshape(*x.shape[:-1], -1, 16)
    scale = nearest(np.clip(np.abs(g).max(-1, keepdims=True) / (np.float32(6) * s), 2.0**-9, 448), E4M3)
    codes = nearest(g / (scale.astype(np.float32) * s), E2M1)
    return (codes * scale).reshape(x.shape) * float(s)


def int8(x: Any) -> F64:
    """One float32 scale per vector."""
    values = np.asarray(x, np.float32)
    scale = np.abs(values).max(-1, keepdims=True) / np.float32(127)
    with np.errstate(divide="ignore", invalid="ignore"):
        codes = np.rint(np.nan_to_num(values / scale))
    return np.clip(codes, -127, 127).astype(np.float64) * scale


STORED: dict[str, Callable[[Any], F64]] = {
    "float64": lambda x: np.asarray(x, np.float64),
    "float32": lambda x: np.asarray(x, np.float32).astype(np.float64),
    "bfloat16": bf16,
    "fp8": e4m3,
    "nvfp4": nvfp4_kv,
    "int8": int8,
}
