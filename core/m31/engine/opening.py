"""Opening a checkpoint on a backend, before any weight is read: what `m31.load` and `m31 explain` share.

The reference is opened beside the chosen backend where its manifest lets ops fall back.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

from m31 import sdk
from m31.checkpoint import Checkpoint, DraftCheckpoint
from m31.checkpoint.draft import FOLDER, PREFIX
from m31.config import Draft
from m31.engine.compiler import Compiler, whole
from m31.engine.drafting import DraftCompilers
from m31.errors import BackendRefused, ContractViolation, ManifestError, RequestError
from m31.formats.arithmetic import NAMED, ArithmeticSpec, parse
from m31.formats.layout import ScaleOrder
from m31.graph import NO_ROUNDING, Assigned, ModelGraph, OpInstance, Rounding, trace, trace_draft
from m31.ops import ALL, DRAFT
from m31.ops.fused import FUSED
from m31.sdk.backend import Backend, KVFormat, KVSpec, LazyTensor, Limits, Session, stored_as
from m31.sdk.manifest import Manifest
from m31.sdk.selection import Decision
from m31.sdk.serving import Serving

_SHORT = {"bf16": "bfloat16", "fp32": "float32", "f32": "float32", "fp64": "float64", "fp4": "nvfp4", "e4m3": "fp8"}
_FORMATS = ("float64", "float32", "float16", "bfloat16", "fp8", "nvfp4", "mxfp8", "int8")
F = TypeVar("F", bound=str)
SPARE = "reference"  # what an op falls back on: the one backend that serves every op


def open_serving(
    decision: Decision, *, device: str | None, dtype: str | None, arithmetic: str | None, options: Mapping[str, int]
) -> Serving:
    """Sessions for a decision. What the manifest rules out is refused here, in the same words for every backend.

    Args:
        decision: of `m31.sdk.decide`.
        device: see `Backend.open`.
        dtype, arithmetic: None is the first that the manifest lists. What falls back is computed in the same.
        options: go to whichever of the two backends declares them.

    Raises:
        BackendError: nothing was chosen, or a backend refuses to be opened so.
        OpRefused: no arithmetic has that name.
    """
    manifest = _manifest(decision)
    dtype = _listed("compute dtype", dtype, manifest.formats.compute, manifest.name)
    numerics = _arithmetic(arithmetic, manifest)
    _known_ops(manifest)
    spare = _spare(manifest) if manifest.fallback else None
    manifests = [manifest] if spare is None else [manifest, _manifest(spare)]
    for option in options:
        if not any(option in m.options for m in manifests):
            raise BackendRefused(f"takes no option '{option}'", where=f"backend {manifest.name}", fix="leave it out")
    sessions = [
        _checked(
            sdk.open_backend(chosen).open(
                device=device,
                dtype=dtype,
                rank=0,
                world=1,
                arithmetic=numerics,
                options={name: value for name, value in options.items() if name in m.options},
            ),
            m,
            dtype,
            numerics,
        )
        for chosen, m in zip((decision, spare), manifests, strict=False)
        if chosen is not None
    ]
    return Serving(
        manifest.name,
        sessions[0],
        claimed=manifest.ops,
        may_fall_back=manifest.fallback,
        spare=None if spare is None else (SPARE, sessions[1]),
    )


def _checked(session: Session, manifest: Manifest, dtype: str, numerics: ArithmeticSpec) -> Session:
    """A session that is what it was opened as.

    Raises:
        ContractViolation: it is no session, or computes in another dtype or arithmetic.
    """
    where = f"backend {manifest.name}"
    if not isinstance(session, Session):
        raise ContractViolation("opened", f"open returned {session!r}", where=where, expected="a Session")
    missing = [name for name in ("device", "dtypes", "numerics") if not hasattr(session, name)]
    if missing:
        raise ContractViolation("opened", f"has no {', '.join(missing)}", where=where, expected="all three")
    device: object = session.device  # whatever a plugin put there
    if not isinstance(device, torch.device) or set(session.dtypes) != {"model", "accum", "int64"}:
        raise ContractViolation(
            "opened",
            f"has device {device!r} and dtypes for {sorted(session.dtypes)}",
            where=where,
            expected="a torch.device, and dtypes for model, accum and int64",
        )
    computes = str(session.dtypes["model"]).removeprefix("torch.")
    if computes != dtype:
        raise ContractViolation("opened", f"computes in {computes}", where=where, expected=dtype)
    if not session.numerics.same_numbers(numerics):
        raise ContractViolation(
            "opened",
            f"computes in the arithmetic '{session.numerics.name}'",
            where=where,
            expected=f"'{numerics.name}'",
        )
    return session


def _spare(manifest: Manifest) -> Decision:
    """The decision for the backend that ops fall back on."""
    decision = sdk.decide(SPARE)
    if decision.refusal is not None:
        raise BackendRefused(
            f"leaves {len(manifest.fallback)} ops to '{SPARE}', which cannot be used: {decision.refusal.what}",
            where=f"backend {manifest.name}",
            fix=f"allow '{SPARE}' as well (M31_BACKENDS_ALLOW), or choose a backend that serves every op",
        )
    return decision


def _known_ops(manifest: Manifest) -> None:
    """Refuse names in `ops` and `fallback` that no op has: a typo would show as an op that nobody serves."""
    known = [*ALL, *DRAFT, *FUSED]
    named = (*(() if manifest.ops == "all" else manifest.ops), *manifest.fallback)
    unknown = next((name for name in named if name not in known), None)
    if unknown is not None:
        meant = next(iter(difflib.get_close_matches(unknown, known, n=1)), None)
        raise ManifestError(
            f"there is no op '{unknown}'",
            where=f"backend {manifest.name}: ops and fallback of its backend.toml",
            expected="ops of docs/sdk.md",
            fix=f"did you mean '{meant}'?" if meant else None,
        )


def _manifest(decision: Decision) -> Manifest:
    manifest = decision.require().manifest
    assert manifest is not None, "a backend without a manifest is never chosen"
    return manifest


def _listed(what: str, name: str | None, served: tuple[F, ...], who: str) -> F:
    """The one asked for if it is served; without a wish the first, which is the backend's default."""
    if name is None:
        return served[0]
    for known in served:
        if known == name:
            return known
    near = [] if name in _FORMATS else difflib.get_close_matches(name, served, n=1)  # what exists is no typo
    meant = _SHORT.get(name) or next(iter(near), None)
    raise BackendRefused(
        f"{what} '{name}' is not served",
        where=f"backend {who}",
        expected=" or ".join(served),
        fix=f"did you mean '{meant}'?" if meant in served else None,
    )


