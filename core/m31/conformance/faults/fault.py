"""What a fault is, and a backend that has one: another backend, wrapped, with one mistake at one seam of the SDK."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from m31.conformance.item import Level
from m31.errors import ContractViolation
from m31.graph import (
    BoundGraph,
    Kernel,
    OpInstance,
    Plan,
    Refusal,
    RunKernel,
    Shard,
    StepClass,
    WeightHandle,
    compose,
    prepare_parts,
    unfused,
)
from m31.ops import Attrs
from m31.ops.body import FusedOp
from m31.sdk.backend import Backend, ExportedPages, KVCache, KVLayout, KVSpec, LazyTensor, Limits, Session

if TYPE_CHECKING:
    import torch

    from m31.config import Model
    from m31.formats.arithmetic import ArithmeticSpec
    from m31.formats.transforms import Loss
    from m31.sdk.manifest import Manifest


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call of a kernel, as a fault gets hold of it.

    Args:
        op, step: what the kernel is for.
        run: the healthy kernel.
        kernel: a healthy kernel for another instance.
        outs, ins, weights, workspace: what the kernel was given.
    """

    op: OpInstance
    step: StepClass
    run: RunKernel
    kernel: Callable[[OpInstance], RunKernel]
    outs: Sequence[Any]
    ins: Sequence[Any]
    weights: Any
    workspace: torch.Tensor | None

    def real(self, ins: Sequence[Any] | None = None) -> None:
        """The healthy kernel, on these inputs or on others."""
        self.run(self.outs, self.ins if ins is None else ins, self.weights, self.workspace)


@dataclass(frozen=True, kw_only=True)
class Break:
    """Where and how a backend is broken; what is None is healthy.

    Args:
        op: the op whose kernels and weights are broken; "" is every op.
        kinds: of the steps in which its kernels are.
        run: instead of running the kernel.
        attrs: attributes that the kernel is made for, instead of the op's.
        kernel: the kernel, or a refusal, instead of the healthy one; gets the op as well.
        weights: what `prepare` is given for a slot, of all slots, instead of the checkpoint's tensor.
        honest: whether the handle tells the values that come of it; else it tells the checkpoint's.
        handle: the handle, and what it was made of, changed.
        weight_bytes, limits, fusions, memory_free: what the session says, changed.
        cache: instead of the healthy pages.
        layout_id: the name of the pages.
        compile: the plan, from the session, the bound graph and the step.
        manifest: the manifest, changed.
        opened: what `open` was asked for, changed: dtype, arithmetic, options.
        fused: serve fused ops with the kernels of their bodies. The reference has no fused kernel that could be broken.
    """

    op: str = ""
    kinds: tuple[str, ...] = ("decode", "verify", "mixed")
    run: Callable[[Call], None] | None = None
    attrs: Callable[[Attrs], Attrs] | None = None
    kernel: Callable[[Kernel, OpInstance], Kernel | Refusal] | None = None
    weights: Callable[[str, Mapping[str, LazyTensor]], LazyTensor] | None = None
    honest: bool = False
    handle: Callable[[Any, Mapping[str, LazyTensor]], Any] | None = None
    weight_bytes: Callable[[int], int] | None = None
    limits: Callable[[Limits], Limits] | None = None
    cache: Callable[[KVCache], KVCache] | None = None
    layout_id: Callable[[str], str] | None = None
    compile: Callable[[Session, BoundGraph, StepClass], Plan] | None = None
    manifest: Callable[[Manifest], Manifest] | None = None
    opened: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    fused: tuple[str, ...] = ()


By = Literal["item", "omission"]
"""How a fault is caught: an item fails, or a claim has no item that passes (DESIGN.md §7)."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One mistake that somebody made or could make, and the item that finds it.

    Args:
        name: unique, kebab-case.
        what: the mistake, one sentence.
        source: where it was seen: a report (BUG-n), or a section of the design.
        level, subject: of the items that are run against it.
        catches: pattern of the ids of which one should catch it; of the claim, where `by` is "omission".
        break_: the mistake.
        by: see `By`.
    """

    name: str
    what: str
    source: str
    level: Level
    subject: str
    catches: str
    break_: Break
    by: By = "item"


