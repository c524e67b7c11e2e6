"""Plans and pages that break one rule each: every one is caught by a check that names the rule, and the reference
passes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.support import tiny
from tests.unit.test_contract_drills import SMALL, SPEC, STEP, VALUES, Spoiled, reference, violated

from m31.conformance import check_fixed_buffers, check_layout_id
from m31.errors import LayoutMismatch, OpRefused
from m31.graph import BoundGraph, DefaultPlan, StepBatch, StepClass
from m31.sdk.backend import ExportedPages, KVSpec
from m31_reference.cache import PagedCache

# --- a plan that allocates ------------------------------------------------------------------------------------------


def steps(count: int) -> list[StepBatch]:
    made = []
    for i in range(count):
        batch = StepBatch.allocate(STEP, torch.device("cpu"))
        n = 3 + i
        batch.fill(
            tokens=list(range(1, n + 1)),
            positions=list(range(n)),
            q_lens=[n],
            seq_lens=[n],
            slot_map=list(range(n)),
            page_table=[list(range(-(-n // SPEC.page_tokens)))],
            out_rows=[n - 1],
        )
        made.append(batch)
    return made


def checked(compile_: Any = None, count: int = 4) -> int:
    engine = tiny.engine(SMALL, VALUES, dtype="float32")
    session = engine.compiler.serving.session
    spoiled = Spoiled(compile=compile_) if compile_ else session
    return check_fixed_buffers(spoiled, engine.compiler.bind(STEP), STEP, steps(count), engine.cache)  # type: ignore[arg-type]


def test_the_default_plan_writes_where_it_wrote() -> None:
    assert checked() > 20


class Altered:
    """The reference's plan, made and run as a fault says."""

    def __init__(self, session: Any, graph: BoundGraph, step: StepClass) -> None:
        self.make = lambda bound: DefaultPlan(bound, step, session.dtypes, session.device)
        self.graph, self.real = graph, self.make(graph)
        self.kept: list[Any] = []
        self.first: torch.Tensor | None = None

    def run(self, batch: StepBatch, cache: Any) -> torch.Tensor:
        return self.real.run(batch, cache)


class NewLogits(Altered):
    def run(self, batch: StepBatch, cache: Any) -> torch.Tensor:
        self.kept.append(self.real.run(batch, cache).clone())
        return self.kept[-1]


class MadeAgain(Altered):
    """Everything is allocated anew, and the logits are copied to where they were."""

    def run(self, batch: StepBatch, cache: Any) -> torch.Tensor:
        logits = self.make(self.graph).run(batch, cache)
        self.first = logits.clone() if self.first is None else self.first
        return self.first.copy_(logits)


class NewInteriors(Altered):
    """One value between kernels is allocated in each run."""

    def run(self, batch: StepBatch, cache: Any) -> torch.Tensor:
        name = self.graph.graph.calls[0].writes[0]
        self.real._buffers[name] = torch.empty_like(self.real._buffers[name])
        self.real._views.clear()
        return self.real.run(batch, cache)


class Constant(Altered):
    def run(self, batch: StepBatch, cache: Any) -> torch.Tensor:
        self.first = self.real.run(batch, cache) if self.first is None else self.first
        return self.first


class Zeros(Altered):
    def run(self, batch: StepBatch, cache: Any) -> torch.Tensor:
        self.first = torch.zeros(1, SMALL.vocab_size) if self.first is None else self.first
        return self.first


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (NewLogits, "4 places of logits in 4 runs"),
        (MadeAgain, "4 places of "),
        (NewInteriors, "4 places of "),
        (Constant, "the logits of run 1 are not those of its step"),
        (Zeros, "the logits of run 0 are not those of its step"),
    ],
)
def test_a_plan_that_allocates_or_does_not_compute(fault: Any, said: str) -> None:
    with violated("fixed-buffers") as caught:
        checked(fault)
    assert said in str(caught.value)


def test_a_plan_that_runs_other_kernels_is_judged_by_its_logits() -> None:
    """As one that has captured them does; and the check says so."""
    engine = tiny.engine(SMALL, VALUES, dtype="float32")
    bound = engine.compiler.bind(STEP)
    session = Spoiled(compile=lambda real, graph, step: Altered(real, bound, step))
    assert check_fixed_buffers(session, bound, STEP, steps(2), engine.cache) == 0  # type: ignore[arg-type]