def _arithmetic(name: str | None, manifest: Manifest) -> ArithmeticSpec:
    """The arithmetic asked for if the manifest lists it; without a wish the first, or `exact` where it lists all."""
    served = [NAMED["exact"]] if manifest.arithmetic == "all" else [parse(known) for known in manifest.arithmetic]
    if name is None:
        return served[0]
    spec = parse(name)
    if manifest.arithmetic != "all" and not any(spec.same_numbers(known) for known in served):
        raise BackendRefused(
            f"arithmetic '{spec.name}' is not served",
            where=f"backend {manifest.name}",
            expected=" or ".join(known.name for known in served),
            fix="the reference imitates any: --backend reference",
        )
    return spec


@dataclass(frozen=True, eq=False)
class Opened:
    """A checkpoint on a backend; no weight has been read and no page allocated."""

    checkpoint: Checkpoint
    decision: Decision
    manifest: Manifest
    serving: Serving
    limits: Limits
    spec: KVSpec
    compiler: Compiler
    draft: OpenedDraft | None


@dataclass(frozen=True, eq=False)
class OpenedDraft:
    """The checkpoint's draft head on the same backend."""

    config: Draft
    spec: KVSpec
    compilers: DraftCompilers


def open_model(
    path: Path,
    *,
    backend: str | Backend | None,
    device: str | None,
    dtype: str | None,
    kv_dtype: str | None,
    index_dtype: str | None,
    v_scale_order: str | None,
    arithmetic: str | None,
    draft: int | None,
    options: Mapping[str, int],
) -> Opened:
    """Validate a folder, open a backend for it, and trace the model for the two. Arguments and errors: `m31.load`."""
    decision = sdk.decide(backend) if backend is None or isinstance(backend, str) else sdk.given(backend)
    manifest = _manifest(decision)
    checkpoint = Checkpoint.open(path)
    text = checkpoint.config.text
    serving = open_serving(decision, device=device, dtype=dtype, arithmetic=arithmetic, options=options)
    session = serving.session
    declared = Limits.declared(manifest, checkpoint.config)
    limits = session.limits(checkpoint.config, declared)
    if not (limits.kv_formats and limits.index_formats and limits.max_context > 0 and limits.within(declared)):
        raise ContractViolation(
            "limits", f"serves {limits}", where=f"backend {manifest.name}", expected=f"at most its manifest: {declared}"
        )
    usual = _pages(session.numerics)
    kv_format = _listed("KV format", kv_dtype, _first(usual, limits.kv_formats), manifest.name)
    index_format = _listed("index key format", index_dtype, _first(usual, limits.index_formats), manifest.name)
    spec = KVSpec.of(text, kv_format, index_format, _order(v_scale_order, kv_format))
    head = None if draft is None else _draft_head(checkpoint, draft, limits, manifest.name)

    def tensor(name: str) -> LazyTensor:
        return head.tensor(name) if head is not None and name.startswith(PREFIX) else checkpoint.tensor(name)

    def stored(name: str) -> str:
        return stored_as(tensor(name))

    taps = () if head is None else head.config.target_layer_ids
    graph = trace(text, rounding_of(session, spec), stored, (kv_format, index_format), taps)
    _check_stored(graph, manifest)
    weights = whole(serving, tensor)
    compiler = Compiler(serving, graph, text, weights)
    opened = None
    if head is not None and draft is not None:
        exact = session.numerics.same_numbers(NAMED["exact"])
        own = KVSpec.of_draft(head.config, spec, _compute(session) if exact else "bfloat16")
        pages = own.kv_format, own.index_format
        graphs = trace_draft(head.config, rounding_of(session, own), stored, pages)
        for part in (graphs.context, graphs.block, graphs.markov):
            _check_stored(part, manifest)
        opened = OpenedDraft(head.config, own, DraftCompilers(graphs, serving, weights, draft))
    return Opened(checkpoint, decision, manifest, serving, limits, spec, compiler, opened)


