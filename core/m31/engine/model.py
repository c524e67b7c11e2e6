"""What a user holds: a loaded model that generates text or gives logits."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from m31.engine.engine import Engine
from m31.engine.sampling import Sampled, SamplingParams
from m31.engine.seals import PLAIN, Context
from m31.engine.sequence import Sequence as EngineSequence
from m31.engine.stops import StopStrings
from m31.errors import ContextLimitExceeded, RequestError, TemplateError, TokenizerError
from m31.text.detokenizer import Detokenizer
from m31.text.messages import MEDIA_TYPES

if TYPE_CHECKING:
    from m31.config import Model as ModelConfig
    from m31.sdk import Decision
    from m31.text.template import ChatTemplate
    from m31.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Cap:
    """The most tokens of one sequence, and who says so."""

    tokens: int
    who: str


@dataclass(frozen=True)
class Stats:
    """Counts and wall-clock times of one generation; rates are None where no time was spent.

    Without a draft head the figures of drafting are 0 and None.
    """

    prompt_tokens: int
    generated_tokens: int
    prefill_seconds: float  # from the request to its first token
    decode_seconds: float  # from the first token to the last
    seed: int
    verifies: int = 0  # steps that verified a draft
    drafted_tokens: int = 0
    accepted_tokens: int = 0  # of the drafted ones
    draft_confidence: float | None = None  # the head's own estimate of accepted over drafted

    @property
    def accepted_per_verify(self) -> float | None:
        """Drafted tokens that a verify step kept, on average; it gives one more token besides."""
        return self.accepted_tokens / self.verifies if self.verifies else None

    @property
    def prefill_tokens_per_second(self) -> float | None:
        """Prompt tokens over prefill time."""
        return self.prompt_tokens / self.prefill_seconds if self.prefill_seconds > 0 else None

    @property
    def decode_tokens_per_second(self) -> float | None:
        """Tokens after the first over decode time."""
        steps = self.generated_tokens - 1
        return steps / self.decode_seconds if self.decode_seconds > 0 and steps > 0 else None


@dataclass(frozen=True)
class Event:
    """What became visible at one moment: text (may be empty while a character or a stop string is undecided)."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[Sampled, ...]


class Generation:
    """A running generation. Iterating gives the text piece by piece; `events` gives tokens and log-probabilities.

    Attributes:
        text, token_ids: everything so far. `token_ids` includes the token that ended the text.
        finish_reason: "stop", "length", "cancelled", or None while running.
    """

    def __init__(
        self, engine: Engine, sequence: EngineSequence, tokenizer: Tokenizer | None, stops: tuple[str, ...]
    ) -> None:
        self._engine, self._sequence = engine, sequence
        self._detokenizer = Detokenizer(tokenizer, continuing=True) if tokenizer is not None else None
        self._stops = StopStrings(stops)
        self._started = time.perf_counter()
        self._first = self._last = 0.0
        self.text = ""
        self.token_ids: list[int] = []
        self.finish_reason: str | None = None
        engine.add(sequence)

    def __iter__(self) -> Iterator[str]:
        """The non-empty pieces of text."""
        return (event.text for event in self.events() if event.text)

    def events(self) -> Iterator[Event]:
        """One event per token; shares its place with iteration. `close` adds text that was held back to `text` only."""
        while (event := self._next()) is not None:
            yield event

    def close(self) -> None:
        """Stop now, keep what was produced, free the pages. Closing twice, or after the end, does nothing."""
        if self.finish_reason is None:
            self.finish_reason = "cancelled"
            self.text += self._held()
        self._engine.remove(self._sequence)

    def _held(self) -> str:
        """Text that was held back because it might have become a character or a stop string."""
        held = self._detokenizer.flush() if self._detokenizer is not None else ""
        held, stopped = self._stops.push(held)
        return held if stopped is not None else held + self._stops.flush()

    def __enter__(self) -> Generation:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        # An abandoned generation must not keep its pages. No iterator is kept here, so no cycle delays this.
        self._engine.remove(self._sequence)

    @property
    def stats(self) -> Stats:
        """Figures so far."""
        tally = self._sequence.tally
        return Stats(
            prompt_tokens=len(self._sequence.prompt),
            generated_tokens=len(self.token_ids),
            prefill_seconds=(self._first or time.perf_counter()) - self._started,
            decode_seconds=self._last - self._first,
            seed=self._sequence.seed,
            verifies=tally.verifies,
            drafted_tokens=tally.drafted,
            accepted_tokens=tally.accepted,
            draft_confidence=tally.confidence / tally.drafted if tally.drafted else None,
        )

    def _next(self) -> Event | None:
        """The next event, or None at the end. Whatever ends it early, also Ctrl-C, closes the generation."""
        if self.finish_reason is not None:
            return None
        sequence, at = self._sequence, len(self.token_ids)
        try:
            while len(sequence.sampled) == at:
                with self._engine.lock:  # another thread's step may just have brought the token
                    if sequence.error is not None:
                        raise sequence.error
                    if len(sequence.sampled) == at:
                        self._engine.step()
        except BaseException:
            self.close()
            raise
        sampled = sequence.sampled[at]
        self._last = time.perf_counter()
        self._first = self._first or self._last
        self.token_ids.append(sampled.token_id)
        last = sequence.done and len(sequence.sampled) == at + 1 and sequence.error is None
        return self._event(sampled, sequence.reason if last else None)

    def _event(self, sampled: Sampled, reason: str | None) -> Event:
        """Turn one token into text; the token that ends the text by its id shows nothing itself."""
        piece = ""
        if self._detokenizer is not None:
            if sampled.token_id not in self._sequence.stop_ids:
                piece = self._detokenizer.push(sampled.token_id)
            if reason is not None:
                piece += self._detokenizer.flush()
        piece, stopped = self._stops.push(piece)
        if stopped is not None:
            reason = "stop"
        elif reason is not None:
            piece += self._stops.flush()
        self.text += piece
        self.finish_reason = reason
        if reason is not None:
            self._engine.remove(self._sequence)
        logprobs = () if sampled.logprob is None else (sampled,)
        return Event(piece, (sampled.token_id,), logprobs)