def test_batches_that_tell_nothing() -> None:
    with pytest.raises(OpRefused, match="two steps after each other give the same logits"):
        checked(count=1)


# --- pages ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv", ["float32", "bfloat16", "fp8", "nvfp4"])
def test_the_reference_refuses_pages_of_another_layout(kv: str) -> None:
    check_layout_id(reference().kv_layout(KVSpec.of(SMALL, kv, kv)), layers=SMALL.num_layers)  # type: ignore[arg-type]


class FaultyLayout:
    """The reference's pages, whose cache has one fault."""

    def __init__(self, kind: type[PagedCache], layout_id: str | None = None) -> None:
        self._real, self.kind = reference().kv_layout(SPEC), kind
        self.layout_id, self.page_bytes = layout_id or self._real.layout_id, self._real.page_bytes

    def allocate(self, pages: int) -> PagedCache:
        cache = self.kind(self._real, pages)  # type: ignore[arg-type]
        real = cache.export
        cache.export = lambda pages: replace(real(pages), layout_id=self.layout_id)  # type: ignore[method-assign]
        return cache


class Trusting(PagedCache):
    """Writes whatever it is given."""

    def import_(self, exported: ExportedPages, pages: Any) -> None:
        for name, tensor in self._parts():
            if name in exported.tensors:
                tensor[list(pages)[:1]] = exported.tensors[name][:1]


class Hasty(PagedCache):
    """Makes room, then looks."""

    def import_(self, exported: ExportedPages, pages: Any) -> None:
        for _, tensor in self._parts():
            tensor[list(pages)] = 0
        super().import_(exported, pages)


class Lazy(PagedCache):
    """Looks, then does nothing."""

    def import_(self, exported: ExportedPages, pages: Any) -> None:
        if exported.layout_id != self.layout.layout_id:
            raise LayoutMismatch("no", where="here")


class Unpoisoned(PagedCache):
    def poison(self, pages: Any) -> None:
        for _, tensor in self._parts():
            tensor[list(pages)] = 0


class PoisonsAll(PagedCache):
    def poison(self, pages: Any) -> None:
        super().poison(range(self.pages))


class Uncopied(PagedCache):
    def copy_pages(self, source: Any, target: Any) -> None:
        super().copy_pages(list(source)[:1], list(target)[:1])


class ExportsViews(PagedCache):
    def export(self, pages: Any) -> ExportedPages:
        real = super().export(pages)
        views = dict(self._parts())
        return replace(real, tensors={n: views[n][: real.count] for n in views} if real.count == 2 else real.tensors)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (Hasty, "refuses pages of another version, and has written to some before"),
        (Lazy, "does not hold what was imported"),
        (Unpoisoned, "reads k of layer 0 as numbers"),
        (PoisonsAll, "poisons pages that were not named"),
        (Uncopied, "does not hold what was copied"),
        (ExportsViews, "exported pages that changed when the cache did"),
    ],
)
def test_a_cache_with_a_fault(fault: Any, said: str) -> None:
    with violated("layout-id") as caught:
        check_layout_id(FaultyLayout(fault))  # type: ignore[arg-type]
    assert said in str(caught.value)


class Sorted(Trusting):
    """Writes all of what it is given if the shapes fit, whatever the id."""

    def import_(self, exported: ExportedPages, pages: Any) -> None:
        PagedCache.import_(self, replace(exported, layout_id=self.layout.layout_id), pages)


def test_a_layout_id_from_another_version() -> None:
    with violated("layout-id") as caught:
        check_layout_id(FaultyLayout(Sorted))  # type: ignore[arg-type]
    assert "takes pages of another version" in str(caught.value)
    with violated("layout-id"):
        check_layout_id(FaultyLayout(Trusting))  # type: ignore[arg-type]
    with violated("layout-id"):
        check_layout_id(FaultyLayout(PagedCache, "mine"))  # type: ignore[arg-type]
