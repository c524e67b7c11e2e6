"""The command line against the real library: the demo checkpoint is written, described and run."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import sys
from pathlib import Path

import pytest

from m31.cli import demo, session
from m31.cli.main import main
from m31.config import parse


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demo") / "ckpt"
    demo.write(folder, seed=1, layers=2)
    return folder


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


# --- demo and inspect ------------------------------------------------------------------------------------------------


def test_demo_says_that_its_weights_are_random(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", str(tmp_path / "new" / "demo"), "--layers", "1"]) == 0
    assert "Its weights are random (seed 0)" in capsys.readouterr().err


def test_demo_is_the_official_layout(checkpoint: Path) -> None:
    names = set(digests(checkpoint))
    assert {"config.json", "model.safetensors.index.json", "tokenizer.json", "chat_template.jinja"} <= names
    model = parse(json.loads((checkpoint / "config.json").read_text()), where="demo")
    assert model.dialect == "official"
    assert model.text.attention == ("sparse", "sparse")
    assert model.text.mlp == ("dense", "moe")
    assert model.text.sparse is not None
    assert model.text.sparse.num_index_heads == model.text.num_kv_heads == 2


def test_demo_depends_on_the_seed_only(checkpoint: Path, tmp_path: Path) -> None:
    demo.write(tmp_path / "same", seed=1, layers=2)
    demo.write(tmp_path / "other", seed=2, layers=2)
    assert digests(tmp_path / "same") == digests(checkpoint)
    changed = {name for name, digest in digests(tmp_path / "other").items() if digest != digests(checkpoint)[name]}
    assert changed
    assert all(name.endswith(".safetensors") for name in changed)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--layers", "0"], "--layers: 0 is out of range; expected 1 to 64"),
        (["--layers", "65"], "--layers: 65 is out of range; expected 1 to 64"),
        (["--seed", "-1"], "--seed: -1 is out of range; expected 0 to 9,223,372,036,854,775,807"),
    ],
)
def test_demo_numbers(flags: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", str(tmp_path / "demo"), *flags]) == 1
    assert f"m31: error: {message}" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_demo_destroys_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.txt").write_text("precious")
    assert main(["demo", str(tmp_path)]) == 1
    assert "is not empty" in capsys.readouterr().err
    assert main(["demo", str(tmp_path / "mine.txt")]) == 1
    assert "is not a folder" in capsys.readouterr().err
    assert (tmp_path / "mine.txt").read_text() == "precious"


def test_inspect(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(checkpoint), "--deep"]) == 0
    text = capsys.readouterr().out
    assert "MiniMaxM3SparseForCausalLM" in text
    assert main(["inspect", str(checkpoint), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["architecture"] == "MiniMaxM3SparseForCausalLM"


@pytest.mark.parametrize("command", [["inspect"], ["run", "--raw"], ["chat"]])
def test_not_a_checkpoint(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"")))
    (tmp_path / "file").write_text("not a folder")
    (tmp_path / "empty").mkdir()
    for name in ("file", "empty", "missing"):
        prompt = ["hi"] if command[0] == "run" else []
        assert main([command[0], str(tmp_path / name), *prompt, *command[1:]]) == 1
        captured = capsys.readouterr()
        assert captured.err.startswith("m31: error: ")
        assert str(tmp_path / name) in captured.err
        assert "Traceback" not in captured.err


def test_half_a_download(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in checkpoint.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    shard = sorted(tmp_path.glob("*.safetensors"))[0]
    shard.write_bytes(shard.read_bytes()[:-100])
    for words in (["inspect", str(tmp_path)], ["run", str(tmp_path), "hi"]):
        assert main(words) == 1
        assert shard.name in capsys.readouterr().err


# --- flags and the library -------------------------------------------------------------------------------------------


def test_every_sampling_flag_is_a_parameter() -> None:
    from m31.engine.sampling import SamplingParams

    names = {field.name for field in dataclasses.fields(SamplingParams)}
    assert {*session._SAMPLING, "ignore_eos"} <= names


@pytest.mark.parametrize("flag", ["--temperature=-1", "--top-p=0", "--top-p=1.5", "--max-tokens=0", "--min-p=2"])
def test_sampling_flags_out_of_range(flag: str, checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", str(checkpoint), "hi", flag]) == 1
    captured = capsys.readouterr()
    assert flag.split("=")[0].removeprefix("--").replace("-", "_") in captured.err
    assert captured.out == ""


# --- backends and running --------------------------------------------------------------------------------------------


def test_backends(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["backends"]) == 0
    assert "reference" in capsys.readouterr().out
    assert main(["backends", "--json"]) == 0
    assert "machine" in json.loads(capsys.readouterr().out)


def test_a_misspelt_backend(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", str(checkpoint), "hi", "--backend", "refrence"]) == 3
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "refrence" in captured.err
    assert "reference" in captured.err.replace("refrence", "")


def run_json(capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, object]]:
    assert main(["run", *words, "--json", "--backend", "reference"]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_run(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = (str(checkpoint), "Hello", "--max-tokens", "6", "--ignore-eos", "--seed", "3", "--logprobs", "2")
    events = run_json(capsys, *words)
    assert events[0]["event"] == "start"
    assert events[0]["prompt"] == "chat template"
    done = events[-1]
    assert done["event"] == "done"
    assert done["finish_reason"] == "length"
    assert done["backend"] == "reference"
    assert done["text"] == "".join(str(event["text"]) for event in events[1:-1])
    assert done["stats"]["generated_tokens"] == 6  # type: ignore[index]
    assert done["stats"]["seed"] == 3  # type: ignore[index]
    assert [event["text"] for event in run_json(capsys, *words)[1:-1]] == [event["text"] for event in events[1:-1]]


def test_run_as_text(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", str(checkpoint), "Hello", "--max-tokens", "4", "--temperature", "0", "--raw"]) == 0
    captured = capsys.readouterr()
    assert captured.out.endswith("\n")
    first, last = captured.err.splitlines()[0], captured.err.splitlines()[-1]
    assert first.startswith("m31: backend reference: ")
    for word in ("prompt tokens", "tokens/s", "backend reference", "weights", "kv", "seed"):
        assert word in last


def test_a_prompt_beyond_the_context(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["run", str(checkpoint), "word " * 400, "--max-context", "128", "--backend", "reference"]
    assert main(words) == 1
    captured = capsys.readouterr()
    assert "128" in captured.err
    assert captured.out == ""


def test_chat(checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"Hello\nAgain\n/exit\n"), encoding="utf-8"))
    words = ["chat", str(checkpoint), "--max-tokens", "3", "--seed", "1", "--backend", "reference"]
    assert main(words) == 0
    assert capsys.readouterr().err.count("prompt tokens") == 2
