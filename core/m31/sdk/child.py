"""Running a plugin's code in a child process: a crash, an exit or a hang there is an answer, not our own end.

Costs one interpreter start plus whatever the plugin imports, so it is done only for a manifest's probe and for the
first load of a backend that does not come with m31.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

#: A probe looks at hardware; a trial imports whole libraries, perhaps for the first time on a slow disk.
PROBE_SECONDS = 20.0
TRIAL_SECONDS = 120.0

Task = Literal["probe", "import"]

# The child imports through the parent's sys.path and answers in a file: the plugin may print what it likes. It leaves
# by os._exit, because threads or exit handlers that the plugin started must not decide whether it answered.
_CODE = """
import json, os, sys, traceback
task, target, answer, path = sys.argv[1], sys.argv[2], sys.argv[3], json.loads(sys.argv[4])
sys.path[:] = path
try:
    import importlib
    module, _, names = target.partition(":")
    found = importlib.import_module(module)
    for name in names.split("."):
        found = getattr(found, name)
    result = found() if task == "probe" else None
    if result is not None and not isinstance(result, str):
        raise TypeError(f"the probe returned {type(result).__name__}; None (usable) or a reason (str) was expected")
    report = {"declined": result}
except BaseException as error:
    chain = [error]
    while True:
        last = chain[-1]
        inner = last.__cause__ or (None if last.__suppress_context__ else last.__context__)
        if inner is None or inner in chain:
            break
        chain.append(inner)
    said = [f"{type(e).__name__}: {e}" for e in chain]
    report = {"raised": said, "traceback": "".join(traceback.format_exception(error))}
with open(answer + ".part", "w", encoding="utf-8") as file:
    json.dump(report, file)
os.replace(answer + ".part", answer)
os._exit(0)
"""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of a child process.

    ok: the code ran (and a probe said "usable"). text: otherwise why, one line. declined: a probe's own reason rather
    than a fault. detail: the traceback or the last words on standard error, for a bug report.
    """

    ok: bool
    text: str
    declined: bool = False
    detail: str = ""


def run_child(task: Task, target: str, seconds: float) -> Outcome:
    """Import `module:attribute` in a child process and, for a probe, call it without arguments.

    Args:
        task: "import", or "probe" (the callable returns None when the backend can run here, else the reason).
        target: `module:attribute`.
        seconds: time limit; afterwards the child and its process group are killed.
    """
    if not sys.executable:
        return Outcome(ok=False, text="no interpreter is known to this process, so no child can be started")
    with tempfile.TemporaryDirectory(prefix="m31-child-", ignore_cleanup_errors=True) as folder:
        return _run(task, target, seconds, Path(folder))


def _run(task: Task, target: str, seconds: float, folder: Path) -> Outcome:
    answer, errors = folder / "answer.json", folder / "stderr.txt"
    command = [sys.executable, "-P", "-c", _CODE, task, target, str(answer), json.dumps([str(p) for p in sys.path])]
    # Files instead of pipes: a grandchild that keeps a pipe open would keep us waiting after the child is gone.
    with errors.open("wb") as stderr:
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=stderr, start_new_session=True
            )
        except OSError as error:
            return Outcome(ok=False, text=f"no child process could be started: {error}")
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            return Outcome(ok=False, text=f"no answer within {seconds:g} s", detail=_tail(errors))
        finally:
            # Also on Ctrl-C: a hanging child must not outlive this call.
            _kill(process)
    if not answer.exists():
        return Outcome(ok=False, text=_death(status, _tail(errors)), detail=_tail(errors))
    return _read(json.loads(answer.read_text(encoding="utf-8")))


def _read(report: dict[str, Any]) -> Outcome:
    if "raised" in report:
        return Outcome(ok=False, text=chain_text(report["raised"]), detail=report["traceback"])
    if report["declined"] is not None:
        return Outcome(ok=False, text=report["declined"], declined=True)
    return Outcome(ok=True, text="")


def chain_text(said: list[str]) -> str:
    """An exception and its causes in one line, the root last (BUG-82: the root is what the reader needs)."""
    lines = [" ".join(line.split()) for line in said]
    return lines[0] if len(lines) == 1 else f"{lines[0]} (root cause: {lines[-1]})"


def _death(status: int, stderr: str) -> str:
    last = stderr.strip().splitlines()[-1:] or ["nothing on standard error"]
    if status < 0:
        try:
            how = f"killed by {signal.Signals(-status).name}"
        except ValueError:
            how = f"killed by signal {-status}"
    else:
        how = f"the process ended itself with status {status}"
    return f"{how} (last words: {last[0]})"


def _tail(path: Path, limit: int = 4000) -> str:
    return path.read_bytes()[-limit:].decode("utf-8", "replace")


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a child that has not answered in time, with whatever it started; a child that has ended is left alone."""
    if process.poll() is not None:
        return
    if hasattr(os, "killpg"):
        os.killpg(process.pid, signal.SIGKILL)  # its own group (start_new_session), and not yet reaped: safe to name
    else:
        process.kill()
    process.wait()
