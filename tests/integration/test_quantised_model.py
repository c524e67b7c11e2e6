"""m31.load on quantised folders, with every page format and arithmetic, through the library and the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support import quantised

import m31
from m31.checkpoint import Checkpoint, convert, write
from m31.cli import demo
from m31.cli.main import main
from m31.engine.model import Model
from m31.errors import BackendRefused, NonFiniteWeight, OpRefused, RequestError
from m31.formats.arithmetic import NAMED

IDS = list(range(3, 40))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same weights in BF16, as M3.1-Flash and as M3-MXFP8, each with a twin that holds the decoded values."""
    root = tmp_path_factory.mktemp("quantised")
    mapping = quantised.bf16_config()
    write(root / "bf16", mapping, quantised.bf16_weights(mapping).items(), max_shard_bytes=1 << 20, extra_files={})
    for target in ("m31", "m3-mxfp8"):
        quantised.write_quantised(root / target, mapping, target)
        source = Checkpoint.open(root / target)
        values = [(name, source.tensor(name).load().float()) for name in source.names]
        write(root / f"{target}-twin", mapping, values, max_shard_bytes=1 << 20, extra_files={})
    return {path.name: path for path in root.iterdir()}


def load(folder: Path, **options: Any) -> Model:
    return m31.load(folder, backend="reference", max_context=512, **options)


