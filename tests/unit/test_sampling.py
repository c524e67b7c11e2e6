"""Sampling: parameters, filters against hand formulas and transformers, distributions, independence."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from m31.engine.philox import Purpose, uniform
from m31.engine.sampling import (
    RowState,
    SamplingParams,
    distribution,
    draw,
    log_softmax,
    penalise,
    sample,
)
from m31.errors import NonFiniteLogits, OpRefused, RequestError

PLAIN = SamplingParams(top_p=1.0)


def row(params=PLAIN, *, seed=1, request=0, position=0, prompt=(), output=()):
    return RowState(params=params, seed=seed, request=request, position=position, prompt_ids=prompt, output_ids=output)


def random_logits(rows, vocab, seed=0, scale=3.0):
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


# -- parameters


def test_documented_defaults():
    assert dataclasses.asdict(SamplingParams()) == {
        "max_tokens": None,
        "temperature": 1.0,
        "top_p": 0.95,
        "top_k": 0,
        "min_p": 0.0,
        "seed": None,
        "stop": (),
        "stop_token_ids": (),
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "logprobs": None,
        "ignore_eos": False,
    }


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("max_tokens", 0, "an integer from 1 to 1,048,576"),
        ("max_tokens", True, "an integer from 1"),
        ("max_tokens", 1.0, "an integer from 1"),
        ("max_tokens", 2**20 + 1, "an integer from 1"),
        ("temperature", -0.1, "a number from 0 to 100"),
        ("temperature", math.nan, "a number from 0 to 100"),
        ("temperature", math.inf, "a number from 0 to 100"),
        ("temperature", 10**400, "a number from 0 to 100"),
        ("temperature", False, "a number from 0 to 100"),
        ("temperature", "1", "a number from 0 to 100"),
        ("top_p", 0.0, "a number above 0, up to 1"),
        ("top_p", 1.0001, "a number above 0, up to 1"),
        ("top_p", math.nan, "a number above 0, up to 1"),
        ("top_k", -1, "an integer from 0 to 2,147,483,647; 0 switches it off"),
        ("top_k", 2**31, "an integer from 0"),
        ("top_k", 5.0, "an integer from 0"),
        ("min_p", -0.5, "a number from 0 to 1"),
        ("min_p", 1.5, "a number from 0 to 1"),
        ("seed", -1, "an integer from 0 to 18,446,744,073,709,551,615"),
        ("seed", 2**64, "an integer from 0"),
        ("repetition_penalty", 0.0, "a number from 0.01 to 100"),
        ("presence_penalty", 2.5, "a number from -2 to 2"),
        ("frequency_penalty", -2.5, "a number from -2 to 2"),
        ("logprobs", -1, "an integer from 0 to 128"),
        ("logprobs", 129, "an integer from 0 to 128"),
        ("logprobs", True, "an integer from 0 to 128"),
        ("stop", "text", "single string as"),
        ("stop", ("",), "non-empty strings"),
        ("stop", (3,), "non-empty strings"),
        ("stop", ("a",) * 65, "up to 64"),
        ("stop", ("a" * 4097,), "at most 4,096 characters"),
        ("stop_token_ids", (-1,), "an integer from 0"),
        ("stop_token_ids", 7, "token ids"),
        ("ignore_eos", 1, "True or False"),
    ],
)
def test_bad_parameters_are_refused_by_name(name, value, text):
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{name: value})
    message = str(caught.value)
    assert message.startswith(f"{name}: {name} is ")
    assert text in message
    assert caught.value.where == name


def test_lists_become_tuples_and_params_are_hashable():
    params = SamplingParams(stop=["a"], stop_token_ids=[3])
    assert (params.stop, params.stop_token_ids) == (("a",), (3,))
    assert hash(params) == hash(SamplingParams(stop=("a",), stop_token_ids=(3,)))


def test_a_missing_seed_is_drawn_once_and_reported():
    params = SamplingParams()
    first, second = params.resolved(), params.resolved()
    assert first.seed is not None
    assert first.seed != second.seed
    assert first.resolved() is first
    assert first.max_tokens == 256
    assert params.resolved(room=10).max_tokens == 10
    assert params.resolved(room=0).max_tokens == 1
    assert SamplingParams(max_tokens=300).resolved(room=10).max_tokens == 300
    assert SamplingParams(seed=0).resolved().seed == 0


# -- greedy


def test_greedy_is_the_lowest_id_of_the_largest():
    logits = torch.tensor([[1.0, 5.0, 5.0, 5.0], [5.0, 5.0, -9.0, 5.0]])
    for params in (SamplingParams(temperature=0), SamplingParams(top_k=1)):
        assert [s.token_id for s in sample(logits, [row(params), row(params)])] == [1, 0]


def test_greedy_ignores_seed_and_position():
    """BUG-75: a greedy path must not draw random numbers."""
    logits = random_logits(1, 100)
    params = SamplingParams(temperature=0, top_p=0.5)
    got = {sample(logits, [row(params, seed=s, position=s)])[0].token_id for s in range(50)}
    assert got == {int(logits.argmax())}


# -- filters


def warped(logits, params):
    """transformers' own filters, in its order, as probabilities in float64."""
    from transformers.generation import logits_process as lp

    scores = torch.from_numpy(logits).double()[None]
    ids = torch.zeros(1, 1, dtype=torch.long)
    if params.temperature != 1:
        scores = lp.TemperatureLogitsWarper(params.temperature)(ids, scores)
    if params.top_k:
        scores = lp.TopKLogitsWarper(params.top_k)(ids, scores)
    if params.top_p < 1:
        scores = lp.TopPLogitsWarper(params.top_p)(ids, scores)
    if params.min_p:
        scores = lp.MinPLogitsWarper(params.min_p)(ids, scores)
    return scores.softmax(-1)[0].numpy()


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(top_p=1.0, temperature=0.7),
        SamplingParams(top_p=1.0, top_k=5),
        SamplingParams(top_p=0.8),
        SamplingParams(top_p=1.0, min_p=0.1),
        SamplingParams(temperature=1.6, top_k=20, top_p=0.9, min_p=0.05),
        SamplingParams(temperature=0.3, top_p=0.01),
        SamplingParams(top_p=1.0, top_k=10_000),
    ],
)
def test_filters_equal_transformers(params, seed):
    logits = random_logits(1, 300, seed=seed)[0].double().numpy()
    np.testing.assert_allclose(distribution(logits, params), warped(logits, params), rtol=1e-9, atol=1e-15)


