"""What training computes is what the saved checkpoint serves, code for code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support import trained

import m31
from m31.checkpoint import Checkpoint
from m31.formats import mxfp8, nvfp4
from m31.training.export import export
from m31_reference.codecs import Nvfp4

LENGTH = 45  # twelve blocks of 4 under top-3
SCHEMES: dict[str, tuple[str, str, str, str]] = {  # arithmetic, KV, index, weights
    "default": ("w4a4-megamoe", "nvfp4", "nvfp4", "m31"),
    "e4m3 attention": ("w4a4-q8kv4", "nvfp4", "nvfp4", "m31"),
    "a peer's read rule, int8 index": ("w4a4-q8kv4-shift3", "nvfp4", "int8", "m31"),
    "weights only": ("w4a16", "nvfp4", "bfloat16", "m31"),
    "everything in MXFP8": ("w8a8-mxfp8+expert_weights=none", "fp8", "fp8", "m3-mxfp8"),
    "bf16": ("w16a16", "bfloat16", "bfloat16", "bf16"),
    "exact": ("exact", "float32", "float32", "bf16"),
}


def trained_and_saved(
    folder: Path, scheme: tuple[str, str, str, str], dtype: torch.dtype, **changes: Any
) -> tuple[trained.TrainedText, dict[str, Any]]:
    arithmetic, kv, index, weights = scheme
    raw, target = trained.tiny(weights, **changes)
    model = trained.model(target, trained.scheme(arithmetic, kv=kv, index=index, weights=weights), dtype=dtype)
    export(folder, raw, model.parameters, extra_files={"a.txt": b"a"})
    options = {"backend": "reference", "arithmetic": arithmetic, "kv_dtype": kv, "index_dtype": index}
    return model, {**options, "dtype": str(dtype).removeprefix("torch.")}


def block_ids(keep: torch.Tensor | None, tokens: int, topk: int) -> torch.Tensor:
    """[T, heads, topk] as the op `block_select` writes them."""
    assert keep is not None
    ids = torch.where(keep, torch.arange(keep.shape[-1]), keep.shape[-1]).sort(-1).values[..., :topk]
    return torch.where(ids < keep.shape[-1], ids, -1)


@pytest.mark.parametrize("name", SCHEMES)
def test_logits_experts_and_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """In float64 no sum depends on its order enough to move a rounding, so that everything must agree."""
    model, options = trained_and_saved(tmp_path / "c", SCHEMES[name], torch.float64)
    ids, record = trained.tokens(1, LENGTH), {}
    got = model.logits(model(ids, record).hidden).detach()
    with trained.watched(monkeypatch) as seen:
        want = m31.load(tmp_path / "c", **options).logits(ids[0].tolist())
    assert float((got - want).abs().max()) <= 1e-6 * float(want.abs().max())  # logits come out in float32
    text = model.text
    assert len(seen["router"]) == text.mlp.count("moe")
    assert len(seen["block_select"]) == text.num_layers
    experts = [record[f"{layer}.experts"] for layer, kind in enumerate(text.mlp) if kind == "moe"]
    assert all(torch.equal(a, b) for a, b in zip(experts, seen["router"], strict=True))
    for layer, blocks in enumerate(seen["block_select"]):
        assert torch.equal(block_ids(record[f"{layer}.keep"][0], LENGTH, blocks.shape[-1]), blocks)
    assert all(int((blocks >= 0).sum(-1).min()) < 3 for blocks in seen["block_select"])  # early tokens see fewer


@pytest.mark.parametrize("name", ["default", "exact"])
def test_logits_in_the_dtype_of_training(tmp_path: Path, name: str) -> None:
    model, options = trained_and_saved(tmp_path / "c", SCHEMES[name], torch.float32)
    ids = trained.tokens(1, LENGTH)
    got = model.logits(model(ids).hidden).detach()
    want = m31.load(tmp_path / "c", **options).logits(ids[0].tolist())
    assert float((got - want).abs().max()) <= 1e-5 * float(want.abs().max())


def test_published_block_size(tmp_path: Path) -> None:
    """Blocks of 128 under top-3: tiles that read everything, and tiles that read the union of what was kept."""
    sparse = {**trained.tiny()[0]["sparse_attention_config"], "sparse_block_size": 128}
    model, options = trained_and_saved(
        tmp_path / "c", SCHEMES["default"], torch.float64, sparse_attention_config=sparse, max_position_embeddings=1024
    )
    ids = trained.tokens(1, 700)
    got = model.logits(model(ids).hidden).detach()
    want = m31.load(tmp_path / "c", **options).logits(ids[0].tolist())
    assert float((got - want).abs().max()) <= 1e-6 * float(want.abs().max())


def test_sequences_of_a_batch_do_not_see_each_other(tmp_path: Path) -> None:
    model, options = trained_and_saved(tmp_path / "c", SCHEMES["default"], torch.float64)
    ids = trained.tokens(3, LENGTH)
    got = model.logits(model(ids).hidden).detach().unflatten(0, (3, LENGTH))
    served = m31.load(tmp_path / "c", **options)
    for row in range(3):
        want = served.logits(ids[row].tolist())
        assert float((got[row] - want).abs().max()) <= 1e-6 * float(want.abs().max())


@pytest.mark.parametrize("weights", ["m31", "m3-mxfp8", "bf16"])
def test_weights(tmp_path: Path, weights: str) -> None:
    """The stored codes are those of the masters, and what they decode to is what training multiplied with."""
    raw, target = trained.tiny(weights)
    arithmetic = "w16a16" if weights == "bf16" else "w4a4-megamoe"
    model = trained.model(target, trained.scheme(arithmetic, weights=weights), dtype=torch.float32)
    export(tmp_path / "c", raw, model.parameters, extra_files={})
    saved = Checkpoint.open(tmp_path / "c")
    formats = set()
    for name, master in model.parameters.named():
        stored = saved.tensor(name)
        formats.add(stored.format)
        leaf = model.parameters.view(name, model.parameters.leaves).detach()
        assert torch.equal(stored.load().float(), leaf), name
        parts = {role: part.load() for role, part in stored.parts().items()}
        if stored.format == "mxfp8":
            codes, scale = mxfp8.encode(master)
            assert torch.equal(parts["codes"].view(torch.uint8), codes.view(torch.uint8)), name
            assert torch.equal(parts["scale"], scale), name
        elif stored.format == "nvfp4":
            packed, scale, overall = nvfp4.encode(master)
            assert torch.equal(parts["packed"], packed), name
            assert torch.equal(parts["scale"].view(torch.uint8), scale.view(torch.uint8)), name
            assert float(parts["global_scale"]) == float(overall) == pytest.approx(2688 / float(master.abs().max()))
    assert formats == {"m31": {"plain", "mxfp8", "nvfp4"}, "m3-mxfp8": {"plain", "mxfp8"}, "bf16": {"plain"}}[weights]


def test_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Codes and scales that serving writes into its pages are those of the keys and values in training."""
    model, options = trained_and_saved(tmp_path / "c", SCHEMES["default"], torch.float64)
    ids, record, written = trained.tokens(1, LENGTH), {}, []
    model(ids, record)
    encode = Nvfp4.encode

    def recording(codec: Nvfp4, x: torch.Tensor) -> dict[str, torch.Tensor]:
        written.append(encode(codec, x))
        return written[-1]

    monkeypatch.setattr(Nvfp4, "encode", recording)
    m31.load(tmp_path / "c", **options).logits(ids[0].tolist())
    kinds = [f"{layer}.{kind}" for layer in range(model.text.num_layers) for kind in ("k", "v", "index")]
    assert len(written) == len(kinds)
    for kind, parts in zip(kinds, written, strict=True):
        packed, scale = nvfp4.encode_kv(record[kind][0].detach().float())
        assert torch.equal(parts["packed"], packed), kind
        assert torch.equal(parts["scale"], scale.view(torch.uint8)), kind
        read = nvfp4.decode_kv(parts["packed"], parts["scale"].view(torch.float8_e4m3fn), torch.float64)
        assert torch.equal(record[f"{kind}.read"][0].detach(), read), kind


def test_it_can_fail(tmp_path: Path) -> None:
    """Another arithmetic or another format of the pages gives visibly other logits."""
    model, options = trained_and_saved(tmp_path / "c", SCHEMES["default"], torch.float64)
    ids = trained.tokens(1, LENGTH)
    got = model.logits(model(ids).hidden).detach()
    for change in ({"arithmetic": "w4a16"}, {"kv_dtype": "bfloat16"}, {"index_dtype": "bfloat16"}):
        want = m31.load(tmp_path / "c", **{**options, **change}).logits(ids[0].tolist())
        assert float((got - want).abs().max()) > 1e-3 * float(want.abs().max()), change
