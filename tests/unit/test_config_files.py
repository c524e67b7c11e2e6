"""config.json as a file, and damaged at random: a Model or a ConfigError, never another exception."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from config_helpers import WHERE, saved_text
from hypothesis import given, settings
from hypothesis import strategies as st

from m31 import config
from m31.errors import ConfigError


def parse(mapping: dict[str, Any]) -> config.Model:
    return config.parse(mapping, where=WHERE)


def flash() -> dict[str, Any]:
    return config.published("m3.1-flash")


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**30), 10**30),
    st.integers(-3, 200),
    st.floats(),
    st.text(max_size=8),
    st.lists(st.integers(0, 1), max_size=4),
    st.dictionaries(st.text(max_size=4), st.integers(), max_size=2),
)


def _paths(node: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [at] if at else []
    if isinstance(node, dict):
        for key, value in node.items():
            found += _paths(value, (*at, key))
    return found


@settings(max_examples=250, deadline=None)
@given(st.data())
def test_any_mutation_gives_a_model_or_a_config_error(data: st.DataObject) -> None:
    """Whatever a damaged config says, the outcome is a valid Model or a ConfigError, never another exception."""
    mapping = data.draw(
        st.sampled_from([flash(), config.published("m3"), config.published("m3")["text_config"], saved_text()])
    )
    mapping = copy.deepcopy(mapping)
    for _ in range(data.draw(st.integers(1, 3))):
        path = data.draw(st.sampled_from(_paths(mapping)))
        part = mapping
        for key in path[:-1]:
            part = part[key]
        action = data.draw(st.sampled_from(["drop", "rename", "change"]))
        if action == "drop":
            del part[path[-1]]
        elif action == "rename":
            part[data.draw(st.text(max_size=12))] = part.pop(path[-1])
        else:
            part[path[-1]] = data.draw(VALUES)
    try:
        model = parse(mapping)
    except ConfigError as error:
        message = str(error)
    else:
        message = WHERE
        assert len(model.text.attention) == len(model.text.mlp) == model.text.num_layers
    assert WHERE in message
    message.encode("utf-8")  # printable: no lone surrogate from the file


def test_load_from_folder_and_from_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(flash()))
    assert config.load(tmp_path) == config.load(tmp_path / "config.json") == parse(flash())


@pytest.mark.parametrize(
    ("content", "fragment"),
    [
        (b"", "is not valid JSON"),
        (b'{"a": 1', "is not valid JSON: Expecting ',' delimiter at line 1"),
        (b"\xef\xbb\xbf{}", "starts with a byte order mark"),
        (b"[1]", "holds a list at the top; expected a JSON object"),
        (b'{"a": 1, "a": 2}', "duplicate key 'a'"),
        (b'{"x": {"b": 1, "b": 1}}', "duplicate key 'b'"),
        (b'{"a": NaN}', "NaN is not a JSON number"),
        (b'{"a": -Infinity}', "-Infinity is not a JSON number"),
        (b'{"a": "\xff"}', "is not UTF-8 (byte 7)"),
        (b'{"a": ' + b"[" * 200_000, "is nested too deeply"),
        (b'{"a": ' + b"9" * 5000 + b"}", "is not valid JSON"),
    ],
)
def test_unreadable_json(tmp_path: Path, content: bytes, fragment: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        config.load(tmp_path)
    assert fragment in str(caught.value)
    assert str(path) in str(caught.value)


def test_files_that_are_no_config(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        config.load(tmp_path)
    (tmp_path / "config.json").mkdir()
    with pytest.raises(ConfigError, match="is not a regular file"):
        config.load(tmp_path)
    huge = tmp_path / "huge.json"
    with huge.open("wb") as handle:
        handle.truncate(17 * 2**20)
    with pytest.raises(ConfigError, match="is larger than 16,777,216 bytes"):
        config.load(huge)