def test_top_p_of_a_flat_distribution():
    logits = random_logits(1, 5000, scale=0.1)[0].double().numpy()
    params = SamplingParams(top_p=0.9)
    got = distribution(logits, params)
    assert (got > 0).sum() > 4000
    np.testing.assert_allclose(got, warped(logits, params), rtol=1e-9)


def test_ties_keep_the_lowest_ids():
    logits = np.zeros(10)
    assert np.flatnonzero(distribution(logits, SamplingParams(top_p=1.0, top_k=3))).tolist() == [0, 1, 2]
    assert np.flatnonzero(distribution(logits, SamplingParams(top_p=0.35))).tolist() == [0, 1, 2, 3]


def test_top_p_keeps_the_token_that_reaches_the_mass_and_at_least_one():
    logits = np.log(np.array([0.5, 0.3, 0.2]))
    assert np.flatnonzero(distribution(logits, SamplingParams(top_p=0.6))).tolist() == [0, 1]
    assert np.flatnonzero(distribution(logits, SamplingParams(top_p=1e-300))).tolist() == [0]


def test_min_p_comes_after_top_p():
    # top-p 0.6 keeps the first two; the third would pass min-p alone.
    logits = np.log(np.array([0.4, 0.3, 0.2, 0.1]))
    kept = np.flatnonzero(distribution(logits, SamplingParams(top_p=0.6, min_p=0.4)))
    assert kept.tolist() == [0, 1]


def test_extreme_temperatures():
    logits = np.array([1.0, 3.0, 2.0, -math.inf])
    cold = distribution(logits, SamplingParams(top_p=1.0, temperature=5e-324))
    assert cold.tolist() == [0.0, 1.0, 0.0, 0.0]
    hot = distribution(logits, SamplingParams(top_p=1.0, temperature=100))
    assert hot[3] == 0
    assert np.ptp(hot[:3]) < 0.01


# -- penalties


@given(
    penalty=st.floats(0.05, 10),
    prompt=st.lists(st.integers(0, 19), max_size=8),
    output=st.lists(st.integers(0, 19), max_size=8),
)
@settings(max_examples=50)
def test_repetition_penalty_equals_transformers(penalty, prompt, output):
    from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

    logits = random_logits(1, 20, seed=3).double()
    ids = torch.tensor([[*prompt, *output]], dtype=torch.long)
    theirs = RepetitionPenaltyLogitsProcessor(penalty)(ids, logits)[0] if ids.numel() else logits[0]
    state = row(SamplingParams(repetition_penalty=penalty), prompt=prompt, output=output)
    np.testing.assert_allclose(penalise(logits[0].numpy(), state), theirs.numpy(), rtol=1e-12)


