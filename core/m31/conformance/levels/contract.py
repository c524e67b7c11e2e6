"""L0: what the manifest says is so, what it rules out is refused by name, and the rules of the contract are kept."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, get_args

import torch
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from m31 import sdk
from m31.conformance import synthetic
from m31.conformance.bench import Bench
from m31.conformance.item import Criterion, Evidence, Item, NotRun, Verdict
from m31.conformance.levels import rules
from m31.conformance.levels.forms import CHECKPOINTS, arithmetics, checkpoints, prompt
from m31.conformance.rig import Forms, opened_for
from m31.engine.model import Cap, Model
from m31.engine.opening import open_serving
from m31.errors import (
    BackendRefused,
    ContextLimitExceeded,
    ContractViolation,
    M31Error,
    ManifestError,
    NoKernel,
    OpRefused,
    RequestError,
)
from m31.formats.arithmetic import NAMED
from m31.ops import ALL, DRAFT
from m31.ops.fused import FUSED
from m31.sdk.manifest import CacheFormat, ComputeType, IndexFormat, Manifest, WeightFormat
from m31.sdk.version import API_VERSION

_SMALL = 2048  # tokens of a pool that is not about the context
_NEVER = "no-such-thing"


def items(manifest: Manifest) -> Iterator[Item]:
    """Claims, openings, refusals, limits, and the rules on the synthetic checkpoints."""
    yield _item("manifest/names", "manifest", _names)
    yield _item("manifest/packages", "manifest", _packages)
    for dtype in manifest.formats.compute:
        yield _item(f"open/{dtype}", "open", partial(_open, Forms(dtype=dtype)), format=dtype)
    for name in arithmetics(manifest):
        yield _item(f"open/{name}", "open", partial(_open, Forms(arithmetic=name)), format=name)
    yield from _refusals(manifest)
    yield from _limits(manifest)
    yield from rules.items(manifest)


def _item(
    case: str,
    subject: str,
    execute: Callable[[Bench], str],
    *,
    format: str = "",
    claims: tuple[str, ...] = (),
    criterion: Criterion = "rule",
    seconds: float = 0.05,
) -> Item:
    """An item whose check raises on the bench's side; it says in a sentence what it looked at."""
    return Item(
        id=f"L0/{case}",
        level="L0",
        subject=subject,
        format=format,
        criterion=criterion,
        claims=claims,
        execute=lambda bench: Evidence(facts={"note": execute(bench)}),
        judge=lambda evidence: Verdict(note=evidence.facts["note"]),
        seconds=seconds,
    )


# --- claims ---------------------------------------------------------------------------------------------------------


def _names(bench: Bench) -> str:
    manifest = bench.manifest
    known = [*ALL, *DRAFT, *FUSED]
    named = [*(() if manifest.ops == "all" else manifest.ops), *manifest.fallback]
    unknown = [name for name in named if name not in known]
    if unknown:
        raise ManifestError(
            f"there is no op '{unknown[0]}'", where=f"backend {manifest.name}", expected="ops of docs/sdk.md"
        )
    if API_VERSION not in SpecifierSet(manifest.requires):
        raise ContractViolation(
            "claims",
            f"requires API {manifest.requires}",
            where="backend.toml: requires",
            expected=f"a range with {API_VERSION}, on which it runs",
        )
    backend = sdk.open_backend(bench.decision)
    if backend.manifest != manifest:
        raise ContractViolation(
            "opened", "keeps another manifest than its backend.toml", where=f"backend {manifest.name}", expected="it"
        )
    return (
        f"{'all' if manifest.ops == 'all' else len(manifest.ops)} ops claimed, {len(manifest.fallback)} may fall back"
    )


def _packages(bench: Bench) -> str:
    for package, minimum in bench.manifest.packages.items():
        try:
            installed = metadata.version(package)
        except metadata.PackageNotFoundError:
            installed = ""
        if not installed or Version(installed) < Version(minimum):
            raise ContractViolation(
                "claims",
                f"runs with {package} {installed or 'missing'}, and says that it needs {minimum}",
                where="backend.toml: packages",
                expected="what it needs and no more",
            )
    return f"{len(bench.manifest.packages)} packages"


