"""The loop of draft, verify, accept and rewind: drafting changes how fast a text comes, never which text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from tests.support import tiny

from m31.engine.drafting import DraftHead
from m31.engine.engine import Engine
from m31.engine.engine import Sequence as Work
from m31.engine.sampling import RowState, SamplingParams, distribution
from m31.engine.verify import Drafted
from m31.errors import NonFiniteLogits
from m31.graph import StepClass

PAGE = 4  # page_tokens of tiny.text()
TEXT = tiny.text(num_layers=2)
VALUES = tiny.weights(tiny.trace(TEXT), seed=1)
GREEDY = SamplingParams(max_tokens=20, temperature=0.0)


def prompt(n: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(3, TEXT.vocab_size, n).tolist())


def ask(
    ids: tuple[int, ...], new: int = 20, *, stops: Sequence[int] = (), request: int = 0, seed: int = 9, **params: Any
) -> Work:
    given = SamplingParams(**{"max_tokens": new, "temperature": 0.0, **params})
    return Work(prompt=ids, params=given, seed=seed, request=request, stop_ids=frozenset(stops))


def finish(engine: Engine, *sequences: Work) -> None:
    for sequence in sequences:
        engine.add(sequence)
    for _ in range(2000):
        if not engine.busy:
            break
        engine.step()
    assert not engine.busy
    assert engine.pool.free == engine.pool.pages


def tokens(sequence: Work) -> list[int]:
    return [s.token_id for s in sequence.sampled]


def plain(ids: tuple[int, ...], new: int = 20, values: Any = VALUES, **kind: Any) -> list[int]:
    """What comes without drafting."""
    sequence = ask(ids, new, **kind)
    finish(tiny.engine(TEXT, values, dtype="float64"), sequence)
    return tokens(sequence)


class Told:
    """A draft head that proposes what `answer(position)` says, wrong or right, and records what it learns."""

    def __init__(self, answer: Callable[[int], int], count: int = 4) -> None:
        self.tokens, self.caches, self.answer = count, (), answer
        self.fallback_calls = Counter[str]()
        self.learnt: dict[int, int] = {}
        self.asked: list[int] = []

    def draft(self, anchor: int, count: int, pages: Sequence[int], state: RowState) -> Drafted:
        self.asked.append(count)
        proposed = tuple(self.answer(state.position + i) for i in range(count))
        chances = () if state.params.greedy else tuple(np.eye(TEXT.vocab_size)[token] for token in proposed)
        return Drafted(tokens=proposed, chances=chances, confidence=(0.5,) * count)

    def learn(self, taps: torch.Tensor, positions: Sequence[int], slots: Sequence[int]) -> None:
        assert taps.shape == (len(positions), TEXT.hidden_size)
        assert torch.isfinite(taps).all()
        for at in positions:
            self.learnt[at] = self.learnt.get(at, 0) + 1


def told(answer: Callable[[int], int], count: int = 4, **kind: Any) -> tuple[Engine, Told]:
    drafter = Told(answer, count)
    return tiny.engine(TEXT, VALUES, dtype="float64", drafter=drafter, **kind), drafter


# ------------------------------------------------------------------------------------------- the same text, greedy


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("count", [1, 3, 7])
def test_greedy_text_is_that_without_drafting(seed: int, count: int) -> None:
    """Random models and heads; prompts around page edges, so that drafts and rewinds cross them."""
    values = tiny.weights(tiny.trace(TEXT), seed=seed)
    head = tiny.draft(TEXT, block_size=7, target_layer_ids=(0, 1))
    engine = tiny.engine(
        TEXT, values | tiny.draft_weights(head, seed + 50), dtype="float64", head=head, draft_tokens=count
    )
    for n in (1, PAGE - 1, PAGE, PAGE + 1, 3 * PAGE, 4 * PAGE + 2):
        sequence = ask(prompt(n, seed + n), 17)
        finish(engine, sequence)
        assert tokens(sequence) == plain(prompt(n, seed + n), 17, values)
        assert sequence.tally.verifies > 0


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_an_engine_is_as_good_after_many_texts(prefix_cache: bool) -> None:
    """Pages come back from rejected drafts and are found again with the head's rows in them."""
    head = tiny.draft(TEXT, target_layer_ids=(0, 1))
    values = VALUES | tiny.draft_weights(head, 3)
    engine = tiny.engine(TEXT, values, dtype="float64", head=head, pages=16, prefix_cache=prefix_cache)
    for turn in range(6):
        ids = prompt(13, seed=turn % 2)
        sequence = ask(ids, 15)
        finish(engine, sequence)
        assert tokens(sequence) == plain(ids, 15)


