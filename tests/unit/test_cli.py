"""The command line against a fake model: grammar, prompts, output, errors and exit codes."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cli_fakes import FakeModel, patch
from hypothesis import given
from hypothesis import strategies as st

import m31
from m31 import errors
from m31.cli import arguments, output, session
from m31.cli.main import main


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeModel:
    """A model that `m31.load` returns for any path."""
    model = FakeModel()
    patch(model, monkeypatch)
    return model


def give_stdin(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))


# --- grammar ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["rnu"], "unknown command 'rnu'; did you mean 'run'?"),
        (["xyzzy"], "unknown command 'xyzzy'; commands are run, chat, backends, inspect, convert, explain, demo"),
        (["run", "c", "p", "--temprature", "1"], "unknown flag '--temprature'; did you mean '--temperature'?"),
        (["run", "c", "p", "--top_p=0.5"], "unknown flag '--top_p'; did you mean '--top-p'?"),
        (["run", "c", "p", "--temp", "1"], "unknown flag '--temp'"),  # abbreviations are not accepted
        (["run", "c", "two", "words"], "unexpected argument 'words'; quote a prompt that has spaces"),
        (["run"], "the following arguments are required: PROMPT"),
        (["run", "."], "'.' is a folder, and the argument PROMPT is missing behind it"),
        (["run", "p", "--system", "s"], "--system goes through a chat template; the bundled nano continues text"),
        (["run", "c", "--raw", "two", "words"], "unexpected argument 'two'; quote a prompt that has spaces"),
        (["chat"], "the following arguments are required: CKPT"),
        (["run", "c", "p", "--seed", "x"], "argument --seed: expected a whole number, got 'x'"),
        (["run", "c", "p", "--seed", "1.5"], "argument --seed: expected a whole number, got '1.5'"),
        (["run", "c", "p", "--top-p", "nan"], "argument --top-p: expected a number, got 'nan'"),
        (["run", "c", "p", "--temperature", "inf"], "argument --temperature: expected a number, got 'inf'"),
        (["run", "c", "p", "--raw", "--system", "s"], "--system goes through the chat template, which --raw turns off"),
        (["run", "c", "p", "--logprobs", "3"], "--logprobs has an effect only with --json"),
        (["chat", "c", "--deep"], "unknown flag '--deep'"),
    ],
)
def test_wrong_command_line(
    words: list[str], message: str, fake: FakeModel, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    captured = capsys.readouterr()
    assert f"m31: error: {message}" in captured.err
    assert "--help'" in captured.err
    assert captured.out == ""
    assert fake.loads == []


def test_no_command_prints_help_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "usage: m31" in captured.err


@pytest.mark.parametrize("words", [["--help"], *([name, "--help"] for name in arguments.COMMANDS)])
def test_help(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("usage: m31")
    assert captured.err == ""


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"m31 {m31.__version__}\n"


def test_help_and_version_import_nothing_heavy() -> None:
    """BUG-81, BUG-92: the host command works, and fast, whatever is wrong with torch or a plugin."""
    code = (
        "import sys; from m31.cli.main import main\n"
        "assert main(['--help']) == 0 and main(['--version']) == 0 and main(['rnu']) == 2\n"
        "heavy = {'torch', 'numpy', 'pydantic', 'stevedore', 'jinja2', 'tokenizers', 'safetensors'}\n"
        "print(sorted(n for n in sys.modules if n.split('.')[0] in heavy or n.startswith('m31_')))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "[]"


@given(st.text(min_size=1, max_size=12))
def test_a_misspelt_flag_never_crashes(word: str) -> None:
    """Whatever the word, the parser accepts it or exits with 2; it never raises anything else."""
    code = 0
    try:
        arguments.parse(["run", "ckpt", "prompt", f"--{word}"])
    except SystemExit as stop:
        code = int(stop.code or 0)
    assert code in (0, 2)


# --- run: prompts ----------------------------------------------------------------------------------------------------


def test_run_streams_the_answer(fake: FakeModel, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "ckpt", "hi"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "Hello world\n"
    first, last = captured.err.splitlines()
    assert first == "m31: backend reference: the only usable backend; prompt: chat template"
    assert last == (
        "m31: 1 prompt tokens, 3 generated; prefill 24.0 tokens/s, decode 8.0 tokens/s; ended: stop; "
        "backend reference; weights bf16, kv float32, index float32, compute float32; seed 7"
    )
    assert fake.prompts == ["<user>hi<ai>"]
    assert fake.generations[0].closed == 1


def test_flags_reach_the_library(fake: FakeModel) -> None:
    words = "--max-tokens 5 --temperature 0.5 --top-p 0.9 --top-k 40 --min-p 0.05 --seed 3 --stop A --stop B"
    words += " --repetition-penalty 1.1 --presence-penalty 0.2 --ignore-eos"
    words += " --backend reference --device cpu --dtype float64 --max-context 512 --draft 3"
    words += " --kv-dtype fp8 --index-dtype int8 --arithmetic w8a8-mxfp8 --v-scale-order token_quad"
    words += " --adapter tuned --merge-adapter"
    assert main(["run", *words.split(), "ckpt", "hi"]) == 0
    assert fake.samplings[0].given == {
        "max_tokens": 5,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.05,
        "seed": 3,
        "stop": ("A", "B"),
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "ignore_eos": True,
    }
    options = {"backend": "reference", "device": "cpu", "dtype": "float64", "max_context": 512, "draft": 3}
    formats = {"kv_dtype": "fp8", "index_dtype": "int8", "arithmetic": "w8a8-mxfp8", "v_scale_order": "token_quad"}
    adapter = {"adapter": "tuned", "adapter_mode": "merge"}
    assert fake.loads == [(Path("ckpt"), options | formats | adapter)]


def test_flags_not_given_keep_the_librarys_defaults(fake: FakeModel) -> None:
    assert main(["run", "ckpt", "hi"]) == 0
    assert fake.samplings[0].given == {}
    unset = ("backend", "device", "kv_dtype", "index_dtype", "v_scale_order", "arithmetic", "max_context", "draft")
    assert fake.loads[0][1] == dict.fromkeys(("dtype", "adapter", "adapter_mode", *unset))


@pytest.mark.parametrize("words", [["p"], ["--raw", "p"], ["p", "--raw"], ["-"]])
def test_without_a_checkpoint_the_bundled_one_continues_the_prompt(
    words: list[str], fake: FakeModel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    give_stdin(monkeypatch, b"p\n")
    assert main(["run", *words]) == 0
    assert [path for path, _ in fake.loads] == [None]
    assert fake.prompts == ["p"]
    assert "m31: no checkpoint is named: this is the bundled nano" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["c", "p", "--raw"], ["c", "--raw", "p"], ["--raw", "c", "p"], ["c", "--raw", "-"]])
def test_flags_may_stand_anywhere(words: list[str], fake: FakeModel, monkeypatch: pytest.MonkeyPatch) -> None:
    give_stdin(monkeypatch, b"p\n")
    assert main(["run", *words]) == 0
    assert [path for path, _ in fake.loads] == [Path("c")]
    assert fake.prompts == ["p"]


def test_raw_bypasses_the_template(fake: FakeModel, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "ckpt", "]~b]hi", "--raw"]) == 0
    assert fake.prompts == ["]~b]hi"]
    assert "prompt: raw" in capsys.readouterr().err


def test_no_template_says_so(fake: FakeModel, capsys: pytest.CaptureFixture[str]) -> None:
    fake.template = None
    assert main(["run", "ckpt", "hi"]) == 0
    assert fake.prompts == ["hi"]
    assert "prompt: raw, since the checkpoint has no chat template" in capsys.readouterr().err


def test_system_message(fake: FakeModel, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "ckpt", "hi", "--system", "be brief"]) == 0
    assert fake.conversations == [[{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]]
    fake.template = None
    assert main(["run", "ckpt", "hi", "--system", "be brief"]) == 1
    assert "m31: error: --system: the checkpoint has no chat template" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("data", "prompt"),
    [(b"hi\n", "hi"), (b"hi\r\n", "hi"), (b"hi\n\n", "hi\n"), ("żółw".encode(), "żółw"), (b" \n", " ")],
)
def test_prompt_from_stdin(data: bytes, prompt: str, fake: FakeModel, monkeypatch: pytest.MonkeyPatch) -> None:
    give_stdin(monkeypatch, data)
    assert main(["run", "ckpt", "-", "--raw"]) == 0
    assert fake.prompts == [prompt]


@pytest.mark.parametrize(
    ("argument", "data", "message"),
    [
        ("", b"", "m31: error: prompt: the text is empty; expected at least one character; give a prompt"),
        ("-", b"", "m31: error: standard input: the text is empty"),
        ("-", b"\n", "m31: error: standard input: the text is empty"),
        ("-", b"ab\xff", "m31: error: standard input: byte 3 is not valid UTF-8; expected UTF-8 text"),
        ("a\udcff", b"", "m31: error: prompt: character 2 is not valid Unicode; expected UTF-8"),
    ],
)
def test_bad_prompts_are_refused_before_loading(
    argument: str,
    data: bytes,
    message: str,
    fake: FakeModel,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    give_stdin(monkeypatch, data)
    assert main(["run", "ckpt", argument]) == 1
    assert message in capsys.readouterr().err
    assert fake.loads == []


def test_closed_stdin(fake: FakeModel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    assert main(["run", "ckpt", "-"]) == 1
    assert "m31: error: standard input: it is closed; expected the prompt" in capsys.readouterr().err


# --- run: output -----------------------------------------------------------------------------------------------------


def test_json_lines(fake: FakeModel, capsys: pytest.CaptureFixture[str]) -> None:
    fake.logprobs = True
    fake.pieces = ("zażółć", "", "\x1b[31m")
    assert main(["run", "ckpt", "hi", "--json", "--logprobs", "1"]) == 0
    captured = capsys.readouterr()
    assert captured.out.isascii()
    events = [json.loads(line) for line in captured.out.splitlines()]
    assert [event["event"] for event in events] == ["start", "token", "token", "token", "done"]
    assert events[0]["backend"] == {"name": "reference", "reason": "the only usable backend"}
    assert events[0]["formats"] == dict(fake.formats)
    assert events[1] == {
        "event": "token",
        "text": "zażółć",
        "token_ids": [0],
        "logprobs": [{"token_id": 0, "logprob": -0.5}],
    }
    assert "".join(event["text"] for event in events[1:-1]) == events[-1]["text"] == "zażółć\x1b[31m"
    assert events[-1]["finish_reason"] == "stop"
    assert events[-1]["stats"] == {
        "prompt_tokens": 1,
        "generated_tokens": 3,
        "prefill_seconds": 0.5,
        "decode_seconds": 2.0,
        "prefill_tokens_per_second": 24.0,
        "decode_tokens_per_second": 8.0,
        "accepted_per_verify": None,
        "draft_confidence": None,
        "seed": 7,
    }


def test_json_error_event(fake: FakeModel, capsys: pytest.CaptureFixture[str]) -> None:
    fake.fail_after = 2
    fake.failure = errors.NonFiniteLogits("the logits hold NaN", where="step 2", expected="finite logits", fix="look")
    assert main(["run", "ckpt", "hi", "--json"]) == 1
    captured = capsys.readouterr()
    assert json.loads(captured.out.splitlines()[-1]) == {
        "event": "error",
        "type": "NonFiniteLogits",
        "what": "the logits hold NaN",
        "where": "step 2",
        "expected": "finite logits",
        "fix": "look",
    }
    assert "m31: error: step 2: the logits hold NaN; expected finite logits; look" in captured.err
    assert fake.generations[0].closed == 1


def test_redirected_output_is_exact_and_a_terminal_is_protected(monkeypatch: pytest.MonkeyPatch) -> None:
    for terminal, expected in ((False, "a\x1b[2J\tb\x07\x9b\n"), (True, "a␛[2J\tb␇�\n")):
        stream = io.StringIO()
        monkeypatch.setattr(stream, "isatty", lambda terminal=terminal: terminal)
        monkeypatch.setattr(sys, "stdout", stream)
        output.Output().text("a\x1b[2J\tb\x07\x9b\n")
        assert stream.getvalue() == expected


@given(st.text())
def test_visible_text_cannot_command_a_terminal(text: str) -> None:
    shown = output.visible(text)
    assert len(shown) == len(text)
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", shown)
    assert output.visible(shown) == shown


def test_an_unencodable_character_is_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    output.Output().text("ż!")
    assert raw.getvalue() == b"\\u017c!"


def test_speed_of_nothing_is_not_a_number() -> None:
    assert session._speed(None) == session._speed(0.0) == "n/a"


# --- failures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.NotACheckpoint("it is a file", where="x", expected="a folder", fix="name the folder"), 1),
        (errors.UnknownBackend("no backend 'refrence'", fix="did you mean 'reference'?"), 3),
        (errors.BackendRefused("no matching device"), 3),
        (errors.ContextLimitExceeded("reference", 100, 200), 1),
    ],
)
def test_errors_of_ours(
    error: errors.M31Error,
    code: int,
    fake: FakeModel,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def load(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setitem(vars(m31), "load", load)
    assert main(["run", "ckpt", "hi"]) == code
    captured = capsys.readouterr()
    assert captured.err == f"m31: error: {error}\n"
    assert captured.out == ""
    monkeypatch.setenv("M31_DEBUG", "1")
    assert main(["run", "ckpt", "hi"]) == code
    assert "Traceback" in capsys.readouterr().err


def test_error_messages_are_one_paragraph_and_harmless(capsys: pytest.CaptureFixture[str]) -> None:
    output.Output().note("error: candidates:\n\n  a: \x1b[31mno\n  b: no\n")
    assert capsys.readouterr().err == "m31: error: candidates:\n       a: ␛[31mno\n       b: no\n"


def test_an_unexpected_exception(fake: FakeModel, capsys: pytest.CaptureFixture[str]) -> None:
    fake.fail_after = 1
    assert main(["run", "ckpt", "hi"]) == 70
    captured = capsys.readouterr()
    assert captured.out == "Hel\n"
    assert "m31: internal error: RuntimeError: kernel exploded" in captured.err
    assert "M31_DEBUG=1" in captured.err
    assert "Please report it there" in captured.err
    assert "Traceback" not in captured.err


def test_exit_codes_in_the_help_are_those_in_use() -> None:
    from m31.cli import main as module

    documented = {int(code) for code in re.findall(r"^  (\d+) ", arguments.EXIT_CODES, re.MULTILINE)}
    codes = {
        value.exit_code
        for value in vars(errors).values()
        if isinstance(value, type) and issubclass(value, errors.M31Error)
    }
    assert documented == codes | {0, 2, module.INTERNAL, module.INTERRUPTED, module.CLOSED}


def test_what_loading_went_on_with_is_told(fake: FakeModel, capsys: pytest.CaptureFixture[str]) -> None:
    """BUG-103: a stray shard is ignored, and said to be."""
    fake.notes = ("stray.safetensors is not named by the index and is ignored",)
    assert main(["run", "ckpt", "hi"]) == 0
    assert "m31: note: stray.safetensors is not named by the index and is ignored" in capsys.readouterr().err
