"""The fewest items that find the faults of this package: every case of an op, the rules of the contract, and steps of a
small model. What a backend is judged by are the items of `m31.conformance.levels`; these are for the self-test.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from m31 import ops
from m31.conformance.bench import Bench
from m31.conformance.cases import cases_of, instance, storable, weights_of
from m31.conformance.faults.breaks import quantised
from m31.conformance.item import Evidence, Item, Level, NotRun, Verdict
from m31.conformance.operators import Checked, _check_case
from m31.conformance.pages import check_layout_id
from m31.conformance.plans import check_fixed_buffers
from m31.conformance.weights import Held, check_release
from m31.engine.compiler import Compiler
from m31.engine.model import Model
from m31.errors import BackendRefused, ContractViolation
from m31.formats import mxfp8, nvfp4
from m31.formats.arithmetic import NAMED
from m31.graph import StepBatch, StepClass
from m31.ops import Case, OpSpec, TensorDecl
from m31.ops.fused import FUSED
from m31.sdk.backend import KVSpec, LazyTensor
from m31.sdk.manifest import Manifest

_CHECKPOINT = "random-m31"
_VOCAB = 512
_CLOSE = 1e-3
"""Of the largest logit: the same kernels in another order, or a float32 model beside the reference's."""
_LONG = 2200  # tokens, more than 16 blocks, so that selection selects
_CONTEXT = 2304
_SHARE = 0.99
_RELEASED = ("linear", "gemma_rmsnorm", "experts")


def items(manifest: Manifest) -> Iterator[Item]:
    """All of them, cheap ones first."""
    for spec in {**ops.ALL, **FUSED}.values():
        yield from _cases(spec)
    yield from _rules(manifest)
    for name, run in (("kinds", _kinds), ("page-edge", _page_edge), ("written", _written)):
        yield _item("L2", "steps", name, run, ("op:sparse_attention",))
    yield _item("L2", "fusions", "used", _fusions)
    for name, run in (("run-to-run", _twice), ("company", _company)):
        yield _item("L2", "determinism", name, run)
    for checkpoint, tokens in (("random-m31", 150), ("random-bf16", 150), ("random-m31", _LONG)):
        yield _item("L3", "agreement", f"{checkpoint}/{tokens}", partial(_agreement, checkpoint, tokens))


def _item(
    level: Level, subject: str, name: str, run: Callable[[Bench], None], claims: tuple[str, ...] = (), form: str = ""
) -> Item:
    def execute(bench: Bench) -> Evidence:
        run(bench)
        return Evidence()

    return Item(
        id=f"{level}/{subject}/{name}",
        level=level,
        subject=subject,
        format=form,
        criterion="rule",
        claims=claims,
        execute=execute,
        judge=lambda evidence: Verdict(),
    )


# --- ops ------------------------------------------------------------------------------------------------------------


def _cases(spec: OpSpec) -> Iterator[Item]:
    for case in cases_of(spec):
        for stored in storable(spec, weights_of(case, spec)):
            name = "/".join(part for part in (case.id.partition("/")[2], stored) if part)
            claims = (f"op:{spec.name}", *((f"weights:{stored}",) if stored else ()))
            yield _item("L1", spec.name, name, partial(_case, spec, case, stored), claims, stored)


def _case(spec: OpSpec, case: Case, stored: str, bench: Bench) -> None:
    done = Checked()
    session = bench.session()
    _check_case(session, session, spec, case, stored, True, done)
    if done.refused and not done.ran and not done.unjudged:
        raise NotRun("refused", "; ".join(done.refused.values()))


# --- rules ----------------------------------------------------------------------------------------------------------


