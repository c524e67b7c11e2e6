"""L2, steps: the same tokens give the same logits, however they are cut, wherever they lie, whoever else is there.

Every run has pages that read as NaN until they are written, and an unused one between any two. Compared are the logits
of one backend with its own: the same kernels compute the same numbers, in another order at most, so that the bound is
narrow (`m31.conformance.rig.Rig.slack`), or nothing where the manifest declares equal bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from m31.conformance.bench import Bench
from m31.conformance.item import Evidence, Item, NotRun
from m31.conformance.levels.forms import checkpoints, pages, prompt
from m31.conformance.rig import F32, Forms, Part, Rig, Run
from m31.conformance.same import judge_pair
from m31.conformance.synthetic import VOCAB_SIZE
from m31.errors import ContractViolation
from m31.graph import Kernel
from m31.ops.cases import rng_for
from m31.ops.fused import FUSED
from m31.sdk.manifest import Manifest

SHORT, LONG = 300, 2200
SPLITS = ((1,), (64,), (127,), (128,), (129,), (255, 1), (1, 1, 126), (299,))
LONG_SPLITS = ((2047,), (2048,), (1, 2048), (127, 1921, 1))  # the last page of 16 blocks, the first of 17
RESUMES = (126, 127, 128, 129, 130)
BATCHES = (2, 3, 4, 5, 8)
_LENGTHS = (1, 5, 127, 128, 129, 40, 200, 256)
Execute = Callable[[Bench], Evidence]


def items(manifest: Manifest) -> Iterator[Item]:
    """Splits, resumption, pages, company, repetition, fusions."""
    names = checkpoints(manifest)
    if not names:
        return
    name, promised = names[0], manifest.determinism

    def item(
        case: str,
        subject: str,
        execute: Callable[..., Evidence],
        *args: Any,
        forms: Forms | None = None,
        claims: tuple[str, ...] = (),
        bitwise: bool | None = False,
        seconds: float = 0.3,
        **attributes: Any,
    ) -> Item:
        full = f"L2/{case}"
        return Item(
            id=full,
            level="L2",
            subject=subject,
            format=(forms.kv or forms.index or "") if forms else "",
            criterion="exact" if bitwise else "bound",
            claims=claims,
            attributes={"checkpoint": name, **attributes},
            execute=partial(execute, full, name, forms or Forms(), *args),
            judge=judge_pair(full, bitwise=bool(bitwise)),
            seconds=seconds,
        )

    pieces = bool(promised and promised.chunk_invariant)
    company = bool(promised and promised.batch_invariant)
    cut = ("determinism:chunk_invariant",) if pieces else ()
    among = ("determinism:batch_invariant",) if company else ()
    for split in SPLITS:
        case = f"chunks/{SHORT}-split-{'-'.join(map(str, split))}"
        yield item(case, "chunked prefill", _split, SHORT, split, bitwise=pieces, claims=cut, split=split)
    for split in LONG_SPLITS:
        case = f"chunks/{LONG}-split-{'-'.join(map(str, split))}"
        yield item(case, "chunked prefill", _split, LONG, split, bitwise=pieces, claims=cut, split=split, seconds=2)
    yield item("chunks/one-by-one", "chunked prefill", _split, 140, (100, *[1] * 40), bitwise=pieces, claims=cut)
    for at in RESUMES:
        yield item(f"resume/at-{at}", "prefix resume", _resume, at, bitwise=pieces, claims=cut, at=at)
    for claim, forms in pages(manifest):
        case = f"resume/at-129/{claim.replace(':', '-')}"
        yield item(case, "prefix resume", _resume, 129, forms=forms, claims=(claim,), bitwise=pieces, at=129)
    yield item("resume/found-pages", "prefix resume", _found, seconds=0.5)
    for order in ("ascending", "random"):
        yield item(f"pages/{order}", "physical pages", _ordered, order)
    for count in BATCHES:
        case = f"batch/{count}-together"
        yield item(case, "batch", _together, count, bitwise=company, claims=among, sequences=count, seconds=0.5)
    yield item("batch/permuted", "batch", _permuted, bitwise=company, claims=among)
    yield item("batch/decode-among-prefill", "batch", _mixed, bitwise=company, claims=among)
    again = bool(promised and promised.run_to_run)
    claims = ("determinism:run_to_run",) if again else ()
    yield item("repeat/run-to-run", "repetition", _again, bitwise=again, claims=claims)
    for fused in FUSED:
        if manifest.ops != "all" and fused in manifest.ops:
            yield item(f"fusion/{fused}", "fusions", _fusion, fused, claims=(f"op:{fused}",))


def rig(bench: Bench, name: str, forms: Forms, count: int, **more: Any) -> Rig:
    """With pages for `count` tokens and a few that nobody uses."""
    return Rig(bench, bench.checkpoint(name), forms, pages=-(-count // 128) + 12, **more)


def whole(bench: Bench, name: str, forms: Forms, count: int) -> F32:
    """Logits of a prompt in steps as large as the engine's; what most items compare with."""
    ids = prompt(f"L2/prompt-{count}", count, VOCAB_SIZE)

    def make() -> F32:
        made = rig(bench, name, forms, count)
        return made.feed(made.run(ids))

    return bench.once(("whole", name, forms, count), make)


