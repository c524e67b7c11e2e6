"""`m31 inspect` of quantised folders: formats per group, the draft head, scales that do not fit their codes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.quantised import (
    EXPERTS,
    bf16_config,
    draft_config,
    draft_weights,
    save,
    stored_tensors,
    to_modelopt,
    write_draft,
    write_modelopt,
    write_quantised,
)

from m31.checkpoint import Checkpoint, QuantizedTensor, inspect, render
from m31.formats import mxfp8, nvfp4

EXPERT = "model.layers.2.block_sparse_moe.experts.1.w2"
LINEAR = "model.layers.1.self_attn.q_proj"


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_quantised(tmp_path_factory.mktemp("flash") / "ckpt", bf16_config(), "m31", shard=10**9).folder
    (folder / "model.safetensors.index.json").unlink()
    next(folder.glob("model-*.safetensors")).rename(folder / "model.safetensors")
    write_draft(folder / "dspark")
    return folder


@pytest.fixture
def ckpt(template: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(template, tmp_path / "ckpt"))


def changed(folder: Path, **stored: torch.Tensor) -> set[str]:
    """Deep findings that replacing stored tensors adds."""
    before = set(inspect(folder, deep=True).suspicious)
    tensors = stored_tensors(Checkpoint.open(folder)) | stored
    save(folder / "model.safetensors", tensors)
    return set(inspect(folder, deep=True).suspicious) - before


def test_formats_and_draft_head(ckpt: Path) -> None:
    found = inspect(ckpt, deep=True)
    assert found.weights == "mxfp8 linears, nvfp4 experts"
    assert found.quantization == {
        "routed_experts": {"nvfp4": EXPERTS * 3},
        "attention": {"mxfp8": 12},
        "index": {"mxfp8": 6},
        "dense_mlp": {"mxfp8": 6},
        "shared_experts": {"mxfp8": 3},
        "embeddings": {"plain": 2},
        "router": {"plain": 2},
        "norms": {"plain": 3 * 6 + 1},
    }
    assert found.draft is not None
    assert (found.draft.layers, found.draft.block_size, found.draft.target_layer_ids) == (2, 7, (0, 2))
    assert found.draft.quantization["attention"] == {"mxfp8": 8}
    assert not [text for text in found.suspicious if "quantised" in text or "draft" in text or "scale" in text]
    packed = sum(t.numel() for n, t in stored_tensors(Checkpoint.open(ckpt)).items() if n.endswith("_packed"))
    assert found.groups["routed_experts"].logical == 2 * packed
    routed_bytes_once = found.logical - found.groups["routed_experts"].logical + packed
    assert found.hub_elements == routed_bytes_once
    text = render(found)
    for fragment in (
        "12 nvfp4",
        "draft head    2 layers, 7 tokens a block, reads the target's layers 0, 2",
        f"in {found.draft.tensors} tensors: 14 mxfp8, 15 plain",
    ):
        assert fragment in text
    data = json.loads(json.dumps(found.to_dict()))
    assert data["draft"]["target_layer_ids"] == [0, 2]
    assert data["quantization"]["index"] == {"mxfp8": 6}


def test_format_of_every_kind_of_module(ckpt: Path) -> None:
    """Of q_proj as of experts and norms, one line of JSON each; the text names them by group and format."""
    stem, moe, dense = "model.layers.*.self_attn", "model.layers.*.block_sparse_moe", "model.layers.*.mlp"
    found = inspect(ckpt)
    assert found.modules == {
        "routed_experts": {f"{moe}.experts.*.{name}": {"nvfp4": EXPERTS} for name in ("w1", "w3", "w2")},
        "attention": {f"{stem}.{name}_proj": {"mxfp8": 3} for name in ("q", "k", "v", "o")},
        "index": {f"{stem}.index_{name}_proj": {"mxfp8": 3} for name in ("q", "k")},
        "dense_mlp": {f"{dense}.{name}_proj": {"mxfp8": 2} for name in ("gate", "up", "down")},
        "shared_experts": {f"{moe}.shared_experts.{name}_proj": {"mxfp8": 1} for name in ("gate", "up", "down")},
        "embeddings": {"model.embed_tokens": {"BF16": 1}, "lm_head": {"BF16": 1}},
        "router": {f"{moe}.{name}": {"F32": 1} for name in ("gate", "e_score_correction_bias")},
        "norms": {
            "model.layers.*.input_layernorm": {"BF16": 3},
            **{f"{stem}.{name}_norm": {"BF16": 3} for name in ("q", "k", "index_q", "index_k")},
            "model.layers.*.post_attention_layernorm": {"BF16": 3},
            "model.norm": {"BF16": 1},
        },
    }
    assert found.draft is not None
    assert found.draft.modules["attention"]["dspark.layers.*.decoder_layer.self_attn.q_proj"] == {"mxfp8": 2}
    assert json.loads(json.dumps(found.to_dict()))["modules"] == found.modules
    lines = render(found).splitlines()
    for line in (
        "  routed_experts  nvfp4: w1, w3, w2",
        "  attention       mxfp8: q_proj, k_proj, v_proj, o_proj",
        "  dense_mlp       mxfp8: gate_proj, up_proj, down_proj",
        "  embeddings      BF16: embed_tokens, lm_head",
        "  router          F32: gate, e_score_correction_bias",
        "  norms           BF16: input_layernorm, q_norm, k_norm, index_q_norm, index_k_norm, "
        "post_attention_layernorm, norm",
    ):
        assert line in lines


def test_formats_that_differ_from_layer_to_layer_are_counted(ckpt: Path) -> None:
    """Published builds keep some index projections in BF16 (MODEL.md §3.7)."""
    tensors = stored_tensors(Checkpoint.open(ckpt))
    name = "model.layers.1.self_attn.index_q_proj.weight"
    tensors[name] = mxfp8.decode(tensors[name], tensors.pop(f"{name}_scale_inv")).bfloat16()
    save(ckpt / "model.safetensors", tensors)
    found = inspect(ckpt)
    assert found.modules["index"]["model.layers.*.self_attn.index_q_proj"] == {"BF16": 1, "mxfp8": 2}
    lines = render(found).splitlines()
    assert "  index           BF16: index_q_proj (1 of 3)" in lines
    assert "                  mxfp8: index_q_proj (2 of 3), index_k_proj" in lines


def test_modules_of_the_vision_tower(tmp_path: Path) -> None:
    found = inspect(write_quantised(tmp_path / "x", bf16_config(vision=True), "m31").folder)
    tower = "vision_tower.vision_model"
    assert found.modules["vision"][f"{tower}.encoder.layers.*.self_attn.q_proj"] == {"BF16": 1}
    assert not [name for kinds in found.modules.values() for name in kinds if name.endswith((".weight", ".bias"))]
    assert (
        "  projector       BF16: multi_modal_projector.linear_1, multi_modal_projector.linear_2, "
        "patch_merge_mlp.linear_1, patch_merge_mlp.linear_2"
    ) in render(found).splitlines()


def test_unusable_draft_is_a_finding(ckpt: Path) -> None:
    (ckpt / "dspark" / "config.json").write_text(json.dumps(draft_config(vocab_size=65)))
    found = inspect(ckpt)
    assert found.draft is None
    assert any(text.startswith("dspark/ is unusable: ") and "vocabulary 65" in text for text in found.suspicious)


def test_modelopt_is_named(ckpt: Path, tmp_path: Path) -> None:
    folder = write_modelopt(tmp_path / "m", bf16_config(), to_modelopt(stored_tensors(Checkpoint.open(ckpt))))
    assert inspect(folder).weights == "mxfp8 linears, nvfp4 experts (ModelOpt's names and scales)"


def test_inverted_global_scale(ckpt: Path) -> None:
    """BUG-42: a decode scale where an encode scale belongs."""
    scale = Checkpoint.open(ckpt).stored(f"{EXPERT}.weight_global_scale").load().clone()
    assert changed(ckpt, **{f"{EXPERT}.weight_global_scale": 1 / scale}) == {
        "1 quantised weights decode to implausibly large or small values: is the global scale inverted?: "
        f"{EXPERT}.weight"
    }


@pytest.mark.parametrize("value", [0.0, float("inf"), -1.0])
@pytest.mark.parametrize("part", ["weight_global_scale", "input_global_scale"])
def test_global_scale_that_cannot_be_divided_by(ckpt: Path, part: str, value: float) -> None:
    found = changed(ckpt, **{f"{EXPERT}.{part}": torch.tensor([value])})
    assert any("1 quantised weights have a global scale that cannot be divided by" in text for text in found)


def test_range_that_is_not_used(ckpt: Path) -> None:
    scale = Checkpoint.open(ckpt).stored(f"{EXPERT}.weight_scale").load()
    halved = (scale.float() / 2).to(torch.float8_e4m3fn)
    assert any("do not use the range" in text for text in changed(ckpt, **{f"{EXPERT}.weight_scale": halved}))


@pytest.mark.parametrize("smaller", ["w1", "w3"])
def test_gate_and_up_under_one_global_scale(ckpt: Path, smaller: str) -> None:
    """A joint amax is legal and what a fused kernel wants: one of the two then stays away from 2688."""
    stem, larger = EXPERT.removesuffix("w2"), {"w1": "w3", "w3": "w1"}[smaller]
    before, checkpoint = set(inspect(ckpt, deep=True).suspicious), Checkpoint.open(ckpt)
    tensors = stored_tensors(checkpoint)
    joint = nvfp4.global_scale(checkpoint.tensor(f"{stem}{larger}.weight").load().abs().max())
    weight = checkpoint.tensor(f"{stem}{smaller}.weight").load() / 4
    small, large = nvfp4.encode(weight, joint), nvfp4.encode(checkpoint.tensor(f"{stem}{larger}.weight").load(), joint)
    for which, encoded in ((smaller, small), (larger, large)):
        tensors[f"{stem}{which}.weight_packed"], tensors[f"{stem}{which}.weight_scale"] = encoded[:2]
        tensors[f"{stem}{which}.weight_global_scale"] = joint
    save(ckpt / "model.safetensors", tensors)
    assert set(inspect(ckpt, deep=True).suspicious) - before == set()
    # Under a G of its own, however close, it is a finding; and so is a pair of which neither uses the range.
    text = "do not use the range that their global scale gives (largest code times block scale is not 2688): "
    tensors[f"{stem}{smaller}.weight_global_scale"] = joint.nextafter(torch.zeros(1))
    save(ckpt / "model.safetensors", tensors)
    assert f"1 quantised weights {text}{stem}{smaller}.weight" in inspect(ckpt, deep=True).suspicious
    for which in (smaller, larger):
        scale = tensors[f"{stem}{which}.weight_scale"]
        tensors[f"{stem}{which}.weight_scale"] = (scale.float() / 2).to(torch.float8_e4m3fn)
        tensors[f"{stem}{which}.weight_global_scale"] = joint
    save(ckpt / "model.safetensors", tensors)
    pair = f"{stem}w1.weight, {stem}w3.weight"
    assert f"2 quantised weights {text}{pair}" in inspect(ckpt, deep=True).suspicious


def test_zero_and_negative_block_scales(ckpt: Path) -> None:
    scale = Checkpoint.open(ckpt).stored(f"{EXPERT}.weight_scale").load().clone()
    scale.view(torch.uint8)[3, 1] = 0
    found = changed(ckpt, **{f"{EXPERT}.weight_scale": scale})
    assert f"1 quantised weights have codes under a block scale of zero, which decode to zero: {EXPERT}.weight" in found
    scale.view(torch.uint8)[3, 1] = 0x80 | 0x30
    found = changed(ckpt, **{f"{EXPERT}.weight_scale": scale})
    assert f"1 quantised weights have negative block scales: {EXPERT}.weight" in found


def test_non_finite_scales(ckpt: Path) -> None:
    for name in (f"{LINEAR}.weight_scale_inv", f"{EXPERT}.weight_scale"):
        scale = Checkpoint.open(ckpt).stored(name).load().clone()
        scale.view(torch.uint8)[0, 1] = 255
        found = changed(ckpt, **{name: scale})
        assert any(f"hold NaN or infinity: '{name}' (nan at flat index 1)" in text for text in found)
        scale.view(torch.uint8)[0, 1] = 120
        changed(ckpt, **{name: scale})


def test_exponents_that_were_rounded_down(ckpt: Path) -> None:
    """Real weights, scales one exponent too low: values of the upper half octave are clipped."""
    tensor = Checkpoint.open(ckpt).tensor(f"{LINEAR}.weight")
    assert isinstance(tensor, QuantizedTensor)
    weight = tensor.load()
    blocks = weight.unflatten(-1, (-1, 32))
    exponent = torch.floor(torch.log2(blocks.abs().amax(-1))) - 8
    codes = (blocks * torch.exp2(-exponent).unsqueeze(-1)).clamp(-448, 448).to(torch.float8_e4m3fn).flatten(-2)
    found = changed(
        ckpt,
        **{f"{LINEAR}.weight": codes, f"{LINEAR}.weight_scale_inv": (exponent + 127).to(torch.uint8)},
    )
    assert any(
        "reach the largest code in far more blocks" in text and text.endswith("saturated: " + LINEAR + ".weight")
        for text in found
    )
    healthy = mxfp8.encode(torch.randn(4096, 64))
    share = ((healthy.codes.view(torch.uint8) & 0x7F).unflatten(-1, (-1, 32)).amax(-1) == 0x7E).float().mean()
    assert 0.01 < float(share) < 0.1


def test_saturated_nvfp4(ckpt: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"{EXPERT}.weight_scale"
    scale = torch.full_like(Checkpoint.open(ckpt).stored(name).load().float(), 448.0).to(torch.float8_e4m3fn)
    assert changed(ckpt, **{name: scale}) == set()  # 128 blocks are too few for a verdict
    monkeypatch.setattr("m31.checkpoint.deep._FEW", 100)
    found = inspect(ckpt, deep=True).suspicious
    assert any("have the largest block scale in more than 5% of their blocks" in text for text in found)


def test_draft_weights_are_scanned(ckpt: Path) -> None:
    weights = draft_weights(draft_config())
    weights["dspark.hidden_norm.weight"][3] = float("nan")
    save(ckpt / "dspark" / "model.safetensors", weights)
    assert any(text.startswith("draft head: 1 tensors hold NaN") for text in inspect(ckpt, deep=True).suspicious)


# --- tokenizer and template -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("files", "text"),
    [
        (
            {"tokenizer.json": {}},
            "the tokenizer lacks 6 of this model's special tokens: ]~b], [e~[, ]~!b[, ]<]minimax[>[",
        ),
        (
            {"tokenizer.json": {"added_tokens": [{"id": 64, "content": "]~b]"}]}},
            "special tokens outside the vocabulary of 64: ]~b]",
        ),
        (
            {"chat_template.jinja": "]~b]"},
            "the chat template does not mention '[e~[', which delimit its messages",
        ),
    ],
)
def test_tokens_and_template(ckpt: Path, files: dict[str, Any], text: str) -> None:
    for name, content in files.items():
        (ckpt / name).write_text(content if isinstance(content, str) else json.dumps(content))
    assert any(text in finding for finding in inspect(ckpt).suspicious), inspect(ckpt).suspicious
