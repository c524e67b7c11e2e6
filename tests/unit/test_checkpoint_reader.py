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
from checkpoint_helpers import (
    edit_config,
    merge_into_one,
    read_shard,
    rewrite,
    shards,
    tensors_of,
    tiny_config,
    tiny_folder,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from m31.checkpoint import Checkpoint, expected
from m31.errors import (
    CheckpointError,
    ConfigError,
    DuplicateTensor,
    M31Error,
    MissingTensor,
    TruncatedShard,
    UnexpectedTensor,
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
