"""Experts in a file of raw stored bytes, and what they decode to by another reader (ml_dtypes, numpy float64)."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from m31.checkpoint import GlobalScale, LazyTensor, QuantizedTensor
from m31.checkpoint.lazy import MappedFile

MATRICES = ("w1", "w3", "w2")


@dataclass
class ExpertFile:
    """A file of experts.

    Attributes:
        slots: what `Session.prepare` is given.
        values: slot -> float64, decoded without m31.
    """

    path: Path
    slots: dict[str, Any]
    values: dict[str, np.ndarray]
    offsets: dict[str, int] = field(default_factory=dict)  # "slot/role" -> where in the file


def write_experts(
    path: Path, formats: dict[str, str], count: int, width: int, inner: int, *, seed: int = 0, shift: int = 0
) -> ExpertFile:
    """Random experts.

    Args:
        formats: matrix -> "nvfp4", "bfloat16" or "mxfp8".
        shift: bytes of nothing at the front, to misalign what follows.
    """
    rng = np.random.default_rng(seed)
    data = bytearray(shift)
    plans: list[tuple[str, str, tuple[int, int], dict[str, tuple[str, tuple[int, ...], int]]]] = []
    values, offsets = {}, {}
    for expert in range(count):
        for name in MATRICES:
            slot, shape = f"{name}.{expert}", (width, inner) if name == "w2" else (inner, width)
            stored, values[slot] = _STORED[formats[name]](rng, shape)
            placed = {}
            for role, (dtype, array) in stored.items():
                placed[role] = (dtype, array.shape, len(data))
                offsets[f"{slot}/{role}"] = len(data)
                data += array.tobytes()
            plans.append((slot, formats[name], shape, placed))
    path.write_bytes(data)
    file = MappedFile(path, len(data))
    slots = {slot: lazy(slot, how, shape, placed, file) for slot, how, shape, placed in plans}
    return ExpertFile(path, slots, values, offsets)


def lazy(
    slot: str,
    how: str,
    shape: tuple[int, int],
    placed: dict[str, tuple[str, tuple[int, ...], int]],
    file: MappedFile,
) -> LazyTensor | QuantizedTensor:
    """The checkpoint's object for parts that lie at (dtype, shape, offset)."""
    parts: dict[str, Any] = {
        role: LazyTensor(name=f"{slot}.{role}", shape=dims, stored_dtype=dtype, offset=offset, file=file)
        for role, (dtype, dims, offset) in placed.items()
    }
    if how == "bfloat16":
        return parts["weight"]  # type: ignore[no-any-return]
    if "global_scale" in parts:
        parts["global_scale"] = GlobalScale(stored=parts["global_scale"], inverse=False)
    return QuantizedTensor(name=slot, shape=shape, format=how, _parts=tuple(parts.items()))  # type: ignore[arg-type]


def nvfp4_values(packed: Any, scale: Any, overall: float) -> np.ndarray:
    """E2M1 * E4M3 / G in float64, by ml_dtypes' own tables."""
    codes = np.stack([packed & 15, packed >> 4], -1).reshape(len(packed), -1)
    numbers = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    return numbers * np.repeat(scale.view(ml_dtypes.float8_e4m3fn).astype(np.float64), 16, axis=1) / overall


def _nvfp4(rng: np.random.Generator, shape: tuple[int, int]) -> Any:
    """Every code; scales from the smallest subnormal to the largest number, some zero, one row of nothing but zeros."""
    rows, columns = shape
    packed = rng.integers(0, 256, (rows, columns // 2), dtype=np.uint8)
    scale = rng.integers(0x20, 0x48, (rows, columns // 16), dtype=np.uint8)
    odd = rng.random(scale.shape)
    scale[odd < 0.1] = 0
    scale[(odd > 0.1) & (odd < 0.2)] = rng.integers(1, 8)  # subnormal
    scale[odd > 0.98] = 0x7E  # 448: outliers
    packed[rows // 2], scale[rows // 3] = 0, 0
    overall = np.array([np.float32(37.3 * columns**0.5)])
    parts = {
        "packed": ("U8", packed),
        "scale": ("F8_E4M3", scale),
        "global_scale": ("F32", overall),
    }
    return parts, nvfp4_values(packed, scale, float(overall[0]))


def _bfloat16(rng: np.random.Generator, shape: tuple[int, int]) -> Any:
    value = (rng.standard_normal(shape) * shape[1] ** -0.5).astype(ml_dtypes.bfloat16)
    value[rng.random(shape) < 0.01] *= ml_dtypes.bfloat16(50)
    return {"weight": ("BF16", value)}, value.astype(np.float64)


def _mxfp8(rng: np.random.Generator, shape: tuple[int, int]) -> Any:
    codes = rng.standard_normal(shape).astype(ml_dtypes.float8_e4m3fn)
    scale = np.full((shape[0], shape[1] // 32), 120, np.uint8)
    values = codes.astype(np.float64) * 2.0**-7
    return {"codes": ("F8_E4M3", codes), "scale": ("U8", scale)}, values


_STORED = {"nvfp4": _nvfp4, "bfloat16": _bfloat16, "mxfp8": _mxfp8}