def _draft_head(checkpoint: Checkpoint, tokens: int, limits: Limits, who: str) -> DraftCheckpoint:
    """The head, if it and the backend draft so many tokens."""
    if limits.draft_tokens < tokens:
        most = f"at most {limits.draft_tokens}" if limits.draft_tokens else "no drafting"
        raise BackendRefused(
            f"does not draft {tokens} tokens",
            where=f"backend {who}",
            expected=most,
            fix="draft fewer, or choose another backend with --backend",
        )
    head = checkpoint.draft
    if head is None:
        raise RequestError(
            f"draft is {tokens}, and this checkpoint has no draft head",
            where=str(checkpoint.folder),
            expected=f"a folder '{FOLDER}' in it",
            fix="leave --draft out",
        )
    if tokens > head.config.block_size:
        raise RequestError(f"draft is {tokens}", expected=f"at most {head.config.block_size}, the block of this head")
    return head


def _check_stored(graph: ModelGraph, manifest: Manifest) -> None:
    """Refuse weights that the backend does not take as they are stored."""
    stored = {tensor.stored for tensor in graph.tensors()} - set(manifest.formats.weights)
    if stored:
        raise BackendRefused(
            f"does not take weights stored in {', '.join(sorted(map(str, stored)))}",
            where=f"backend {manifest.name}",
            expected=" or ".join(manifest.formats.weights),
            fix="convert the checkpoint (m31 convert), or choose another backend",
        )


def fallback_note(name: str, assigned: Iterable[tuple[OpInstance, Assigned]]) -> Iterator[str]:
    """What the backend leaves to another one, if it leaves anything."""
    elsewhere: dict[str, set[str]] = {}
    for op, found in assigned:
        if found.fallback is not None:
            elsewhere.setdefault(found.by, set()).add(op.spec.name)
    for other, ops in elsewhere.items():
        yield f"backend {name} leaves these ops to {other}, as its manifest declares: {', '.join(sorted(ops))}"


def _pages(numerics: ArithmeticSpec) -> str | None:
    """The format of pages that an arithmetic is made for: what reads E4M3 is made for NVFP4, what rounds queries to
    BF16 for BF16 (§2.3, §3.4). Pages of another format can be asked for."""
    if numerics.kv_read != "exact":
        return "nvfp4"
    return "bfloat16" if numerics.query == "bfloat16" else None


def _first(name: str | None, served: tuple[F, ...]) -> tuple[F, ...]:
    """`served`, with `name` first if it is there."""
    return tuple(sorted(served, key=lambda known: known != name))


def _order(name: str | None, kv_format: str) -> ScaleOrder:
    if name is None or name == "linear":
        return "linear"
    if name != "token_quad":
        raise RequestError(f"v_scale_order is {name!r}", expected="'linear' or 'token_quad'")
    if kv_format != "nvfp4":
        raise RequestError(
            f"v_scale_order is '{name}' with {kv_format} pages", expected="nvfp4 pages: others have no V scales"
        )
    return "token_quad"


def _compute(session: Session) -> KVFormat:
    """The compute dtype, as the format of pages."""
    name = str(session.dtypes["model"]).removeprefix("torch.")
    return "float64" if name == "float64" else "float32" if name == "float32" else "bfloat16"


def rounding_of(session: Session, spec: KVSpec) -> Rounding:
    """What the graph rounds to BF16 before it is quantised; nothing where activations are BF16 already."""
    if str(session.dtypes["model"]) == "torch.bfloat16":
        return NO_ROUNDING
    return Rounding.of(session.numerics, spec.kv_format, spec.index_format)
