"""L1 on backends that compute the model, and on some that do not: margins mean something, faults are caught, evidence
can be judged elsewhere."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support import numpy_example
from tests.unit.test_contract_drills import reference
from tests.unit.test_contract_op_drills import Faulty, after

from m31.conformance import cases, judge
from m31.conformance.bench import Bench
from m31.conformance.execution import Run, execute, judge_case
from m31.conformance.item import Evidence, Item, NotRun, Verdict
from m31.conformance.levels import ops as level
from m31.conformance.levels.ops import Way
from m31.errors import ContractViolation, SuiteError
from m31.formats import mxfp8
from m31.graph import Arithmetic, Kernel, OpInstance, Refusal
from m31.graph.unfuse import compose, prepare_parts, unfused
from m31.ops.fused import FUSED
from m31.sdk.manifest import Manifest
from m31_cpu.codecs import CODECS
from m31_cpu.session import FACTORIES
from m31_cpu.stored import codec_of

F32 = Arithmetic("float32", "float32", "float32")
NEAR_ALL = 41  # every 41st item: all ops and formats, in seconds; the runner runs all


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench("reference", scratch=tmp_path_factory.mktemp("scratch"))


def some(manifest: Manifest, step: int) -> list[Item]:
    """A sample that has every op, spread over formats and arithmetics."""
    listed = [item for item in level.items(manifest) if item.seconds < 0.06]
    by_op: dict[str, list[Item]] = {}
    for item in listed:
        by_op.setdefault(item.subject, []).append(item)
    return [item for found in by_op.values() for item in found[len(found) % step :: step] or found[-1:]]


def results(bench: Bench, items: list[Item]) -> Iterator[tuple[Item, Verdict]]:
    for item in items:
        try:
            evidence = item.execute(bench)
        except NotRun:
            continue
        yield item, item.judge(evidence)


def test_the_reference_passes_and_its_margins_mean_something(bench: Bench) -> None:
    found = list(results(bench, some(bench.manifest, NEAR_ALL)))
    ops = {item.subject for item, _ in found}
    assert ops == set(cases.specs()) - set(FUSED)  # it fuses nothing
    margins = [v.margin for item, v in found if v.margin is not None and item.criterion != "exact"]
    assert all(0 <= m <= 1 for m in margins)
    assert np.mean([m > 1e-3 for m in margins]) > 0.4
    assert not any(v.note for _, v in found)


def test_the_example_passes(tmp_path: Path) -> None:
    from m31_numpy import NumpyBackend

    bench = Bench(NumpyBackend(numpy_example.MANIFEST), scratch=tmp_path)
    found = list(results(bench, some(bench.manifest, NEAR_ALL // 2)))
    assert {item.subject for item, _ in found} == set(cases.specs()) - {*FUSED, *cases.ops.DRAFT, *cases.ops.ADAPTER}


def test_what_is_not_claimed_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def leaves_plain(op: OpInstance, at: Any) -> Any:
        return (
            Refusal("plain experts are left to others") if codec_of(op, "w1.0") is CODECS["float32"] else made(op, at)
        )

    made = FACTORIES["experts"]
    monkeypatch.setitem(FACTORIES, "experts", leaves_plain)  # type: ignore[arg-type]
    monkeypatch.delitem(FACTORIES, "linear")  # type: ignore[arg-type]
    bench = Bench("cpu", scratch=tmp_path)
    outcomes = {}
    for name in ("linear", "experts", "add_norm", "experts_shared"):
        item = next(i for i in level.items(bench.manifest) if i.subject == name and i.attributes["stored"] == "float32")
        with pytest.raises(NotRun) as reason:
            item.execute(bench)
        outcomes[name] = reason.value.outcome
    assert outcomes == {
        "linear": "fallback",
        "experts": "fallback",  # it serves them, not stored so
        "add_norm": "unclaimed",
        "experts_shared": "unclaimed",
    }
    served = next(
        i for i in level.items(bench.manifest) if i.subject == "experts" and i.attributes["stored"] == "nvfp4"
    )
    assert served.judge(served.execute(bench)).margin is not None


def test_evidence_is_judged_without_the_backend(bench: Bench) -> None:
    item = next(i for i in level.items(bench.manifest) if i.id == "L1/sparse_attention/real-mixed/kv-nvfp4")
    evidence = item.execute(bench)
    assert all(isinstance(value, np.ndarray) for value in evidence.arrays.values())
    assert set(evidence.facts) >= {"kernel", "arithmetic", "inputs", "label"}
    copied = Evidence({k: v.copy() for k, v in evidence.arrays.items()}, dict(evidence.facts))
    assert item.judge(copied) == item.judge(evidence)
    off = Evidence({**copied.arrays, "out/o": copied.arrays["out/o"] * np.float32(1.001)}, copied.facts)
    with pytest.raises(ContractViolation, match="is off by"):
        item.judge(off)


# --- what a kernel declares that it quantises -------------------------------------------------------------------------


def judged(session: Any, name: str, case: str, stored: str, forms: tuple[str, str] = ("", "")) -> tuple[Verdict, Any]:
    spec = cases.specs()[name]
    plan = next(plan for plan in cases.planned(spec) if plan.id == f"{name}/{case}")
    run = Run(spec, plan.build(), stored, forms, gaps=False)
    kernel = session.kernel(run.op, cases.step_of(spec, run.case))
    assert isinstance(kernel, Kernel), kernel
    return judge_case(run, execute(session, session, run, kernel))


@pytest.mark.parametrize(
    ("arithmetic", "name", "case", "stored", "forms"),
    [
        ("w8a8-mxfp8", "linear", "hidden-128", "mxfp8", ("", "")),
        ("w8a8-mxfp8", "experts", "real", "nvfp4", ("", "")),
        ("w4a4-megamoe", "experts", "real", "nvfp4", ("", "")),
        ("w4a4-megamoe", "experts", "real", "bfloat16", ("", "")),
        ("w4a4-q8kv4", "dense_attention", "real-mixed", "", ("nvfp4", "nvfp4")),
        ("w4a4-q8kv4-shift3", "sparse_attention", "real-mixed", "", ("nvfp4", "nvfp4")),
        ("w8a8-q8kv4", "block_scores", "real-mixed", "", ("fp8", "fp8")),
    ],
)
def test_quantised_operands_are_judged_by_the_same_quantisation(
    arithmetic: str, name: str, case: str, stored: str, forms: tuple[str, str]
) -> None:
    verdict, reason = judged(reference(arithmetic=arithmetic), name, case, stored, forms)
    assert reason is None
    assert verdict.margin is not None
    declared = Declared(name, reference(arithmetic=arithmetic))
    with pytest.raises(ContractViolation, match="is off by"):  # the exact kernel says that it quantises
        judged(declared, name, case, stored, forms)


class Declared:
    """Exact kernels under the declaration of those that quantise."""

    def __init__(self, name: str, honest: Any) -> None:
        self.name, self.honest, self.exact = name, honest, reference()

    def __getattr__(self, attribute: str) -> Any:
        return getattr(self.honest, attribute)

    def kernel(self, op: Any, step: Any) -> Any:
        found = self.honest.kernel(op, step)
        if op.spec.name != self.name:
            return found
        return dataclasses.replace(found, run=self.exact.kernel(op, step).run)


def test_a_kernel_that_quantises_unasked() -> None:
    def quantised(op: Any, run: Any) -> Any:
        return lambda outs, ins, w, space: run(outs, [mxfp8.quantise(ins[0]), *ins[1:]], w, space)

    with pytest.raises(ContractViolation, match="declares float32"):
        judged(Faulty("linear", quantised), "linear", "hidden-128", "mxfp8")


# --- fused ops --------------------------------------------------------------------------------------------------------


class Composed:
    """The reference, which also serves fused ops by running their parts; `spoil` changes what one of them is given."""

    def __init__(self, spoil: Any = None, arithmetic: Arithmetic = F32) -> None:
        self.real, self.spoil, self.arithmetic = reference(), spoil, arithmetic

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def kernel(self, op: Any, step: Any) -> Any:
        if op.spec.name not in FUSED:
            return self.real.kernel(op, step)
        body = unfused(op)
        kernels: dict[str, Kernel] = {}
        for call in body.graph.calls:
            found = self.real.kernel(call.op, step)
            assert not isinstance(found, Refusal)
            if self.spoil and self.spoil[0] == call.op.spec.name:
                found = dataclasses.replace(found, run=self.spoil[1](found.run))
            kernels[call.op.name] = found
        run = compose(body, kernels, self.real.dtypes, self.real.device)
        return Kernel(
            name=f"composed.{op.spec.name}", run=run, arithmetic=self.arithmetic, workspace_bytes=0, why="a test"
        )

    def prepare(self, op: Any, slots: Any, shard: Any) -> Any:
        if op.spec.name not in FUSED:
            return self.real.prepare(op, slots, shard)
        return prepare_parts(unfused(op), slots, lambda part, own: self.real.prepare(part, own, shard))


FUSED_CASES = [
    ("qkv_insert", "real", "mxfp8", ("nvfp4", "int8")),
    ("qkv_insert", "real-unrounded", "float32", ("float32", "float32")),
    ("qkv_insert", "padding/round_query+round_kv", "bfloat16", ("bfloat16", "fp8")),
    ("qkv_insert_dense", "real", "bfloat16", ("fp8", "fp8")),
    ("add_norm", "hidden-6144", "float32", ("", "")),
    ("experts_shared", "real", "nvfp4", ("", "")),
]


@pytest.mark.parametrize(("name", "case", "stored", "forms"), FUSED_CASES)
def test_a_fused_op_is_judged_by_its_body(name: str, case: str, stored: str, forms: tuple[str, str]) -> None:
    verdict, reason = judged(Composed(), name, case, stored, forms)
    assert reason is None
    assert verdict.margin is not None
    assert (0 if "round" in case or case == "real" else 1e-4) <= verdict.margin <= 1  # a rounding may hide all errors


def _scaled(factor: float) -> Any:
    def spoil(run: Any) -> Any:
        def spoiled(outs: Any, ins: Any, w: Any, space: Any) -> None:
            run(outs, ins, w, space)
            outs[0].mul_(factor)

        return spoiled

    return spoil


PARTS = {
    "qkv_insert": ("linear", "head_rmsnorm", "rope"),
    "qkv_insert_dense": ("linear", "rope"),
    "add_norm": ("add", "gemma_rmsnorm"),
    "experts_shared": ("linear", "swiglu_oai", "experts"),
}


@pytest.mark.parametrize(
    ("name", "case", "stored", "forms", "part"), [(*row, part) for row in FUSED_CASES for part in PARTS[row[0]]]
)
def test_a_part_that_is_off_by_a_hundredth(
    name: str, case: str, stored: str, forms: tuple[str, str], part: str
) -> None:
    with pytest.raises(ContractViolation, match=r"is off by|not exact"):
        judged(Composed((part, _scaled(1.01))), name, case, stored, forms)


def test_a_fused_op_that_writes_where_padding_is() -> None:
    def trusted(run: Any) -> Any:
        return lambda outs, ins, w, space: run(outs, [*ins[:-1], ins[-1].clamp(min=0)], w, space)

    case = "padding/round_query+round_kv"
    with pytest.raises(ContractViolation, match="pages 'k'"):
        judged(Composed(("kv_write", trusted)), "qkv_insert", case, "bfloat16", ("bfloat16", "fp8"))


def test_a_fused_op_with_quantised_operands_is_only_compared_with_nonsense() -> None:
    coarse = Arithmetic("mxfp8*float32", "float32", "bfloat16")
    _, reason = judged(Composed(arithmetic=coarse), "experts_shared", "real", "mxfp8")
    assert reason is not None
    assert "which product of a fused op quantises what is not said" in reason


# --- vacuity ----------------------------------------------------------------------------------------------------------


def test_a_bound_that_nonsense_passes_is_the_suites_own_fault() -> None:
    want = np.linspace(-1, 1, 32)
    wide = np.full(32, 10.0)
    with pytest.raises(SuiteError, match="zeros would pass under any arithmetic"):
        judge.within(want, want, wide, F32, "somewhere", strict=lambda: wide)
    with pytest.raises(ContractViolation, match="which zeros would pass"):  # the declaration's
        judge.within(want, want, wide, F32, "somewhere", strict=lambda: wide * 1e-6)


def test_a_passed_item_says_where_it_was_worst() -> None:
    verdict, _ = judged(reference(), "linear", "hidden-128", "float32")
    assert verdict.where.startswith("output 'y'[")
    assert verdict.max_error is not None
    assert verdict.allowed is not None
    assert verdict.margin == pytest.approx(verdict.max_error / verdict.allowed)


def test_a_subnormal_may_be_taken_for_zero() -> None:
    def flushed(outs: Any) -> None:
        outs[0].masked_fill_(outs[0].abs() < 2.0**-126, 0)

    verdict, _ = judged(Faulty("add", after(flushed)), "add", "wide-subnormals", "")
    assert verdict.margin is not None


def test_ways_have_names() -> None:
    way = Way("mxfp8", "nvfp4", "int8", ("nvfp4", "int8"), True, "float64", "w8a8-mxfp8")
    assert way.suffix == "/mxfp8/kv-nvfp4/index-int8/float64/w8a8-mxfp8/gaps"
