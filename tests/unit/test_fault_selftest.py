"""Every fault is caught, by the item that it names; and the self-test notices when one is not."""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest

from m31 import ops, sdk
from m31.conformance.bench import Bench
from m31.conformance.catalog import collect
from m31.conformance.faults import FAULTS, Break, Fault, bench_maker, matrix, seen, selftest
from m31.conformance.faults.breaks import after
from m31.conformance.item import Evidence, Item, Verdict
from m31.graph import Refusal
from m31.ops.fused import FUSED
from m31.sdk.manifest import Manifest

REFERENCE = sdk.open_backend(sdk.decide("reference"))
LEVELS = ("L0", "L1", "L2", "L3")
ITEMS = collect(REFERENCE.manifest, LEVELS)


def items(manifest: Manifest) -> list[Item]:
    return collect(manifest, LEVELS)


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("faults")


def test_the_catalogue_is_in_order() -> None:
    assert len(FAULTS) >= 150
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    for fault in FAULTS:
        assert fault.what, fault.name
        assert fault.source.startswith(("BUG-", "A1", "DESIGN §", "MODEL §")), fault.name
        found = [i for i in ITEMS if fnmatchcase(i.id, fault.catches) or fault.catches in i.claims]
        assert found, f"{fault.name} names {fault.catches}, and there is no such item"
        assert fault.break_.op in ("", *ops.ALL, *ops.DRAFT, *ops.ADAPTER, *FUSED), fault.name


def test_every_op_has_a_fault() -> None:
    served = {*ops.ALL, *ops.DRAFT, *ops.ADAPTER} - {"all_reduce", "all_gather"}
    assert served <= {fault.subject for fault in FAULTS}


@pytest.mark.parametrize("level", LEVELS)
def test_every_fault_is_caught_by_the_item_that_it_names(level: str, scratch: Path) -> None:
    mine = [fault for fault in FAULTS if fault.level == level]
    done = selftest(mine, items, bench_maker(REFERENCE, scratch))
    assert done.ok, "\n".join([*map(str, done.survivors), *done.healthy.values()])
    assert [str(c) for c in done.caught if not c.named and c.by != "opening"] == []
    assert [str(c) for c in done.caught if c.crashed] == []


# --- the self-test can fail -----------------------------------------------------------------------------------------


def fault(break_: Break, **given: Any) -> Fault:
    whole = {"name": "made-up", "what": "nothing", "source": "here", "level": "L1", "subject": "add"}
    return Fault(**{**whole, "catches": "L1/add/one*", "break_": break_, **given})


def test_a_fault_that_does_nothing_survives(scratch: Path) -> None:
    done = selftest([fault(after("add", lambda outs: None))], ITEMS, bench_maker(REFERENCE, scratch))
    assert not done.ok
    (found,) = done.survivors
    assert found.ran == sum(item.subject == "add" for item in ITEMS)
    assert "made-up: SURVIVED" in str(done)


def test_a_claim_that_is_redeemed_is_no_omission(scratch: Path) -> None:
    harmless = fault(Break(), by="omission", catches="op:add", subject="claims")
    done = selftest([harmless], ITEMS, bench_maker(REFERENCE, scratch), check_healthy=False)
    assert done.survivors


def test_a_claim_that_no_item_exercises_is_not_caught(scratch: Path) -> None:
    unknown = fault(Break(), by="omission", catches="op:nobody", subject="claims")
    assert selftest([unknown], ITEMS, bench_maker(REFERENCE, scratch)).survivors


def test_another_item_than_named_is_said(scratch: Path) -> None:
    wrong = fault(after("add", lambda outs: outs[0].zero_()), catches="L1/add/none*")
    (found,) = selftest([wrong], ITEMS, bench_maker(REFERENCE, scratch)).caught
    assert found.by.startswith("L1/add/")
    assert not found.named
    assert "(named: L1/add/none*)" in str(found)


def test_a_crash_is_no_judgement_and_is_said(scratch: Path) -> None:
    def crash(outs: Any) -> None:
        raise ZeroDivisionError("by zero")

    (found,) = selftest([fault(after("add", crash))], ITEMS, bench_maker(REFERENCE, scratch)).caught
    assert found.crashed
    assert "ZeroDivisionError: by zero" in found.how


def test_a_healthy_backend_that_fails_is_said(scratch: Path) -> None:
    def execute(bench: Bench) -> Evidence:
        raise ValueError("the suite is wrong")

    broken = Item(
        id="L1/add/one",
        level="L1",
        subject="add",
        format="",
        criterion="rule",
        claims=(),
        execute=execute,
        judge=lambda evidence: Verdict(),
    )
    done = selftest([fault(after("add", lambda outs: outs[0].zero_()))], [broken], bench_maker(REFERENCE, scratch))
    assert not done.ok
    assert "the suite is wrong" in done.healthy["L1/add/one"]


# --- the matrix -----------------------------------------------------------------------------------------------------


def test_the_matrix_says_what_every_item_of_the_subject_sees(scratch: Path) -> None:
    zeros = fault(after("add", lambda outs: outs[0].zero_()))
    cells = list(matrix([zeros], ITEMS, bench_maker(REFERENCE, scratch)))
    assert [cell.item for cell in cells if cell.item not in {i.id for i in ITEMS if i.subject == "add"}] == []
    outcomes = {cell.item: cell.outcome for cell in cells}
    assert outcomes["L1/add/one"] == "caught"
    assert outcomes["L1/add/none"] == "passed"  # nothing is nothing
    assert all(bool(cell.how) == (cell.outcome == "caught") for cell in cells)
    assert seen(zeros, cells)


def test_the_matrix_takes_no_refusal_for_a_catch(scratch: Path) -> None:
    silent = fault(Break(op="add", kernel=lambda kernel, op: Refusal("no kernel")))
    cells = list(matrix([silent], items, bench_maker(REFERENCE, scratch)))
    assert {cell.outcome for cell in cells} == {"not run"}
    assert not seen(silent, cells)
    claim = fault(Break(op="add", kernel=lambda kernel, op: Refusal("no kernel")), by="omission", catches="op:add")
    assert seen(claim, list(matrix([claim], items, bench_maker(REFERENCE, scratch))))
    redeemed = fault(Break(), by="omission", catches="op:add")
    assert not seen(redeemed, list(matrix([redeemed], items, bench_maker(REFERENCE, scratch))))
