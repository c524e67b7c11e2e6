"""Folders that transformers 5.23 really writes, and our folders read by transformers."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers.models.minimax_m3_vl import configuration_minimax_m3_vl as hf_config
from transformers.models.minimax_m3_vl import modeling_minimax_m3_vl as hf_model

from m31 import config
from m31.checkpoint import Checkpoint, check_finite, expected, inspect, random_tensors, write
from m31.errors import UnexpectedTensor

TEXT: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 24,
    "dense_intermediate_size": 96,
    "shared_intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rotary_dim": 8,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.5},
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "mlp_layer_types": ["dense", "dense", "sparse", "sparse"],
    "layer_types": ["full_attention"] + ["minimax_m3_sparse"] * 3,
    "index_n_heads": 2,
    "index_head_dim": 24,
    "index_block_size": 4,
    "index_topk_blocks": 3,
    "index_local_blocks": 1,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "max_position_embeddings": 4096,
}
VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}


def build(kind: str, dtype: torch.dtype = torch.float32) -> Any:
    """A random model; every parameter and buffer differs from zero and from one another."""
    torch.manual_seed(0)
    if kind == "text":
        model = hf_model.MiniMaxM3VLForCausalLM(hf_config.MiniMaxM3VLTextConfig(**TEXT))
    else:
        whole = hf_config.MiniMaxM3VLConfig(text_config=TEXT, vision_config=VISION, projector_hidden_size=56)
        model = hf_model.MiniMaxM3SparseForConditionalGeneration(whole)
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            if tensor.is_floating_point() and not tensor.requires_grad:
                continue  # rotary tables; the selection bias is set below
            tensor.copy_(torch.randn(tensor.shape))
        for name, tensor in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                tensor.copy_(torch.randn(tensor.shape))
    return model.to(dtype)


def canonical(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The official tensors of an in-memory state dict, written out independently of m31's own mapping."""
    out: dict[str, torch.Tensor] = {}
    for name, value in state.items():
        name = name.replace("model.language_model.", "model.")
        vision = name.removeprefix("model.vision_tower.")
        projector = name.removeprefix("model.multi_modal_projector.")
        if vision != name:
            vision = vision.replace("embeddings.proj", "embeddings.patch_embedding")
            out["vision_tower.vision_model." + re.sub(r"^layers", "encoder.layers", vision)] = value
        elif projector != name:
            merged = projector.startswith("merge_")
            out[("patch_merge_mlp." if merged else "multi_modal_projector.") + projector.removeprefix("merge_")] = value
        elif name.endswith("mlp.experts.gate_up_proj"):
            stem = name.replace(".mlp.experts.gate_up_proj", ".block_sparse_moe.experts")
            for expert, both in enumerate(value):
                out[f"{stem}.{expert}.w1.weight"], out[f"{stem}.{expert}.w3.weight"] = both.chunk(2)
        elif name.endswith("mlp.experts.down_proj"):
            stem = name.replace(".mlp.experts.down_proj", ".block_sparse_moe.experts")
            for expert, down in enumerate(value):
                out[f"{stem}.{expert}.w2.weight"] = down
        else:
            name = name.replace("mlp.gate.e_score", "block_sparse_moe.e_score").replace(
                "mlp.gate.", "block_sparse_moe.gate."
            )
            name = name.replace("mlp.shared_experts", "block_sparse_moe.shared_experts")
            name = name.replace("self_attn.indexer.", "self_attn.index_")
            if name.endswith("gate_up_proj.weight"):
                for part, half in zip(("gate_proj", "up_proj"), value.chunk(2), strict=True):
                    out[name.replace("gate_up_proj", part)] = half
            else:
                out[name] = value
    return out


def assert_same(folder: Path, model: Any) -> Checkpoint:
    checkpoint = Checkpoint.open(folder)
    wanted = canonical(model.state_dict())
    assert set(checkpoint.names) == set(wanted)
    for name in checkpoint.names:
        loaded = checkpoint.tensor(name).load()
        assert loaded.dtype == wanted[name].dtype, name
        assert torch.equal(loaded, wanted[name]), name
    check_finite(checkpoint)
    return checkpoint


