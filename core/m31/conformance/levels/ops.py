"""L1: every op and fused op by itself, on its cases, in every format and arithmetic that the manifest claims.

Cases that only have small or odd sizes run once for each way in which weights are stored, and on plain pages; cases of
sizes that kernels are made for (`Planned.real`) run on pages of every format too. Other arithmetics and compute dtypes
than the first run on the ops and cases that they change.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from m31.conformance.cases import Planned, instance, planned, specs, step_of, storable
from m31.conformance.execution import Run, execute, judge_case, kv_spec
from m31.conformance.item import Criterion, Evidence, Item, NotRun, Outcome, Verdict
from m31.errors import BackendRefused, OpRefused
from m31.formats.arithmetic import NAMED, ArithmeticSpec, parse
from m31.graph import Refusal
from m31.ops import ADAPTER, DRAFT, OpSpec
from m31.ops.body import FusedOp
from m31.ops.fused import FUSED

if TYPE_CHECKING:
    from m31.conformance.bench import Bench
    from m31.sdk.backend import Session
    from m31.sdk.manifest import Manifest
    from m31.sdk.serving import Serving

_KV = ("kv_write", "sparse_attention", "dense_attention", "draft_attention", "qkv_insert", "qkv_insert_dense")
_INDEX = ("index_write", "block_scores", "qkv_insert")
_READERS = ("block_scores", "sparse_attention", "dense_attention")
_PLAIN = ("float32", "bfloat16", "float64")

_ARITHMETIC_CASES: Mapping[str, tuple[str, ...]] = {
    "linear": ("tokens-17", "hidden-128", "k-160", "wide-outlier-channel", "wide-zero-blocks", "wide-subnormals"),
    "experts": ("real", "real-outlier-channel", "real-zero-blocks", "real-hit-by-all", "real-clamped"),
    "block_scores": ("real-mixed", "real-decode-2049", "real-outlier-channel"),
    "sparse_attention": ("real-mixed", "real-verify-2180", "real-peaked", "real-outlier-channel"),
    "dense_attention": ("real-mixed", "real-verify-2180", "real-peaked", "real-outlier-channel"),
    "qkv_insert": ("real", "real-129"),
    "qkv_insert_dense": ("real",),
    "experts_shared": ("real", "real-129"),
}
"""Cases on which an arithmetic other than the first is tried: those that tell the roundings apart."""
_ARITHMETIC_STORED = {"linear": ("bfloat16", "mxfp8"), "experts": ("bfloat16", "mxfp8", "nvfp4")}


@dataclass(frozen=True)
class Way:
    """How a case is run.

    Args:
        stored: of its weights; "" without.
        kv, index: of its pages; "" where the op has none of that kind.
        formats: of both kinds of pages as they are laid out, whether the op reads them or not.
        gaps: between the elements of inputs and outputs.
        dtype, arithmetic: None is the manifest's first.
    """

    stored: str = ""
    kv: str = ""
    index: str = ""
    formats: tuple[str, str] = ("", "")
    gaps: bool = False
    dtype: str | None = None
    arithmetic: str | None = None

    @property
    def suffix(self) -> str:
        """Of an item's id."""
        parts = [self.stored, self.kv and f"kv-{self.kv}", self.index and f"index-{self.index}"]
        parts += [self.dtype or "", self.arithmetic or "", "gaps" if self.gaps else ""]
        return "".join(f"/{part}" for part in parts if part)


def items(manifest: Manifest) -> Iterator[Item]:
    """Every item of L1 for a manifest. Nothing is made before it is executed but the ops' own small cases, for their
    sizes."""
    for name, spec in specs().items():
        if name in DRAFT and not manifest.limits.draft_tokens:
            continue
        if name in ADAPTER and manifest.ops != "all" and name not in manifest.ops:
            continue  # no part of a model without an adapter; whoever serves "all" may leave them to the reference
        seen: set[str] = set()
        for plan in planned(spec):
            if isinstance(spec, FusedOp) and _mixed(spec, plan):
                continue
            for way in _ways(manifest, spec, plan):
                item = _item(manifest, spec, plan, way)
                if item.id not in seen:  # a format may be the first of its list and asked for besides
                    seen.add(item.id)
                    yield item


