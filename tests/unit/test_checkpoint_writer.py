"""Writing the official layout, and the random weights that fill it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_helpers import read_shard, tensors_of, tiny_config, tiny_folder
from hypothesis import given, settings
from hypothesis import strategies as st

from m31 import config
from m31.checkpoint import Checkpoint, expected, random_tensors, write
from m31.errors import (
    CheckpointError,
    ConfigError,
    DuplicateTensor,
    MissingTensor,
    UnexpectedTensor,
    UnsupportedFeature,
    WrongDtype,
    WrongShape,
)

Pairs = list[tuple[str, torch.Tensor]]


def pairs(mapping: dict[str, Any], dtype: torch.dtype = torch.float32, seed: int = 3, scale: float = 1.0) -> Pairs:
    return list(random_tensors(config.parse(mapping, where="c"), seed=seed, dtype=dtype, scale=scale))


def save(folder: Path, mapping: dict[str, Any], tensors: Any, **options: Any) -> Checkpoint:
    return write(folder, mapping, tensors, **({"max_shard_bytes": 30_000, "extra_files": {}} | options))


@settings(max_examples=15, deadline=None)
@given(vision=st.booleans(), half=st.booleans(), shard=st.integers(1, 200_000))
def test_round_trip(tmp_path_factory: pytest.TempPathFactory, vision: bool, half: bool, shard: int) -> None:
    mapping = tiny_config(vision=vision) | {"torch_dtype": "bfloat16" if half else "float32"}
    tensors = pairs(mapping, torch.bfloat16 if half else torch.float32)
    folder = tmp_path_factory.mktemp("round") / "new" / "ckpt"
    checkpoint = save(folder, mapping, reversed(tensors), max_shard_bytes=shard)
    assert checkpoint.notes == ()
    loaded = tensors_of(folder)
    assert list(loaded) == list(expected(checkpoint.config))
    for name, tensor in tensors:
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name], tensor)
        item = tensor.element_size()
        assert checkpoint.tensor(name).offset % item == 0  # never copied on load
    for path in folder.glob("*.safetensors"):
        entries, body = read_shard(path)
        assert len(body) <= shard or len(entries) == 2  # one tensor and the metadata
    assert [p.name for p in folder.parent.iterdir()] == ["ckpt"]  # no staging folder left


def test_official_names_prefix_index_and_extra_files(tmp_path: Path) -> None:
    mapping = tiny_config()
    save(tmp_path / "vl", mapping, pairs(mapping), extra_files={"tokenizer.json": b"{}", "chat_template.jinja": b"x"})
    index = json.loads((tmp_path / "vl" / "model.safetensors.index.json").read_text())
    shards = sorted(p.name for p in (tmp_path / "vl").glob("*.safetensors"))
    count = len(shards)
    assert shards == [f"model-{n + 1:05d}-of-{count:05d}.safetensors" for n in range(count)]
    assert count > 2
    assert "language_model.model.layers.2.block_sparse_moe.experts.0.w1.weight" in index["weight_map"]
    assert "language_model.lm_head.weight" in index["weight_map"]
    assert "patch_merge_mlp.linear_1.weight" in index["weight_map"]
    assert index["metadata"]["total_size"] == sum(t.nbytes for _, t in pairs(mapping))
    assert json.loads((tmp_path / "vl" / "config.json").read_text()) == mapping
    assert (tmp_path / "vl" / "tokenizer.json").read_bytes() == b"{}"
    save(tmp_path / "text", tiny_config(vision=False), pairs(tiny_config(vision=False)))
    names = json.loads((tmp_path / "text" / "model.safetensors.index.json").read_text())["weight_map"]
    assert "model.norm.weight" in names


def test_official_library_reads_what_we_write(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    folder = tiny_folder(tmp_path / "x")
    ours = tensors_of(folder)
    theirs: dict[str, torch.Tensor] = {}
    for path in folder.glob("*.safetensors"):
        theirs |= load_file(path)
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[name], ours[name]) for name in ours)


def test_non_contiguous_tensors_are_written_in_order(tmp_path: Path) -> None:
    mapping = tiny_config(vision=False)
    tensors = pairs(mapping)
    strided = [(name, t.t().contiguous().t() if t.dim() == 2 else t) for name, t in tensors]
    assert not all(t.is_contiguous() for _, t in strided)
    save(tmp_path / "x", mapping, strided)
    loaded = tensors_of(tmp_path / "x")
    assert all(torch.equal(loaded[name], t) for name, t in tensors)


def test_one_shard_is_held_at_a_time(tmp_path: Path) -> None:
    """The iterable is drained shard by shard: when the n-th tensor is asked for, earlier shards are on disk."""
    mapping = tiny_config(vision=False)
    seen: list[int] = []

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in pairs(mapping):
            seen.append(sum(p.stat().st_size for p in tmp_path.rglob("*.tmp")))
            yield name, tensor

    save(tmp_path / "x", mapping, stream(), max_shard_bytes=8_000)
    assert seen[0] == 0
    assert seen[-1] > 8_000


@pytest.mark.parametrize(
    ("change", "error", "fragment"),
    [
        (lambda p: p[:-1], MissingTensor, "1 of"),
        (lambda p: [*p, ("model.ghost", torch.zeros(1))], UnexpectedTensor, "'model.ghost' does not belong"),
        (lambda p: [("language_model." + p[0][0], p[0][1]), *p[1:]], UnexpectedTensor, "canonical names only"),
        (lambda p: [*p, p[0]], DuplicateTensor, "was given twice"),
        (lambda p: [(p[0][0], p[0][1].t()), *p[1:]], WrongShape, "is [32, 64]; expected [64, 32]"),
        (lambda p: [(p[0][0], p[0][1].half()), *p[1:]], WrongDtype, "is F16; expected F32 or BF16"),
        (lambda p: [(p[0][0], p[0][1].to(torch.complex128)), *p[1:]], CheckpointError, "has no safetensors name"),
    ],
)
def test_wrong_tensors_leave_nothing_behind(tmp_path: Path, change: Any, error: type[Exception], fragment: str) -> None:
    mapping = tiny_config(vision=False)
    with pytest.raises(error) as caught:
        save(tmp_path / "x", mapping, change(pairs(mapping)))
    assert fragment in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_an_exception_in_the_iterable_leaves_nothing_behind(tmp_path: Path) -> None:
    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield from pairs(tiny_config(vision=False))[:40]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        save(tmp_path / "x", tiny_config(vision=False), broken())
    assert list(tmp_path.iterdir()) == []


def test_destinations(tmp_path: Path) -> None:
    mapping = tiny_config(vision=False)
    empty = tmp_path / "empty"
    empty.mkdir()
    save(empty, mapping, pairs(mapping))
    with pytest.raises(CheckpointError, match="is not empty; choose another folder or delete it first"):
        save(empty, mapping, pairs(mapping))
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match="exists and is not a folder"):
        save(tmp_path / "file", mapping, pairs(mapping))
    with pytest.raises(CheckpointError, match="cannot be created"):
        save(tmp_path / "file" / "below", mapping, pairs(mapping))
    with pytest.raises(CheckpointError, match="max_shard_bytes is 0"):
        save(tmp_path / "y", mapping, pairs(mapping), max_shard_bytes=0)
    with pytest.raises(ConfigError, match="unknown key 'x'"):
        save(tmp_path / "y", mapping | {"x": 1}, pairs(mapping))


@pytest.mark.parametrize("name", ["../x", "a/b", "config.json", "model.safetensors", "", ".", "..", "a\\b"])
def test_extra_files_have_plain_names(tmp_path: Path, name: str) -> None:
    mapping = tiny_config(vision=False)
    with pytest.raises(CheckpointError, match="expected a plain file name that the writer does not use itself"):
        save(tmp_path / "x", mapping, pairs(mapping), extra_files={name: b""})


def test_random_tensors_are_reproducible_and_depend_on_seed_and_name_only() -> None:
    mapping = tiny_config()
    first, again, other = dict(pairs(mapping)), dict(pairs(mapping)), dict(pairs(mapping, seed=4))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first)
    text = dict(pairs(tiny_config(vision=False)))
    assert all(torch.equal(first[name], text[name]) for name in text)
    values = [t.flatten()[:16].tolist() for t in first.values()]
    assert len({tuple(v) for v in values}) == len(values)


def test_random_tensors_have_no_zero_norm_or_bias_and_follow_scale() -> None:
    mapping = tiny_config()
    for name, tensor in pairs(mapping, torch.bfloat16):
        assert tensor.dtype == (torch.float32 if ".gate." in name or "e_score" in name else torch.bfloat16)
        if tensor.dim() == 1:
            assert bool((tensor != 0).all()), name
    one, four = dict(pairs(mapping)), dict(pairs(mapping, scale=4.0))
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.allclose(four[name], 4 * one[name])
    assert torch.equal(four["model.norm.weight"], one["model.norm.weight"])
    assert abs(float(one[name].std()) * 32**0.5 - 1) < 0.1


def test_random_tensors_refuse() -> None:
    flash = config.parse(config.published("m3.1-flash"), where="c")
    with pytest.raises(UnsupportedFeature, match="random weights for a quantised config"):
        next(random_tensors(flash, seed=0, dtype=torch.float32))
    with pytest.raises(WrongDtype, match=r"random weights in torch.float16"):
        pairs(tiny_config(), torch.float16)
