"""Block scales that no encoder writes, and codes that decode to infinity: who refuses them, and in which words."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.quantised import bf16_config, save, stored_tensors, write_quantised

from m31.checkpoint import Checkpoint, convert, inspect
from m31.errors import CheckpointError, DamagedScale, NonFiniteWeight

EXPERT = "model.layers.2.block_sparse_moe.experts.1.w2.weight"
LINEAR = "model.layers.1.self_attn.q_proj.weight"
TARGETS = ("m31", "m3-mxfp8", "bf16")


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return write_quantised(tmp_path_factory.mktemp("healthy") / "ckpt", bf16_config(), "m31", shard=10**9)


def damaged(healthy: Checkpoint, folder: Path, **changes: tuple[int, int]) -> Checkpoint:
    """A copy in which one byte of each given tensor is another: name -> (flat index, byte)."""
    tensors = stored_tensors(healthy)
    for name, (index, byte) in changes.items():
        tensors[name].view(-1).view(torch.uint8)[index] = byte
    folder.mkdir()
    (folder / "config.json").write_bytes((healthy.folder / "config.json").read_bytes())
    save(folder / "model.safetensors", tensors)
    return Checkpoint.open(folder)


def to(source: Checkpoint, goal: Path, target: Any) -> Checkpoint:
    return convert(source.folder, goal, target=target, max_shard_bytes=10**9, input_scales={})


@pytest.mark.parametrize(
    ("name", "byte", "number", "expected"),
    [
        (f"{EXPERT}_scale", 0x80, "-0.0", "block scales that are numbers without a sign"),
        (f"{EXPERT}_scale", 0xB0, "-0.5", "block scales that are numbers without a sign"),
        (f"{EXPERT}_scale", 0x7F, "nan", "block scales that are numbers without a sign"),
        (f"{EXPERT}_scale", 0xFF, "nan", "block scales that are numbers without a sign"),
        (f"{LINEAR}_scale_inv", 0xFF, "nan", "block scales that are numbers;"),
    ],
)
def test_damaged_scales_are_refused(
    healthy: Checkpoint, tmp_path: Path, monkeypatch: Any, name: str, byte: int, number: str, expected: str
) -> None:
    source = damaged(healthy, tmp_path / "s", **{name: (37, byte)})
    shape = list(source.stored(name).shape)
    text = re.escape(
        f"'{name}' holds {number} at flat index 37 of shape {shape} (byte 0x{byte:02X}); expected {expected}"
    )
    with pytest.raises(DamagedScale, match=text) as caught:
        source.tensor(name.rpartition("weight")[0] + "weight").load()
    assert isinstance(caught.value, CheckpointError)
    assert str(caught.value).endswith("or its encoder is at fault: fetch it again or use another checkpoint")
    monkeypatch.setattr("m31.checkpoint.encoding.CHUNK", 100)  # rows on their own: the index is still the tensor's
    for target in TARGETS:
        with pytest.raises(DamagedScale, match=text):
            to(source, tmp_path / target, target)
    assert [path.name for path in tmp_path.iterdir()] == ["s"]


def test_every_other_scale_byte_is_accepted(healthy: Checkpoint, tmp_path: Path) -> None:
    changes = {f"{EXPERT}_scale": (5, 0x7E), f"{LINEAR}_scale_inv": (5, 0)}
    source = damaged(healthy, tmp_path / "s", **changes)
    written = to(source, tmp_path / "x", "m31")
    for name in changes:
        kept = written.stored(name).load().view(torch.uint8)
        assert torch.equal(kept, source.stored(name).load().view(torch.uint8))


def test_codes_that_decode_to_infinity_are_not_copied(healthy: Checkpoint, tmp_path: Path, monkeypatch: Any) -> None:
    code, scale = (32 * 3 + 7, 0x7E), (3, 254)
    source = damaged(healthy, tmp_path / "s", **{LINEAR: code, f"{LINEAR}_scale_inv": scale})
    monkeypatch.setattr("m31.checkpoint.encoding.CHUNK", 64)
    bad = source.tensor(LINEAR).load().isinf().view(-1)
    first = int(bad.nonzero()[0])
    for target in TARGETS:
        with pytest.raises(NonFiniteWeight, match=rf"'{LINEAR}' holds -?inf at flat index {first} of shape"):
            to(source, tmp_path / target, target)
    assert any(
        text == f"1 quantised weights decode to infinity: {LINEAR}"
        for text in inspect(source.folder, deep=True).suspicious
    )


def test_a_global_scale_that_leads_to_infinity(healthy: Checkpoint, tmp_path: Path) -> None:
    tensors = stored_tensors(healthy)
    tensors[f"{EXPERT}_global_scale"].fill_(1e-36)
    source = damaged(healthy, tmp_path / "s")
    save(source.folder / "model.safetensors", tensors)
    with pytest.raises(NonFiniteWeight, match=rf"'{EXPERT}' holds -?inf at flat index \d+ of shape"):
        to(Checkpoint.open(source.folder), tmp_path / "x", "m31")
    assert f"1 quantised weights decode to infinity: {EXPERT}" in inspect(source.folder, deep=True).suspicious


def test_deep_inspection_of_the_smallest_scales(healthy: Checkpoint, tmp_path: Path) -> None:
    wanted = (
        "1 quantised weights have codes under a block scale of 2^-127 (byte 0), which belongs to blocks of zeros: "
        f"{LINEAR}"
    )
    assert wanted not in inspect(healthy.folder, deep=True).suspicious
    source = damaged(healthy, tmp_path / "s", **{f"{LINEAR}_scale_inv": (9, 0), f"{EXPERT}_scale": (9, 0x80)})
    found = inspect(source.folder, deep=True).suspicious
    assert wanted in found
    assert f"1 quantised weights have negative block scales: {EXPERT}" in found
