"""Sections of a vision-language config and `quantization_config`, MODEL.md §1.1 and §1.4."""

from __future__ import annotations

from typing import Any

import pytest
from config_helpers import WHERE

from m31 import config
from m31.errors import ConfigError


def parse(mapping: dict[str, Any]) -> config.Model:
    return config.parse(mapping, where=WHERE)


def flash() -> dict[str, Any]:
    return config.published("m3.1-flash")


def test_vision_language_needs_its_sections() -> None:
    mapping = flash()
    del mapping["text_config"]
    with pytest.raises(ConfigError, match="missing key 'text_config'"):
        parse(mapping)
    mapping = flash()
    for place in (mapping, mapping["vision_config"]):
        del place["img_token_compression_config"]
    with pytest.raises(ConfigError, match="missing key 'spatial_merge_size'"):
        parse(mapping)
    mapping["vision_config"] |= {"spatial_merge_size": 2, "temporal_patch_size": 2}
    assert parse(mapping) == parse(flash())


@pytest.mark.parametrize(
    ("changes", "fragment"),
    [
        ({"moe_quant_algo": None}, "has only one of moe_quant_algo (None) and moe_quant_format"),
        ({"moe_quant_format": None}, "has only one of"),
        ({"moe_quant_algo": "MXFP4"}, "'moe_quant_algo' is 'MXFP4'; expected 'NVFP4'"),
        ({"moe_quant_format": "pack-quantized"}, "expected 'nvfp4-pack-quantized'"),
        ({"group_size": 32}, "'group_size' is 32; expected 16"),
        ({"group_size": None}, "missing key 'group_size'"),
        ({"moe_quant_algo": None, "moe_quant_format": None}, "'group_size' is 16, but no NVFP4 experts are declared"),
        ({"weight_block_size": [128, 128]}, "'weight_block_size' is [128, 128]; expected [1, 32]"),
        ({"activation_scheme": "static"}, "'activation_scheme' is 'static'; expected 'dynamic'"),
        ({"attention_quant_algo": "NVFP4"}, "'attention_quant_algo' is 'NVFP4'; expected 'FP8'"),
        ({"kv_cache_quant_algo": "INT8"}, "'kv_cache_quant_algo' is 'INT8'"),
        ({"index_k_quant_type": "fp8"}, "'index_k_quant_type' is 'fp8'; expected 'nvfp4'"),
        ({"quant_method": "gptq"}, "'quant_method' is 'gptq'; expected 'mxfp8' or 'modelopt'"),
        ({"quant_method": "modelopt"}, "unknown key 'weight_block_size'"),
        ({"quant_algo": "MIXED_PRECISION"}, "unknown key 'weight_block_size'"),
        ({"quant_method": None}, "'quant_method' is None"),
    ],
)
def test_quantization_rules(changes: dict[str, Any], fragment: str) -> None:
    mapping = flash()
    mapping["quantization_config"] |= changes
    with pytest.raises(ConfigError) as caught:
        parse(mapping)
    assert fragment in str(caught.value)
    assert "quantization_config" in str(caught.value)


def test_the_pair_tells_nvfp4_from_mxfp8_and_ignored_names_are_normalised() -> None:
    mapping = flash()
    section = mapping["quantization_config"]
    for key in ("moe_quant_algo", "moe_quant_format", "group_size"):
        del section[key]
    section["modules_to_not_convert"] = ["model.lm_head", "lm_head", "model.layers.3.self_attn.index_q_proj"]
    quantization = parse(mapping).quantization
    assert quantization is not None
    assert quantization.experts == "mxfp8"
    assert quantization.ignored.count("lm_head") == 1
    assert "layers.3.self_attn.index_q_proj" in quantization.ignored
