"""The command line as a process: Ctrl-C, closed pipes, full disks and a terminal."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, Any

import pytest

DRIVER = str(Path(__file__).with_name("cli_driver.py"))
LIMIT = 20  # seconds; anything slower hangs


def _default_signals() -> None:
    # A background job of a shell inherits "ignore" for SIGINT, which m31 respects and these tests must not.
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def start(options: dict[str, Any], *words: str, **streams: Any) -> subprocess.Popen[bytes]:
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | streams
    command = [sys.executable, DRIVER, json.dumps(options), *words]
    return subprocess.Popen(command, preexec_fn=_default_signals, **streams)


def read_some(stream: IO[bytes] | None, *until: bytes) -> bytes:
    """Read until the given texts have come, in this order; everything read."""
    assert stream is not None
    data, found, deadline = b"", 0, time.monotonic() + LIMIT
    for text in until:
        while (at := data.find(text, found)) < 0:
            assert time.monotonic() < deadline, f"no {text!r} in {data[found:]!r}"
            if select.select([stream], [], [], 0.2)[0]:
                piece = os.read(stream.fileno(), 65536)
                assert piece, f"ended after {data!r}"
                data += piece
        found = at + len(text)
    return data


def finish(process: subprocess.Popen[bytes]) -> tuple[bytes, str]:
    try:
        out, err = process.communicate(timeout=LIMIT)
    finally:
        process.kill()
    assert b"Traceback" not in err
    assert b"Exception ignored" not in err
    return out or b"", err.decode()


def test_ctrl_c_ends_with_what_was_produced(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    options = {"endless": True, "pieces": ["ab "], "step_seconds": 0.01, "closed_file": str(closed)}
    process = start(options, "run", "ckpt", "hi")
    head = read_some(process.stdout, b"ab ab ")
    process.send_signal(signal.SIGINT)
    tail, err = finish(process)
    assert process.returncode == 130
    text = (head + tail).decode()
    assert text == "ab " * (len(text) // 3) + "\n"
    assert f"{len(text) // 3} generated" in err.splitlines()[-1]
    assert "ended: interrupted" in err.splitlines()[-1]
    assert closed.exists()


def test_ctrl_c_in_json_mode() -> None:
    process = start({"endless": True, "step_seconds": 0.01}, "run", "ckpt", "hi", "--json")
    head = read_some(process.stdout, b'"token"')
    process.send_signal(signal.SIGINT)
    tail, _ = finish(process)
    assert process.returncode == 130
    events = [json.loads(line) for line in (head + tail).splitlines()]
    assert events[-1]["event"] == "done"
    assert events[-1]["finish_reason"] == "cancelled"


def test_ctrl_c_before_the_first_token_does_not_wait_for_it() -> None:
    process = start({"prefill_seconds": 3600, "talkative": True}, "run", "ckpt", "hi")
    read_some(process.stderr, b"<prefill>")
    process.send_signal(signal.SIGINT)
    out, err = finish(process)
    assert process.returncode == 130
    assert out == b""
    assert "0 generated" in err


def test_a_second_ctrl_c_stops_at_once() -> None:
    options = {"endless": True, "pieces": ["x"], "step_seconds": 3600, "talkative": True}
    process = start(options, "run", "ckpt", "hi")
    read_some(process.stderr, b"<step>")
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    assert process.poll() is None, "the first one waits for the token in progress"
    process.send_signal(signal.SIGINT)
    finish(process)
    assert process.returncode == 130


def test_ctrl_c_while_loading() -> None:
    process = start({"load_seconds": 3600, "talkative": True}, "run", "ckpt", "hi")
    read_some(process.stderr, b"<load>\n")
    process.send_signal(signal.SIGINT)
    assert finish(process) == (b"", "")
    assert process.returncode == 130


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_a_closed_pipe_ends_quietly(flags: list[str], tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    options = {"endless": True, "step_seconds": 0.01, "closed_file": str(closed)}
    process = start(options, "run", "ckpt", "hi", *flags)
    assert process.stdout is not None
    read_some(process.stdout, b"Hel")
    process.stdout.close()
    process.stdout = None
    _, err = finish(process)
    assert process.returncode == 141
    assert len(err.splitlines()) == 1, "the banner only"
    assert closed.exists()


def test_help_into_a_closed_pipe() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    process = start({}, "--help", stdout=writer)
    os.close(writer)
    _, err = finish(process)
    assert process.returncode == 141
    assert err == ""


def test_stderr_into_a_closed_pipe() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    process = start({}, "run", "ckpt", "hi", stderr=writer)
    os.close(writer)
    try:
        out, _ = process.communicate(timeout=LIMIT)
    finally:
        process.kill()
    assert process.returncode == 0  # remarks have no reader; the answer has
    assert out == b"Hello world\n"


@pytest.mark.parametrize("redirection", ["2>&-", "2>/dev/full"])
def test_standard_error_closed_or_full(redirection: str) -> None:
    words = [sys.executable, DRIVER, "{}", "run", "ckpt", "hi"]
    shell = ["sh", "-c", f'"$@" {redirection}', "sh", *words]
    done = subprocess.run(shell, stdout=subprocess.PIPE, timeout=LIMIT, check=False)
    assert (done.returncode, done.stdout) == (0, b"Hello world\n")


def test_closed_standard_output() -> None:
    words = [sys.executable, DRIVER, "{}", "run", "ckpt", "hi"]
    done = subprocess.run(["sh", "-c", '"$@" >&-', "sh", *words], stderr=subprocess.PIPE, timeout=LIMIT, check=False)
    assert done.returncode == 141
    assert b"Traceback" not in done.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the device that is always full is a Linux one")
def test_a_full_disk_is_an_error() -> None:
    with open("/dev/full", "wb") as full:
        process = start({}, "run", "ckpt", "hi", stdout=full)
        _, err = finish(process)
    assert process.returncode == 1
    assert "m31: error: standard output: cannot write: No space left on device" in err


def test_tokens_are_flushed_one_by_one() -> None:
    process = start({"pieces": ["one ", "two"], "step_seconds": 3600}, "run", "ckpt", "hi")
    assert read_some(process.stdout, b"one ") == b"one "
    process.kill()
    process.communicate(timeout=LIMIT)


def test_piped_prompt() -> None:
    process = start({}, "run", "ckpt", "-", stdin=subprocess.PIPE)
    out, _ = process.communicate(b"hi\n", timeout=LIMIT)
    assert (process.returncode, out) == (0, b"Hello world\n")


def test_ctrl_c_in_a_chat_stops_the_answer_not_the_program() -> None:
    ours, theirs = pty.openpty()
    options = {"endless": True, "pieces": ["ab "], "step_seconds": 0.01}
    process = start(options, "chat", "ckpt", stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True)
    os.close(theirs)
    with open(ours, "r+b", buffering=0) as terminal:
        read_some(terminal, b"> ")
        for _ in range(2):
            terminal.write(b"hi\n")
            read_some(terminal, b"ab ab ")
            process.send_signal(signal.SIGINT)
            read_some(terminal, b"ended: interrupted", b"> ")
        # At the prompt Ctrl-C clears the line. The interpreter overlooks one that comes between writing the prompt and
        # waiting for a key, which no person is quick enough to do; hence several.
        for _ in range(LIMIT):
            process.send_signal(signal.SIGINT)
            if select.select([terminal], [], [], 1.0)[0]:
                break
        read_some(terminal, b"> ")
        terminal.write(b"\x04")
        assert process.wait(timeout=LIMIT) == 0
