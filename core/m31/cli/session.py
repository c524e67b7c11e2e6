"""What `run` and `chat` share: opening a model, sampling flags, streaming an answer, and saying how it went."""

from __future__ import annotations

import argparse
import dataclasses
import signal
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Protocol

from m31.cli.output import Output
from m31.errors import RequestError


class Stats(Protocol):
    """Counts and speeds of one generation; seconds and tokens per second."""

    @property
    def prompt_tokens(self) -> int: ...
    @property
    def generated_tokens(self) -> int: ...
    @property
    def prefill_seconds(self) -> float: ...
    @property
    def decode_seconds(self) -> float: ...
    @property
    def prefill_tokens_per_second(self) -> float | None: ...
    @property
    def decode_tokens_per_second(self) -> float | None: ...
    @property
    def accepted_per_verify(self) -> float | None: ...
    @property
    def draft_confidence(self) -> float | None: ...
    @property
    def seed(self) -> int: ...


class Event(Protocol):
    """Text that became certain in one step, and the tokens behind it."""

    @property
    def text(self) -> str: ...
    @property
    def token_ids(self) -> tuple[int, ...]: ...
    @property
    def logprobs(self) -> Any: ...


class Generation(Protocol):
    """A running answer."""

    def events(self) -> Iterable[Event]: ...
    def close(self) -> None: ...
    @property
    def text(self) -> str: ...
    @property
    def token_ids(self) -> Sequence[int]: ...
    @property
    def finish_reason(self) -> str | None: ...
    @property
    def stats(self) -> Stats: ...


class Decision(Protocol):
    """Which backend runs, and why."""

    @property
    def name(self) -> str | None: ...
    @property
    def reason(self) -> str: ...


class Model(Protocol):
    """The part of `m31.load`'s result that the command line uses."""

    @property
    def decision(self) -> Decision: ...
    @property
    def formats(self) -> Mapping[str, str]: ...
    @property
    def template(self) -> object | None: ...
    @property
    def notes(self) -> Sequence[str]: ...
    @property
    def fallback_calls(self) -> Mapping[str, int]: ...
    def generate(self, prompt: str, sampling: Any = None, *, special: bool = True) -> Generation: ...
    def render(self, messages: Sequence[Mapping[str, Any]]) -> str: ...


_SAMPLING = (
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "seed",
    "stop",
    "logprobs",
)


def sampling_from(args: argparse.Namespace) -> Any:
    """The SamplingParams that the flags describe; flags that were not given keep the library's defaults.

    Raises: RequestError when a value is out of range.
    """
    from m31.engine.sampling import SamplingParams

    given: dict[str, Any] = {key: getattr(args, key, None) for key in _SAMPLING}
    if given["stop"] is not None:
        given["stop"] = tuple(given["stop"])
    given = {key: value for key, value in given.items() if value is not None}
    if args.ignore_eos:
        given["ignore_eos"] = True
    return SamplingParams(**given)


def open_model(args: argparse.Namespace) -> Model:
    """Load the checkpoint that the flags name, or the bundled one, on the backend that they name or that selection
    chooses.

    Raises: M31Error of whatever stands in the way.
    """
    import m31

    path = None if args.checkpoint is None else Path(args.checkpoint)
    mode = "merge" if args.merge_adapter else None
    wanted = {"max_context": args.max_context, "draft": args.draft, "adapter": args.adapter, "adapter_mode": mode}
    model: Model = m31.load(path, **wanted, **formats(args))
    return model


def checkpoint_folder(args: argparse.Namespace) -> Path:
    """The folder that the flags name, or that of the bundled checkpoint.

    Raises: NotACheckpoint when this source tree has none.
    """
    from m31.checkpoint import bundled

    return bundled.folder() if args.checkpoint is None else Path(args.checkpoint)


def formats(args: argparse.Namespace) -> dict[str, Any]:
    """The flags that say how a backend is opened for a checkpoint, as keywords of `m31.load`."""
    names = ("backend", "device", "dtype", "kv_dtype", "index_dtype", "v_scale_order", "arithmetic")
    return {name: getattr(args, name) for name in names}


def checked_text(text: str, where: str) -> str:
    """`text` if a model can be given it.

    Raises: RequestError when it is empty or is not valid Unicode (undecodable bytes of the command line).
    """
    if not text:
        raise RequestError("the text is empty", where=where, expected="at least one character", fix="give a prompt")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(
            f"character {error.start + 1} is not valid Unicode",
            where=where,
            expected="UTF-8",
            fix="convert the text first",
        ) from error
    return text


