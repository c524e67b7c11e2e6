"""`m31.checkpoint.convert`: calibrated input scales, and one global scale for gate and up of an expert."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.quantised import bf16_config, write_bf16
from tests.unit.test_convert import EXPERT, OTHER_JOB, Stop, interrupted, run

from m31.checkpoint import Checkpoint, QuantizedTensor
from m31.checkpoint.conversion import Step
from m31.cli.main import main
from m31.errors import CheckpointError, OpRefused


@pytest.fixture(scope="module")
def bf16(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bf16(tmp_path_factory.mktemp("bf16") / "ckpt", bf16_config()).folder


@pytest.fixture(scope="module")
def flash(bf16: Path, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return run(bf16, tmp_path_factory.mktemp("flash") / "ckpt", "m31")


def test_calibrated_scales_are_carried_over_or_replaced(flash: Checkpoint, bf16: Path, tmp_path: Path) -> None:
    first = run(bf16, tmp_path / "a", "m31", input_scales={EXPERT: 12.5})
    kept = run(first.folder, tmp_path / "b", "m31")
    replaced = run(first.folder, tmp_path / "c", "m31", input_scales={EXPERT: 3.0})
    scales = []
    for checkpoint in (flash, first, kept, replaced):
        tensor = checkpoint.tensor(EXPERT)
        assert isinstance(tensor, QuantizedTensor)
        scales.append(float(tensor.parts()["input_global_scale"].load()))
    assert scales == [48.0, 12.5, 12.5, 3.0]
    with pytest.raises(CheckpointError, match=r"an input scale is given for 'model.norm.weight'"):
        run(bf16, tmp_path / "d", "m31", input_scales={"model.norm.weight": 1.0})


def test_calibration_makes_up_for_limits_without_a_default(tmp_path: Path) -> None:
    """Under an absurd limit no default exists: refused before anything is written, unless every w2 is calibrated."""
    source = write_bf16(tmp_path / "s", bf16_config() | {"swiglu_limit": 1e30})
    with pytest.raises(OpRefused, match=r"no default input scale follows from limit 1e\+30"):
        run(source.folder, tmp_path / "x", "m31")
    assert [path.name for path in tmp_path.iterdir()] == ["s"]
    scales = {name: 2.0 for name in source.names if ".experts." in name and name.endswith(".w2.weight")}
    assert run(source.folder, tmp_path / "x", "m31", input_scales=scales).names


def test_scales_of_any_kind_of_number(bf16: Path, tmp_path: Path) -> None:
    """What calibration computes with: numpy's floats and whole numbers. They are rounded as the file does."""
    w1 = EXPERT.replace("w2", "w1")
    written = run(bf16, tmp_path / "x", "m31", input_scales={EXPERT: np.float64(0.1), w1: 3})
    for name, wanted in ((EXPERT, np.float32(0.1)), (w1, 3.0)):
        tensor = written.tensor(name)
        assert isinstance(tensor, QuantizedTensor)
        assert tensor.parts()["input_global_scale"].load().item() == wanted


def global_scale(checkpoint: Checkpoint, name: str) -> float:
    tensor = checkpoint.tensor(name)
    assert isinstance(tensor, QuantizedTensor)
    return float(tensor.parts()["global_scale"].load())


def test_gate_and_up_share_a_global_scale_on_request(flash: Checkpoint, bf16: Path, tmp_path: Path) -> None:
    """Some kernels take one scale per expert (MODEL.md §3.2): the larger matrix decides."""
    joint = run(bf16, tmp_path / "a", "m31", joint_gate_up=True)
    experts = [name for name in joint.names if ".experts." in name]
    assert experts
    for name in experts:
        own = global_scale(flash, name)
        if name.endswith(".w2.weight"):
            assert global_scale(joint, name) == own
            continue
        gate, up = (name.rsplit(".", 2)[0] + f".{m}.weight" for m in ("w1", "w3"))
        assert global_scale(joint, name) == min(global_scale(flash, gate), global_scale(flash, up))
    assert any(global_scale(joint, name) != global_scale(flash, name) for name in experts)
    dense = write_bf16(tmp_path / "dense", bf16_config() | {"moe_layer_freq": [0, 0, 0]}).folder
    give = "leave --joint-gate-up out, or give --format m31"
    for source, target, why, fix in (
        (
            joint.folder,
            "m31",
            "the source's are NVFP4 already and are copied",
            "or convert from the BF16 or MXFP8 folder",
        ),
        (bf16, "bf16", "the target format stores experts as plain", give),
        (bf16, "m3-mxfp8", "the target format stores experts as mxfp8", give),
        (dense, "m31", "this model has no routed experts", "leave --joint-gate-up out$"),
    ):
        with pytest.raises(CheckpointError, match=f"no expert is quantised to NVFP4 here: {why}.*{fix}"):
            run(source, tmp_path / "b", target, joint_gate_up=True)


