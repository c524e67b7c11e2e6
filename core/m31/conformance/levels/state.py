"""L2: what only shows over several steps. Pages, steps, drafts, who runs what, and the far end of the context."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from m31.conformance import oracle
from m31.conformance.bench import Bench
from m31.conformance.item import Evidence, Item, Verdict
from m31.conformance.levels import drafts, pages, steps, written
from m31.conformance.levels.forms import checkpoints, prompt
from m31.conformance.levels.steps import rig
from m31.conformance.rig import F32, Forms, Part, Rig
from m31.conformance.same import require_same
from m31.conformance.synthetic import VOCAB_SIZE
from m31.errors import ContractViolation
from m31.graph import BoundGraph, DefaultPlan, RunKernel, StepBatch, StepClass
from m31.sdk.manifest import Manifest
from m31.sdk.serving import Serving

_SHOWN = 3  # calls of each op


def items(manifest: Manifest) -> Iterator[Item]:
    """Every item of the level."""
    yield from pages.items(manifest)
    yield from steps.items(manifest)
    yield from drafts.items(manifest)
    yield from written.items(manifest)
    yield from _dispatch(manifest)


def _dispatch(manifest: Manifest) -> Iterator[Item]:
    for name in checkpoints(manifest):
        for subject, execute, judge in (
            ("as-declared", _calls, _judge_calls),
            ("nothing-borrowed", _borrowed, _judge_borrowed),
        ):
            yield Item(
                id=f"L2/fallback/{subject}/{name}",
                level="L2",
                subject="fallback",
                format="",
                criterion="rule",
                claims=(),
                attributes={"checkpoint": name},
                execute=partial(execute, name),
                judge=judge,
                seconds=0.3,
            )
    for name in checkpoints(manifest)[:1]:
        case = f"L2/context/last-of-{manifest.limits.context_tokens}"
        yield Item(
            id=case,
            level="L2",
            subject="context",
            format="",
            criterion="bound",
            claims=("limit:context_tokens",),
            attributes={"checkpoint": name, "context": manifest.limits.context_tokens},
            execute=partial(_last, name, manifest.limits.context_tokens),
            judge=partial(_judge_last, case, name, manifest.limits.context_tokens),
            seconds=6,
        )


def _calls(name: str, bench: Bench) -> Evidence:
    """A prefill and two decodes; which calls of which op ran where."""
    made = rig(bench, name, Forms(), 200)
    engine = made.engine()
    asked = drafts.asked_for(prompt("L2/fallback", 40, VOCAB_SIZE), 3)
    engine.add(asked)
    while engine.busy:
        engine.step()
    ran: dict[str, list[str]] = {}
    for op, found in made.assigned:
        ran[op.spec.name] = sorted({*ran.get(op.spec.name, []), found.by})
    manifest = bench.manifest
    facts = {
        "calls": dict(engine.fallback_calls),
        "ran": ran,
        "name": made.serving.name,
        "may": list(manifest.fallback),
        "claimed": "all" if manifest.ops == "all" else list(manifest.ops),
        "steps": len(asked.sampled),
    }
    return Evidence(facts=facts)


def _judge_calls(evidence: Evidence) -> Verdict:
    facts = evidence.facts
    elsewhere = {op for op, by in facts["ran"].items() if by != [facts["name"]]}
    silent = sorted(elsewhere - set(facts["calls"]))
    undeclared = sorted((elsewhere | set(facts["calls"])) - set(facts["may"]))
    if silent or undeclared:
        raise ContractViolation(
            "claims",
            f"runs {', '.join(undeclared or silent)} elsewhere" + ("" if undeclared else ", and counts no call of it"),
            where=f"backend {facts['name']}",
            expected=f"at most {', '.join(facts['may']) or 'nothing'}, as its manifest declares, every call counted",
        )
    never = sorted(elsewhere & (set() if facts["claimed"] == "all" else set(facts["claimed"])))
    return Verdict(note=f"claimed and left to the other one in some places: {', '.join(never)}" if never else "")


def _borrowed(name: str, bench: Bench) -> Evidence:
    """Which of the backend's own kernels call into the reference's package while they run."""
    made = rig(bench, name, Forms(), 400)
    package = type(oracle.bench().session()).__module__.partition(".")[0]
    session = made.serving.session
    if any(cls.__module__.partition(".")[0] == package for cls in type(session).__mro__):
        return Evidence(facts={"borrowed": {}, "kin": True})
    allowed = frozenset({type(made.cache).__module__})  # whose pages these may be, and whose `components` one may ask
    found: dict[str, list[str]] = {}
    ids = prompt("L2/fallback", 150, VOCAB_SIZE)
    run = made.run(ids)
    slots = [run.pages[at // 128] * 128 + at % 128 for at in range(len(ids))]
    for start, end, kind in ((0, 149, "mixed"), (149, 150, "decode")):
        step = StepClass(kind=kind, q_len=int(kind == "decode"), tokens=256, seqs=1, rows=1, pages=16)  # type: ignore[arg-type]
        bound = made.compiler.bind(step)
        plan = DefaultPlan(_watched(bound, made.serving, package, allowed, found), step, session.dtypes, session.device)
        batch = StepBatch.allocate(step, session.device)
        batch.fill(
            tokens=ids[start:end],
            positions=range(start, end),
            q_lens=[end - start],
            seq_lens=[end],
            slot_map=slots[start:end],
            page_table=[run.pages],
            out_rows=[0],
        )
        plan.run(batch, made.cache)
    return Evidence(facts={"borrowed": found, "kin": False})


def _watched(
    bound: BoundGraph, serving: Serving, package: str, allowed: frozenset[str], found: dict[str, list[str]]
) -> BoundGraph:
    """The same graph; the backend's own kernels note calls into `package`, but for `allowed` modules of it."""

    def watched(op: str, run: RunKernel) -> RunKernel:
        def noted(outs: Sequence[Any], ins: Sequence[Any], weights: Any, workspace: torch.Tensor | None) -> None:
            def look(frame: Any, event: str, arg: Any) -> None:
                module, caller = (str(f.f_globals.get("__name__", "")) if f else "" for f in (frame, frame.f_back))
                entered = module.partition(".")[0] == package != caller.partition(".")[0]
                if event == "call" and entered and module not in allowed:
                    calls = found.setdefault(op, [])
                    if len(calls) < _SHOWN:
                        calls.append(f"{module}.{frame.f_code.co_name}")

            before = sys.getprofile()
            sys.setprofile(look)
            try:
                run(outs, ins, weights, workspace)
            finally:
                sys.setprofile(before)

        return noted

    assigned = dict(bound.assigned)
    for call in bound.graph.calls:
        given = assigned[call.op.name]
        if given.by == serving.name:
            run = watched(call.op.spec.name, given.kernel.run)
            assigned[call.op.name] = replace(given, kernel=replace(given.kernel, run=run))
    return BoundGraph(bound.graph, assigned, bound.handles)


