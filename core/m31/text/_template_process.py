"""Starts, questions and stops the process of `_template_worker`."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from m31.errors import TemplateError

_WORKER = Path(__file__).with_name("_template_worker.py")
_START_SECONDS = 60.0  # a cold start on a loaded machine with a slow disk; the template only compiles


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What one rendering may use. Real templates need milliseconds and a few megabytes."""

    seconds: float = 10.0
    max_bytes: int = 2 * 2**30  # address space of the process, where the system can limit it (not on macOS, Windows)
    max_chars: int = 64 * 2**20  # rendered text; 1,048,576 tokens are rarely more than 8 million characters


_MESSAGES = {
    "raised": ("the template refused these messages: {0}", "change the messages as the template says"),
    "forbidden": ("the template does something that the sandbox forbids: {0}", "do not use this template"),
    "syntax": ("the template has a syntax error: {0}", "correct the template, or download it again"),
    "undefined": ("the template uses something that is not defined: {0}", "pass it as a template variable"),
    "length": ("the rendered text is longer than {limits.max_chars:,} characters", "shorten the messages"),
    "memory": ("the template needs more than {limits.max_bytes:,} bytes of memory", "do not use this template"),
    "recursion": ("the template recurses too deeply", "do not use this template"),
    "failed": ("the template failed: {0}", "check the messages and template variables against the template"),
}


class TemplateProcess:
    """One worker process, started on first use and again after it had to be killed. Calls are serialised."""

    def __init__(self, templates: Mapping[str, str], where: str, limits: Limits) -> None:
        self._templates, self._where, self._limits = dict(templates), where, limits
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._owner = 0
        self._stop: weakref.finalize[Any, Any] | None = None

    def render(self, template: str, variables: Mapping[str, Any], now: str) -> str:
        """The rendered text. Raises TemplateError."""
        request = {
            "template": template,
            "variables": variables,
            "now": now,
            "seconds": self._limits.seconds,
            "max_chars": self._limits.max_chars,
        }
        try:
            line = json.dumps(request, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as exc:
            raise TemplateError(
                f"a template variable cannot be written as JSON ({exc})",
                where=self._where,
                expected="strings, finite numbers, booleans, None, lists and mappings of them",
            ) from exc
        with self._lock:
            process = self._started()
            return self._text(self._ask(process, line, self._limits.seconds))

    def check(self) -> None:
        """Compile the templates now. Raises TemplateError."""
        with self._lock:
            self._started()

    def close(self) -> None:
        """End the process; a later call starts a new one."""
        if self._stop is not None:
            self._stop()
        self._process = self._stop = None

    def _started(self) -> subprocess.Popen[str]:
        # After a fork the pipes are shared with the parent: answers would go to whoever reads first.
        if self._process is not None and self._owner == os.getpid() and self._process.poll() is None:
            return self._process
        if self._owner == os.getpid():
            self.close()
        if not sys.executable:
            raise TemplateError(
                "there is no Python executable to run the template in",
                where=self._where,
                fix="start m31 from an ordinary Python, or use a raw prompt",
            )
        paths = [os.path.abspath(path) for path in sys.path if path]
        try:
            process = subprocess.Popen(
                [sys.executable, "-I", "-X", "utf8", str(_WORKER), *paths],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                encoding="utf-8",
                # Ctrl-C is for m31, which then ends this process itself.
                start_new_session=True,
            )
        except OSError as exc:
            raise TemplateError(f"the template's process did not start ({exc})", where=self._where) from exc
        self._process, self._owner = process, os.getpid()
        self._stop = weakref.finalize(self, _end, process, os.getpid())
        start = {"templates": self._templates, "max_bytes": self._limits.max_bytes}
        self._text(self._ask(process, json.dumps(start), _START_SECONDS))
        return process

    def _ask(self, process: subprocess.Popen[str], line: str, seconds: float) -> dict[str, Any]:
        """Send one line, wait for one line; the process does not survive a failure or an interruption."""
        assert process.stdin is not None
        assert process.stdout is not None
        expired = threading.Event()

        def expire() -> None:
            expired.set()
            process.kill()

        timer = threading.Timer(seconds, expire)
        timer.daemon = True
        timer.start()
        answer = ""
        try:
            with contextlib.suppress(BrokenPipeError):  # the process has ended; the empty answer below says so
                process.stdin.write(line + "\n")
                process.stdin.flush()
                answer = process.stdout.readline()
            if not answer:  # it ended by itself or is about to: let it, so that its own status is known
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(2)
        finally:
            timer.cancel()
            if not answer.endswith("\n"):
                self.close()
        if answer.endswith("\n"):
            return dict(json.loads(answer))
        if expired.is_set():
            raise TemplateError(
                f"the template did not finish within {seconds:g} s",
                where=self._where,
                expected="a template that ends",
                fix="do not use this template; a raw prompt needs none",
            )
        raise TemplateError(
            f"the template's process ended with status {process.returncode}",
            where=self._where,
            fix="check that jinja2 is installed and that there is free memory",
        )

    def _text(self, answer: dict[str, Any]) -> str:
        if "error" not in answer:
            return str(answer["text"])
        what, fix = _MESSAGES[answer["error"]]
        line = answer["line"]
        raise TemplateError(
            what.format(answer["message"], limits=self._limits),
            where=self._where if line is None else f"{self._where}, line {line}",
            fix=fix,
        )


def _end(process: subprocess.Popen[str], owner: int) -> None:
    """Kill and reap the process, if it is this process's own child."""
    if os.getpid() != owner:
        return
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):  # unsent input of a dead process
                pipe.close()
