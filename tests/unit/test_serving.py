"""Who serves which op: fallback by declaration, counted; pages that two backends share."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from tests.support import tiny
from tests.support.fusing import Composed
from tests.unit.test_whole_model import greedy, ids_for, logits

from m31.engine.api import STEPS
from m31.engine.compiler import Compiler, PreparedWeights, whole
from m31.engine.engine import Engine
from m31.errors import BackendRefused, ContractViolation, NoKernel
from m31.graph import Assigned, Kernel, OpInstance, Refusal, Shard, StepClass, trace
from m31.sdk.backend import KVLayout, KVSpec, Limits, Session
from m31.sdk.serving import Serving
from m31_reference.session import ReferenceBackend, ReferenceSession

SMALL = tiny.text(num_layers=2)
GRAPH = trace(SMALL)
VALUES = tiny.weights(GRAPH, seed=3)
SPEC = KVSpec.of(SMALL, "float64", "float64")


def reference(dtype: str = "float64") -> ReferenceSession:
    return ReferenceBackend(None).open(device=None, dtype=dtype, rank=0, world=1)  # type: ignore[arg-type]


class Partial(Session):
    """Serves some ops with the reference's kernels under its own name, and refuses the others."""

    def __init__(self, *ops: str, dtype: str = "float64", shares: bool = False, step: str | None = None) -> None:
        self._real, self._ops, self._shares, self._step = reference(dtype), ops, shares, step
        self.device, self.dtypes, self.numerics = self._real.device, self._real.dtypes, self._real.numerics
        self.prepared: list[str] = []

    def limits(self, model: Any, declared: Limits) -> Limits:
        return self._real.limits(model, declared)

    def kernel(self, op: OpInstance, step: StepClass) -> Kernel | Refusal:
        if op.spec.name not in self._ops or self._step not in (None, step.kind):
            return Refusal(f"no {op.spec.name} at {step.kind}")
        return self._real.kernel(op, step)

    def prepare(self, op: OpInstance, slots: Mapping[str, Any], shard: Shard) -> Any:
        self.prepared.append(op.spec.name)
        return self._real.prepare(op, slots, shard)

    def kv_layout(self, spec: KVSpec) -> KVLayout:
        raise BackendRefused("has no pages", where="backend partial")

    def shares_pages(self, layout: KVLayout) -> bool:
        return self._shares

    def memory_free(self) -> int:
        return 1 << 30

    def weight_bytes(self, op: OpInstance, slots: Mapping[str, Any]) -> int:
        return 1000


def compiler(session: Session, *, may: tuple[str, ...], spare: Session | None = None) -> Compiler:
    serving = Serving("partial", session, may_fall_back=may, spare=("reference", spare or reference()))
    return Compiler(serving, GRAPH, SMALL, whole(serving, lambda name: tiny.held(name, VALUES[name])))  # type: ignore[arg-type, return-value]


OTHERS = tuple(sorted({c.op.spec.name for c in GRAPH.calls} - {"experts"}))


def test_what_falls_back_is_counted_and_computes_the_same() -> None:
    made = compiler(Partial("experts"), may=OTHERS)
    layout = made.serving.kv_layout(SPEC, made.assigned(STEPS))
    engine = Engine(
        compiler=made, cache=layout.allocate(16), page_tokens=SPEC.page_tokens, chunk_tokens=2048, prefix_cache=False
    )
    ids = ids_for(SMALL, 20)
    want = logits(tiny.engine(SMALL, VALUES, dtype="float64"), ids)
    assert torch.equal(logits(engine, ids), want)
    calls = [c.op.spec.name for c in GRAPH.calls if c.op.spec.name != "experts"]
    assert engine.fallback_calls == {name: calls.count(name) for name in calls}
    logits(engine, ids)
    assert engine.fallback_calls["linear"] == 2 * calls.count("linear")


def test_only_what_is_declared_falls_back() -> None:
    """BUG-113: no silent fallback."""
    made = compiler(Partial("experts"), may=tuple(op for op in OTHERS if op not in ("router", "rope")))
    with pytest.raises(NoKernel, match=r"no kernel for rope \(no rope at decode\), router \(no router"):
        list(made.assigned(STEPS))


def test_a_backend_that_serves_an_op_at_some_steps_has_its_weights_prepared_by_both() -> None:
    session = Partial("experts", step="decode")
    made = compiler(session, may=(*OTHERS, "experts"))
    for step in STEPS:
        bound = made.bind(step)
        (by,) = {bound.assigned[c.op.name].by for c in GRAPH.calls if c.op.spec.name == "experts"}
        assert by == ("partial" if step.kind == "decode" else "reference")
        assert (bound.fallbacks["experts"] == 0) == (step.kind == "decode")
    assert session.prepared == ["experts"]
    assert len(made.weights._handles) == len(GRAPH.weights) + 1
    made.bind(STEPS[0])
    assert session.prepared == ["experts"]  # once


def test_memory_is_counted_for_whoever_prepares() -> None:
    made = compiler(Partial("experts", "linear"), may=OTHERS)
    alone = Serving("reference", reference())
    weights = PreparedWeights(alone, lambda name: tiny.held(name, VALUES[name]), Shard(0, 1))  # type: ignore[arg-type, return-value]
    real = reference()
    served = [(op, found) for op, found in made.assigned(STEPS) if op.weights is not None]
    others = {op.weights.name: real.weight_bytes(op, weights.slots(op)) for op, f in served if f.by == "reference"}  # type: ignore[union-attr]
    mine = {op.weights.name for op, f in served if f.by == "partial"}  # type: ignore[union-attr]
    assert mine
    assert made.weights.bytes_needed(made.assigned(STEPS)) == sum(others.values()) + 1000 * len(mine)