# ------------------------------------------------------------------------------------------------- doubles that know


RIGHT = plain(prompt(6), 21)


def right(position: int) -> int:
    return RIGHT[position - 6]


def wrong(position: int) -> int:
    return (RIGHT[position - 6] + 1) % TEXT.vocab_size


def test_a_head_that_is_always_right_has_everything_accepted() -> None:
    engine, drafter = told(right)
    sequence = ask(prompt(6), 21)
    finish(engine, sequence)
    assert tokens(sequence) == RIGHT
    # The first token comes from the prompt's step, then each verify gives four drafts and one more.
    assert (sequence.tally.verifies, sequence.tally.accepted, sequence.tally.drafted) == (4, 16, 16)
    assert sequence.tally.confidence == 8.0
    assert drafter.asked == [4] * 4
    assert drafter.learnt == dict.fromkeys(range(6 + 20), 1)  # every token once, the last is never run


def test_a_head_that_is_always_wrong_has_nothing_accepted() -> None:
    engine, drafter = told(wrong)
    sequence = ask(prompt(6), 21)
    finish(engine, sequence)
    assert tokens(sequence) == RIGHT
    assert (sequence.tally.verifies, sequence.tally.accepted) == (19, 0)  # the last token needs no draft
    assert drafter.learnt == dict.fromkeys(range(6 + 20), 1)


@pytest.mark.parametrize("good", range(4))
def test_what_is_right_before_the_first_mistake_is_kept(good: int) -> None:
    """Drafts whose first `good` tokens are right: as many are kept each time, and the next is the target's."""
    start: list[int] = []
    engine, drafter = told(lambda position: right(position) if position < start[-1] + good else wrong(position))
    real = drafter.draft

    def draft(anchor: int, count: int, pages: Sequence[int], state: RowState) -> Drafted:
        start.append(state.position)
        return real(anchor, count, pages, state)

    drafter.draft = draft  # type: ignore[method-assign]
    sequence = ask(prompt(6), 21)
    finish(engine, sequence)
    assert tokens(sequence) == RIGHT
    assert start == list(range(7, 7 + len(start) * (good + 1), good + 1))


def test_alternating() -> None:
    engine, _ = told(lambda position: right(position) if position % 3 else wrong(position))
    sequence = ask(prompt(6), 21)
    finish(engine, sequence)
    assert tokens(sequence) == RIGHT
    assert 0 < sequence.tally.accepted < sequence.tally.drafted


@pytest.mark.parametrize("answer", [right, wrong])
@pytest.mark.parametrize("new", range(1, 12))
def test_max_tokens_inside_a_draft(answer: Callable[[int], int], new: int) -> None:
    """Never more is drafted than may still be generated: the sequence stays within the pages it was promised."""
    engine, drafter = told(answer)
    sequence = ask(prompt(6), new)
    finish(engine, sequence)
    assert tokens(sequence) == RIGHT[:new]
    assert sequence.reason == "length"
    assert all(0 < count <= new - 2 for count in drafter.asked)


@pytest.mark.parametrize("answer", [right, wrong])
@pytest.mark.parametrize("at", range(12))
def test_a_stop_token_inside_a_draft(answer: Callable[[int], int], at: int) -> None:
    stop = RIGHT[at]
    first = RIGHT.index(stop)
    engine, drafter = told(answer)
    sequence = ask(prompt(6), 21, stops=(stop,))
    finish(engine, sequence)
    assert tokens(sequence) == RIGHT[: first + 1]
    assert sequence.reason == "stop"
    assert max(drafter.learnt) == 6 + first - 1  # the token that ends the text is never run