def _judge_borrowed(evidence: Evidence) -> Verdict:
    borrowed = evidence.facts["borrowed"]
    if borrowed:
        op, calls = next(iter(borrowed.items()))
        raise ContractViolation(
            "claims",
            f"claims {op} and runs {calls[0]} of the reference for it",
            where="backend.toml: ops",
            expected="a kernel of its own, or the op in fallback, where everybody sees it",
        )
    return Verdict(note="this is the reference, or made of it" if evidence.facts["kin"] else "")


def _decode_at(made: Rig, limit: int) -> F32:
    """One token at the last position. Its context is two pages of text, over and over, in a table that is full: nothing
    of that length is computed or stored."""
    ids = prompt("L2/context", 257, VOCAB_SIZE)
    text = made.run(ids[:256])
    made.feed(text)
    last = made.run(ids[:1]).pages[0]
    made.cache.copy_pages([text.pages[1]], [last])
    blocks = -(-limit // 128)
    table = [text.pages[at % 2] for at in range(blocks - 1)] + [last]
    run = made.run(range(0), pages=table)
    run.done = limit - 1
    return made.step(Part(run, 1, tokens=(ids[256],)))[0]


def _last(name: str, limit: int, bench: Bench) -> Evidence:
    made = rig(bench, name, Forms(), 1024)
    most = min(limit, made.opened.limits.max_context)
    return Evidence({"got": _decode_at(made, most)}, {**made.facts(), "context": most})


def _judge_last(case: str, name: str, limit: int, evidence: Evidence) -> Verdict:
    facts = evidence.facts
    most = min(limit, oracle.bench().manifest.limits.context_tokens)
    if facts["context"] < most:
        raise ContractViolation(
            "claims",
            f"declares {limit:,} tokens and serves {facts['context']:,} of this model, which has {most:,} and more",
            where="backend.toml: limits.context_tokens",
            expected="what is declared",
        )
    forms = Forms(kv=facts["kv"], index=facts["index"], arithmetic=facts["arithmetic"])
    want = _decode_at(rig(oracle.bench(), name, forms, 1024), most)
    return require_same(evidence.arrays["got"], want, facts, bitwise=False, where=case, rule="agreement")
