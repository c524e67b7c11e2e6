"""What is refused before a chat template sees it."""

from __future__ import annotations

import pytest

from m31.errors import RequestError
from m31.text.messages import check_messages, check_tools

USER = {"role": "user", "content": "hi"}
SYSTEM = {"role": "system", "content": "s"}
ROOT = {"role": "root", "content": "r"}


def call(arguments="{}", name="f"):
    return {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": name, "arguments": arguments}}]}


@pytest.mark.parametrize(
    "roles",
    [
        ["user"],
        ["system", "user"],
        ["developer", "user", "assistant", "user"],
        ["root", "system", "user"],
        ["root", "developer", "user"],
        ["root", "user"],
        ["system"],
    ],
)
def test_places_that_reach_the_prompt(roles):
    messages = [{"role": role, "content": "x"} for role in roles]
    assert check_messages(messages) == messages


@pytest.mark.parametrize(
    ("roles", "index", "role"),
    [
        (["user", "system"], 1, "system"),
        (["system", "system"], 1, "system"),
        (["system", "developer", "user"], 1, "developer"),
        (["root", "system", "developer"], 2, "developer"),
        (["system", "root"], 1, "root"),
        (["root", "root"], 1, "root"),
        (["user", "assistant", "developer"], 2, "developer"),
    ],
)
def test_messages_that_the_template_would_drop_are_refused(roles, index, role):
    """MODEL.md §7.2: any later system, developer or root message is dropped silently."""
    with pytest.raises(RequestError) as caught:
        check_messages([{"role": r, "content": "x"} for r in roles])
    assert str(caught.value).startswith(
        f"messages[{index}]: a {role} message here would be dropped silently by the chat template; expected {role} only"
    )


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        ("hi", "messages is a str; expected a list"),
        ({"role": "user"}, "messages is a dict"),
        ([], "messages is empty"),
        (["hi"], r"messages\[0\]: is a str; expected a mapping"),
        ([{"content": "x"}], r"messages\[0\]: unknown role None; expected one of root, system, developer, user"),
        ([{"role": "ai", "content": "x"}], "unknown role 'ai'"),
        ([{"role": ["user"], "content": "x"}], r"unknown role \['user'\]"),
        ([{"role": "user"}], "content is absent; expected a string or a list of parts"),
        ([{"role": "user", "content": 3}], "content is a int"),
        ([{"role": "assistant", "content": None}], "content is absent"),
        ([{"role": "user", "content": ["hi"]}], r"messages\[0\].content\[0\]: unknown part 'str'"),
        ([{"role": "user", "content": [{"type": "audio"}]}], "unknown part 'audio'; expected type text, image, video"),
        ([{"role": "user", "content": [{"type": "text"}]}], "a text part without a text"),
        ([{**USER, "tool_calls": []}], "a user message cannot have tool_calls"),
        ([{**USER, "reasoning_content": "x"}], "a user message cannot have reasoning_content"),
        ([{"role": "assistant", "content": "", "reasoning_content": 1}], "reasoning_content is a int"),
        ([{"role": "assistant", "content": "", "tool_calls": "f"}], r"messages\[0\].tool_calls: is a str"),
        ([{"role": "assistant", "tool_calls": [{"name": "f"}]}], r"tool_calls\[0\]: has no function"),
        ([call(name="")], "function.name is missing"),
        ([call("{")], r"tool_calls\[0\].function.arguments: is not valid JSON .*send {} for no arguments"),
        ([call("")], "is not valid JSON"),
        ([call("[1]")], "is a list; expected a mapping or a JSON object"),
        ([call('{"a": NaN}')], "NaN is not JSON"),
        ([call('{"a": 1, "a": 2}')], "a key appears twice"),
        ([call("[" * 100_000)], "is not valid JSON"),
        ([call(None)], "is a NoneType"),
        ([{"role": "tool", "content": "r"}], "a tool message without a tool call before it"),
        ([USER, {"role": "assistant", "content": "x"}, {"role": "tool", "content": "r"}], "without a tool call"),
        ([call(), {"role": "tool", "content": "r"}, USER, {"role": "tool", "content": "r"}], "without a tool call"),
    ],
)
def test_malformed_messages(messages, text):
    with pytest.raises(RequestError, match=text):
        check_messages(messages)


def test_arguments_become_mappings_and_null_content_is_empty():
    original = [
        USER,
        call('{"a": {"b": [1, null]}}'),
        {"role": "tool", "content": "r"},
        {"role": "tool", "content": "q"},
    ]
    checked = check_messages(original)
    assert checked[1]["tool_calls"][0] == {"id": "1", "function": {"name": "f", "arguments": {"a": {"b": [1, None]}}}}
    assert checked[1]["content"] == ""
    assert original[1]["tool_calls"][0]["function"]["arguments"] == '{"a": {"b": [1, null]}}'
    assert check_messages([call({"x": 1})])[0]["tool_calls"][0]["function"]["arguments"] == {"x": 1}


def test_other_keys_are_passed_on():
    assert check_messages([{**SYSTEM, "current_date": "today"}])[0]["current_date"] == "today"


@pytest.mark.parametrize(
    ("tools", "text"),
    [
        ({}, "tools is a dict"),
        ("f", "tools is a str"),
        ([{}], r"tools\[0\]: has no function.name"),
        ([{"function": {"name": ""}}], "has no function.name"),
        ([{"function": {"name": "f"}}, {"function": {"name": "f"}}], r"tools\[1\]: a second tool named 'f'"),
    ],
)
def test_malformed_tools(tools, text):
    with pytest.raises(RequestError, match=text):
        check_tools(tools)


def test_no_tools():
    assert check_tools(None) is None
    assert check_tools([]) is None
