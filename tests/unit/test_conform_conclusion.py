"""What results amount to: level, omissions, exit code."""

from __future__ import annotations

import datetime
from typing import Any

import pytest
from tests.support.fake_runs import result, run

from m31.conformance.conclusion import conclude
from m31.conformance.item import Result

WAIVER = '[[expect]]\nid = "L1/b/*"\nkind = "{kind}"\nreason = "r"\nlink = "l"\nexpires = 2027-03-31\n'


def good() -> list[Result]:
    return [result("L0/a/x", claims=("compute:float32",)), result("L1/b/x", claims=("op:b",)), result("L1/b/y")]


def replaced(place: int, **changes: Any) -> list[Result]:
    results = good()
    results[place] = result(results[place].id, **{"claims": results[place].claims, **changes})
    return results


def test_all_passed() -> None:
    found = conclude(run(good()))
    assert (found.exit_code, found.level, found.whole) == (0, "L1", True)
    assert found.sentence == "conformant: level L1 is reached"


@pytest.mark.parametrize("outcome", ["refused", "fallback", "unclaimed"])
def test_refusals_are_allowed_while_something_else_exercises_the_claim(outcome: str) -> None:
    assert conclude(run(replaced(2, outcome=outcome))).level == "L1"
    found = conclude(run(replaced(1, outcome=outcome), header={"claims": {"op:b": "L1"}}))
    assert (found.exit_code, found.level, found.omissions) == (2, "L0", ("op:b",))
    assert found.sentence == "not conformant by omission: 1 claim never exercised"


def test_a_failure_costs_its_level_and_those_above() -> None:
    found = conclude(run(replaced(2, outcome="failed", error="ContractViolation")))
    assert (found.exit_code, found.level, found.failures) == (1, "L0", ("L1/b/y",))
    assert conclude(run(replaced(0, outcome="failed", error="KeyError"))).level is None


@pytest.mark.parametrize("error", ["VacuousCriterion", "SuiteError"])
def test_a_fault_of_the_suite_is_told_apart(error: str) -> None:
    found = conclude(run(replaced(2, outcome="failed", error=error)))
    assert (found.exit_code, found.failures, found.suite_faults) == (3, (), ("L1/b/y",))
    assert found.sentence.startswith("cannot be judged: the suite itself is at fault in 1 item")


def test_nothing_that_passes_at_a_level_is_an_omission() -> None:
    results = [result("L0/a/x"), result("L1/b/x", outcome="refused")]
    found = conclude(run(results))
    assert (found.exit_code, found.omissions, found.level) == (2, ("level:L1",), "L0")
    assert conclude(run([])).exit_code == 2


def test_a_claim_that_no_item_of_the_suite_exercises_reaches_no_level() -> None:
    found = conclude(run(good(), header={"claims": {"kv:odd": None}}))
    assert (found.exit_code, found.level, found.omissions) == (2, None, ("kv:odd",))


def test_a_claim_of_a_level_that_was_not_asked_is_no_omission() -> None:
    assert conclude(run(good(), header={"claims": {"kv:fp8": "L2"}})).exit_code == 0


@pytest.mark.parametrize(("promised", "omitted"), [("L0", False), ("L1", False), ("L3", False), ("none", False)])
def test_the_level_that_the_manifest_claims_is_a_claim(promised: str, omitted: bool) -> None:
    manifest = run(good()).header["manifest"] | {"conformance": promised}
    assert conclude(run(good(), header={"manifest": manifest})).exit_code == 0
    refused = [result("L0/a/x"), result("L1/b/x"), result("L1/b/y", claims=("op:b",), outcome="refused")]
    found = conclude(run(refused, header={"manifest": manifest, "claims": {"op:b": "L1"}}))
    assert ("conformance:L1" in found.omissions) == (promised == "L1")


def test_a_selection_reaches_no_level_and_omits_nothing() -> None:
    setup = run(good()).header["setup"] | {"expression": "b"}
    found = conclude(run(good()[1:], header={"setup": setup, "claims": {"op:z": "L1"}}))
    assert (found.exit_code, found.level, found.omissions, found.whole) == (0, None, (), False)


def test_an_incomplete_run_is_no_verdict() -> None:
    found = conclude(run(good(), complete=False))
    assert (found.exit_code, found.level) == (130, None)
    assert found.sentence == "incomplete: stopped after 3 of 3 items"
    assert conclude(run(replaced(2, outcome="failed"), complete=False)).exit_code == 1


def test_a_waiver_keeps_the_level_and_an_expected_failure_does_not() -> None:
    failed = replaced(2, outcome="failed")
    failed[1] = result("L1/c/x", claims=("op:b",))
    waived = conclude(run(failed, header={"expect": WAIVER.format(kind="waiver")}))
    assert (waived.exit_code, waived.level, waived.waived) == (0, "L1", ("L1/b/y",))
    assert waived.sentence == "conformant: level L1 is reached with 1 waiver"
    expected = conclude(run(failed, header={"expect": WAIVER.format(kind="xfail")}))
    assert (expected.exit_code, expected.level) == (0, "L0")
    assert expected.sentence == "nothing failed unexpectedly; level L0 is reached"
    late = conclude(run(failed, header={"expect": WAIVER.format(kind="waiver")}), today=datetime.date(2027, 4, 1))
    assert (late.exit_code, len(late.stale)) == (1, 1)


@pytest.mark.parametrize("kind", ["waiver", "xfail", "skip"])
def test_none_of_them_exercises_a_claim(kind: str) -> None:
    results = [result("L0/a/x"), result("L1/c/x")]
    outcome = "skipped" if kind == "skip" else "failed"
    results.append(result("L1/b/y", outcome=outcome, claims=("op:b",)))
    found = conclude(run(results, header={"expect": WAIVER.format(kind=kind)}))
    assert (found.exit_code, found.omissions) == (2, ("op:b",))


def test_an_expected_failure_that_passes_is_an_error() -> None:
    found = conclude(run(good(), header={"expect": WAIVER.format(kind="xfail")}))
    assert found.exit_code == 1
    assert found.sentence == "not conformant: 2 entries of expect.toml not true; level L1 is reached"


def test_a_recorded_run_is_not_judged() -> None:
    found = conclude(run([result("L0/a/x", outcome="recorded")], header={"recorded": True}))
    assert (found.exit_code, found.level) == (0, None)
    assert "to be judged with" in found.sentence


@pytest.mark.parametrize("outcome", ["refused", "fallback", "unclaimed"])
def test_a_selection_of_what_the_backend_does_not_compute_is_no_success(outcome: str) -> None:
    setup = run(good()).header["setup"] | {"expression": "b"}
    none = [result("L1/b/x", outcome=outcome), result("L1/b/y", outcome=outcome)]
    found = conclude(run(none, header={"setup": setup}))
    assert found.exit_code == 2
    assert found.sentence.startswith("nothing was judged")
    assert f"2 {outcome}" in found.sentence
    assert conclude(run([*none, result("L1/b/z")], header={"setup": setup})).exit_code == 0
    known = [*none, result("L1/b/z", outcome="skipped")]  # by a true expect.toml
    assert conclude(run(known, header={"setup": setup})).exit_code == 0
    assert conclude(run(none, header={"setup": setup}, complete=False)).exit_code == 130
