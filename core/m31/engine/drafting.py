"""The served draft head (MODEL.md chapter 5): what it learns from the target's steps, and the tokens that it drafts.

Its cache lies on the target's page ids: the row of a token is written when the token is committed, from what the
target made of it, and never from a draft. So a page that is shared, copied or found again has the head's rows as well.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
import torch

from m31.engine.compiler import MIN_PAGES, Compiler, PreparedWeights, bucket
from m31.engine.philox import Purpose, uniform
from m31.engine.sampling import RowState, check_finite, distribution, draw
from m31.engine.verify import Drafted
from m31.errors import ContractViolation
from m31.graph import Assigned, DraftBatch, DraftGraphs, ModelGraph, OpInstance, Plan, StepClass
from m31.sdk.backend import KVCache
from m31.sdk.serving import Serving


class Drafter(Protocol):
    """Who drafts for the engine.

    Attributes:
        tokens: most tokens of one draft.
        caches: pages of its own, on the ids of the target's.
        fallback_calls: calls of which op ran on another backend than the chosen one; the engine adds its own.
    """

    tokens: int
    caches: Sequence[KVCache]
    fallback_calls: Counter[str]

    def draft(self, anchor: int, count: int, pages: Sequence[int], state: RowState) -> Drafted:
        """`count` tokens for the positions from `state.position` on.

        Args:
            anchor: the token before them, at `state.position - 1`; it is in no cache yet.
            count: 1 to `tokens`.
            pages: the sequence's pages, which hold the positions before the anchor.
            state: of the first token to draft.
        """

    def learn(self, taps: torch.Tensor, positions: Sequence[int], slots: Sequence[int]) -> None:
        """Tokens that are committed: their residual streams [n, taps * hidden_size], positions and slots."""


class DraftCompilers:
    """Plans of the three graphs of a head.

    Args:
        graphs: see `m31.graph.trace_draft`.
        serving: who serves their ops.
        weights: the target's and the head's.
        tokens: most tokens of one draft.
    """

    def __init__(self, graphs: DraftGraphs, serving: Serving, weights: PreparedWeights, tokens: int) -> None:
        def compiler(graph: ModelGraph) -> Compiler:
            return Compiler(serving, graph, None, weights, DraftBatch)

        self.context, self.block, self.markov = map(compiler, (graphs.context, graphs.block, graphs.markov))
        self.tokens, self.device = tokens, serving.session.device

    def bind(self) -> None:
        """Prepare the weights and find a kernel for every op, so that a fault shows before a text begins."""
        for compiler, step in self._steps():
            compiler.bind(step)

    def assigned(self) -> list[tuple[OpInstance, Assigned]]:
        """Every op instance with who serves it; nothing is prepared."""
        return [pair for compiler, step in self._steps() for pair in compiler.assigned([step])]

    def _steps(self) -> list[tuple[Compiler, StepClass]]:
        return [(self.context, _learning(1)), (self.block, _blocks(self.tokens, 1)), (self.markov, _MARKOV)]


class DraftHead:
    """A DSpark head on a backend.

    Args:
        compilers: its plans.
        cache: its pages, as many as the target's and as long.
        page_tokens: tokens of a page.
        noise: token id behind the anchor of a block.
    """

    def __init__(self, compilers: DraftCompilers, cache: KVCache, *, page_tokens: int, noise: int) -> None:
        self.cache, self.page_tokens, self.noise = cache, page_tokens, noise
        self.caches: Sequence[KVCache] = (cache,)
        self.fallback_calls = Counter[str]()
        self.tokens, self._device = compilers.tokens, compilers.device
        self._context, self._block, self._markov = compilers.context, compilers.block, compilers.markov

    def learn(self, taps: torch.Tensor, positions: Sequence[int], slots: Sequence[int]) -> None:
        """See `Drafter.learn`; MODEL.md §5.1."""
        count = len(positions)
        plan, batch, fallbacks = self._context.plan(_learning(count))
        assert isinstance(batch, DraftBatch)
        batch.fill(
            tokens=[0] * count,  # only the taps say what the tokens are
            positions=positions,
            q_lens=[count],
            seq_lens=[count],
            slot_map=slots,
            page_table=[[]],
            out_rows=[],
        )
        batch.given = {"taps": taps}
        plan.run(batch, self.cache)
        self.fallback_calls.update(fallbacks)

    def draft(self, anchor: int, count: int, pages: Sequence[int], state: RowState) -> Drafted:
        """See `Drafter.draft`; MODEL.md §5.2 and §5.3. A shorter draft is a shorter block.

        Raises:
            NonFiniteLogits: the head's logits are not finite.
        """
        base, hidden = self._pass(anchor, count, state.position - 1, pages)
        tokens: list[int] = []
        chances = []
        confidence: list[float] = []
        prev = anchor
        # Temperature only: other filters belong to the target.
        plainly = replace(state.params, top_k=0, top_p=1.0, min_p=0.0)
        plan, batch, fallbacks = self._markov.plan(_MARKOV)
        assert isinstance(batch, DraftBatch)
        batch.fill(tokens=[], positions=[], q_lens=[], seq_lens=[], slot_map=[], page_table=[], out_rows=[0])
        for row in range(count):
            batch.given = {
                "base": base[row : row + 1],
                "hidden": hidden[row : row + 1],
                "prev": torch.tensor([prev], device=self._device),
            }
            logits = plan.run(batch, self.cache)[0].double().cpu().numpy()
            here = replace(state, position=state.position + row)
            self.fallback_calls.update(fallbacks)
            check_finite(logits, here)
            if state.params.greedy:
                prev = int(np.argmax(logits))
            else:
                chances.append(distribution(logits, plainly))
                prev = draw(chances[-1], uniform(state.seed, state.request, here.position, Purpose.DRAFT))
            tokens.append(prev)
            confidence.append(float(extra(plan, "confidence")[0]))
        return Drafted(tokens=tuple(tokens), chances=tuple(chances), confidence=tuple(confidence))

    def _pass(self, anchor: int, count: int, length: int, pages: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Base logits [count,V] and hidden rows [count,C] of one block behind `length` committed tokens."""
        held = list(pages[: -(-length // self.page_tokens)])
        plan, batch, fallbacks = self._block.plan(_blocks(count, len(held)))
        batch.fill(
            tokens=[anchor] + [self.noise] * (count - 1),
            positions=range(length, length + count),
            q_lens=[count],
            seq_lens=[length + count],
            slot_map=[-1] * count,  # the block leaves nothing behind
            page_table=[held],
            out_rows=range(count),
        )
        base = plan.run(batch, self.cache)
        self.fallback_calls.update(fallbacks)
        return base, extra(plan, "hidden")


def extra(plan: Plan, name: str) -> torch.Tensor:
    """An extra output of a plan's last run.

    Raises:
        ContractViolation: the backend's plan does not give it.
    """
    take = getattr(plan, "extra", None)
    if take is None:
        raise ContractViolation(
            "extra-outputs",
            f"plan {type(plan).__name__} has no method 'extra'",
            where=f"output '{name}'",
            expected="a plan that gives the extra outputs of its graph, from a backend that drafts",
        )
    found: torch.Tensor = take(name)
    return found


_MARKOV = StepClass(kind="decode", q_len=1, tokens=1, seqs=1, rows=1, pages=1)


def _learning(tokens: int) -> StepClass:
    return StepClass(kind="mixed", q_len=0, tokens=bucket(tokens), seqs=1, rows=1, pages=1)


def _blocks(count: int, pages: int) -> StepClass:
    width = max(MIN_PAGES, bucket(pages))
    return StepClass(kind="verify", q_len=count, tokens=bucket(count), seqs=1, rows=bucket(count), pages=width)
