"""`m31 inspect`: what it reports and what it finds suspicious."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_helpers import edit_config, tiny_config, tiny_folder

from m31 import config
from m31.checkpoint import Checkpoint, inspect, random_tensors, render, write
from m31.errors import NotACheckpoint

# MODEL.md §7.1; ids from 10 on, so that the media tokens have those of `tiny_config`.
SPECIAL = (
    *("]<]image[>[", "]<]video[>[", "]<]start of image[>[", "]<]end of image[>[", "]~b]", "[e~[", "]~!b["),
    *("]<]minimax[>[", "<mm:think>", "</mm:think>"),
)


@pytest.fixture
def ckpt(tmp_path: Path) -> Path:
    """A folder with nothing suspicious about it."""
    folder = tiny_folder(tmp_path / "ckpt", mapping=tiny_config())
    tokens = {str(n): {"content": name} for n, name in ((1, "<b>"), (2, "<e>"))}
    added = [{"id": 1, "content": "<b>"}, {"id": 2, "content": "<e>"}]
    added += [{"id": n, "content": name} for n, name in enumerate(SPECIAL, 10)]
    put(folder, "tokenizer.json", {"added_tokens": added})
    put(
        folder,
        "tokenizer_config.json",
        {"bos_token": "<b>", "eos_token": {"content": "<e>"}, "added_tokens_decoder": tokens},
    )
    put(folder, "generation_config.json", {"bos_token_id": 1, "eos_token_id": [2]})
    (folder / "chat_template.jinja").write_text("]~b]{{ messages }}[e~[")
    return folder


def put(folder: Path, name: str, content: dict[str, Any]) -> None:
    (folder / name).write_text(json.dumps(content))


def rewrite(folder: Path, target: Path, **replaced: torch.Tensor) -> Path:
    """A copy of the weights with some tensors replaced."""
    mapping = json.loads((folder / "config.json").read_text())
    checkpoint = Checkpoint.open(folder)
    tensors = ((name, replaced.get(name, checkpoint.tensor(name).load())) for name in checkpoint.names)
    write(target, mapping, tensors, max_shard_bytes=10**6, extra_files={})
    return target


def test_a_healthy_folder(ckpt: Path) -> None:
    found = inspect(ckpt, deep=True)
    assert found.suspicious == ()
    assert found.notes == ()
    assert found.architecture == "MiniMaxM3SparseForConditionalGeneration"
    assert (found.config_dialect, found.name_dialect) == ("official", "official")
    assert found.layers == "2 dense + 1 moe; 1 full + 2 sparse"
    assert found.weights == "plain"
    assert (found.vision, found.context) == (True, 512)
    checkpoint = Checkpoint.open(ckpt)
    loaded = [checkpoint.tensor(name).load() for name in checkpoint.names]
    assert found.logical == found.hub_elements == sum(t.numel() for t in loaded)
    assert found.stored_bytes == sum(t.nbytes for t in loaded) == sum(g.bytes for g in found.groups.values())
    assert found.tensors == len(loaded) == sum(found.dtypes.values())
    assert found.files == {p.name: p.stat().st_size for p in sorted(ckpt.glob("*.safetensors"))}
    # q, k, v, o; index q and k on two layers; two dense MLPs; one shared and two of four experts
    attention, index = 3 * (2 * 64 * 32 + 2 * 32 * 32), 2 * (32 * 32 + 16 * 32)
    assert found.active == attention + index + 2 * 3 * 48 * 32 + 3 * 24 * 32 + 2 * 3 * 24 * 32
    assert found.active_with_head == found.active + 64 * 32
    rows = {(r.main_format, r.index_format): (r.main, r.index) for r in found.kv_bytes_per_token}
    assert rows["bf16", "bf16"] == (3 * 2 * 2 * 16 * 2, 2 * 16 * 2)
    assert rows["nvfp4", "nvfp4"] == (3 * 2 * 2 * 9, 2 * 9)


def test_rendered_text(ckpt: Path) -> None:
    text = render(inspect(ckpt))
    for fragment in (
        str(ckpt),
        "MiniMaxM3SparseForConditionalGeneration (official config, official tensor names)",
        "2 dense + 1 moe; 1 full + 2 sparse; vision tower and projector",
        "logical",
        "active per token",
        "routed_experts",
        "bf16 + bf16 index",
        "nothing suspicious in config and headers (--deep also reads the weights)",
    ):
        assert fragment in text
    edit_config(ckpt, image_token_index=64)
    text = render(inspect(ckpt, deep=True))
    assert "suspicious:\n    - image_token_index 64 is outside the vocabulary of 64" in text
    assert "nothing suspicious" not in text


def test_dictionary_form_is_json_and_complete(ckpt: Path) -> None:
    data = json.loads(json.dumps(inspect(ckpt).to_dict()))
    assert data["kv_bytes_per_token"][0].keys() == {"main_format", "index_format", "main", "index", "total"}
    assert all(row["total"] == row["main"] + row["index"] for row in data["kv_bytes_per_token"])
    assert data["groups"]["router"]["tensors"] == 2
    assert data["suspicious"] == []


@pytest.mark.parametrize(
    ("name", "content", "fragment"),
    [
        ("tokenizer.json", None, "tokenizer.json is missing"),
        ("generation_config.json", None, "generation_config.json is missing"),
        ("tokenizer_config.json", None, "tokenizer_config.json is missing"),
        ("chat_template.jinja", None, "no chat template"),
        ("generation_config.json", "{", "generation_config.json is unusable"),
        (
            "generation_config.json",
            '{"bos_token_id": 1, "eos_token_id": [2, 3]}',
            "eos_token_id is 2 in config.json and 2 and 3 in generation_config.json",
        ),
        (
            "generation_config.json",
            '{"bos_token_id": 5}',
            "bos_token_id is 1 in config.json and 5 in generation_config",
        ),
        ("generation_config.json", '{"eos_token_id": [2, 64]}', "eos_token_id 64, outside the vocabulary of 64"),
        ("generation_config.json", '{"eos_token_id": "x"}', "gives eos_token_id 'x', which is no token id"),
        ("generation_config.json", '{"eos_token_id": true}', "gives eos_token_id True, which is no token id"),
        (
            "tokenizer_config.json",
            '{"eos_token": "<b>"}',
            "eos_token_id is 2 in config.json, but the tokenizer's '<b>' is 1",
        ),
        ("tokenizer_config.json", '{"eos_token": "<?>"}', "names the eos token '<?>', which no tokenizer file defines"),
    ],
)
def test_companion_files(ckpt: Path, name: str, content: str | None, fragment: str) -> None:
    if content is None:
        (ckpt / name).unlink()
    else:
        (ckpt / name).write_text(content)
    found = inspect(ckpt).suspicious
    assert any(fragment in finding for finding in found), found


def test_template_inside_tokenizer_config_counts(ckpt: Path) -> None:
    (ckpt / "chat_template.jinja").unlink()
    put(ckpt, "tokenizer_config.json", {"chat_template": "]~b] [e~["})
    assert inspect(ckpt).suspicious == ()


def test_config_findings(ckpt: Path) -> None:
    mapping = json.loads((ckpt / "config.json").read_text())
    mapping["text_config"] |= {"rope_theta": 10.0, "max_position_embeddings": 4096, "eos_token_id": None}
    put(ckpt, "config.json", mapping | {"torch_dtype": "bfloat16"})
    found = inspect(ckpt).suspicious
    assert any(
        "the slowest rotary angle repeats after 35 tokens, before max_position_embeddings 4,096" in f for f in found
    )
    assert "config.json has no eos_token_id: only --max-tokens ends a generation" in found
    assert any("config.json declares bfloat16, but" in f for f in found)


def test_published_rope_is_not_suspicious() -> None:
    for name in ("m3.1-flash", "m3"):
        text = config.parse(config.published(name), where="c").text  # type: ignore[arg-type]
        assert 6.28 * text.rope_theta ** ((text.rotary_dim - 2) / text.rotary_dim) > text.max_position


def test_mixed_dtypes(ckpt: Path, tmp_path: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    half = Checkpoint.open(ckpt).tensor(name).load().bfloat16()
    found = inspect(rewrite(ckpt, tmp_path / "mixed", **{name: half})).suspicious
    assert "BF16 and F32 are mixed within: dense_mlp" in found
    assert "config.json declares float32, but 1 tensors are stored otherwise" in found


def test_deep_scan(ckpt: Path, tmp_path: Path) -> None:
    replaced = {
        "model.layers.0.mlp.up_proj.weight": torch.zeros(48, 32),
        "model.layers.0.mlp.gate_proj.weight": torch.full((48, 32), 0.25),
        "model.layers.1.input_layernorm.weight": torch.linspace(0.9, 1.1, 32),
        "model.layers.1.mlp.up_proj.weight": torch.randn(48, 32).index_fill(1, torch.tensor(3), float("inf")),
    }
    folder = rewrite(ckpt, tmp_path / "deep", **replaced)
    shallow = inspect(folder).suspicious
    found = set(inspect(folder, deep=True).suspicious) - set(shallow)
    assert found == {
        "1 tensors hold NaN or infinity: 'model.layers.1.mlp.up_proj.weight' (inf at flat index 3)",
        "1 tensors are all zero: model.layers.0.mlp.up_proj.weight",
        "1 tensors hold one value only: model.layers.0.mlp.gate_proj.weight",
        "1 tensors average above 0.75: the +1 of the Gemma norm may be baked in already: "
        "model.layers.1.input_layernorm.weight",
    }


def test_stray_files_appear_in_the_notes(ckpt: Path) -> None:
    (ckpt / "extra.safetensors").write_bytes(b"junk")
    found = inspect(ckpt)
    assert found.notes == ("ignored extra.safetensors: the index does not name them",)
    assert "notes:\n    - ignored extra.safetensors" in render(found)


def test_errors_pass_through(tmp_path: Path) -> None:
    with pytest.raises(NotACheckpoint, match="does not exist"):
        inspect(tmp_path / "absent")


def test_bfloat16_model_with_float32_router_is_normal(tmp_path: Path) -> None:
    mapping = tiny_config(vision=False, torch_dtype="bfloat16") | {"torch_dtype": "bfloat16"}
    tensors = random_tensors(config.parse(mapping, where="c"), seed=0, dtype=torch.bfloat16)
    write(tmp_path / "x", mapping, tensors, max_shard_bytes=10**6, extra_files={})
    found = inspect(tmp_path / "x")
    assert found.dtypes.keys() == {"BF16", "F32"}
    assert not [finding for finding in found.suspicious if "mixed" in finding or "declares" in finding]
