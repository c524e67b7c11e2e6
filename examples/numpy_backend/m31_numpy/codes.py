"""Number formats in numpy: bfloat16 both ways, MXFP8 and NVFP4 decoded (docs/formats.md says the rules)."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
MX_BLOCK, NV_BLOCK = 32, 16  # elements of a row that share a scale
_BF16_NAN = np.uint16(0x7FC0)


def _e4m3() -> Array:
    """Value of each of the 256 bytes: sign, 4 bits of exponent, 3 of mantissa; 0x7F and 0xFF are NaN."""
    byte = np.arange(256)
    exponent, mantissa = (byte >> 3) & 15, byte & 7
    magnitude = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    magnitude[byte & 0x7F == 0x7F] = np.nan
    return np.where(byte < 128, magnitude, -magnitude).astype(np.float32)


E4M3 = _e4m3()
E8M0 = np.append(2.0 ** np.arange(-127, 128), np.nan).astype(np.float32)  # powers of two; 0xFF is NaN
_HALF = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
E2M1 = np.array([*_HALF, *(-x for x in _HALF)], np.float32)


def to_bf16(x: Array) -> Array:
    """float32 to bfloat16 bits (uint16), nearest, ties to even; NaN stays NaN."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = ((bits + (np.uint32(0x7FFF) + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
    return np.where(np.isnan(x), _BF16_NAN, rounded)


def from_bf16(bits: Array) -> Array:
    """bfloat16 bits to float32, exactly."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def decode_mxfp8(codes: Array, scale: Array) -> Array:
    """E4M3 bytes [out, in] times 2^(scale - 127), one scale byte per 32 inputs; exact."""
    return _scaled(E4M3[codes], E8M0[scale], MX_BLOCK)


def decode_nvfp4(packed: Array, scale: Array, global_scale: Array) -> Array:
    """E2M1 nibbles [out, in/2], low one first, times E4M3 bytes [out, in/16], over the global scale.

    The product is exact and the division rounds once, as the format's definition says.
    """
    nibbles = np.stack((packed & 15, packed >> 4), axis=-1).reshape(packed.shape[0], -1)
    return _scaled(E2M1[nibbles], E4M3[scale], NV_BLOCK) / global_scale.reshape(())


def _scaled(values: Array, scale: Array, block: int) -> Array:
    """One scale per `block` values of a row."""
    return (values.reshape(*scale.shape, block) * scale[..., None]).reshape(values.shape)
