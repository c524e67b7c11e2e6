"""Folders, shards and indices: absent, half downloaded, lying (BUG-100, BUG-101, BUG-103, BUG-104)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from checkpoint_helpers import (
    edit_index,
    merge_into_one,
    read_shard,
    shards,
    tensors_of,
    tiny_folder,
    write_shard,
)

from m31.checkpoint import Checkpoint
from m31.errors import (
    DuplicateTensor,
    IndexMismatch,
    NotACheckpoint,
    TruncatedShard,
)

INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("template") / "ckpt")


@pytest.fixture
def ckpt(template: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(template, tmp_path / "ckpt"))


# --- folders and indices --------------------------------------------------------------------------------------------


def test_not_a_checkpoint(tmp_path: Path, ckpt: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    other = tmp_path / "other"
    other.mkdir()
    (other / "readme.txt").write_text("hello")
    partial = tmp_path / "partial"
    partial.mkdir()
    (partial / "abc.incomplete").write_bytes(b"")
    for path, fragment in (
        (tmp_path / "absent", "does not exist; m31 does not download"),
        (ckpt / "config.json", "is a file; expected a checkpoint folder; pass the folder around it"),
        (empty, "is an empty folder"),
        (other, "has no config.json; expected a checkpoint folder; it holds readme.txt"),
        (partial, "an unfinished download is there (abc.incomplete): finish it"),
        (Path("nul\0byte"), "nul"),
    ):
        with pytest.raises(NotACheckpoint) as caught:
            Checkpoint.open(path)
        assert fragment in str(caught.value)


def test_folder_without_weights(ckpt: Path) -> None:
    (ckpt / INDEX).unlink()
    with pytest.raises(NotACheckpoint, match=r"has neither .* nor model.safetensors, only model-00001-of"):
        Checkpoint.open(ckpt)
    for path in shards(ckpt):
        path.unlink()
    with pytest.raises(NotACheckpoint, match=r"has no weights; expected model.safetensors, or"):
        Checkpoint.open(ckpt)
    (ckpt / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(NotACheckpoint, match=r"has no weights, only pytorch_model.bin; .*convert it to safetensors"):
        Checkpoint.open(ckpt)


def test_single_file_without_index(ckpt: Path) -> None:
    reference = tensors_of(ckpt)
    merge_into_one(ckpt)
    loaded = tensors_of(ckpt)
    assert loaded.keys() == reference.keys()
    assert all(torch.equal(loaded[name], reference[name]) for name in reference)


def test_missing_shard_is_named(ckpt: Path) -> None:
    """BUG-100: an interrupted download must not start with uninitialised weights."""
    lost = shards(ckpt)[1]
    lost.unlink()
    (ckpt / "x.incomplete").write_bytes(b"")
    with pytest.raises(IndexMismatch) as caught:
        Checkpoint.open(ckpt)
    assert f"shards that are absent: {lost.name}; unfinished downloads: x.incomplete" in str(caught.value)


def test_truncated_shard_is_named(ckpt: Path) -> None:
    """BUG-101."""
    short = shards(ckpt)[1]
    with short.open("r+b") as handle:
        handle.truncate(short.stat().st_size - 1)
    with pytest.raises(TruncatedShard, match=short.name):
        Checkpoint.open(ckpt)


def test_stray_shard_is_ignored_with_a_note(ckpt: Path) -> None:
    """BUG-103: the index decides, not a glob."""
    reference = tensors_of(ckpt)
    shutil.copy(shards(ckpt)[0], ckpt / "zz-4bit.safetensors")
    (ckpt / "y.incomplete").write_bytes(b"")
    notes = Checkpoint.open(ckpt).notes
    assert notes[0] == "ignored zz-4bit.safetensors: the index does not name them"
    assert notes[1:] == ("left over from an unfinished download: y.incomplete",)
    assert all(torch.equal(value, reference[name]) for name, value in tensors_of(ckpt).items())


def test_unusual_shard_names_load(ckpt: Path) -> None:
    """BUG-104: whatever the index names is a shard."""
    reference = tensors_of(ckpt)
    index = json.loads((ckpt / INDEX).read_text())
    (ckpt / "deep").mkdir()
    for number, path in enumerate(shards(ckpt)):
        new = "deep/weights of layer ä.bin" if number == 0 else f"w_{number}"
        for name, shard in index["weight_map"].items():
            if shard == path.name:
                index["weight_map"][name] = new
        path.rename(ckpt / new)
    (ckpt / INDEX).write_text(json.dumps(index))
    assert all(torch.equal(value, reference[name]) for name, value in tensors_of(ckpt).items())


def test_shards_may_be_symbolic_links(ckpt: Path, tmp_path: Path) -> None:
    """Hub caches link every file to a blob outside the folder."""
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    for path in [*shards(ckpt), ckpt / "config.json", ckpt / INDEX]:
        path.rename(blobs / path.name)
        path.symlink_to(blobs / path.name)
    assert len(tensors_of(ckpt)) > 10


@pytest.mark.parametrize("name", ["/etc/passwd", "../x.safetensors", "a/../../x", "..", "", ".", "a\\b", "c:x", "a\0b"])
def test_shard_names_that_leave_the_folder(ckpt: Path, name: str) -> None:
    edit_index(ckpt, **{"lm_head.weight": name})
    with pytest.raises(IndexMismatch, match=r"names the shard .*; expected a file inside the folder"):
        Checkpoint.open(ckpt)


@pytest.mark.parametrize(
    ("content", "fragment"),
    [
        ("{", "is not valid JSON"),
        ("[]", "holds a list at the top"),
        ("{}", "has no weight_map"),
        ('{"weight_map": {}}', "has no weight_map"),
        ('{"weight_map": []}', "has no weight_map"),
        ('{"weight_map": {"a": 1}}', "weight_map holds something else than file names"),
        ('{"weight_map": {"a": "x", "a": "y"}}', "duplicate key 'a'"),
        ('{"weight_map": {"a": "nowhere"}}', "names 1 of 1 shards that are absent: nowhere"),
    ],
)
def test_malformed_index(ckpt: Path, content: str, fragment: str) -> None:
    (ckpt / INDEX).write_text(content)
    with pytest.raises(IndexMismatch) as caught:
        Checkpoint.open(ckpt)
    assert fragment in str(caught.value)


def test_index_that_lies(ckpt: Path) -> None:
    original = (ckpt / INDEX).read_text()
    where = json.loads(original)["weight_map"]["lm_head.weight"]
    other = next(path.name for path in shards(ckpt) if path.name != where)
    edit_index(ckpt, **{"lm_head.weight": other})
    with pytest.raises(IndexMismatch, match=rf"wrong shard: 'lm_head.weight' in {other}, but it is in {where}"):
        Checkpoint.open(ckpt)
    (ckpt / INDEX).write_text(original)
    edit_index(ckpt, **{"lm_head.weight": None})
    with pytest.raises(IndexMismatch, match=r"omits 1 tensors that its shards hold: lm_head.weight"):
        Checkpoint.open(ckpt)
    (ckpt / INDEX).write_text(original)
    edit_index(ckpt, **{"ghost.weight": where})
    with pytest.raises(
        IndexMismatch, match=rf"no shard holds: ghost.weight; expected 'ghost.weight' should be in {where}"
    ):
        Checkpoint.open(ckpt)


def test_wrong_total_size_is_a_note(ckpt: Path) -> None:
    index = json.loads((ckpt / INDEX).read_text())
    index["metadata"]["total_size"] = 5
    (ckpt / INDEX).write_text(json.dumps(index))
    assert "the index gives total_size 5, the shards hold" in Checkpoint.open(ckpt).notes[0]


def test_same_tensor_in_two_shards(ckpt: Path) -> None:
    first, second = shards(ckpt)[:2]
    header, data = read_shard(first)
    extra, body = read_shard(second)
    name = next(name for name in header if name != "__metadata__")
    start, stop = header[name]["data_offsets"]
    extra[name] = header[name] | {"data_offsets": [len(body), len(body) + stop - start]}
    write_shard(second, extra, body + data[start:stop])
    with pytest.raises(DuplicateTensor, match=rf"1 tensors are also in {first.name}: {name}"):
        Checkpoint.open(ckpt)