@pytest.mark.parametrize("target", ["m31", "m3-mxfp8"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_logits_equal_those_of_the_decoded_weights(folders: dict[str, Path], target: str, dtype: str) -> None:
    """Bit for bit: a quantised checkpoint is the model of its decoded weights."""
    got = load(folders[target], dtype=dtype).logits(IDS)
    assert torch.equal(got, load(folders[f"{target}-twin"], dtype=dtype).logits(IDS))
    plain = load(folders["bf16"], dtype=dtype).logits(IDS)
    assert 0.005 < float((got - plain).norm() / plain.norm()) < 1


@pytest.mark.parametrize("limit", [0, 1 << 14, None])
def test_a_small_weight_cache_changes_nothing(folders: dict[str, Path], limit: int | None) -> None:
    got = load(folders["m31"], weight_cache_bytes=limit).logits(IDS)
    assert torch.equal(got, load(folders["m31-twin"]).logits(IDS))


def test_formats_are_named(folders: dict[str, Path]) -> None:
    model = load(folders["m31"], kv_dtype="nvfp4", index_dtype="int8", arithmetic="w4a4 megamoe")
    weights = model.formats.pop("weights")
    assert set(weights.split("+")) == {"mxfp8", "nvfp4", "bfloat16", "float32"}
    assert model.formats == {"kv": "nvfp4", "index": "int8", "compute": "float32", "arithmetic": "w4a4-megamoe"}
    assert load(folders["m31"]).formats["arithmetic"] == "exact"


@pytest.fixture(scope="module")
def exact(folders: dict[str, Path]) -> torch.Tensor:
    """Logits of the first page, where no selection can flip."""
    return load(folders["m31"]).logits(IDS)[:4]


@pytest.mark.parametrize("arithmetic", sorted(NAMED))
def test_every_arithmetic_runs_and_stays_near(folders: dict[str, Path], exact: torch.Tensor, arithmetic: str) -> None:
    model = load(folders["m31"], kv_dtype="nvfp4", index_dtype="fp8", arithmetic=arithmetic)
    got = model.logits(IDS)[:4]
    assert 0 < float((got - exact).norm() / exact.norm()) < 1
    assert len(list(model.generate(IDS, max_tokens=3, ignore_eos=True).events())) == 3


def test_both_orders_of_v_scales_give_the_same_logits(folders: dict[str, Path]) -> None:
    """MODEL.md §3.4: other bytes, other layout id, equal values."""
    linear, quad = (load(folders["m31"], kv_dtype="nvfp4", v_scale_order=order) for order in (None, "token_quad"))
    assert torch.equal(linear.logits(IDS), quad.logits(IDS))
    assert linear.engine.cache.layout.layout_id != quad.engine.cache.layout.layout_id
    with pytest.raises(RequestError, match=r"v_scale_order is 'quad'.*'linear' or 'token_quad'"):
        load(folders["m31"], kv_dtype="nvfp4", v_scale_order="quad")
    with pytest.raises(RequestError, match=r"'token_quad' with bfloat16 pages.*nvfp4 pages"):
        load(folders["m31"], kv_dtype="bfloat16", v_scale_order="token_quad")


def test_unknown_formats_and_arithmetics_are_refused_by_name(folders: dict[str, Path]) -> None:
    with pytest.raises(BackendRefused, match=r"KV format 'int8' is not served; expected float32 or .* or nvfp4"):
        load(folders["m31"], kv_dtype="int8")
    with pytest.raises(BackendRefused, match=r"index key format 'nvfp5' is not served; expected .* or int8"):
        load(folders["m31"], index_dtype="nvfp5")
    with pytest.raises(BackendRefused, match="--kv-dtype nvfp4"):
        load(folders["m31"], kv_dtype="bfloat16", arithmetic="w4a4-q8kv4")
    for arithmetic, usual in (("w4a4-q8kv4", "nvfp4"), ("w4a16", "bfloat16"), ("exact", "float32")):
        formats = load(folders["m31"], arithmetic=arithmetic).formats
        assert (formats["kv"], formats["index"]) == (usual, usual)
    assert load(folders["m31"], arithmetic="w4a16", index_dtype="int8").formats["kv"] == "bfloat16"
    with pytest.raises(OpRefused, match=r"unknown arithmetic 'w4a5'.*did you mean"):
        load(folders["m31"], arithmetic="w4a5")
    (note,) = (n for n in load(folders["bf16"], arithmetic="w4a4-megamoe").notes if "input_global_scale" in n)
    assert "experts are stored plain" in note
    with pytest.raises(BackendRefused, match=r"KV format 'bf16' is not served; .*did you mean 'bfloat16'"):
        load(folders["m31"], kv_dtype="bf16")
    with pytest.raises(BackendRefused, match=r"index key format 'nvp4' is not served; .*did you mean 'nvfp4'"):
        load(folders["m31"], index_dtype="nvp4")


def damage(folder: Path, name: str, target: Path) -> Path:
    """A copy of a folder in which the first byte of a stored tensor is an E4M3 NaN."""
    import shutil

    shutil.copytree(folder, target)
    tensor = Checkpoint.open(target).stored(name)
    with tensor.path.open("r+b") as file:
        file.seek(tensor.offset)
        file.write(b"\x7f")
    return target


def test_damage_is_found_before_it_can_spread(folders: dict[str, Path], tmp_path: Path) -> None:
    """Decision 011: everything but quantised experts is checked at load; those when they are first decoded."""
    index = "model.layers.1.self_attn.index_k_proj.weight"
    with pytest.raises(
        NonFiniteWeight, match=rf"{index}.*1 of 2048 values are NaN or infinite, the first at flat index 0"
    ):
        load(damage(folders["m31"], index, tmp_path / "index"))
    expert = "model.layers.2.block_sparse_moe.experts"
    bad = folders["m31"]
    for number in range(quantised.EXPERTS):
        bad = damage(bad, f"{expert}.{number}.w1.weight_scale", tmp_path / str(number))
    model = load(bad)
    with pytest.raises(NonFiniteWeight, match=rf"{expert}\.\d\.w1\.weight_scale' holds nan at flat index 0"):
        model.logits(IDS)
    assert model.engine.pool.free == model.engine.pool.pages


def test_the_command_line_passes_the_choices(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    demo.write(tmp_path / "bf16", seed=0, layers=2)
    convert(tmp_path / "bf16", tmp_path / "m31", target="m31", max_shard_bytes=1 << 20, input_scales={})
    args = [
        "run",
        str(tmp_path / "m31"),
        "hello",
        "--backend",
        "reference",
        "--max-tokens",
        "3",
        "--ignore-eos",
        "--json",
    ]
    choices = ["--kv-dtype", "fp8", "--index-dtype", "int8", "--arithmetic", "w8a8-mxfp8"]
    assert main([*args, *choices]) == 0
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert events[0]["formats"] == {
        "weights": "mxfp8+nvfp4+bfloat16+float32",
        "kv": "fp8",
        "index": "int8",
        "compute": "float32",
        "arithmetic": "w8a8-mxfp8",
    }
    assert events[-1]["event"] == "done"
    assert main([*args, "--arithmetic", "w8a8-mxfp9"]) == 1
    captured = capsys.readouterr()
    assert "did you mean 'w8a8-mxfp8'" in captured.out + captured.err
