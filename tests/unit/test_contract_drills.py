"""Backends that break one rule each: every one is caught by a check that names the rule, and the reference passes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.support import tiny

from m31.conformance import (
    RULES,
    bound,
    check_linear_arithmetic,
    check_losses,
    check_release,
    roundoff,
)
from m31.conformance.judge import within
from m31.errors import ContractViolation, OpRefused
from m31.formats.arithmetic import parse
from m31.formats.transforms import Loss
from m31.graph import Arithmetic, BoundGraph, Kernel, OpInstance, Shard, StepClass, trace
from m31.sdk.backend import KVSpec
from m31_reference.session import ReferenceBackend, ReferenceSession

SMALL = tiny.quantisable(num_layers=2)
GRAPH = trace(SMALL)
VALUES = tiny.weights(GRAPH, seed=1)
STORED = tiny.quantised(GRAPH, VALUES)
STEP = StepClass(kind="mixed", q_len=0, tokens=32, seqs=2, rows=2, pages=16)
SPEC = KVSpec.of(SMALL, "float32", "float32")


def reference(dtype: str = "float32", arithmetic: str = "exact") -> ReferenceSession:
    return ReferenceBackend(None).open(  # type: ignore[arg-type]
        device=None,
        dtype=dtype,
        rank=0,
        world=1,
        arithmetic=parse(arithmetic),
        options={"weight_cache_bytes": 0},
    )


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

    def weight_bytes(self, op: OpInstance, slots: Mapping[str, Any]) -> int:
        real = self._real.weight_bytes(op, slots)
        return self._faults["weight_bytes"](real) if "weight_bytes" in self._faults else real

    def compile(self, graph: BoundGraph, step: StepClass) -> Any:
        return self._faults["compile"](self._real, graph, step)


# --- a kernel that lies about its arithmetic ------------------------------------------------------------------------


def in_bf16(kernel: Kernel) -> Kernel:
    def run(outs: Any, ins: Any, w: Any, workspace: Any) -> None:
        kernel.run(outs, [ins[0].bfloat16().to(ins[0].dtype)], w, workspace)

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
        check_linear_arithmetic(Spoiled(kernel=lie), op("linear"), STEP, seed=0)
    assert caught.value.rule == "arithmetic"
    assert "declares float32, accumulated in float32, written in float32, and is off by" in str(caught.value)


def test_the_same_kernel_with_an_honest_declaration_is_right() -> None:
    def honest(kernel: Kernel) -> Kernel:
        return replace(in_bf16(kernel), arithmetic=Arithmetic("bfloat16*float32", "float32", "float32"))

    check_linear_arithmetic(Spoiled(kernel=honest), op("linear"), STEP, seed=0)


def test_a_zero_row_hides_nothing() -> None:
    """A row of zeros has errors and bounds of zero, whose quotient is no number."""
    want = torch.ones(3, 4, dtype=torch.float64).numpy()
    want[0] = 0
    allowed = want * 1e-6
    with violated("arithmetic"):
        within(want * 0, want, allowed, Arithmetic("float32", "float32", "float32"), "here")
    with violated("arithmetic"):
        within(want * float("nan"), want, allowed, Arithmetic("float32", "float32", "float32"), "here")


@pytest.mark.parametrize("quantised", [False, True])
def test_weights_that_are_not_the_checkpoints(quantised: bool) -> None:
    source = STORED if quantised else {n: v.bfloat16() for n, v in VALUES.items()}
    slots = {slot: tiny.held(d.name, source[d.name]) for slot, d in op("linear").slots.items()}
    check_losses(reference(), op("linear"), slots)  # type: ignore[arg-type]

    class Signs:
        losses: Mapping[str, Loss]

        def __init__(self, handle: Any) -> None:
            self.handle = handle

        def dequantise(self) -> Any:
            return {slot: torch.sign(value) for slot, value in self.handle.dequantise().items()}

    def lossy(said: Mapping[str, Loss]) -> Any:
        def prepare(handle: Any, slots: Any) -> Any:
            made = Signs(handle)
            made.losses = said
            return made

        return Spoiled(prepare=prepare)

    with violated("losses") as caught:
        check_losses(lossy({}), op("linear"), slots)
    assert "declared is no loss" in str(caught.value)
    place = re.search(r" at \[(\d+), (\d+)\], where the checkpoint has (\S+) and the handle (\S+),", str(caught.value))
    assert place, "where, and which numbers: a factor or a shift is seen at once"
    stored = slots["weight"].load()
    assert float(place[3]) == pytest.approx(float(stored[int(place[1]), int(place[2])]), rel=1e-5)
    assert float(place[4]) in (-1, 0, 1)
    with violated("losses"):
        check_losses(lossy({"sign": Loss(0.1, 0.1, 0.1, False)}), op("linear"), slots)
    check_losses(lossy({"sign": Loss(9.0, 1.0, float("inf"), False)}), op("linear"), slots)


@pytest.mark.parametrize("output", ["e2m1", "float32"])
def test_a_declaration_that_zeros_would_pass(output: str) -> None:
    def vague(kernel: Kernel) -> Kernel:
        return replace(kernel, arithmetic=Arithmetic("e2m1", "e2m1", output))

    with violated("arithmetic") as caught:
        check_linear_arithmetic(Spoiled(kernel=vague), op("linear"), STEP, seed=0)  # type: ignore[arg-type]
    assert "which zeros would pass" in str(caught.value)


def test_a_kernel_that_is_wrong_at_a_tile_boundary_only() -> None:
    def one_tile(kernel: Kernel) -> Kernel:
        def run(outs: Any, ins: Any, w: Any, workspace: Any) -> None:
            kernel.run([outs[0][:16]], [ins[0][:16]], w, workspace)

        return replace(kernel, run=run)

    with violated("arithmetic"):
        check_linear_arithmetic(Spoiled(kernel=one_tile), op("linear"), STEP, seed=0)  # type: ignore[arg-type]


def test_a_kernel_that_takes_what_has_gaps_for_contiguous() -> None:
    def flat(kernel: Kernel) -> Kernel:
        def run(outs: Any, ins: Any, w: Any, workspace: Any) -> None:
            x = ins[0].as_strided(ins[0].shape, (ins[0].shape[1], 1))
            kernel.run(outs, [x], w, workspace)

        return replace(kernel, run=run)

    with violated("arithmetic"):
        check_linear_arithmetic(Spoiled(kernel=flat), op("linear"), STEP, seed=0)  # type: ignore[arg-type]


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


# --- a prepare that keeps its source alive, or takes more than it says -----------------------------------------------


@pytest.mark.parametrize("name", ["linear", "experts", "router", "gemma_rmsnorm", "embedding"])
@pytest.mark.parametrize("quantised", [False, True])
@pytest.mark.parametrize("arithmetic", ["exact", "w4a4-megamoe", "w8a8-mxfp8"])
def test_the_reference_releases_what_it_does_not_read_in_place(name: str, quantised: bool, arithmetic: str) -> None:
    source = STORED if quantised else {n: v.bfloat16() for n, v in VALUES.items()}
    slots = {slot: tiny.held(decl.name, source[decl.name]) for slot, decl in op(name).slots.items()}
    check_release(reference(arithmetic=arithmetic), op(name), slots)  # type: ignore[arg-type]


def bf16_slots(name: str = "linear") -> Any:
    return {slot: tiny.held(d.name, VALUES[d.name].bfloat16()) for slot, d in op(name).slots.items()}


def stored_slots(name: str = "linear") -> Any:
    return {slot: tiny.held(d.name, STORED[d.name]) for slot, d in op(name).slots.items()}


def test_a_prepare_that_keeps_its_source_alive() -> None:
    def hoard(handle: Any, slots: Mapping[str, Any]) -> Any:
        handle.hoard = [tensor.load() for tensor in slots.values()]
        return handle

    with violated("release") as caught:
        check_release(Spoiled(prepare=hoard), op("linear"), bf16_slots())  # type: ignore[arg-type]
    assert "keeps what it was given for weight" in str(caught.value)


def test_listing_a_slot_does_not_excuse_what_is_no_part_of_a_file() -> None:
    def hoard(handle: Any, slots: Mapping[str, Any]) -> Any:
        handle.hoard = [tensor.load() for tensor in slots.values()]
        handle.in_place = frozenset(slots)
        return handle

    with violated("release"):
        check_release(Spoiled(prepare=hoard), op("linear"), bf16_slots())  # type: ignore[arg-type]


def test_a_view_into_the_source_is_found_too() -> None:
    with violated("release"):
        check_release(Hoarder(), op("linear"), stored_slots())  # type: ignore[arg-type]


class Hoarder(Spoiled):
    """Keeps one element of the stored codes, and says that it keeps nothing."""

    def prepare(self, op: OpInstance, slots: Mapping[str, Any], shard: Shard) -> Any:
        self.kept = slots["weight"].parts()["codes"].load()[:1, :1]
        return replace(self._real.prepare(op, slots, shard), in_place=frozenset())


def test_mapped_bytes_that_are_not_listed() -> None:
    """Nothing given in memory survives, but the file is read on."""

    class Quiet(Spoiled):
        def prepare(self, op: OpInstance, slots: Mapping[str, Any], shard: Shard) -> Any:
            return replace(self._real.prepare(op, slots, shard), in_place=frozenset())

    slots = {slot: tiny.held(d.name, VALUES[d.name]) for slot, d in op("linear").slots.items()}
    with violated("release") as caught:
        check_release(Quiet(), op("linear"), slots)  # type: ignore[arg-type]
    assert "goes on reading weight in its file and does not list it" in str(caught.value)


@pytest.mark.parametrize("where", ["handle", "session", "closure", "array"])
def test_clones_that_weight_bytes_does_not_count(where: str) -> None:
    kept = []

    def clones(handle: Any, slots: Mapping[str, Any]) -> Any:
        made = [tensor.load().clone() for tensor in slots.values()]
        if where == "handle":
            handle.clones = {"deep": [made]}
        elif where == "array":
            handle.clones = {"array": made[0].float().numpy().copy()}
        elif where == "closure":
            handle.later = lambda: made
        else:
            kept.append(made)
        return handle

    with violated("weight-bytes") as caught:
        check_release(Spoiled(prepare=clones), op("linear"), stored_slots())  # type: ignore[arg-type]
    assert "weight_bytes says 0" in str(caught.value)


def test_a_weight_bytes_that_says_half() -> None:
    with violated("weight-bytes"):
        check_release(Spoiled(weight_bytes=lambda n: n // 2), op("linear"), bf16_slots())  # type: ignore[arg-type]


def test_a_slot_that_is_listed_and_not_read_in_place() -> None:
    class Claims(Spoiled):
        def prepare(self, op: OpInstance, slots: Mapping[str, Any], shard: Shard) -> Any:
            return replace(self._real.prepare(op, slots, shard), in_place=frozenset(slots))

    with violated("release") as caught:
        check_release(Claims(), op("linear"), bf16_slots())  # type: ignore[arg-type]
    assert "holds neither its mapped bytes nor its lazy tensor" in str(caught.value)
