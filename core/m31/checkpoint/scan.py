"""Passes over the weights themselves: non-finite values and suspicious constants. Streaming, a few MiB at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from m31.checkpoint.inventory import TensorDecl
from m31.checkpoint.lazy import LazyTensor
from m31.checkpoint.reader import Checkpoint
from m31.errors import NonFiniteWeight

if TYPE_CHECKING:
    import torch

_CHUNK = 4 * 2**20  # elements
_E8M0_NAN = 255  # MODEL.md §3.1: 254 is the largest exponent; 255 is the format's NaN


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """What one pass over a tensor found.

    Attributes:
        first_bad: flat index of the first NaN or infinity, or None.
        bad_value: that value.
        low, high, mean: over the finite values; all 0 when there are none.
    """

    first_bad: int | None
    bad_value: float | None
    low: float
    high: float
    mean: float


def _chunks(tensor: LazyTensor, decl: TensorDecl) -> Iterator[tuple[int, torch.Tensor]]:
    """Flat float32 chunks with their start index; packed FP4 has no non-finite codes and yields nothing."""
    import torch

    if decl.storage == "fp4_packed":
        return
    flat = tensor.load().reshape(-1)
    if decl.storage == "e8m0_scale":
        flat = flat.view(torch.uint8)
    for start in range(0, flat.numel(), _CHUNK):
        part = flat[start : start + _CHUNK]
        values = part if part.dtype == torch.float32 else part.to(torch.float32)
        if decl.storage == "e8m0_scale":
            values = values.masked_fill(part == _E8M0_NAN, float("nan"))
        yield start, values


def stats(tensor: LazyTensor, decl: TensorDecl) -> Stats:
    """One pass over a tensor; its data are not kept."""
    first: int | None = None
    value: float | None = None
    low, high, total, count = float("inf"), float("-inf"), 0.0, 0
    for start, values in _chunks(tensor, decl):
        finite = values.isfinite()
        if not bool(finite.all()):
            if first is None:
                index = int((~finite).nonzero()[0])
                first, value = start + index, float(values[index])
            values = values[finite]
        if values.numel():
            low, high = min(low, float(values.min())), max(high, float(values.max()))
            total, count = total + float(values.double().sum()), count + values.numel()
    if count == 0:
        low = high = 0.0
    return Stats(first_bad=first, bad_value=value, low=low, high=high, mean=total / count if count else 0.0)


def check_finite(checkpoint: Checkpoint) -> None:
    """Read every weight once.

    Raises:
        NonFiniteWeight: the first tensor, in model order, with a NaN or infinity; names the flat index of the first.
    """
    for name, decl in checkpoint.declared.items():
        tensor = checkpoint.stored(name)
        for start, values in _chunks(tensor, decl):
            finite = values.isfinite()
            if not bool(finite.all()):
                index = int((~finite).nonzero()[0])
                raise non_finite(tensor, start + index, float(values[index]))


def non_finite(tensor: LazyTensor, index: int, value: float) -> NonFiniteWeight:
    """The error for one bad weight; `index` is flat, `tensor` gives the file."""
    return NonFiniteWeight(
        f"'{tensor.name}' holds {value} at flat index {index} of shape {list(tensor.shape)}",
        where=str(tensor.path),
        expected="finite weights",
        fix="the file is damaged or the training diverged: fetch it again or use another checkpoint",
    )
