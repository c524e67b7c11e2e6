"""m31.config: both dialects parsed strictly, MODEL.md chapter 1."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from config_helpers import WHERE, saved_text

from m31 import config
from m31.config import saved
from m31.errors import ConfigError, UnknownKey, UnsupportedFeature


def parse(mapping: dict[str, Any]) -> config.Model:
    return config.parse(mapping, where=WHERE)


def flash() -> dict[str, Any]:
    return config.published("m3.1-flash")


def sparse_section(mapping: dict[str, Any]) -> dict[str, Any]:
    section: dict[str, Any] = mapping["text_config"]["sparse_attention_config"]
    return section


def test_published_flash_fields() -> None:
    model = parse(flash())
    text = model.text
    assert (model.architecture, model.dialect) == ("MiniMaxM3SparseForConditionalGeneration", "official")
    assert (text.num_layers, text.hidden_size, text.num_heads, text.num_kv_heads, text.head_dim) == (
        60,
        6144,
        64,
        4,
        128,
    )
    assert (text.vocab_size, text.max_position, text.rope_theta, text.rotary_dim) == (200064, 1048576, 1e7, 64)
    assert text.attention == ("sparse",) * 60
    assert text.mlp == ("dense",) * 3 + ("moe",) * 57
    assert text.activation == config.SwigluOai(alpha=1.702, beta=1.0, limit=7.0)
    assert text.sparse == config.SparseAttention(
        num_index_heads=4, index_dim=128, topk_blocks=16, block_size=128, local_blocks=1, init_blocks=0
    )
    assert text.moe == config.Moe(
        num_experts=128,
        experts_per_token=4,
        num_shared_experts=1,
        expert_intermediate_size=3072,
        shared_intermediate_size=3072,
        routed_scaling_factor=2.0,
    )
    assert (text.bos_token_id, text.eos_token_ids, text.pad_token_id, text.num_mtp_layers) == (
        200034,
        (200020,),
        None,
        0,
    )
    assert (model.image_token_id, model.video_token_id, model.dtype) == (200025, 200026, "bfloat16")
    vision = model.vision
    assert vision is not None
    assert (vision.hidden_size, vision.num_layers, vision.num_heads, vision.image_size) == (1280, 32, 16, 672)
    assert (vision.spatial_merge_size, vision.temporal_patch_size, vision.segment_max_frames) == (2, 2, 4)
    assert model.quantization is not None
    assert (model.quantization.linears, model.quantization.experts) == ("mxfp8", "nvfp4")


def test_published_m3_differs_where_the_specification_says() -> None:
    model = parse(config.published("m3"))
    assert model.text.rope_theta == 5e6
    assert model.text.attention == ("full",) * 3 + ("sparse",) * 57
    assert model.text.num_mtp_layers == 1  # 7 modules declared, one layer in the checkpoint
    assert model.quantization is None
    assert model.vision is not None
    assert model.vision.image_size == 2016


def test_published_returns_fresh_copies_and_refuses_other_names() -> None:
    flash()["text_config"]["moe_layer_freq"].clear()
    assert len(flash()["text_config"]["moe_layer_freq"]) == 60
    with pytest.raises(ValueError, match=r"no published config 'm4'; known: m3\.1-flash, m3"):
        config.published("m4")  # type: ignore[arg-type]


def test_saved_dialect_fields() -> None:
    model = parse(saved_text())
    assert (model.dialect, model.vision, model.image_token_id) == ("transformers", None, None)
    assert model.text.attention == ("full", "sparse", "sparse")
    assert model.text.mlp == ("dense", "dense", "moe")
    assert (model.text.rope_theta, model.text.rotary_dim) == (1e7, 8)
    assert model.text.sparse is not None
    assert model.text.sparse.init_blocks == saved.INIT_BLOCKS == 0
    assert model.text.activation.beta == saved.SWIGLU_BETA == 1.0
    assert model.text.moe is not None
    assert model.text.moe.num_shared_experts == saved.SHARED_EXPERTS == 1


def test_text_only_alias_flat_and_nested_mean_the_same() -> None:
    flat = config.published("m3")["text_config"]
    nested = {"architectures": ["MiniMaxM3SparseForCausalLM"], "text_config": copy.deepcopy(flat)}
    whole = config.published("m3") | {"architectures": ["MiniMaxM3SparseForCausalLM"]}
    models = [parse(flat), parse(nested), parse(whole)]
    assert models[0].text == models[1].text == models[2].text
    assert all(m.vision is None and m.architecture == "MiniMaxM3SparseForCausalLM" for m in models)


@pytest.mark.parametrize(
    ("name", "fragment"),
    [
        (None, "missing key 'architectures'"),
        (["LlamaForCausalLM"], "architecture 'LlamaForCausalLM' is not supported"),
        ([], "architecture [] is not supported"),
        ("MiniMaxM3VLForCausalLM", "is not supported"),
    ],
)
def test_unknown_architecture_names_the_supported(name: Any, fragment: str) -> None:
    mapping = flash()
    mapping["architectures"] = name
    with pytest.raises(ConfigError) as caught:
        parse(mapping)
    assert fragment in str(caught.value)
    for known in ("MiniMaxM3SparseForConditionalGeneration", "MiniMaxM3SparseForCausalLM", "MiniMaxM3VLForCausalLM"):
        assert known in str(caught.value)


@pytest.mark.parametrize(
    ("section", "key", "nearest"),
    [
        ((), "projector_hiden_size", "projector_hidden_size"),
        (("text_config",), "rope_tetha", "rope_theta"),
        (("text_config",), "zzzz", None),
        (("text_config", "sparse_attention_config"), "sparse_topk_block", "sparse_topk_blocks"),
        (("vision_config",), "patch_sizes", "patch_size"),
        (("vision_config", "img_token_compression_config"), "spatial_merge", "spatial_merge_size"),
        (("quantization_config",), "weight_block_sizes", "weight_block_size"),
    ],
)
def test_unknown_key_is_refused_with_the_nearest(section: tuple[str, ...], key: str, nearest: str | None) -> None:
    mapping = flash()
    part = mapping
    for name in section:
        part = part[name]
    part[key] = 1
    with pytest.raises(UnknownKey, match=f"unknown key '{key}'") as caught:
        parse(mapping)
    assert caught.value.nearest == nearest
    assert all(name in str(caught.value) for name in section)
    if nearest:
        assert f"did you mean '{nearest}'?" in str(caught.value)


def numeric_keys(section: dict[str, Any], skip: frozenset[str]) -> list[str]:
    return sorted(k for k, v in section.items() if type(v) in (int, float) and k not in skip)


OPTIONAL_TEXT = frozenset({"swiglu_beta", "bos_token_id", "eos_token_id", "rotary_dim", "partial_rotary_factor"})
GENERIC_NUMBERS = frozenset({"attention_dropout", "initializer_range", "router_aux_loss_coef", "router_jitter_noise"})


@pytest.mark.parametrize("key", [*numeric_keys(flash()["text_config"], OPTIONAL_TEXT), "moe_layer_freq", "hidden_act"])
def test_no_official_text_number_has_a_default(key: str) -> None:
    """BUG-2: a missing number must never become a plausible one."""
    mapping = flash()
    del mapping["text_config"][key]
    with pytest.raises(ConfigError, match=f"config.json: text_config: missing key '{key}'"):
        parse(mapping)


@pytest.mark.parametrize("key", sorted(set(sparse_section(flash())) - {"sparse_local_block", "sparse_init_block"}))
def test_every_sparse_key_is_required(key: str) -> None:
    mapping = flash()
    del sparse_section(mapping)[key]
    with pytest.raises(ConfigError, match=f"missing key '{key}'"):
        parse(mapping)


@pytest.mark.parametrize(
    "key", [*numeric_keys(saved_text(), OPTIONAL_TEXT | GENERIC_NUMBERS), "rotary_dim", "rope_parameters"]
)
def test_no_saved_text_number_has_a_default(key: str) -> None:
    mapping = saved_text()
    del mapping[key]
    with pytest.raises(ConfigError, match=f"missing key '{key}'"):
        parse(mapping)


@pytest.mark.parametrize("key", numeric_keys(flash()["vision_config"], frozenset({"projection_dim"})))
def test_no_vision_number_has_a_default(key: str) -> None:
    mapping = flash()
    del mapping["vision_config"][key]
    with pytest.raises(ConfigError, match=f"missing key '{key}'"):
        parse(mapping)


def test_absent_swiglu_beta_is_one_as_the_specification_demands() -> None:
    mapping = flash()
    del mapping["text_config"]["swiglu_beta"]
    assert parse(mapping).text.activation.beta == 1.0
    mapping["text_config"]["swiglu_beta"] = 0.5
    assert parse(mapping).text.activation.beta == 0.5


def test_several_missing_keys_are_listed_together() -> None:
    mapping = flash()
    del mapping["text_config"]["hidden_size"], mapping["text_config"]["head_dim"]
    with pytest.raises(ConfigError, match="missing keys 'hidden_size', 'head_dim'"):
        parse(mapping)


@pytest.mark.parametrize(
    ("rotary", "factor", "width"), [(64, None, 64), (None, 0.5, 64), (64, 0.5, 64), (None, 1.0, 128), (32, 0.25, 32)]
)
def test_rotary_width_from_any_spelling(rotary: int | None, factor: float | None, width: int) -> None:
    """BUG-13 (scaled twice) and BUG-14 (either field alone)."""
    mapping = flash()
    text = mapping["text_config"]
    for key, value in (("rotary_dim", rotary), ("partial_rotary_factor", factor)):
        text.pop(key)
        if value is not None:
            text[key] = value
    assert parse(mapping).text.rotary_dim == width


@pytest.mark.parametrize(
    ("rotary", "factor", "fragment"),
    [
        (64, 0.25, "'rotary_dim' is 64, but head_dim 128 * 'partial_rotary_factor' 0.25 is 32"),
        (None, None, "missing both 'rotary_dim' and 'partial_rotary_factor'"),
        (None, 0.3, "'partial_rotary_factor' 0.3 times head_dim 128 is 38.4"),
        (None, 2.0, "expected a whole number of channels up to head_dim"),
        (7, None, "rotary width 7; expected an even number up to head_dim = 128"),
        (256, None, "rotary width 256"),
    ],
)
def test_rotary_conflicts_are_refused(rotary: int | None, factor: float | None, fragment: str) -> None:
    """BUG-14: the fields in conflict must raise."""
    mapping = flash()
    mapping["text_config"] |= {"rotary_dim": rotary, "partial_rotary_factor": factor}
    with pytest.raises(ConfigError) as caught:
        parse(mapping)
    assert fragment in str(caught.value)


def test_saved_dialect_requires_the_factor_because_transformers_rotates_everything_without_it() -> None:
    mapping = saved_text()
    del mapping["rope_parameters"]["partial_rotary_factor"]
    with pytest.raises(ConfigError, match="rope_parameters: missing key 'partial_rotary_factor'"):
        parse(mapping)


@pytest.mark.parametrize("key", ["moe_layer_freq", "sparse_attention_freq", "sparse_disable_index_value"])
@pytest.mark.parametrize("length", [0, 59, 61])
def test_lists_of_the_wrong_length(key: str, length: int) -> None:
    mapping = flash()
    section = mapping["text_config"] if key == "moe_layer_freq" else sparse_section(mapping)
    section[key] = [1] * length
    with pytest.raises(ConfigError):
        parse(mapping)
    if length:
        with pytest.raises(ConfigError, match=rf"'{key}' has {length} entries; expected num_hidden_layers = 60"):
            parse(mapping)


@pytest.mark.parametrize("bad", [2, -1, True, 0.0, "1", None])
def test_list_entries_are_0_or_1(bad: Any) -> None:
    mapping = flash()
    mapping["text_config"]["moe_layer_freq"][7] = bad
    with pytest.raises(ConfigError, match=r"'moe_layer_freq\[7\]' is"):
        parse(mapping)


@pytest.mark.parametrize(
    ("keys", "local", "init"),
    [
        ({"sparse_local_block": 2, "sparse_init_block": 3}, 2, 3),
        ({"sparse_local_tokens": 128, "sparse_init_tokens": 128}, 2, 1),
        ({"sparse_local_tokens": 129, "sparse_init_tokens": 1}, 3, 1),
        ({"sparse_local_tokens": 0, "sparse_init_tokens": 0}, 1, 0),
        ({"sparse_local_block": 2, "sparse_local_tokens": 100, "sparse_init_block": 0}, 2, 0),
    ],
)
def test_forced_blocks_from_either_spelling(keys: dict[str, int], local: int, init: int) -> None:
    mapping = flash()
    section = sparse_section(mapping)
    del section["sparse_local_block"], section["sparse_init_block"]
    section |= keys
    sparse = parse(mapping).text.sparse
    assert sparse is not None
    assert (sparse.local_blocks, sparse.init_blocks) == (local, init)


@pytest.mark.parametrize(
    ("changes", "fragment"),
    [
        ({"sparse_local_block": None}, "missing key 'sparse_local_block'"),
        ({"sparse_init_block": None}, "missing key 'sparse_init_block'"),
        ({"sparse_local_tokens": 128}, "the number of forced blocks"),
        ({"sparse_init_block": 16}, "16 initial and 1 local forced blocks exceed top-k 16"),
        ({"sparse_num_index_heads": 2}, "2 index heads for 4 key-value heads"),
        ({"sparse_index_dim": 32}, "rotary width 64 exceeds the index head width 32"),
        ({"use_sparse_attention": False}, "'use_sparse_attention' is false, but 60 entries"),
        ({"sparse_attention_freq": [0] * 60}, "'use_sparse_attention' is true, but 0 entries"),
        ({"sparse_score_type": "lse"}, "'sparse_score_type' is 'lse', which asks for another block score"),
        ({"sparse_disable_index_value": 0}, "is 0 on sparse layer 0, which asks for the index-value branch"),
        ({"sparse_disable_index_value": [1] * 59 + [0]}, "is 0 on sparse layer 59"),
    ],
)
def test_sparse_attention_rules(changes: dict[str, Any], fragment: str) -> None:
    mapping = flash()
    sparse_section(mapping).update(changes)
    with pytest.raises(ConfigError) as caught:
        parse(mapping)
    assert fragment in str(caught.value)
    assert "sparse_attention_config" in str(caught.value) or "text_config" in str(caught.value)


def test_scalar_disable_index_value_and_a_model_without_sparse_layers() -> None:
    mapping = flash()
    sparse_section(mapping)["sparse_disable_index_value"] = 1
    assert parse(mapping).text.sparse is not None
    sparse_section(mapping).update(use_sparse_attention=False, sparse_attention_freq=[0] * 60)
    assert parse(mapping).text.sparse is None
    mapping["text_config"]["moe_layer_freq"] = [0] * 60
    assert parse(mapping).text.moe is None


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("text_config", "hidden_act", "silu"),
        ("text_config", "attention_output_gate", True),
        ("text_config", "use_gemma_norm", False),
        ("text_config", "use_qk_norm", False),
        ("text_config", "qk_norm_type", "per_layer"),
        ("text_config", "scoring_func", "softmax"),
        ("text_config", "use_routing_bias", False),
        ("text_config", "tie_word_embeddings", True),
        ("text_config", "n_shared_experts", 2),
        ("text_config", "rope_scaling", {"rope_type": "yarn", "factor": 4.0}),
        ("text_config", "attention_dropout", 0.1),
        ("text_config", "router_jitter_noise", 0.01),
        ("text_config", "torch_dtype", "float16"),
        ("vision_config", "hidden_act", "quick_gelu"),
        ("vision_config", "rope_mode", "2d"),
        ("vision_config", "position_embedding_type", "learned"),
        ("vision_config", "attention_dropout", 0.5),
        (None, "num_reward_heads", 1),
        (None, "projector_hidden_act", "relu"),
        (None, "multimodal_projector_bias", False),
        (None, "tie_word_embeddings", True),
        (None, "torch_dtype", "float16"),
    ],
)
def test_features_without_a_checkpoint_are_refused_by_name(section: str | None, key: str, value: Any) -> None:
    mapping = flash()
    (mapping if section is None else mapping[section])[key] = value
    with pytest.raises(UnsupportedFeature, match=rf"'{key}' is .*asks for") as caught:
        parse(mapping)
    assert "m31 implements the published checkpoints only" in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value", "fragment"),
    [
        ("hidden_act", "gelu", "'hidden_act' is 'gelu'"),
        ("swiglu_beta", 0.5, "'swiglu_beta' is 0.5"),
        ("n_shared_experts", 2, "'n_shared_experts' is 2"),
        ("attention_dropout", 0.1, "'attention_dropout' is 0.1"),
        ("layer_types", ["sliding_attention"] * 3, "'layer_types[0]' is 'sliding_attention'"),
        ("layer_types", ["full_attention"] * 2, "'layer_types' has 2 entries"),
        ("mlp_layer_types", ["dense"] * 4, "'mlp_layer_types' has 4 entries"),
        ("rope_parameters", {"rope_type": "yarn", "factor": 2.0}, "'rope_type' is 'yarn'"),
        (
            "rope_parameters",
            {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.5, "factor": 2.0},
            "unknown key 'factor'",
        ),
        ("rotary_dim", 16, "'rotary_dim' is 16, but head_dim 16 * 'partial_rotary_factor' 0.5 is 8"),
        ("moe_layer_freq", [0, 0, 1], "mixes two dialects: moe_layer_freq (official) and layer_types"),
        ("rope_theta", 1e7, "mixes two dialects: rope_theta (official)"),
    ],
)
def test_saved_dialect_rules(key: str, value: Any, fragment: str) -> None:
    mapping = saved_text()
    mapping[key] = value
    with pytest.raises(ConfigError) as caught:
        parse(mapping)
    assert fragment in str(caught.value)


def test_official_extras_survive_a_load_and_save_by_transformers() -> None:
    mapping = saved_text() | {
        "use_gemma_norm": True,
        "use_qk_norm": True,
        "qk_norm_type": "per_head",
        "scoring_func": "sigmoid",
        "use_routing_bias": True,
        "n_shared_experts": 1,
        "swiglu_beta": 1.0,
        "num_mtp_modules": 7,
    }
    assert parse(mapping).text.num_mtp_layers == 7
    with pytest.raises(UnsupportedFeature, match="'scoring_func' is 'softmax'"):
        parse(mapping | {"scoring_func": "softmax"})


def test_architecture_and_dialect_must_match() -> None:
    with pytest.raises(ConfigError, match="comes with the official dialect, but layer_types belongs"):
        parse(saved_text() | {"architectures": ["MiniMaxM3SparseForCausalLM"]})
    text = flash()["text_config"] | {"architectures": ["MiniMaxM3VLForCausalLM"]}
    with pytest.raises(ConfigError, match="comes with the transformers dialect, but moe_layer_freq belongs"):
        parse(text)


def test_saved_vision_rope_marks_the_dialect_too() -> None:
    mapping = flash()
    mapping["vision_config"]["rope_parameters"] = {"rope_type": "axial", "rope_theta": 10000.0}
    with pytest.raises(ConfigError, match="mixes two dialects"):
        parse(mapping)


@pytest.mark.parametrize(
    ("section", "key", "value", "fragment"),
    [
        ("text_config", "hidden_size", 0, "'hidden_size' is 0; expected greater than or equal to 1"),
        ("text_config", "hidden_size", -1, "'hidden_size' is -1"),
        ("text_config", "hidden_size", True, "'hidden_size' is True; expected a valid integer"),
        ("text_config", "hidden_size", 6144.0, "'hidden_size' is 6144.0; expected a valid integer"),
        ("text_config", "hidden_size", "6144", "'hidden_size' is '6144'; expected a valid integer"),
        ("text_config", "hidden_size", None, "'hidden_size' is None"),
        ("text_config", "hidden_size", 10**400, "'hidden_size' is 1000"),
        ("text_config", "num_hidden_layers", 2000, "expected less than or equal to 1024"),
        ("text_config", "num_local_experts", 10**6, "expected less than or equal to 4096"),
        ("text_config", "rms_norm_eps", 0, "'rms_norm_eps' is 0; expected greater than 0"),
        ("text_config", "rms_norm_eps", float("nan"), "'rms_norm_eps' is nan; expected a finite number"),
        ("text_config", "rope_theta", float("inf"), "expected a finite number"),
        ("text_config", "rope_theta", True, "'rope_theta' is True; expected a number"),
        ("text_config", "rope_theta", 10**400, "expected a number in float range"),
        ("text_config", "swiglu_alpha", "1.702", "expected a number"),
        ("text_config", "use_gemma_norm", 1, "'use_gemma_norm' is 1; expected a valid boolean"),
        ("text_config", "num_attention_heads", 63, "63 attention heads cannot share 4 key-value heads"),
        ("text_config", "num_experts_per_tok", 129, "129 experts per token of 128 experts"),
        ("text_config", "eos_token_id", 200064, "'eos_token_id' 200064 is outside the vocabulary of 200064"),
        ("text_config", "eos_token_id", [200020, 300000], "'eos_token_id' 300000 is outside"),
        ("text_config", "eos_token_id", [], "'eos_token_id' is []"),
        ("text_config", "eos_token_id", "2", "'eos_token_id' is '2'"),
        ("text_config", "bos_token_id", 10**6, "'bos_token_id' 1000000 is outside"),
        ("text_config", "pad_token_id", 10**6, "'pad_token_id' 1000000 is outside"),
        ("text_config", "model_type", "llama", "'model_type' is 'llama'"),
        ("vision_config", "model_type", "siglip", "'model_type' is 'siglip'"),
        ("vision_config", "num_attention_heads", 7, "hidden_size 1280 does not divide among 7 attention heads"),
        ("vision_config", "projection_dim", 5120, "the width that the projector ends in contradicts itself"),
        ("vision_config", "spatial_merge_size", 4, "'spatial_merge_size' contradicts itself"),
        (None, "model_type", "llava", "'model_type' is 'llava'"),
        (None, "merged_hidden_size", 1, "the merged patch width contradicts itself"),
        (None, "dtype", "float32", "the weights' dtype contradicts itself"),
        (None, "eos_token_id", 1, "'eos_token_id' contradicts itself"),
        (None, "pad_token_id", 1, "'pad_token_id' stands at the top only"),
        (None, "text_config", [], "'text_config' is []"),
        (None, "vision_config", None, "missing key 'vision_config'"),
        (None, "vision_config", 7, "'vision_config' is 7"),
        (None, "quantization_config", [], "'quantization_config' is []"),
    ],
)
def test_bad_values(section: str | None, key: str, value: Any, fragment: str) -> None:
    mapping = flash()
    (mapping if section is None else mapping[section])[key] = value
    with pytest.raises(ConfigError) as caught:
        parse(mapping)
    assert fragment in str(caught.value)


def test_eos_may_be_a_list_or_absent() -> None:
    mapping = flash()
    mapping["text_config"]["eos_token_id"] = [200020, 5]
    assert parse(mapping).text.eos_token_ids == (200020, 5)
    del mapping["text_config"]["eos_token_id"]
    assert parse(mapping).text.eos_token_ids == ()


@pytest.mark.parametrize(
    ("key", "value"), [("sparse_topk_blocks", 2**31 - 1), ("sparse_block_size", 10**9), ("sparse_block_size", 65_537)]
)
def test_block_counts_beyond_any_model_are_refused_before_they_are_allocated(key: str, value: int) -> None:
    mapping = flash()
    sparse_section(mapping)[key] = value
    with pytest.raises(ConfigError, match=rf"{key}.*65536|{key}.*65,536"):
        parse(mapping)


@pytest.mark.parametrize("value", [0, -1.0])
def test_activation_gain_is_positive(value: float) -> None:
    mapping = flash()
    mapping["text_config"]["swiglu_alpha"] = value
    with pytest.raises(ConfigError, match="swiglu_alpha"):
        parse(mapping)