def _open(forms: Forms, bench: Bench) -> str:
    serving = bench.serving(forms.dtype, forms.arithmetic)  # `engine.opening` checks that it is what was asked for
    session = serving.session
    for name, dtype in session.dtypes.items():
        if not torch.empty(1, dtype=dtype, device=session.device).numel():
            raise ContractViolation("opened", f"has no {name} on {session.device}", where=serving.name)
    again = sdk.open_backend(bench.decision).open(
        device=bench.device,
        dtype=str(session.dtypes["model"]).removeprefix("torch."),
        rank=0,
        world=1,
        arithmetic=session.numerics,
        options={name: value for name, value in bench.options.items() if name in bench.manifest.options},
    )
    if again is session:
        raise ContractViolation(
            "opened", "gives one session twice", where=serving.name, expected="sessions that do not know of each other"
        )
    if not isinstance(session.memory_free(), int) or session.memory_free() < 0:
        raise ContractViolation(
            "opened", f"has {session.memory_free()!r} bytes free", where=serving.name, expected="a number of bytes"
        )
    return f"{serving.name} on {session.device}, {session.numerics.name}"


# --- refusals -------------------------------------------------------------------------------------------------------


def _refusals(manifest: Manifest) -> Iterator[Item]:
    formats, names = manifest.formats, checkpoints(manifest)
    wrong: list[tuple[str, Sequence[str]]] = [
        ("dtype", [_NEVER, *(t for t in get_args(ComputeType) if t not in formats.compute)]),
        ("arithmetic", [_NEVER, *(n for n in NAMED if not _same(n, arithmetics(manifest)))]),
        ("option", [_NEVER]),
        ("device", [_NEVER]),
        ("world", [str(manifest.limits.tensor_parallel + 1)]),
    ]
    if names:
        wrong += [
            ("kv", [_NEVER, *(f for f in get_args(CacheFormat) if f not in formats.kv)]),
            ("index", [_NEVER, *(f for f in get_args(IndexFormat) if f not in formats.index)]),
            ("weights", [f for f in get_args(WeightFormat) if f not in formats.weights and f in CHECKPOINTS.values()]),
        ]
    for what, values in wrong:
        for value in values:
            yield _item(f"refuses/{what}/{value}", f"refuses {what}", partial(_refuses, what, value, names))


def _same(name: str, claimed: Sequence[str]) -> bool:
    return any(NAMED[name].same_numbers(NAMED[other]) for other in claimed if other in NAMED)


def _refuses(what: str, value: str, names: Sequence[str], bench: Bench) -> str:
    right: type[M31Error] = OpRefused if (what, value) == ("arithmetic", _NEVER) else BackendRefused
    asked = {
        "dtype": lambda: bench.serving(dtype=value),
        "arithmetic": lambda: bench.serving(arithmetic=value),
        "option": lambda: _option(bench, value),
        "device": lambda: _opened(bench, device=value),
        "world": lambda: _opened(bench, world=int(value)),
        "kv": lambda: opened_for(bench, bench.checkpoint(names[0]), Forms(kv=value)),
        "index": lambda: opened_for(bench, bench.checkpoint(names[0]), Forms(index=value)),
        "weights": lambda: opened_for(
            bench, bench.checkpoint(next(n for n, stored in CHECKPOINTS.items() if stored == value)), Forms()
        ),
    }[what]
    return _refused(asked, right, f"{what} '{value}'")


def _refused(asked: Callable[[], object], right: type[M31Error], what: str) -> str:
    """What was said; anything but the right refusal is a violation."""
    try:
        asked()
    except right as refusal:
        return str(refusal)
    except Exception as error:
        raise ContractViolation(
            "refusals",
            f"answers {what} with {type(error).__name__}: {error}",
            where="opening",
            expected=f"{right.__name__}, which says why",
        ) from error
    raise ContractViolation("refusals", f"takes {what}", where="opening", expected=right.__name__)


def _option(bench: Bench, name: str) -> object:
    return open_serving(bench.decision, device=bench.device, dtype=None, arithmetic=None, options={name: 1})


def _opened(bench: Bench, *, device: str | None = None, world: int = 1) -> object:
    session = bench.session()
    return sdk.open_backend(bench.decision).open(
        device=device or bench.device,
        dtype=str(session.dtypes["model"]).removeprefix("torch."),
        rank=0,
        world=world,
        arithmetic=session.numerics,
        options={},
    )


# --- limits ---------------------------------------------------------------------------------------------------------


