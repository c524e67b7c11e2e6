"""The checkpoint's own chat template, rendered (MODEL.md §7.2). No wording of a template lives in this package."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from m31.errors import TemplateError
from m31.text._files import parse_object, read_text
from m31.text._template_process import Limits, TemplateProcess
from m31.text.messages import check_messages, check_tools

THINK_OPENER = "<mm:think>"
_MAX_BYTES = 2**20  # of a template; the published one has 12 thousand
_MAX_CONFIG_BYTES = 64 * 2**20
_TOKEN_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token")


class ChatTemplate:
    """A chat template, rendered in a child process with limits on time, memory and length.

    Jinja2's ImmutableSandboxedEnvironment, with trim_blocks, lstrip_blocks, loop controls, `raise_exception`,
    `strftime_now` and a `tojson` that keeps characters as they are: what templates of this field are written for.
    An undefined variable may be tested, compared, looped over and defaulted; printing it is an error, because the
    prompt would silently lack a part. Why a process: see `_template_worker`.

    Args:
        templates: name -> source; `default` is used, and `tool_use`, if there is one, when tools are given.
        where: the file, for messages.
        special_tokens: variables such as `bos_token`.
        clock: what `strftime_now` shows.
        limits: see Limits.
    """

    def __init__(
        self,
        templates: Mapping[str, str],
        *,
        where: str,
        special_tokens: Mapping[str, str] | None = None,
        clock: Callable[[], datetime] = datetime.now,
        limits: Limits | None = None,
    ) -> None:
        if "default" not in templates:
            raise TemplateError(
                f"there is no template named 'default' among {sorted(templates)}",
                where=where,
                fix="name one of them 'default'",
            )
        self._names = frozenset(templates)
        self._special_tokens = dict(special_tokens or {})
        self._clock = clock
        self._where = where
        self._process = TemplateProcess(templates, where, limits or Limits())

    @classmethod
    def find(cls, folder: str | Path) -> ChatTemplate | None:
        """The template of a folder, or None where neither file has one. A broken one is an error, as in `load`."""
        return cls._read(Path(folder), datetime.now, None)

    @classmethod
    def load(
        cls, folder: str | Path, *, clock: Callable[[], datetime] = datetime.now, limits: Limits | None = None
    ) -> ChatTemplate:
        """The template of a checkpoint folder: chat_template.jinja, else tokenizer_config.json's `chat_template`.

        The template is compiled on the spot, so that a broken one is reported before a model is loaded.

        Raises:
            TemplateError: there is no template, it is not a regular text file, or it has a syntax error.
        """
        template = cls._read(Path(folder), clock, limits)
        if template is None:
            raise TemplateError(
                "the checkpoint has no chat template",
                where=str(folder),
                expected="chat_template.jinja, or 'chat_template' in tokenizer_config.json",
                fix="give a raw prompt (plain text or token ids) instead of messages, or add the file",
            )
        return template

    @classmethod
    def _read(cls, folder: Path, clock: Callable[[], datetime], limits: Limits | None) -> ChatTemplate | None:
        path, config_path = folder / "chat_template.jinja", folder / "tokenizer_config.json"
        text = read_text(config_path, TemplateError, max_bytes=_MAX_CONFIG_BYTES)
        config = {} if text is None else parse_object(text, config_path, TemplateError)
        source = read_text(path, TemplateError, max_bytes=_MAX_BYTES)
        if source is not None:
            templates, where = {"default": source}, str(path)
        elif config.get("chat_template") is not None:
            templates, where = _from_config(config["chat_template"], str(config_path)), str(config_path)
        else:
            return None
        template = cls(templates, where=where, special_tokens=_token_strings(config), clock=clock, limits=limits)
        template._process.check()
        return template

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The prompt for `messages`; encode it with `special=True`.

        Args:
            messages: see `m31.text.messages.check_messages` for what is accepted and refused.
            tools: OpenAI-style tool descriptions, or None.
            add_generation_prompt: end with the header of the reply.
            variables: what else the template reads: `thinking_mode`, `reasoning_effort`, `model_identity`, ...

        Raises:
            RequestError: the messages or tools are malformed, or the template would drop one without a word.
            TemplateError: the template fails, does what the sandbox forbids, or passes a limit.
        """
        checked_tools = check_tools(tools)
        name = "tool_use" if checked_tools and "tool_use" in self._names else "default"
        values = {
            **self._special_tokens,
            **variables,
            "messages": check_messages(messages),
            "tools": checked_tools,
            "add_generation_prompt": add_generation_prompt,
        }
        return self._process.render(name, values, self._clock().isoformat())

    def close(self) -> None:
        """End the template's process now rather than when this object is collected. Rendering starts it again."""
        self._process.close()


def starts_in_reasoning(rendered: str) -> bool:
    """Whether the reply to this prompt begins inside a reasoning block (MODEL.md §7.3).

    Only the end of the prompt decides: markers elsewhere are examples or quotations (BUG-31).
    """
    return rendered.endswith(THINK_OPENER)


def _from_config(value: object, where: str) -> dict[str, str]:
    """tokenizer_config.json's `chat_template`: one string, or a list of {name, template}."""
    if isinstance(value, str):
        entries = {"default": value}
    elif isinstance(value, list) and value and all(_is_entry(item) for item in value):
        entries = {item["name"]: item["template"] for item in value}
        if len(entries) != len(value):
            raise TemplateError("two chat templates have the same name", where=where, fix="keep one of them")
    else:
        raise TemplateError(
            "'chat_template' has an unknown form", where=where, expected="a string, or a list of {name, template}"
        )
    size = sum(len(source) for source in entries.values())
    if size > _MAX_BYTES:
        raise TemplateError(
            f"the chat template has {size:,} characters", where=where, expected=f"at most {_MAX_BYTES:,}"
        )
    return entries


def _is_entry(item: object) -> bool:
    return isinstance(item, dict) and isinstance(item.get("name"), str) and isinstance(item.get("template"), str)


def _token_strings(config: Mapping[str, Any]) -> dict[str, str]:
    """`bos_token` and the like, written as a string or as {content: string}."""
    found = {}
    for name in _TOKEN_NAMES:
        value = config.get(name)
        if isinstance(value, Mapping):
            value = value.get("content")
        if isinstance(value, str):
            found[name] = value
    return found
