"""Named arithmetics."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest

from m31.errors import OpRefused
from m31.formats.arithmetic import NAMED, ArithmeticSpec, parse


def test_names_are_the_specs_own() -> None:
    assert all(name == spec.name for name, spec in NAMED.items())
    assert next(iter(NAMED)) == "exact"
    assert {"exact", "w16a16", "w4a16", "w8a8-mxfp8", "w4a4-megamoe", "w4a4-q8kv4"} <= set(NAMED)


def test_what_the_names_mean() -> None:
    assert NAMED["exact"].exact
    assert not NAMED["w4a16"].exact
    assert NAMED["w4a16"].same_numbers(NAMED["w16a16"])
    assert not NAMED["w4a4-megamoe"].exact
    mega, q8 = NAMED["w4a4-megamoe"], NAMED["w4a4-q8kv4"]
    assert (mega.linear_activation, mega.expert_input, mega.expert_middle) == ("mxfp8", "nvfp4-token", "nvfp4-static")
    assert (mega.query, mega.kv_read, mega.probability) == ("bfloat16", "exact", None)
    assert (q8.query, q8.kv_read, q8.probability) == ("e4m3", "e4m3", "e4m3")
    assert dataclasses.replace(q8, name=mega.name, query="bfloat16", kv_read="exact", probability=None) == mega
    weights = {name: (spec.linear_weights, spec.expert_weights) for name, spec in NAMED.items()}
    assert weights["w8a8-mxfp8"] == (None, "nvfp4-to-mxfp8")
    assert weights["w4a16-shared-scale"] == (None, "nvfp4-shared-scale")
    assert weights["w4a16-block-fp8"] == ("mxfp8-to-block-fp8", None)
    assert weights["w4a16"] == weights["w4a4-q8kv4"] == (None, None)


@pytest.mark.parametrize("text", ["w4a4-q8kv4", "w4a4 q8kv4", "W4A4_Q8KV4", " w4a4  q8kv4 "])
def test_spelling(text: str) -> None:
    assert parse(text) is NAMED["w4a4-q8kv4"]


@pytest.mark.parametrize(
    ("text", "nearest"),
    [("w4a15", "w4a16"), ("w4a4megamoe", "w4a4-megamoe"), ("w8a8-mx", "w8a8-mxfp8"), ("exakt", "exact")],
)
def test_an_unknown_name_is_refused_with_the_nearest(text: str, nearest: str) -> None:
    with pytest.raises(OpRefused) as caught:
        parse(text)
    assert str(caught.value) == (
        f"arithmetic: unknown arithmetic '{text}'; expected one of {', '.join(NAMED)}; did you mean '{nearest}'?"
    )


def test_a_name_that_resembles_nothing() -> None:
    for text in ("", "☃"):
        with pytest.raises(OpRefused, match=r"unknown arithmetic '.*'; expected one of exact, w16a16, .*[^?]$"):
            parse(text)


FIELDS = [field.name for field in dataclasses.fields(ArithmeticSpec) if field.name != "name"]


@pytest.mark.parametrize("field", FIELDS)
def test_a_spec_checks_itself(field: str) -> None:
    with pytest.raises(OpRefused, match=f"arithmetic 'exact': {field} is int3; expected "):
        dataclasses.replace(NAMED["exact"], **{field: "int3"})
    with pytest.raises(dataclasses.FrozenInstanceError):
        NAMED["exact"].name = "other"
    with pytest.raises(TypeError):
        ArithmeticSpec("partial")


def test_it_costs_no_torch() -> None:
    code = "import sys, m31.formats.arithmetic; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
