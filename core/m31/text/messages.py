"""Checking chat messages before a template sees them.

Templates are lenient in the wrong places: MiniMax-M3's drops any later system message and any unknown role without a
word, prints "None" for a missing content and needs tool arguments as mappings (MODEL.md §7.2). Everything that would
change the prompt silently is refused here, with the reason.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from m31.errors import RequestError

ROLES = ("root", "system", "developer", "user", "assistant", "tool")
MEDIA_TYPES = ("image", "video")
PART_TYPES = ("text", *MEDIA_TYPES)


def check_messages(messages: object) -> list[dict[str, Any]]:
    """Validated copies of `messages`, ready for a template.

    Accepted: roles root (first only), system and developer (first, or second after root), user, assistant, tool;
    content a string or a list of parts of type text, image or video; on assistant messages `reasoning_content` (str)
    and `tool_calls`. Changed: `arguments` given as a JSON string become a mapping, a missing or null content becomes
    "". Other keys are passed on as they are.

    Raises:
        RequestError: anything else; the message names the message's index and the reason.
    """
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise RequestError(f"messages is a {type(messages).__name__}", expected="a list of {role, content} mappings")
    if not messages:
        raise RequestError("messages is empty", expected="at least one message")
    checked: list[dict[str, Any]] = []
    for index, message in enumerate(messages):
        checked.append(_message(message, f"messages[{index}]", checked))
    return checked


def _message(message: object, where: str, earlier: list[dict[str, Any]]) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RequestError(f"is a {type(message).__name__}", where=where, expected="a mapping with role and content")
    result = dict(message)
    role = result.get("role")
    if role not in ROLES:
        raise RequestError(f"unknown role {role!r}", where=where, expected=f"one of {', '.join(ROLES)}")
    _check_place(role, where, [str(other["role"]) for other in earlier])
    calls = result.get("tool_calls")
    if role != "assistant":
        for key in ("tool_calls", "reasoning_content"):
            if result.get(key) is not None:
                raise RequestError(f"a {role} message cannot have {key}", where=where, fix="move it to the assistant's")
    elif calls is not None:
        result["tool_calls"] = _tool_calls(calls, f"{where}.tool_calls")
    reasoning = result.get("reasoning_content")
    if reasoning is not None and not isinstance(reasoning, str):
        raise RequestError(f"reasoning_content is a {type(reasoning).__name__}", where=where, expected="a string")
    if role == "tool":
        _check_answers_call(where, earlier)
    may_be_absent = role == "assistant" and (bool(calls) or reasoning is not None)
    result["content"] = _content(result.get("content"), where, may_be_absent=may_be_absent)
    return result


def _check_place(role: str, where: str, earlier: list[str]) -> None:
    """Only a leading block of root, then system or developer reaches the prompt (MODEL.md §7.2)."""
    allowed = not earlier if role == "root" else earlier in ([], ["root"])
    if role in ("root", "system", "developer") and not allowed:
        place = "as the first message" if role == "root" else "first, or second after a root message"
        raise RequestError(
            f"a {role} message here would be dropped silently by the chat template",
            where=where,
            expected=f"{role} only {place}",
            fix="merge it into the first one, or send it as a user message",
        )


def _check_answers_call(where: str, earlier: list[dict[str, Any]]) -> None:
    """Tool results carry no id in the prompt: their place is what ties them to a call."""
    asking = next((other for other in reversed(earlier) if other["role"] != "tool"), None)
    if asking is None or asking["role"] != "assistant" or not asking.get("tool_calls"):
        raise RequestError(
            "a tool message without a tool call before it",
            where=where,
            expected="an assistant message with tool_calls, then its results in the same order",
        )


def _content(content: object, where: str, *, may_be_absent: bool) -> str | list[dict[str, Any]]:
    if content is None and may_be_absent:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise RequestError(
            f"content is {'absent' if content is None else f'a {type(content).__name__}'}",
            where=where,
            expected="a string or a list of parts",
        )
    return [_part(part, f"{where}.content[{index}]") for index, part in enumerate(content)]


def _part(part: object, where: str) -> dict[str, Any]:
    if not isinstance(part, Mapping) or part.get("type") not in PART_TYPES:
        shown = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        raise RequestError(f"unknown part {shown!r}", where=where, expected=f"type {', '.join(PART_TYPES)}")
    if part["type"] == "text" and not isinstance(part.get("text"), str):
        raise RequestError("a text part without a text", where=where, expected="{type: text, text: string}")
    return dict(part)


def _tool_calls(calls: object, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, Sequence) or isinstance(calls, str | bytes):
        raise RequestError(f"is a {type(calls).__name__}", where=where, expected="a list")
    return [_tool_call(call, f"{where}[{index}]") for index, call in enumerate(calls)]


def _tool_call(call: object, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        raise RequestError("has no function", where=where, expected="{function: {name, arguments}}")
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise RequestError("function.name is missing", where=where, expected="the tool's name")
    arguments = _arguments(function.get("arguments"), f"{where}.function.arguments")
    return {**call, "function": {**function, "arguments": arguments}}


def _arguments(value: object, where: str) -> dict[str, Any]:
    if isinstance(value, str):
        try:
            value = json.loads(value, object_pairs_hook=_unique, parse_constant=_no_constant)
        except (ValueError, RecursionError) as exc:
            raise RequestError(
                f"is not valid JSON ({exc})", where=where, expected="a JSON object", fix="send {} for no arguments"
            ) from exc
    if not isinstance(value, Mapping):
        raise RequestError(f"is a {type(value).__name__}", where=where, expected="a mapping or a JSON object")
    return dict(value)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise ValueError("a key appears twice")
    return members


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def check_tools(tools: object) -> list[dict[str, Any]] | None:
    """Validated copies of OpenAI-style tool descriptions; None and [] both mean no tools and give None.

    Raises:
        RequestError: not a list, no function, no name, or two tools of one name.
    """
    if tools is None:
        return None
    if not isinstance(tools, Sequence) or isinstance(tools, str | bytes):
        raise RequestError(f"tools is a {type(tools).__name__}", expected="a list of {type, function} mappings")
    names: set[str] = set()
    for index, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(name, str) or not name:
            raise RequestError("has no function.name", where=f"tools[{index}]", expected="{function: {name, ...}}")
        if name in names:
            raise RequestError(f"a second tool named {name!r}", where=f"tools[{index}]", expected="names used once")
        names.add(name)
    return [dict(tool) for tool in tools] or None
