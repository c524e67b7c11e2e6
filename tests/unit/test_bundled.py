"""The bundled checkpoint: found in a folder and in an archive, checked, installed all or nothing, and the default."""

from __future__ import annotations

import json
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support import nano, quantised, synthetic
from tools import nano_install

import m31
from m31.checkpoint import bundled
from m31.cli.main import main
from m31.errors import CheckpointError, NotACheckpoint, TrainingStateError
from m31.training import corpus
from m31.training.data import Data


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return nano.small_nano(tmp_path_factory.mktemp("nano"))


@pytest.fixture
def place(small: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(small, tmp_path / "nano"))


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder that stands for the package m31."""
    folder = tmp_path / "package"
    folder.mkdir()
    monkeypatch.setattr(bundled.resources, "files", lambda name: {"m31": folder}[name])
    return folder


# --- where it is -----------------------------------------------------------------------------------------------------


def test_a_source_tree_without_it_says_what_to_do(package: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(NotACheckpoint, match="bundled nano is not in this source tree") as caught:
        m31.load()
    assert caught.value.where == str(package / "data" / "nano")
    assert "make nano-install" in str(caught.value)
    for words in (["run", "x"], ["inspect"], ["explain"]):
        assert main(words) == 1
        captured = capsys.readouterr()
        assert captured.out == ""
        assert "m31: error: " in captured.err
        assert "make nano-install" in captured.err


def test_it_is_what_load_opens_without_a_path(package: Path, small: Path) -> None:
    shutil.copytree(small, package / "data" / "nano")
    assert bundled.folder() == package / "data" / "nano"
    ids = [5, 6, 7]
    assert torch.equal(m31.load(backend="reference").logits(ids), m31.load(small, backend="reference").logits(ids))


def test_in_an_archive(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (small / "dspark").mkdir()
    (small / "dspark" / "a.txt").write_text("a")
    with zipfile.ZipFile(tmp_path / "m31.zip", "w") as archive:
        for path in small.rglob("*"):
            archive.write(path, f"m31/data/nano/{path.relative_to(small)}")
    shutil.rmtree(small / "dspark")
    monkeypatch.setattr(bundled.resources, "files", lambda name: zipfile.Path(tmp_path / "m31.zip", f"{name}/"))
    monkeypatch.setattr(bundled, "_extracted", {})
    folder = bundled.folder()
    assert folder == bundled.folder()
    assert (folder / "dspark" / "a.txt").read_text() == "a"
    assert (folder / "nano.json").read_bytes() == (small / "nano.json").read_bytes()
    assert m31.load(folder, backend="reference").tokenizer is not None


# --- whether it is right ---------------------------------------------------------------------------------------------


def weights(place: Path) -> Path:
    return next(iter(sorted(place.glob("*.safetensors"))))


def changed(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1] + b"\x5a")


def relicensed(place: Path) -> None:
    """Whoever leaves out the licence has to leave it out of the manifest too, and is still found out."""
    (place / "LICENSE").unlink()
    (place / "nano.json").write_text(json.dumps(bundled.manifest(place, {})))


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a weight": (lambda place: changed(weights(place)), "is not what nano.json says"),
    "shorter": (lambda place: weights(place).write_bytes(b""), "is not what nano.json says"),
    "no tokenizer": (lambda place: (place / "tokenizer.json").unlink(), "has no tokenizer.json"),
    "no licence": (relicensed, "has no LICENSE"),
    "no weights": (lambda place: [path.unlink() for path in place.glob("*.safetensors")], "has no "),
    "something else": (lambda place: (place / "notes.txt").write_text(""), "holds notes.txt, which nano.json does not"),
    "another version": (
        lambda place: (place / "nano.json").write_text((place / "nano.json").read_text().replace(": 1,", ": 2,", 1)),
        "is not what nano.json says",
    ),
    "not JSON": (lambda place: (place / "nano.json").write_text("{"), "cannot be read"),
    "a list": (lambda place: (place / "nano.json").write_text("[]"), "cannot be read"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_found(name: str, place: Path) -> None:
    assert bundled.check(place)["about"] == nano.ABOUT
    damage, message = DAMAGE[name]
    damage(place)
    with pytest.raises(CheckpointError, match=message):
        bundled.check(place)


def test_no_manifest(tmp_path: Path) -> None:
    with pytest.raises(NotACheckpoint, match=r"has no nano\.json"):
        bundled.check(tmp_path)


def test_too_large(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = sum(path.stat().st_size for path in place.rglob("*"))
    monkeypatch.setattr(bundled, "MAX_BYTES", size)
    bundled.check(place)
    monkeypatch.setattr(bundled, "MAX_BYTES", size - 1)
    with pytest.raises(CheckpointError, match=f"has {size:,} bytes; expected at most {size - 1:,}"):
        bundled.check(place)


# --- how it gets there -----------------------------------------------------------------------------------------------


def test_the_licence_names_text_and_terms(place: Path) -> None:
    text = (place / "LICENSE").read_text()
    for words in ("Apache-2.0", "Python Software Foundation", "PSF License Agreement", nano.ABOUT["text"]):
        assert words in text


def test_installing_replaces_all_or_nothing(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "data" / "nano"
    checkpoint = nano.small_checkpoint(tmp_path / "checkpoint")
    assert nano_install.install(checkpoint, target, nano.ABOUT) == sum(p.stat().st_size for p in target.iterdir())
    (target / "old.txt").write_text("old")
    nano_install.install(checkpoint, target, nano.ABOUT)
    assert {p.name for p in target.iterdir()} == {p.name for p in small.iterdir()}
    before = (target / "nano.json").read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(bundled, "MAX_BYTES", 1000)
        with pytest.raises(CheckpointError, match="at most 1,000"):
            nano_install.install(checkpoint, target, {"text": "other"})
    (checkpoint / "extra.safetensors").write_bytes(b"")
    with pytest.raises(TrainingStateError, match=r"ignored extra\.safetensors"):
        nano_install.install(checkpoint, target, nano.ABOUT)
    (checkpoint / "extra.safetensors").unlink()
    weights(checkpoint).write_bytes(b"")
    with pytest.raises(CheckpointError):
        nano_install.install(checkpoint, target, nano.ABOUT)
    assert (target / "nano.json").read_bytes() == before
    assert [p.name for p in target.parent.iterdir()] == ["nano"]
    bundled.check(target)


def test_a_draft_head_goes_along(tmp_path: Path) -> None:
    source, head = tmp_path / "checkpoint", tmp_path / "head"
    quantised.write_bf16(source, quantised.bf16_config())
    for name in bundled.NEEDED:
        if not (source / name).exists() and name != bundled.LICENCE:
            (source / name).write_text("{}")
    quantised.write_draft(source / "dspark")
    shutil.copytree(source / "dspark", head)
    nano_install.install(source, tmp_path / "own", nano.ABOUT)
    shutil.rmtree(source / "dspark")
    nano_install.install(source, tmp_path / "given", nano.ABOUT, head)
    listed = [json.loads((tmp_path / name / "nano.json").read_text())["files"] for name in ("own", "given")]
    assert listed[0] == listed[1]
    assert any(name.startswith("dspark/") for name in listed[0])


def test_only_a_finished_run_of_the_nano_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = nano_install.training_config.load(nano_install.CONFIG)
    data = Data(synthetic.Counting(1, 2, 3, 4), [], "the data")
    text = corpus.Corpus((), "abc", "CPython 0.0", ())
    monkeypatch.setattr(nano_install, "provided", lambda *given, **named: data)
    monkeypatch.setattr(nano_install.corpus, "load", lambda: text)
    run, target = tmp_path / "run", tmp_path / "nano"
    nano.small_checkpoint(run / "checkpoint")
    state = {"step": 9, "total": 10, "best_step": 8, "best_loss": 2.5, "fingerprint": config.fingerprint("other data")}
    refused = ["the run is at step 9 of 10", "the run belongs to another configuration or text", ""]
    for message in refused:
        (run / "state.json").write_text(json.dumps(state))
        assert nano_install.main([str(run), "--to", str(target)]) == int(bool(message))
        assert message in capsys.readouterr().err
        assert target.exists() == (not message)
        state |= {"fingerprint": config.fingerprint("the data")} if state["step"] == 10 else {"step": 10}
    about = bundled.check(target)["about"]
    assert about["text"] == "the standard library of CPython 0.0"
    assert (about["steps"], about["best_step"], about["validation_loss"]) == (10, 8, 2.5)


# --- what the command line does with it ------------------------------------------------------------------------------


def test_run_continues_the_prompt_as_it_is(
    small: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bundled, "folder", lambda: small)
    words = ["--max-tokens", "4", "--seed", "1", "--temperature", "0", "--backend", "reference"]
    assert main(["run", "def f():", *words]) == 0
    bare = capsys.readouterr()
    assert main(["run", str(small), "def f():", "--raw", *words]) == 0
    named = capsys.readouterr()
    assert bare.out == named.out != "\n"
    first, second = bare.err.splitlines()[:2]
    assert first == "m31: no checkpoint is named: this is the bundled nano, a small model that continues Python code"
    assert second.endswith("prompt: raw")
    assert "bundled" not in named.err


def test_inspect_and_explain_describe_it(
    small: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bundled, "folder", lambda: small)
    for command in ("inspect", "explain"):
        assert main([command]) == 0
        bare = capsys.readouterr().out
        assert main([command, str(small)]) == 0
        assert capsys.readouterr().out == bare != ""
