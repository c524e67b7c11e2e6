"""The DSpark folder: configuration, names, shapes, fit to the target (MODEL.md §1.5, §4.3)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.quantised import bf16_config, draft_config, draft_weights, save, write_bf16, write_draft

from m31.checkpoint import Checkpoint, QuantizedTensor
from m31.checkpoint.draft import expected_draft
from m31.config.draft import load_draft, parse_draft
from m31.errors import (
    CheckpointError,
    ConfigError,
    DuplicateTensor,
    MissingTensor,
    NotACheckpoint,
    UnexpectedTensor,
    WrongShape,
)
from m31.formats import mxfp8

PUBLISHED: dict[str, Any] = {
    "num_hidden_layers": 5,
    "hidden_size": 6144,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "rotary_dim": 64,
    "vocab_size": 200064,
    "dense_intermediate_size": 12288,
    "dspark_ffn_hidden_size": 12288,
    "moe_layer_freq": [0] * 5,
    "sliding_window": 4096,
    "layer_types": ["sliding_attention"] * 5,
    "dspark_noise_token_id": 200058,
    "dspark_target_layer_ids": [3, 17, 31, 45, 59],
    "dspark_markov_rank": 256,
    "dflash_config": {"num_target_layers": 60, "num_hidden_layers": 5, "target_layer_ids": [3, 17, 31, 45, 59]},
}


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bf16(tmp_path_factory.mktemp("draft") / "ckpt", bf16_config()).folder


@pytest.fixture
def ckpt(template: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(template, tmp_path / "ckpt"))


def test_published_draft_head() -> None:
    declared = expected_draft(parse_draft(draft_config(**PUBLISHED), where="c"))
    assert len(declared) == 97
    assert round(sum(d.stored_bytes for d in declared.values()) / 1e9, 3) == 2.302
    mx = sum(d.logical_numel for d in declared.values() if d.storage == "fp8")
    plain = sum(d.logical_numel for d in declared.values() if d.storage == "plain")
    assert (mx, plain) == (1_667_235_840, 291_257_857)
    assert declared["dspark.fc.weight"].shape == (6144, 30720)
    assert declared["dspark.confidence_head.proj.weight"].shape == (1, 6400)
    assert declared["dspark.markov_head.markov_w2.weight"].shape == (200064, 256)


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.", ""])
def test_draft_is_read_in_every_spelling(ckpt: Path, prefix: str) -> None:
    assert Checkpoint.open(ckpt).draft is None
    write_draft(ckpt / "dspark", prefix=prefix)
    draft = Checkpoint.open(ckpt).draft
    assert draft is not None
    weights = draft_weights(draft_config())
    assert set(draft.declared) == set(weights)
    assert (draft.config.block_size, draft.config.target_layer_ids, draft.config.target_num_layers) == (7, (0, 2), 3)
    name = "dspark.layers.1.decoder_layer.self_attn.q_proj.weight"
    linear = draft.tensor(name)
    assert isinstance(linear, QuantizedTensor)
    assert torch.equal(linear.load(), mxfp8.decode(weights[name], weights[f"{name}_scale_inv"], torch.float32))
    assert torch.equal(draft.tensor("dspark.fc.weight").load(), weights["dspark.fc.weight"])


def test_the_target_opens_beside_a_broken_draft(ckpt: Path) -> None:
    (ckpt / "dspark").mkdir()
    checkpoint = Checkpoint.open(ckpt)
    with pytest.raises(NotACheckpoint, match="dspark: is an empty folder"):
        _ = checkpoint.draft
    (ckpt / "dspark" / "config.json").write_text(json.dumps(draft_config()))
    with pytest.raises(NotACheckpoint, match="has no weights"):
        _ = checkpoint.draft


def test_tensors_of_the_draft_are_checked(ckpt: Path) -> None:
    write_draft(ckpt / "dspark")
    weights = {f"dspark.{n.removeprefix('dspark.')}": t for n, t in draft_weights(draft_config()).items()}
    file = ckpt / "dspark" / "model.safetensors"

    def refused(kind: type[CheckpointError], text: str, **changes: torch.Tensor | None) -> None:
        changed = weights | {f"dspark.{k}": v for k, v in changes.items() if v is not None}
        for key in [k for k, v in changes.items() if v is None]:
            del changed[f"dspark.{key}"]
        save(file, changed)
        with pytest.raises(kind, match=text):
            _ = Checkpoint.open(ckpt).draft

    refused(MissingTensor, r"1 of 43 tensors are missing: dspark.fc.weight", **{"fc.weight": None})
    refused(UnexpectedTensor, r"do not belong to a draft head: dspark.embed", **{"embed.weight": torch.ones(1)})
    refused(WrongShape, r"'dspark.fc.weight' is \[64\], expected \[64, 128\]", **{"fc.weight": torch.ones(64)})
    save(file, weights | {"model.dspark.fc.weight": weights["dspark.fc.weight"]})
    with pytest.raises(DuplicateTensor, match=r"'dspark.fc.weight' is stored twice"):
        _ = Checkpoint.open(ckpt).draft
    save(file, weights | {"dspark.layers.0.rotary_emb.inv_freq": torch.ones(4)})
    draft = Checkpoint.open(ckpt).draft
    assert draft is not None
    assert draft.notes == ("1 stored rotary tables ignored: m31 computes its own",)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"architectures": ["X"]}, "'architectures' is ['X']; expected ['DSparkMiniMaxDraftModel']"),
        ({"dspark_block_sise": 7}, "unknown key 'dspark_block_sise'; did you mean 'dspark_block_size'?"),
        ({"dflash_config": {"num_hidden_layers": 2}}, "missing key 'num_target_layers'"),
        ({"dspark_target_layer_ids": [0, 1]}, "the list of target layers contradicts itself"),
        ({"dspark_target_layer_ids": [2, 0], "dflash_config": {"num_target_layers": 3, "num_hidden_layers": 2}}, "asc"),
        ({"num_hidden_layers": 3}, "num_hidden_layers contradicts itself"),
        ({"dspark_ffn_hidden_size": 64}, "the width of the MLP contradicts itself"),
        ({"dspark_config": {"use_dense_ffn": False}}, "which asks for experts in the draft"),
        ({"dspark_config": {"ffn_hidden_size": 32}}, "the width of the MLP contradicts itself"),
        ({"layer_types": ["full_attention"] * 2}, "expected 2 x sliding_attention"),
        ({"moe_layer_freq": [0, 1]}, "'moe_layer_freq' is [0, 1]"),
        ({"dspark_markov_head_type": "gated"}, "which asks for another Markov head"),
        ({"enable_confidence_head": False}, "which asks for a draft without its confidence head"),
        ({"sample_from_anchor": False}, "which asks for a draft of one row more"),
        ({"dspark_hybrid_context_fusion": True}, "another fusion"),
        ({"num_key_value_heads": 3}, "4 attention heads cannot share 3 key-value heads"),
        ({"text_config": {"hidden_size": 32}}, "'hidden_size' differs between the top and text_config"),
        ({"text_config": 3}, "'text_config' is 3; expected an object"),
        ({"rotary_dim": 8}, "expected the same width from both"),
    ],
)
def test_draft_config_is_read_strictly(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_draft(draft_config(**changes), where="dspark/config.json")
    assert text in str(caught.value)
    assert "dspark/config.json" in str(caught.value)


def test_fields_may_sit_under_text_config(tmp_path: Path) -> None:
    flat = draft_config()
    top = {key: flat.pop(key) for key in ("architectures", "quantization_config")}
    nested = top | {"text_config": flat | {"architectures": ["Other"]}}
    (tmp_path / "config.json").write_text(json.dumps(nested))
    assert load_draft(tmp_path) == parse_draft(draft_config(), where="c")


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"vocab_size": 65}, "made for another model: vocabulary 65; expected 64"),
        ({"hidden_size": 32}, "made for another model: hidden size 32; expected 64"),
        ({"dflash_config": {"num_target_layers": 4, "num_hidden_layers": 2}}, "layers of its target 4; expected 3"),
        ({"dspark_noise_token_id": 64}, "'dspark_noise_token_id' 64 is outside the vocabulary of 64"),
    ],
)
def test_a_draft_of_another_target_is_refused(ckpt: Path, changes: dict[str, Any], text: str) -> None:
    (ckpt / "dspark").mkdir()
    (ckpt / "dspark" / "config.json").write_text(json.dumps(draft_config(**changes)))
    save(ckpt / "dspark" / "model.safetensors", {"dspark.fc.weight": torch.ones(1)})
    with pytest.raises(ConfigError, match=text):
        _ = Checkpoint.open(ckpt).draft
