"""What the engine runs in a step, whom it admits, and that a step that fails loses nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.support import tiny

from m31.engine import engine as engine_module
from m31.engine.engine import Engine, Sequence
from m31.engine.sampling import SamplingParams
from m31.errors import M31Error
from m31.graph import StepBatch, StepClass

PAGE = 4  # page_tokens of tiny.text()
TEXT = tiny.text(num_layers=2)
WEIGHTS = tiny.weights(tiny.trace(TEXT), seed=1)


def make(*, pages: int = 64, chunk: int = 2048) -> Engine:
    return tiny.engine(TEXT, WEIGHTS, dtype="float32", pages=pages, chunk=chunk)


def ids_for(n: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(3, TEXT.vocab_size, n).tolist())


def decoding(n: int, new: int, seed: int = 0) -> Sequence:
    """A prompt of `n` tokens, `new` to generate."""
    params = SamplingParams(max_tokens=new, temperature=0.0)
    return Sequence(prompt=ids_for(n, seed), params=params, seed=0, request=0, stop_ids=frozenset())


def scoring(n: int, seed: int = 0) -> Sequence:
    """`n` tokens whose logits are wanted."""
    return Sequence(prompt=ids_for(n, seed), params=None, seed=0, request=0, stop_ids=frozenset())


def finish(engine: Engine) -> None:
    for _ in range(1000):
        if not engine.busy:
            return
        engine.step()
    raise AssertionError("the engine never ends")


def tokens(sequence: Sequence) -> list[int]:
    return [sampled.token_id for sampled in sequence.sampled]


@pytest.fixture
def fills(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Everything that batches are filled with, in order."""
    seen: list[dict[str, Any]] = []
    real = StepBatch.fill

    def fill(self: StepBatch, **given: Any) -> None:
        seen.append({name: [list(v) if isinstance(v, list) else v for v in value] for name, value in given.items()})
        real(self, **given)

    monkeypatch.setattr(StepBatch, "fill", fill)
    return seen


def compiled(engine: Engine) -> list[StepClass]:
    """The step classes that the engine compiles from now on."""
    seen: list[StepClass] = []
    real = engine.compiler.serving.session.compile

    def compile_(bound: Any, step: StepClass) -> Any:
        seen.append(step)
        return real(bound, step)

    engine.compiler.serving.session.compile = compile_  # type: ignore[method-assign]
    return seen


# --- what a step holds -----------------------------------------------------------------------------------------------


