"""m31's reference against transformers 5.23 in float32: the same folder, the same numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support import peer

import m31
from m31.engine.engine import Sequence

# Two float32 implementations of one formula, relative to the largest logit.
BOUND = 1e-4
SHAPES: dict[str, dict[str, Any]] = {
    "m3.1": {},
    "m3": {
        "layer_types": [peer.FULL] * 2 + [peer.SPARSE] * 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5},
    },
    "published-blocks": {
        "index_block_size": 128,
        "index_topk_blocks": 16,
        "num_hidden_layers": 2,
        "mlp_layer_types": ["dense", "sparse"],
        "layer_types": [peer.SPARSE] * 2,
    },
}
LENGTHS = {"m3.1": 61, "m3": 61, "published-blocks": 2500}  # beyond top-k: 16 of 3 and 20 of 16 blocks


def ids_for(n: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, peer.VOCAB, n).tolist()


def assert_close(got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.shape == want.shape
    assert float((got - want).abs().max()) < BOUND * float(want.abs().max())


@pytest.fixture(scope="module", params=SHAPES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any, Path]:
    folder = tmp_path_factory.mktemp(request.param)
    return request.param, peer.vision_language(folder, seed=3, **SHAPES[request.param]), folder


def load(folder: Path, **options: Any) -> Any:
    return m31.load(folder, backend="reference", **options)


def test_prefill(pair: tuple[str, Any, Path]) -> None:
    name, model, folder = pair
    ids = ids_for(LENGTHS[name])
    assert_close(load(folder).logits(ids), peer.logits(model, ids))


def test_chunked_prefill_at_many_splits(pair: tuple[str, Any, Path]) -> None:
    name, model, folder = pair
    ids = ids_for(LENGTHS[name])
    want = peer.logits(model, ids)
    ours = load(folder)
    for chunk in (1, 2, 3, 4, 5, 7, 16, 33) if len(ids) < 100 else (100, 127, 128, 129):
        ours.engine.chunk_tokens = chunk
        assert_close(ours.logits(ids), want)


def test_decode_of_64_tokens(pair: tuple[str, Any, Path]) -> None:
    """Greedy tokens identical; and the logits of every step, taken through the decode plan (one token a step)."""
    name, model, folder = pair
    prompt = ids_for(LENGTHS[name] - 50)
    tokens, rows = peer.decode(model, prompt, 64)
    ours = load(folder)
    generation = ours.generate(prompt, max_tokens=64, temperature=0.0, ignore_eos=True)
    list(generation.events())
    assert generation.token_ids == tokens
    sequence = Sequence(prompt=(*prompt, *tokens[:-1]), params=None, seed=0, request=0, stop_ids=frozenset())
    ours.engine.add(sequence)
    steps = 0
    while not sequence.done:
        # in large chunks up to the last token of the prompt, from there on one token a step
        ours.engine.chunk_tokens = max(1, len(prompt) - 1 - sequence.computed)
        ours.engine.step()
        steps += 1
    assert steps >= 64
    assert next(reversed(ours.engine.compiler._plans)).kind == "decode"
    assert all(len(sequence.rows[at]) == 1 for at in range(len(prompt) - 1, sequence.length))
    assert_close(sequence.logits()[len(prompt) - 1 :], rows)


def test_a_batch_of_four_different_lengths(pair: tuple[str, Any, Path]) -> None:
    name, model, folder = pair
    ours = load(folder)
    ours.engine.chunk_tokens = 300
    longest = min(LENGTHS[name], 600)
    prompts = [ids_for(n, seed=n) for n in (1, 11, longest // 2, longest)]
    sequences = [Sequence(prompt=tuple(p), params=None, seed=0, request=0, stop_ids=frozenset()) for p in prompts]
    for sequence in sequences:
        ours.engine.add(sequence)
    while ours.engine.busy:
        ours.engine.step()
    for sequence, prompt in zip(sequences, prompts, strict=True):
        assert_close(sequence.logits(), peer.logits(model, prompt))
    running = [ours.generate(p, max_tokens=12, temperature=0.0, ignore_eos=True) for p in prompts]
    for generation, prompt in zip(running, prompts, strict=True):
        list(generation.events())
        assert generation.token_ids == peer.decode(model, prompt, 12)[0]


def test_text_only_folder(tmp_path: Path) -> None:
    model = peer.text_only(tmp_path, seed=5)
    ids = ids_for(61)
    assert_close(load(tmp_path).logits(ids), peer.logits(model, ids))


def test_bf16_folder(tmp_path: Path) -> None:
    """BF16 weights are computed in float32: equal to transformers run in float32 on the same rounded weights."""
    model = peer.text_only(tmp_path / "f32", seed=6).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "bf16")
    ids = ids_for(61)
    ours = load(tmp_path / "bf16")
    assert ours.formats["weights"].startswith("bfloat16")
    # Loaded anew, because `.to(bfloat16)` also rounds transformers' table of inverse frequencies.
    again = type(model).from_pretrained(tmp_path / "bf16", dtype=torch.float32)
    assert_close(ours.logits(ids), peer.logits(again, ids))


def test_bf16_pages_are_close(tmp_path: Path) -> None:
    """KV in BF16 changes logits by the format's precision and not by more; most greedy choices stay."""
    model = peer.text_only(tmp_path, seed=7, index_topk_blocks=16)  # all blocks selected: no selection can flip
    ids = ids_for(61)
    want = peer.logits(model, ids)
    got = load(tmp_path, kv_dtype="bfloat16").logits(ids)
    assert float((got - want).abs().max()) < 0.05 * float(want.abs().max())
    assert not torch.equal(got, load(tmp_path).logits(ids))


def test_index_heads_select_their_own_blocks(tmp_path: Path) -> None:
    """BUG-29: an oracle whose two index heads share one list gives other logits than m31 does."""
    from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import MiniMaxM3VLIndexer

    model = peer.text_only(tmp_path, seed=8)
    ids = ids_for(61)
    ours, right = load(tmp_path).logits(ids), peer.logits(model, ids)
    assert_close(ours, right)
    original = MiniMaxM3VLIndexer.forward
    try:
        MiniMaxM3VLIndexer.forward = lambda self, *a: original(self, *a)[:, :1].expand(-1, self.num_heads, -1, -1)  # type: ignore[method-assign]
        collapsed = peer.logits(model, ids)
    finally:
        MiniMaxM3VLIndexer.forward = original  # type: ignore[method-assign]
    assert float((ours - collapsed).abs().max()) > 100 * BOUND * float(right.abs().max())