def test_presence_and_frequency_by_hand():
    logits = np.array([1.0, 1.0, 1.0, -1.0])
    params = SamplingParams(presence_penalty=0.5, frequency_penalty=0.25, repetition_penalty=2.0)
    got = penalise(logits, row(params, prompt=(0, 3), output=(1, 1, 1)))
    # 0 and 3: prompt only, so repetition only (divided when positive, multiplied when negative).
    # 1: repetition first, then 3 times frequency, then presence.
    assert got.tolist() == [0.5, 0.5 - 3 * 0.25 - 0.5, 1.0, -2.0]
    assert logits.tolist() == [1.0, 1.0, 1.0, -1.0]


def test_penalties_change_the_greedy_choice():
    logits = torch.tensor([[2.0, 1.9, 0.0]])
    params = SamplingParams(temperature=0, frequency_penalty=0.2)
    assert sample(logits, [row(params, output=(0,))])[0].token_id == 1


def test_penalty_tokens_outside_the_vocabulary_are_refused():
    params = SamplingParams(repetition_penalty=1.5)
    with pytest.raises(RequestError, match=r"request 4, position 9: token ids .* outside .*; expected 0 to 2"):
        sample(torch.zeros(1, 3), [row(params, request=4, position=9, prompt=(3,))])


# -- distributions


def chi_square_limit(freedom):
    """Upper 1e-4 point of chi-square, Wilson-Hilferty."""
    return freedom * (1 - 2 / (9 * freedom) + 3.719 * math.sqrt(2 / (9 * freedom))) ** 3


def chi_square(tokens, probabilities):
    """Statistic and degrees of freedom, rare tokens pooled; an impossible token gives infinity."""
    counts = np.bincount(tokens, minlength=len(probabilities))
    if counts[probabilities == 0].any():
        return math.inf, 1
    expected = probabilities * len(tokens)
    common = expected >= 5
    seen = np.append(counts[common], counts[~common].sum())
    want = np.append(expected[common], expected[~common].sum())
    seen, want = seen[want > 0], want[want > 0]
    return float(((seen - want) ** 2 / want).sum()), len(want) - 1


DISTRIBUTIONS = [
    SamplingParams(top_p=1.0),
    SamplingParams(top_p=1.0, temperature=0.6),
    SamplingParams(top_p=1.0, temperature=2.0),
    SamplingParams(top_p=1.0, top_k=6),
    SamplingParams(top_p=0.8),
    SamplingParams(top_p=1.0, min_p=0.08),
]


@pytest.mark.parametrize("params", DISTRIBUTIONS)
def test_histogram_matches_the_distribution(params):
    """BUG-72: a sampler that ignores its parameters, or is greedy, must be seen."""
    draws = 2500
    logits = random_logits(1, 24, seed=11, scale=1.2)
    exact = warped(logits[0].double().numpy(), params)
    rows = [row(params, seed=77, position=position) for position in range(draws)]
    tokens = np.array([s.token_id for s in sample(logits.expand(draws, -1), rows)])
    statistic, freedom = chi_square(tokens, exact)
    assert statistic < chi_square_limit(freedom)
    # The same criterion refuses a greedy sampler and one with another temperature.
    assert chi_square(np.full(draws, exact.argmax()), exact)[0] > chi_square_limit(freedom)
    other = warped(logits[0].double().numpy(), dataclasses.replace(params, temperature=params.temperature * 1.4))
    assert chi_square(tokens, other)[0] > chi_square_limit(chi_square(tokens, other)[1])


@pytest.mark.parametrize("axis", ["seed", "request", "position"])
def test_seed_request_and_position_each_give_fresh_numbers(axis):
    draws = 1500
    logits = random_logits(1, 8, seed=5, scale=1.0)
    tokens = np.array([s.token_id for s in sample(logits.expand(draws, -1), [row(**{axis: i}) for i in range(draws)])])
    statistic, freedom = chi_square(tokens, logits[0].double().softmax(-1).numpy())
    assert statistic < chi_square_limit(freedom)


def test_draw_is_the_inverse_of_the_cumulative_distribution():
    p = np.array([0.0, 0.25, 0.0, 0.5, 0.25, 0.0])
    assert [draw(p, u) for u in (0.0, 0.2499, 0.25, 0.7499, 0.75, 1 - 2**-53)] == [1, 1, 3, 3, 4, 4]


@given(
    st.lists(st.floats(0, 1), min_size=1, max_size=12).filter(lambda p: sum(p) > 0), st.floats(0, 1, exclude_max=True)
)
def test_draw_never_gives_an_impossible_token(weights, u):
    p = np.array(weights) / sum(weights)
    assert p[draw(p, u)] > 0