def test_a_batch_says_where_every_token_is(fills: list[dict[str, Any]]) -> None:
    """Two sequences in chunks: contexts include the step's tokens, and pages cover exactly the context."""
    engine = make(chunk=7)
    first, second = decoding(10, 3, seed=1), decoding(9, 2, seed=2)
    engine.add(first)
    engine.add(second)
    finish(engine)
    # 7 of the first; its other 3 and 4 of the second; decode and the last 5; decode both
    assert [fill["q_lens"] for fill in fills] == [[7], [3, 4], [1, 5], [1, 1]]
    assert [fill["seq_lens"] for fill in fills] == [[7], [10, 4], [11, 9], [12, 10]]
    assert [fill["positions"] for fill in fills] == [
        [*range(7)],
        [7, 8, 9, 0, 1, 2, 3],
        [10, 4, 5, 6, 7, 8],
        [11, 9],
    ]
    assert [fill["out_rows"] for fill in fills] == [[], [2], [0, 5], [0, 1]]
    assert fills[1]["tokens"] == [*first.prompt[7:], *second.prompt[:4]]
    assert fills[2]["tokens"] == [tokens(first)[0], *second.prompt[4:]]
    assert fills[3]["tokens"] == [tokens(first)[1], tokens(second)[0]]
    for fill in fills:
        assert [len(pages) for pages in fill["page_table"]] == [-(-n // PAGE) for n in fill["seq_lens"]]
        owner = [pages for pages, n in zip(fill["page_table"], fill["q_lens"], strict=True) for _ in range(n)]
        at = zip(owner, fill["positions"], strict=True)
        assert fill["slot_map"] == [pages[p // PAGE] * PAGE + p % PAGE for pages, p in at]
    tables = fills[3]["page_table"]
    assert not set(tables[0]) & set(tables[1])


def test_a_decoding_sequence_goes_before_a_long_prompt(fills: list[dict[str, Any]]) -> None:
    """The later arrival has one token pending: it gets a token in every step of the other one's prefill."""
    engine = make(chunk=8)
    long, short = decoding(41, 2, seed=1), decoding(1, 6, seed=2)
    engine.add(long)
    engine.add(short)
    for step in range(1, 6):
        engine.step()
        assert (len(short.sampled), long.computed) == (step, 7 * step)
    finish(engine)
    assert [sum(fill["q_lens"]) for fill in fills[:5]] == [8] * 5
    assert max(sum(fill["q_lens"]) for fill in fills) == 8


def test_prefill_keeps_the_order_of_arrival(fills: list[dict[str, Any]]) -> None:
    engine = make(chunk=8)
    first, second = decoding(12, 1, seed=1), decoding(12, 1, seed=2)
    engine.add(first)
    engine.add(second)
    engine.step()
    assert (first.computed, second.computed) == (8, 0)
    engine.step()
    assert (first.computed, second.computed) == (12, 4)
    assert (first.reason, second.reason) == ("length", None)
    finish(engine)
    assert [fill["q_lens"] for fill in fills] == [[8], [4, 4], [8]]


def test_logits_of_every_token_are_taken_256_at_a_time(fills: list[dict[str, Any]]) -> None:
    """A full-vocabulary row per token is memory: more than 256 of a sequence never exist in one step."""
    engine = make(pages=200)
    steps = compiled(engine)
    sequence = scoring(600)
    engine.add(sequence)
    finish(engine)
    assert [fill["q_lens"] for fill in fills] == [[256], [256], [88]]
    assert [step.rows for step in steps] == [256, 256, 128]
    assert sequence.logits().shape == (600, TEXT.vocab_size)
    fills.clear()
    engine.add(decoding(600, 1))
    finish(engine)
    assert [fill["q_lens"] for fill in fills] == [[600]]  # one row only: no such limit


def test_plans_are_kept_for_eight_step_classes_the_least_recent_goes() -> None:
    engine = make(pages=200)
    steps = compiled(engine)

    def run(n: int) -> None:
        engine.add(scoring(n))
        finish(engine)

    lengths = [1, 2, 4, 8, 16, 32, 64, 128]
    for n in lengths:
        run(n)
    assert [step.tokens for step in steps] == lengths
    run(1)  # the oldest plan is now the most recent
    assert len(steps) == len(engine.compiler._plans) == 8
    run(256)  # takes the place of the class of 2
    assert len(steps) == 9
    assert len(engine.compiler._plans) == 8
    run(1)
    run(4)
    assert len(steps) == 9
    run(2)
    assert [step.tokens for step in steps[8:]] == [256, 2]
    assert len(engine.compiler._plans) == 8


# --- admission -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "new"), [(40, 1), (31, 10), (1, 40)])
def test_a_sequence_that_never_fits_is_refused_at_once(n: int, new: int) -> None:
    """The last sampled token needs no place: prompt + new - 1 tokens, 10 pages of 4."""
    engine = make(pages=10)
    engine.add(decoding(n, new))
    with pytest.raises(
        M31Error, match="engine: a sequence of 41 tokens needs 11 pages; expected at most the pool's 10"
    ):
        engine.add(decoding(n + 1, new))
    finish(engine)
    assert not engine.busy
    assert engine.pool.free == 10
    with pytest.raises(M31Error, match="a sequence of 41 tokens"):
        engine.add(scoring(41))


def test_admission_is_first_come_first_served() -> None:
    """A small sequence behind a large one waits with it, although its pages are free: the large one must not starve."""
    engine = make(pages=10)
    running, large, small = decoding(20, 5, seed=1), decoding(20, 5, seed=2), decoding(2, 2, seed=3)
    for sequence in (running, large, small):
        engine.add(sequence)
    while not running.done:
        engine.step()
        assert (engine.pool.free, large.pages, small.pages) == (10 if running.done else 4, [], [])
        assert not large.sampled
        assert not small.sampled
    engine.step()
    assert engine.pool.free == 10 - 6 - 1
    assert (len(large.pages), len(small.pages)) == (5, 1)  # the sixth is promised
    finish(engine)
    assert engine.pool.free == 10
    assert [len(s.sampled) for s in (running, large, small)] == [5, 5, 2]


def test_pages_for_all_tokens_to_come_are_promised_from_the_start() -> None:
    """They are taken when they are needed; until then others can only have the rest."""
    engine = make(pages=10)
    sequence = decoding(3, 14)  # 16 tokens in the cache
    engine.add(sequence)
    engine.step()
    while not sequence.done:
        assert engine.pool.free == 6
        assert len(sequence.pages) == -(-sequence.computed // PAGE)
        engine.step()
    assert engine.pool.free == 10


def test_a_waiting_sequence_can_be_removed() -> None:
    engine = make(pages=10)
    first, second, third = decoding(30, 4, seed=1), decoding(30, 4, seed=2), decoding(2, 2, seed=3)
    for sequence in (first, second, third):
        engine.add(sequence)
    engine.step()
    engine.remove(second)
    engine.remove(second)
    engine.step()
    assert third.sampled
    finish(engine)
    assert not second.sampled
    assert engine.pool.free == 10


# --- a step that fails -----------------------------------------------------------------------------------------------


class Interrupt(BaseException):
    """Something from outside, like KeyboardInterrupt, that pytest does not take for its own."""


def fail_in_the_plan(engine: Engine, monkeypatch: pytest.MonkeyPatch, at: int, *, before: bool) -> None:
    """Run number `at` raises, before or after the forward pass has written the cache."""
    calls = iter(range(10**6))
    real = engine.compiler.serving.session.compile

    class Faulty:
        def __init__(self, plan: Any) -> None:
            self._plan = plan

        def run(self, *args: Any) -> torch.Tensor:
            due = next(calls) == at
            if due and before:
                raise Interrupt
            logits: torch.Tensor = self._plan.run(*args)
            if due:
                raise Interrupt
            return logits

    engine.compiler.serving.session.compile = lambda bound, step: Faulty(real(bound, step))  # type: ignore[method-assign,return-value,assignment]


def fail_in_sampling(engine: Engine, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """Call number `at` of the sampler raises."""
    calls = iter(range(10**6))
    real = engine_module.sample

    def sample(*args: Any) -> Any:
        if next(calls) == at:
            raise Interrupt
        return real(*args)

    monkeypatch.setattr(engine_module, "sample", sample)


FAILURES: dict[str, Callable[..., None]] = {
    "before-forward": lambda *args: fail_in_the_plan(*args, before=True),
    "after-forward": lambda *args: fail_in_the_plan(*args, before=False),
    "sampling": fail_in_sampling,
}


@pytest.mark.parametrize("at", [0, 1, 2, 4, 6])
@pytest.mark.parametrize("where", FAILURES)
def test_a_step_that_fails_is_done_again(where: str, at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefill chunk, last chunk or decode: the tokens are those of an undisturbed run, of the companion too."""
    undisturbed = [decoding(9, 6, seed=1), decoding(6, 5, seed=2)]
    calm = make(chunk=6)
    for sequence in undisturbed:
        calm.add(sequence)
    finish(calm)

    engine = make(chunk=6)
    FAILURES[where](engine, monkeypatch, at)
    sequences = [decoding(9, 6, seed=1), decoding(6, 5, seed=2)]
    for sequence in sequences:
        engine.add(sequence)
    with pytest.raises(Interrupt):
        finish(engine)
    assert engine.busy
    finish(engine)
    assert [tokens(s) for s in sequences] == [tokens(s) for s in undisturbed]
    assert [s.reason for s in sequences] == ["length", "length"]
    assert engine.pool.free == engine.pool.pages


@pytest.mark.parametrize("at", [0, 1, 3])
def test_an_interrupt_between_sampling_and_delivery_loses_no_token(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    undisturbed, sequence = decoding(9, 6), decoding(9, 6)
    calm, engine = make(chunk=6), make(chunk=6)
    calm.add(undisturbed)
    finish(calm)
    calls = iter(range(10**6))
    real = Engine._deliver

    def deliver(self: Engine, *args: Any) -> None:
        if next(calls) == at:
            raise Interrupt
        real(self, *args)

    monkeypatch.setattr(Engine, "_deliver", deliver)
    engine.add(sequence)
    with pytest.raises(Interrupt):
        finish(engine)
    finish(engine)
    assert tokens(sequence) == tokens(undisturbed)


@pytest.mark.parametrize("before", [True, False])
def test_logits_survive_a_step_that_fails(before: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    undisturbed, sequence = scoring(20), scoring(20)
    calm, engine = make(chunk=6), make(chunk=6)
    calm.add(undisturbed)
    finish(calm)
    fail_in_the_plan(engine, monkeypatch, 1, before=before)
    engine.add(sequence)
    with pytest.raises(Interrupt):
        finish(engine)
    finish(engine)
    assert sequence.logits().shape == (20, TEXT.vocab_size)
    torch.testing.assert_close(sequence.logits(), undisturbed.logits(), rtol=0, atol=0)
