"""Weights in float32: mapped from the checkpoint where it holds float32, decoded into memory otherwise.

The only file besides `pages.py` and `plan.py` that knows torch, because the core hands stored tensors over as such.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch

from m31.errors import NonFiniteWeight
from m31.formats.transforms import Loss
from m31.sdk import LazyTensor
from m31_numpy.codes import Array, decode_mxfp8, decode_nvfp4, from_bf16


@dataclass
class Weights:
    """The weights of one op, see `m31.graph.WeightHandle`.

    Attributes:
        arrays: slot -> float32 array, what the kernels multiply with.
        in_place: slots whose array is the checkpoint's own mapped memory.
    """

    arrays: Mapping[str, Array]
    in_place: frozenset[str]
    losses: Mapping[str, Loss] = field(default_factory=dict)  # decoding is exact
    layout_id: str = "m31-numpy-weights:v1:float32"

    def dequantise(self) -> dict[str, torch.Tensor]:
        """See `WeightHandle.dequantise`."""
        return {slot: torch.from_numpy(array) for slot, array in self.arrays.items()}


def stays_in_file(tensor: LazyTensor) -> bool:
    """Whether a stored tensor is used where it lies: mapped bytes have one address, the copies that a reader makes of
    what is misaligned have two."""
    if tensor.format != "plain" or tensor.dtype != torch.float32:
        return False
    value, again = tensor.load(), tensor.load()
    return value.data_ptr() == again.data_ptr()


def decoded_bytes(slots: Mapping[str, LazyTensor]) -> int:
    """Bytes that `prepare` allocates: four per element of whatever is not float32 in its file."""
    return sum(4 * math.prod(t.shape) for t in slots.values() if not stays_in_file(t))


def prepare(slots: Mapping[str, LazyTensor]) -> Weights:
    """All slots of an op, checked.

    Raises:
        NonFiniteWeight: a value is NaN or infinite, or an NVFP4 block scale has a sign.
    """
    mapped = frozenset(slot for slot, tensor in slots.items() if stays_in_file(tensor))
    arrays = {slot: _values(tensor) for slot, tensor in slots.items()}
    for slot, tensor in slots.items():
        if tensor.format == "plain" and tensor.dtype == torch.float32 and slot not in mapped:
            arrays[slot] = arrays[slot].copy()  # nobody says whose memory a copy is that was given
    return Weights(arrays, mapped)


def _values(tensor: LazyTensor) -> Array:
    parts = {role: _stored(part.load()) for role, part in tensor.parts().items()}
    if tensor.format == "mxfp8":
        values = decode_mxfp8(parts["codes"], parts["scale"])
    elif tensor.format == "nvfp4":
        if (parts["scale"] >= 0x80).any():  # readers disagree about a negative scale, so no value is right
            raise _damaged(tensor, "a block scale has a sign")
        values = decode_nvfp4(parts["packed"], parts["scale"], parts["global_scale"])
    else:
        values = parts["weight"]
    if not np.isfinite(values).all():
        raise _damaged(tensor, "values or scales are NaN or infinite")
    return values


def _stored(tensor: torch.Tensor) -> Array:
    """A stored tensor as numpy sees it: bytes for what numpy has no dtype for, float32 for float types."""
    if tensor.element_size() == 1:
        return tensor.view(torch.uint8).numpy()
    if tensor.dtype == torch.bfloat16:
        return from_bf16(tensor.view(torch.uint16).numpy())
    return tensor.numpy().astype(np.float32, copy=False)


def _damaged(tensor: LazyTensor, what: str) -> NonFiniteWeight:
    return NonFiniteWeight(
        what,
        where=f"tensor '{tensor.name}'",
        fix="the checkpoint is damaged: fetch it again, or run `m31 inspect --deep` for the whole list",
    )
