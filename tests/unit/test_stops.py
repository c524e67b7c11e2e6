"""Stop strings over a stream that may be cut anywhere."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from m31.engine.stops import StopStrings
from m31.errors import RequestError


def run(stops, pieces):
    """(everything shown, what stopped it, pieces as shown) of a stream."""
    watcher = StopStrings(stops)
    shown, stopped = [], None
    for piece in pieces:
        text, stopped = watcher.push(piece)
        shown.append(text)
        if stopped is not None:
            break
    else:
        shown.append(watcher.flush())
    return "".join(shown), stopped, shown


def expected(stops, text):
    """By the definition: first complete match, longest on ties."""
    for end in range(1, len(text) + 1):
        matching = [stop for stop in stops if text[:end].endswith(stop)]
        if matching:
            stop = max(matching, key=len)
            return text[: end - len(stop)], stop
    return text, None


ALPHABET = st.text("ab\n", max_size=14)


@given(
    stops=st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=4),
    text=ALPHABET,
    cuts=st.lists(st.integers(0, 14), max_size=6),
)
def test_any_split_gives_the_definition(stops, text, cuts):
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[a:b] for a, b in itertools.pairwise(edges)]
    shown, stopped, _ = run(stops, pieces)
    assert (shown, stopped) == expected(stops, text)


@given(stops=st.lists(st.text("ab\n", min_size=1, max_size=4), min_size=1, max_size=3), text=ALPHABET)
def test_nothing_is_held_longer_than_needed(stops, text):
    """What is held is the start of a stop string; shown text never has to be taken back."""
    watcher = StopStrings(stops)
    total = ""
    for index, char in enumerate(text):
        out, stopped = watcher.push(char)
        total += out
        if stopped is not None:
            return
        held = text[len(total) : index + 1]
        assert held == "" or any(stop.startswith(held) for stop in stops)


def test_examples():
    assert run(["\n\n"], ["a\n", "b\n", "\nc"])[:2] == ("a\nb", "\n\n")
    assert run(["stop"], ["no sto"])[2] == ["no ", "sto"]
    assert run([], ["as ", "it is"])[2] == ["as ", "it is", ""]
    # Complete first wins over begun first; of two complete at once, the longer.
    assert run(["abcd", "bc"], ["abcd"])[:2] == ("a", "bc")
    assert run(["c", "abc"], ["xabc"])[:2] == ("x", "abc")


def test_after_a_match_nothing_comes_out():
    watcher = StopStrings(["x"])
    assert watcher.push("axb") == ("a", "x")
    assert watcher.push("more") == ("", "x")
    assert watcher.flush() == ""


def test_a_long_stream_stays_linear():
    watcher = StopStrings(["never" * 20])
    total = sum(len(watcher.push("never")[0]) for _ in range(19))
    assert total == 0
    for _ in range(20_000):
        watcher.push("abc neve")
    assert watcher.flush() == "neve"


@pytest.mark.parametrize("stops", ["text", [""], ["ok", ""]])
def test_bad_stop_strings_are_refused(stops):
    with pytest.raises(RequestError, match=r"stop: stop strings are .*; expected non-empty strings"):
        StopStrings(stops)