class Pair:
    """A handle that tells one thing, and the one that the kernels use."""

    def __init__(self, told: WeightHandle, used: WeightHandle) -> None:
        self.told, self.used = told, used
        self.layout_id, self.in_place = told.layout_id, told.in_place

    @property
    def losses(self) -> Mapping[str, Loss]:
        """What is told."""
        return self.told.losses

    def dequantise(self) -> Mapping[str, torch.Tensor]:
        """What is told."""
        return self.told.dequantise()


class FaultySession(Session):
    """A session with one fault.

    Args:
        inner: a healthy one.
        fault: what is broken.
    """

    def __init__(self, inner: Session, fault: Break) -> None:
        self.inner, self.fault = inner, fault
        self.device, self.dtypes, self.numerics = inner.device, inner.dtypes, inner.numerics

    def _broken(self, op: OpInstance) -> bool:
        return self.fault.op in ("", op.spec.name)

    @property
    def notes(self) -> Sequence[str]:
        """Those of the healthy one."""
        return self.inner.notes

    def limits(self, model: Model, declared: Limits) -> Limits:
        """The healthy one's, changed."""
        limits = self.inner.limits(model, declared)
        return self.fault.limits(limits) if self.fault.limits else limits

    def fusions(self) -> tuple[str, ...]:
        """The healthy one's, and those of the fault."""
        return (*self.fault.fused, *self.inner.fusions())

    def kernel(self, op: OpInstance, step: StepClass) -> Kernel | Refusal:
        """The healthy kernel, or the broken one."""
        fault = self.fault
        found = self._healthy(op, step)
        if isinstance(found, Refusal) or not self._broken(op) or step.kind not in fault.kinds:
            return found if isinstance(found, Refusal) else self._unpaired(found)
        if fault.attrs is not None:
            found = self._healthy(replace(op, attrs=fault.attrs(op.attrs)), step)
            assert isinstance(found, Kernel), found
        found = self._unpaired(found)
        if fault.run is not None:
            found = replace(found, run=self._running(op, step, found.run))
        return fault.kernel(found, op) if fault.kernel is not None else found

    def _healthy(self, op: OpInstance, step: StepClass) -> Kernel | Refusal:
        found = self.inner.kernel(op, step)
        if isinstance(found, Kernel) or not isinstance(op.spec, FusedOp) or op.spec.name not in self.fault.fused:
            return found
        body = unfused(op)
        kernels: dict[str, Kernel] = {}
        for call in body.graph.calls:
            part = self.inner.kernel(call.op, step)
            if isinstance(part, Refusal):
                return part
            kernels[call.op.name] = part
        run = compose(body, kernels, self.dtypes, self.device)
        return replace(next(iter(kernels.values())), name=f"body of {op.spec.name}", run=run)

    @staticmethod
    def _unpaired(kernel: Kernel) -> Kernel:
        """The same, with the handle that it uses."""

        def run(outs: Sequence[Any], ins: Sequence[Any], weights: Any, workspace: torch.Tensor | None) -> None:
            kernel.run(outs, ins, weights.used if isinstance(weights, Pair) else weights, workspace)

        return replace(kernel, run=run)

    def _running(self, op: OpInstance, step: StepClass, real: RunKernel) -> RunKernel:
        broken = self.fault.run
        assert broken is not None

        def other(instance: OpInstance) -> RunKernel:
            found = self._healthy(instance, step)
            if isinstance(found, Refusal):
                raise ContractViolation(
                    "arithmetic", f"no kernel to break: {found.reason}", where=f"fault in {op.name}"
                )
            return self._unpaired(found).run

        def run(outs: Sequence[Any], ins: Sequence[Any], weights: Any, workspace: torch.Tensor | None) -> None:
            broken(
                Call(op=op, step=step, run=real, kernel=other, outs=outs, ins=ins, weights=weights, workspace=workspace)
            )

        return run

    def prepare(self, op: OpInstance, slots: Mapping[str, LazyTensor], shard: Shard) -> WeightHandle:
        """The healthy handle, of other weights, or changed."""
        handle = self._prepared(op, slots, shard)
        if not self._broken(op):
            return handle
        if self.fault.weights is not None:
            changed = {slot: self.fault.weights(slot, slots) for slot in slots}
            used = self._prepared(op, changed, shard)
            handle = used if self.fault.honest else Pair(handle, used)
        made: WeightHandle = self.fault.handle(handle, slots) if self.fault.handle is not None else handle
        return made

    def _prepared(self, op: OpInstance, slots: Mapping[str, LazyTensor], shard: Shard) -> WeightHandle:
        if isinstance(op.spec, FusedOp) and op.spec.name in self.fault.fused:
            return prepare_parts(unfused(op), slots, lambda part, own: self.inner.prepare(part, own, shard))
        return self.inner.prepare(op, slots, shard)

    def weight_bytes(self, op: OpInstance, slots: Mapping[str, LazyTensor]) -> int:
        """The healthy one's, changed."""
        size = self.inner.weight_bytes(op, slots)
        return self.fault.weight_bytes(size) if self.fault.weight_bytes and self._broken(op) else size

    def kv_layout(self, spec: KVSpec) -> KVLayout:
        """The healthy pages, or broken ones."""
        layout = self.inner.kv_layout(spec)
        return FaultyLayout(layout, self.fault) if self.fault.cache or self.fault.layout_id else layout

    def memory_free(self) -> int:
        """The healthy one's."""
        return self.inner.memory_free()

    def shares_pages(self, layout: KVLayout) -> bool:
        """The healthy one's."""
        return self.inner.shares_pages(layout)

    def compile(self, graph: BoundGraph, step: StepClass) -> Plan:
        """The healthy plan, or a broken one."""
        if self.fault.compile is not None:
            return self.fault.compile(self.inner, graph, step)
        return self.inner.compile(graph, step)


