"""`m31.checkpoint.convert`: what it writes, what it carries over, what it refuses."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.quantised import (
    bf16_config,
    bf16_weights,
    save,
    stored_tensors,
    to_modelopt,
    write_bf16,
    write_draft,
    write_modelopt,
    write_quantised,
)

from m31.checkpoint import Checkpoint, QuantizedTensor, convert, random_tensors, write
from m31.checkpoint.conversion import Step
from m31.checkpoint.workfolder import STATE
from m31.cli.convert import bar, duration
from m31.cli.main import main
from m31.config import parse
from m31.errors import CheckpointError, ConfigError, NonFiniteWeight, UnsupportedFeature

OTHER_JOB = (
    r"unfinished conversion there belongs to another job: source, format, input scales \(--input-scales\), joint gate "
    r"and up \(--joint-gate-up\), shard size or version of m31 differ; .*delete that folder, or choose another"
)
EXPERT = "model.layers.2.block_sparse_moe.experts.1.w2.weight"


def run(source: Path, destination: Path, target: Any, **options: Any) -> Checkpoint:
    """`convert` into several shards."""
    return convert(source, destination, target=target, **{"max_shard_bytes": 40_000, "input_scales": {}} | options)


@pytest.fixture(scope="module")
def bf16(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_bf16(tmp_path_factory.mktemp("bf16") / "ckpt", bf16_config(vision=True)).folder
    for name in ("chat_template.jinja", "generation_config.json", "merges.txt"):
        (folder / name).write_text(f"{{}} {name}")
    for name in ("model.bin", ".hidden", "x.part", "consolidated.pth", "other.safetensors"):
        (folder / name).write_text("no")
    write_draft(folder / "dspark")
    return folder


@pytest.fixture(scope="module")
def flash(bf16: Path, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return run(bf16, tmp_path_factory.mktemp("flash") / "ckpt", "m31")


def same(one: Checkpoint, two: Checkpoint) -> None:
    first, second = stored_tensors(one), stored_tensors(two)
    assert list(first) == list(second)
    for name, tensor in first.items():
        assert tensor.dtype == second[name].dtype
        assert torch.equal(tensor.view(-1).view(torch.uint8), second[name].view(-1).view(torch.uint8)), name


@pytest.mark.parametrize("target", ["m31", "m3-mxfp8", "bf16"])
def test_conversion_equals_the_writer(bf16: Path, flash: Checkpoint, tmp_path: Path, target: Any) -> None:
    """Streamed row by row or encoded in one piece: the same bytes."""
    written = flash if target == "m31" else run(bf16, tmp_path / "a", target)
    same(written, write_quantised(tmp_path / "b", bf16_config(vision=True), target))
    assert len(written.files) > 3
    assert json.loads((written.folder / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_small_chunks_change_nothing(bf16: Path, flash: Checkpoint, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("m31.checkpoint.encoding.CHUNK", 300)
    monkeypatch.setattr("m31.checkpoint.conversion._RELEASE_BYTES", 1000)
    same(run(bf16, tmp_path / "x", "m31"), flash)


def test_there_and_back_gives_the_decoded_values_rounded_to_bf16(flash: Checkpoint, tmp_path: Path) -> None:
    back = run(flash.folder, tmp_path / "back", "bf16")
    assert back.config.quantization is None
    for name in back.names:
        decoded, stored = flash.tensor(name).load(), back.tensor(name).load()
        assert torch.equal(stored, decoded.to(stored.dtype)), name
    # And from there to m31 again: a fixed point wherever bf16 held the decoded value.
    again = run(back.folder, tmp_path / "again", "m3-mxfp8")
    for name in again.names:
        tensor = flash.tensor(name)
        if isinstance(tensor, QuantizedTensor) and tensor.format == "mxfp8":
            assert torch.equal(again.tensor(name).load(), tensor.load())


def test_equal_formats_are_copied_and_others_rounded_once(flash: Checkpoint, tmp_path: Path) -> None:
    same(run(flash.folder, tmp_path / "same", "m31"), flash)
    mx = run(flash.folder, tmp_path / "mx", "m3-mxfp8")
    attention = "model.layers.0.self_attn.q_proj.weight"
    assert torch.equal(mx.stored(attention).load().view(torch.uint8), flash.stored(attention).load().view(torch.uint8))
    assert mx.tensor(EXPERT).format == "mxfp8"


def test_modelopt_converts_to_the_official_dialect(tmp_path: Path) -> None:
    source = write_quantised(tmp_path / "s", bf16_config(), "m31")
    other = write_modelopt(tmp_path / "m", bf16_config(), to_modelopt(stored_tensors(source)))
    (other / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "NVFP4", "group_size": 16}}))
    written = run(other, tmp_path / "x", "m31")
    assert written.config.quantization is not None
    assert written.config.quantization.dialect == "official"
    assert not (written.folder / "hf_quant_config.json").exists()
    opened = Checkpoint.open(other)
    for name in written.names:
        assert torch.equal(written.tensor(name).load(), opened.tensor(name).load()), name


def test_what_goes_along(bf16: Path, flash: Checkpoint) -> None:
    names = {path.name for path in flash.folder.iterdir() if path.suffix != ".safetensors"}
    assert names == {
        *("config.json", "model.safetensors.index.json", "tokenizer.json", "dspark"),
        *("chat_template.jinja", "generation_config.json", "merges.txt"),
    }
    for name in ("merges.txt", "dspark/config.json", "dspark/model.safetensors"):
        assert (flash.folder / name).read_bytes() == (bf16 / name).read_bytes()
    assert flash.draft is not None
    assert list(flash.folder.parent.iterdir()) == [flash.folder]


def test_what_stays_behind_is_told(bf16: Path, flash: Checkpoint, tmp_path: Path) -> None:
    told: list[str] = []
    events: list[str] = []
    shutil.copytree(bf16, tmp_path / "s")
    (tmp_path / "s" / "figures").mkdir()
    (tmp_path / "s" / "dspark" / "README.md").write_text("")
    (tmp_path / "s" / "model.bin").unlink()
    run(tmp_path / "s", tmp_path / "x", "bf16", note=told.append, progress=lambda _: events.append(told[-1]))
    assert told == [
        "ignored other.safetensors: the index does not name them",
        "left over from an unfinished download: x.part",
        "not carried over: .hidden, consolidated.pth, figures/, other.safetensors, x.part and 1 more",
    ]
    assert set(events) == {told[-1]}  # all before the first step
    run(flash.folder, tmp_path / "y", "bf16", note=told.append)
    assert len(told) == 3  # nothing to tell about a folder that m31 wrote


def test_the_command_prints_notes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """M3's layers for multi-token prediction are not written: hours of work later is too late to learn that."""
    folder = write_bf16(tmp_path / "s", bf16_config(name="m3")).folder
    (folder / "model.bin").write_text("")
    mtp = {"model.mtp.layers.0.norm.weight": torch.ones(64)}
    tensors = stored_tensors(Checkpoint.open(folder)) | mtp
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    save(folder / "model.safetensors", tensors)
    assert main(["convert", str(folder), str(tmp_path / "x"), "--format", "bf16"]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert lines[:2] == [
        "m31: 1 multi-token-prediction tensors ignored: this version does not draft with them",
        "m31: not carried over: model.bin",
    ]
    assert lines[2].startswith(f"m31: wrote {tmp_path / 'x'}: ")


def test_mtp_counts_do_not_outlive_the_tensors(tmp_path: Path) -> None:
    source = write_bf16(tmp_path / "s", bf16_config(name="m3"))
    assert source.config.text.num_mtp_layers == 1
    assert run(source.folder, tmp_path / "x", "bf16").config.text.num_mtp_layers == 0


def test_float32_sources_and_text_in_transformers_dialect(tmp_path: Path) -> None:
    mapping = bf16_config() | {"torch_dtype": "float32"}
    tensors = random_tensors(parse(mapping, where="c"), seed=1, dtype=torch.float32)
    write(tmp_path / "s", mapping, tensors, max_shard_bytes=10**6, extra_files={})
    written = run(tmp_path / "s", tmp_path / "x", "m31")
    assert written.config.dtype == "bfloat16"
    assert written.stored("model.norm.weight").stored_dtype == "BF16"
    del mapping["torch_dtype"]
    (tmp_path / "s" / "config.json").write_text(json.dumps(mapping))
    assert run(tmp_path / "s", tmp_path / "y", "m31").config.dtype == "bfloat16"


# --- refusals -------------------------------------------------------------------------------------------------------


def test_destinations_that_are_refused(bf16: Path, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("x")
    (tmp_path / "file").write_text("x")
    for goal, text in (
        (tmp_path / "full", "is not empty; choose another folder or delete it first"),
        (tmp_path / "file", "exists and is not a folder"),
        (bf16, "lies inside the source"),
        (bf16 / "below" / "it", "lies inside the source"),
        (tmp_path / "file" / "x", "cannot be written"),
    ):
        with pytest.raises(CheckpointError, match=text):
            run(bf16, goal, "m31")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "full"]
    (tmp_path / "empty").mkdir()
    assert run(bf16, tmp_path / "empty", "bf16").names


def test_a_link_as_the_destination(bf16: Path, tmp_path: Path) -> None:
    """The folder that the link names is filled, the link stays; lock and working folder are beside the real one."""
    (tmp_path / "real" / "empty").mkdir(parents=True)
    (tmp_path / "links").mkdir()
    for name, target in (("link", "empty"), ("dangling", "absent")):
        link = tmp_path / "links" / name
        link.symlink_to(tmp_path / "real" / target)
        assert run(bf16, link, "bf16").names
        assert link.is_symlink()
        assert (tmp_path / "real" / target / "config.json").exists()
    assert sorted(path.name for path in (tmp_path / "real").iterdir()) == ["absent", "empty"]
    assert sorted(path.name for path in (tmp_path / "links").iterdir()) == ["dangling", "link"]
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    with pytest.raises(CheckpointError, match=r"cannot be resolved|exists and is not a folder"):
        run(bf16, loop, "bf16")


def test_folders_that_cannot_be_replaced(bf16: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tail = r"which a finished conversion cannot replace; expected a folder that is absent, or empty .* folder inside it"
    for goal in (Path(), tmp_path):
        with pytest.raises(CheckpointError, match=rf"{tmp_path}: is the current directory, {tail}"):
            run(bf16, goal, "bf16")
    monkeypatch.setattr("os.path.ismount", lambda _: True)
    with pytest.raises(CheckpointError, match=rf"disk: is a mount point, {tail}"):
        run(bf16, tmp_path / "disk", "bf16")
    assert list(tmp_path.iterdir()) == []


def test_arguments_that_are_refused(bf16: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="max_shard_bytes is 0; expected a positive number"):
        run(bf16, tmp_path / "x", "m31", max_shard_bytes=0)
    with pytest.raises(UnsupportedFeature, match="no target format 'gguf'; expected m31 or m3-mxfp8 or bf16"):
        run(bf16, tmp_path / "x", "gguf")


def test_widths_that_blocks_do_not_divide(tmp_path: Path) -> None:
    source = write_bf16(tmp_path / "s", bf16_config() | {"intermediate_size": 24, "shared_intermediate_size": 24})
    with pytest.raises(UnsupportedFeature, match="has 24 inputs, which mxfp8's blocks of 32 do not divide"):
        run(source.folder, tmp_path / "x", "m31")
    assert not (tmp_path / "x").exists()


def test_non_finite_weights_are_refused_by_name(tmp_path: Path) -> None:
    weights = bf16_weights(bf16_config())
    weights[EXPERT].view(-1)[77] = float("nan")
    write(tmp_path / "s", bf16_config(), weights.items(), max_shard_bytes=10**6, extra_files={})
    for target in ("m31", "m3-mxfp8", "bf16"):
        with pytest.raises(NonFiniteWeight, match=rf"'{EXPERT}' holds nan at flat index 77 of shape \[64, 32\]"):
            run(tmp_path / "s", tmp_path / "x", target, max_shard_bytes=10**9)
    assert [path.name for path in tmp_path.iterdir()] == ["s"]


@pytest.mark.parametrize("suffix", ["_scale_inv", ""])
def test_broken_codes_are_not_copied(tmp_path: Path, suffix: str) -> None:
    source = write_quantised(tmp_path / "s", bf16_config(), "m31", shard=10**9)
    name = f"model.layers.0.self_attn.q_proj.weight{suffix}"
    stored = source.stored(name)
    raw = bytearray(stored.path.read_bytes())
    raw[stored.offset + 3] = 255  # NaN of E8M0 and of E4M3
    stored.path.write_bytes(raw)
    for target in ("m31", "bf16"):
        with pytest.raises(NonFiniteWeight, match=rf"'{name}' holds nan at flat index 3|q_proj.weight' holds nan"):
            run(tmp_path / "s", tmp_path / "x", target)


def test_too_little_space(bf16: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("m31.checkpoint.conversion._RESERVE", 2**62)
    with pytest.raises(CheckpointError, match=r"needs 0\.00 GB, and .* GB are free; expected room for the whole"):
        run(bf16, tmp_path / "x", "m31")
    assert list(tmp_path.iterdir()) == []


def test_a_broken_draft_is_not_carried_over(tmp_path: Path) -> None:
    source = write_bf16(tmp_path / "s", bf16_config())
    write_draft(tmp_path / "s" / "dspark", vocab_size=65)
    with pytest.raises(ConfigError, match="made for another model"):
        run(source.folder, tmp_path / "x", "m31")


# --- going on after an interruption ---------------------------------------------------------------------------------


class Stop(Exception):
    """Stands for any interruption."""


def interrupted(source: Path, goal: Path, target: Any, after: int, **options: Any) -> Path:
    """Stop in the shard after `after` finished ones; the work folder."""
    work = goal.parent / f".{goal.name}.m31-convert"

    def progress(_: Step) -> None:
        if len(list(work.glob("*.safetensors"))) >= after:
            raise Stop

    with pytest.raises(Stop):
        run(source, goal, target, progress=progress, **options)
    assert not goal.exists()
    return work


def test_finished_shards_are_reused(bf16: Path, flash: Checkpoint, tmp_path: Path) -> None:
    work = interrupted(bf16, tmp_path / "x", "m31", 3)
    before = {path.name: path.stat().st_mtime_ns for path in work.glob("*.safetensors")}
    assert len(before) == 3
    steps: list[Step] = []
    written = run(bf16, tmp_path / "x", "m31", progress=steps.append)
    after = {path.name: path.stat().st_mtime_ns for path in written.folder.glob("*.safetensors")}
    assert before.items() <= after.items()
    assert steps[-1].finished == steps[-1].total
    assert steps[-1].reused == sum((written.folder / name).stat().st_size for name in before)
    same(written, flash)
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


@pytest.mark.parametrize("damage", ["size", "content", "state", "extra"])
def test_damaged_leftovers_are_written_again(bf16: Path, flash: Checkpoint, tmp_path: Path, damage: str) -> None:
    work = interrupted(bf16, tmp_path / "x", "m31", 2)
    shard = sorted(work.glob("*.safetensors"))[0]
    raw = shard.read_bytes()
    if damage == "size":
        shard.write_bytes(raw[:-1])
    elif damage == "content":
        shard.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    elif damage == "state":
        (work / STATE).unlink()
    else:
        (work / "stray.safetensors").write_bytes(b"stray")
    same(run(bf16, tmp_path / "x", "m31"), flash)
    assert not (tmp_path / "x" / "stray.safetensors").exists()


def test_companions_are_those_of_the_last_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_bf16(tmp_path / "s", bf16_config()).folder
    (source / "merges.txt").write_text("old")
    (source / "vocab.json").write_text("{}")
    write_draft(source / "dspark")

    def stop(*_: object) -> None:
        raise Stop

    with monkeypatch.context() as patch:
        patch.setattr("m31.checkpoint.workfolder.WorkFolder.publish", stop)
        with pytest.raises(Stop):
            run(source, tmp_path / "x", "m31")
    assert (tmp_path / ".x.m31-convert" / "merges.txt").read_text() == "old"
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / ".x.m31-convert").glob("*.safetensors")}
    (source / "merges.txt").write_text("new")
    (source / "vocab.json").unlink()
    shutil.rmtree(source / "dspark")
    write_draft(source / "dspark", seed=6)
    written = run(source, tmp_path / "x", "m31").folder
    assert {path.name: path.stat().st_mtime_ns for path in written.glob("*.safetensors")} == before
    assert (written / "merges.txt").read_text() == "new"
    assert not (written / "vocab.json").exists()
    draft = "dspark/model.safetensors"
    assert (written / draft).read_bytes() == (source / draft).read_bytes()


def test_leftovers_of_another_job_are_neither_used_nor_deleted(bf16: Path, tmp_path: Path) -> None:
    work = interrupted(bf16, tmp_path / "x", "m31", 2)
    kept = sorted(path.name for path in work.iterdir())
    with pytest.raises(CheckpointError, match=OTHER_JOB):
        run(bf16, tmp_path / "x", "bf16")
    (work / STATE).write_text("{")
    with pytest.raises(CheckpointError, match=r"is unusable .*delete that folder, or choose another destination"):
        run(bf16, tmp_path / "x", "m31")
    assert sorted(path.name for path in work.iterdir()) == kept


# --- the bar --------------------------------------------------------------------------------------------------------


def test_bar_tells_part_amount_and_time_left() -> None:
    step = Step(finished=60 * 10**9, reused=20 * 10**9, total=100 * 10**9, what="x")
    assert bar(step, 80.0) == "[" + "=" * 18 + " " * 12 + "]  60%  60.0 of 100.0 GB, 1 min 20 s left"
    assert bar(Step(20, 20, 100, "x"), 3.0).endswith("unknown left")
    assert [duration(s) for s in (0, 59.4, 60, 3599, 3600, 90_000)] == [
        *("0 s", "59 s", "1 min 00 s", "59 min 59 s", "1 h 00 min", "25 h 00 min")
    ]
