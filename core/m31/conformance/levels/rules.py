"""L0, the rules of the contract (`m31.conformance.RULES`), on weights, pages and plans of synthetic checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from m31.conformance.bench import Bench
from m31.conformance.item import Evidence, Item, NotRun, Verdict
from m31.conformance.levels.forms import CHECKPOINTS, checkpoints, pages, prompt
from m31.conformance.pages import check_layout_id
from m31.conformance.plans import check_fixed_buffers
from m31.conformance.rig import Forms, Rig, opened_for
from m31.conformance.synthetic import VOCAB_SIZE
from m31.conformance.weights import check_losses, check_release
from m31.engine.compiler import Compiler, whole
from m31.engine.opening import Opened, open_serving
from m31.errors import BackendRefused, ContractViolation, NoKernel
from m31.graph import Assigned, DefaultPlan, OpInstance, StepBatch, StepClass
from m31.ops import ALL
from m31.ops.fused import FUSED
from m31.sdk.manifest import Manifest

_WEIGHTED = tuple(name for name, spec in {**ALL, **FUSED}.items() if any(a.kind == "weight" for a in spec.inputs))
_KINDS = ("decode", "verify", "mixed")


def items(manifest: Manifest) -> Iterator[Item]:
    """Weights op by op, plans checkpoint by checkpoint, pages format by format."""
    for name in checkpoints(manifest):
        for op in _WEIGHTED:
            if (manifest.ops == "all" and op not in FUSED) or op in manifest.ops:
                yield _item("weights", name, op, partial(_weights, name, op))
        yield _item("fixed-buffers", name, "", partial(_fixed, name), seconds=0.5)
        yield _item("prepared-at-load", name, "", partial(_prepared, name), seconds=0.5)
        yield _item("notes", name, "", partial(_notes, name))
    for claim, forms in pages(manifest):
        if checkpoints(manifest):
            case = claim.replace(":", "-")
            yield _item("layout-id", checkpoints(manifest)[0], case, partial(_layout, checkpoints(manifest)[0], forms))
    if manifest.limits.draft_tokens and checkpoints(manifest):
        yield _item("extra-outputs", checkpoints(manifest)[0], "", partial(_extras, checkpoints(manifest)[0]))


def _item(rule: str, name: str, case: str, execute: Callable[[Bench], str], *, seconds: float = 0.1) -> Item:
    return Item(
        id=f"L0/rule/{rule}/{name}" + (f"/{case}" if case else ""),
        level="L0",
        subject=f"rule {rule}",
        format=CHECKPOINTS[name],
        criterion="rule",
        claims=(),
        attributes={"checkpoint": name, "case": case},
        execute=lambda bench: Evidence(facts={"note": execute(bench)}),
        judge=lambda evidence: Verdict(note=evidence.facts["note"]),
        seconds=seconds,
    )


def _opened(bench: Bench, name: str) -> Opened:
    """The checkpoint on the backend, without a cache of decoded weights where that is an option."""
    cache = {"weight_cache_bytes": 0} if "weight_cache_bytes" in bench.manifest.options else {}

    def make() -> Opened:
        opened = opened_for(bench, bench.checkpoint(name), Forms())
        serving = open_serving(
            bench.decision, device=bench.device, dtype=None, arithmetic=None, options={**bench.options, **cache}
        )
        weights = whole(serving, opened.checkpoint.tensor)
        compiler = Compiler(serving, opened.compiler.graph, opened.checkpoint.config.text, weights)
        return replace(opened, serving=serving, compiler=compiler)

    try:
        return bench.once(("rules", name), make)
    except (BackendRefused, NoKernel) as refusal:
        raise NotRun("refused", str(refusal)) from refusal


def _step(kind: str, tokens: int) -> StepClass:
    q_len = {"decode": 1, "verify": min(tokens, 4), "mixed": 0}[kind]
    seqs = tokens // q_len if q_len else 1
    return StepClass(kind=kind, q_len=q_len, tokens=tokens, seqs=seqs, rows=tokens, pages=16)  # type: ignore[arg-type]


def _assigned(opened: Opened, step: StepClass) -> list[tuple[OpInstance, Assigned]]:
    try:
        return list(opened.compiler.assigned([step]))
    except NoKernel as refusal:
        raise NotRun("refused", str(refusal)) from refusal


def _weights(name: str, op: str, bench: Bench) -> str:
    """Rules `release`, `weight-bytes` and `losses` on the first instance of each way in which weights are stored."""
    opened = _opened(bench, name)
    mine: dict[tuple[str, ...], OpInstance] = {}
    others = set[str]()
    for instance, found in _assigned(opened, _step("mixed", 128)):
        if instance.spec.name == op:
            stored = tuple(sorted({str(decl.stored) for decl in instance.slots.values()}))
            if found.by == opened.serving.name:
                mine.setdefault(stored, instance)
            else:
                others.add(found.by)
    if not mine:
        reason = f"is left to {', '.join(sorted(others))}" if others else "is in no place of this model"
        raise NotRun("fallback" if others else "refused", f"{op} {reason}")
    for instance in mine.values():
        slots: Any = {slot: opened.checkpoint.tensor(decl.name) for slot, decl in instance.slots.items()}
        check_release(opened.serving.session, instance, slots)
        check_losses(opened.serving.session, instance, slots)
    return f"stored as {', '.join('+'.join(stored) for stored in mine)}"


def _batches(rig: Rig, step: StepClass, count: int) -> list[StepBatch]:
    """Steps of one sequence each, of different lengths."""
    made = []
    for at in range(count):
        length = 7 + 5 * at
        batch = StepBatch.allocate(step, rig.serving.session.device)
        batch.fill(
            tokens=prompt(f"L0/batches/{at}", length, VOCAB_SIZE),
            positions=range(length),
            q_lens=[length],
            seq_lens=[length],
            slot_map=range(length),
            page_table=[[0]],
            out_rows=[length - 1],
        )
        made.append(batch)
    return made


def _fixed(name: str, bench: Bench) -> str:
    rig = Rig(bench, bench.checkpoint(name), pages=3)
    step = StepClass(kind="mixed", q_len=0, tokens=32, seqs=1, rows=1, pages=16)
    seen = check_fixed_buffers(rig.serving.session, rig.compiler.bind(step), step, _batches(rig, step, 4), rig.cache)
    return f"{seen} values between kernels" if seen else "the plan runs other kernels than the graph's: its logits only"


def _prepared(name: str, bench: Bench) -> str:
    """Who serves an op, and with what arithmetic, is the same at every size of a kind of step, and when asked again."""
    opened = _opened(bench, name)
    kinds = _KINDS if bench.manifest.limits.draft_tokens else ("decode", "mixed")
    looked = 0
    for kind in kinds:
        known: dict[str, tuple[str, str]] = {}
        for tokens in (1, 2, 16, 128, 2048, 1):
            if kind == "decode" and tokens > 128:
                continue  # nobody decodes so many at once here
            for instance, found in _assigned(opened, _step(kind, tokens)):
                now = found.by, repr(found.kernel.arithmetic)
                before = known.setdefault(instance.name, now)
                looked += 1
                if before != now:
                    raise ContractViolation(
                        "prepared-at-load",
                        f"serves {instance.spec.name} by {before} and, at {tokens} tokens of a {kind} step, by {now}",
                        where=f"op {instance.name}",
                        expected="one answer for every size of a kind of step",
                    )
    return f"{looked} answers"


def _notes(name: str, bench: Bench) -> str:
    opened = _opened(bench, name)
    notes = opened.serving.session.notes
    if isinstance(notes, str) or not all(isinstance(note, str) for note in notes):
        raise ContractViolation("opened", f"has notes {notes!r}", where=name, expected="a sequence of sentences")
    for instance, found in _assigned(opened, _step("mixed", 16)):
        if found.by == opened.serving.name and not (found.kernel.name and found.kernel.why):
            raise ContractViolation(
                "opened",
                f"has a kernel for {instance.spec.name} without a name or a reason",
                where=name,
                expected="both, for people",
            )
    return f"{len(notes)} notes"


def _layout(name: str, forms: Forms, bench: Bench) -> str:
    try:
        opened = opened_for(bench, bench.checkpoint(name), forms)
        assigned = list(opened.compiler.assigned([_step("mixed", 128)]))
        layout = opened.serving.kv_layout(opened.spec, assigned)
        own = opened.serving.session.kv_layout(opened.spec)
    except (BackendRefused, NoKernel) as refusal:
        raise NotRun("refused", str(refusal)) from refusal
    if own.layout_id != layout.layout_id:
        raise NotRun("fallback", f"the pages are another backend's: {layout.layout_id}")
    least = opened.spec.page_tokens * (opened.spec.main_bytes + opened.spec.index_bytes)
    if layout.page_bytes < least:
        raise ContractViolation(
            "layout-id",
            f"says {layout.page_bytes:,} bytes a page",
            where=layout.layout_id,
            expected=f"at least {least:,}, the values alone",
        )
    check_layout_id(layout, layers=len(opened.spec.indexed))
    return layout.layout_id


def _extras(name: str, bench: Bench) -> str:
    """The residual streams of every token, of the last run, as a straight line of the same kernels gives them."""
    taps = (0, 2)
    rig = Rig(bench, bench.checkpoint(name), pages=3, taps=taps, drafted=1)
    step = StepClass(kind="mixed", q_len=0, tokens=32, seqs=1, rows=1, pages=16)
    session, bound = rig.serving.session, rig.compiler.bind(step)
    plan = session.compile(bound, step)
    if not hasattr(plan, "extra"):
        raise ContractViolation(
            "extra-outputs", "has no method 'extra'", where=f"plan {type(plan).__name__}", expected="one"
        )
    width = len(taps) * rig.opened.checkpoint.config.text.hidden_size
    for at, batch in enumerate(_batches(rig, step, 3)):
        plan.run(batch, rig.cache)
        got = plan.extra("taps").detach().float().cpu()
        line = DefaultPlan(bound, step, session.dtypes, session.device)
        line.run(batch, rig.cache)
        want = line.extra("taps").detach().float().cpu()
        allowed = rig.slack * float(want.abs().max())
        if got.shape != (batch.size.tokens, width) or not bool(((got - want).abs() <= allowed).all()):
            raise ContractViolation(
                "extra-outputs",
                f"gives taps {list(got.shape)} in run {at}, which are not those of its step",
                where=f"plan {type(plan).__name__}",
                expected=f"{[batch.size.tokens, width]}, as a straight line of the same kernels gives them",
            )
    return f"{width} channels"