class FaultyLayout(KVLayout):
    """Pages with a fault."""

    def __init__(self, inner: KVLayout, fault: Break) -> None:
        self.inner, self._fault = inner, fault
        self.layout_id = fault.layout_id(inner.layout_id) if fault.layout_id else inner.layout_id
        self.page_bytes = inner.page_bytes

    def allocate(self, pages: int) -> KVCache:
        """Healthy pages under the layout's name, changed."""
        cache = self.inner.allocate(pages)
        cache.layout = self
        if self._fault.layout_id is not None:
            real, name = cache.export, self.layout_id

            def export(which: Sequence[int]) -> ExportedPages:
                return replace(real(which), layout_id=name)

            cache.export = export  # type: ignore[method-assign, assignment]
        return self._fault.cache(cache) if self._fault.cache else cache


class FaultyBackend(Backend):
    """A backend with one fault; a `Bench` takes it as it is.

    Args:
        inner: a healthy backend.
        fault: what is broken.
    """

    def __init__(self, inner: Backend, fault: Break) -> None:
        super().__init__(fault.manifest(inner.manifest) if fault.manifest else inner.manifest)
        self.inner, self.fault = inner, fault

    def open(
        self,
        *,
        device: str | None,
        dtype: str,
        rank: int,
        world: int,
        arithmetic: ArithmeticSpec,
        options: Mapping[str, int],
    ) -> Session:
        """A session of the healthy one, broken."""
        asked: dict[str, Any] = {
            "device": device,
            "dtype": dtype,
            "rank": rank,
            "world": world,
            "arithmetic": arithmetic,
            "options": options,
        }
        return FaultySession(self.inner.open(**(self.fault.opened(asked) if self.fault.opened else asked)), self.fault)
