"""The published model at full size: 89,632 tensors and 250.1 GB, in files that are holes behind real headers."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from sdk_fakes import GPU_BACKENDS, shipped_manifest
from test_checkpoint_draft import PUBLISHED as DRAFT
from tests.support import plain_reader
from tests.support.quantised import draft_config

from m31 import config
from m31.checkpoint import Checkpoint, inspect, target_config
from m31.checkpoint.encoding import units
from m31.checkpoint.inventory import expected
from m31.checkpoint.layout import plan_shards
from m31.checkpoint.lazy import MappedFile


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `m31 convert --format m31` would write, without the bytes."""
    path = tmp_path_factory.mktemp("published")
    source = config.published("m3.1-flash")
    del source["quantization_config"]
    mapping, model = target_config(source, config.parse(source, where="c"), "m31")
    shards = plan_shards(units(expected(model)), max_shard_bytes=5_000_000_000, official=True)
    for shard in shards:
        with (path / shard.file).open("wb") as handle:
            handle.write(shard.header)
            handle.truncate(shard.size)
    weight_map = {name: shard.file for shard in shards for name in shard.stored_names}
    total = sum(shard.size - len(shard.header) for shard in shards)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    (path / "config.json").write_text(json.dumps(mapping))
    return path


def test_opening_89_632_tensors_is_quick_and_touches_none(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MappedFile, "storage", lambda _: pytest.fail("a tensor was touched"))
    took = []
    for _ in range(3):  # again and again: the second checkpoint must not pay for the first
        start = time.process_time()
        checkpoint = Checkpoint.open(folder)
        took.append(time.process_time() - start)
    assert len(checkpoint.declared) == 89_632
    assert round(checkpoint.total_bytes / 1e9, 3) == 250.100
    assert min(took) < 3
    assert took[-1] < 2 * took[0] + 0.5
    assert (checkpoint.notes, checkpoint.dialect) == ((), "official")
    found = inspect(folder)
    assert found.quantization["routed_experts"] == {"nvfp4": 57 * 128 * 3}
    assert round(found.hub_elements / 1e9, 2) == 220.49
    assert found.logical == 427_051_937_408


def test_a_script_with_safetensors_alone_reads_it(folder: Path) -> None:
    """MODEL.md §4.1 and §4.2: counts, names, dtypes and shapes at the ends of every list; byte total."""
    script = [sys.executable, "-I", plain_reader.__file__, str(folder)]
    found = json.loads(subprocess.run(script, check=True, capture_output=True, text=True).stdout)
    tensors: dict[str, Any] = found["tensors"]
    assert len(tensors) == 89_632
    assert round(found["bytes"] / 1e9, 3) == 250.100
    assert found["bytes"] == found["claimed"]
    assert sum(".experts." in name for name in tensors) == 87_552
    assert sum(name.startswith("vision_tower.") for name in tensors) == 515
    assert sum(name.startswith(("multi_modal_projector.", "patch_merge_mlp.")) for name in tensors) == 8
    text = "language_model.model.layers"
    expert = f"{text}.59.block_sparse_moe.experts.127"
    want = {
        "language_model.model.embed_tokens.weight": ["BF16", [200064, 6144]],
        "language_model.lm_head.weight": ["BF16", [200064, 6144]],
        f"{text}.0.self_attn.q_proj.weight": ["F8_E4M3", [8192, 6144]],
        f"{text}.0.self_attn.q_proj.weight_scale_inv": ["U8", [8192, 192]],
        f"{text}.0.self_attn.o_proj.weight_scale_inv": ["U8", [6144, 256]],
        f"{text}.59.self_attn.index_k_proj.weight": ["F8_E4M3", [128, 6144]],
        f"{text}.59.self_attn.index_k_norm.weight": ["BF16", [128]],
        f"{text}.2.mlp.down_proj.weight": ["F8_E4M3", [6144, 12288]],
        f"{text}.3.block_sparse_moe.gate.weight": ["F32", [128, 6144]],
        f"{text}.3.block_sparse_moe.e_score_correction_bias": ["F32", [128]],
        f"{text}.3.block_sparse_moe.shared_experts.down_proj.weight": ["F8_E4M3", [6144, 3072]],
        f"{expert}.w1.weight_packed": ["U8", [3072, 3072]],
        f"{expert}.w3.weight_scale": ["F8_E4M3", [3072, 384]],
        f"{expert}.w2.weight_packed": ["U8", [6144, 1536]],
        f"{expert}.w2.weight_scale": ["F8_E4M3", [6144, 192]],
        f"{expert}.w2.weight_global_scale": ["F32", [1]],
        f"{expert}.w2.input_global_scale": ["F32", [1]],
        "vision_tower.vision_model.embeddings.patch_embedding.weight": ["BF16", [1280, 3, 2, 14, 14]],
        "vision_tower.vision_model.encoder.layers.31.mlp.fc1.weight": ["BF16", [5120, 1280]],
        "patch_merge_mlp.linear_1.weight": ["BF16", [6144, 24576]],
    }
    assert {name: tensors.get(name) for name in want} == want


def test_draft_config_of_the_published_head_fits(folder: Path) -> None:
    from m31.checkpoint.draft import require_fit
    from m31.config.draft import parse_draft

    require_fit(parse_draft(draft_config(**DRAFT), where="c"), Checkpoint.open(folder).config, where="c")


def test_every_backend_takes_the_weights_of_the_published_model_as_they_are_stored(folder: Path) -> None:
    """Routers are float32 beside NVFP4 experts and MXFP8 projections (MODEL.md §4.1): a manifest without one of these
    is refused when the model is opened."""
    from m31.graph import trace
    from m31.sdk import stored_as

    checkpoint = Checkpoint.open(folder)
    graph = trace(checkpoint.config.text, stored=lambda name: stored_as(checkpoint.tensor(name)))
    stored = {tensor.stored for tensor in graph.tensors()}
    assert stored == {"nvfp4", "mxfp8", "bfloat16", "float32"}
    manifests = [shipped_manifest(name) for name in (*GPU_BACKENDS, "reference", "cpu", "triton")]
    assert {m.name: stored - set(m.formats.weights) for m in manifests if not stored <= set(m.formats.weights)} == {}
