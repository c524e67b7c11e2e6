"""The engine on the reference against `naive` composed into a whole model, and against itself where both must agree."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support import tiny

from m31.config import SparseAttention, Text
from m31.engine.engine import Engine, Sequence
from m31.engine.sampling import SamplingParams

M31 = tiny.text()
M3 = tiny.text(attention=("full", "full", "sparse", "sparse"))
INIT = tiny.text(
    sparse=SparseAttention(num_index_heads=2, index_dim=16, topk_blocks=4, block_size=4, local_blocks=2, init_blocks=1)
)
SHAPES = {"m3.1": M31, "m3": M3, "init-block": INIT}


def ids_for(description: Text, n: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, description.vocab_size, n).tolist()


def logits(engine: Engine, ids: list[int]) -> torch.Tensor:
    sequence = Sequence(prompt=tuple(ids), params=None, seed=0, request=0, stop_ids=frozenset())
    engine.add(sequence)
    while not sequence.done:
        engine.step()
    return sequence.logits()


def greedy(engine: Engine, prompts: list[list[int]], n: int) -> list[list[int]]:
    params = SamplingParams(max_tokens=n, temperature=0.0)
    sequences = [
        Sequence(prompt=tuple(p), params=params, seed=0, request=i, stop_ids=frozenset()) for i, p in enumerate(prompts)
    ]
    for s in sequences:
        engine.add(s)
    while engine.busy:
        engine.step()
    return [[t.token_id for t in s.sampled] for s in sequences]


@pytest.mark.parametrize("name", SHAPES)
def test_float64_equals_naive(name: str) -> None:
    """37 tokens are 10 blocks of which 3 are selected: the whole chain, index branch included."""
    description = SHAPES[name]
    graph = tiny.trace(description)
    values = tiny.weights(graph, seed=1)
    ids = ids_for(description, 37)
    want = tiny.naive_logits(description, values, ids)
    got = logits(tiny.engine(description, values, dtype="float64"), ids).double().numpy()
    # rows come back in float32
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-7 * np.abs(want).max())


@pytest.mark.parametrize("name", SHAPES)
def test_float32_is_close_to_naive(name: str) -> None:
    description = SHAPES[name]
    values = tiny.weights(tiny.trace(description), seed=2)
    ids = ids_for(description, 37)
    want = tiny.naive_logits(description, values, ids)
    got = logits(tiny.engine(description, values, dtype="float32"), ids).double().numpy()
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * np.abs(want).max())


def test_one_wrong_block_would_show() -> None:
    """The comparison can fail: one block more per query is far outside the bound used above."""
    other = tiny.text(
        sparse=SparseAttention(
            num_index_heads=2, index_dim=16, topk_blocks=4, block_size=4, local_blocks=1, init_blocks=0
        )
    )
    values = tiny.weights(tiny.trace(M31), seed=1)
    ids = ids_for(M31, 37)
    want = tiny.naive_logits(M31, values, ids)
    got = logits(tiny.engine(other, values, dtype="float64"), ids).double().numpy()
    assert np.abs(got - want).max() > 1e-3 * np.abs(want).max()


@settings(max_examples=25, deadline=None)
@given(chunk=st.integers(1, 41), n=st.integers(1, 40), name=st.sampled_from(sorted(SHAPES)))
def test_prefill_may_be_split_anywhere(chunk: int, n: int, name: str) -> None:
    description = SHAPES[name]
    values = tiny.weights(tiny.trace(description), seed=3)
    ids = ids_for(description, n, seed=n)
    whole = logits(tiny.engine(description, values, dtype="float64"), ids)
    split = logits(tiny.engine(description, values, dtype="float64", chunk=chunk), ids)
    torch.testing.assert_close(split, whole, rtol=0, atol=1e-6 * float(whole.abs().max()))


@pytest.mark.parametrize("name", SHAPES)
def test_decode_equals_prefill(name: str) -> None:
    """Greedy tokens decoded one by one are the argmax of a prefill over the whole text."""
    description = SHAPES[name]
    values = tiny.weights(tiny.trace(description), seed=4)
    prompt = ids_for(description, 9)
    out = greedy(tiny.engine(description, values, dtype="float64"), [prompt], 40)[0]
    rows = logits(tiny.engine(description, values, dtype="float64"), prompt + out[:-1])
    assert rows.argmax(-1).tolist()[len(prompt) - 1 :] == out


def test_a_batch_equals_its_members_alone() -> None:
    """Four sequences of different lengths, admitted together, in chunks that cut across them (BUG-70)."""
    values = tiny.weights(tiny.trace(M31), seed=5)
    prompts = [ids_for(M31, n, seed=n) for n in (1, 13, 30, 4)]
    alone = [greedy(tiny.engine(M31, values, dtype="float64"), [p], 12)[0] for p in prompts]
    together = greedy(tiny.engine(M31, values, dtype="float64", chunk=7), prompts, 12)
    assert together == alone


def test_physical_pages_do_not_matter() -> None:
    """A pool that other sequences have churned gives pages in another order (BUG-69, BUG-70)."""
    values = tiny.weights(tiny.trace(M31), seed=6)
    prompt = ids_for(M31, 23)
    fresh = tiny.engine(M31, values, dtype="float64")
    churned = tiny.engine(M31, values, dtype="float64")
    churned.pool._free = np.random.default_rng(0).permutation(churned.pool.pages).tolist()
    torch.testing.assert_close(logits(churned, prompt), logits(fresh, prompt), rtol=0, atol=0)
    assert greedy(churned, [prompt], 9) == greedy(fresh, [prompt], 9)


def test_pages_return_and_waiting_sequences_run() -> None:
    """A pool too small for all at once serves them one after the other and ends empty."""
    values = tiny.weights(tiny.trace(M31), seed=7)
    engine = tiny.engine(M31, values, dtype="float32", pages=10)
    prompts = [ids_for(M31, n, seed=n) for n in (20, 25, 3, 18)]
    out = greedy(engine, prompts, 10)
    assert [len(o) for o in out] == [10] * 4
    assert engine.pool.free == 10
    assert out == [greedy(tiny.engine(M31, values, dtype="float32"), [p], 10)[0] for p in prompts]


def test_a_plan_reuses_its_buffers_and_overwrites_all_it_reads() -> None:
    """Poisoned buffers change nothing, and a second run allocates none (padding is never read)."""
    values = tiny.weights(tiny.trace(M31), seed=8)
    engine = tiny.engine(M31, values, dtype="float64")
    prompt = ids_for(M31, 21)
    first = logits(engine, prompt)
    for plan, batch, _ in engine.compiler._plans.values():
        for buffer in plan._buffers.values():  # type: ignore[attr-defined]
            buffer.fill_(float("nan") if buffer.is_floating_point() else -(2**40))
        batch.tokens.fill_(10**9)
    addresses = [b.data_ptr() for p, *_ in engine.compiler._plans.values() for b in p._buffers.values()]  # type: ignore[attr-defined]
    torch.testing.assert_close(logits(engine, prompt), first, rtol=0, atol=0)
    assert addresses == [b.data_ptr() for p, *_ in engine.compiler._plans.values() for b in p._buffers.values()]  # type: ignore[attr-defined]


def test_a_sequence_that_leaves_in_mid_step_keeps_its_pages_until_the_step_is_over() -> None:
    """The garbage collector may end an abandoned generation inside a step of the same thread."""
    values = tiny.weights(tiny.trace(M31), seed=5)
    engine = tiny.engine(M31, values, dtype="float64")
    params = SamplingParams(max_tokens=6, temperature=0.0)
    stays, leaves = (Sequence(prompt=(5, 6, n), params=params, seed=0, request=0, stop_ids=frozenset()) for n in (7, 8))
    engine.add(stays)
    engine.add(leaves)
    engine.step()
    schedule = engine._schedule

    def and_collect() -> list[tuple[Sequence, int]]:
        work = schedule()
        engine.remove(leaves)
        assert leaves.pages
        return work

    engine._schedule = and_collect  # type: ignore[method-assign]
    engine.step()
    engine._schedule = schedule  # type: ignore[method-assign]
    assert (len(leaves.sampled), leaves.pages) == (1, [])
    while engine.busy:
        engine.step()
    assert [t.token_id for t in stays.sampled] == greedy(tiny.engine(M31, values, dtype="float64"), [[5, 6, 7]], 6)[0]
    assert engine.pool.free == engine.pool.pages
