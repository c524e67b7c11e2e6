"""A whole model against the reference under the same arithmetic: divergence of the next token, and its choice.

Both read the same texts (nothing is generated, so that one other choice does not change all that follows): most of each
in one step, the rest one token at a time. The reference computes in float64 with the pages and the arithmetic that the
backend was opened with. What is allowed follows from how far apart two healthy models of that arithmetic are
(`m31.conformance.noise`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from m31.conformance import oracle
from m31.conformance.bench import Bench
from m31.conformance.item import Evidence, Verdict
from m31.conformance.noise import NoisyReference
from m31.conformance.rig import Forms, Rig
from m31.errors import ContractViolation

F64 = NDArray[np.float64]
Prompts = Sequence[Sequence[int]]
SEEDS = 3
HEALTHY = 10.0
"""Times the divergence of healthy models that is allowed."""
LEAST = 1e-12
"""Nats: divergence that rounding the logits to float32 makes."""
MISSES = 0.02
"""The part of the rows whose choice may be another one in any case: near ties."""
SINGLE = 6  # tokens of each text that are read one by one


def logits(rig: Rig, prompts: Prompts, *, single: int = SINGLE) -> list[Any]:
    """float32 logits [n, V] of each text, of which the last `single` tokens are read one by one."""
    rows = []
    for ids in prompts:
        run = rig.run(ids)
        most = max(1, len(ids) - single)
        counts = [min(2048, most - start) for start in range(0, most, 2048)]
        rows.append(rig.feed(run, *counts, *[1] * (len(ids) - most)))
    return rows


def pages_for(prompts: Prompts) -> int:
    """How many pages the texts take, and one more."""
    return sum(-(-len(ids) // 128) for ids in prompts) + 1


def run(bench: Bench, folder: Path, forms: Forms, prompts: Prompts) -> Evidence:
    """What the backend computes, with what it declares."""
    rig = Rig(bench, folder, forms, pages=pages_for(prompts))
    arrays = {f"logits.{at}": rows for at, rows in enumerate(logits(rig, prompts))}
    return Evidence(arrays, {**rig.facts(), "noise": rig.noise()})


def judge(where: str, folder: Path, prompts: Prompts, evidence: Evidence) -> Verdict:
    """Divergence and choices within what healthy models have.

    Raises:
        ContractViolation: they are not; or the reference's answers are so alike that any would do.
    """
    facts = evidence.facts
    forms = Forms(kv=facts["kv"], index=facts["index"], arithmetic=facts["arithmetic"])
    asked = tuple(map(tuple, prompts))
    want = reference(folder, forms, asked)
    got = np.concatenate([evidence.arrays[f"logits.{at}"] for at in range(len(prompts))]).astype(np.float64)
    if got.shape != want.shape or not np.isfinite(got).all():
        raise ContractViolation(
            "agreement",
            f"gives logits {list(got.shape)}, not all of them numbers",
            where=where,
            expected=str(want.shape),
        )
    healthy, missed = apart(folder, forms, asked, tuple(sorted(facts["noise"].items())))
    divergence, allowed = float(kl(want, got).mean()), HEALTHY * max(healthy, LEAST)
    misses, room = missing(want, got), min(0.5, max(MISSES, HEALTHY * missed))
    if divergence > allowed or misses > room:
        raise ContractViolation(
            "agreement",
            f"diverges by {divergence:.3g} nats a token from the reference, and chooses another token in"
            f" {misses:.1%} of the rows",
            where=where,
            expected=f"at most {allowed:.3g} and {room:.1%}: {HEALTHY:.0f} times what two healthy models of this"
            " arithmetic have",
        )
    shuffled = float(kl(want, np.roll(want, 1, axis=0)).mean())
    if not allowed < shuffled / 2:
        raise ContractViolation(
            "agreement",
            f"declares an arithmetic under which {allowed:.3g} nats would be healthy, and other texts are"
            f" {shuffled:.3g} apart",
            where=where,
            expected="a declaration that says something about the result",
        )
    note = f"{1 - misses:.2%} of the choices agree; healthy models are {healthy:.2g} nats apart"
    return Verdict(margin=divergence / allowed, max_error=divergence, allowed=allowed, where="nats a token", note=note)


def kl(want: F64, got: F64) -> F64:
    """Kullback-Leibler divergence of each row, in nats."""
    p, q = _log_softmax(want), _log_softmax(got)
    found: F64 = np.maximum((np.exp(p) * (p - q)).sum(-1), 0)
    return found


def missing(want: F64, got: F64) -> float:
    """The part of the rows with another best token."""
    return float((want.argmax(-1) != got.argmax(-1)).mean())


def _log_softmax(x: F64) -> F64:
    x = x - x.max(-1, keepdims=True)
    found: F64 = x - np.log(np.exp(x).sum(-1, keepdims=True))
    return found


@lru_cache(maxsize=32)
def reference(folder: Path, forms: Forms, prompts: Prompts) -> F64:
    """The reference's logits in float64, all texts one after the other."""
    return _computed(oracle.bench(), folder, forms, prompts)


@lru_cache(maxsize=32)
def apart(folder: Path, forms: Forms, prompts: Prompts, noise: tuple[tuple[str, float], ...]) -> tuple[float, float]:
    """Median over some seeds of the mean divergence, and of the choices that differ, under a noise."""
    want = reference(folder, forms, prompts)
    found = []
    for seed in range(SEEDS):
        bench = Bench(NoisyReference(dict(noise), seed), scratch=oracle.bench().scratch)
        got = _computed(bench, folder, forms, prompts)
        found.append((float(kl(want, got).mean()), missing(want, got)))
    return float(np.median([f[0] for f in found])), float(np.median([f[1] for f in found]))


def _computed(bench: Bench, folder: Path, forms: Forms, prompts: Prompts) -> F64:
    """In float64 it does not matter how a text is cut."""
    exact = Forms(dtype="float64", kv=forms.kv, index=forms.index, arithmetic=forms.arithmetic)
    rig = Rig(bench, folder, exact, pages=pages_for(prompts))
    return np.concatenate(logits(rig, prompts, single=0)).astype(np.float64)