class Interrupts:
    """Ctrl-C while an answer is streamed.

    The first one asks the loop to stop after the current token, so that the engine is left in order; before the first
    token, or when pressed again, it stops at once by KeyboardInterrupt. A parent that ignores SIGINT is respected.
    """

    def __init__(self) -> None:
        self.requested = False
        self.polite = False  # True once stopping between two tokens is possible
        self._previous: Any = None
        self._installed = False

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
            self._previous = signal.signal(signal.SIGINT, self._handle)
            self._installed = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._installed:
            signal.signal(signal.SIGINT, self._previous)

    def _handle(self, _number: int, _frame: FrameType | None) -> None:
        again, self.requested = self.requested, True
        if again or not self.polite:
            raise KeyboardInterrupt


def stream(generation: Generation, out: Output) -> bool:
    """Write an answer as it is produced; True if Ctrl-C ended it.

    The generation is closed in every case, also when the reader of the output goes away.
    """
    interrupts = Interrupts()
    written = 0
    try:
        with interrupts:
            for event in generation.events():
                interrupts.polite = True
                _write_event(event, out)
                written += len(event.text)
                if interrupts.requested:
                    break
    except KeyboardInterrupt:
        interrupts.requested = True
    finally:
        generation.close()
    if not out.json_lines:
        # What was held back, because it could have become a stop string, was produced too.
        out.text(generation.text[written:])
        out.end_line()
    return interrupts.requested


def plain(value: Any) -> Any:
    """`value` as JSON can say it: dataclasses become objects, tuples become lists."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def _write_event(event: Event, out: Output) -> None:
    if not out.json_lines:
        out.text(event.text)
        return
    fields: dict[str, Any] = {"text": event.text, "token_ids": list(event.token_ids)}
    if event.logprobs:
        fields["logprobs"] = plain(event.logprobs)
    out.event("token", **fields)


def announce(model: Model, out: Output, prompt_kind: str) -> None:
    """Name the backend and why, before the first token."""
    if out.json_lines:
        decision = {"name": model.decision.name, "reason": model.decision.reason}
        out.event("start", backend=decision, formats=dict(model.formats), prompt=prompt_kind)
    out.note(f"backend {model.decision.name}: {model.decision.reason}; prompt: {prompt_kind}")
    for note in model.notes:  # a stray file, an ignored tensor: what loading went on with is not kept quiet
        out.note(f"note: {note}")


def stats_fields(stats: Stats) -> dict[str, float | int | None]:
    """The statistics as JSON fields."""
    return {
        "prompt_tokens": stats.prompt_tokens,
        "generated_tokens": stats.generated_tokens,
        "prefill_seconds": stats.prefill_seconds,
        "decode_seconds": stats.decode_seconds,
        "prefill_tokens_per_second": stats.prefill_tokens_per_second,
        "decode_tokens_per_second": stats.decode_tokens_per_second,
        "accepted_per_verify": stats.accepted_per_verify,
        "draft_confidence": stats.draft_confidence,
        "seed": stats.seed,
    }


def conclude(model: Model, generation: Generation, out: Output, *, interrupted: bool) -> None:
    """The last line: counts, speeds, why it ended, backend, formats and seed."""
    stats = generation.stats
    reason = "cancelled" if interrupted else generation.finish_reason
    ended = "interrupted" if interrupted else reason
    if out.json_lines:
        out.event(
            "done",
            finish_reason=reason,
            text=generation.text,
            stats=stats_fields(stats),
            backend=model.decision.name,
            formats=dict(model.formats),
            fallback_calls=dict(model.fallback_calls),
        )
    elsewhere = sum(model.fallback_calls.values())
    kept = stats.accepted_per_verify
    formats = ", ".join(f"{key} {value}" for key, value in model.formats.items())
    out.note(
        f"{stats.prompt_tokens} prompt tokens, {stats.generated_tokens} generated; "
        f"prefill {_speed(stats.prefill_tokens_per_second)}, decode {_speed(stats.decode_tokens_per_second)}; "
        + (f"{kept:.2f} drafted tokens kept per verify; " if kept is not None else "")
        + f"ended: {ended}; backend {model.decision.name}; {formats}; seed {stats.seed}"
        + (f"; {elsewhere:,} op calls fell back" if elsewhere else "")
    )


def _speed(tokens_per_second: float | None) -> str:
    if not tokens_per_second:  # nothing was measured: one token has no decode step
        return "n/a"
    return f"{tokens_per_second:.1f} tokens/s"
