"""`m31 chat` with piped input; `test_cli_process.py` has it at a terminal."""

from __future__ import annotations

import io
import json
import sys

import pytest
from cli_fakes import FakeModel, patch

from m31 import errors
from m31.cli.main import main


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeModel:
    model = FakeModel(pieces=("<mm:think>hm</mm:think>", "yes"))
    patch(model, monkeypatch)
    return model


def chat(monkeypatch: pytest.MonkeyPatch, lines: str | bytes, *flags: str) -> int:
    data = lines if isinstance(lines, bytes) else lines.encode()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))
    return main(["chat", "ckpt", *flags])


def test_history_keeps_reasoning(fake: FakeModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The template decides what of past reasoning it shows, so the history must hold all of it (MODEL.md §7.2)."""
    assert chat(monkeypatch, "one\n\n  \ntwo\n", "--system", "S") == 0
    answer = {"role": "assistant", "content": "<mm:think>hm</mm:think>yes"}
    system, one, two = ({"role": r, "content": c} for r, c in (("system", "S"), ("user", "one"), ("user", "two")))
    assert fake.conversations == [[system, one], [system, one, answer, two]]
    assert all(generation.closed == 1 for generation in fake.generations)


def test_answers_and_statistics(
    fake: FakeModel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert chat(monkeypatch, "one\r\ntwo") == 0
    captured = capsys.readouterr()
    assert captured.out == "<mm:think>hm</mm:think>yes\n" * 2
    assert captured.err.count("ended: stop") == 2
    assert captured.err.count("m31: backend reference: ") == 1


def test_commands(fake: FakeModel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert chat(monkeypatch, "one\n/reset\ntwo\n/system\n/system be brief\n/system\nthree\n/help\n/exit\nfour\n") == 0
    assert fake.conversations == [
        [{"role": "user", "content": "one"}],
        [{"role": "user", "content": "two"}],
        [{"role": "system", "content": "be brief"}, {"role": "user", "content": "three"}],
    ]
    error = capsys.readouterr().err
    assert "m31: system message: none" in error
    assert "m31: system message: be brief" in error
    assert "/reset          forget the conversation" in error


def test_misspelt_command(fake: FakeModel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert chat(monkeypatch, "/rest\n/xyzzy\n") == 0
    error = capsys.readouterr().err
    assert "unknown command '/rest'; did you mean '/reset'?" in error
    assert "unknown command '/xyzzy'; /help lists the commands" in error
    assert fake.prompts == []


def test_a_refused_message_does_not_end_the_conversation(
    fake: FakeModel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.fail_after, fake.failure = 1, errors.ContextLimitExceeded("reference", 10, 20)
    assert chat(monkeypatch, "one\n/exit\n") == 0
    captured = capsys.readouterr()
    assert captured.out == "<mm:think>hm</mm:think>\n"
    assert "m31: error: reference serves at most 10 tokens, asked for 20" in captured.err


def test_a_fault_of_the_model_ends_it(
    fake: FakeModel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.fail_after, fake.failure = 1, errors.NonFiniteLogits("the logits hold NaN")
    assert chat(monkeypatch, "one\ntwo\n") == 1
    assert len(fake.generations) == 1
    assert "m31: error: the logits hold NaN" in capsys.readouterr().err


def test_no_template(fake: FakeModel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    fake.template = None
    assert chat(monkeypatch, "one\n") == 1
    assert "m31: error: ckpt: the checkpoint has no chat template" in capsys.readouterr().err


def test_bytes_that_are_not_text(
    fake: FakeModel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert chat(monkeypatch, b"ab\xff\ntwo\n") == 1
    assert "m31: error: standard input: byte 0xff is not valid utf-8" in capsys.readouterr().err


def test_no_input(fake: FakeModel, monkeypatch: pytest.MonkeyPatch) -> None:
    assert chat(monkeypatch, "") == 0
    monkeypatch.setattr(sys, "stdin", None)
    assert main(["chat", "ckpt"]) == 0
    assert fake.prompts == []


def test_json_lines(fake: FakeModel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """One `start`, then for each message its tokens and a `done`, or an `error` that ends nothing."""
    assert chat(monkeypatch, "one\n/reset\nbad\ntwo\n", "--json") == 0
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [e["event"] for e in events] == ["start", *["token", "token", "done"] * 3]

    def refuse(messages: object) -> str:
        raise errors.RequestError("no", where="message 0")

    monkeypatch.setattr(fake, "render", refuse)
    assert chat(monkeypatch, "one\n", "--json") == 0
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [e["event"] for e in events] == ["start", "error"]
    assert events[1] == {
        "event": "error", "type": "RequestError", "what": "no", "where": "message 0", "expected": None, "fix": None
    }  # fmt: skip