def _mixed(spec: FusedOp, plan: Planned) -> bool:
    """A case of a form of the body with some roundings and not others: one example in every form is enough."""
    forms = {plan.attributes[name] for name in spec.variants if name in plan.attributes}
    return plan.own and len(forms) > 1 and "/two-sequences/" not in plan.id


def _ways(manifest: Manifest, spec: OpSpec, plan: Planned) -> Iterator[Way]:
    stored = [form for form in storable(spec, plan.matrices) if not form or form in manifest.formats.weights]
    pages = list(_pages(manifest, spec, plan))
    if not stored or not pages:
        return
    # A fused op in every form of its body would say the same thing many times: its own cases run in one format.
    few = spec.name in FUSED and plan.own
    usual = "bfloat16" if "bfloat16" in stored else stored[0]
    for form in [usual] if few else stored:
        for at, page in enumerate(pages[:1] if few else pages):
            if at == 0 or form == usual:
                yield replace(page, stored=form)
    base = replace(pages[0], stored=usual)
    if plan.own or plan.id.endswith(("-wide", "/tokens-17", "/hidden-128", "/real")):
        yield replace(base, gaps=True)
    for dtype in manifest.formats.compute[1:]:
        if plan.own or plan.real:
            own = dtype if dtype in manifest.formats.kv and dtype in manifest.formats.index else ""
            yield _on(spec, replace(base, dtype=dtype), own) if own else replace(base, dtype=dtype)
    yield from _arithmetics(manifest, spec, plan, stored, pages)


def _on(spec: OpSpec, way: Way, form: str) -> Way:
    """The same on pages of one format."""
    if not way.formats[0]:
        return way
    kv, index = (form if spec.name in names else "" for names in (_KV, _INDEX))
    return replace(way, kv=kv, index=index, formats=(form, form))


def _pages(manifest: Manifest, spec: OpSpec, plan: Planned) -> Iterator[Way]:
    """Page formats, plain ones first; one `Way` without any for an op without pages."""
    if not plan.vector:
        yield Way()
        return
    kv = sorted(manifest.formats.kv, key=_plain_first)
    index = sorted(manifest.formats.index, key=_plain_first)
    several = plan.real and plan.vector % 16 == 0
    if spec.name in _KV and spec.name in _INDEX:
        pairs = [*zip(kv, kv, strict=True), *((kv[-1], form) for form in index)]
        pairs = [pair for pair in dict.fromkeys(pairs) if pair[1] in index]
    elif spec.name in _KV:
        pairs = [(form, index[0]) for form in kv]
    else:
        pairs = [(kv[0], form) for form in index]
    for a, b in pairs if several else [pair for pair in pairs if set(pair) <= set(_PLAIN)][:2]:
        if not (plan.vector % 16 and "nvfp4" in (a, b)):
            yield Way(kv=a if spec.name in _KV else "", index=b if spec.name in _INDEX else "", formats=(a, b))


def _plain_first(form: str) -> int:
    return _PLAIN.index(form) if form in _PLAIN else len(_PLAIN)


def _arithmetics(
    manifest: Manifest, spec: OpSpec, plan: Planned, stored: Sequence[str], pages: Sequence[Way]
) -> Iterator[Way]:
    case = plan.id.partition("/")[2]
    if case not in _ARITHMETIC_CASES.get(spec.name, ()):
        return
    names = list(NAMED) if manifest.arithmetic == "all" else list(manifest.arithmetic)
    first = case == _ARITHMETIC_CASES[spec.name][0] and spec.name not in _READERS
    seen = [_of(parse(names[0]), spec.name)]
    for name in names[1:]:
        numerics = parse(name)
        known, same = _of(numerics, spec.name), _of(NAMED["exact"], spec.name)
        # Two names of the same numbers are told apart by one case, so that both are tried.
        if known == same or (known in seen and not first):
            continue
        seen.append(known)
        wanted = _ARITHMETIC_STORED.get(spec.name)
        forms = [form for form in stored if wanted is None or form in wanted] or stored
        for way in pages if spec.name in _READERS else pages[:1]:
            if way.formats[0] and numerics.kv_read != "exact" and way.formats[0] not in ("nvfp4", "fp8"):
                kv = next((form for form in ("nvfp4", "fp8") if form in manifest.formats.kv), None)
                if kv is None or spec.name != "block_scores":
                    continue
                way = replace(way, formats=(kv, way.formats[1]))
            elif spec.name in _READERS and way.formats[0] not in ("bfloat16", "nvfp4", "fp8"):
                continue
            for form in forms:
                yield replace(way, stored=form, arithmetic=name)


