"""Adapter folders: what PEFT's layout means, the round trip, and everything that is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support import adapters, quantised

from m31.checkpoint import Adapter, AdapterConfig, Checkpoint, adaptable, write_adapter
from m31.checkpoint.adapter_config import parse_adapter
from m31.errors import (
    BadHeader,
    CheckpointError,
    ConfigError,
    M31Error,
    MissingTensor,
    NotACheckpoint,
    TruncatedShard,
    UnexpectedTensor,
    UnknownKey,
    UnsupportedFeature,
    WrongDtype,
    WrongShape,
)

# What PEFT 0.21.2 wrote for LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj"], lora_dropout=0.05).
PEFT = {
    "alora_invocation_tokens": None,
    "alpha_pattern": {},
    "arrow_config": None,
    "auto_mapping": {"base_model_class": "Module", "parent_library": "torch.nn.modules.module"},
    "base_model_name_or_path": None,
    "bias": "none",
    "corda_config": None,
    "ensure_weight_tying": False,
    "eva_config": None,
    "exclude_modules": None,
    "fan_in_fan_out": False,
    "inference_mode": True,
    "init_lora_weights": True,
    "kasa_config": None,
    "layer_replication": None,
    "layers_pattern": None,
    "layers_to_transform": None,
    "loftq_config": {},
    "lora_alpha": 4,
    "lora_bias": False,
    "lora_dropout": 0.05,
    "lora_ga_config": None,
    "megatron_config": None,
    "megatron_core": "megatron.core",
    "modules_to_save": None,
    "monteclora_config": None,
    "peft_type": "LORA",
    "peft_version": "0.21.2",
    "qalora_group_size": 16,
    "r": 2,
    "rank_pattern": {},
    "revision": None,
    "target_modules": ["q_proj"],
    "target_parameters": None,
    "task_type": None,
    "trainable_token_indices": None,
    "use_bdlora": None,
    "use_dora": False,
    "use_qalora": False,
    "use_rslora": False,
    "velora_config": None,
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder = tmp_path_factory.mktemp("base") / "c"
    return quantised.write_quantised(folder, quantised.bf16_config(), "m31")


def test_what_peft_writes_is_read(base: Checkpoint, tmp_path: Path) -> None:
    made = adapters.pairs(base, ["q_proj"], rank=2)
    folder = adapters.write(tmp_path / "a", made, ["q_proj"], rank=2, **PEFT)
    read = Adapter.open(folder, base.config)
    assert list(read.modules) == [f"model.layers.{layer}.self_attn.q_proj" for layer in range(3)]
    pair = read.modules["model.layers.1.self_attn.q_proj"]
    a, b = made[pair.module]
    assert torch.equal(pair.a.load(), a)
    assert torch.equal(pair.b.load(), b * 2)  # alpha / r
    assert read.config.to_json("x")["target_modules"] == ["q_proj"]
    (note,) = read.notes
    assert "lora_dropout 0.05" in note
    assert "without a part in what is computed" in note


@pytest.mark.parametrize("prefix", ["", "language_model."])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_place_in_every_dtype(base: Checkpoint, tmp_path: Path, prefix: str, dtype: torch.dtype) -> None:
    made = {m: (a.to(dtype), b.to(dtype)) for m, (a, b) in adapters.pairs(base, adapters.EVERYWHERE).items()}
    folder = adapters.write(tmp_path / "a", made, list(adapters.EVERYWHERE), prefix=prefix)
    read = Adapter.open(folder, base.config)
    assert set(read.modules) == set(adapters.shapes(base)) == set(adaptable(base.config))
    for module, (a, b) in made.items():
        pair = read.modules[module]
        assert torch.equal(pair.a.load(), a.float())
        assert torch.equal(pair.b.load(), b.float() * (5 / 3))
        assert torch.equal(pair.b.slice(0, 2, 7).load(), pair.b.load()[2:7])
        want = (b.double().float() * (5 / 3)).double() @ a.double()
        assert torch.allclose(pair.delta(1, 4), want[1:4], rtol=1e-12, atol=0)


def test_the_names_of_transformers(base: Checkpoint, tmp_path: Path) -> None:
    made = adapters.pairs(base, ["index_q_proj", "w1", "mlp.up_proj"])
    spelt = {
        module.replace("model.", "model.language_model.", 1)
        .replace("index_q_proj", "indexer.q_proj")
        .replace("block_sparse_moe", "mlp"): pair
        for module, pair in made.items()
    }
    folder = adapters.write(tmp_path / "a", spelt, ["indexer.q_proj", "w1", "mlp.up_proj"])
    assert set(Adapter.open(folder, base.config).modules) == set(made)


@pytest.mark.parametrize(
    ("keys", "module", "rank", "scale"),
    [
        ({"lora_alpha": 6}, "model.layers.0.self_attn.q_proj", 4, 1.5),
        ({"use_rslora": True}, "model.layers.0.self_attn.q_proj", 4, 4.0),
        ({"rank_pattern": {"q_proj": 2}}, "model.layers.0.self_attn.q_proj", 2, 4.0),
        ({"rank_pattern": {"q_proj": 2}}, "model.layers.0.self_attn.index_q_proj", 4, 2.0),  # behind a dot only
        ({"rank_pattern": {r"layers\.[01]\..*": 2}}, "model.layers.1.mlp.up_proj", 2, 4.0),
        ({"alpha_pattern": {"self_attn.q_proj": 2}}, "model.layers.0.self_attn.q_proj", 4, 0.5),
        ({"rank_pattern": {"q_proj": 16}, "use_rslora": True}, "model.layers.0.self_attn.q_proj", 16, 2.0),
    ],
)
def test_ranks_and_scales(keys: dict[str, Any], module: str, rank: int, scale: float) -> None:
    config = parse_adapter(
        {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["x"], **keys}, where="here"
    )
    assert (config.rank(module), config.scale(module)) == (rank, scale)


@pytest.mark.parametrize(
    ("targets", "excluded", "module", "hit"),
    [
        (["q_proj"], None, "model.layers.0.self_attn.q_proj", True),
        (["q_proj"], None, "model.layers.0.self_attn.index_q_proj", False),
        (["self_attn.q_proj", "lm_head"], None, "lm_head", True),
        (r".*\.w[13]", None, "model.layers.2.block_sparse_moe.experts.0.w1", True),
        (r".*\.w[13]", None, "model.layers.2.block_sparse_moe.experts.0.w2", False),
        (r"w1", None, "model.layers.2.block_sparse_moe.experts.0.w1", False),  # the whole name
        (["q_proj"], ["self_attn.q_proj"], "model.layers.0.self_attn.q_proj", False),
        (["q_proj"], r".*layers\.0\..*", "model.layers.0.self_attn.q_proj", False),
        (["q_proj"], r".*layers\.0\..*", "model.layers.1.self_attn.q_proj", True),
    ],
)
def test_targets(targets: Any, excluded: Any, module: str, hit: bool) -> None:
    content = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": targets, "exclude_modules": excluded}
    assert parse_adapter(content, where="here").targets(module) is hit


def test_the_round_trip(base: Checkpoint, tmp_path: Path) -> None:
    made = adapters.pairs(base, ["v_proj", "w2", "lm_head"])
    config = AdapterConfig(r=3, alpha=4.5, rslora=True, target_modules=("lm_head", "v_proj", "w2"))
    first = write_adapter(tmp_path / "a", config, made, model=base.config, base="nano")
    assert first.config == config
    content = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    assert content["base_model_name_or_path"] == "nano"
    assert content["lora_alpha"] == 4.5
    second = write_adapter(tmp_path / "b", first.config, made, model=base.config, base="nano")
    assert first.digest == second.digest
    for module, (a, b) in made.items():
        assert torch.equal(first.modules[module].a.load(), a)
        assert torch.equal(first.modules[module].b.load(), b * (4.5 / 3**0.5))
    with pytest.raises(CheckpointError, match="is not empty"):
        write_adapter(tmp_path / "a", config, made, model=base.config, base="nano")
    with pytest.raises(MissingTensor):  # what could not be read back is not left behind
        write_adapter(tmp_path / "c", config, dict(list(made.items())[1:]), model=base.config, base="nano")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def test_names_of_the_vision_language_model(tmp_path: Path) -> None:
    described = quantised.write_bf16(tmp_path / "c", quantised.bf16_config(vision=True)).config
    out, width = adaptable(described)["model.layers.0.self_attn.o_proj"]
    config = AdapterConfig(r=2, alpha=2, rslora=False, target_modules=r".*layers\.0\.self_attn\.o_proj")
    pair = torch.ones(2, width), torch.ones(out, 2)
    tensors = {"model.layers.0.self_attn.o_proj": pair}
    folder = write_adapter(tmp_path / "a", config, tensors, model=described, base="x").folder
    stored = (folder / "adapter_model.safetensors").read_bytes()
    assert b"base_model.model.language_model.model.layers.0.self_attn.o_proj.lora_A.weight" in stored


CONFIG: dict[str, tuple[dict[str, Any], type[M31Error], str]] = {
    "unknown key": ({"lora_alpa": 3}, UnknownKey, "did you mean 'lora_alpha'"),
    "another method": ({"peft_type": "IA3"}, UnsupportedFeature, "expected LORA"),
    "no rank": ({"r": "absent"}, ConfigError, "'r' is missing"),
    "rank 0": ({"r": 0}, ConfigError, "whole number"),
    "rank of a boolean": ({"r": True}, ConfigError, "whole number"),
    "no alpha": ({"lora_alpha": None}, ConfigError, "'lora_alpha' is missing"),
    "alpha 0": ({"lora_alpha": 0}, ConfigError, "above zero"),
    "alpha in words": ({"lora_alpha": "8"}, ConfigError, "above zero"),
    "dora": ({"use_dora": True}, UnsupportedFeature, "'use_dora' is True"),
    "bias": ({"bias": "all"}, UnsupportedFeature, "'bias' is 'all'"),
    "lora bias": ({"lora_bias": True}, UnsupportedFeature, "'lora_bias' is True"),
    "conv layout": ({"fan_in_fan_out": True}, UnsupportedFeature, "'fan_in_fan_out' is True"),
    "whole modules": ({"modules_to_save": ["lm_head"]}, UnsupportedFeature, "'modules_to_save'"),
    "some layers": ({"layers_to_transform": [0]}, UnsupportedFeature, "'layers_to_transform'"),
    "parameters": ({"target_parameters": ["experts.gate_up_proj"]}, UnsupportedFeature, "'target_parameters'"),
    "pissa": ({"init_lora_weights": "pissa_niter_4"}, UnsupportedFeature, "changing the base's weights"),
    "all linear": ({"target_modules": "all-linear"}, ConfigError, "all-linear"),
    "no targets": ({"target_modules": None}, ConfigError, "'target_modules' is missing"),
    "empty targets": ({"target_modules": []}, ConfigError, "names of modules"),
    "bad regex": ({"target_modules": "("}, ConfigError, "no regular expression"),
    "bad pattern": ({"rank_pattern": {"[": 2}}, ConfigError, "no regular expression"),
    "bad rank in a pattern": ({"rank_pattern": {"q_proj": 1.5}}, ConfigError, "'q_proj' is 1.5"),
    "pattern of another kind": ({"alpha_pattern": [1]}, ConfigError, "'alpha_pattern' is"),
    "rslora in words": ({"use_rslora": "yes"}, ConfigError, "true or false"),
    "two patterns": ({"alpha_pattern": {"q_proj": 3, r"0\.self_attn\.q_proj": 4}}, ConfigError, "different values"),
}


@pytest.mark.parametrize("name", CONFIG)
def test_configurations_that_are_refused(base: Checkpoint, tmp_path: Path, name: str) -> None:
    keys, kind, message = CONFIG[name]
    given = {"targets": ["q_proj"], **keys}
    folder = adapters.write(tmp_path / "a", adapters.pairs(base, ["q_proj"]), given.pop("targets"), **given)
    with pytest.raises(kind, match=message) as caught:
        Adapter.open(folder, base.config)
    assert caught.value.where is not None
    assert "adapter_config.json" in caught.value.where


FIRST = "base_model.model.model.layers.0.self_attn.q_proj"
TENSORS: dict[str, tuple[dict[str, torch.Tensor | None], Any, type[M31Error], str]] = {
    "no B": ({f"{FIRST}.lora_B.weight": None}, None, MissingTensor, "lora_B"),
    "no pair": ({f"{FIRST}.lora_A.weight": None, f"{FIRST}.lora_B.weight": None}, None, MissingTensor, "lora_A"),
    "more than targets": (
        {"base_model.model.model.layers.0.self_attn.k_proj.lora_A.weight": torch.ones(3, 64)},
        None,
        UnexpectedTensor,
        "is no target",
    ),
    "no module": (
        {"base_model.model.model.layers.9.self_attn.q_proj.lora_A.weight": torch.ones(3, 64)},
        None,
        UnexpectedTensor,
        "no linear layer of this model that can have an adapter",
    ),
    "embedding": (
        {"base_model.model.model.embed_tokens.lora_embedding_A": torch.ones(3, 64)},
        None,
        UnexpectedTensor,
        "no tensor of a plain adapter",
    ),
    "router": (
        {"base_model.model.model.layers.2.block_sparse_moe.gate.lora_A.weight": torch.ones(3, 64)},
        None,
        UnexpectedTensor,
        "no linear layer of this model",
    ),
    "a copy of the head": (
        {"base_model.model.lm_head.base_layer.weight": torch.ones(64, 64)},
        None,
        UnexpectedTensor,
        "save_embedding_layers=False",
    ),
    "two spellings": (
        {"base_model.model.language_model.model.layers.0.self_attn.k_proj.lora_A.weight": torch.ones(3, 64)},
        None,
        UnexpectedTensor,
        "spelt in different ways",
    ),
    "another rank": ({f"{FIRST}.lora_A.weight": torch.ones(4, 64)}, None, WrongShape, r"expected \[3, 64\]"),
    "turned": ({f"{FIRST}.lora_B.weight": torch.ones(3, 128)}, None, WrongShape, r"expected \[128, 3\]"),
    "float64": ({f"{FIRST}.lora_A.weight": torch.ones(3, 64).double()}, None, WrongDtype, "F64"),
    "nothing": ({}, ["z_proj"], UnexpectedTensor, "is no target"),
}


@pytest.mark.parametrize("name", TENSORS)
def test_tensors_that_are_refused(base: Checkpoint, tmp_path: Path, name: str) -> None:
    tensors, targets, kind, message = TENSORS[name]
    made = adapters.pairs(base, ["q_proj"])
    folder = adapters.write(tmp_path / "a", made, targets or ["q_proj"], tensors=tensors)
    with pytest.raises(kind, match=message) as caught:
        Adapter.open(folder, base.config)
    assert "adapter_model.safetensors" in str(caught.value.where)


def test_targets_without_a_linear_layer(base: Checkpoint, tmp_path: Path) -> None:
    with pytest.raises(MissingTensor, match="names no linear layer"):
        Adapter.open(adapters.write(tmp_path / "a", {}, ["z_proj"]), base.config)


def test_files_that_are_refused(base: Checkpoint, tmp_path: Path) -> None:
    folder = adapters.write(tmp_path / "a", adapters.pairs(base, ["q_proj"]), ["q_proj"])
    tensors = folder / "adapter_model.safetensors"
    whole = tensors.read_bytes()
    tensors.write_bytes(whole[:-1])
    with pytest.raises(TruncatedShard):
        Adapter.open(folder, base.config)
    tensors.write_bytes(b"\x10" + bytes(7) + b"[" + bytes(40))
    with pytest.raises(BadHeader):
        Adapter.open(folder, base.config)
    tensors.rename(folder / "adapter_model.bin")
    with pytest.raises(NotACheckpoint, match="can run code"):
        Adapter.open(folder, base.config)
    with pytest.raises(NotACheckpoint, match=r"no adapter_config\.json"):
        Adapter.open(tmp_path, base.config)
    (folder / "adapter_config.json").write_text('{"r": 1, "r": 2}')
    (folder / "adapter_model.safetensors").write_bytes(whole)
    with pytest.raises(ConfigError, match="duplicate key"):
        Adapter.open(folder, base.config)
