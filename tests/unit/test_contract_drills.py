"""Backends that break one rule each: every one is caught by a check that names the rule, and the reference passes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.support import tiny

from m31.conformance import (
    RULES,
    bound,
    check_fixed_buffers,
    check_layout_id,
    check_linear_arithmetic,
    check_release,
    roundoff,
)
from m31.errors import ContractViolation, OpRefused
from m31.formats.arithmetic import parse
from m31.graph import Arithmetic, Kernel, OpInstance, Shard, StepBatch, StepClass, trace
from m31.sdk.backend import ExportedPages, KVSpec
from m31_reference.cache import PagedCache
from m31_reference.session import ReferenceBackend, ReferenceSession

SMALL = tiny.quantisable(num_layers=2)
GRAPH = trace(SMALL)
VALUES = tiny.weights(GRAPH, seed=1)
STORED = tiny.quantised(GRAPH, VALUES)
STEP = StepClass(kind="mixed", q_len=0, tokens=16, seqs=2, rows=2, pages=16)
SPEC = KVSpec.of(SMALL, "float32", "float32")


def reference(dtype: str = "float32", arithmetic: str = "exact") -> ReferenceSession:
    return ReferenceBackend(None).open(device=None, dtype=dtype, rank=0, world=1, arithmetic=parse(arithmetic))  # type: ignore[arg-type]


def op(name: str) -> OpInstance:
    return next(call.op for call in GRAPH.calls if call.op.spec.name == name)


def violated(rule: str) -> Any:
    assert rule in RULES
    return pytest.raises(ContractViolation, match=f"breaks the rule '{rule}'")


class Spoiled:
    """The reference with one fault."""

    def __init__(self, **faults: Any) -> None:
        self._real, self._faults = reference(), faults

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def kernel(self, op: OpInstance, step: StepClass) -> Any:
        found = self._real.kernel(op, step)
        assert isinstance(found, Kernel)
        return self._faults["kernel"](found) if "kernel" in self._faults else found

    def prepare(self, op: OpInstance, slots: Mapping[str, Any], shard: Shard) -> Any:
        handle = self._real.prepare(op, slots, shard)
        return self._faults["prepare"](handle, slots) if "prepare" in self._faults else handle


# --- a kernel that lies about its arithmetic ------------------------------------------------------------------------


def in_bf16(kernel: Kernel) -> Kernel:
    def run(outs: Any, ins: Any, w: Any, workspace: Any) -> None:
        kernel.run(outs, [ins[0].bfloat16().float()], w, workspace)

    return replace(kernel, run=run)


def without_the_tail(kernel: Kernel) -> Kernel:
    def run(outs: Any, ins: Any, w: Any, workspace: Any) -> None:
        x = ins[0].clone()
        x[:, -1] = 0
        kernel.run(outs, [x], w, workspace)

    return replace(kernel, run=run)


def nothing_written(kernel: Kernel) -> Kernel:
    return replace(kernel, run=lambda outs, ins, w, workspace: None)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("seed", range(5))
def test_the_reference_is_as_accurate_as_it_says(dtype: str, seed: int) -> None:
    check_linear_arithmetic(reference(dtype), op("linear"), STEP, seed=seed)


@pytest.mark.parametrize("lie", [in_bf16, without_the_tail, nothing_written])
def test_a_kernel_that_lies_about_its_arithmetic(lie: Any) -> None:
    with violated("arithmetic") as caught:
        check_linear_arithmetic(Spoiled(kernel=lie), op("linear"), STEP, seed=0)  # type: ignore[arg-type]
    assert caught.value.rule == "arithmetic"
    assert "declares float32, accumulated in float32, written in float32, and is off by" in str(caught.value)


def test_the_same_kernel_with_an_honest_declaration_is_right() -> None:
    def honest(kernel: Kernel) -> Kernel:
        return replace(in_bf16(kernel), arithmetic=Arithmetic("bfloat16*float32", "float32", "float32"))

    check_linear_arithmetic(Spoiled(kernel=honest), op("linear"), STEP, seed=0)  # type: ignore[arg-type]


def test_a_bound_needs_formats_that_it_knows() -> None:
    assert roundoff("float32") == 2.0**-24
    with pytest.raises(OpRefused, match="'int7' has no known precision; expected float64, "):
        roundoff("int7")
    ones = torch.ones(1, dtype=torch.float64).numpy()

    def allowed(operands: str) -> float:
        return float(bound(Arithmetic(operands, "float32", "float32"), ones, ones, 64, given="float32")[0])

    assert allowed("float32") == allowed("float32*float32")
    assert allowed("bfloat16") - allowed("float32") == pytest.approx(2 * 2.0**-8)
    assert allowed("bfloat16*float32") - allowed("float32") == pytest.approx(2.0**-8)


# --- a prepare that keeps its source alive --------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["linear", "experts", "router", "gemma_rmsnorm", "embedding"])
@pytest.mark.parametrize("quantised", [False, True])
@pytest.mark.parametrize("arithmetic", ["exact", "w4a4-megamoe", "w8a8-mxfp8"])
def test_the_reference_releases_what_it_does_not_read_in_place(name: str, quantised: bool, arithmetic: str) -> None:
    source = STORED if quantised else {n: v.bfloat16() for n, v in VALUES.items()}
    slots = {slot: tiny.held(decl.name, source[decl.name]) for slot, decl in op(name).slots.items()}
    check_release(reference(arithmetic=arithmetic), op(name), slots)


def test_a_prepare_that_keeps_its_source_alive() -> None:
    def hoard(handle: Any, slots: Mapping[str, Any]) -> Any:
        handle.hoard = [tensor.load() for tensor in slots.values()]
        return handle

    slots = {slot: tiny.held(d.name, VALUES[d.name].bfloat16()) for slot, d in op("linear").slots.items()}
    with violated("release") as caught:
        check_release(Spoiled(prepare=hoard), op("linear"), slots)  # type: ignore[arg-type]
    assert "keeps what it was given for weight" in str(caught.value)


def test_a_view_into_the_source_is_found_too() -> None:
    slots = {slot: tiny.held(d.name, STORED[d.name]) for slot, d in op("linear").slots.items()}
    with violated("release"):
        check_release(Hoarder(), op("linear"), slots)  # type: ignore[arg-type]


class Hoarder(Spoiled):
    """Keeps one element of the stored codes, and says that it keeps nothing."""

    def prepare(self, op: OpInstance, slots: Mapping[str, Any], shard: Shard) -> Any:
        self.kept = slots["weight"].parts()["codes"].load()[:1, :1]
        return replace(self._real.prepare(op, slots, shard), in_place=frozenset())


# --- a plan that allocates ------------------------------------------------------------------------------------------


def steps(count: int) -> list[StepBatch]:
    made = []
    for i in range(count):
        batch = StepBatch.allocate(STEP, torch.device("cpu"))
        n = 3 + i
        batch.fill(
            tokens=list(range(1, n + 1)),
            positions=list(range(n)),
            q_lens=[n],
            seq_lens=[n],
            slot_map=list(range(n)),
            page_table=[list(range(-(-n // SPEC.page_tokens)))],
            out_rows=[n - 1],
        )
        made.append(batch)
    return made


def test_the_default_plan_writes_where_it_wrote() -> None:
    engine = tiny.engine(SMALL, VALUES, dtype="float32")
    plan = engine.compiler.serving.session.compile(engine.compiler.bind(STEP), STEP)
    check_fixed_buffers(plan, steps(4), engine.cache)


def test_a_plan_that_allocates() -> None:
    engine = tiny.engine(SMALL, VALUES, dtype="float32")
    real = engine.compiler.serving.session.compile(engine.compiler.bind(STEP), STEP)
    kept = []

    class Allocating:
        def run(self, batch: StepBatch, cache: Any) -> torch.Tensor:
            kept.append(real.run(batch, cache).clone())
            return kept[-1]

    with violated("fixed-buffers") as caught:
        check_fixed_buffers(Allocating(), steps(3), engine.cache)
    assert "3 places of the logits in 3 runs" in str(caught.value)


# --- a layout id from another version -------------------------------------------------------------------------------


@pytest.mark.parametrize("kv", ["float32", "bfloat16", "fp8", "nvfp4"])
def test_the_reference_refuses_pages_of_another_layout(kv: str) -> None:
    check_layout_id(reference().kv_layout(KVSpec.of(SMALL, kv, kv)))  # type: ignore[arg-type]


class Trusting(PagedCache):
    """Writes whatever it is given."""

    def import_(self, exported: ExportedPages, pages: Any) -> None:
        for name, tensor in self._parts():
            if name in exported.tensors:
                tensor[list(pages)[:1]] = exported.tensors[name]


class TrustingLayout:
    def __init__(self, layout_id: str | None = None) -> None:
        self._real = reference().kv_layout(SPEC)
        self.layout_id, self.page_bytes = layout_id or self._real.layout_id, self._real.page_bytes

    def allocate(self, pages: int) -> PagedCache:
        cache = Trusting(self._real, pages)  # type: ignore[arg-type]
        real = cache.export
        cache.export = lambda pages: replace(real(pages), layout_id=self.layout_id)  # type: ignore[method-assign]
        return cache


def test_a_layout_id_from_another_version() -> None:
    with violated("layout-id") as caught:
        check_layout_id(TrustingLayout())  # type: ignore[arg-type]
    assert "takes pages of another version" in str(caught.value)
    with violated("layout-id"):
        check_layout_id(TrustingLayout("mine"))  # type: ignore[arg-type]
