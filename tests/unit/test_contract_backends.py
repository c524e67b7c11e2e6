"""Every backend that runs here keeps the rules of the contract: the reference, the CPU backend, the portable one
(interpreted) and the example in numpy."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.support import tiny
from tests.support.numpy_example import open_numpy
from tests.unit.test_contract_drills import GRAPH, SMALL, STEP, STORED, VALUES, reference
from tests.unit.test_contract_plan_drills import steps
from tests.unit.test_triton_session import TEXT as PORTABLE
from tests.unit.test_triton_session import VALUES as PORTABLE_VALUES
from tests.unit.test_triton_session import fused_op
from tests.unit.test_triton_session import serving as portable_serving
from tests.unit.test_triton_session import session as portable
from tests.unit.test_triton_session import traced as portable_graph

from m31 import ops
from m31.conformance import check_fixed_buffers, check_layout_id, check_losses, check_op, check_ops, check_release
from m31.conformance.cases import specs
from m31.engine.api import STEPS
from m31.engine.compiler import Compiler, whole
from m31.errors import ContractViolation
from m31.formats.arithmetic import parse
from m31.graph import BoundGraph, Kernel, trace
from m31.ops import OpSpec
from m31.ops.fused import FUSED
from m31.parallel import COLLECTIVES, WHOLE
from m31.sdk.backend import KVSpec, Session, stored_as
from m31.sdk.serving import Serving
from m31_cpu import CpuBackend
from m31_triton.session import TritonSession

BF16: dict[str, Any] = {name: value.bfloat16() for name, value in VALUES.items()}
SOURCES: dict[str, dict[str, Any]] = {"float32": dict(VALUES), "bfloat16": BF16, "quantised": dict(STORED)}


def native() -> Session:
    made: Session = CpuBackend(None).open(  # type: ignore[arg-type]
        device=None, dtype="float32", rank=0, world=1, arithmetic=parse("exact"), options={}
    )
    return made


WHOLE_MODEL = {
    "reference": reference,
    "reference-float64": lambda: reference("float64"),
    "reference-w16a16": lambda: reference(arithmetic="w16a16"),
    "numpy": open_numpy,
}


# --- ops ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WHOLE_MODEL)
def test_ops_of_a_backend_that_serves_all(name: str) -> None:
    done = check_ops(WHOLE_MODEL[name]())
    assert set(done) == {*ops.ALL, *ops.DRAFT, *ops.ADAPTER, *FUSED}
    beyond = () if name.startswith("reference") else (*ops.DRAFT, *ops.ADAPTER)  # the example has neither
    for op, found in done.items():
        if op in COLLECTIVES or op in FUSED or op in beyond:
            assert found.refused, op  # the group's, whatever the backend; and nobody here fuses
            assert not found.ran, op
        else:
            assert len(found.ran) >= len(list(specs()[op].cases())), op
            assert not found.unjudged, op
            assert not found.refused, op


@pytest.mark.parametrize("arithmetic", ["w8a8-mxfp8", "w4a4-megamoe", "w4a16-block-fp8"])
def test_ops_under_an_arithmetic_that_quantises(arithmetic: str) -> None:
    for name in ("linear", "experts"):
        done = check_op(reference(arithmetic=arithmetic), ops.ALL[name])
        assert done.ran
        assert not done.unjudged


@pytest.mark.parametrize("op", [ops.experts, ops.linear, ops.sparse_attention], ids=lambda op: op.name)
def test_ops_of_the_cpu_backend(op: OpSpec) -> None:
    done = check_op(native(), op)
    if op.name != "sparse_attention":
        assert {case.rpartition("/")[2] for case in done.ran} >= {"float32", "bfloat16", "mxfp8"}
    assert len(done.ran) >= 10
    assert not done.unjudged
    assert not done.refused


def test_attention_of_the_portable_backend() -> None:
    """Its kernels take no gaps between elements, which docs/sdk.md allows: they refuse them, and no plan makes any."""
    done = check_op(portable(), ops.sparse_attention, pages=reference(), gaps=False)
    assert len(done.ran) > 10
    assert not done.unjudged
    assert all("heads of 8 channels" in reason or "pages are float32" in reason for reason in done.refused.values())


def test_the_fused_projection_of_the_portable_backend() -> None:
    """Its bound follows from its body."""
    done = check_op(portable(), FUSED["qkv_insert"], pages=reference(), gaps=False)
    assert "qkv_insert/wide/bfloat16/bfloat16 pages" in done.ran
    assert not done.unjudged


class Spoiled(TritonSession):
    """Writes to one slot more, or leaves the norm of keys out."""

    def __init__(self, fault: str) -> None:
        super().__init__(torch.device("cpu"), portable().numerics)
        self.fault = fault

    def kernel(self, op: Any, step: Any) -> Any:
        found = super().kernel(op, step)
        if not isinstance(found, Kernel):
            return found

        def run(outs: Any, ins: Any, w: Any, workspace: Any) -> None:
            ins = list(ins)
            if self.fault == "slot":
                ins[2] = torch.cat([ins[2][:-1], (ins[2][-1:] + 1) % 16])
            else:
                w = replace(w, norms={**w.norms, "k_norm": w.norms["k_norm"] - 1})
            found.run(outs, ins, w, workspace)

        return replace(found, run=run)


@pytest.mark.parametrize("fault", ["slot", "norm"])
def test_a_fused_projection_that_is_wrong(fault: str) -> None:
    with pytest.raises(ContractViolation, match="pages 'k'"):
        check_op(Spoiled(fault), FUSED["qkv_insert"], pages=reference(), gaps=False)


# --- weights --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("name", ["reference", "reference-float64", "numpy"])
def test_weights_of_a_whole_model(name: str, source: str) -> None:
    session = WHOLE_MODEL[name]()
    for op in {call.op.spec.name: call.op for call in GRAPH.calls if call.op.weights is not None}.values():
        slots: Any = {s: tiny.held(t.name, SOURCES[source][t.name]) for s, t in op.slots.items()}
        check_release(session, op, slots)
        check_losses(session, op, slots)


@pytest.mark.parametrize("arithmetic", ["w4a16-shared-scale", "w4a16-block-fp8", "w8a8-mxfp8"])
def test_weights_after_a_lossy_transform(arithmetic: str) -> None:
    session = reference(arithmetic=arithmetic)
    for name in ("linear", "experts"):
        op = next(call.op for call in GRAPH.calls if call.op.spec.name == name)
        check_losses(session, op, {s: tiny.held(t.name, STORED[t.name]) for s, t in op.slots.items()})  # type: ignore[misc]


@pytest.mark.parametrize("source", ["bfloat16", "quantised"])
def test_experts_of_the_cpu_backend_are_owned_or_mapped(source: str) -> None:
    op = next(call.op for call in GRAPH.calls if call.op.spec.name == "experts")
    slots: Any = {s: tiny.held(t.name, SOURCES[source][t.name]) for s, t in op.slots.items()}
    check_release(native(), op, slots)


def test_experts_are_decoded_one_by_one() -> None:
    """All of a published layer would be 29 GB."""
    op = next(call.op for call in GRAPH.calls if call.op.spec.name == "experts")
    slots: Any = {s: tiny.held(t.name, STORED[t.name]) for s, t in op.slots.items()}
    used = native().prepare(op, slots, WHOLE).dequantise()
    assert set(used) == set(slots)
    assert used["w1.0"] is not used["w1.0"]
    assert torch.equal(used["w2.3"].float(), slots["w2.3"].load())


def test_the_matrix_of_the_portable_backend() -> None:
    session = portable()
    op = fused_op(session)
    slots: Any = {s: tiny.held(t.name, PORTABLE_VALUES[t.name].bfloat16()) for s, t in op.slots.items()}
    check_release(session, op, slots)


# --- plans and pages ------------------------------------------------------------------------------------------------


def bound(serving: Serving, graph: Any, text: Any, values: Any) -> tuple[BoundGraph, Any]:
    weights = whole(serving, lambda name: tiny.held(name, values[name]))  # type: ignore[arg-type, return-value]
    compiler = Compiler(serving, graph, text, weights)
    form: Any = "bfloat16" if serving.name == "triton" else "float32"
    layout = serving.kv_layout(KVSpec.of(text, form, form), compiler.assigned(STEPS))
    cache = layout.allocate(12)
    cache.poison(range(12))
    return compiler.bind(STEP), cache


@pytest.mark.parametrize("name", ["reference", "numpy", "cpu", "triton"])
def test_plans(name: str) -> None:
    graph, text, values = GRAPH, SMALL, dict(STORED)
    if name == "triton":
        serving = portable_serving(portable())
        graph, text, values = portable_graph(portable(), "bfloat16"), PORTABLE, dict(PORTABLE_VALUES)
    elif name == "cpu":
        held = {n: tiny.held(n, v) for n, v in values.items()}
        graph = trace(SMALL, stored=lambda n: stored_as(held[n]), pages=("float32", "float32"))  # type: ignore[arg-type]
        serving = Serving("cpu", native())
    else:
        serving = Serving(name, WHOLE_MODEL[name]())
    made, cache = bound(serving, graph, text, values)
    mine = {call.op.spec.name for call in made.graph.calls if made.assigned[call.op.name].by == name}
    alone = {"triton": {"sparse_attention", "qkv_insert"}}
    assert mine == alone.get(name, set(ops.ALL) & {call.op.spec.name for call in made.graph.calls})
    seen = check_fixed_buffers(serving.session, made, STEP, steps(3), cache)
    assert seen > 20 or (name == "cpu" and not seen)  # its plan runs no kernel from Python


def test_a_native_plan_follows_the_cache_that_it_is_given() -> None:
    """Its program holds addresses: it is made again for another cache, and keeps the one that they belong to alive."""
    values = dict(STORED)
    held = {n: tiny.held(n, v) for n, v in values.items()}
    graph = trace(SMALL, stored=lambda n: stored_as(held[n]), pages=("float32", "float32"))  # type: ignore[arg-type]
    serving = Serving("cpu", native())
    made, cache = bound(serving, graph, SMALL, values)
    plan, (batch, *_) = serving.session.compile(made, STEP), steps(3)
    want = plan.run(batch, cache).clone()
    page = int(batch.page_table[0, 0])
    for _ in range(3):
        other = cache.layout.allocate(12)
        other.poison(range(12))
        assert torch.equal(plan.run(batch, other), want)
        assert bool(other.read(0, page)["k"][:, 0].isfinite().all())  # it wrote there, not where the last one was
        alive = weakref.ref(other)
        del other
        gc.collect()
        assert alive() is not None


@pytest.mark.parametrize("kv", ["float32", "bfloat16", "fp8", "nvfp4"])
def test_pages_of_the_reference(kv: str) -> None:
    check_layout_id(reference().kv_layout(KVSpec.of(SMALL, kv, kv)), layers=SMALL.num_layers)  # type: ignore[arg-type]


@pytest.mark.parametrize("kv", ["float32", "bfloat16"])
def test_pages_of_the_numpy_example(kv: str) -> None:
    check_layout_id(open_numpy().kv_layout(KVSpec.of(SMALL, kv, kv)), layers=SMALL.num_layers)  # type: ignore[arg-type]


def test_the_steps_of_the_plans_differ() -> None:
    """Else a plan could return a constant."""
    assert len({int(batch.size.tokens) for batch in steps(3)}) == 3
    assert STEP.tokens >= 17
    assert torch.equal(steps(1)[0].tokens[:3], torch.tensor([1, 2, 3]))
