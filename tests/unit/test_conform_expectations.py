"""`expect.toml` is strict, so that what it says stays true."""

from __future__ import annotations

import datetime
from typing import Any

import pytest
from tests.support.fake_runs import result

from m31.conformance.expectations import parse
from m31.errors import M31Error, SuiteError

TODAY = datetime.date(2027, 1, 15)
GOOD = """
[[expect]]
id = "L1/experts/*"
kind = "xfail"
reason = "the K tail is dropped"
link = "https://example.org/1"
expires = 2027-03-31
"""


def entry(**changes: Any) -> str:
    values = {"id": '"L1/a/*"', "kind": '"waiver"', "reason": '"why"', "link": '"where"', "expires": "2027-03-31"}
    values |= changes
    return "[[expect]]\n" + "\n".join(f"{key} = {value}" for key, value in values.items() if value is not None) + "\n"


def test_entries_are_found_by_pattern() -> None:
    expected = parse(GOOD)
    found = expected.of("L1/experts/odd/nvfp4")
    assert found is not None
    assert (found.kind, found.reason, found.expires) == ("xfail", "the K tail is dropped", datetime.date(2027, 3, 31))
    assert expected.of("L1/linear/odd") is None
    assert expected.of("L2/experts/odd") is None
    assert parse("").entries == ()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("nonsense", "not valid TOML"),
        ("expects = 1", "unknown key 'expects'"),
        ("expect = 3", "no array of tables"),
        ("expect = [1]", "no array of tables"),
        (entry(until="2027-01-01"), "unknown key 'until'"),
        *((entry(**{key: None}), f"without {key}") for key in ("id", "kind", "reason", "link", "expires")),
        (entry(kind='"ignore"'), "kind = 'ignore'"),
        (entry(reason='"  "'), "reason ="),
        (entry(link="3"), "link = 3"),
        (entry(expires='"2027-03-31"'), "expires ="),
        (entry(expires="2027-03-31T10:00:00"), "expires ="),
    ],
)
def test_what_is_malformed_is_refused(text: str, said: str) -> None:
    with pytest.raises(M31Error, match=said):
        parse(text)


def test_stale_entries_are_refused_before_anything_runs() -> None:
    parse(GOOD).require(["L1/experts/a"], TODAY)
    with pytest.raises(SuiteError, match="matches no item"):
        parse(GOOD).require(["L1/linear/a"], TODAY)
    with pytest.raises(SuiteError, match="expired on 2027-03-31"):
        parse(GOOD).require(["L1/experts/a"], datetime.date(2027, 4, 1))
    parse(GOOD).require(["L1/experts/a"], datetime.date(2027, 3, 31))  # the last day counts
    with pytest.raises(SuiteError, match=r"matched by 'L1/experts/\*' and by 'L1/\*'"):
        parse(GOOD + entry(id='"L1/*"')).require(["L1/experts/a"], TODAY)


@pytest.mark.parametrize("outcome", ["passed", "refused", "fallback", "unclaimed"])
def test_an_expected_failure_that_does_not_fail_is_an_error(outcome: str) -> None:
    expected = parse(GOOD)
    assert expected.broken_by([result("L1/experts/a", outcome="failed")]) == []
    (said,) = expected.broken_by([result("L1/experts/a", outcome=outcome), result("L1/b/c")])
    assert said == f"'L1/experts/a' was expected to fail and is '{outcome}'"
    assert expected.broken_by([result("L1/experts/a", outcome="interrupted")]) == []


def test_a_waiver_that_nothing_needs_is_an_error() -> None:
    expected = parse(entry())
    failed, passed = result("L1/a/x", outcome="failed"), result("L1/a/y")
    assert expected.broken_by([failed, passed]) == []
    assert expected.broken_by([passed]) == ["the waiver of 'L1/a/*' is not needed"]
    assert expected.broken_by([]) == []