def test_the_calibration_file(bf16: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "scales.json"
    file.write_text(json.dumps({EXPERT: 12.5}))
    command = ["convert", str(bf16), str(tmp_path / "x"), "--format", "m31", "--input-scales", str(file)]
    assert main(command) == 0
    tensor = Checkpoint.open(tmp_path / "x").tensor(EXPERT)
    assert isinstance(tensor, QuantizedTensor)
    assert float(tensor.parts()["input_global_scale"].load()) == 12.5
    for content, message in (
        ("{", "JSON"),
        ('{"a": 1, "a": 2}', "'a'"),
        (f'{{"{EXPERT}": "1"}}', "'1'; expected a number"),
        (f'{{"{EXPERT}": 0}}', "is 0; expected a finite number above zero"),
        (f'{{"{EXPERT}": 1e-50}}', "is 1e-50, as float32 0.0"),
        (f'{{"{EXPERT}": 1e-40}}', "is 1e-40"),
        (f'{{"{EXPERT}": 1e39}}', "is 1e+39, as float32 inf"),
        (f'{{"{EXPERT}": 1e999}}', "is inf; expected a finite number above zero"),
        (f'{{"{EXPERT}": 1{"0" * 400}}}', "is an integer of many digits, as float32 inf"),
        ('{"model.norm.weight": 1}', "given for 'model.norm.weight'"),
    ):
        file.write_text(content)
        assert main([*command[:2], str(tmp_path / "y"), *command[3:]]) == 1
        assert message in capsys.readouterr().err
    assert main([*command[:2], str(tmp_path / "y"), *command[3:-1], str(tmp_path / "absent")]) == 1
    assert "cannot be read" in capsys.readouterr().err


def test_names_in_the_calibration_file(bf16: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The message tells the file and the nearest name, or that the target takes no scales at all."""
    file = tmp_path / "scales.json"
    command = ["convert", str(bf16), str(tmp_path / "x"), "--input-scales", str(file), "--format"]
    for name, fix in (
        (f"language_model.{EXPERT}", f"did you mean '{EXPERT}'?"),
        (EXPERT.replace("weight", "input_global_scale"), f"did you mean '{EXPERT}'?"),
        (EXPERT.replace("experts.1", "experts.99"), "did you mean 'model.layers.2.block_sparse_moe.experts."),
        ("x" * 3000, ", such as 'model.layers.2.block_sparse_moe.experts.0.w1.weight'\n"),
    ):
        file.write_text(json.dumps({name: 1.0}))
        assert main([*command, "m31"]) == 1
        told = capsys.readouterr().err
        assert told.startswith(
            f"m31: error: {file}: an input scale is given for '{name[:200]}'; expected logical names"
        )
        assert fix in told
    file.write_text(json.dumps({EXPERT: 0}))
    assert main([*command, "m31"]) == 1
    assert capsys.readouterr().err.startswith(f"m31: error: {file}: the input scale of '{EXPERT}' is 0; expected a")
    file.write_text(json.dumps({EXPERT: 1.0}))
    for target in ("bf16", "m3-mxfp8"):
        assert main([*command, target]) == 1
        told = capsys.readouterr().err
        assert "expected none: no weight is written in NVFP4, and only those have one; leave the scales" in told
        assert "--format m31" in told


def test_scales_that_nobody_calibrated_are_told(bf16: Path, flash: Checkpoint, tmp_path: Path) -> None:
    """A folder from `m31` without calibration runs, but wastes range: the one who converts should know."""
    experts = [name for name in flash.names if ".experts." in name and name.endswith(".w2.weight")]

    def told(source: Path, target: Any, **options: Any) -> list[str]:
        notes: list[str] = []

        def stop(_: Step) -> None:
            raise Stop

        with pytest.raises(Stop):
            run(source, tmp_path / "x", target, note=notes.append, progress=stop, **options)
        return [text for text in notes if "calibrated" in text]

    text = (
        "input_global_scale of the experts' second matrix (w2) is not calibrated for {} of 4: 2688 / ((limit + |beta|) "
        "* limit) = 48 is written, under which nothing saturates; --input-scales FILE takes calibrated ones"
    )
    assert told(bf16, "m31") == [text.format(4)]
    assert told(bf16, "m31", input_scales={EXPERT: 2.0}) == [text.format(3)]
    assert told(bf16, "m31", input_scales={EXPERT.replace("w2", "w1"): 2.0}) == [text.format(4)]
    assert told(bf16, "m31", input_scales=dict.fromkeys(experts, 2.0)) == []
    assert told(flash.folder, "m31") == told(flash.folder, "bf16") == told(bf16, "m3-mxfp8") == []


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"joint_gate_up": True}, {}),
        ({}, {"joint_gate_up": True}),
        ({"input_scales": {EXPERT: 2.0}}, {}),
        ({"input_scales": {EXPERT: 2.0}}, {"input_scales": {EXPERT: 2.5}}),
        ({}, {"max_shard_bytes": 50_000}),
    ],
)
def test_what_was_begun_with_other_options_is_not_continued(
    bf16: Path, tmp_path: Path, first: dict[str, Any], second: dict[str, Any]
) -> None:
    """A folder of which half the experts have joint scales would be neither the one nor the other."""
    interrupted(bf16, tmp_path / "x", "m31", 2, **first)
    with pytest.raises(CheckpointError, match=OTHER_JOB):
        run(bf16, tmp_path / "x", "m31", **second)
    assert run(bf16, tmp_path / "x", "m31", **first).names


def test_scales_that_float32_does_not_tell_apart_are_the_same_job(bf16: Path, tmp_path: Path) -> None:
    interrupted(bf16, tmp_path / "x", "m31", 2, input_scales={EXPERT: 0.1})
    assert run(bf16, tmp_path / "x", "m31", input_scales={EXPERT: np.float32(0.1)}).names