def _rules(manifest: Manifest) -> Iterator[Item]:
    for name in _RELEASED:
        spec = ops.ALL[name]
        case = max(cases_of(spec), key=lambda c: sum(np.size(w) for w in weights_of(c, spec).values()))
        for stored in storable(spec, weights_of(case, spec)):
            yield _item("L0", "release", f"{name}/{stored}", partial(_release, spec, case, stored))
    for form in (*manifest.formats.kv, "plain"):
        if form in ("float32", "fp8", "nvfp4"):
            yield _item("L0", "layout-id", form, partial(_layout, form), (f"kv:{form}",), form)
    yield _item("L0", "fixed-buffers", "mixed", _buffers)
    for dtype in manifest.formats.compute:
        yield _item("L0", "opened", dtype, partial(_opened, dtype, None))
    for name in NAMED if manifest.arithmetic == "all" else manifest.arithmetic:
        yield _item("L0", "opened", name, partial(_opened, None, name), (f"arithmetic:{name}",))
    yield _item("L0", "limits", "declared", _loaded)


def _release(spec: OpSpec, case: Case, stored: str, bench: Bench) -> None:
    op = instance(spec, case, stored, ("", ""))
    slots = {slot: _held(op.slots[slot], value) for slot, value in weights_of(case, spec).items()}
    check_release(bench.session(), op, slots)


def _held(decl: TensorDecl, value: Any) -> LazyTensor:
    x = torch.as_tensor(np.asarray(value), dtype=torch.float32)
    if decl.stored == "mxfp8":
        return quantised(decl.name, "mxfp8", dict(mxfp8.encode(x)._asdict()))
    if decl.stored == "nvfp4":
        return quantised(decl.name, "nvfp4", {**nvfp4.encode(x)._asdict(), "input_global_scale": torch.tensor([300.0])})
    return Held(decl.name, x.to(getattr(torch, str(decl.stored))))


def _loaded(bench: Bench) -> None:
    """Opening a checkpoint compares limits with the manifest."""
    _model(bench, _CHECKPOINT)


def _layout(form: str, bench: Bench) -> None:
    spec = KVSpec(
        indexed=(True,),
        kv_heads=2,
        head_dim=128,
        index_dim=128,
        page_tokens=128,
        kv_format=form,  # type: ignore[arg-type]
        index_format=form,  # type: ignore[arg-type]
    )
    try:
        layout = bench.session().kv_layout(spec)
    except BackendRefused as refusal:
        raise NotRun("refused", str(refusal)) from refusal
    check_layout_id(layout)


def _opened(dtype: str | None, arithmetic: str | None, bench: Bench) -> None:
    session = bench.session(dtype, arithmetic)
    if str(session.dtypes["model"]) != f"torch.{dtype or bench.manifest.formats.compute[0]}":
        raise ContractViolation("opened", f"computes in {session.dtypes['model']}", where="session", expected=dtype)


_STEP = StepClass(kind="mixed", q_len=0, tokens=32, seqs=2, rows=2, pages=16)


def _buffers(bench: Bench) -> None:
    model = _model(bench, _CHECKPOINT)
    compiler, cache = model.engine.compiler, model.engine.cache
    batches = [_filled(_STEP, [list(range(1, n + 1))], [n], [1]) for n in (3, 4, 5)]
    check_fixed_buffers(bench.session(), compiler.bind(_STEP), _STEP, batches, cache)


# --- steps of a small model -----------------------------------------------------------------------------------------


def _model(bench: Bench, checkpoint: str) -> Model:
    """A model of the bench, loaded once."""
    known: dict[str, Model] = bench.__dict__.setdefault("self_test_models", {})
    if checkpoint not in known:
        known[checkpoint] = bench.load(bench.checkpoint(checkpoint), max_context=_CONTEXT)
    return known[checkpoint]


