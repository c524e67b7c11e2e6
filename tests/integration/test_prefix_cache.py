"""Sequences that begin alike share pages: fewer tokens are computed and the outputs are the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support import tiny

import m31
from m31.cli import demo
from m31.engine.engine import Engine, Sequence
from m31.engine.sampling import SamplingParams
from m31.engine.seals import PLAIN, Context
from m31.errors import NonFiniteLogits
from m31.graph import StepBatch

TEXT = tiny.text(num_layers=2)  # pages of 4 tokens
WEIGHTS = tiny.weights(tiny.trace(TEXT), seed=3)
PREFIX = 300


def make(*, prefix_cache: bool = True, **options: Any) -> Engine:
    engine = tiny.engine(TEXT, WEIGHTS, dtype="float64", prefix_cache=prefix_cache, **{"pages": 240, **options})
    engine.pool.poison = True  # pages that become free: a stale one gives NaN
    return engine


def ids(n: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(3, TEXT.vocab_size, n).tolist())


def request(prompt: tuple[int, ...], new: int = 6, context: Context = PLAIN) -> Sequence:
    params = SamplingParams(max_tokens=new, temperature=0.0)
    return Sequence(prompt=prompt, params=params, seed=0, request=0, stop_ids=frozenset(), context=context)


def scoring(prompt: tuple[int, ...]) -> Sequence:
    return Sequence(prompt=prompt, params=None, seed=0, request=0, stop_ids=frozenset())


def run(engine: Engine, *sequences: Sequence) -> list[list[int]]:
    """Tokens of sequences that run together."""
    for sequence in sequences:
        engine.add(sequence)
    while engine.busy:
        engine.step()
    return [[sampled.token_id for sampled in sequence.sampled] for sequence in sequences]


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of every step."""
    seen: list[int] = []
    real = StepBatch.fill

    def fill(self: StepBatch, **given: Any) -> None:
        seen.append(len(given["tokens"]))
        real(self, **given)

    monkeypatch.setattr(StepBatch, "fill", fill)
    return seen


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The logits of every sampled token."""
    seen: list[torch.Tensor] = []
    real = Engine._result

    def result(self: Engine, sequence: Sequence, logits: torch.Tensor) -> Any:
        seen.append(logits.clone())
        return real(self, sequence, logits)

    monkeypatch.setattr(Engine, "_result", result)
    return seen


def test_a_known_beginning_is_not_computed_again(computed: list[int], rows: list[torch.Tensor]) -> None:
    """300 tokens are known and 20 are new. Bit for bit what a prefill in chunks of 300 and 20 computes."""
    prompt = ids(PREFIX + 20)
    alone = run(make(prefix_cache=False, chunk=PREFIX), request(prompt))
    assert computed == [PREFIX, 20, 1, 1, 1, 1, 1]
    want = list(rows)
    computed.clear()
    engine = make()
    run(engine, request(prompt[:PREFIX], new=1))
    assert (engine.pool.cached, engine.pool.free) == (PREFIX // 4, engine.pool.pages)
    computed.clear()
    rows.clear()
    again = request(prompt)
    assert run(engine, again) == alone
    assert computed == [20, 1, 1, 1, 1, 1]
    assert torch.equal(torch.cat(rows), torch.cat(want))
    assert engine.pool.free == engine.pool.pages


def test_the_next_turn_finds_the_answer_of_the_last(computed: list[int]) -> None:
    """Generated tokens seal pages too. The last one was never run, so its page is not known."""
    engine = make()
    first = request(ids(9), new=8)
    (answer,) = run(engine, first)
    turn = (*ids(9), *answer, *ids(5, seed=1))
    computed.clear()
    got = run(engine, request(turn))
    assert computed[0] == len(turn) - 16
    assert got == run(make(prefix_cache=False), request(turn))


def test_two_at_a_time_end_on_the_same_pages(computed: list[int]) -> None:
    """They begin before either is known: both compute, and one copy of the pages stays."""
    prompt = ids(41)
    alone = run(make(prefix_cache=False), request(prompt))
    engine = make()
    assert run(engine, request(prompt), request(prompt)) == alone * 2
    assert engine.pool.cached == 11  # 46 - 1 tokens
    computed.clear()
    assert run(engine, request(prompt)) == alone
    assert computed[0] == 1


def test_outputs_are_right_after_much_churn() -> None:
    """BUG-69: a pool smaller than all beginnings together, fifty rounds, free pages poisoned."""
    engine, reference = make(pages=24, chunk=16), make(prefix_cache=False)
    beginnings = [ids(n, seed=n) for n in (12, 24, 37, 33)]
    rng = np.random.default_rng(0)
    wanted: dict[tuple[int, ...], list[int]] = {}
    hits = 0
    for _ in range(50):
        batch = []
        for _ in range(int(rng.integers(1, 4))):
            beginning = beginnings[rng.integers(len(beginnings))]
            batch.append(beginning[: int(rng.integers(5, len(beginning) + 1))] + ids(2, seed=int(rng.integers(3))))
        hits += sum(len(engine.pool.find(PLAIN, prompt)) for prompt in batch)
        for prompt, tokens in zip(batch, run(engine, *(request(p, new=3) for p in batch)), strict=True):
            if prompt not in wanted:
                (wanted[prompt],) = run(reference, request(prompt, new=3))
            assert tokens == wanted[prompt]
        assert engine.pool.free == 24
    assert hits > 50


def test_logits_of_all_tokens_are_computed_and_are_not_shared(computed: list[int]) -> None:
    engine, prompt = make(), ids(60)
    run(engine, request(prompt, new=1))
    known = engine.pool.cached
    alone, shared = scoring(prompt), scoring(prompt)
    run(make(prefix_cache=False), alone)
    computed.clear()
    run(engine, shared)
    assert computed == [60]
    assert torch.equal(shared.logits(), alone.logits())
    assert engine.pool.cached == known
    fresh = make()
    run(fresh, scoring(prompt))
    assert fresh.pool.cached == 0


def test_tenants_do_not_find_each_other(computed: list[int]) -> None:
    engine, prompt = make(), ids(40)
    salted = [Context(adapter=None, salt=salt, media=()) for salt in ("a", "b", "a")]
    outputs = []
    for context in [PLAIN, *salted]:
        computed.clear()
        outputs += run(engine, request(prompt, context=context))
        assert computed[0] == (40 if len(outputs) < 4 else 4)
    assert outputs == [outputs[0]] * 4


def test_what_a_failed_sequence_computed_is_not_found(computed: list[int]) -> None:
    """A page goes bad between two chunks of a prefill; the failure shows at the first token only."""
    engine, prompt = make(chunk=17), ids(36)
    good = run(make(prefix_cache=False), request(prompt))
    bad = request(prompt)
    engine.add(bad)
    engine.step()
    engine.step()
    assert len(engine.pool.find(PLAIN, prompt)) == 8
    engine.cache.poison(bad.pages[8:])  # the local block of the two tokens to come
    while engine.busy:
        engine.step()
    assert isinstance(bad.error, NonFiniteLogits)
    assert not bad.sampled
    assert (engine.pool.cached, engine.pool.free) == (0, engine.pool.pages)
    computed.clear()
    assert run(engine, request(prompt)) == good
    assert computed[:3] == [17, 17, 2]


def test_a_sequence_that_is_removed_leaves_what_it_had_finished(computed: list[int]) -> None:
    engine, prompt = make(chunk=16), ids(40)
    cancelled = request(prompt)
    engine.add(cancelled)
    engine.step()
    engine.remove(cancelled)
    assert (engine.pool.cached, engine.pool.free) == (4, engine.pool.pages)
    computed.clear()
    assert run(engine, request(prompt)) == run(make(prefix_cache=False), request(prompt))
    assert computed[:2] == [16, 8]


def test_a_known_beginning_helps_a_sequence_in() -> None:
    """Pages in use that are shared need not be free twice: two of nine pages each run together in a pool of twelve."""
    engine, prompt = make(pages=12), ids(33)
    first, second = request(prompt, new=4), request(prompt, new=4)
    engine.add(first)
    engine.step()
    engine.add(second)
    engine.step()
    assert second.sampled
    assert not first.done
    run(engine)
    assert len(first.sampled) == len(second.sampled) == 4
    assert engine.pool.free == 12


def test_a_loaded_model_computes_everything_unless_told(tmp_path: Path, computed: list[int]) -> None:
    """Pages of 128 tokens: of 300 equal tokens 256 are known. `m31.load` leaves it off: see decision 013."""
    demo.write(tmp_path / "model", seed=0, layers=4)
    model = m31.load(tmp_path / "model", backend="reference")
    prompt = [*range(10, 10 + 290), *range(10)]
    texts = []
    for on in (False, False, True, True):
        model.engine.pool.prefix_cache = on
        computed.clear()
        generation = model.generate(prompt, max_tokens=5, temperature=0.0, ignore_eos=True)
        list(generation)
        texts.append(generation.token_ids)
        assert computed[0] == (44 if len(texts) == 4 else 300)
    assert texts == [texts[0]] * 4
    assert model.engine.pool.free == model.engine.pool.pages
