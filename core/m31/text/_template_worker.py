"""The child process in which a checkpoint's chat template runs; `m31.text.template` starts it and talks to it.

A chat template is a program from whoever made the checkpoint. Jinja's sandbox keeps it away from Python's internals
and from mutating its input, but no check inside one process bounds its time and memory: two loops of 10^5 rounds,
`x = [x, x]` forty times and one comparison, or `'a'.ljust(10**10)` all pass the sandbox. A process can be given a
limit on memory and be killed, so this is one. It starts in about a tenth of a second, once per template.

Run as a script by path, in Python's isolated mode, with the parent's import path as arguments, so that nothing but
jinja2 is imported. Protocol: one JSON object a line on stdin and stdout. The first line is
`{templates: {name: source}, max_bytes}`, each further one `{template, variables, now, seconds, max_chars}`. Every
answer is `{text}` or `{error, message, line}`, where `error` is the kind of fault. End of stdin ends the process.
"""

from __future__ import annotations

import json
import math
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any, NoReturn, TextIO

if __name__ == "__main__":
    sys.path.extend(sys.argv[1:])

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

_FILE = "<chat template>"
_LOADS = (nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends)


class _Undefined(jinja2.Undefined):
    """Undefined names may be tested, compared, looped over and defaulted, as published templates do, not printed.

    Jinja would print nothing: a prompt with a part missing, which nobody sees.
    """

    __slots__ = ()

    def __str__(self) -> str:
        self._fail_with_undefined_error()

    def __bool__(self) -> bool:
        # Jinja hands out forbidden attributes as undefined values; testing one is an attempt, not a question.
        if self._undefined_exception is SecurityError:
            self._fail_with_undefined_error()
        return False


class _Sandbox(ImmutableSandboxedEnvironment):
    # Intercepted operators are not folded into constants: `9 ** 9 ** 9` then costs a rendering, which has limits.
    intercepted_binops = frozenset(ImmutableSandboxedEnvironment.default_binop_table)


class _Raised(jinja2.TemplateError):
    """The template called raise_exception."""


class _LengthError(Exception):
    """The rendered text passed the limit."""


class _Generation(Extension):
    """`{% generation %}...{% endgeneration %}` marks assistant text for training; here it renders what it holds."""

    tags = {"generation"}  # noqa: RUF012 - jinja's own attribute

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def _raise_exception(message: object) -> NoReturn:
    raise _Raised(str(message))


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """JSON for a prompt, not for a web page: characters stay as they are."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _make_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


def _environment() -> tuple[jinja2.Environment, Callable[[str], None]]:
    """The sandbox, and a function that sets the clock of `strftime_now`."""
    clock = datetime.min

    def set_clock(now: str) -> None:
        nonlocal clock
        clock = datetime.fromisoformat(now)

    env = _Sandbox(
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=_Undefined,
        extensions=["jinja2.ext.loopcontrols", _Generation],
        optimized=False,  # the same for expressions inside statements
    )
    env.filters["tojson"] = _tojson
    env.globals.update(
        raise_exception=_raise_exception, strftime_now=lambda form: clock.strftime(form), dict=_make_dict
    )
    # One prompt for one input: nothing that draws random numbers.
    del env.globals["lipsum"], env.filters["random"]
    return env, set_clock


def _compile(env: jinja2.Environment, source: str) -> jinja2.Template:
    for node in env.parse(source, filename=_FILE).find_all(_LOADS):
        kind = {"FromImport": "from ... import"}.get(type(node).__name__, type(node).__name__.lower())
        raise jinja2.TemplateSyntaxError(f"'{kind}' is not available: a chat template is one file", node.lineno)
    code = env.compile(source, name=_FILE, filename=_FILE)
    return jinja2.Template.from_code(env, code, env.make_globals(None))


def _pieces(template: jinja2.Template, variables: dict[str, Any], max_chars: int) -> Iterator[str]:
    count = 0
    for piece in template.generate(variables):
        count += len(piece)
        if count > max_chars:
            raise _LengthError
        yield piece


def _line(exc: BaseException) -> int | None:
    if isinstance(exc, jinja2.TemplateSyntaxError):
        return exc.lineno
    lines = [frame.lineno for frame in traceback.extract_tb(exc.__traceback__) if frame.filename == _FILE]
    return lines[-1] if lines else None


def _failure(exc: BaseException) -> dict[str, Any]:
    """The answer for an exception. Order matters: the special kinds are subclasses of the general ones."""
    kinds: list[tuple[type[BaseException], str]] = [
        (_Raised, "raised"),
        (SecurityError, "forbidden"),
        (jinja2.TemplateSyntaxError, "syntax"),
        (jinja2.UndefinedError, "undefined"),
        (_LengthError, "length"),
        (MemoryError, "memory"),
        (OverflowError, "forbidden" if "Range too big" in str(exc) else "failed"),
        (RecursionError, "recursion"),
    ]
    kind = next((name for cls, name in kinds if isinstance(exc, cls)), "failed")
    message = f"{type(exc).__name__}: {exc}" if kind == "failed" else str(exc)
    if isinstance(exc, jinja2.TemplateSyntaxError):
        message = exc.message or ""  # str() of it also spells out the line
    return {"error": kind, "message": message[:2000], "line": _line(exc)}


def _limit_memory(max_bytes: int) -> None:
    try:
        import resource
    except ImportError:  # no such limit on this system; the limits on time and length remain
        return
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    limit = max_bytes if hard == resource.RLIM_INFINITY else min(max_bytes, hard)
    try:
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    except (ValueError, OSError):  # macOS refuses this limit; the limits on time and length remain
        return


def _alarm(seconds: int) -> None:
    """Let the system end this process should the parent die while a template runs; 0 calls it off."""
    if hasattr(signal, "alarm"):
        signal.alarm(seconds)


def serve(requests: TextIO, answers: TextIO) -> None:
    """Answer requests until the input ends."""

    def answer(value: dict[str, Any]) -> None:
        answers.write(json.dumps(value) + "\n")  # ASCII only, and newlines are escaped: one line
        answers.flush()

    start = json.loads(requests.readline())
    _limit_memory(start["max_bytes"])
    try:
        env, set_clock = _environment()
        templates = {name: _compile(env, source) for name, source in start["templates"].items()}
    except Exception as exc:  # noqa: BLE001 - reported to the parent, which raises it
        answer(_failure(exc))
        return
    answer({"text": ""})
    for line in requests:
        request = json.loads(line)
        _alarm(math.ceil(request["seconds"]) + 5)
        try:
            set_clock(request["now"])
            pieces = _pieces(templates[request["template"]], request["variables"], request["max_chars"])
            answer({"text": "".join(pieces)})
        except Exception as exc:  # noqa: BLE001 - reported to the parent, which raises it
            answer(_failure(exc))
        _alarm(0)


if __name__ == "__main__":
    serve(sys.stdin, sys.stdout)
