"""The inventory reproduces every number of MODEL.md §3.3, §3.7 and §4 to the digit."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from m31 import config
from m31.checkpoint import counts, expected, kv_bytes_per_token


def model(name: str = "m3.1-flash", **text: Any) -> config.Model:
    mapping = copy.deepcopy(config.published(name))  # type: ignore[arg-type]
    mapping["text_config"].update(text)
    return config.parse(mapping, where="config.json")


def test_flash_totals() -> None:
    count = counts(model())
    assert count.logical == 427_051_937_408
    assert count.tensors == 89_632
    assert count.stored_bytes == 250_100_400_640  # 250.100 GB
    assert count.hub_elements == 220_490_854_016  # 220.49 B
    assert count.active == 23_470_276_608  # 23.47 B
    assert count.active_with_head == 23_470_276_608 + 1_229_193_216  # +1.23 B


def test_flash_rows() -> None:
    groups = counts(model()).groups
    logical = {name: row.logical for name, row in groups.items()}
    assert logical == {
        "routed_experts": 413_122_166_784,
        "attention": 60 * 106_954_752,
        "index": 60 * 3_932_160,
        "dense_mlp": 679_477_248,
        "shared_experts": 3_227_516_928,
        "embeddings": 2_458_386_432,
        "router": 44_833_920,
        "norms": 774_144,
        "vision": 631_185_920,
        "projector": 234_381_312,
    }
    assert logical["attention"] + logical["index"] == 6_653_214_720
    assert logical["vision"] + logical["projector"] == 865_567_232
    mxfp8 = ("attention", "index", "dense_mlp", "shared_experts")
    assert sum(logical[name] for name in mxfp8) == 10_560_208_896
    stored = {name: row.stored_bytes for name, row in groups.items()}
    assert sum(stored[name] for name in mxfp8) == 10_560_208_896 * 33 // 32
    # 4.5 bits a weight, and two F32 scales for each of 57 * 128 * 3 matrices
    assert stored["routed_experts"] == 413_122_166_784 * 9 // 16 + 57 * 128 * 3 * 8
    in_gb = {
        "routed_experts": 232.381,
        "embeddings": 4.917,
        "router": 0.179,
    }
    for name, value in in_gb.items():
        assert round(stored[name] / 1e9, 3) == value  # type: ignore[index]
    assert round((stored["vision"] + stored["projector"]) / 1e9, 3) == 1.731
    assert round(sum(stored[name] for name in mxfp8) / 1e9, 3) == 10.890


def test_flash_tensor_numbers() -> None:
    groups = counts(model()).groups
    assert groups["routed_experts"].tensors == 87_552
    assert groups["vision"].tensors == 515
    assert groups["projector"].tensors == 8
    text = sum(row.tensors for name, row in groups.items() if name not in ("routed_experts", "vision", "projector"))
    assert text == 1_557


def test_m3_totals() -> None:
    count = counts(model("m3"))
    assert count.logical == 427_040_140_160  # 427.04 B: no index branch on layers 0 to 2
    assert 427_051_937_408 - count.logical == 3 * (3_932_160 + 2 * 128)


def test_m3_mxfp8_size_is_within_the_published_range() -> None:
    mapping = config.published("m3")
    mapping["quantization_config"] = {
        "quant_method": "mxfp8",
        "weight_block_size": [1, 32],
        "activation_scheme": "dynamic",
    }
    count = counts(config.parse(mapping, where="config.json"))
    assert 443.65e9 <= count.stored_bytes <= 443.96e9
    assert counts(model("m3")).logical == count.logical


@pytest.mark.parametrize(
    ("name", "decl"),
    [
        ("model.embed_tokens.weight", ((200064, 6144), "BF16")),
        ("lm_head.weight", ((200064, 6144), "BF16")),
        ("model.norm.weight", ((6144,), "BF16")),
        ("model.layers.59.self_attn.q_proj.weight", ((8192, 6144), "F8_E4M3")),
        ("model.layers.0.self_attn.k_proj.weight_scale_inv", ((512, 192), "U8")),
        ("model.layers.0.self_attn.o_proj.weight", ((6144, 8192), "F8_E4M3")),
        ("model.layers.0.self_attn.o_proj.weight_scale_inv", ((6144, 256), "U8")),
        ("model.layers.0.self_attn.index_q_proj.weight", ((512, 6144), "F8_E4M3")),
        ("model.layers.0.self_attn.index_k_proj.weight", ((128, 6144), "F8_E4M3")),
        ("model.layers.0.self_attn.index_k_norm.weight", ((128,), "BF16")),
        ("model.layers.2.mlp.down_proj.weight", ((6144, 12288), "F8_E4M3")),
        ("model.layers.3.block_sparse_moe.gate.weight", ((128, 6144), "F32")),
        ("model.layers.3.block_sparse_moe.e_score_correction_bias", ((128,), "F32")),
        ("model.layers.3.block_sparse_moe.shared_experts.up_proj.weight", ((3072, 6144), "F8_E4M3")),
        ("model.layers.3.block_sparse_moe.experts.0.w1.weight_packed", ((3072, 3072), "U8")),
        ("model.layers.3.block_sparse_moe.experts.127.w2.weight_packed", ((6144, 1536), "U8")),
        ("model.layers.59.block_sparse_moe.experts.5.w3.weight_scale", ((3072, 384), "F8_E4M3")),
        ("model.layers.59.block_sparse_moe.experts.5.w2.weight_scale", ((6144, 192), "F8_E4M3")),
        ("model.layers.59.block_sparse_moe.experts.5.w2.input_global_scale", ((1,), "F32")),
        ("vision_tower.vision_model.embeddings.patch_embedding.weight", ((1280, 3, 2, 14, 14), "BF16")),
        ("vision_tower.vision_model.encoder.layers.31.mlp.fc2.weight", ((1280, 5120), "BF16")),
        ("multi_modal_projector.linear_1.weight", ((6144, 1280), "BF16")),
        ("patch_merge_mlp.linear_1.weight", ((6144, 24576), "BF16")),
    ],
)
def test_names_shapes_and_dtypes(name: str, decl: tuple[tuple[int, ...], str]) -> None:
    found = expected(model())[name]
    assert (found.shape, found.dtypes[0]) == decl


def test_layer_lists_decide_what_exists() -> None:
    names = expected(model("m3"))
    assert "model.layers.2.self_attn.index_q_proj.weight" not in names
    assert "model.layers.3.self_attn.index_q_proj.weight" in names
    assert "model.layers.2.mlp.up_proj.weight" in names
    assert "model.layers.3.mlp.up_proj.weight" not in names
    assert not [name for name in names if "scale" in name or "packed" in name or "mtp" in name]
    assert names["model.layers.3.block_sparse_moe.experts.0.w1.weight"].dtypes == ("BF16", "F32")


def test_kv_table() -> None:
    rows = {
        (row.main_format, row.index_format): (row.main, row.index, row.total) for row in kv_bytes_per_token(model())
    }
    assert rows == {
        ("nvfp4", "nvfp4"): (34_560, 4_320, 38_880),
        ("nvfp4", "int8"): (34_560, 7_920, 42_480),
        ("nvfp4", "bf16"): (34_560, 15_360, 49_920),
        ("nvfp4", "fp8"): (34_560, 7_680, 42_240),
        ("fp8", "fp8"): (61_440, 7_680, 69_120),
        ("fp8", "bf16"): (61_440, 15_360, 76_800),
        ("bf16", "bf16"): (122_880, 15_360, 138_240),
        ("fp32", "fp32"): (245_760, 30_720, 276_480),
    }


def test_kv_table_counts_index_keys_on_sparse_layers_only() -> None:
    rows = {row.index_format: row.index for row in kv_bytes_per_token(model("m3")) if row.main_format == "bf16"}
    assert rows["bf16"] == 57 * 256


def test_nvfp4_rows_need_whole_groups() -> None:
    narrow = kv_bytes_per_token(model(head_dim=120, rotary_dim=60))
    assert {row.main_format for row in narrow} == {"fp8", "bf16", "fp32"}
