"""`m31 run [CKPT] PROMPT`: one prompt, one streamed answer."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from m31.cli.output import Output
from m31.cli.session import Model, announce, checked_text, conclude, open_model, sampling_from, stream
from m31.errors import RequestError, TemplateError

INTERRUPTED = 130
NANO = "no checkpoint is named: this is the bundled nano, a small model that continues Python code"
MAX_PROMPT_BYTES = 64 * 2**20  # far beyond 1,048,576 tokens; keeps an endless stream from filling the memory


def read_prompt(argument: str) -> str:
    """The prompt: the argument itself, or standard input for `-`, less one final line break.

    Raises: RequestError when it is empty, not UTF-8, or standard input is closed.
    """
    if argument != "-":
        return checked_text(argument, "prompt")
    where = "standard input"
    if sys.stdin is None:
        raise RequestError(
            "it is closed", where=where, expected="the prompt", fix="pipe a prompt into m31 or give it as argument"
        )
    data = sys.stdin.buffer.read(MAX_PROMPT_BYTES + 1)
    if len(data) > MAX_PROMPT_BYTES:
        raise RequestError(
            f"holds more than {MAX_PROMPT_BYTES:,} bytes", where=where, expected="a prompt", fix="give a shorter one"
        )
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(
            f"byte {error.start + 1} is not valid UTF-8",
            where=where,
            expected="UTF-8 text",
            fix="convert the text first",
        ) from error
    # `echo` and editors end a file with a line break that nobody means as part of the prompt.
    return checked_text(text.removesuffix("\n").removesuffix("\r"), where)


def messages_for(prompt: str, system: str | None) -> list[dict[str, Any]]:
    """The conversation that `run` renders: an optional system message and the prompt."""
    messages: list[dict[str, Any]] = []
    if system is not None:
        messages.append({"role": "system", "content": checked_text(system, "--system")})
    messages.append({"role": "user", "content": prompt})
    return messages


def render(model: Model, prompt: str, *, raw: bool, system: str | None) -> tuple[str, str]:
    """The text that the model gets, and how it came about.

    Raises: TemplateError when --system is given and there is no template to put it into.
    """
    if raw:
        return prompt, "raw"
    if model.template is None:
        if system is not None:
            raise TemplateError(
                "the checkpoint has no chat template, so it cannot take a system message",
                where="--system",
                expected="chat_template.jinja in the checkpoint folder",
                fix="drop --system, or write the message into the prompt",
            )
        return prompt, "raw, since the checkpoint has no chat template"
    return model.render(messages_for(prompt, system)), "chat template"


def command(args: argparse.Namespace, out: Output) -> int:
    """Run the command; the exit code."""
    sampling = sampling_from(args)
    prompt = read_prompt(args.prompt)
    model = open_model(args)
    if args.checkpoint is None:
        out.note(NANO)
    text, kind = render(model, prompt, raw=args.raw or args.checkpoint is None, system=args.system)
    announce(model, out, kind)
    generation = model.generate(text, sampling)
    interrupted = stream(generation, out)
    conclude(model, generation, out, interrupted=interrupted)
    return INTERRUPTED if interrupted else 0
