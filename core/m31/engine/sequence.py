"""A sequence in the engine, and what one step does for it."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from m31.engine.pages import PageTable
from m31.engine.sampling import Sampled, SamplingParams
from m31.engine.seals import PLAIN, Context
from m31.engine.verify import Drafted
from m31.errors import M31Error

_NO_DRAFT = Drafted(tokens=())
Result = list[Sampled] | torch.Tensor | M31Error  # what a step's logits mean: tokens, the logits themselves, a fault


@dataclass
class DraftTally:
    """What drafting brought a sequence.

    Attributes:
        verifies: steps that verified a draft.
        drafted, accepted: tokens drafted, and of these kept.
        confidence: the head's own estimate of how many are kept, summed like `drafted`.
    """

    verifies: int = 0
    drafted: int = 0
    accepted: int = 0
    confidence: float = 0.0


@dataclass(eq=False)
class Work:
    """What a step does for one sequence: `count` known tokens and a draft behind them."""

    sequence: Sequence
    count: int
    wanted: int = 0  # tokens to draft
    drafted: Drafted = _NO_DRAFT
    tokens: list[int] = field(default_factory=list)  # known and drafted, as they were placed
    slots: list[int] = field(default_factory=list)

    @property
    def start(self) -> int:
        """Position of the first token."""
        return self.sequence.computed

    def kept(self, result: Result) -> int:
        """How many of the tokens stay."""
        return len(result) if isinstance(result, list) and self.drafted.tokens else self.count


@dataclass(eq=False)
class Sequence:
    """One sequence in the engine. With `params` None it generates nothing: the caller wants the logits of its tokens.

    What a step produces is added by one append, so an interrupt at any moment leaves a sequence that can go on.

    Attributes:
        params: resolved parameters (`max_tokens` and seed are set), or None.
        request: tells apart sequences of one seed, see RowState.
        stop_ids: tokens that end the text.
        context: what its pages depend on besides tokens; PLAIN is text of a tenant without salt, without adapter.
        table: its pages, from admission on.
        sampled: the generated tokens; the owner reads them from where it last stopped.
        rows: float32 logits [n,V] by the position of their first row, when `params` is None.
        tally: what drafting brought.
        reason: "stop" or "length" once no more tokens will come.
        error: why the sequence ended, if it failed; raised to its owner and to nobody else.
    """

    prompt: tuple[int, ...]
    params: SamplingParams | None
    seed: int
    request: int
    stop_ids: frozenset[int]
    context: Context = PLAIN
    table: PageTable | None = None
    sampled: list[Sampled] = field(default_factory=list)
    rows: dict[int, torch.Tensor] = field(default_factory=dict)
    tally: DraftTally = field(default_factory=DraftTally)
    done: bool = False
    reason: str | None = None
    error: M31Error | None = None

    @property
    def length(self) -> int:
        """Tokens that are known: prompt and generated."""
        return len(self.prompt) + len(self.sampled)

    @property
    def computed(self) -> int:
        """How many of its tokens are in the cache."""
        return self.table.length if self.table is not None else 0

    @property
    def pages(self) -> list[int]:
        """The physical pages that it holds."""
        return self.table.pages if self.table is not None else []

    @property
    def pending(self) -> int:
        """Tokens that are known and not computed."""
        return self.length - self.computed

    def ids(self, start: int, end: int) -> list[int]:
        """Tokens at positions start .. end - 1."""
        n = len(self.prompt)
        return [*self.prompt[start:end], *(s.token_id for s in self.sampled[max(0, start - n) : max(0, end - n)])]

    def logits(self) -> torch.Tensor:
        """All rows so far, in order of position."""
        return torch.cat([self.rows[start] for start in sorted(self.rows)])

    @property
    def max_new(self) -> int:
        """Tokens to generate at most; 0 without `params`."""
        if self.params is None:
            return 0
        assert self.params.max_tokens is not None, "resolve the parameters first"
        return self.params.max_tokens

    @property
    def capacity(self) -> int:
        """Tokens that the sequence may ever hold in the cache. The last sampled token is never run."""
        return len(self.prompt) + max(0, self.max_new - 1)
