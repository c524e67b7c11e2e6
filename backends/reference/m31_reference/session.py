"""Opening the reference, preparing its weights, choosing its kernels."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from m31.errors import BackendRefused, NonFiniteWeight
from m31.formats import nvfp4
from m31.formats.arithmetic import NAMED, ArithmeticSpec
from m31.graph import Arithmetic, Kernel, OpInstance, Refusal, Shard, StepClass
from m31.sdk import Backend, KVLayout, KVSpec, LazyTensor, Limits, Session, host_memory_free
from m31_reference.attention import ATTENTION
from m31_reference.cache import PagedLayout
from m31_reference.draft import DRAFT
from m31_reference.emulation import emulated
from m31_reference.kernels import ADAPTER, KERNELS
from m31_reference.weights import Decoded, DecodedCache, Weights, require_finite, transformed

if TYPE_CHECKING:
    from m31.config import Model

_EXPERTS = ("experts", "lora_experts")
_PLAIN = ("bfloat16", "float32", "float16")  # `TensorDecl.stored` of a weight that is not quantised
_DTYPES = {"float32": torch.float32, "float64": torch.float64}
_WEIGHT_SHARE = 0.25  # of the memory that is free when the session opens, for decoded weights


def _stored(op: OpInstance) -> str | None:
    return next(iter(op.slots.values())).stored


def _mapped(tensor: LazyTensor) -> bool:
    """Whether a plain tensor is read where it lies in its file: mapped bytes have one address, copies have two."""
    value, again = tensor.load(), tensor.load()
    return value.data_ptr() == again.data_ptr()


class ReferenceSession(Session):
    """Plain torch in float32, or float64 on request."""

    def __init__(
        self, device: torch.device, dtype: torch.dtype, numerics: ArithmeticSpec, weight_cache_bytes: int | None
    ) -> None:
        self.device, self.numerics = device, numerics
        self._notes: list[str] = []
        self._transforms: dict[str, bool] = {}  # of weights, by name: whether any tensor was changed
        self.dtypes = {"model": dtype, "accum": dtype, "int64": torch.int64}
        self.compute = str(dtype).removeprefix("torch.")
        if weight_cache_bytes is None:
            weight_cache_bytes = int(self._free() * _WEIGHT_SHARE)
        self.decoded = DecodedCache(weight_cache_bytes)
        self._plain_projections = 0  # prepared under an arithmetic that quantises the inputs of MXFP8 ones

    def limits(self, model: Model, declared: Limits) -> Limits:
        """The manifest's. Exact pages come first: the reference defines what is right."""
        kv = tuple(sorted(declared.kv_formats, key=lambda name: name != self.compute))
        index = tuple(sorted(declared.index_formats, key=lambda name: name != self.compute))
        return dataclasses.replace(declared, kv_formats=kv, index_formats=index)

    def kernel(self, op: OpInstance, step: StepClass) -> Kernel | Refusal:
        """Every op of the text model, at every step class, in the session's arithmetic."""
        name, label = op.spec.name, f"m31_reference.{op.spec.name}"
        # MODEL.md §3.7: a checkpoint may store some projections plain; those have plain inputs.
        plain = name == "linear" and _stored(op) in _PLAIN
        found = emulated(op, self.numerics, self.compute, plain=plain)
        if isinstance(found, Refusal):
            return found
        if found is not None:
            run, arithmetic = found
            why = f"plain torch, imitating {self.numerics.name}"
            return Kernel(name=label, run=run, arithmetic=arithmetic, workspace_bytes=0, why=why)
        if name in ATTENTION:
            run = ATTENTION[name](op.attrs, None)
        elif name in KERNELS:
            run = KERNELS[name](op.attrs)
        elif name in DRAFT or name in ADAPTER:
            run = (DRAFT | ADAPTER)[name](op.attrs)
        else:
            return Refusal("the reference does not implement it")
        output = "bfloat16" if name.startswith("round_") else self.compute
        arithmetic = Arithmetic(self.compute, self.compute, output)
        return Kernel(name=label, run=run, arithmetic=arithmetic, workspace_bytes=0, why="plain torch, any device")

    def prepare(self, op: OpInstance, slots: Mapping[str, LazyTensor], shard: Shard) -> Weights:
        """Check every weight; bring plain ones into the compute dtype and leave quantised ones in their file.

        A NaN that only reached the index branch would not fail later: it would silently select other blocks. So
        everything is checked now, except quantised experts, which are checked whenever they are decoded: reading
        all of them would take longer than most runs, and one that no token reaches cannot do harm (decision 011).
        """
        experts = op.spec.name in _EXPERTS
        if self.numerics.linear_activation == "mxfp8" and op.spec.name == "linear" and _stored(op) in _PLAIN:
            # An adapter's two products are plain by definition; the note is about what the checkpoint left plain.
            self._plain_projections += not any(".lora_" in tensor.name for tensor in slots.values())
        transform = self._transform(op)
        changed = transformed(slots, transform)
        if transform is not None:
            self._transforms[transform] = self._transforms.get(transform, False) or bool(changed)
        held: dict[str, torch.Tensor] = {}
        lazy: dict[str, LazyTensor] = {}
        for slot, tensor in slots.items():
            if tensor.format != "plain":
                lazy[slot] = changed.get(slot, tensor)
                if not experts:
                    self.decoded.get(lazy[slot], self._decode)
                continue
            value = tensor.load()
            require_finite(value, tensor.name)
            if experts and value.dtype != self.dtypes["model"]:
                lazy[slot] = tensor  # 128 experts of a layer are not converted for the few that a token takes
            else:
                made = value.to(device=self.device, dtype=self.dtypes["model"])
                # What is no part of the file is not kept as it was given: whose memory that is, nobody says.
                held[slot] = made.clone() if made is value and not _mapped(tensor) else made
        scales: dict[str, torch.Tensor] = {}
        if experts and self.numerics.expert_middle == "nvfp4-static":
            scales = {slot: self._input_scale(op, tensor) for slot, tensor in slots.items() if slot.startswith("w2.")}
        # On the host a plain tensor of the compute dtype is the mapping itself, unless it lies misaligned in its file.
        mapped = {slot for slot in held if not self._converted(op, slots[slot])}
        return Weights(
            tensors=Decoded(held, lazy, self.decoded, self._decode),
            in_place=frozenset(lazy) | mapped,
            transformed={transform: list(changed.values())} if transform and changed else {},
            input_scale=scales,
        )

    @property
    def notes(self) -> list[str]:
        """See `Session.notes`: where a static scale was made up, and what transforms of weights did."""
        told = list(self._notes)
        if self._plain_projections:
            told.append(
                f"{self._plain_projections} projections are not stored in MXFP8:"
                f" arithmetic '{self.numerics.name}' rounds their inputs to BF16"
            )
        for name, applied in self._transforms.items():
            start = name.partition("-")[0].upper()
            told.append(
                f"weights stored in {start} are computed after the lossy transform {name}"
                if applied
                else f"arithmetic '{self.numerics.name}' has the transform {name}, and no weight is stored in {start}"
            )
        return told

    def _transform(self, op: OpInstance) -> str | None:
        """The lossy transform that the arithmetic applies to this op's weights."""
        by_op = {"linear": self.numerics.linear_weights, **dict.fromkeys(_EXPERTS, self.numerics.expert_weights)}
        return by_op.get(op.spec.name)

    def _decode(self, tensor: LazyTensor) -> torch.Tensor:
        value = tensor.load()
        require_finite(value, tensor.name)
        return value.to(device=self.device, dtype=self.dtypes["model"])

    def _input_scale(self, op: OpInstance, tensor: LazyTensor) -> torch.Tensor:
        """The static encode scale of the activation that this matrix takes (MODEL.md §3.2)."""
        part = tensor.parts().get("input_global_scale")
        if part is None:
            default = nvfp4.default_input_scale(op.attrs["limit"], op.attrs["beta"])
            note = (
                f"experts are stored {tensor.format}, without input_global_scale: arithmetic '{self.numerics.name}' "
                f"quantises the second product's input with {default:g}, under which nothing saturates"
            )
            if note not in self._notes:
                self._notes.append(note)
            return torch.tensor([default], device=self.device)
        scale = part.load().float()
        if not nvfp4.divisible(scale):
            raise NonFiniteWeight(
                f"input_global_scale is {scale.flatten()[0]:g}",
                where=f"tensor '{tensor.name}'",
                expected="a positive finite number whose reciprocal is finite",
            )
        return scale.to(self.device)

    def kv_layout(self, spec: KVSpec) -> KVLayout:
        """Pages of any format, read as the session's arithmetic reads them; a draft head's, as they are stored."""
        read = "exact" if spec.draft else self.numerics.kv_read
        if read != "exact" and spec.kv_format not in ("nvfp4", "fp8"):
            raise BackendRefused(
                f"arithmetic '{self.numerics.name}' reads keys and values as E4M3, the pages are {spec.kv_format}",
                where="backend reference",
                expected="nvfp4 or fp8 pages",
                fix="give --kv-dtype nvfp4, or another --arithmetic",
            )
        return PagedLayout(spec, self.device, read=read)

    def memory_free(self) -> int:
        """What the device, or the host within its control group, has free, less what decoded weights may still take."""
        return max(0, self._free() - self.decoded.room)

    def _free(self) -> int:
        if self.device.type == "cuda":
            return int(torch.cuda.mem_get_info(self.device)[0])
        return host_memory_free()

    def weight_bytes(self, op: OpInstance, slots: Mapping[str, LazyTensor]) -> int:
        """Plain weights in another dtype are converted and held, except experts, which go through the bounded cache."""
        size = self.dtypes["model"].itemsize
        return sum(math.prod(t.shape) * size for t in slots.values() if self._converted(op, t))

    def _converted(self, op: OpInstance, tensor: LazyTensor) -> bool:
        """Whether `prepare` holds a copy, converted or not, where the host could map the file."""
        if tensor.format != "plain" or (op.spec.name in _EXPERTS and tensor.dtype != self.dtypes["model"]):
            return False
        return tensor.dtype != self.dtypes["model"] or self.device.type != "cpu" or not _mapped(tensor)


