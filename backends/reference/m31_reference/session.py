"""Opening the reference, preparing its weights, choosing its kernels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from m31.errors import BackendRefused, NonFiniteWeight
from m31.graph import Arithmetic, Kernel, OpInstance, Refusal, StepClass
from m31.sdk.backend import Backend, KVLayout, KVSpec, LazyTensor, Limits, Session
from m31_reference.attention import ATTENTION
from m31_reference.cache import PlainLayout
from m31_reference.kernels import KERNELS
from m31_reference.memory import available_host_memory

if TYPE_CHECKING:
    from m31.config import Model

_DTYPES = {"float32": torch.float32, "float64": torch.float64}
_KV_SHARE = 0.5  # of the memory that is free when the session opens; the rest is for weights still to be touched


@dataclass
class PlainWeights:
    """Slot -> tensor in the compute dtype; file-backed where the file already has that dtype."""

    tensors: Mapping[str, torch.Tensor]
    layout_id: str = "plain:v1"

    def dequantise(self) -> dict[str, torch.Tensor]:
        """See `WeightHandle.dequantise`: the tensors themselves."""
        return dict(self.tensors)


class ReferenceSession(Session):
    """Plain torch in float32, or float64 on request."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device = device
        self.dtypes = {"model": dtype, "accum": dtype, "int64": torch.int64}
        name = str(dtype).removeprefix("torch.")
        self.arithmetic = Arithmetic(operands=name, accumulate=name, output=name)

    def limits(self, model: Model) -> Limits:
        """The model's own limits; text only, no drafting yet."""
        return Limits(
            max_context=model.text.max_position,
            kv_formats=("float32", "float64", "bfloat16"),
            draft_tokens=0,
            image=False,
            video=False,
        )

    def kernel(self, op: OpInstance, step: StepClass) -> Kernel | Refusal:
        """Every op of the text model, at every step class."""
        make = KERNELS.get(op.spec.name) or ATTENTION.get(op.spec.name)
        if make is None:
            return Refusal("the reference does not implement it")
        return Kernel(make(op.attrs), self.arithmetic, workspace_bytes=0)

    def prepare(self, op: OpInstance, slots: Mapping[str, LazyTensor]) -> PlainWeights:
        """Load each slot in the compute dtype and refuse values that are not finite.

        The check reads every weight once. A NaN that only reached the index branch would not fail later: it would
        silently select other blocks.
        """
        return PlainWeights({slot: self._load(tensor) for slot, tensor in slots.items()})

    def _load(self, tensor: LazyTensor) -> torch.Tensor:
        value = tensor.load().to(device=self.device, dtype=self.dtypes["model"])
        if not bool(torch.isfinite(value.sum())) and not bool(torch.isfinite(value).all()):
            bad = torch.isfinite(value).logical_not().flatten().nonzero()
            raise NonFiniteWeight(
                f"{len(bad)} of {value.numel()} values are NaN or infinite, the first at flat index {int(bad[0])}",
                where=f"tensor '{tensor.name}'",
                fix="the checkpoint is damaged: fetch it again, or run `m31 inspect --deep` for the whole list",
            )
        return value

    def kv_layout(self, spec: KVSpec) -> KVLayout:
        """Plain pages."""
        return PlainLayout(spec, self.device)

    def memory_budget(self) -> int:
        """Half of what is free now."""
        if self.device.type == "cuda":
            return int(torch.cuda.mem_get_info(self.device)[0] * _KV_SHARE)
        return int(available_host_memory() * _KV_SHARE)


class ReferenceBackend(Backend):
    """See the package docstring."""

    def open(self, *, device: str | None, dtype: str, rank: int, world: int) -> ReferenceSession:
        """See `Backend.open`."""
        if dtype not in _DTYPES:
            raise BackendRefused(
                f"compute dtype '{dtype}' is not served", where="backend reference", expected=" or ".join(_DTYPES)
            )
        if world != 1:
            raise BackendRefused(f"a world of {world} ranks is not served", where="backend reference", expected="1")
        try:
            target = torch.device(device or "cpu")
            torch.empty(1, device=target)
        except (RuntimeError, AssertionError) as error:
            raise BackendRefused(
                f"device '{device}' cannot be used: {str(error).splitlines()[0]}",
                where="backend reference",
                fix="use --device cpu, or a device of this torch build",
            ) from error
        return ReferenceSession(target, _DTYPES[dtype])
