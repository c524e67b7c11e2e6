"""A backend against golden values: how far log-probabilities are apart, where other experts or blocks were chosen."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from m31.conformance.golden.observe import Bools, Choices, observe
from m31.conformance.golden.values import F32, Golden, Prompt, digest, next_logprobs
from m31.engine.api import load as load_model
from m31.engine.model import Model
from m31.errors import CheckpointError

F64 = NDArray[np.float64]


@dataclass(frozen=True)
class Sets:
    """Sets of ids against the golden ones.

    Attributes:
        compared: how many sets: positions times layers, and times heads for blocks.
        different: how many of them differ.
        widest: the largest golden score gap of those that differ, 0.0 if there are none. A difference at a small gap is
            a near tie that went the other way; at a large one it is a fault.
        differ: bool, per set.
    """

    compared: int
    different: int
    widest: float
    differ: Bools


@dataclass(frozen=True)
class Agreement:
    """One prompt.

    Attributes:
        prompt: its name; tokens: its length.
        next_error, next_mean: largest and mean absolute difference of the log-probabilities of the tokens that follow,
            in nats; 0.0 for a prompt of one token.
        kl, kl_worst: mean and largest KL divergence of the golden from the computed distribution of a position, in
            nats, over the golden likeliest tokens and the rest as one: a lower bound of the whole one.
        top1: share of the positions with the same likeliest token.
        top1_widest: the largest golden lead (in nats) of a likeliest token that is not the likeliest here; 0.0 if none.
        experts, blocks: None where the plan of the backend does not show them.
    """

    prompt: str
    tokens: int
    next_error: float
    next_mean: float
    kl: float
    kl_worst: float
    top1: float
    top1_widest: float
    experts: Sets | None
    blocks: Sets | None


@dataclass(frozen=True)
class Tolerance:
    """What is still agreement; measured, not guessed (DESIGN.md §7). Units as in `Agreement`.

    Attributes:
        kl: most of the mean over all positions of all prompts; kl_worst: of one position.
        top1: least share over all positions; top1_widest: most.
        expert_share, block_share: most of the sets that differ.
        expert_gap, block_gap: most golden gap of a set that differs.
    """

    kl: float
    kl_worst: float
    top1: float
    top1_widest: float
    expert_share: float
    expert_gap: float
    block_share: float
    block_gap: float


def open_for(
    golden: Golden, folder: Path, *, backend: str, dtype: str | None = None, device: str | None = None
) -> Model:
    """The checkpoint on a backend, as the values were computed.

    Args:
        golden: the values.
        folder: of the checkpoint.
        backend, dtype, device: see `m31.load`.

    Raises:
        CheckpointError: the values belong to another checkpoint.
        BackendError: the backend does not serve the arithmetic or the formats.
    """
    if (found := digest(folder)) != golden.checkpoint:
        raise CheckpointError(
            f"the golden values belong to the checkpoint {golden.checkpoint}",
            where=str(folder),
            expected=f"values of {found}",
            fix="compute them again: python -m m31.conformance.golden write",
        )
    recipe = golden.recipe
    return load_model(
        folder,
        backend=backend,
        device=device,
        dtype=dtype,
        arithmetic=recipe.arithmetic,
        kv_dtype=recipe.kv,
        index_dtype=recipe.index,
    )


def compare(golden: Golden, model: Model, *, longest: int | None = None) -> Iterator[Agreement]:
    """Run the prompts one after another.

    Args:
        golden: the values.
        model: of `open_for`.
        longest: leave out prompts of more tokens than this; None: none.

    Raises: what `Model.logits` raises.
    """
    for prompt in golden.prompts:
        if longest is None or len(prompt.ids) <= longest:
            yield _agreement(prompt, model)


def _agreement(prompt: Prompt, model: Model) -> Agreement:
    seen = observe(model, prompt.ids.tolist(), gaps=False)
    errors = np.abs(next_logprobs(seen.logprobs, prompt.ids) - prompt.logprob) if len(prompt.ids) > 1 else np.zeros(1)
    there = np.take_along_axis(seen.logprobs, prompt.top, -1)
    kl = _kl(prompt.top_logprob.astype(np.float64), there)
    other = seen.logprobs.argmax(-1) != prompt.top[:, 0]
    lead = prompt.top_logprob[:, 0] - prompt.top_logprob[:, 1]
    return Agreement(
        prompt=prompt.name,
        tokens=len(prompt.ids),
        next_error=float(errors.max()),
        next_mean=float(errors.mean()),
        kl=float(kl.mean()),
        kl_worst=float(kl.max()),
        top1=float(1 - other.mean()),
        top1_widest=float(lead[other].max(initial=0.0)),
        experts=_sets(prompt.experts, prompt.expert_gaps, seen.experts, 0),
        blocks=_sets(prompt.blocks, prompt.block_gaps, seen.blocks, prompt.first),
    )


def _kl(golden: F64, computed: F64) -> F64:
    """KL divergence [T] of log-probabilities [T,N] of some tokens, the others taken together."""
    p, q = np.exp(golden), np.exp(computed)
    least = np.finfo(np.float32).tiny  # the golden rest may be lost in the rounding of the stored values
    rest_p, rest_q = (np.maximum(1 - x.sum(-1), least) for x in (p, q))
    found: F64 = (p * (golden - computed)).sum(-1) + rest_p * np.log(rest_p / rest_q)
    return np.maximum(found, 0.0)


def _sets(golden: Bools, gaps: F32, computed: Choices, first: int) -> Sets | None:
    if computed.kept is None:
        return None
    differ = np.asarray((computed.kept[:, first:] != golden).any(-1))
    return Sets(differ.size, int(differ.sum()), float(gaps[differ].max(initial=0.0)), differ)


def _worst(values: Iterable[float]) -> float:
    """The largest; NaN if there is one, which Python's `max` may lose."""
    return float(np.max(list(values)))


def faults(agreements: Iterable[Agreement], tolerance: Tolerance) -> list[str]:
    """What is not agreement, one sentence each; nothing if the backend computes this model.

    Choices that could not be looked at are a fault too: what was not seen was not compared.
    """
    found = list(agreements)
    tokens = sum(a.tokens for a in found)
    if not tokens:
        return ["no prompt was compared"]
    t = tolerance
    checks = [
        ("mean KL divergence", sum(a.kl * a.tokens for a in found) / tokens, t.kl),
        ("largest KL divergence", _worst(a.kl_worst for a in found), t.kl_worst),
        ("share of other likeliest tokens", 1 - sum(a.top1 * a.tokens for a in found) / tokens, 1 - t.top1),
        ("lead of a likeliest token that another one overtook", _worst(a.top1_widest for a in found), t.top1_widest),
    ]
    said = []
    for kind, share, gap in (("expert", t.expert_share, t.expert_gap), ("block", t.block_share, t.block_gap)):
        sets = [a.experts if kind == "expert" else a.blocks for a in found]
        seen = [s for s in sets if s is not None]
        if len(seen) < len(sets):
            said.append(f"{kind} ids were not observed in {len(sets) - len(seen)} of {len(sets)} prompts")
        if count := sum(s.compared for s in seen):
            checks.append((f"share of other {kind} sets", sum(s.different for s in seen) / count, share))
            checks.append((f"score gap of another {kind} set", _worst(s.widest for s in seen), gap))
    # "not at most" rather than "more": NaN is a fault.
    return said + [f"{what} is {value:.3g}, at most {limit:.3g}" for what, value, limit in checks if not value <= limit]
