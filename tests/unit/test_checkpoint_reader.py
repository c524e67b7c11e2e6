"""Checkpoint.open: everything is checked before any weight is read; each fault has its own message."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_helpers import edit_config, edit_index, read_shard, tensors_of, tiny_config, tiny_folder, write_shard
from hypothesis import given, settings
from hypothesis import strategies as st

from m31 import config
from m31.checkpoint import Checkpoint, check_finite, expected
from m31.errors import (
    CheckpointError,
    ConfigError,
    DuplicateTensor,
    IndexMismatch,
    M31Error,
    MissingTensor,
    NonFiniteWeight,
    NotACheckpoint,
    TruncatedShard,
    UnexpectedTensor,
    UnsupportedFeature,
    WrongDtype,
    WrongShape,
)

INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("template") / "ckpt")


@pytest.fixture
def ckpt(template: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(template, tmp_path / "ckpt"))


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def merge_into_one(folder: Path) -> dict[str, Any]:
    """Rewrite a folder as a single model.safetensors without index; returns its header."""
    header: dict[str, Any] = {}
    data = b""
    for path in shards(folder):
        entries, body = read_shard(path)
        entries.pop("__metadata__", None)
        for name, entry in entries.items():
            header[name] = entry | {"data_offsets": [offset + len(data) for offset in entry["data_offsets"]]}
        data += body
        path.unlink()
    (folder / INDEX).unlink()
    write_shard(folder / "model.safetensors", header, data)
    return header


def rewrite(folder: Path, change: Callable[[dict[str, Any], bytes], bytes]) -> None:
    """Make the folder single-file and let `change` edit header and data."""
    merge_into_one(folder)
    header, data = read_shard(folder / "model.safetensors")
    data = change(header, data)
    write_shard(folder / "model.safetensors", header, data)


def test_open_touches_no_torch(ckpt: Path) -> None:
    code = (
        "import sys; from m31.checkpoint import Checkpoint, inspect; "
        f"c = Checkpoint.open({str(ckpt)!r}); inspect({str(ckpt)!r}); assert len(c.names) > 10; "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)})


def test_open_and_load(ckpt: Path) -> None:
    checkpoint = Checkpoint.open(ckpt)
    assert len(shards(ckpt)) > 2
    assert (checkpoint.dialect, checkpoint.notes) == ("official", ())
    assert checkpoint.names == tuple(expected(checkpoint.config))
    assert checkpoint.total_bytes == sum(4 * t.numel() for t in tensors_of(ckpt).values())
    lazy = checkpoint.tensor("model.layers.2.block_sparse_moe.experts.3.w2.weight")
    assert (lazy.shape, lazy.dtype, lazy.nbytes) == ((32, 24), torch.float32, 32 * 24 * 4)
    assert lazy.path in shards(ckpt)
    assert lazy.load().shape == (32, 24)
    checkpoint.require_plain()


def test_tensor_of_an_unknown_name(ckpt: Path) -> None:
    with pytest.raises(MissingTensor, match=r"has no tensor 'model.norm.weigh'; did you mean 'model.norm.weight'\?"):
        Checkpoint.open(ckpt).tensor("model.norm.weigh")


# --- loading --------------------------------------------------------------------------------------------------------


def test_loading_is_zero_copy_private_and_survives_release(ckpt: Path) -> None:
    before = [path.read_bytes() for path in shards(ckpt)]
    checkpoint = Checkpoint.open(ckpt)
    lazy = checkpoint.tensor("lm_head.weight")
    one, two = lazy.load(), lazy.load()
    assert one.data_ptr() == two.data_ptr()
    one.fill_(7.0)
    assert float(two[0, 0]) == 7.0
    checkpoint.release()
    assert float(one[0, 0]) == 7.0  # the loaded tensor keeps its own map
    assert float(lazy.load()[0, 0]) != 7.0  # a new map shows the file, which the write never reached
    assert [path.read_bytes() for path in shards(ckpt)] == before


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_slices_equal_torch_slices(template: Path, data: st.DataObject) -> None:
    lazy = Checkpoint.open(template).tensor("model.layers.0.mlp.down_proj.weight")
    whole = lazy.load()
    for _ in range(data.draw(st.integers(1, 3))):
        dim = data.draw(st.integers(0, 1))
        start = data.draw(st.integers(0, lazy.shape[dim]))
        stop = data.draw(st.integers(start, lazy.shape[dim]))
        lazy, whole = lazy.slice(dim, start, stop), whole.narrow(dim, start, stop - start)
    assert lazy.shape == tuple(whole.shape)
    assert lazy.nbytes == whole.numel() * 4
    assert torch.equal(lazy.load(), whole)


def test_slice_outside_the_shape(ckpt: Path) -> None:
    lazy = Checkpoint.open(ckpt).tensor("model.norm.weight")
    for dim, start, stop in ((1, 0, 1), (0, 0, 33), (0, 5, 4), (-1, 0, 1)):
        with pytest.raises(CheckpointError, match=rf"no slice {start}:{stop} of dimension {dim} in \[32\]"):
            lazy.slice(dim, start, stop)


def test_misaligned_data_are_copied_and_equal(ckpt: Path) -> None:
    """Other writers do not pad their headers; torch cannot view such data in place."""
    reference = tensors_of(ckpt)
    merge_into_one(ckpt)
    path = ckpt / "model.safetensors"
    header, data = read_shard(path)
    text = json.dumps(header).encode()
    seen = set()
    for pad in range(4):
        raw = text + b" " * pad
        path.write_bytes(len(raw).to_bytes(8, "little") + raw + data)
        checkpoint = Checkpoint.open(ckpt)
        seen.add(checkpoint.tensor("model.norm.weight").offset % 4)
        for name, value in reference.items():
            assert torch.equal(checkpoint.tensor(name).load(), value)
            assert torch.equal(checkpoint.tensor(name).slice(0, 1, 3).load(), value[1:3])
    assert seen == {0, 1, 2, 3}


def test_a_file_that_changes_after_opening(ckpt: Path) -> None:
    checkpoint = Checkpoint.open(ckpt)
    lazy = checkpoint.tensor("lm_head.weight")
    with lazy.path.open("r+b") as handle:
        handle.truncate(100)
    with pytest.raises(TruncatedShard, match=r"had [\d,]+ bytes when it was opened and has 100 now"):
        lazy.load()
    lazy.path.unlink()
    with pytest.raises(CheckpointError, match="cannot be mapped"):
        lazy.load()


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
    (ckpt / "dspark").mkdir()
    (ckpt / "y.incomplete").write_bytes(b"")
    notes = Checkpoint.open(ckpt).notes
    assert notes[0] == "ignored zz-4bit.safetensors: the index does not name them"
    assert notes[1:] == (
        "left over from an unfinished download: y.incomplete",
        "dspark/ holds a draft head, which this version does not load",
    )
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


# --- names, dtypes, shapes ------------------------------------------------------------------------------------------


def drop(name: str) -> Callable[[dict[str, Any], bytes], bytes]:
    """Remove one tensor and its bytes."""

    def change(header: dict[str, Any], data: bytes) -> bytes:
        start, stop = header.pop(name)["data_offsets"]
        for entry in header.values():
            if entry["data_offsets"][0] >= stop:
                entry["data_offsets"] = [offset - (stop - start) for offset in entry["data_offsets"]]
        return data[:start] + data[stop:]

    return change


def test_missing_tensors_are_listed_and_counted(ckpt: Path) -> None:
    rewrite(ckpt, drop("model.norm.weight"))
    with pytest.raises(MissingTensor, match=r"1 of \d+ tensors are missing: model.norm.weight") as caught:
        Checkpoint.open(ckpt)
    assert "every tensor of MiniMaxM3SparseForCausalLM" in str(caught.value)


def test_long_lists_are_cut(ckpt: Path) -> None:
    edit_config(ckpt, num_local_experts=6)
    with pytest.raises(MissingTensor, match=r"6 of \d+ tensors are missing: .*experts.4.w1.weight, .* and 1 more"):
        Checkpoint.open(ckpt)


def rename_to(old: str, new: str) -> Callable[[dict[str, Any], bytes], bytes]:
    def change(header: dict[str, Any], data: bytes) -> bytes:
        header[new] = header.pop(old)
        return data

    return change


def test_unexpected_tensor_names_the_nearest(ckpt: Path) -> None:
    rewrite(
        ckpt, rename_to("model.layers.1.self_attn.index_q_proj.weight", "model.layers.1.self_attn.index_q_projj.weight")
    )
    with pytest.raises(UnexpectedTensor) as caught:
        Checkpoint.open(ckpt)
    assert (
        "'model.layers.1.self_attn.index_q_projj.weight' (nearest: 'model.layers.1.self_attn.index_q_proj.weight'); "
        "1 expected ones are missing: model.layers.1.self_attn.index_q_proj.weight"
    ) in str(caught.value)


def test_extra_layers_are_unexpected(ckpt: Path) -> None:
    attention = tiny_config(vision=False)["sparse_attention_config"]
    lists = {"sparse_attention_freq": [0, 1], "sparse_disable_index_value": [0, 1]}
    edit_config(ckpt, num_hidden_layers=2, moe_layer_freq=[0, 0], sparse_attention_config=attention | lists)
    with pytest.raises(UnexpectedTensor, match=r"\d\d tensors do not belong to this architecture: 'model.layers.2"):
        Checkpoint.open(ckpt)


@pytest.mark.parametrize(
    "extra", ["model.mtp.layers.0.enorm.weight", "language_model.model.mtp.layers.0.eh_proj.weight"]
)
def test_mtp_and_rotary_tables_are_ignored_with_a_note(ckpt: Path, extra: str) -> None:
    """M3 ships multi-token-prediction layers; transformers ignores them as well (MODEL.md §2.6)."""

    def add(header: dict[str, Any], data: bytes) -> bytes:
        for name in (extra, "model.layers.0.self_attn.rotary_emb.inv_freq"):
            header[name] = {"dtype": "F16", "shape": [2], "data_offsets": [len(data), len(data) + 4]}
            data += bytes(4)
        return data

    names = Checkpoint.open(ckpt).names
    rewrite(ckpt, add)
    checkpoint = Checkpoint.open(ckpt)
    assert checkpoint.names == names
    assert checkpoint.notes == (
        "1 multi-token-prediction tensors ignored: this version does not draft with them",
        "1 stored rotary tables ignored: m31 computes its own",
    )


def test_text_only_architecture_over_a_multimodal_folder(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path / "vl", mapping=tiny_config())
    text = {name: value for name, value in tensors_of(folder).items() if name.startswith(("model.", "lm_head."))}
    edit_config(folder, architectures=["MiniMaxM3SparseForCausalLM"])
    checkpoint = Checkpoint.open(folder)
    assert set(checkpoint.names) == set(text)
    assert checkpoint.notes == ("27 vision tensors ignored: the architecture is text-only",)


def test_vision_tensors_must_be_there_when_the_config_has_vision(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path / "vl", mapping=tiny_config())
    rewrite(folder, drop("patch_merge_mlp.linear_2.bias"))
    with pytest.raises(MissingTensor, match=r"patch_merge_mlp.linear_2.bias"):
        Checkpoint.open(folder)


@pytest.mark.parametrize("prefix", ["language_model.", ""])
def test_text_names_with_and_without_prefix(ckpt: Path, prefix: str) -> None:
    reference = tensors_of(ckpt)

    def add_prefix(header: dict[str, Any], data: bytes) -> bytes:
        for name in [name for name in header if name != "__metadata__"]:
            header[prefix + name] = header.pop(name)
        return data

    rewrite(ckpt, add_prefix)
    assert Checkpoint.open(ckpt).dialect == "official"
    loaded = tensors_of(ckpt)
    assert list(loaded) == list(reference)
    assert all(torch.equal(loaded[name], reference[name]) for name in reference)


def test_one_logical_tensor_under_two_names(ckpt: Path) -> None:
    def add(header: dict[str, Any], data: bytes) -> bytes:
        header["language_model.model.norm.weight"] = {
            "dtype": "F32",
            "shape": [32],
            "data_offsets": [len(data), len(data) + 128],
        }
        return data + bytes(128)

    rewrite(ckpt, add)
    with pytest.raises(
        DuplicateTensor, match=r"'model.norm.weight' as 'model.norm.weight' and 'language_model.model.norm"
    ):
        Checkpoint.open(ckpt)


def redtype(name: str, dtype: str, shape: list[int]) -> Callable[[dict[str, Any], bytes], bytes]:
    def change(header: dict[str, Any], data: bytes) -> bytes:
        header[name] |= {"dtype": dtype, "shape": shape}
        return data

    return change


def test_wrong_shape(ckpt: Path) -> None:
    rewrite(ckpt, redtype("model.layers.0.mlp.up_proj.weight", "F32", [32, 48]))
    with pytest.raises(WrongShape, match=r"'model.layers.0.mlp.up_proj.weight' is \[32, 48\], expected \[48, 32\]"):
        Checkpoint.open(ckpt)


@pytest.mark.parametrize(
    ("dtype", "shape", "fragment"),
    [
        ("F16", [64], "is F16 (allowed: F32, BF16)"),
        ("F64", [16], "is F64"),
        ("U8", [128], "is U8"),
    ],
)
def test_wrong_dtype(ckpt: Path, dtype: str, shape: list[int], fragment: str) -> None:
    rewrite(ckpt, redtype("model.norm.weight", dtype, shape))
    with pytest.raises(WrongDtype) as caught:
        Checkpoint.open(ckpt)
    assert f"'model.norm.weight' {fragment}" in str(caught.value)
    assert ("F16 overflows above 65,504" in str(caught.value)) == (dtype == "F16")


def test_bad_config_is_reported_before_any_header(ckpt: Path) -> None:
    edit_config(ckpt, rope_tetha=1)
    shards(ckpt)[0].write_bytes(b"")
    with pytest.raises(ConfigError, match=r"unknown key 'rope_tetha'.*did you mean 'rope_theta'\?"):
        Checkpoint.open(ckpt)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_damage_to_the_index_is_an_m31_error_or_harmless(
    template: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = Path(shutil.copytree(template, tmp_path_factory.mktemp("fuzz") / "ckpt"))
    raw = bytearray((folder / INDEX).read_bytes())
    position = data.draw(st.integers(0, len(raw) - 1))
    raw[position : position + data.draw(st.integers(0, 4))] = data.draw(st.binary(max_size=4))
    (folder / INDEX).write_bytes(raw)
    try:
        checkpoint = Checkpoint.open(folder)
    except M31Error as error:
        message = str(error)
    else:
        message = str(checkpoint.folder)
    assert str(folder) in message


# --- quantised folders ----------------------------------------------------------------------------------------------


QUANTIZED = {
    "quant_method": "mxfp8",
    "weight_block_size": [1, 32],
    "activation_scheme": "dynamic",
    "moe_quant_algo": "NVFP4",
    "moe_quant_format": "nvfp4-pack-quantized",
    "group_size": 16,
    "ignored_layers": ["model.layers.0.self_attn.v_proj"],
}


def quantized_folder(folder: Path, **changes: tuple[str, list[int]] | None) -> Path:
    """A quantised tiny folder of zero bytes; `changes` replaces or drops (None) single declarations by name."""
    mapping = tiny_config(vision=False, torch_dtype="bfloat16", intermediate_size=32) | {
        "quantization_config": QUANTIZED
    }
    entries: dict[str, tuple[str, list[int]] | None] = {
        name: (decl.dtypes[0], list(decl.shape))
        for name, decl in expected(config.parse(mapping, where="config.json")).items()
    }
    entries.update(changes)
    widths = {"U8": 1, "F8_E4M3": 1, "F32": 4, "BF16": 2}
    header: dict[str, Any] = {}
    position = 0
    for name, entry in entries.items():
        if entry is None:
            continue
        size = widths[entry[0]]
        for extent in entry[1]:
            size *= extent
        header[name] = {"dtype": entry[0], "shape": entry[1], "data_offsets": [position, position + size]}
        position += size
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(mapping))
    write_shard(folder / "model.safetensors", header, bytes(position))
    return folder


def test_quantised_folder_opens_for_inspection_only(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(quantized_folder(tmp_path / "q"))
    assert checkpoint.tensor("model.layers.0.self_attn.q_proj.weight").stored_dtype == "F8_E4M3"
    with pytest.raises(UnsupportedFeature) as caught:
        checkpoint.require_plain()
    assert "holds mxfp8 linears and nvfp4 experts" in str(caught.value)
    assert "this version of m31 loads unquantised checkpoints only" in str(caught.value)


def test_stored_dtype_decides_whether_index_and_ignored_modules_are_quantised(tmp_path: Path) -> None:
    """MODEL.md §3.7: decide per tensor by the presence of weight_scale_inv."""
    changes: dict[str, Any] = {}
    for module, shape in (("index_q_proj", [32, 32]), ("index_k_proj", [16, 32])):
        changes[f"model.layers.1.self_attn.{module}.weight"] = ("BF16", shape)
        changes[f"model.layers.1.self_attn.{module}.weight_scale_inv"] = None
    changes["model.layers.0.self_attn.v_proj.weight"] = ("BF16", [32, 32])
    changes["model.layers.0.self_attn.v_proj.weight_scale_inv"] = None
    checkpoint = Checkpoint.open(quantized_folder(tmp_path / "q", **changes))
    assert checkpoint.notes == ("3 linear layers are stored unquantised",)
    assert checkpoint.declared["model.layers.1.self_attn.index_q_proj.weight"].storage == "plain"


def test_other_linears_may_not_be_unquantised(tmp_path: Path) -> None:
    changes: dict[str, Any] = {
        "model.layers.1.self_attn.q_proj.weight": ("BF16", [64, 32]),
        "model.layers.1.self_attn.q_proj.weight_scale_inv": None,
    }
    with pytest.raises(MissingTensor, match=r"model.layers.1.self_attn.q_proj.weight_scale_inv"):
        Checkpoint.open(quantized_folder(tmp_path / "q", **changes))


def test_global_scales_may_be_scalars(tmp_path: Path) -> None:
    """MODEL.md §10.7: both [1] and a scalar occur."""
    name = "model.layers.2.block_sparse_moe.experts.0.w1.weight_global_scale"
    checkpoint = Checkpoint.open(quantized_folder(tmp_path / "q", **{name: ("F32", [])}))
    assert checkpoint.tensor(name).load().shape == ()


# --- non-finite weights ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_non_finite_weight_is_named_with_its_index(ckpt: Path, value: float) -> None:
    check_finite(Checkpoint.open(ckpt))
    name, flat = "model.layers.1.mlp.up_proj.weight", 1234

    def poison(header: dict[str, Any], data: bytes) -> bytes:
        start = header[name]["data_offsets"][0] + 4 * flat
        return data[:start] + torch.tensor([value, value]).numpy().tobytes() + data[start + 8 :]

    rewrite(ckpt, poison)
    with pytest.raises(NonFiniteWeight) as caught:
        check_finite(Checkpoint.open(ckpt))
    assert f"'{name}' holds {value} at flat index {flat} of shape [48, 32]" in str(caught.value)


def test_non_finite_scan_crosses_chunks(ckpt: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("m31.checkpoint.scan._CHUNK", 7)
    test_non_finite_weight_is_named_with_its_index(ckpt, float("nan"))


def test_quantised_scales_can_be_non_finite(tmp_path: Path) -> None:
    folder = quantized_folder(tmp_path / "q")
    check_finite(Checkpoint.open(folder))
    for name, code in (
        ("model.layers.0.self_attn.q_proj.weight_scale_inv", 255),  # E8M0 NaN
        ("model.layers.0.self_attn.q_proj.weight", 0x7F),  # E4M3 NaN
    ):
        path = folder / "model.safetensors"
        original = path.read_bytes()
        header, data = read_shard(path)
        at = header[name]["data_offsets"][0] + 5
        write_shard(path, header, data[:at] + bytes([code]) + data[at + 1 :])
        with pytest.raises(NonFiniteWeight, match=rf"'{name}' holds nan at flat index 5"):
            check_finite(Checkpoint.open(folder))
        path.write_bytes(original)