def _pair(made: Rig, got: F32, want: F32, more: dict[str, Any] | None = None) -> Evidence:
    """Every 16th row and the last ones: enough to judge, and small enough to store."""
    n = len(want)
    rows = sorted({*range(0, n, 16 if n > 512 else 1), *range(max(0, n - 160), n)})
    return Evidence({"got": got[rows], "want": want[rows]}, {**made.facts(), **(more or {})})


def _split(case: str, name: str, forms: Forms, count: int, split: Sequence[int], bench: Bench) -> Evidence:
    want = whole(bench, name, forms, count)
    made = rig(bench, name, forms, count)
    got = made.feed(made.run(prompt(f"L2/prompt-{count}", count, VOCAB_SIZE)), *split)
    return _pair(made, got, want)


def _resume(case: str, name: str, forms: Forms, at: int, bench: Bench) -> Evidence:
    """A prefix is computed, exported, and found in another cache at other places; two texts go on from there."""
    want = whole(bench, name, forms, SHORT)
    ids = prompt(f"L2/prompt-{SHORT}", SHORT, VOCAB_SIZE)
    first, second = (rig(bench, name, forms, 2 * SHORT) for _ in range(2))
    prefix = first.run(ids[:at])
    rows = first.feed(prefix)
    start, places = first.cache.export(prefix.pages), [9, 4][: len(prefix.pages)]
    first.cache.poison(prefix.pages)
    second.cache.import_(start, places)
    tail = second.run(ids, pages=[*places, 1, 0, 2][: -(-SHORT // 128)])
    tail.done = at
    return _pair(second, np.concatenate([rows, second.feed(tail)]), want)


def _found(case: str, name: str, forms: Forms, bench: Bench) -> Evidence:
    """The engine finds the pages of an earlier text of the same beginning: greedy texts and their logits agree."""
    from m31.engine.sampling import SamplingParams
    from m31.engine.sequence import Sequence as Asked

    made = rig(bench, name, forms, 4 * SHORT)
    engine = made.engine(prefix_cache=True)
    ids = tuple(prompt(f"L2/prompt-{SHORT}", SHORT, VOCAB_SIZE))
    params = SamplingParams(max_tokens=8, temperature=0.0)
    held = []
    for _ in range(2):
        asked = Asked(prompt=ids, params=params, seed=0, request=0, stop_ids=frozenset())
        engine.add(asked)
        engine.step()
        held.append(asked.computed)
        while engine.busy:
            engine.step()
        text = [token.token_id for token in asked.sampled]
    other = rig(bench, name, forms, 4 * SHORT)
    rows = other.feed(other.run([*ids, *text]), SHORT)
    chosen = [int(row.argmax()) for row in rows[SHORT - 1 : -1]]
    if chosen != text:
        # a tie within the bound may go either way; the margin of the choice says whether it is one
        at = next(i for i, (a, b) in enumerate(zip(chosen, text, strict=True)) if a != b)
        row = rows[SHORT - 1 + at]
        if row[chosen[at]] - row[text[at]] > 2 * other.slack * np.abs(row).max():
            raise ContractViolation(
                "order",
                f"gives token {text[at]} as number {at} of a text whose beginning was found in pages",
                where=case,
                expected=f"{chosen[at]}, as without found pages",
            )
    return _pair(other, rows, rows, {"computed": held})


def _ordered(case: str, name: str, forms: Forms, order: str, bench: Bench) -> Evidence:
    want = whole(bench, name, forms, SHORT)
    count = -(-SHORT // 128) + 12
    places = range(count) if order == "ascending" else rng_for(case).permutation(count).tolist()
    made = rig(bench, name, forms, SHORT, order=list(places))
    got = made.feed(made.run(prompt(f"L2/prompt-{SHORT}", SHORT, VOCAB_SIZE)))
    return _pair(made, got, want)


def _texts(count: int) -> list[list[int]]:
    return [prompt(f"L2/text-{at}", length + 1, VOCAB_SIZE) for at, length in enumerate(_LENGTHS[:count])]


def _alone(bench: Bench, name: str, forms: Forms, at: int) -> F32:
    """Logits of one text: all but its last token in one step, then that."""

    def make() -> F32:
        ids = _texts(len(_LENGTHS))[at]
        made = rig(bench, name, forms, len(ids))
        return made.feed(made.run(ids), len(ids) - 1)

    return bench.once(("alone", name, forms, at), make)


def _company(made: Rig, texts: Sequence[list[int]]) -> list[F32]:
    runs = [made.run(ids) for ids in texts]
    rows = made.step(*(Part(run, len(run.tokens) - 1) for run in runs))
    last = made.step(*(Part(run, 1) for run in runs))
    return [np.concatenate(pair) for pair in zip(rows, last, strict=True)]


def _together(case: str, name: str, forms: Forms, count: int, bench: Bench) -> Evidence:
    """All prefilled in one step, all decoded in one."""
    texts = _texts(count)
    made = rig(bench, name, forms, sum(map(len, texts)) + 128 * count)
    got = np.concatenate(_company(made, texts))
    return _pair(made, got, np.concatenate([_alone(bench, name, forms, at) for at in range(count)]))


def _permuted(case: str, name: str, forms: Forms, bench: Bench) -> Evidence:
    """The same sequences in another order of the step."""
    texts = _texts(6)
    order = rng_for(case).permutation(6).tolist()
    size = sum(map(len, texts)) + 128 * 6
    want = _company(rig(bench, name, forms, size), texts)
    made = rig(bench, name, forms, size)
    got = _company(made, [texts[at] for at in order])
    back = [got[order.index(at)] for at in range(6)]
    return _pair(made, np.concatenate(back), np.concatenate(want))


def _mixed(case: str, name: str, forms: Forms, bench: Bench) -> Evidence:
    """One decodes while others prefill, in one step."""
    texts = _texts(6)
    made = rig(bench, name, forms, sum(map(len, texts)) + 128 * 6)
    runs = [made.run(ids) for ids in texts]
    rows: list[list[F32]] = [[] for _ in runs]

    def step(*which: tuple[int, int]) -> None:
        for (at, _), got in zip(which, made.step(*(Part(runs[at], n) for at, n in which)), strict=True):
            rows[at].append(got)

    step((2, 127), (0, 1), (5, 10))
    step((2, 1), (3, 128), (0, 1), (5, 1))
    step((5, 30), (4, 129), (3, 1), (1, 5))
    step((4, 1), (1, 1))
    got = np.concatenate([np.concatenate(part) for part in rows])
    return _pair(made, got, np.concatenate([_alone(bench, name, forms, at) for at in range(6)]))


def _again(case: str, name: str, forms: Forms, bench: Bench) -> Evidence:
    """The same steps on a new cache, and a third time among pages that others have used."""
    ids = prompt(f"L2/prompt-{SHORT}", SHORT, VOCAB_SIZE)
    made = rig(bench, name, forms, 4 * SHORT)

    def once(run: Run) -> F32:
        return made.feed(run, 200, *[1] * 20)

    first, second, third = (once(made.run(ids)) for _ in range(3))
    return _pair(made, np.concatenate([second, third]), np.concatenate([first, first]))


def _fusion(case: str, name: str, forms: Forms, fused: str, bench: Bench) -> Evidence:
    """With the fused op and with its parts, by whoever serves them."""
    made = rig(bench, name, forms, SHORT)
    wanted = made.serving.session.fusions()
    if fused not in wanted:
        raise ContractViolation(
            "claims",
            f"claims '{fused}' and does not ask for it: fusions() is {list(wanted)}",
            where="backend.toml: ops",
            expected="every fused op that is claimed to be asked for, and to be used where the kernel serves it",
        )
    used = {op.name for op, found in made.assigned if op.spec.name == fused and isinstance(found.kernel, Kernel)}
    if not used:
        raise NotRun("refused", f"{fused} is refused in every place of this model")
    ids = prompt(f"L2/prompt-{SHORT}", SHORT, VOCAB_SIZE)
    parts = rig(bench, name, forms, SHORT, fused=False)
    rows = parts.feed(parts.run(ids), 200, 90, *[1] * 10)
    return _pair(made, made.feed(made.run(ids), 200, 90, *[1] * 10), rows, {"places": len(used)})
