"""L2, drafts: steps that verify, and what is left behind when a draft is rejected. For backends that draft.

The drafter is scripted: it proposes what a plain run of the same backend gave, or what it did not give. Nothing of its
own is computed, so that only the target is judged.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np
import torch

from m31.conformance.bench import Bench
from m31.conformance.item import Evidence, Item, Verdict
from m31.conformance.levels.forms import checkpoints, prompt
from m31.conformance.levels.steps import rig, whole
from m31.conformance.rig import F32, Forms, Part
from m31.conformance.same import judge_pair
from m31.conformance.synthetic import VOCAB_SIZE
from m31.engine.sampling import RowState, SamplingParams
from m31.engine.sequence import Sequence as Asked
from m31.engine.verify import Drafted
from m31.errors import ContractViolation
from m31.ops.cases import rng_for
from m31.sdk.backend import KVCache
from m31.sdk.manifest import Manifest

SCRIPTS = ("right", "wrong", "alternating")
_PROMPT, _NEW, _MOST = 120, 24, 7
_LENGTH = 300  # of the prompt that rig-level steps verify


def items(manifest: Manifest) -> Iterator[Item]:
    """Nothing without drafting."""
    most, names = manifest.limits.draft_tokens, checkpoints(manifest)
    if not most or not names:
        return

    def item(case: str, judge: Callable[[Evidence], Verdict] | None, execute: partial[Evidence], drafted: int) -> Item:
        return Item(
            id=case,
            level="L2",
            subject="drafts",
            format="",
            criterion="bound",
            claims=("limit:draft_tokens",) if drafted == most else (),
            attributes={"checkpoint": names[0], "drafted": drafted},
            execute=execute,
            judge=judge or judge_pair(case, bitwise=False, rule="drafts"),
            seconds=0.5,
        )

    for count in sorted({1, min(3, most), most}):
        case = f"L2/verify/step-of-{count}"
        yield item(case, None, partial(_verified, names[0], count), count)
        case = f"L2/verify/rewind-of-{count}"
        yield item(case, None, partial(_rewound, case, names[0], count), count)
    count = min(most, _MOST)
    for script in SCRIPTS:
        case = f"L2/drafts/{script}"
        yield item(case, partial(_judge_text, case), partial(_told, case, names[0], script, count), count)


def _verified(name: str, count: int, bench: Bench) -> Evidence:
    """A prompt in steps that verify, around the edge of a page and at the end."""
    ids = prompt(f"L2/prompt-{_LENGTH}", _LENGTH, VOCAB_SIZE)
    made = rig(bench, name, Forms(), _LENGTH, drafted=count)
    run = made.run(ids)
    rows = [*made.step(Part(run, 126))]
    rows += made.step(Part(run, count + 1), verify=True)
    while len(ids) - run.done > count + 1:
        rows += made.step(Part(run, len(ids) - run.done - count - 1))
    rows += made.step(Part(run, len(ids) - run.done), verify=True)
    return Evidence({"got": np.concatenate(rows), "want": whole(bench, name, Forms(), _LENGTH)}, made.facts())


def _rewound(case: str, name: str, count: int, bench: Bench) -> Evidence:
    """Before each of the last tokens a draft of other tokens is written to the pages and rejected: what it left behind
    lies after the text and is not read."""
    ids = prompt(f"L2/prompt-{_LENGTH}", _LENGTH, VOCAB_SIZE)
    made = rig(bench, name, Forms(), _LENGTH + count, drafted=count)
    run = made.run([*ids, *[0] * count])
    rows = [*made.step(Part(run, 120))]
    for at in range(120, 140):
        wrong = rng_for(f"{case}/{at}").integers(3, VOCAB_SIZE, count).tolist()
        (anchor, *_) = made.step(Part(run, count + 1, tokens=(ids[at], *wrong)), verify=True)
        rows.append(anchor[:1])
        run.done += 1  # the anchor stays
    rows += made.step(Part(run, _LENGTH - run.done))
    return Evidence({"got": np.concatenate(rows), "want": whole(bench, name, Forms(), _LENGTH)}, made.facts())


class Told:
    """A drafter that proposes what a script says. See `m31.engine.drafting.Drafter`.

    Attributes:
        asked: how many drafts it made.
    """

    def __init__(self, answer: Callable[[int], int], tokens: int) -> None:
        self.tokens, self.answer, self.asked = tokens, answer, 0
        self.caches: Sequence[KVCache] = ()
        self.fallback_calls = Counter[str]()

    def draft(self, anchor: int, count: int, pages: Sequence[int], state: RowState) -> Drafted:
        """What the script says for each position."""
        self.asked += 1
        return Drafted(tokens=tuple(self.answer(state.position + at) for at in range(count)))

    def learn(self, taps: torch.Tensor, positions: Sequence[int], slots: Sequence[int]) -> None:
        """Looks at the taps only.

        Raises:
            ContractViolation: they are not numbers, one row for each token.
        """
        if len(taps) != len(positions) or not bool(torch.isfinite(taps).all()):
            raise ContractViolation(
                "extra-outputs",
                f"gives taps {list(taps.shape)} for {len(positions)} tokens",
                where="output 'taps'",
                expected="finite numbers, one row for each token of the step",
            )


def _told(case: str, name: str, script: str, count: int, bench: Bench) -> Evidence:
    """Greedy, without drafting and with; then the logits of the text, which say how clear each choice was."""
    ids = prompt("L2/drafts", _PROMPT, VOCAB_SIZE)
    plain, rows, slack = bench.once(("plain", name), partial(_plain, bench, name, ids))

    def answer(position: int) -> int:
        at = position - _PROMPT
        right = plain[at] if at < len(plain) else 3
        wrong = script == "wrong" or (script == "alternating" and at % 2)
        return (right - 3 + 1) % (VOCAB_SIZE - 3) + 3 if wrong else right

    made = rig(bench, name, Forms(), 4 * _PROMPT, taps=(0, 2), drafted=count)
    drafter = Told(answer, count)
    engine = made.engine(drafter=drafter)
    asked = asked_for(ids, _NEW)
    engine.add(asked)
    while engine.busy:
        engine.step()
    text = [token.token_id for token in asked.sampled]
    tally = asked.tally
    facts = {**made.facts(), "slack": slack, "plain": plain, "drafted": text, "script": script}
    facts |= {"verifies": tally.verifies, "proposed": tally.drafted, "kept": tally.accepted}
    return Evidence({"rows": rows}, facts)


def asked_for(ids: Sequence[int], new: int) -> Asked:
    """Greedy, of that many tokens."""
    params = SamplingParams(max_tokens=new, temperature=0.0)
    return Asked(prompt=tuple(ids), params=params, seed=0, request=0, stop_ids=frozenset())


def _plain(bench: Bench, name: str, ids: Sequence[int]) -> tuple[list[int], F32, float]:
    made = rig(bench, name, Forms(), 4 * _PROMPT)
    engine = made.engine()
    asked = asked_for(ids, _NEW)
    engine.add(asked)
    while engine.busy:
        engine.step()
    text = [token.token_id for token in asked.sampled]
    other = rig(bench, name, Forms(), 4 * _PROMPT)
    rows = other.feed(other.run([*ids, *text]), len(ids))
    return text, rows[len(ids) - 1 : -1], made.slack


def _judge_text(case: str, evidence: Evidence) -> Verdict:
    """The same text, up to a choice that lies within the bound; and drafts that were really kept or rejected."""
    facts, rows = evidence.facts, evidence.arrays["rows"]
    plain, drafted = facts["plain"], facts["drafted"]
    if not facts["verifies"]:
        raise ContractViolation("drafts", "never verifies a draft", where=case, expected="a draft in every step")
    kept, proposed, script = facts["kept"], facts["proposed"], facts["script"]
    at = next((i for i, (a, b) in enumerate(zip(plain, drafted, strict=False)) if a != b), None)
    if len(plain) != len(drafted) or at is not None:
        gap = allowed = 0.0
        if at is not None:
            row = rows[at].astype(np.float64)
            gap, allowed = float(row[plain[at]] - row[drafted[at]]), float(2 * facts["slack"] * np.abs(row).max())
        if at is None or gap > allowed:
            raise ContractViolation(
                "drafts",
                f"gives another text with a drafter that is {script}, from token {at} on",
                where=case,
                expected="the text without drafting, but for choices within the bound",
            )
        return Verdict(max_error=gap, allowed=allowed, where=f"token {at}", note="a tie within the bound")
    wrong = {"right": kept != proposed, "wrong": kept != 0, "alternating": not 0 < kept < proposed}[script]
    if wrong:
        raise ContractViolation(
            "drafts",
            f"keeps {kept} of {proposed} tokens of a drafter that is {script}",
            where=case,
            expected="those that are the model's own choice, and no others",
        )
    return Verdict(note=f"{kept} of {proposed} kept in {facts['verifies']} steps")
