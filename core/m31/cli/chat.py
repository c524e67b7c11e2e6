"""`m31 chat CKPT`: a conversation. Works at a terminal, with line editing, and with piped standard input."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from m31.cli.arguments import nearest
from m31.cli.output import Output, error_fields
from m31.cli.session import Model, announce, checked_text, conclude, open_model, sampling_from, stream
from m31.errors import ContextLimitExceeded, M31Error, RequestError, TemplateError

HELP = """/exit           end (so does Ctrl-D)
/reset          forget the conversation, keep the system message
/system TEXT    set the system message and forget the conversation; without TEXT, show it
/help           this list
Ctrl-C stops an answer, or clears the line that you are typing."""

COMMANDS = ("/exit", "/reset", "/system", "/help")


class InputError(M31Error):
    """Standard input cannot be read as text; the conversation cannot go on."""


class Conversation:
    """The messages so far. An assistant message holds everything that the model wrote, reasoning included: the template
    splits it where its format wants that (MODEL.md §7.2)."""

    def __init__(self, system: str | None) -> None:
        self.system = None if system is None else checked_text(system, "--system")
        self.turns: list[dict[str, Any]] = []

    def messages(self, user: str) -> list[dict[str, Any]]:
        """What to render for the next answer."""
        first = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*first, *self.turns, {"role": "user", "content": user}]

    def add(self, user: str, answer: str) -> None:
        """Remember one exchange."""
        self.turns += [{"role": "user", "content": user}, {"role": "assistant", "content": answer}]

    def reset(self) -> None:
        """Forget all exchanges."""
        self.turns.clear()


def command(args: argparse.Namespace, out: Output) -> int:
    """Run the command; the exit code.

    Raises: TemplateError when the checkpoint has no chat template.
    """
    sampling = sampling_from(args)
    conversation = Conversation(args.system)
    model = open_model(args)
    if model.template is None:
        raise TemplateError(
            "the checkpoint has no chat template, so m31 does not know how to mark who says what",
            where=str(args.checkpoint),
            expected="chat_template.jinja in the checkpoint folder",
            fix="use 'm31 run' for plain completion",
        )
    announce(model, out, "chat template")
    # input() edits lines only when both ends are terminals; otherwise its prompt would end up in the redirected answer.
    terminal = out.terminal and not out.json_lines and sys.stdin is not None and sys.stdin.isatty()
    if terminal:
        import readline  # noqa: F401  # importing it gives input() line editing and history

        out.note("type a message; /help lists commands")
    return _loop(model, sampling, conversation, out, terminal=terminal)


def _loop(model: Model, sampling: Any, conversation: Conversation, out: Output, *, terminal: bool) -> int:
    while True:
        try:
            line = _read(terminal=terminal)
            if line is None:
                return 0
            if line.startswith("/"):
                if _control(line, conversation, out):
                    return 0
            elif line.strip():
                _answer(model, sampling, conversation, line, out)
        except KeyboardInterrupt:
            if not terminal:  # nobody is there to type the next line
                raise
            out.prompt("\n")
        except EOFError:
            out.prompt("\n")
            return 0
        except (RequestError, ContextLimitExceeded, TemplateError) as error:
            # The person can rephrase, reset or go on; faults of the model or the machine end the program.
            if out.json_lines:
                out.event("error", **error_fields(error))
            out.note(f"error: {error}")


def _read(*, terminal: bool) -> str | None:
    """The next line without its line break, or None at the end of input.

    Raises: EOFError for Ctrl-D at a terminal, InputError for bytes that are not text.
    """
    if sys.stdin is None:
        return None
    try:
        if terminal:
            return input("> ")
        line = sys.stdin.readline()
    except UnicodeDecodeError as error:
        raise InputError(
            f"byte 0x{error.object[error.start]:02x} is not valid {error.encoding}",
            where="standard input",
            expected="text",
            fix="convert it first",
        ) from error
    return line.removesuffix("\n").removesuffix("\r") if line else None


def _control(line: str, conversation: Conversation, out: Output) -> bool:
    """Obey a /command; True if it ends the conversation."""
    name, _, rest = line.partition(" ")
    rest = rest.strip()
    if name == "/exit":
        return True
    if name == "/reset":
        conversation.reset()
        out.note("the conversation is forgotten")
    elif name == "/system" and rest:
        conversation.system = checked_text(rest, "/system")
        conversation.reset()
        out.note("system message set; the conversation is forgotten")
    elif name == "/system":
        out.note(f"system message: {conversation.system or 'none'}")
    elif name == "/help":
        out.note(HELP)
    else:
        near = nearest(name, COMMANDS)
        out.note(f"unknown command '{name}'; " + (f"did you mean '{near}'?" if near else "/help lists the commands"))
    return False


def _answer(model: Model, sampling: Any, conversation: Conversation, line: str, out: Output) -> None:
    """One exchange. An answer cut short by Ctrl-C is remembered as far as it went; after an error nothing is."""
    user = checked_text(line, "message")
    generation = model.generate(model.render(conversation.messages(user)), sampling)
    try:
        interrupted = stream(generation, out)
    except M31Error:
        if not out.json_lines:
            out.end_line()
        raise
    conclude(model, generation, out, interrupted=interrupted)
    conversation.add(user, generation.text)
