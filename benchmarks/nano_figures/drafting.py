"""What drafting brings, and that it changes nothing.

Texts continue pieces of held-out files. Everything here is computed in float64: a verify step sums in another order
than a decode step, and in float32 that can decide between two tokens that are almost equally probable.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from m31.engine.engine import Sequence
from m31.engine.model import Model
from m31.engine.philox import Purpose, uniforms
from m31.engine.sampling import RowState, SamplingParams, distribution, draw, sample
from m31.engine.verify import Drafted, keeps, replacement, verify

from .job import HEAD, Job
from .served import load
from .stats import Figure, chi_square, ratio, same_source
from .store import Progress, folder_digest

DRAFT = 7
PROMPT = 256  # tokens
_SIZES = {False: (24, 128), True: (2, 32)}  # quick -> prompts, tokens of each text
_DRAWS = {False: 200_000, True: 10_000}
_CHECKED = 1_000  # draws that are made a second time by the whole of `verify` and `sample`
SMALL = 8  # vocabulary of the distribution test
_PURPOSES = (Purpose.DRAFT, Purpose.ACCEPT, Purpose.RESIDUAL)

F64 = npt.NDArray[np.float64]


def prompts(job: Job, count: int) -> list[tuple[int, ...]]:
    """Pieces of `PROMPT` tokens of held-out files: the beginnings of all, then what follows them."""
    found: list[tuple[int, ...]] = []
    turn = 0
    while len(found) < count:
        before = len(found)
        for entry in job.entries():
            start = entry.start + turn * PROMPT
            if start + PROMPT < entry.stop:
                found.append(tuple(job.cache.ids[start : start + PROMPT].tolist()))
        if len(found) == before:
            raise ValueError(f"the test split has {before} pieces of {PROMPT} tokens, {count} are wanted")
        turn += 1
    return found[:count]


def continued(
    model: Model, prompt: tuple[int, ...], params: SamplingParams, request: int
) -> tuple[list[int], list[int]]:
    """A text and what each verification kept of `DRAFT` tokens.

    A shorter draft, at the end of the text, and one that the end of the text cut are not counted.

    Args:
        params: with max_tokens and seed.
        request: tells apart texts of one seed.
    """
    assert params.seed is not None
    sequence = Sequence(
        prompt=prompt,
        params=params,
        seed=params.seed,
        request=request,
        stop_ids=frozenset(model.config.text.eos_token_ids),
    )
    model.engine.add(sequence)
    accepted: list[int] = []
    while not sequence.done:
        before = replace(sequence.tally)
        model.engine.step()
        after = sequence.tally
        if after.drafted - before.drafted == DRAFT and sequence.reason != "stop":
            accepted.append(after.accepted - before.accepted)
    if sequence.error is not None:
        raise sequence.error
    return [token.token_id for token in sequence.sampled], accepted


def drafting(job: Job) -> dict[str, Any]:
    """Accepted tokens per verify, greedy and at temperature 1, and whether greedy texts are those without drafting.

    Raises:
        ValueError: the checkpoint has no draft head.
    """
    if job.head is None:
        raise ValueError(f"{job.checkpoint} has no draft head (no folder '{HEAD}' in it)")
    count, length = _SIZES[job.quick]
    setting = replace(job.served, dtype="float64")
    key = job.key(job.checkpoint, head=folder_digest(job.head), setting=setting.key(), count=count, length=length)

    def texts(name: str, draft: int, temperature: float) -> dict[str, Any]:
        def compute() -> dict[str, Any]:
            model = load(job.checkpoint, replace(setting, draft=draft))
            params = SamplingParams(max_tokens=length, temperature=temperature, top_p=1.0, seed=job.seed)
            with Progress(name, count) as progress:
                pairs = []
                for number, prompt in enumerate(prompts(job, count)):
                    pairs.append(continued(model, prompt, params, number))
                    progress.add(1)
            return {"tokens": [tokens for tokens, _ in pairs], "accepted": [accepted for _, accepted in pairs]}

        found: dict[str, Any] = job.store.get(
            name.replace(" ", "-"), {**key, "draft": draft, "temperature": temperature}, compute
        )
        return found

    greedy, plain = texts("drafting greedy", DRAFT, 0.0), texts("without drafting", 0, 0.0)
    warm = texts("drafting at 1.0", DRAFT, 1.0)
    return {
        "prompts": count,
        "tokens": sum(map(len, greedy["tokens"])),
        "draft": DRAFT,
        "mismatches": mismatches(greedy["tokens"], plain["tokens"]),
        "greedy": acceptance(greedy["accepted"], job.seed),
        "temperature_1": acceptance(warm["accepted"], job.seed),
    }


def mismatches(a: list[list[int]], b: list[list[int]]) -> int:
    """Places at which two lists of texts differ; a missing token differs."""
    different = 0
    for left, right in zip(a, b, strict=True):
        different += sum(x != y for x, y in zip(left, right, strict=False)) + abs(len(left) - len(right))
    return different


def acceptance(accepted: list[list[int]], seed: int) -> dict[str, Any]:
    """Of counts per verification, by text: their mean, how often each occurs, how often draft j is kept."""
    counts = np.bincount([n for text in accepted for n in text], minlength=DRAFT + 1)
    mean: Figure = ratio([sum(text) for text in accepted], [len(text) for text in accepted], of="texts", seed=seed)
    return {
        "per_verify": mean,
        "verifies": int(counts.sum()),
        "share_of_length": (counts / counts.sum()).tolist(),
        "kept_at_position": (counts[::-1].cumsum()[::-1][1:] / counts.sum()).tolist(),
    }


def _softmax(x: F64) -> F64:
    e = np.exp(x - x.max())
    return np.asarray(e / e.sum())


_RISE, _FALL = np.linspace(0, 3, SMALL), np.linspace(3, 0, SMALL)
PAIRS: dict[str, tuple[F64, F64, dict[str, Any]]] = {
    "near": (_RISE, _softmax(_RISE / 2), {}),
    "far": (_RISE, _softmax(_FALL), {}),
    "equal": (_RISE, _softmax(_RISE), {}),
    "a draft of one token": (_RISE, np.eye(SMALL)[1], {}),
    "target cut to its top 3": (_RISE, _softmax(_FALL), {"top_k": 3}),
    "nothing in common": (_RISE, _softmax(_FALL) * (np.arange(SMALL) < 4) / _softmax(_FALL)[:4].sum(), {"top_k": 4}),
}
"""Name -> the target's logits, the draft's distribution, and further sampling parameters."""


def distributions(job: Job) -> dict[str, Any]:
    """Chi-square tests on a vocabulary of 8: tokens after drafting against the target's distribution, and against
    tokens that were sampled without a draft."""
    draws = _DRAWS[job.quick]

    def compute() -> dict[str, Any]:
        found = {}
        with Progress("sampled distributions", draws * len(PAIRS)) as progress:
            for number, (name, pair) in enumerate(PAIRS.items()):
                # Each sample is a request of its own, so that no two share their random numbers.
                found[name] = sampled(*pair, draws=draws, seed=job.seed, request=2 * number)
                progress.add(draws)
        return found

    pairs: dict[str, Any] = job.store.get("distributions", job.key(None, draws=draws), compute)
    return {"draws": draws, "pairs": pairs}


def sampled(target: F64, chances: F64, more: dict[str, Any], *, draws: int, seed: int, request: int) -> dict[str, Any]:
    """One pair: p-values of both tests, and the share of drafts kept beside the most that any lossless rule keeps.

    Tokens are made by the functions of which `m31.engine.verify.verify` and `sample` consist, with all random numbers
    drawn at once; the first `_CHECKED` of both are compared with what `verify` and `sample` themselves give.

    Args:
        target, chances, more: see `PAIRS`.
        draws: tokens of each sample.
        seed, request: of the random numbers; the sample without drafts has the next request.
    Raises:
        ValueError: `verify` or `sample` gives another token.
    """
    params = SamplingParams(temperature=1.0, top_p=1.0, seed=seed, **more)
    logits = torch.tensor(target, dtype=torch.float32)
    p = distribution(logits.double().numpy(), params)
    spots = np.arange(draws)
    drafts, accepts, rests = (uniforms(seed, request, spots, purpose) for purpose in _PURPOSES)
    proposed = [draw(chances, u) for u in drafts]
    kept = [keeps(p, chances, token, u) for token, u in zip(proposed, accepts, strict=True)]
    drafted = [
        token if keep else replacement(p, chances, u) for token, keep, u in zip(proposed, kept, rests, strict=True)
    ]
    plain = [draw(p, u) for u in uniforms(seed, request + 1, spots, Purpose.SAMPLE)]
    for position in range(min(draws, _CHECKED)):
        row, other = (
            RowState(params=params, seed=seed, request=r, position=position, prompt_ids=(), output_ids=())
            for r in (request, request + 1)
        )
        draft = Drafted(tokens=(proposed[position],), chances=(chances,))
        got = verify(torch.stack([logits, logits]), draft, row)[0], sample(logits[None], [other])[0]
        if (got[0].token_id, got[1].token_id) != (drafted[position], plain[position]):
            raise ValueError(f"draw {position}: verify and sample give {got}")
    counts = [np.bincount(tokens, minlength=SMALL).astype(np.float64) for tokens in (drafted, plain)]
    return {
        "against_target": chi_square(counts[0], p * draws),
        "against_plain": same_source(counts[0], counts[1]),
        "kept": float(np.mean(kept)),
        "most_kept": float(np.minimum(p, chances).sum()),
    }