def _filled(step: StepClass, tokens: Sequence[Sequence[int]], lens: Sequence[int], rows: Sequence[int]) -> StepBatch:
    """A step of sequences that end with `tokens`, `lens` long; sequence s has the pages 3 s + 2, 3 s, 3 s + 1.

    Args:
        rows: of each sequence, how many of its last queries get logits.
    """
    batch = StepBatch.allocate(step, torch.device("cpu"))
    tables = [[3 * s + 2, 3 * s, 3 * s + 1][: -(-n // 128)] for s, n in enumerate(lens)]
    positions = [list(range(n - len(part), n)) for part, n in zip(tokens, lens, strict=True)]
    ends = np.cumsum([len(part) for part in tokens]).tolist()
    batch.fill(
        tokens=[t for part in tokens for t in part],
        positions=[p for part in positions for p in part],
        q_lens=[len(part) for part in tokens],
        seq_lens=list(lens),
        slot_map=[tables[s][p // 128] * 128 + p % 128 for s, part in enumerate(positions) for p in part],
        page_table=tables,
        out_rows=[end - k for end, n in zip(ends, rows, strict=True) for k in range(min(n, end), 0, -1)],
    )
    return batch


def _run(bench: Bench, kind: str, tokens: Sequence[Sequence[int]], lens: Sequence[int], rows: Sequence[int]) -> Any:
    model = _model(bench, _CHECKPOINT)
    compiler: Compiler = model.engine.compiler
    q_len = 0 if kind == "mixed" else len(tokens[0])
    step = StepClass(
        kind=kind,  # type: ignore[arg-type]
        q_len=q_len,
        tokens=1 << (sum(map(len, tokens)) - 1).bit_length(),
        seqs=2,
        rows=8,
        pages=16,
    )
    plan, own, _ = compiler.plan(step)
    made = _filled(step, tokens, lens, rows)
    for name, buffer in made.named().items():
        own.named()[name].copy_(buffer)
    own.size = made.size
    return plan.run(own, model.engine.cache).detach().double().cpu().numpy().copy()


def _prompt(seed: str, count: int) -> list[int]:
    return [int(t) for t in ops.cases.rng_for(seed).integers(5, _VOCAB, count)]


def _near(got: Any, want: Any, what: str) -> None:
    off = float(np.abs(got - want).max()) if got.shape == want.shape else float("inf")
    if not off <= _CLOSE * float(np.abs(want).max()):
        raise ContractViolation(
            "arithmetic", f"{what}: logits are off by {off:.3g}", where="step", expected="the same within rounding"
        )


def _kinds(bench: Bench) -> None:
    """The same step, as each kind that it may have."""
    first, second = _prompt("steps/first", 150), _prompt("steps/second", 40)
    for kind, q in (("decode", 1), ("verify", 3)):
        want = _run(bench, "mixed", [first, second], [150, 40], [q, q])
        _run(bench, "mixed", [first[:-q], second[:-q]], [150 - q, 40 - q], [1, 1])
        got = _run(bench, kind, [first[-q:], second[-q:]], [150, 40], [q, q])
        _near(got, want, f"a {kind} step")
    for at in range(10):  # what decode steps write is read by the next ones
        got = _run(bench, "decode", [[first[at]], [second[at]]], [151 + at, 41 + at], [1, 1])
    want = _run(bench, "mixed", [first + first[:10], second + second[:10]], [160, 50], [1, 1])
    _near(got, want, "the tenth decode step")


def _page_edge(bench: Bench) -> None:
    """A prompt that ends before, at and after the end of a page, then one token."""
    prompt = _prompt("steps/edge", 131)
    for n in (127, 128, 129, 130):
        want = _run(bench, "mixed", [prompt[: n + 1]], [n + 1], [1])
        _run(bench, "mixed", [prompt[:n]], [n], [1])
        _near(_run(bench, "decode", [[prompt[n]]], [n + 1], [1]), want, f"token {n}")


def _written(bench: Bench) -> None:
    """What a step writes into pages is the same, whatever its kind."""
    cache = _model(bench, _CHECKPOINT).engine.cache
    prompt = _prompt("steps/written", 133)
    held = []
    for kind, q in (("mixed", 0), ("decode", 1), ("verify", 3)):
        cache.poison([0, 1, 2])
        _run(bench, "mixed", [prompt[: len(prompt) - q]], [len(prompt) - q], [1])
        if q:
            _run(bench, kind, [prompt[-q:]], [len(prompt)], [1])
        read = [cache.read(layer, page) for layer in range(3) for page in (2, 0, 1)]
        held.append({(i, name): x.double().cpu().numpy() for i, part in enumerate(read) for name, x in part.items()})
    for other in held[1:]:
        for key, want in held[0].items():
            if not np.allclose(other[key], want, rtol=_CLOSE, atol=_CLOSE, equal_nan=True):
                raise ContractViolation(
                    "arithmetic", f"'{key[1]}' in pages depends on the kind of step", where="pages", expected="the same"
                )


def _fusions(bench: Bench) -> None:
    """What a session asks to be fused is served fused."""
    model = _model(bench, _CHECKPOINT)
    graph, _ = model.engine.compiler.fused(_STEP)
    used = {call.op.spec.name for call in graph.calls}
    expected = [n for n in bench.session().fusions() if FUSED[n].expected(_text(bench))]
    missing = [name for name in expected if name not in used]
    if missing:
        raise ContractViolation(
            "opened", f"asks for the fusion {missing[0]}, and it is used nowhere", where="fusions", expected="kernels"
        )


def _text(bench: Bench) -> Any:
    from m31.checkpoint import Checkpoint

    return Checkpoint.open(bench.checkpoint(_CHECKPOINT)).config.text


def _promise(bench: Bench, name: str) -> None:
    if not getattr(getattr(bench.manifest, "determinism", None), name, False):
        raise NotRun("unclaimed", f"the manifest does not promise {name}")


def _same(a: Any, b: Any, what: str) -> None:
    if not np.array_equal(a, b):
        raise ContractViolation("opened", f"{what}: other bits", where="step", expected="what the manifest promises")


def _twice(bench: Bench) -> None:
    _promise(bench, "run_to_run")
    prompt = _prompt("determinism/twice", 40)
    a, b = (_run(bench, "mixed", [prompt], [40], [2]) for _ in range(2))
    _same(a, b, "the same step again")


def _company(bench: Bench) -> None:
    _promise(bench, "batch_invariant")
    one, two = _prompt("determinism/one", 20), _prompt("determinism/two", 9)
    _run(bench, "mixed", [one[:-1]], [19], [1])
    alone = _run(bench, "decode", [[one[-1]]], [20], [1])
    _run(bench, "mixed", [one[:-1], two[:-1]], [19, 8], [1, 1])
    together = _run(bench, "decode", [[one[-1]], [two[-1]]], [20, 9], [1, 1])
    _same(alone[0], together[0], "in company")


_WANTED: dict[tuple[str, int], Any] = {}


def _agreement(checkpoint: str, tokens: int, bench: Bench) -> None:
    """Logits of a whole prompt beside the reference's in float64; where blocks are chosen, most of them."""
    prompt, key = _prompt("agreement", tokens), (checkpoint, tokens)
    if key not in _WANTED:
        spare = Bench("reference", scratch=bench.scratch)
        model = spare.load(spare.checkpoint(checkpoint), max_context=_CONTEXT, dtype="float64")
        _WANTED[key] = model.logits(prompt).double().numpy()
    got, want = _model(bench, checkpoint).logits(prompt).double().numpy(), _WANTED[key]
    near = np.abs(got - want).max(1) <= _CLOSE * np.abs(want).max()
    if not near.mean() > _SHARE:
        raise ContractViolation(
            "arithmetic",
            f"logits of {int((~near).sum())} of {tokens} tokens are off",
            where=f"checkpoint {checkpoint}",
            expected=f"those of the reference, but for {1 - _SHARE:.0%}, where a choice may turn on a rounding",
        )
