"""The draft head against an independent numpy model of MODEL.md chapter 5, while it drafts for a real engine."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tests.support import independent_draft, tiny

from m31.config import SwigluOai
from m31.engine.drafting import DraftHead, extra
from m31.engine.engine import Engine, Sequence
from m31.engine.sampling import SamplingParams
from m31.errors import ContractViolation, GraphError
from m31.graph import NO_ROUNDING, Rounding, Shard, shard, trace, trace_draft

TEXT = tiny.text()
PROMPT = tuple(np.random.default_rng(3).integers(3, TEXT.vocab_size, 22).tolist())
CLOSE = 2e-6  # the table of cosines is float32 by definition, in numpy it is not
CHANGES: dict[str, dict[str, Any]] = {
    "plain": {},
    "one-row": {"block_size": 1},
    "published-block": {"block_size": 7},
    "window-smaller-than-block": {"sliding_window": 3},
    "window-of-a-page": {"sliding_window": 4},
    "everything-in-window": {"sliding_window": 4096},
    "first-layer": {"target_layer_ids": (0,)},
    "all-layers": {"target_layer_ids": (0, 1, 2, 3)},
    "rank": {"markov_rank": 11, "confidence_with_markov": False},
    "shape": {"num_layers": 3, "num_heads": 2, "head_dim": 12, "rotary_dim": 12, "intermediate_size": 24},
    "numbers": {"rope_theta": 5e3, "rms_norm_eps": 0.05, "activation": SwigluOai(alpha=1.25, beta=0.5, limit=0.8)},
}

SAME_WEIGHTS = [n for n in CHANGES if n not in ("plain", "shape", "rank", "all-layers", "first-layer")]


def made(seed: int = 4, **changes: Any) -> tuple[Engine, dict[str, torch.Tensor], Any]:
    head = tiny.draft(TEXT, **changes)
    values = tiny.weights(tiny.trace(TEXT), seed) | tiny.draft_weights(head, seed + 1)
    return tiny.engine(TEXT, values, dtype="float64", head=head), values, head


def generate(engine: Engine, new: int = 12) -> Sequence:
    params = SamplingParams(max_tokens=new, temperature=0.0)
    sequence = Sequence(prompt=PROMPT, params=params, seed=0, request=0, stop_ids=frozenset())
    engine.add(sequence)
    while not sequence.done:
        engine.step()
    assert sequence.error is None
    return sequence


@pytest.mark.parametrize("name", CHANGES)
def test_every_draft_is_that_of_the_chapter(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The context is longer than most windows, and pages of 4 tokens begin and end inside windows and blocks."""
    engine, values, head = made(**CHANGES[name])
    calls: list[tuple[int, int, int, Any, Any]] = []
    real = DraftHead.draft

    def draft(self: DraftHead, anchor: int, count: int, pages: Any, state: Any) -> Any:
        base = self._pass(anchor, count, state.position - 1, pages)[0].clone()
        found = real(self, anchor, count, pages, state)
        calls.append((state.position, anchor, count, base, found))
        return found

    monkeypatch.setattr(DraftHead, "draft", draft)
    sequence = generate(engine)
    ids = [*PROMPT, *(s.token_id for s in sequence.sampled)]
    arrays = {key: value.numpy() for key, value in values.items()}
    assert {count for _, _, count, _, _ in calls} >= {head.block_size}
    for position, anchor, count, base, found in calls:
        assert ids[position - 1] == anchor
        want, _ = independent_draft.base(head, TEXT, arrays, ids[:position], count)
        np.testing.assert_allclose(base.numpy(), want, rtol=0, atol=CLOSE * np.abs(want).max())
        tokens, _, sure = independent_draft.greedy(head, TEXT, arrays, ids[:position], count)
        assert list(found.tokens) == tokens
        np.testing.assert_allclose(found.confidence, sure, rtol=0, atol=CLOSE)


@pytest.mark.parametrize("name", SAME_WEIGHTS)
def test_every_change_matters(name: str) -> None:
    """The comparison can fail: each changed number moves the base logits far beyond its bound."""
    head = tiny.draft(TEXT)
    values = {k: v.numpy() for k, v in (tiny.weights(tiny.trace(TEXT), 4) | tiny.draft_weights(head, 5)).items()}
    other = replace(head, **CHANGES[name])
    count = min(head.block_size, other.block_size)
    one, _ = independent_draft.base(head, TEXT, values, list(PROMPT), head.block_size)
    two, _ = independent_draft.base(other, TEXT, values, list(PROMPT), other.block_size)
    assert np.abs(one[:count] - two[:count]).max() > 1e-4 * np.abs(one).max()


def test_a_sampled_draft_says_what_it_was_drawn_from(monkeypatch: pytest.MonkeyPatch) -> None:
    """q is the softmax of the Markov logits over the temperature, whatever else the request filters (§5.3)."""
    engine, values, head = made()
    seen: list[tuple[int, Any]] = []
    real = DraftHead.draft

    def draft(self: DraftHead, anchor: int, count: int, pages: Any, state: Any) -> Any:
        seen.append((state.position, real(self, anchor, count, pages, state)))
        return seen[-1][1]

    monkeypatch.setattr(DraftHead, "draft", draft)
    params = SamplingParams(max_tokens=10, temperature=0.7, top_k=3, top_p=0.5, min_p=0.2)
    sequence = Sequence(prompt=PROMPT, params=params, seed=5, request=0, stop_ids=frozenset())
    engine.add(sequence)
    while not sequence.done:
        engine.step()
    ids = [*PROMPT, *(s.token_id for s in sequence.sampled)]
    w = {key: value.double().numpy() for key, value in values.items()}
    for position, found in seen:
        rows, _ = independent_draft.base(head, TEXT, w, ids[:position], len(found.tokens))
        prev = ids[position - 1]
        for row, token, q in zip(rows, found.tokens, found.chances, strict=True):
            bias = w["dspark.markov_head.markov_w2.weight"] @ w["dspark.markov_head.markov_w1.weight"][prev]
            weights = np.exp((row + bias - (row + bias).max()) / 0.7)
            np.testing.assert_allclose(q, weights / weights.sum(), rtol=0, atol=10 * CLOSE)
            prev = token