@pytest.mark.parametrize("kind", ["vl", "text"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shard", ["5GB", "200KB"])
def test_saved_folder_loads_unmodified(tmp_path: Path, kind: str, dtype: torch.dtype, shard: str) -> None:
    model = build(kind, dtype)
    model.save_pretrained(tmp_path, max_shard_size=shard)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (shard == "200KB")
    checkpoint = assert_same(tmp_path, model)
    described = checkpoint.config
    assert described.dialect == "transformers"
    assert described.dtype == str(dtype).removeprefix("torch.")
    assert checkpoint.dialect == ("official" if kind == "vl" else "transformers")
    assert (described.vision is not None) == (kind == "vl")
    text = described.text
    assert text.attention == ("full", "sparse", "sparse", "sparse")
    assert text.mlp == ("dense", "dense", "moe", "moe")
    assert (text.rope_theta, text.rotary_dim) == (1e7, 8)
    assert not [f for f in inspect(tmp_path, deep=True).suspicious if "NaN" in f or "zero" in f or "mixed" in f]


@pytest.mark.parametrize("kind", ["vl", "text"])
def test_in_memory_names_load_too(tmp_path: Path, kind: str) -> None:
    """A state dict dumped by hand keeps transformers' in-memory names: `model.language_model...`, stacked experts."""
    model = build(kind)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(tmp_path)
    save_file({name: t.contiguous() for name, t in model.state_dict().items()}, tmp_path / "model.safetensors")
    assert assert_same(tmp_path, model).dialect == "transformers"


def test_a_stack_of_the_wrong_height_is_refused(tmp_path: Path) -> None:
    build("text").save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_local_experts": 5}))
    with pytest.raises(UnexpectedTensor, match=r"model.layers.2.mlp.experts.*do not belong|do not belong.*mlp.experts"):
        Checkpoint.open(tmp_path)


def official(vision: bool) -> dict[str, Any]:
    """An official config of the same size as `TEXT`."""
    mapping = config.published("m3")
    same = {key: value for key, value in TEXT.items() if key in mapping["text_config"]}
    mapping["text_config"] |= same | {"moe_layer_freq": [0, 0, 1, 1], "rope_theta": 1e7}
    mapping["text_config"]["sparse_attention_config"] |= {
        "sparse_attention_freq": [0, 1, 1, 1],
        "sparse_disable_index_value": [0, 1, 1, 1],
        "sparse_num_index_heads": 2,
        "sparse_index_dim": 24,
        "sparse_topk_blocks": 3,
        "sparse_block_size": 4,
    }
    mapping["vision_config"] |= VISION | {"projection_dim": 64}
    mapping |= {"projector_hidden_size": 56, "torch_dtype": "float32"}
    text: dict[str, Any] = mapping["text_config"] | {"torch_dtype": "float32"}
    return mapping if vision else text


def test_transformers_reads_what_we_write_and_saves_it_back(tmp_path: Path) -> None:
    mapping = official(vision=True)
    parsed = config.parse(mapping, where="c")
    tensors = dict(random_tensors(parsed, seed=0, dtype=torch.float32))
    write(tmp_path / "ours", mapping, tensors.items(), max_shard_bytes=200_000, extra_files={})
    model, info = hf_model.MiniMaxM3SparseForConditionalGeneration.from_pretrained(
        tmp_path / "ours", output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    theirs = canonical(model.state_dict())
    assert theirs.keys() == tensors.keys()
    assert all(torch.equal(theirs[name], tensors[name]) for name in tensors)
    model.save_pretrained(tmp_path / "theirs")
    again = assert_same(tmp_path / "theirs", model).config
    assert again.dialect == "transformers"  # the official extras survive in the file and are accepted
    assert "use_gemma_norm" in json.loads((tmp_path / "theirs" / "config.json").read_text())["text_config"]
    assert again.text == parsed.text
    assert again.vision == parsed.vision


def test_both_dialects_describe_the_same_model(tmp_path: Path) -> None:
    build("text").save_pretrained(tmp_path)
    saved = config.load(tmp_path)
    ours = config.parse(official(vision=False), where="c")
    assert ours.text.num_mtp_layers == 1
    assert saved.text.attention == ours.text.attention
    assert saved.text.sparse == ours.text.sparse
    assert saved.text.moe == ours.text.moe
    assert list(expected(saved)) == list(expected(ours))