def test_a_block_is_as_long_as_the_step_allows() -> None:
    engine, drafter = told(right, chunk=3)
    sequence = ask(prompt(6), 21)
    finish(engine, sequence)
    assert tokens(sequence) == RIGHT
    assert set(drafter.asked) <= {1, 2}


def test_no_tokens_are_drafted_for_logits_or_before_the_first_token() -> None:
    engine, drafter = told(wrong)
    scores = Work(prompt=prompt(9), params=None, seed=0, request=0, stop_ids=frozenset())
    one = ask(prompt(6), 1)
    finish(engine, scores, one)
    assert drafter.asked == []
    assert len(scores.logits()) == 9


def test_the_first_token_is_sampled_also_where_one_token_of_the_prompt_is_left() -> None:
    """A prompt of one token, or all of it but one found in the prefix cache: the text must not depend on that."""
    engine, drafter = told(lambda position: 5)
    sequence = ask(prompt(1), 8)
    engine.add(sequence)
    engine.step()
    assert (drafter.asked, len(sequence.sampled)) == ([], 1)
    engine.step()
    assert drafter.asked == [4]


def test_the_step_that_verifies_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _ = told(right)
    seen: list[StepClass] = []
    real = engine.compiler.plan
    monkeypatch.setattr(engine.compiler, "plan", lambda step: (seen.append(step), real(step))[1])
    finish(engine, ask(prompt(6), 11))
    assert [(s.kind, s.q_len) for s in seen] == [("mixed", 0), ("verify", 5), ("verify", 5)]


# ------------------------------------------------------------------------------------------------ company and chance


def with_head(**kind: Any) -> Engine:
    head = tiny.draft(TEXT, target_layer_ids=(0, 1))
    return tiny.engine(TEXT, VALUES | tiny.draft_weights(head, 3), dtype="float64", head=head, **kind)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_company_changes_no_text(temperature: float) -> None:
    """Also where the step's budget is too small for all drafts, so that some wait."""
    lone = []
    for i in range(4):
        sequence = ask(prompt(5 + 3 * i, i), 12, temperature=temperature, top_p=1.0, request=i)
        finish(with_head(), sequence)
        lone.append(tokens(sequence))
    for chunk in (2048, 13, 7):
        together = [ask(prompt(5 + 3 * i, i), 12, temperature=temperature, top_p=1.0, request=i) for i in range(4)]
        scores = Work(prompt=prompt(11), params=None, seed=0, request=0, stop_ids=frozenset())
        finish(with_head(chunk=chunk), *together[:2], scores, *together[2:])
        assert [tokens(s) for s in together] == lone


def test_sampled_text_is_distributed_as_without_drafting() -> None:
    """Second and third token of 700 seeds, most of them out of verify steps, against the target's own probabilities.

    Every text of two tokens has a probability that the target alone says; the likeliest are cells, the rest is one.
    """
    ids, kind = prompt(6), {"temperature": 0.7, "top_k": 4, "top_p": 1.0}
    params = SamplingParams(max_tokens=3, **kind)  # type: ignore[arg-type]

    def after(text: tuple[int, ...]) -> Any:
        scores = Work(prompt=text, params=None, seed=0, request=0, stop_ids=frozenset())
        finish(reader, scores)
        return distribution(scores.logits()[-1].double().numpy(), params)

    reader, engine = tiny.engine(TEXT, VALUES, dtype="float64"), with_head()
    want: dict[tuple[int, int], float] = {}
    p1 = after(ids)
    for a in np.flatnonzero(p1):
        p2 = after((*ids, int(a)))
        for b in np.flatnonzero(p2):
            p3 = after((*ids, int(a), int(b)))
            for c in np.flatnonzero(p3):
                want[int(b), int(c)] = want.get((int(b), int(c)), 0.0) + float(p1[a] * p2[b] * p3[c])
    assert sum(want.values()) == pytest.approx(1)
    runs = 700
    counts = dict.fromkeys(want, 0)
    for start in range(0, runs, 25):  # company changes nothing and saves time
        batch = [ask(ids, 3, seed=seed, **kind) for seed in range(start, start + 25)]
        finish(engine, *batch)
        assert all(s.tally.verifies == 1 for s in batch)
        for sequence in batch:
            _, b, c = tokens(sequence)
            counts[b, c] += 1
    cells = [key for key, p in want.items() if p * runs >= 5]
    observed = np.array([*(counts[key] for key in cells), runs - sum(counts[key] for key in cells)])
    expected = np.array([*(want[key] * runs for key in cells), runs * (1 - sum(want[key] for key in cells))])
    chi = float(((observed - expected) ** 2 / expected).sum())
    assert chi < len(cells) + 5 * np.sqrt(2 * len(cells))


