"""Quantised checkpoints: what is written, what is read back, logical tensors, and ModelOpt's dialect."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support import plain_reader
from tests.support.quantised import (
    EXPERTS,
    MODELOPT_SECTION,
    bf16_config,
    bf16_weights,
    save,
    stored_tensors,
    to_modelopt,
    write_modelopt,
    write_quantised,
)

from m31 import config
from m31.checkpoint import (
    Checkpoint,
    GlobalScale,
    QuantizedTensor,
    default_input_scale,
    encoded,
    expected,
    target_config,
)
from m31.errors import (
    CheckpointError,
    ConfigError,
    MissingTensor,
    NonFiniteWeight,
    OpRefused,
    UnsupportedFeature,
    WrongDtype,
)
from m31.formats import mxfp8, nvfp4

EXPERT = "model.layers.2.block_sparse_moe.experts.1.w2.weight"
LINEAR = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def flash(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return write_quantised(tmp_path_factory.mktemp("flash") / "ckpt", bf16_config(), "m31")


@pytest.fixture(scope="module")
def flash_weights() -> dict[str, torch.Tensor]:
    return bf16_weights(bf16_config())


# --- written by the rules, read back exactly ------------------------------------------------------------------------


def test_codes_and_scales_are_those_of_the_rules(flash: Checkpoint, flash_weights: dict[str, torch.Tensor]) -> None:
    kinds: Counter[str] = Counter()
    for name in flash.names:
        tensor, weight = flash.tensor(name), flash_weights[name]
        kinds[tensor.format] += 1
        assert tensor.shape == tuple(weight.shape)
        if not isinstance(tensor, QuantizedTensor):
            assert torch.equal(tensor.load().float(), weight.float()), name
            continue
        parts = {role: part.load() for role, part in tensor.parts().items()}
        if tensor.format == "mxfp8":
            codes, scale = mxfp8.encode(weight.float())
            assert torch.equal(parts["codes"].view(torch.uint8), codes.view(torch.uint8))
            assert torch.equal(parts["scale"], scale)
            assert parts["scale"].dtype == torch.uint8
            decoded = mxfp8.decode(codes, scale, torch.float32)
        else:
            packed, block, overall = nvfp4.encode(weight.float())
            assert torch.equal(parts["packed"], packed)
            assert torch.equal(parts["scale"].view(torch.uint8), block.view(torch.uint8))
            assert torch.equal(parts["global_scale"], overall)
            assert torch.equal(overall, torch.tensor([2688.0]) / weight.float().abs().max())
            assert float(parts["input_global_scale"]) == (48.0 if ".w2." in name else 1.0)
            decoded = nvfp4.decode(packed, block, overall, torch.float32)
        assert tensor.load().dtype == tensor.dtype == torch.float32
        assert torch.equal(tensor.load(), decoded)
    assert kinds["nvfp4"] == EXPERTS * 3
    assert kinds["mxfp8"] == 3 * 6 + 2 * 3 + 3
    assert set(flash.names) == set(flash_weights)


@pytest.mark.parametrize(("name", "target"), [("m3.1-flash", "m31"), ("m3", "m3-mxfp8"), ("m3", "bf16")])
def test_a_script_with_safetensors_alone_reads_the_folder(tmp_path: Path, name: Any, target: Any) -> None:
    """Names, dtypes and shapes of MODEL.md §4, written out here and not taken from the inventory."""
    folder = write_quantised(tmp_path / "x", bf16_config(vision=True, name=name), target).folder
    script = [sys.executable, "-I", plain_reader.__file__, str(folder)]
    found = json.loads(subprocess.run(script, check=True, capture_output=True, text=True).stdout)
    assert found["bytes"] == found["claimed"] == Checkpoint.open(folder).total_bytes
    tensors = found["tensors"]
    layer = "language_model.model.layers.2"
    want: dict[str, list[Any]] = {
        "language_model.lm_head.weight": ["BF16", [64, 64]],
        "language_model.model.norm.weight": ["BF16", [64]],
        f"{layer}.block_sparse_moe.gate.weight": ["F32", [4, 64]],
        f"{layer}.block_sparse_moe.e_score_correction_bias": ["F32", [4]],
        f"{layer}.self_attn.index_q_norm.weight": ["BF16", [32]],
        "vision_tower.vision_model.pre_layrnorm.bias": ["BF16", [16]],
        "patch_merge_mlp.linear_1.weight": ["BF16", [20, 256]],
    }
    linears = {
        f"{layer}.self_attn.o_proj": [64, 128],
        f"{layer}.self_attn.index_k_proj": [32, 64],
        f"{layer}.block_sparse_moe.shared_experts.down_proj": [64, 32],
        "language_model.model.layers.0.mlp.up_proj": [96, 64],
    }
    experts = {f"{layer}.block_sparse_moe.experts.3.{m}": s for m, s in (("w1", [32, 64]), ("w2", [64, 32]))}
    mx = linears if target == "m31" else linears | experts
    for module, (out, width) in (mx if target != "bf16" else {}).items():
        want |= {
            f"{module}.weight": ["F8_E4M3", [out, width]],
            f"{module}.weight_scale_inv": ["U8", [out, width // 32]],
        }
    for module, (out, width) in (experts if target == "m31" else {}).items():
        want |= {
            f"{module}.weight_packed": ["U8", [out, width // 2]],
            f"{module}.weight_scale": ["F8_E4M3", [out, width // 16]],
            f"{module}.weight_global_scale": ["F32", [1]],
            f"{module}.input_global_scale": ["F32", [1]],
        }
    for module, shape in (linears | experts if target == "bf16" else {}).items():
        want[f"{module}.weight"] = ["BF16", shape]
    assert {name: tensors[name] for name in want} == want
    per = {"m31": 4, "m3-mxfp8": 2, "bf16": 1}[target]
    assert sum(".experts." in name for name in tensors) == EXPERTS * 3 * per
    if name == "m3":  # no index branch on the full-attention layer
        assert not [n for n in tensors if "layers.0.self_attn.index" in n]


def test_published_inventory_is_what_would_be_written() -> None:
    """The rules at full size: MODEL.md §4.1 counts and §3.7 bytes, from the config that `convert` makes."""
    source = config.published("m3.1-flash")
    del source["quantization_config"]
    _, model = target_config(source, config.parse(source, where="c"), "m31")
    declared = expected(model)
    assert len(declared) == 89_632
    assert sum(".experts." in name for name in declared) == 87_552
    assert round(sum(decl.stored_bytes for decl in declared.values()) / 1e9, 3) == 250.100
    assert default_input_scale(model.text, "model.layers.3.block_sparse_moe.experts.0.w2.weight") == 48.0


def test_calibrated_input_scales(tmp_path: Path) -> None:
    mapping = bf16_config()
    model = config.parse(mapping, where="c")
    _, described = target_config(mapping, model, "m31")
    stored = dict(encoded(described, bf16_weights(mapping).items(), input_scales={EXPERT: 3.5}))
    assert float(stored[EXPERT.removesuffix("weight") + "input_global_scale"]) == 3.5
    for scales, text in (
        (
            {"model.norm.weight": 1.0},
            "an input scale is given for 'model.norm.weight'; expected logical names of NVFP4",
        ),
        ({EXPERT: 0.0}, "is 0.0; expected a finite number above zero"),
        ({EXPERT: float("nan")}, "is nan; expected a finite number above zero"),
    ):
        with pytest.raises(CheckpointError, match=text):
            dict(encoded(described, [], input_scales=scales))


@pytest.mark.parametrize(
    "scale",
    [1e-50, 1e-40, 2.9e-39, 3.5e38, 1e39, 10**400, -(10**400), 10**5000],
    ids=lambda scale: f"{scale:g}" if isinstance(scale, float) else "digits",
)
def test_an_input_scale_that_float32_cannot_hold_or_divide_by_is_refused(scale: float) -> None:
    """The file holds float32 and FC2 divides by it: 1e-50 would be stored as 0, 1e39 as infinity, 1 / 1e-40 is one."""
    mapping = bf16_config()
    _, described = target_config(mapping, config.parse(mapping, where="c"), "m31")
    with pytest.raises(CheckpointError, match=rf"input_scales: the input scale of '{EXPERT}' is .*reciprocal"):
        dict(encoded(described, [], input_scales={EXPERT: scale}))


@pytest.mark.parametrize("scale", [True, "1", None, [1.0], torch.tensor(1.0)])
def test_an_input_scale_that_is_no_number_is_refused(scale: Any) -> None:
    mapping = bf16_config()
    _, described = target_config(mapping, config.parse(mapping, where="c"), "m31")
    with pytest.raises(CheckpointError, match=rf"the input scale of '{EXPERT}' is .*; expected a finite number"):
        dict(encoded(described, [], input_scales={EXPERT: scale}))


@pytest.mark.parametrize(("limit", "beta"), [(1e-40, 1.0), (1e30, 1.0), (1e-300, 0.0), (1e300, 1.0)])
def test_a_default_input_scale_that_float32_cannot_hold_is_refused(limit: float, beta: float) -> None:
    """Without calibration the rule of the activation decides; an absurd limit must not become an infinite scale."""
    text = config.parse(bf16_config(), where="c").text
    activation = dataclasses.replace(text.activation, limit=limit, beta=beta)
    with pytest.raises(OpRefused, match=r"no default input scale .* limit .* and beta .*use calibrated scales"):
        default_input_scale(dataclasses.replace(text, activation=activation), EXPERT)


@pytest.mark.parametrize("part", ["global_scale", "input_global_scale"])
def test_a_stored_scale_whose_reciprocal_is_infinite_is_refused(tmp_path: Path, part: str) -> None:
    source = write_quantised(tmp_path / "s", bf16_config(), "m31", shard=10**9)
    tensors = stored_tensors(source)
    stored = EXPERT.removesuffix("weight") + ("weight_" * (part == "global_scale")) + part
    tensors[stored].fill_(1e-40)
    for path in source.folder.glob("*.safetensors*"):
        path.unlink()
    save(source.folder / "model.safetensors", tensors)
    with pytest.raises(NonFiniteWeight, match=rf"'{stored}' holds 9\.999\d*e-41; .*whose reciprocal is finite"):
        Checkpoint.open(source.folder).tensor(EXPERT).parts()[part].load()


def test_weights_that_cannot_be_encoded_are_named() -> None:
    mapping = bf16_config()
    _, described = target_config(mapping, config.parse(mapping, where="c"), "m31")
    for name in (LINEAR, EXPERT, "model.norm.weight"):
        weight = bf16_weights(mapping)[name].clone()
        weight.view(-1)[40] = float("inf")
        with pytest.raises(NonFiniteWeight, match=rf"'{name}' holds inf at flat index 40 of shape"):
            dict(encoded(described, [(name, weight)], input_scales={}))
    huge = torch.full((64,), 3.4e38)
    with pytest.raises(NonFiniteWeight, match=r"flat index 0 of shape \[64\], which bfloat16 cannot hold"):
        dict(encoded(described, [("model.norm.weight", huge)], input_scales={}))
    with pytest.raises(WrongDtype, match="is F16; expected BF16 or F32"):
        dict(encoded(described, [("model.norm.weight", huge.half())], input_scales={}))


# --- logical tensors ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [LINEAR, EXPERT])
@pytest.mark.parametrize("ways", [1, 2, 4, 8])
def test_codes_scales_and_global_are_sliced_together(flash: Checkpoint, name: str, ways: int) -> None:
    """BUG-37: gather(shards) == full, along outputs and along whole blocks of inputs."""
    whole = flash.tensor(name)
    full = whole.load()
    rows = full.shape[0] // ways
    shards = [whole.slice(0, r * rows, (r + 1) * rows) for r in range(ways)]
    assert torch.equal(torch.cat([shard.load() for shard in shards]), full)
    assert all(shard.shape == (rows, full.shape[1]) for shard in shards)
    assert isinstance(whole, QuantizedTensor)
    block = 32 if whole.format == "mxfp8" else 16
    columns = [whole.slice(1, at, at + block) for at in range(0, full.shape[1], block)]
    assert torch.equal(torch.cat([column.load() for column in columns], dim=1), full)
    both = whole.slice(0, 3, 9).slice(1, block, 2 * block)
    assert torch.equal(both.load(), full[3:9, block : 2 * block])
    with pytest.raises(CheckpointError, match=f"slice 8:{block} of the inputs cuts a block; expected multiples of"):
        whole.slice(1, 8, block)
    with pytest.raises(CheckpointError, match=r"no slice 0:1 of dimension 2 in \["):
        whole.slice(2, 0, 1)


def test_parts_are_in_place_and_named(flash: Checkpoint) -> None:
    linear, expert, norm = (flash.tensor(n) for n in (LINEAR, EXPERT, "model.norm.weight"))
    assert isinstance(linear, QuantizedTensor)
    assert isinstance(expert, QuantizedTensor)
    assert list(linear.parts()) == ["codes", "scale"]
    assert list(expert.parts()) == ["packed", "scale", "global_scale", "input_global_scale"]
    assert {role: part.name for role, part in norm.parts().items()} == {"weight": "model.norm.weight"}
    codes = linear.parts()["codes"]
    assert codes.load().data_ptr() == linear.parts()["codes"].load().data_ptr()
    assert (linear.stored_dtype, expert.stored_dtype, norm.format) == ("F8_E4M3", "U8", "plain")
    assert linear.nbytes == 128 * 64 + 128 * 2
    assert expert.nbytes == 64 * 16 + 64 * 2 + 4 + 4
    assert expert.path.parent == flash.folder


def test_a_part_is_no_weight(flash: Checkpoint) -> None:
    name = f"{LINEAR}_scale_inv"
    with pytest.raises(MissingTensor, match=f"has no weight '{name}'; it is a part of a quantised weight"):
        flash.tensor(name)
    assert flash.stored(name).shape == (128, 2)
    with pytest.raises(MissingTensor, match=r"has no tensor 'model.layers.1.self_attn.q_proj.weigh'; did you mean"):
        flash.stored(LINEAR[:-1])


# --- ModelOpt -------------------------------------------------------------------------------------------------------


def test_both_dialects_of_one_tensor_decode_alike(tmp_path: Path, flash: Checkpoint) -> None:
    """BUG-42, BUG-43, BUG-44: same codes under two sets of names, reciprocal scales, shapes [1] and ()."""
    folder = write_modelopt(tmp_path / "m", bf16_config(), to_modelopt(stored_tensors(flash)))
    other = Checkpoint.open(folder)
    assert other.names == flash.names
    differing = 0
    for name in flash.names:
        ours, theirs = flash.tensor(name), other.tensor(name)
        assert ours.format == theirs.format
        if not isinstance(theirs, QuantizedTensor) or theirs.format == "mxfp8":
            assert torch.equal(ours.load(), theirs.load()), name
            continue
        parts = theirs.parts()
        scale = parts["global_scale"]
        assert isinstance(scale, GlobalScale)
        assert scale.shape == (1,)
        # The encode scale that both stand for differs by the double reciprocal: an ULP at most.
        a, b = ours.parts()["global_scale"].load(), scale.load()
        assert abs(int(a.view(torch.int32)) - int(b.view(torch.int32))) <= 1
        assert b == 1.0 / scale.stored.load()
        # Bit for bit what decoding with this G gives, and within an ULP of multiplying by the stored scale.
        block = nvfp4.decode(parts["packed"].load(), parts["scale"].load(), torch.ones(1), torch.float32)
        assert torch.equal(theirs.load(), block / b)
        direct = block * scale.stored.load()
        assert torch.allclose(theirs.load(), direct, rtol=2.0**-22, atol=0)
        differing += not torch.equal(theirs.load(), direct)
        assert torch.allclose(theirs.load(), ours.load(), rtol=2.0**-22, atol=0)
    # A power of two has an exact reciprocal: there both dialects agree bit for bit.
    exact = {
        n: torch.full_like(t, 64.0) if n.endswith("_global_scale") else t for n, t in stored_tensors(flash).items()
    }
    save(folder / "model.safetensors", to_modelopt(exact))
    one = Checkpoint.open(folder).tensor(EXPERT)
    packed, scales = exact[f"{EXPERT}_packed"], exact[f"{EXPERT}_scale"]
    assert torch.equal(one.load(), nvfp4.decode(packed, scales, torch.tensor([64.0]), torch.float32))


def test_modelopt_linears_may_be_bf16(tmp_path: Path, flash: Checkpoint) -> None:
    tensors = to_modelopt(stored_tensors(flash))
    del tensors[LINEAR.replace(".weight", ".weight_scale")]
    tensors[LINEAR] = bf16_weights(bf16_config())[LINEAR]
    checkpoint = Checkpoint.open(write_modelopt(tmp_path / "m", bf16_config(), tensors))
    assert checkpoint.tensor(LINEAR).format == "plain"
    assert checkpoint.notes == ("1 linear layers are stored unquantised",)


def test_modelopt_linears_in_another_format_are_refused(tmp_path: Path, flash: Checkpoint) -> None:
    """Per-tensor FP8 has the same names and another meaning: F32 scales."""
    tensors = to_modelopt(stored_tensors(flash))
    tensors[LINEAR.replace(".weight", ".weight_scale")] = torch.ones(())
    with pytest.raises(CheckpointError, match=r"do not belong to this architecture: '.*q_proj.weight_scale'"):
        Checkpoint.open(write_modelopt(tmp_path / "m", bf16_config(), tensors))


def test_official_names_in_a_modelopt_folder_are_not_misread(tmp_path: Path, flash: Checkpoint) -> None:
    """The reverse mix: ModelOpt's tensors under an official config."""
    tensors = to_modelopt(stored_tensors(flash))
    folder = write_modelopt(tmp_path / "m", bf16_config(), tensors)
    mapping = json.loads((flash.folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(mapping))
    with pytest.raises(CheckpointError, match=r"tensors do not belong to this architecture"):
        Checkpoint.open(folder)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, r"holds 0.0"), (float("nan"), "holds nan"), (-1.0, "holds -1.0"), (1e-45, "whose reciprocal is finite")],
)
def test_unusable_global_scales_are_refused_when_read(
    tmp_path: Path, flash: Checkpoint, value: float, text: str
) -> None:
    tensors = to_modelopt(stored_tensors(flash))
    tensors[EXPERT.replace(".weight", ".weight_scale_2")] = torch.tensor(value)
    checkpoint = Checkpoint.open(write_modelopt(tmp_path / "m", bf16_config(), tensors))
    with pytest.raises(NonFiniteWeight, match=text):
        checkpoint.tensor(EXPERT).load()


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"quant_algo": "W4A8_AWQ"}, "'quant_algo' is 'W4A8_AWQ'; expected 'NVFP4' or 'MIXED_PRECISION'"),
        ({"quantized_layers": None}, "missing key 'quantized_layers'"),
        ({"quant_algo": "NVFP4", "group_size": 32}, "'group_size' is 32; expected 16"),
        ({"quant_method": "modelopt_fp4"}, "'quant_method' is 'modelopt_fp4'"),
        ({"quantized_layers": {"a.experts.0": {"quant_algo": "MXFP8"}}}, "expected 'NVFP4' for routed experts"),
        ({"quantized_layers": {"a.shared_experts.x": {"quant_algo": "NVFP4"}}}, "expected 'MXFP8' for any other"),
        ({"quantized_layers": {"a.q_proj": {"quant_algo": "FP8"}}}, "['a.q_proj']: 'quant_algo' is 'FP8'"),
        ({"quantized_layers": {"a.q_proj": {"quant_algo": "MXFP8", "group_size": 64}}}, "'group_size' is 64"),
        ({"quantized_layers": {"a": 3}}, "is 3; expected an object"),
        ({"awq": 1}, "unknown key 'awq'"),
    ],
)
def test_modelopt_section_is_read_strictly(changes: dict[str, Any], text: str) -> None:
    mapping = bf16_config() | {"quantization_config": MODELOPT_SECTION | changes}
    with pytest.raises(ConfigError) as caught:
        config.parse(mapping, where="config.json")
    assert text in str(caught.value)


def test_older_exports_keep_the_section_in_a_file_of_its_own(tmp_path: Path, flash: Checkpoint) -> None:
    folder = write_modelopt(tmp_path / "m", bf16_config(), to_modelopt(stored_tensors(flash)))
    (folder / "config.json").write_text(json.dumps(bf16_config()))
    inner = {"quant_algo": "NVFP4", "group_size": 16, "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    beside = folder / "hf_quant_config.json"
    beside.write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": inner}))
    assert torch.equal(Checkpoint.open(folder).tensor(LINEAR).load(), flash.tensor(LINEAR).load())
    official = json.loads((flash.folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(official))
    with pytest.raises(ConfigError, match=r"describes modelopt nvfp4 experts, config.json official nvfp4 experts"):
        Checkpoint.open(folder)
    beside.write_text(json.dumps({"quantization": inner | {"quant_algo": "INT4"}}))
    with pytest.raises(UnsupportedFeature, match=r"hf_quant_config.json: quantization: 'quant_algo' is 'INT4'"):
        Checkpoint.open(folder)