def test_the_number_drawn_is_the_one_of_seed_request_position():
    """A kernel elsewhere can redo the draw from these four numbers (DESIGN.md §5)."""
    logits = random_logits(1, 50)
    got = sample(logits, [row(seed=9, request=3, position=41)])[0].token_id
    p = distribution(logits[0].double().numpy(), PLAIN)
    assert got == draw(p, uniform(9, 3, 41, Purpose.SAMPLE))


# -- independence of the batch

PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.5, 1.0, 1.5]),
    top_k=st.sampled_from([0, 1, 3]),
    top_p=st.sampled_from([0.5, 1.0]),
    min_p=st.sampled_from([0.0, 0.2]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    logprobs=st.sampled_from([None, 0, 2]),
)


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_a_row_does_not_depend_on_the_others_nor_on_order(data):
    """BUG-70, BUG-115: bitwise the same alone, in a batch, and in a permuted batch."""
    count = data.draw(st.integers(1, 6))
    logits = random_logits(count, 40, seed=data.draw(st.integers(0, 1000)))
    rows = [
        row(data.draw(PARAMS), seed=data.draw(st.integers(0, 9)), request=i, position=i, prompt=[i], output=[2 * i])
        for i in range(count)
    ]
    together = sample(logits, rows)
    order = data.draw(st.permutations(range(count)))
    assert sample(logits[order], [rows[i] for i in order]) == [together[i] for i in order]
    assert [sample(logits[i : i + 1], [rows[i]])[0] for i in range(count)] == together


def test_logits_are_not_changed_and_may_be_strided():
    base = random_logits(6, 40)
    before = base.clone()
    params = SamplingParams(repetition_penalty=1.5, logprobs=3)
    strided = base[::2]
    rows = [row(params, position=i, prompt=[1]) for i in range(3)]
    assert sample(strided, rows) == sample(strided.contiguous(), rows)
    assert torch.equal(base, before)


# -- log-probabilities


def test_logprobs_are_the_models_own():
    logits = random_logits(1, 30, seed=2)
    params = SamplingParams(temperature=0.0, logprobs=4, repetition_penalty=50.0, top_p=0.1)
    got = sample(logits, [row(params, output=(int(logits.argmax()),))])[0]
    exact = logits[0].double().log_softmax(-1)
    values, ids = exact.topk(4)
    assert [i for i, _ in got.top_logprobs] == ids.tolist()
    assert [v for _, v in got.top_logprobs] == pytest.approx(values.tolist(), rel=1e-12)
    assert got.token_id != ids[0]
    assert got.logprob == pytest.approx(float(exact[got.token_id]), rel=1e-12)


def test_logprobs_zero_gives_the_chosen_one_only_and_more_than_the_vocabulary_all():
    logits = torch.tensor([[0.0, 0.0, 1.0]])
    assert sample(logits, [row(SamplingParams(temperature=0, logprobs=0))])[0].top_logprobs == ()
    top = sample(logits, [row(SamplingParams(temperature=0, logprobs=100))])[0].top_logprobs
    assert [i for i, _ in top] == [2, 0, 1]
    none = sample(logits, [row()])[0]
    assert none.logprob is None
    assert none.top_logprobs is None


def test_log_softmax_survives_large_logits():
    assert log_softmax(np.array([1e4, 1e4 - 1])).tolist() == pytest.approx([-0.3132616875, -1.3132616875])


# -- refusals


@pytest.mark.parametrize(("bad", "what"), [(math.nan, "NaN"), (math.inf, r"\+inf"), (None, "only -inf")])
@pytest.mark.parametrize("params", [PLAIN, SamplingParams(temperature=0)])
def test_non_finite_logits_name_the_row(bad, what, params):
    logits = random_logits(3, 10)
    if bad is None:
        logits[1] = -math.inf
    else:
        logits[1, 4] = bad
    rows = [row(params, request=10 + i, position=100 + i) for i in range(3)]
    with pytest.raises(NonFiniteLogits, match=f"^request 11, position 101: the logits hold {what}; expected finite"):
        sample(logits, rows)


def test_minus_infinity_only_forbids_a_token():
    logits = torch.zeros(200, 3)
    logits[:, 1] = -math.inf
    tokens = {s.token_id for s in sample(logits, [row(position=i) for i in range(200)])}
    assert tokens == {0, 2}


@pytest.mark.parametrize(
    "logits", [torch.zeros(3), torch.zeros(2, 3), torch.zeros(1, 0), torch.zeros(1, 3, dtype=torch.bfloat16)]
)
def test_wrong_logits_are_refused(logits):
    with pytest.raises(
        OpRefused, match=r"sample: logits are torch.* for 1 rows; expected float32 \[rows, vocabulary\]"
    ):
        sample(logits, [row()])


def test_an_empty_batch_is_empty():
    assert sample(torch.zeros(0, 5), []) == []