def _of(numerics: ArithmeticSpec, op: str) -> tuple[str | None, ...]:
    """What of an arithmetic an op computes with."""
    if op == "linear":
        return numerics.linear_activation, numerics.linear_weights
    if op == "experts":
        return numerics.expert_input, numerics.expert_middle, numerics.expert_weights
    if op in _READERS:
        return numerics.query, numerics.kv_read, numerics.probability
    return numerics.linear_activation, numerics.expert_input, numerics.expert_middle, numerics.query


def _item(manifest: Manifest, spec: OpSpec, plan: Planned, way: Way) -> Item:
    criterion: Criterion = "ids" if spec.name == "router" else spec.criterion
    attributes = {**plan.attributes, "compute": way.dtype or manifest.formats.compute[0], "gaps": way.gaps}
    attributes["arithmetic"] = way.arithmetic or _first(manifest)
    attributes |= {name: form for name in ("stored", "kv", "index") if (form := getattr(way, name))}
    claims = [f"op:{spec.name}"]
    claims += [
        f"{kind}:{form}" for kind, form in (("weights", way.stored), ("kv", way.kv), ("index", way.index)) if form
    ]
    claims += [f"compute:{attributes['compute']}", f"arithmetic:{attributes['arithmetic']}"]
    return Item(
        id=f"L1/{plan.id}{way.suffix}",
        level="L1",
        subject=spec.name,
        format=way.stored or way.kv or way.index,
        criterion=criterion,
        claims=tuple(claims),
        execute=partial(_execute, spec, plan, way),
        judge=partial(_judge, spec, plan, way),
        attributes=attributes,
        seconds=plan.seconds,
    )


def _first(manifest: Manifest) -> str:
    return "exact" if manifest.arithmetic == "all" else manifest.arithmetic[0]


def _run(spec: OpSpec, plan: Planned, way: Way) -> Run:
    return Run(spec, plan.build(), way.stored, way.formats, way.gaps)


def _execute(spec: OpSpec, plan: Planned, way: Way, bench: Bench) -> Evidence:
    _require_claimed(spec, bench)
    serving = bench.serving(way.dtype, way.arithmetic)
    session = serving.session
    if spec.name in FUSED and spec.name not in session.fusions():
        raise NotRun("unclaimed", "the session does not look for this fusion")
    run = _run(spec, plan, way)
    found = serving.assign(instance(spec, run.case, way.stored, way.formats), step_of(spec, run.case))
    if isinstance(found, Refusal):
        raise NotRun("refused", found.reason)
    if found.by != serving.name:
        raise NotRun("fallback", found.fallback or "it is left to the reference")
    owner = _owner(serving, run) if run.case.state else session
    try:
        return execute(session, owner, run, found.kernel)
    except (OpRefused, BackendRefused) as refusal:
        if way.gaps:  # a kernel may ask for elements side by side (docs/sdk.md)
            raise NotRun("refused", str(refusal)) from refusal
        raise


def _require_claimed(spec: OpSpec, bench: Bench) -> None:
    """Raises: NotRun."""
    if bench.claims(spec.name):
        return
    left = spec.name in bench.manifest.fallback
    outcome: Outcome = "fallback" if left else "unclaimed"
    raise NotRun(outcome, "the manifest leaves it to the reference" if left else "the manifest does not claim it")


def _owner(serving: Serving, run: Run) -> Session:
    """Whose pages the kernel works on: the backend's own, or those of what it falls back on, if it shares them.

    Raises:
        NotRun: nobody has such pages.
    """
    wanted, reasons = kv_spec(run.case, run.formats), []
    for session in serving.sessions.values():
        try:
            layout = session.kv_layout(wanted)
        except BackendRefused as refusal:
            reasons.append(str(refusal))
            continue
        if session is serving.session or serving.session.shares_pages(layout):
            return session
        reasons.append(f"does not work on pages '{layout.layout_id}'")
    raise NotRun("refused", "; ".join(reasons))


def _judge(spec: OpSpec, plan: Planned, way: Way, evidence: Evidence) -> Verdict:
    verdict, reason = judge_case(_run(spec, plan, way), evidence)
    return replace(verdict, note=f"only compared with nonsense: {reason}") if reason else verdict
