"""Quantised folders open for inspection; non-finite weights are found and named."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_helpers import (
    edit_config,
    read_shard,
    rewrite,
    tiny_config,
    tiny_folder,
    write_shard,
)

from m31 import config
from m31.checkpoint import Checkpoint, QuantizedTensor, check_finite, expected
from m31.errors import (
    MissingTensor,
    NonFiniteWeight,
    UnsupportedFeature,
)

INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("template") / "ckpt")


@pytest.fixture
def ckpt(template: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(template, tmp_path / "ckpt"))


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


QUANTIZED_WIDTHS: dict[str, Any] = {
    "torch_dtype": "bfloat16",
    "intermediate_size": 32,
    "shared_intermediate_size": 32,
    "dense_intermediate_size": 64,
}


def quantized_folder(folder: Path, **changes: tuple[str, list[int]] | None) -> Path:
    """A quantised tiny folder of zero bytes; `changes` replaces or drops (None) single declarations by name."""
    mapping = tiny_config(vision=False, **QUANTIZED_WIDTHS) | {"quantization_config": QUANTIZED}
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


def test_quantised_folder_opens(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(quantized_folder(tmp_path / "q"))
    name = "model.layers.0.self_attn.q_proj.weight"
    assert checkpoint.tensor(name).format == "mxfp8"
    assert checkpoint.stored(name).stored_dtype == "F8_E4M3"
    assert name in checkpoint.names
    assert f"{name}_scale_inv" not in checkpoint.names


def test_a_width_that_blocks_do_not_divide_is_refused(tmp_path: Path) -> None:
    """BUG-46, BUG-58: readers disagree on the last, partial block."""
    folder = quantized_folder(tmp_path / "q")
    edit_config(folder, dense_intermediate_size=48)
    with pytest.raises(UnsupportedFeature, match="layer of dense_mlp has 48 inputs, which mxfp8's blocks of 32 do not"):
        Checkpoint.open(folder)


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
    assert checkpoint.stored(name).load().shape == ()
    logical = checkpoint.tensor(name.removesuffix("_global_scale"))
    assert isinstance(logical, QuantizedTensor)
    assert logical.parts()["global_scale"].shape == (1,)


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
