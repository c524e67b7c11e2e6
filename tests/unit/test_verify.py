"""Acceptance of drafted tokens: exactly p, whatever was drafted (MODEL.md §5.4)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from m31.engine.philox import Purpose, uniforms
from m31.engine.sampling import RowState, SamplingParams, distribution, draw, sample
from m31.engine.verify import Drafted, keeps, replacement, verify
from m31.errors import NonFiniteLogits

V = 8
DRAWS = 60_000
LIMIT = 42.0  # chi-square of 7 degrees of freedom exceeds it once in two million


def chi_square(counts: Any, p: Any) -> float:
    assert counts[p == 0].sum() == 0
    expected = p[p > 0] * counts.sum()
    return float(((counts[p > 0] - expected) ** 2 / expected).sum())


def state(position: int = 5, **params: Any) -> RowState:
    return RowState(
        params=SamplingParams(**params), seed=11, request=0, position=position, prompt_ids=(1, 2), output_ids=(3,)
    )


def softmax(x: Any) -> Any:
    return np.exp(x - x.max()) / np.exp(x - x.max()).sum()


PAIRS: dict[str, tuple[Any, Any]] = {
    "near": (softmax(np.linspace(0, 2, V)), softmax(np.linspace(0, 1, V))),
    "far": (softmax(np.linspace(0, 5, V)), softmax(np.linspace(4, 0, V))),
    "equal": (softmax(np.linspace(0, 2, V)), softmax(np.linspace(0, 2, V))),
    "p-has-holes": (np.array([0.5, 0, 0.2, 0, 0.3, 0, 0, 0]), softmax(np.linspace(1, 0, V))),
    "q-one-hot": (softmax(np.linspace(0, 2, V)), np.eye(V)[6]),
    "disjoint": (np.array([0.5, 0.5, 0, 0, 0, 0, 0, 0]), np.array([0, 0, 0.5, 0, 0, 0, 0, 0.5])),
}


@pytest.mark.parametrize("name", PAIRS)
def test_the_result_is_distributed_as_p(name: str) -> None:
    """60,000 tokens drawn from q, then kept or replaced, against p; all numbers from the counter-based generator."""
    p, q = PAIRS[name]
    spots = np.arange(DRAWS)
    drafts, accepts, residuals = (
        uniforms(3, 0, spots, which) for which in (Purpose.DRAFT, Purpose.ACCEPT, Purpose.RESIDUAL)
    )
    tokens = np.array([draw(q, u) for u in drafts])
    kept = np.array([keeps(p, q, int(token), u) for token, u in zip(tokens, accepts, strict=True)])
    out = np.where(kept, tokens, [replacement(p, q, u) for u in residuals])
    assert chi_square(np.bincount(out, minlength=V), p) < LIMIT
    rate = np.minimum(p, q).sum()  # the most that any lossless rule keeps
    assert abs(kept.mean() - rate) < 5 * np.sqrt(max(rate * (1 - rate), 1e-9) / DRAWS) + 1e-12


def test_the_test_can_fail() -> None:
    """Keeping every draft, or drawing the replacement from p, is seen."""
    p, q = PAIRS["near"]
    spots = np.arange(DRAWS)
    tokens = np.array([draw(q, u) for u in uniforms(3, 0, spots, Purpose.DRAFT)])
    assert chi_square(np.bincount(tokens, minlength=V), p) > LIMIT
    accepts, residuals = uniforms(3, 0, spots, Purpose.ACCEPT), uniforms(3, 0, spots, Purpose.RESIDUAL)
    kept = np.array([keeps(p, q, int(token), u) for token, u in zip(tokens, accepts, strict=True)])
    wrong = np.where(kept, tokens, [draw(p, u) for u in residuals])
    assert chi_square(np.bincount(wrong, minlength=V), p) > LIMIT


def drafted(tokens: list[int], temperature: float = 1.0, seed: int = 0) -> Drafted:
    rng = np.random.default_rng(seed)
    return Drafted(tokens=tuple(tokens), chances=tuple(softmax(rng.standard_normal(V) / temperature) for _ in tokens))


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1.0, "top_p": 1.0},
        {"temperature": 0.6, "top_k": 3, "top_p": 0.9},
        {"temperature": 1.4, "top_p": 0.8, "min_p": 0.1, "presence_penalty": 0.7},
    ],
)
def test_every_position_of_a_verified_block_has_the_targets_distribution(params: dict[str, Any]) -> None:
    """Two drafts and a bonus, 8,000 seeds: the first token, and the second given the first, as without drafting."""
    rng = np.random.default_rng(2)
    logits = torch.tensor(rng.standard_normal((3, V)) * 1.5, dtype=torch.float32)
    chances = [softmax(rng.standard_normal(V)) for _ in range(2)]
    runs = 8_000
    u = [uniforms(seed, 0, np.arange(runs), Purpose.DRAFT) for seed in (1, 2)]
    first = np.zeros(V)
    second = np.zeros((V, V))
    lone = SamplingParams(**params)
    for run in range(runs):
        tokens = tuple(draw(q, float(us[run])) for q, us in zip(chances, u, strict=True))
        row = RowState(params=lone, seed=run, request=7, position=9, prompt_ids=(), output_ids=())
        out = verify(logits, Drafted(tokens=tokens, chances=tuple(chances)), row)
        first[out[0].token_id] += 1
        if len(out) > 1:
            second[out[0].token_id, out[1].token_id] += 1
    penalty = params.get("presence_penalty", 0.0)
    assert chi_square(first, distribution(logits[0].double().numpy(), lone)) < LIMIT
    # Only first tokens that were kept have a second one in this step; given the first, it is distributed as p of row 1.
    for token in range(V):
        if second[token].sum() > 300:
            row = logits[1].double().numpy().copy()
            row[token] -= penalty
            assert chi_square(second[token], distribution(row, lone)) < LIMIT


def test_greedy_keeps_the_longest_right_prefix() -> None:
    logits = torch.full((4, V), -1.0)
    for row, best in enumerate((4, 2, 7, 1)):
        logits[row, best] = 3.0
    greedy = state(temperature=0.0)
    ids = {
        (4, 2, 7): [4, 2, 7, 1],
        (4, 2, 0): [4, 2, 7],
        (4, 0, 7): [4, 2],
        (0, 2, 7): [4],
    }
    for tokens, want in ids.items():
        assert [s.token_id for s in verify(logits, Drafted(tokens=tokens), greedy)] == want


def test_penalties_see_the_drafted_tokens_before() -> None:
    """Row 1 is penalised for the token that row 0 kept, as it would be without drafting."""
    logits = torch.zeros(2, V)
    logits[0, 4] = 3.0
    logits[1, 4], logits[1, 5] = 2.0, 1.5
    found = verify(logits, Drafted(tokens=(4,)), state(temperature=0.0, presence_penalty=1.0))
    assert [s.token_id for s in found] == [4, 5]


def test_the_token_behind_a_full_block_is_the_usual_sample() -> None:
    logits = torch.tensor(np.random.default_rng(0).standard_normal((1, V)), dtype=torch.float32)
    row = state(temperature=1.0, logprobs=2)
    assert verify(logits, Drafted(tokens=()), row) == sample(logits, [row])


def test_log_probabilities_are_those_of_the_target() -> None:
    logits = torch.tensor(np.random.default_rng(0).standard_normal((3, V)), dtype=torch.float32)
    best = logits.argmax(-1).tolist()
    found = verify(logits, Drafted(tokens=tuple(best[:2])), state(temperature=0.0, logprobs=1))
    want = torch.log_softmax(logits.double(), -1).max(-1).values.tolist()
    assert [s.logprob for s in found] == pytest.approx(want)


def test_logits_that_are_not_finite_end_what_follows_and_nothing_before() -> None:
    logits = torch.zeros(3, V)
    logits[0, 4] = logits[1, 2] = 1.0
    logits[2] = torch.nan
    greedy = state(temperature=0.0)
    assert [s.token_id for s in verify(logits, Drafted(tokens=(4, 2)), greedy)] == [4, 2]
    logits[0, 1] = torch.inf
    with pytest.raises(NonFiniteLogits):
        verify(logits, Drafted(tokens=(4, 2)), greedy)


def test_a_block_depends_on_seed_and_position_alone() -> None:
    logits = torch.tensor(np.random.default_rng(0).standard_normal((4, V)), dtype=torch.float32)
    draft = drafted([1, 2, 3])
    once = verify(logits, draft, state())
    verify(torch.zeros(4, V), draft, state(position=90))
    assert verify(logits, draft, state()) == once
    others = {tuple(s.token_id for s in verify(logits, draft, state(position=at))) for at in range(20)}
    assert len(others) > 1


def test_every_row_draws_the_numbers_of_its_own_position() -> None:
    """What follows a kept token is what a block that begins there gives."""
    logits = torch.tensor(np.random.default_rng(0).standard_normal((4, V)), dtype=torch.float32)
    draft = drafted([1, 2, 3])
    rest = Drafted(tokens=draft.tokens[1:], chances=draft.chances[1:])
    compared = 0
    for at in range(60):
        found = verify(logits, draft, state(position=at))
        if len(found) > 1:
            compared += 1
            assert found[1:] == verify(logits[1:], rest, state(position=at + 1))
    assert compared > 10