class ReferenceBackend(Backend):
    """See the package docstring."""

    def open(
        self,
        *,
        device: str | None,
        dtype: str,
        rank: int,
        world: int,
        arithmetic: ArithmeticSpec = NAMED["exact"],
        options: Mapping[str, int] | None = None,
    ) -> ReferenceSession:
        """See `Backend.open`. The reference's own arithmetic is exact: nothing is quantised but what is stored so.

        Without `weight_cache_bytes` a quarter of the memory that is free now is used for decoded weights.
        """
        if dtype not in _DTYPES:
            raise BackendRefused(
                f"compute dtype '{dtype}' is not served", where="backend reference", expected=" or ".join(_DTYPES)
            )
        if world != 1:
            raise BackendRefused(f"a world of {world} ranks is not served", where="backend reference", expected="1")
        try:
            target = torch.device(device or "cpu")
            torch.ones(1, device=target).item()  # the meta device has no values
        except (RuntimeError, AssertionError) as error:
            raise BackendRefused(
                f"device '{device}' cannot be used: {str(error).splitlines()[0]}",
                where="backend reference",
                fix="use --device cpu, or a device of this torch build",
            ) from error
        weight_cache_bytes = (options or {}).get("weight_cache_bytes")
        if weight_cache_bytes is not None and weight_cache_bytes < 0:
            raise BackendRefused(
                f"a weight cache of {weight_cache_bytes} bytes", where="backend reference", expected="0 or more"
            )
        return ReferenceSession(target, _DTYPES[dtype], arithmetic, weight_cache_bytes)
