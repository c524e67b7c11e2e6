"""Opening the CPU backend, choosing its kernels, handing them the checkpoint's own bytes."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from m31.errors import BackendRefused
from m31.formats.arithmetic import NAMED, ArithmeticSpec
from m31.graph import Kernel, OpInstance, Refusal, Shard, StepClass
from m31.sdk import Backend, LazyTensor, Session, host_memory_free, stored_as, this_machine
from m31_cpu.experts import experts_kernel, stored_formats
from m31_cpu.isa import choose
from m31_cpu.threads import Pool, thread_count
from m31_cpu.weights import ExpertWeights, copied_bytes, expert_weights


class CpuSession(Session):
    """The experts in float32. The KV cache is the reference's: no op here touches it."""

    def __init__(self, numerics: ArithmeticSpec) -> None:
        self.device, self.numerics = torch.device("cpu"), numerics
        self.dtypes = {"model": torch.float32, "accum": torch.float32, "int64": torch.int64}
        self.isa, self.isa_reason = choose(this_machine().cpu.flags)
        self.pool = Pool(thread_count())

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

    def memory_free(self) -> int:
        """What the host has free within its control group."""
        return host_memory_free()

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
        arithmetic: ArithmeticSpec = NAMED["exact"],
        options: Mapping[str, int] | None = None,
    ) -> CpuSession:
        """See `Backend.open`. Takes no options: experts are read in place, so there is nothing to keep decoded."""
        if device not in (None, "cpu"):
            raise BackendRefused(f"device '{device}' is not served", where="backend cpu", expected="cpu")
        if world != 1:
            raise BackendRefused(f"a world of {world} ranks is not served", where="backend cpu", expected="1")
        return CpuSession(arithmetic)