def _limits(manifest: Manifest) -> Iterator[Item]:
    names = checkpoints(manifest)
    for name in names:
        yield _item(f"limits/session/{name}", "limits", partial(_session, name), format=CHECKPOINTS[name])
    for name in names[:1]:
        yield _item("limits/context-exact", "limits", partial(_context, name, 0), seconds=2)
        yield _item("limits/context-and-one", "limits", partial(_context, name, 1), seconds=2)
        most = manifest.limits.draft_tokens
        yield _item("limits/draft-and-one", "limits", partial(_draft, name, most + 1), seconds=0.3)
        if most:
            yield _item("limits/draft-exact", "limits", partial(_draft, name, most), seconds=1)


def _session(name: str, bench: Bench) -> str:
    try:
        limits = opened_for(bench, bench.checkpoint(name), Forms()).limits  # `open_model` checks that none is widened
    except (BackendRefused, NoKernel) as refusal:
        raise NotRun("refused", str(refusal)) from refusal
    return f"{limits.max_context:,} tokens, {', '.join(limits.kv_formats)}, {limits.draft_tokens} drafted"


def _context(name: str, more: int, bench: Bench) -> str:
    """A prompt as long as the limit is passed on to the engine; one token more is refused by name before that.

    The pool is small, so that nothing of that length is allocated, and the engine says that it does not fit: level L2
    computes the last position.
    """
    opened = opened_for(bench, bench.checkpoint(name), Forms())
    limit = opened.limits.max_context
    declared = min(bench.manifest.limits.context_tokens, opened.checkpoint.config.text.max_position)
    small = _loaded(bench, bench.checkpoint(name), max_context=_SMALL)
    model = Model(
        config=small.config,
        decision=small.decision,
        formats=small.formats,
        engine=small.engine,
        cap=Cap(limit, f"backend {bench.manifest.name}"),
        tokenizer=None,
        template=None,
        notes=(),
    )
    ids = [3] * (limit + more)
    what = f"a prompt of {len(ids):,} tokens"
    if more:
        said = _refused(lambda: model.generate(ids, max_tokens=1), ContextLimitExceeded, what)
        _refused(lambda: model.generate(ids[:limit], max_tokens=2), ContextLimitExceeded, f"{what} in all")
        bad = declared + 1
        folder = bench.checkpoint(name)
        _refused(lambda: bench.load(folder, max_context=bad), RequestError, f"max_context {bad:,}")
        return said
    try:
        with model.generate(ids, max_tokens=1):
            pass
    except ContextLimitExceeded as refusal:
        raise ContractViolation(
            "limits", f"refuses {what}, its limit: {refusal}", where="backend.toml: limits", expected="it served"
        ) from refusal
    except M31Error as error:
        if "pages" not in str(error):
            raise
    return f"{limit:,} tokens are taken" + ("" if limit == declared else f", of {declared:,} that are declared")


def _loaded(bench: Bench, folder: Path, **asked: Any) -> Model:
    try:
        return bench.load(folder, **asked)
    except (BackendRefused, NoKernel) as refusal:
        raise NotRun("refused", str(refusal)) from refusal


def _draft(name: str, count: int, bench: Bench) -> str:
    folder = bench.scratch / f"{name}-draft-{count}"
    if not folder.exists():
        synthetic.write_with_draft(folder, name, count)
    if count > bench.manifest.limits.draft_tokens:
        return _refused(
            lambda: bench.load(folder, max_context=_SMALL, draft=count), BackendRefused, f"drafts of {count} tokens"
        )
    try:
        model = bench.load(folder, max_context=_SMALL, draft=count)
    except BackendRefused as refusal:
        raise ContractViolation(
            "claims",
            f"declares {count} drafted tokens and refuses them: {refusal}",
            where="backend.toml: limits.draft_tokens",
            expected="what is declared",
        ) from refusal
    ids = prompt("L0/limits/draft", 20, synthetic.VOCAB_SIZE)
    with model.generate(ids, max_tokens=count + 4, temperature=0.0, ignore_eos=True) as generation:
        events = generation.events()
        for _ in range(2):  # the first token is the prompt's, the second comes from a step that verifies
            next(events)
        stats = generation.stats
    if not stats.verifies or stats.drafted_tokens < count:
        raise ContractViolation(
            "claims",
            f"drafts {stats.drafted_tokens} tokens in {stats.verifies} steps",
            where="backend.toml: limits.draft_tokens",
            expected=f"{count} in the first of them",
        )
    return f"{stats.drafted_tokens} tokens drafted, {math.ceil(stats.drafted_tokens / stats.verifies)} a step"
