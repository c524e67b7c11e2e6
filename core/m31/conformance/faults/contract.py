"""Faults beyond single ops: rules of the contract, pages, plans, claims."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from m31.conformance.faults.fault import Break, Fault
from m31.errors import BackendRefused
from m31.formats.arithmetic import NAMED
from m31.graph import BoundGraph, DefaultPlan, OpInstance, Refusal, StepBatch, StepClass
from m31.sdk.backend import ExportedPages, KVCache, LazyTensor, Session


def rule(name: str, what: str, source: str, broken: str, break_: Break, catches: str = "") -> Fault:
    """A fault that the items of a rule catch."""
    pattern = catches or f"L0/{broken}/*"
    return Fault(name=name, what=what, source=source, level="L0", subject=broken, catches=pattern, break_=break_)


def omission(name: str, what: str, source: str, claim: str, break_: Break) -> Fault:
    """A claim that nothing redeems."""
    return Fault(
        name=name, what=what, source=source, level="L0", subject="claims", catches=claim, break_=break_, by="omission"
    )


def _hoard(handle: Any, slots: Mapping[str, LazyTensor]) -> Any:
    handle.hoard = [tensor.load() for tensor in slots.values()]
    return handle


def _nothing_in_place(handle: Any, slots: Mapping[str, LazyTensor]) -> Any:
    handle.in_place = frozenset()
    return handle


def _a_clone(handle: Any, slots: Mapping[str, LazyTensor]) -> Any:
    handle.clones = [tensor.load().float().clone() for tensor in slots.values()]
    return handle


WEIGHTS = (
    rule(
        "keeps-its-source",
        "what prepare was given stays in memory beside the prepared weights",
        "DESIGN §3",
        "rule/weights",
        Break(handle=_hoard),
    ),
    rule(
        "in-place-untold",
        "the handle goes on reading the file and does not say so",
        "DESIGN §3",
        "rule/weights",
        Break(handle=_nothing_in_place),
    ),
    rule(
        "weight-bytes-half",
        "weight_bytes says half of what prepare takes",
        "DESIGN §3",
        "rule/weights",
        Break(weight_bytes=lambda n: n // 2),
    ),
    rule(
        "weight-bytes-of-a-clone",
        "a second copy is kept that weight_bytes does not count",
        "DESIGN §3",
        "rule/weights",
        Break(handle=_a_clone),
    ),
)


def _patched(name: str, make: Callable[[KVCache], Callable[..., Any]]) -> Break:
    """One method of the pages replaced."""

    def cache(real: KVCache) -> KVCache:
        setattr(real, name, make(real))
        return real

    return Break(cache=cache)


def _any_version(real: KVCache) -> Callable[..., Any]:
    healthy = real.import_

    def import_(exported: ExportedPages, pages: Sequence[int]) -> None:
        healthy(replace(exported, layout_id=real.layout.layout_id), pages)

    return import_


def _writes_first(real: KVCache) -> Callable[..., Any]:
    healthy = real.import_

    def import_(exported: ExportedPages, pages: Sequence[int]) -> None:
        real.poison(list(pages))
        healthy(exported, pages)

    return import_


def _reversed(real: KVCache) -> Callable[..., Any]:
    healthy = real.copy_pages
    return lambda source, target: healthy(list(reversed(source)), target)


def _target_first(real: KVCache) -> Callable[..., Any]:
    healthy = real.copy_pages
    return lambda source, target: healthy(target, source)


def _views(real: KVCache) -> Callable[..., Any]:
    healthy = real.export

    def export(pages: Sequence[int]) -> ExportedPages:
        made, parts = healthy(pages), real.components()
        low = min(pages)
        apart = len(pages) < 2 or list(pages) != sorted(pages)
        if apart and len(pages) == 2:
            return replace(made, tensors={n: parts[n][low : low + 3].flip(0)[::2] for n in made.tensors})
        return made

    return export


PAGES = (
    rule(
        "pages-of-any-version",
        "pages of another version are taken",
        "BUG-71, DESIGN §7",
        "rule/layout-id",
        _patched("import_", _any_version),
    ),
    rule(
        "pages-written-before-the-check",
        "pages are cleared before the id is compared",
        "BUG-71",
        "rule/layout-id",
        _patched("import_", _writes_first),
    ),
    rule(
        "pages-copied-in-reverse",
        "source pages are taken in reverse order",
        "DESIGN §7",
        "rule/layout-id",
        _patched("copy_pages", _reversed),
    ),
    rule(
        "pages-copied-backwards",
        "the target is copied to the source",
        "BUG-68",
        "rule/layout-id",
        _patched("copy_pages", _target_first),
    ),
    rule(
        "pages-not-copied",
        "a forked sequence goes on writing into the shared page",
        "BUG-68",
        "rule/layout-id",
        _patched("copy_pages", lambda real: lambda source, target: None),
    ),
    rule(
        "pages-not-poisoned",
        "freed pages keep their numbers",
        "BUG-5",
        "rule/layout-id",
        _patched("poison", lambda real: lambda pages: None),
    ),
    rule(
        "all-pages-poisoned",
        "pages that others use are poisoned as well",
        "BUG-68",
        "rule/layout-id",
        _patched("poison", lambda real: _everywhere(real)),
    ),
    rule(
        "pages-of-nobody",
        "pages have a name without maker and version",
        "BUG-71",
        "rule/layout-id",
        Break(layout_id=lambda _: "mine"),
    ),
)


def _values_first(real: KVCache) -> KVCache:
    """Exports V under the names of K, and takes it back likewise."""
    healthy, taken = real.export, real.import_

    def turned(pages: ExportedPages) -> ExportedPages:
        other = {name: name.replace(".k.", ".*.").replace(".v.", ".k.").replace(".*.", ".v.") for name in pages.tensors}
        return replace(pages, tensors={name: pages.tensors[other[name]] for name in pages.tensors})

    real.export = lambda pages: turned(healthy(pages))  # type: ignore[method-assign]
    real.import_ = lambda exported, pages: taken(turned(exported), pages)  # type: ignore[method-assign]
    return real


ORDER = Fault(
    name="pages-of-another-order",
    what="pages are exported with V before K, and named as those that have K before V",
    source="BUG-71",
    level="L2",
    subject="pages between-backends",
    catches="L2/pages/between-backends/kv-*",
    break_=Break(cache=_values_first),
)


def _everywhere(real: KVCache) -> Callable[..., Any]:
    healthy = real.poison
    return lambda pages: healthy(range(real.pages))


class _Plan:
    """The straight line, made and run as a fault says."""

    def __init__(self, session: Session, graph: BoundGraph, step: StepClass) -> None:
        self.made_of = graph, step, session.dtypes, session.device
        self.real = self.make()
        self.first: torch.Tensor | None = None
        self.kept: list[torch.Tensor] = []

    def make(self) -> DefaultPlan:
        return DefaultPlan(*self.made_of)

    def run(self, batch: StepBatch, cache: Any) -> torch.Tensor:
        return self.real.run(batch, cache)

    def extra(self, name: str) -> torch.Tensor:
        return self.real.extra(name)


class _NewLogits(_Plan):
    def run(self, batch: StepBatch, cache: Any) -> torch.Tensor:
        self.kept.append(self.real.run(batch, cache).clone())
        return self.kept[-1]


class _MadeAgain(_Plan):
    def run(self, batch: StepBatch, cache: Any) -> torch.Tensor:
        logits = self.make().run(batch, cache)
        self.first = logits.clone() if self.first is None else self.first
        return self.first.copy_(logits)


class _Stale(_Plan):
    def run(self, batch: StepBatch, cache: Any) -> torch.Tensor:
        self.first = self.real.run(batch, cache).clone() if self.first is None else self.first
        return self.first


PLANS = (
    rule(
        "plan-new-logits",
        "each run puts the logits somewhere else",
        "DESIGN §7",
        "rule/fixed-buffers",
        Break(compile=_NewLogits),
    ),
    rule(
        "plan-allocates",
        "each run allocates what lies between kernels",
        "DESIGN §7",
        "rule/fixed-buffers",
        Break(compile=_MadeAgain),
    ),
    rule(
        "plan-stale", "later steps get the logits of the first", "BUG-64", "rule/fixed-buffers", Break(compile=_Stale)
    ),
)


def _as(**given: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda asked: {**asked, **given}


OPENING = (
    rule(
        "another-dtype",
        "whatever dtype is asked for, float32 is computed in",
        "BUG-89, DESIGN §3",
        "open",
        Break(opened=_as(dtype="float32")),
    ),
    rule(
        "another-arithmetic",
        "whatever arithmetic is asked for, nothing is quantised",
        "DESIGN §3",
        "open",
        Break(opened=_as(arithmetic=NAMED["exact"])),
    ),
    rule(
        "serves-more-than-it-claims",
        "a session allows more context than its manifest",
        "DESIGN §3",
        "limits",
        Break(limits=lambda x: replace(x, max_context=2 * x.max_context)),
    ),
    rule(
        "drafts-more-than-it-claims",
        "a session allows more drafted tokens than its manifest",
        "DESIGN §3",
        "limits",
        Break(limits=lambda x: replace(x, draft_tokens=x.draft_tokens + 1)),
    ),
    rule(
        "video-it-does-not-claim",
        "a session takes video that its manifest rules out",
        "BUG-98, DESIGN §3",
        "limits",
        Break(limits=lambda x: replace(x, video=True)),
    ),
    rule(
        "names-an-unknown-op",
        "the manifest claims an op that there is not",
        "BUG-3",
        "manifest",
        Break(manifest=lambda m: m.model_copy(update={"ops": ("linear", "linaer")})),
    ),
)


def _refuse(when: Callable[[OpInstance], bool], why: str, op: str = "") -> Break:
    return Break(op=op, kernel=lambda kernel, instance: Refusal(why) if when(instance) else kernel)


def _weights_in(form: str) -> Callable[[OpInstance], bool]:
    return lambda op: any(decl.stored == form for decl in op.slots.values())


def _pages_in(form: str) -> Callable[[OpInstance], bool]:
    return lambda op: any(getattr(value, "kv_format", "") == form for value in op.inputs)


def _not_opened(asked: dict[str, Any]) -> dict[str, Any]:
    if asked["arithmetic"].name != "exact":
        raise BackendRefused("serves nothing but exact", where="a fault", expected="arithmetic exact")
    return asked


CLAIMS = (
    omission(
        "claims-an-op",
        "the manifest claims an op that has no kernel",
        "BUG-98, BUG-10",
        "op:linear",
        _refuse(lambda op: True, "no kernel", op="linear"),
    ),
    omission(
        "claims-nvfp4",
        "the manifest claims a weight format that every kernel refuses",
        "BUG-3, DESIGN §7",
        "weights:nvfp4",
        _refuse(_weights_in("nvfp4"), "not these weights"),
    ),
    omission(
        "claims-mxfp8",
        "the manifest claims a weight format that every kernel refuses",
        "BUG-3, DESIGN §7",
        "weights:mxfp8",
        _refuse(_weights_in("mxfp8"), "not these weights"),
    ),
    omission(
        "claims-fp8-pages",
        "the manifest claims a page format that every kernel refuses",
        "BUG-8",
        "kv:fp8",
        _refuse(_pages_in("fp8"), "not these pages"),
    ),
    omission(
        "claims-an-arithmetic",
        "the manifest claims arithmetics, and one only can be opened",
        "DESIGN §7",
        "arithmetic:w4a16",
        Break(opened=_not_opened),
    ),
)

CONTRACT = (*WEIGHTS, *PAGES, ORDER, *PLANS, *OPENING, *CLAIMS)
