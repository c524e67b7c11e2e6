"""Opening the CPU backend, choosing its kernels, handing them the checkpoint's own bytes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from m31.errors import BackendRefused
from m31.formats.arithmetic import ArithmeticSpec, parse
from m31.graph import Kernel, OpInstance, Refusal, Shard, StepClass
from m31.sdk import this_machine
from m31.sdk.backend import Backend, IndexFormat, KVFormat, KVLayout, KVSpec, LazyTensor, Limits, Session
from m31.sdk.memory import available_host_memory
from m31_cpu.experts import experts_kernel, stored_formats
from m31_cpu.isa import choose
from m31_cpu.threads import Pool, thread_count
from m31_cpu.weights import ExpertWeights, copied_bytes, expert_weights, stored_as

if TYPE_CHECKING:
    from m31.config import Model

_KV: tuple[KVFormat, ...] = ("float32", "bfloat16", "fp8", "nvfp4")  # of the reference's pages, which hold the cache
_INDEX: tuple[IndexFormat, ...] = (*_KV, "int8")


class CpuSession(Session):
    """The experts in float32. The KV cache is the reference's: no op here touches it."""

    def __init__(self, numerics: ArithmeticSpec) -> None:
        self.device, self.numerics = torch.device("cpu"), numerics
        self.dtypes = {"model": torch.float32, "accum": torch.float32, "int64": torch.int64}
        self.isa, self.isa_reason = choose(this_machine().cpu.flags)
        self.pool = Pool(thread_count())

    def limits(self, model: Model) -> Limits:
        """The model's own limits; text only. Page formats are what the reference serves, exact ones first."""
        return Limits(
            max_context=model.text.max_position,
            kv_formats=_KV,
            index_formats=_INDEX,
            draft_tokens=0,
            image=False,
            video=False,
        )

    def kernel(self, op: OpInstance, step: StepClass) -> Kernel | Refusal:
        """The experts whose weights can be read in place."""
        if op.spec.name != "experts":
            return Refusal("no native kernel in this release")
        assert op.weights is not None
        unknown = [slot for slot, decl in op.weights.slots.items() if decl.stored is None]
        if unknown:
            return Refusal(f"the graph was traced without a checkpoint: nobody says how '{unknown[0]}' is stored")
        found = stored_formats(op, {slot: str(decl.stored) for slot, decl in op.weights.slots.items()})
        if isinstance(found, Refusal):
            return found
        formats = " and ".join(dict.fromkeys(found))
        why = f"{formats} in place, {self.isa} ({self.isa_reason}), threads: {self.pool.count}"
        return experts_kernel(op, step, found, self.isa, why, self.pool)

    def prepare(self, op: OpInstance, slots: Mapping[str, LazyTensor], shard: Shard) -> ExpertWeights:
        """Addresses of the stored bytes; nothing but global scales is read.

        Damaged block scales and values that are not finite are found when a token needs them (decision 011).
        """
        found = stored_formats(op, {slot: stored_as(tensor) for slot, tensor in slots.items()})
        if isinstance(found, Refusal):
            raise BackendRefused(f"op {op.name}: {found.reason}", where="backend cpu")
        return expert_weights(slots, found)

    def kv_layout(self, spec: KVSpec) -> KVLayout:
        """None of its own: every op on the cache falls back.

        Raises:
            BackendRefused: always.
        """
        raise BackendRefused(
            "has no pages of its own", where="backend cpu", expected="the layout of the backend that serves kv_write"
        )

    def memory_free(self) -> int:
        """What the host has free within its control group."""
        return available_host_memory()

    def weight_bytes(self, op: OpInstance, slots: Mapping[str, LazyTensor]) -> int:
        """Copies of what lies misaligned in its file; usually none."""
        return sum(copied_bytes(tensor) for tensor in slots.values())


class CpuBackend(Backend):
    """See the package docstring."""

    def open(
        self,
        *,
        device: str | None,
        dtype: str,
        rank: int,
        world: int,
        arithmetic: str | None = None,
        weight_cache_bytes: int | None = None,
    ) -> CpuSession:
        """See `Backend.open`. Exact arithmetic only; there is no cache of decoded weights, because none are decoded."""
        if device not in (None, "cpu"):
            raise BackendRefused(f"device '{device}' is not served", where="backend cpu", expected="cpu")
        if dtype != "float32":
            raise BackendRefused(f"compute dtype '{dtype}' is not served", where="backend cpu", expected="float32")
        if world != 1:
            raise BackendRefused(f"a world of {world} ranks is not served", where="backend cpu", expected="1")
        if weight_cache_bytes is not None:
            raise BackendRefused(
                f"a weight cache of {weight_cache_bytes} bytes",
                where="backend cpu",
                expected="none: experts are read in place and never decoded into memory",
            )
        numerics = parse(arithmetic or "exact")
        if not numerics.exact:
            raise BackendRefused(
                f"arithmetic '{numerics.name}' is not served",
                where="backend cpu",
                expected="exact",
                fix="choose the reference to imitate another arithmetic",
            )
        return CpuSession(numerics)
