"""The engine against an independent numpy model, with every number of the description away from its usual value."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.support import independent, tiny

from m31.config import Moe, SparseAttention, SwigluOai, Text
from m31.engine.engine import Sequence

SPARSE = SparseAttention(num_index_heads=2, index_dim=16, topk_blocks=3, block_size=4, local_blocks=1, init_blocks=0)
MOE = Moe(
    num_experts=8,
    experts_per_token=2,
    num_shared_experts=1,
    expert_intermediate_size=24,
    shared_intermediate_size=24,
    routed_scaling_factor=2.0,
)
CHANGES: dict[str, dict[str, Any]] = {
    "m3.1": {},
    "m3": {"attention": ("full", "full", "sparse", "sparse"), "rope_theta": 5e6},
    "initial-block": {"sparse": replace(SPARSE, init_blocks=1)},
    "two-local-blocks": {"sparse": replace(SPARSE, local_blocks=2)},
    "no-forced-block": {"sparse": replace(SPARSE, local_blocks=0)},
    "activation": {"activation": SwigluOai(alpha=1.25, beta=0.5, limit=0.8)},
    "rope": {"rope_theta": 5e3, "rotary_dim": 16},
    "eps": {"rms_norm_eps": 0.05},
    "routing": {"moe": replace(MOE, experts_per_token=3, routed_scaling_factor=0.75)},
    "widths": {"moe": replace(MOE, shared_intermediate_size=40), "dense_intermediate_size": 56},
    "one-kv-head-each": {"num_heads": 2},
}


def ours(description: Text, values: dict[str, Any], ids: list[int]) -> np.ndarray:
    engine = tiny.engine(description, values, dtype="float64")
    sequence = Sequence(prompt=tuple(ids), params=None, seed=0, request=0, stop_ids=frozenset())
    engine.add(sequence)
    while not sequence.done:
        engine.step()
    return sequence.logits().double().numpy()


@pytest.mark.parametrize("name", CHANGES)
def test_equal(name: str) -> None:
    """53 tokens are 14 blocks, of which 3 are selected. Rows come back in float32, hence the bound."""
    description = tiny.text(**CHANGES[name])
    values = tiny.weights(tiny.trace(description), seed=9)
    ids = np.random.default_rng(1).integers(3, description.vocab_size, 53).tolist()
    want = independent.logits(description, {k: v.numpy() for k, v in values.items()}, ids)
    np.testing.assert_allclose(ours(description, values, ids), want, rtol=0, atol=3e-7 * np.abs(want).max())


@pytest.mark.parametrize("name", [n for n in CHANGES if n not in ("m3.1", "widths", "one-kv-head-each")])
def test_every_change_matters(name: str) -> None:
    """The comparison above can fail: each changed number moves the logits far beyond its bound."""
    changed, usual = tiny.text(**CHANGES[name]), tiny.text()
    if name == "m3":
        usual = tiny.text(attention=changed.attention)  # theta alone
    values = tiny.weights(tiny.trace(usual), seed=9)
    ids = np.random.default_rng(1).integers(3, usual.vocab_size, 53).tolist()
    want = independent.logits(usual, {k: v.numpy() for k, v in values.items()}, ids)
    assert np.abs(ours(changed, values, ids) - want).max() > 1e-4 * np.abs(want).max()