def test_only_committed_tokens_have_rows_in_the_heads_cache() -> None:
    """Its pages are poisoned at the start: what was not written reads as NaN. The last token is never run."""
    engine, _, head = made()
    held: list[int] = []
    sequence = Sequence(
        prompt=PROMPT,
        params=SamplingParams(max_tokens=14, temperature=0.0),
        seed=0,
        request=0,
        stop_ids=frozenset(),
    )
    engine.add(sequence)
    drafter = engine.drafter
    assert isinstance(drafter, DraftHead)
    while not sequence.done:
        engine.step()
        held = held if sequence.done else list(sequence.pages)
        for layer in range(head.num_layers):
            for at, page in enumerate(held if not sequence.done else ()):
                for kind, values in drafter.cache.read(layer, page).items():
                    written = torch.isfinite(values).all(-1).all(0)
                    want = torch.arange(at * 4, at * 4 + 4) < sequence.computed
                    assert torch.equal(written, want), (layer, at, kind)
    assert sequence.tally.accepted < sequence.tally.drafted  # something was rejected


def test_taps_are_the_residual_streams_and_change_nothing_else() -> None:
    values = tiny.weights(tiny.trace(TEXT), 4)
    arrays = {k: v.double().numpy() for k, v in values.items()}
    want = independent_draft.residuals(TEXT, arrays, list(PROMPT))

    seen: list[torch.Tensor] = []

    class Nobody:
        tokens, caches, fallback_calls = 1, (), Counter[str]()

        def draft(self, *args: Any) -> Any:
            raise AssertionError("nothing is generated")

        def learn(self, taps: torch.Tensor, positions: Any, slots: Any) -> None:
            seen.append(taps.clone())

    engine = tiny.engine(TEXT, values, dtype="float64", head=None, drafter=Nobody())
    sequence = Sequence(prompt=PROMPT, params=None, seed=0, request=0, stop_ids=frozenset())
    engine.add(sequence)
    while not sequence.done:
        engine.step()
    np.testing.assert_allclose(torch.cat(seen).numpy(), want[0], rtol=0, atol=CLOSE * np.abs(want[0]).max())
    plain, tapped = trace(TEXT), trace(TEXT, taps=(1, 3))
    assert [c.op.spec.name for c in plain.calls] == [c.op.spec.name for c in tapped.calls if c.op.spec.name != "concat"]
    assert plain.extras == {}
    assert tapped.types[tapped.extras["taps"]].shape == ("T", 2 * TEXT.hidden_size)  # type: ignore[union-attr]
    even = tiny.text(vocab_size=62)
    ranks = shard(trace(even, taps=(1, 3)), even, Shard(0, 2))
    assert ranks.types[ranks.extras["taps"]].shape == ("T", 2 * TEXT.hidden_size)  # type: ignore[union-attr]


@pytest.mark.parametrize("taps", [(3, 1), (1, 1), (4,), (-1,)])
def test_taps_of_no_layer_are_refused(taps: tuple[int, ...]) -> None:
    with pytest.raises(GraphError, match="taps"):
        trace(TEXT, taps=taps)


def test_roundings_are_where_an_arithmetic_quantises() -> None:
    every = Rounding(kv=True, index=True, linear=True, experts=True, query=True)
    for graph in vars(trace_draft(tiny.draft(TEXT), NO_ROUNDING, None, ("", ""))).values():
        assert not [c for c in graph.calls if c.op.spec.name.startswith("round_")]
    graphs = trace_draft(tiny.draft(TEXT), every, None, ("", ""))
    made_by = {c.op.name: c for c in graphs.block.calls}
    for call in graphs.block.calls:
        if call.op.spec.name == "draft_attention":
            assert [made_by[x].op.spec.name for x in call.reads[:3]] == ["round_heads", "round_heads", "round_channels"]
        if call.op.spec.name == "linear" and "mlp.down" not in call.op.slots["weight"].name:
            assert made_by[call.reads[0]].op.spec.name == "round_channels"


def test_an_emulated_arithmetic_drafts_too() -> None:
    """Its own pages are BF16, which a q8kv4 arithmetic would refuse for the target's (§5.1)."""
    text = tiny.quantisable()
    head = tiny.draft(text, head_dim=32, intermediate_size=64)
    values: Any = tiny.weights(tiny.trace(text), 4) | tiny.draft_weights(head, 5)
    engine = tiny.engine(text, values, dtype="float32", kv="nvfp4", index="nvfp4", arithmetic="w8a8-q8kv4", head=head)
    sequence = generate(engine)
    assert sequence.tally.verifies
    assert "kv=bfloat16" in engine.drafter.cache.layout.layout_id  # type: ignore[union-attr]


def test_a_plan_without_extra_outputs_breaks_the_contract() -> None:
    with pytest.raises(ContractViolation, match="extra-outputs"):
        extra(object(), "taps")  # type: ignore[arg-type]