# ---------------------------------------------------------------------------------------------------------- failures


def test_an_interrupt_anywhere_leaves_an_engine_that_goes_on() -> None:
    """Ctrl-C at each of the places between drafting and committing; the text is the same, nothing stays behind."""
    places = ("_draft", "_forward", "_result", "_learn", "_deliver", "_commit")
    for place in places:
        engine, _ = told(lambda position: right(position) if position % 3 else wrong(position))
        sequence = ask(prompt(6), 21)
        engine.add(sequence)
        real, calls = getattr(engine, place), [0]

        def interrupted(*args: Any, real: Any = real, calls: list[int] = calls) -> Any:
            calls[0] += 1
            if calls[0] in (2, 5):
                raise KeyboardInterrupt
            return real(*args)

        setattr(engine, place, interrupted)
        stops = 0
        while engine.busy:
            try:
                engine.step()
            except KeyboardInterrupt:
                stops += 1
        assert stops == 2, place
        assert tokens(sequence) == RIGHT, place
        assert engine.pool.free == engine.pool.pages, place


@pytest.mark.parametrize("method", ["commit", "rewind"])
def test_an_interrupt_between_draft_and_decision(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafted tokens that nobody decided about are dropped by the next step."""
    engine, _ = told(lambda position: right(position) if position % 3 else wrong(position))
    sequence = ask(prompt(6), 21)
    engine.add(sequence)
    engine.step()
    assert sequence.table is not None

    def interrupted(count: int) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(sequence.table, method, interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    while engine.busy:
        engine.step()
    assert tokens(sequence) == RIGHT
    assert engine.pool.free == engine.pool.pages


def test_a_head_whose_logits_are_not_finite_fails_its_own_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, drafter = told(right)
    real = drafter.draft

    def draft(anchor: int, count: int, pages: Sequence[int], state: RowState) -> Drafted:
        if state.request == 1:
            raise NonFiniteLogits("the logits hold NaN", where="draft head")
        return real(anchor, count, pages, state)

    monkeypatch.setattr(drafter, "draft", draft)
    good, bad = ask(prompt(6), 21), ask(prompt(6), 21, request=1)
    finish(engine, good, bad)
    assert tokens(good) == RIGHT
    assert isinstance(bad.error, NonFiniteLogits)
    alone = ask(prompt(6), 21, request=1)
    finish(engine, alone)
    assert isinstance(alone.error, NonFiniteLogits)


def test_a_copied_page_has_the_heads_rows() -> None:
    """Forks share a page until one writes: the copy is made in both caches."""
    engine = with_head()
    drafter = engine.drafter
    assert isinstance(drafter, DraftHead)
    sequence = ask(prompt(6), 3)
    engine.add(sequence)
    engine.step()
    assert sequence.table is not None
    fork = sequence.table.fork(capacity=12)
    old = fork.pages[-1]
    fork.place(1)
    new = fork.pages[-1]
    assert new != old
    for cache in (engine.cache, drafter.cache):
        before, after = cache.read(0, old)["k"], cache.read(0, new)["k"]
        assert torch.equal(before[:, :2], after[:, :2])
        assert torch.isfinite(after[:, :2]).all()
