"""Mutants are made of the syntax tree, live as long as they are tried, and are seen or not."""

from __future__ import annotations

import importlib
import sys
import time
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

from m31.conformance.faults import mutate
from m31.errors import RequestError

SOURCE = '''
def area(width, height):
    """Not this string: 1 + 1."""
    if width < 0:
        raise ValueError(f"width is {width - 1}")
    return width * height + 0.5

def maker(factor):
    def run(x):
        return x[:3] + [factor]
    return run

def untouched(x: "1 + 1" = 3):
    return helper(x)

def helper(x):
    while x > 0:
        x -= 1
    return x

class Shape:
    def sides(self):
        return min(3, 4)
'''


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[types.ModuleType]:
    (tmp_path / "toy_to_mutate.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("toy_to_mutate")
    del sys.modules["toy_to_mutate"]


def changes(toy: types.ModuleType, name: str) -> list[str]:
    return [m.change for m in mutate.mutants(toy, [name])]


def test_which_changes_are_made(toy: types.ModuleType) -> None:
    made = changes(toy, "area")
    assert {"width < 0 -> width <= 0", "width * height -> width / height", "width * height -> width"} <= set(made)
    assert {"width * height + 0.5 -> width * height - 0.5", "0.5 -> 1.5", "0.5 -> -0.5", "0 -> 1"} <= set(made)
    assert not any(change.startswith(("1 ", "width - 1")) for change in made), "docstrings and texts of errors"
    assert "x[:3] -> x[:]" in changes(toy, "maker") or ":3 -> :" in changes(toy, "maker")
    assert changes(toy, "untouched") == []
    assert "min -> max" in changes(toy, "Shape.sides")


def test_ids_are_unique_and_do_not_know_lines(toy: types.ModuleType) -> None:
    made = list(mutate.mutants(toy))
    assert len({m.id for m in made}) == len(made)
    assert all(not any(part.isdigit() and int(part) == m.line for part in m.id.split()) or m.line < 9 for m in made)


def test_a_mutant_lives_as_long_as_it_is_tried(toy: types.ModuleType) -> None:
    (mutant,) = [m for m in mutate.mutants(toy, ["area"]) if m.change == "width * height -> width / height"]
    with mutate.applied(mutant):
        assert toy.area(6, 2) == 3.5
    assert toy.area(6, 2) == 12.5
    (mutant,) = [m for m in mutate.mutants(toy, ["Shape.sides"]) if m.change == "min -> max"]
    with mutate.applied(mutant):
        assert toy.Shape().sides() == 4
    assert toy.Shape().sides() == 3


def test_inner_functions_are_those_of_the_mutant(toy: types.ModuleType) -> None:
    (mutant,) = [m for m in mutate.mutants(toy, ["maker"]) if m.change in (":3 -> :", "x[:3] -> x[:]")]
    with mutate.applied(mutant):
        assert toy.maker(9)([1, 2, 3, 4]) == [1, 2, 3, 4, 9]


def test_what_kills_and_what_does_not(toy: types.ModuleType) -> None:
    def weak() -> None:
        assert toy.area(1, 1) == 1.5

    def strong() -> None:
        assert toy.area(6, 2) == 12.5

    (mutant,) = [m for m in mutate.mutants(toy, ["area"]) if m.change == "width * height -> width / height"]
    assert mutate.killed(mutant, [weak]) == ""
    assert mutate.killed(mutant, [weak, strong]).startswith("AssertionError")


def test_a_mutant_that_loops_is_dead(toy: types.ModuleType) -> None:
    (mutant,) = [m for m in mutate.mutants(toy, ["helper"]) if m.change == "x -= 1 -> pass"]
    began = time.monotonic()
    assert mutate.killed(mutant, [lambda: toy.helper(3)], seconds=0.2).startswith("TimeoutError")
    assert time.monotonic() - began < 60


def test_functions_that_are_reached(toy: types.ModuleType) -> None:
    assert mutate.called(toy, ["untouched"]) == {"untouched", "helper"}


def test_a_function_that_does_not_exist(toy: types.ModuleType) -> None:
    with pytest.raises(RequestError, match="has no function 'nothing'"):
        list(mutate.mutants(toy, ["nothing"]))