ATTENTION = ("sparse_attention", "block_scores")


def test_pages_belong_to_whoever_serves_all_of_them_or_are_shared_by_consent() -> None:
    def owner(session: Session, *, may: tuple[str, ...]) -> KVLayout:
        made = compiler(session, may=may)
        return made.serving.kv_layout(SPEC, made.assigned(STEPS))

    rest = tuple(op for op in (*OTHERS, "experts") if op not in ATTENTION)
    assert "m31-reference" in owner(Partial("experts"), may=OTHERS).layout_id
    assert "m31-reference" in owner(Partial(*ATTENTION, shares=True), may=rest).layout_id
    with pytest.raises(BackendRefused, match=r"serves some ops on the KV cache and leaves others to reference"):
        owner(Partial(*ATTENTION), may=rest)
    stateful = ("kv_write", "index_write", *ATTENTION)
    with pytest.raises(BackendRefused, match="has no pages"):  # it serves all of them, so it is asked
        owner(Partial(*stateful), may=tuple(op for op in (*OTHERS, "experts") if op not in stateful))


def test_two_sessions_share_device_and_dtypes() -> None:
    with pytest.raises(BackendRefused, match=r"computes in float64, int64 on cpu.*does in float32, int64 on cpu"):
        Serving("partial", Partial("experts"), may_fall_back=OTHERS, spare=("reference", reference("float32")))


def test_both_reasons_are_told_where_neither_serves() -> None:
    serving = Serving("partial", Partial(), may_fall_back=OTHERS, spare=("spare", Partial()))
    op = next(c.op for c in GRAPH.calls if c.op.spec.name == "rope")
    found = serving.assign(op, STEPS[0])
    assert found == Refusal("no rope at decode; spare: no rope at decode")
    kept = Serving("partial", Partial("rope")).assign(op, STEPS[0])
    assert isinstance(kept, Assigned)
    assert (kept.by, kept.fallback, kept.kernel.name) == ("partial", None, "m31_reference.rope")


class Fusing(Composed):
    """Fuses `add_norm` at steps of one kind, or of one size."""

    def __init__(self, kind: str | None, tokens: int | None = None) -> None:
        super().__init__(reference())
        self._kind, self._tokens = kind, tokens

    def fusions(self) -> tuple[str, ...]:
        return ("add_norm",)

    def kernel(self, op: OpInstance, step: StepClass) -> Any:
        if op.spec.name == "add_norm" and (step.kind != self._kind and step.tokens != self._tokens):
            return Refusal("not at this step")
        return super().kernel(op, step)


@pytest.mark.parametrize("kind", ["decode", "mixed"])
def test_an_op_and_its_fused_form_have_handles_of_their_own(kind: str) -> None:
    """They take the same tensor: whichever is bound second must not get the other's."""
    serving = Serving("fusing", Fusing(kind))  # type: ignore[arg-type]
    made = Compiler(serving, GRAPH, SMALL, whole(serving, lambda name: tiny.held(name, VALUES[name])))  # type: ignore[arg-type, return-value]
    cache = reference().kv_layout(SPEC).allocate(16)
    engine = Engine(compiler=made, cache=cache, page_tokens=SPEC.page_tokens, chunk_tokens=2048, prefix_cache=False)
    ids = ids_for(SMALL, 9)
    want = tiny.engine(SMALL, VALUES, dtype="float64")
    assert greedy(engine, [ids], 4) == greedy(want, [ids], 4)


def test_weights_that_were_not_counted_are_not_prepared_in_the_middle_of_a_text() -> None:
    serving = Serving("fusing", Fusing(None, tokens=32))  # type: ignore[arg-type]
    made = Compiler(serving, GRAPH, SMALL, whole(serving, lambda name: tiny.held(name, VALUES[name])))  # type: ignore[arg-type, return-value]
    for step in STEPS:
        made.bind(step)
    made.weights.seal()
    made.bind(dataclasses.replace(STEPS[1], tokens=64))
    with pytest.raises(ContractViolation, match=r"rule 'prepared-at-load': needs the weights of .*add_norm"):
        made.bind(dataclasses.replace(STEPS[1], tokens=32))


def test_what_the_manifest_does_not_claim_is_not_asked_for() -> None:
    serving = Serving(
        "partial", Partial("rope"), claimed=("add",), may_fall_back=OTHERS, spare=("reference", reference())
    )
    op = next(c.op for c in GRAPH.calls if c.op.spec.name == "rope")
    found = serving.assign(op, STEPS[0])
    assert isinstance(found, Assigned)
    assert (found.by, found.fallback) == ("reference", "backend partial does not claim it")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda kernel: Refusal(" "), "a Refusal without a reason"),
        (lambda kernel: dataclasses.replace(kernel, arithmetic="float32"), "the arithmetic 'float32'"),
        (lambda kernel: dataclasses.replace(kernel, workspace_bytes=-1), "workspace_bytes = -1"),
        (lambda kernel: dataclasses.replace(kernel, name=""), "the name ''"),
    ],
)
def test_an_answer_without_a_meaning_is_a_violation(change: Any, said: str) -> None:
    class Odd(Partial):
        def kernel(self, op: OpInstance, step: StepClass) -> Any:
            return change(super().kernel(op, step))

    op = next(call.op for call in GRAPH.calls if call.op.spec.name == "linear")
    with pytest.raises(ContractViolation, match=said) as caught:
        Serving("odd", Odd("linear")).assign(op, STEPS[0])
    assert caught.value.rule == "opened"