class Model:
    """A loaded model; make one with `m31.load`.

    Attributes:
        config: the typed description.
        decision: the backend chosen and why.
        formats: weights, kv, index, compute and arithmetic, by name.
        tokenizer, template: None when the checkpoint has none; using them then says so.
        cap: the most tokens of one sequence.
        notes: what loading noticed and went on with.
        context: what its pages depend on besides tokens: the adapter that the keys and values are computed with.
    """

    def __init__(
        self,
        *,
        config: ModelConfig,
        decision: Decision,
        formats: Mapping[str, str],
        engine: Engine,
        cap: Cap,
        tokenizer: Tokenizer | None,
        template: ChatTemplate | None,
        notes: tuple[str, ...],
        context: Context = PLAIN,
    ) -> None:
        self.config, self.decision, self.formats, self.cap, self.notes = config, decision, dict(formats), cap, notes
        self.engine, self.tokenizer, self.template, self.context = engine, tokenizer, template, context

    @property
    def fallback_calls(self) -> dict[str, int]:
        """How often each op ran on another backend than the chosen one, since loading (`Manifest.fallback`)."""
        return dict(self.engine.fallback_calls)

    def generate(
        self,
        prompt: str | Sequence[int],
        sampling: SamplingParams | None = None,
        *,
        special: bool = True,
        request: int = 0,
        **params: Any,
    ) -> Generation:
        """Continue a prompt. The work happens while the result is iterated; several at once share their steps.

        Args:
            prompt: text, or token ids.
            sampling: parameters; or give them by name (`max_tokens=..., temperature=...`), not both.
            special: whether special strings in a text prompt become their tokens.
            request: which sample of its seed this is, see RowState.

        Raises:
            RequestError: empty prompt, token id out of range, bad parameter.
            ContextLimitExceeded: prompt and max_tokens do not fit.
            TokenizerError: text that cannot be encoded, or no tokenizer for it.
        """
        if sampling is not None and params:
            raise RequestError(
                "parameters are given twice", where=f"sampling and {sorted(params)}", expected="one of the two"
            )
        if sampling is None:
            sampling = _params(params)
        ids = self.encode(prompt, special=special)
        if len(ids) > self.cap.tokens:
            raise ContextLimitExceeded(self.cap.who, self.cap.tokens, len(ids))
        sampling = sampling.resolved(room=self.cap.tokens - len(ids) + 1)
        assert sampling.seed is not None
        assert sampling.max_tokens is not None
        if len(ids) + sampling.max_tokens - 1 > self.cap.tokens:  # the last token is never run
            raise ContextLimitExceeded(self.cap.who, self.cap.tokens, len(ids) + sampling.max_tokens - 1)
        if sampling.stop and self.tokenizer is None:
            raise TokenizerError("stop strings need a tokenizer and this checkpoint has none", where="stop")
        eos = () if sampling.ignore_eos else self.config.text.eos_token_ids
        sequence = EngineSequence(
            prompt=ids,
            params=sampling,
            seed=sampling.seed,
            request=request,
            stop_ids=frozenset((*eos, *sampling.stop_token_ids)),
            context=self.context,
        )
        return Generation(self.engine, sequence, self.tokenizer, sampling.stop)

    def logits(self, ids: Sequence[int]) -> torch.Tensor:
        """float32 logits [len(ids), vocabulary] of every position, on the CPU; for research and tests."""
        prompt = self.encode(ids, special=False)
        if len(prompt) > self.cap.tokens:
            raise ContextLimitExceeded(self.cap.who, self.cap.tokens, len(prompt))
        sequence = EngineSequence(
            prompt=prompt, params=None, seed=0, request=0, stop_ids=frozenset(), context=self.context
        )
        self.engine.add(sequence)
        try:
            while not sequence.done:
                with self.engine.lock:
                    if not sequence.done:
                        self.engine.step()
        finally:
            self.engine.remove(sequence)
        return sequence.logits().cpu()

    def encode(self, prompt: str | Sequence[int], *, special: bool) -> tuple[int, ...]:
        """Token ids of a prompt, checked."""
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise TokenizerError("this checkpoint has no tokenizer.json", fix="give the prompt as token ids")
            ids: Sequence[int] = self.tokenizer.encode(prompt, special=special)
        else:
            ids = _listed(prompt)
        vocabulary = self.config.text.vocab_size
        checked: list[int] = []
        for at, token in enumerate(ids):
            if isinstance(token, bool) or not hasattr(token, "__index__") or not 0 <= int(token) < vocabulary:
                raise RequestError(
                    f"token {token!r}", where=f"prompt position {at}", expected=f"an id from 0 to {vocabulary - 1:,}"
                )
            checked.append(int(token))
        if not checked:
            raise RequestError("the prompt is empty", expected="at least one token", fix="give some text")
        return tuple(checked)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The prompt text of a conversation, by the checkpoint's own template.

        Raises:
            TemplateError: the checkpoint has no template.
            RequestError: a message that the template would drop, forge or misprint, or one with an image or a video.
        """
        if self.template is None:
            raise TemplateError("this checkpoint has no chat template", fix="give a raw prompt")
        self._refuse_media(messages)
        self._refuse_special(messages)
        return self.template.render(messages, tools=tools, **variables)

    def _refuse_media(self, messages: Sequence[Any]) -> None:
        """A template has a placeholder for an image; without its pixels that is a token like any other."""
        for at, message in enumerate(messages):
            content = message.get("content") if isinstance(message, Mapping) else None
            for part in content if isinstance(content, list | tuple) else ():
                kind = part.get("type") if isinstance(part, Mapping) else None
                if kind in MEDIA_TYPES:
                    raise RequestError(
                        f"has {'an' if kind == 'image' else 'a'} {kind}",
                        where=f"message {at}",
                        expected=f"text: there is no vision tower yet, and backend {self.decision.name} serves none",
                        fix="leave it out",
                    )

    def _refuse_special(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """The rendered prompt is encoded with its special strings; one in a message would end it and forge the next."""
        special = self.tokenizer.special_tokens if self.tokenizer is not None else ()
        for at, message in enumerate(messages):
            for text in _strings(message):
                found = next((string for string in special if string in text), None)
                if found is not None:
                    raise RequestError(
                        f"contains the special string {found!r}",
                        where=f"message {at}",
                        expected="text without special strings of this model: they would end the message",
                        fix="remove it, or build the prompt yourself and give it raw",
                    )


def _listed(prompt: object) -> Sequence[int]:
    """The prompt as a list of ids; text in bytes, a number or nothing at all is no prompt."""
    if isinstance(prompt, bytes | bytearray) or not isinstance(prompt, Iterable):
        raise RequestError(f"is a {type(prompt).__name__}", where="prompt", expected="text, or a sequence of token ids")
    return list(prompt)


def _params(params: Mapping[str, Any]) -> SamplingParams:
    known = SamplingParams.__dataclass_fields__
    for name in params:
        if name not in known:
            raise RequestError(f"unknown parameter '{name}'", expected=f"one of {', '.join(known)}")
    return SamplingParams(**params)


def _strings(value: Any) -> Iterator[str]:
    """Every string inside a message."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _strings(key)
            yield from _strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)
