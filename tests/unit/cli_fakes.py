"""A model that says what it is told to, for tests of the command line. Not part of the package."""

from __future__ import annotations

import sys
import time
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

import m31


@dataclass(frozen=True)
class FakeDecision:
    name: str = "reference"
    reason: str = "the only usable backend"


@dataclass(frozen=True)
class FakeEvent:
    text: str
    token_ids: tuple[int, ...]
    logprobs: Any = None


@dataclass(frozen=True)
class FakeStats:
    prompt_tokens: int
    generated_tokens: int
    prefill_seconds: float = 0.5
    decode_seconds: float = 2.0
    prefill_tokens_per_second: float | None = 24.0
    decode_tokens_per_second: float | None = 8.0
    accepted_per_verify: float | None = None
    draft_confidence: float | None = None
    seed: int = 7


class FakeSamplingParams:
    """Records its arguments; refuses what the library refuses."""

    def __init__(self, **given: Any) -> None:
        self.given = given


class FakeGeneration:
    def __init__(self, model: FakeModel, prompt: str) -> None:
        self._model, self._prompt = model, prompt
        self.text = ""
        self.token_ids: list[int] = []
        self.finish_reason: str | None = None
        self.closed = 0

    def events(self) -> Iterator[FakeEvent]:
        self._model.announce("prefill")
        time.sleep(self._model.prefill_seconds)
        number = 0
        while number < len(self._model.pieces) or self._model.endless:
            piece = self._model.pieces[number % len(self._model.pieces)]
            self.text += piece
            self.token_ids.append(number)
            logprobs = ({"token_id": number, "logprob": -0.5},) if self._model.logprobs else None
            yield FakeEvent(piece, (number,), logprobs)
            number += 1
            if number == self._model.fail_after:
                raise self._model.failure
            self._model.announce("step")
            time.sleep(self._model.step_seconds)
        self.finish_reason = "stop"

    def close(self) -> None:
        self.closed += 1
        if self._model.on_close:
            self._model.on_close()

    @property
    def stats(self) -> FakeStats:
        return FakeStats(len(self._prompt.split()), len(self.token_ids))


@dataclass
class FakeModel:
    pieces: Sequence[str] = ("Hel", "lo", " world")
    template: object | None = "a template"
    decision: FakeDecision = field(default_factory=FakeDecision)
    formats: Mapping[str, str] = field(
        default_factory=lambda: {"weights": "bf16", "kv": "float32", "index": "float32", "compute": "float32"}
    )
    notes: Sequence[str] = ()
    fallback_calls: Mapping[str, int] = field(default_factory=dict)
    endless: bool = False
    prefill_seconds: float = 0.0
    step_seconds: float = 0.0
    talkative: bool = False  # say on standard error what is going on, so that a test can interrupt exactly that
    load_seconds: float = 0.0
    fail_after: int | None = None
    failure: BaseException = field(default_factory=lambda: RuntimeError("kernel exploded"))
    logprobs: bool = False
    on_close: Any = None
    loads: list[tuple[Any, dict[str, Any]]] = field(default_factory=list)
    prompts: list[str] = field(default_factory=list)
    samplings: list[Any] = field(default_factory=list)
    conversations: list[list[Mapping[str, Any]]] = field(default_factory=list)
    generations: list[FakeGeneration] = field(default_factory=list)

    def announce(self, stage: str) -> None:
        if self.talkative:
            print(f"<{stage}>", file=sys.stderr, flush=True)

    def load(self, path: Any, **options: Any) -> FakeModel:
        self.announce("load")
        time.sleep(self.load_seconds)
        self.loads.append((path, options))
        return self

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        self.conversations.append([dict(message) for message in messages])
        return "".join(f"<{message['role']}>{message['content']}" for message in messages) + "<ai>"

    def generate(self, prompt: str, sampling: Any = None, *, special: bool = True) -> FakeGeneration:
        assert special, "a rendered prompt holds special tokens"
        self.prompts.append(prompt)
        self.samplings.append(sampling)
        self.generations.append(FakeGeneration(self, prompt))
        return self.generations[-1]


def sampling_module() -> types.ModuleType:
    """What stands in for `m31.engine.sampling`."""
    module = types.ModuleType("m31.engine.sampling")
    module.SamplingParams = FakeSamplingParams  # type: ignore[attr-defined]
    return module


def patch(model: FakeModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the command line meet `model` during one test."""
    monkeypatch.setitem(sys.modules, "m31.engine.sampling", sampling_module())
    # Into the module's dictionary: `setattr` would first ask for the real, lazily imported one.
    monkeypatch.setitem(vars(m31), "load", model.load)
    monkeypatch.delenv("M31_DEBUG", raising=False)


def install(model: FakeModel) -> None:
    """Make the command line meet `model` for the rest of this process."""
    sys.modules["m31.engine.sampling"] = sampling_module()
    m31.load = model.load  # type: ignore[attr-defined,assignment]
