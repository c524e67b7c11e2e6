"""From logits to a token: parameters, filters, one random number (MODEL.md §5.3 and §5.4 build on this file).

Order of operations, on float64 copies of one row of logits:

1. repetition penalty, then frequency, then presence penalty;
2. temperature (0: the argmax is taken now and nothing below applies);
3. top-k, 4. top-p of what top-k left, 5. min-p of what top-p left;
6. one uniform number, inverted through the cumulative distribution in order of token id.

transformers 5.23 has the order 1 to 5. vLLM applies min-p before top-k and top-p, which matters only when min-p and
top-p are both on. Where those two keep every token that ties with the last one kept, m31 keeps the lowest ids, so
that top-k means k. Rows are computed one by one and draw counter-based numbers: a token never depends on which other
rows are in the batch, nor on their order.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from m31.engine.philox import Purpose, uniform
from m31.errors import NonFiniteLogits, OpRefused, RequestError

F64 = npt.NDArray[np.float64]

DEFAULT_TOKENS = 256
MAX_TOKENS = 2**20  # the model's largest context, MODEL.md §1.2
MAX_LOGPROBS = 128
MAX_STOPS = 64
MAX_STOP_CHARS = 4096


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one request is sampled. Every field is validated; an invalid one raises RequestError naming it.

    The defaults of temperature and top_p are those recommended for this model (MODEL.md §7.2); all other filters and
    penalties are off.

    Attributes:
        max_tokens: tokens to generate at most, 1 .. 1,048,576; None: 256, or fewer where the context ends sooner.
        temperature: 0 is greedy (argmax, lowest id on ties); else logits are divided by it; up to 100.
        top_p: keep the most probable tokens until their mass reaches this; (0, 1]; 1 is off.
        top_k: keep this many; 0 is off, 1 is greedy; a number above the vocabulary's size keeps all.
        min_p: keep tokens at least this fraction as probable as the most probable; [0, 1]; 0 is off.
        seed: 0 .. 2**64-1; None: `resolved` draws one from the system, so that it can be reported and used again.
        stop: strings that end the text and are not part of it.
        stop_token_ids: tokens that end the text like EOS.
        repetition_penalty: logits of tokens in prompt or output are divided (positive) or multiplied (negative) by it
            (Keskar et al., CTRL, 2019); 0.01 .. 100; 1 is off.
        presence_penalty: subtracted from the logits of tokens in the output; [-2, 2]; 0 is off.
        frequency_penalty: the same, times the token's count in the output; [-2, 2]; 0 is off.
        logprobs: None: none; n: the chosen token's and those of the n most probable; 0 .. 128.
        ignore_eos: go on after EOS (for measurements).
    """

    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 0.95
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logprobs: int | None = None
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1, MAX_TOKENS)
        _number("temperature", self.temperature, 0.0, 100.0)
        _number("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _integer("top_k", self.top_k, 0, 2**31 - 1, hint="0 switches it off")
        _number("min_p", self.min_p, 0.0, 1.0)
        if self.seed is not None:
            _integer("seed", self.seed, 0, 2**64 - 1)
        _number("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if self.logprobs is not None:
            _integer("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if not isinstance(self.ignore_eos, bool):
            raise _refused("ignore_eos", self.ignore_eos, "True or False")
        object.__setattr__(self, "stop", _stop_strings(self.stop))
        object.__setattr__(self, "stop_token_ids", _token_ids(self.stop_token_ids))

    @property
    def greedy(self) -> bool:
        """Whether the token is the argmax: no random number is drawn (MODEL.md §5.3: top_k 1 is greedy too)."""
        return self.temperature == 0 or self.top_k == 1

    @property
    def penalised(self) -> bool:
        """Whether logits depend on the tokens before."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    def resolved(self, room: int | None = None) -> SamplingParams:
        """The same parameters with nothing left open.

        The seed is their own, or one drawn from the system's entropy now. `max_tokens` is their own, or the default,
        cut to `room`, the tokens that the context still holds (None: unlimited).
        """
        if self.seed is not None and self.max_tokens is not None:
            return self
        seed = self.seed if self.seed is not None else secrets.randbits(64)
        most = self.max_tokens
        if most is None:
            most = DEFAULT_TOKENS if room is None else max(1, min(DEFAULT_TOKENS, room))
        return replace(self, seed=seed, max_tokens=most)


def _refused(name: str, value: object, expected: str, hint: str | None = None) -> RequestError:
    return RequestError(f"{name} is {value!r}", where=name, expected=expected, fix=hint)


def _integer(name: str, value: object, low: int, high: int, *, hint: str | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise _refused(name, value, f"an integer from {low:,} to {high:,}", hint)


def _number(name: str, value: object, low: float, high: float, *, open_low: bool = False) -> None:
    fits = (
        not isinstance(value, bool)
        and isinstance(value, int | float)
        and low <= value <= high  # false for NaN
        and not (open_low and value == low)
    )
    if not fits:
        span = f"above {low:g}, up to {high:g}" if open_low else f"from {low:g} to {high:g}"
        raise _refused(name, value, f"a number {span}")


def _stop_strings(value: object) -> tuple[str, ...]:
    expected = f"up to {MAX_STOPS} non-empty strings of at most {MAX_STOP_CHARS:,} characters"
    if isinstance(value, str) or not isinstance(value, Sequence) or len(value) > MAX_STOPS:
        raise _refused("stop", value, expected, "write a single string as ('...',)" if isinstance(value, str) else None)
    for item in value:
        if not isinstance(item, str) or not 0 < len(item) <= MAX_STOP_CHARS:
            raise _refused("stop", item, expected)
    return tuple(value)


def _token_ids(value: object) -> tuple[int, ...]:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise _refused("stop_token_ids", value, "token ids")
    for item in value:
        _integer("stop_token_ids", item, 0, 2**31 - 1)
    return tuple(value)


@dataclass(frozen=True, kw_only=True)
class RowState:
    """What sampling needs to know about the sequence that a row of logits belongs to.

    Attributes:
        params: the request's parameters.
        seed: the request's seed, `params.resolved().seed`.
        request: tells apart sequences that share a seed. For a reproducible text it must be the same in every run,
            so: which of its request's samples this is (0 for the first), not a number that counts arrivals.
        position: absolute index in the sequence of the token being sampled (prompt length for the first one).
        prompt_ids, output_ids: the tokens so far, for penalties.
    """

    params: SamplingParams
    seed: int
    request: int
    position: int
    prompt_ids: Sequence[int]
    output_ids: Sequence[int]


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """One sampled token.

    Attributes:
        token_id: the token.
        logprob: its natural log-probability, or None if not asked for.
        top_logprobs: (token id, logprob) of the most probable, falling, lowest id first on ties; None likewise.

    Log-probabilities are the log-softmax of the model's own logits, before penalties, temperature and filters: they
    say what the model thought, whatever was done to choose.
    """

    token_id: int
    logprob: float | None
    top_logprobs: tuple[tuple[int, float], ...] | None


def sample(logits: torch.Tensor, rows: Sequence[RowState]) -> list[Sampled]:
    """Sample one token per row.

    Args:
        logits: float32 [R, V], any device. -inf forbids a token.
        rows: R states.

    Raises:
        NonFiniteLogits: a row has NaN or +inf, or only -inf. No row is sampled then.
        RequestError: a row's penalty tokens are outside the vocabulary.
        OpRefused: wrong shape or dtype.
    """
    if logits.ndim != 2 or logits.dtype != torch.float32 or logits.shape[0] != len(rows) or logits.shape[1] == 0:
        raise OpRefused(
            f"logits are {logits.dtype} {list(logits.shape)} for {len(rows)} rows",
            where="sample",
            expected="float32 [rows, vocabulary]",
        )
    table: npt.NDArray[np.float32] = logits.detach().to("cpu").numpy()
    for values, row in zip(table, rows, strict=True):
        check_finite(values, row)
    return [_sample_row(values.astype(np.float64), row) for values, row in zip(table, rows, strict=True)]


def check_finite(values: npt.NDArray[np.floating], row: RowState) -> None:
    """Refuse logits from which nothing can be sampled.

    Raises:
        NonFiniteLogits: NaN, +inf, or no finite value.
    """
    top = values.max()  # NaN if there is one
    if math.isfinite(top):
        return
    what = "NaN" if np.isnan(top) else "+inf" if top > 0 else "only -inf"
    raise NonFiniteLogits(
        f"the logits hold {what}",
        where=f"request {row.request}, position {row.position}",
        expected="finite logits",
        fix="check the checkpoint's weights with `m31 inspect --deep`",
    )


def _sample_row(logits: F64, row: RowState) -> Sampled:
    return report(logits, choose(logits, row), row.params)


def choose(logits: F64, row: RowState) -> int:
    """The token of one row of finite logits, float64 [V]."""
    params = row.params
    penalised = penalise(logits, row)
    if params.greedy:
        return int(np.argmax(penalised))  # numpy's argmax is the lowest id on ties
    return draw(distribution(penalised, params), uniform(row.seed, row.request, row.position, Purpose.SAMPLE))


def report(logits: F64, token: int, params: SamplingParams) -> Sampled:
    """A chosen token with the log-probabilities that were asked for."""
    if params.logprobs is None:
        return Sampled(token_id=token, logprob=None, top_logprobs=None)
    logprobs = log_softmax(logits)
    best = _largest(logprobs, min(params.logprobs, len(logprobs)))
    top = tuple((int(index), float(logprobs[index])) for index in best)
    return Sampled(token_id=token, logprob=float(logprobs[token]), top_logprobs=top)


def log_softmax(logits: F64) -> F64:
    """float64 [V]; the maximum is subtracted first."""
    shifted = logits - logits.max()
    result: F64 = shifted - math.log(float(np.exp(shifted).sum()))
    return result


def penalise(logits: F64, row: RowState) -> F64:
    """The row's logits after repetition, frequency and presence penalty; `logits` itself if all are off.

    Repetition looks at prompt and output, the other two at the output alone.
    """
    params = row.params
    if not params.penalised:
        return logits
    result = logits.copy()
    output = _ids_in_range(row.output_ids, len(logits), row)
    if params.repetition_penalty != 1:
        seen = np.zeros(len(logits), dtype=bool)
        seen[_ids_in_range(row.prompt_ids, len(logits), row)] = True
        seen[output] = True
        some, by = result[seen], params.repetition_penalty
        result[seen] = np.where(some > 0, some / by, some * by)
    if len(output):
        counts = np.bincount(output, minlength=len(logits))
        result -= params.frequency_penalty * counts
        result -= params.presence_penalty * (counts > 0)
    return result


def _ids_in_range(ids: Sequence[int], vocab: int, row: RowState) -> npt.NDArray[np.int64]:
    array = np.asarray(ids, dtype=np.int64)
    if array.size and not 0 <= array.min() <= array.max() < vocab:
        raise RequestError(
            "token ids of the sequence are outside the vocabulary",
            where=f"request {row.request}, position {row.position}",
            expected=f"0 to {vocab - 1:,}",
        )
    return array


def distribution(logits: F64, params: SamplingParams) -> F64:
    """Probabilities after temperature, top-k, top-p and min-p: the `p` of MODEL.md §5.4.

    Args:
        logits: float64 [V], penalties already applied, at least one finite.
        params: a greedy request gives one-hot.

    Returns:
        float64 [V], sum 1; tokens that a filter removed have probability 0.
    """
    if params.greedy:
        one_hot = np.zeros(len(logits))
        one_hot[np.argmax(logits)] = 1.0
        return one_hot
    with np.errstate(over="ignore"):  # a tiny temperature sends all but the largest to -inf, as it should
        weights = np.exp((logits - logits.max()) / params.temperature)
    if 0 < params.top_k < len(weights):
        last = np.partition(weights, len(weights) - params.top_k)[len(weights) - params.top_k]
        weights = _keep(weights, params.top_k, last)
    if params.top_p < 1:
        # Sorting values is far cheaper than sorting ids, and only the last value kept has to be known.
        falling = np.sort(weights)[::-1]
        mass = np.cumsum(falling)
        count = int(np.searchsorted(mass, params.top_p * mass[-1])) + 1
        weights = _keep(weights, count, falling[count - 1])
    if params.min_p > 0:
        weights = np.where(weights < params.min_p * weights.max(), 0.0, weights)
    result: F64 = weights / weights.sum()
    return result


def _keep(weights: F64, count: int, last: float) -> F64:
    """`weights` with all but the `count` largest set to 0; `last` is the smallest kept, lowest ids first on ties."""
    kept = weights > last
    kept[np.flatnonzero(weights == last)[: count - int(kept.sum())]] = True
    return np.where(kept, weights, 0.0)


def _largest(values: F64, count: int) -> npt.NDArray[np.int64]:
    """Ids of the `count` largest values, falling; of equal values the lowest ids."""
    if count == 0:
        return np.empty(0, dtype=np.int64)
    last = np.partition(values, len(values) - count)[len(values) - count]
    candidates = np.flatnonzero(values >= last)  # all ties with the last one, in order of id
    return candidates[np.argsort(-values[candidates], kind="stable")][:count]


def draw(probabilities: F64, u: float) -> int:
    """Invert the cumulative distribution, in order of token id, at `u` in [0, 1).

    Order of id rather than of probability: a tiny change of the logits then moves the boundaries a little and never
    swaps two tokens. A token of probability 0 is never drawn.
    """
    cumulative = np.cumsum(probabilities)
    token = int(np.searchsorted(cumulative, u * cumulative[-1], side="right"))
    if token < len(cumulative):
        return token
    return int(np.searchsorted(cumulative, cumulative[-1]))  # u * total was rounded up to the total
