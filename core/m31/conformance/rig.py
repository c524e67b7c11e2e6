"""A model whose steps the suite composes itself: which tokens, which pages in which order, in whose company."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from m31.conformance.bench import Bench
from m31.conformance.bounds import CONSTANT, roundoff
from m31.conformance.item import NotRun
from m31.engine.api import CHUNK_TOKENS, STEPS
from m31.engine.compiler import MIN_PAGES, Compiler, bucket
from m31.engine.drafting import Drafter
from m31.engine.engine import Engine
from m31.engine.opening import Opened, open_model, rounding_of
from m31.errors import BackendRefused, NoKernel
from m31.graph import Kernel, ModelGraph, OpInstance, StepBatch, StepClass, trace, unfused
from m31.ops import ALL, StateType
from m31.ops.body import FusedOp
from m31.sdk.backend import KVCache, KVLayout, stored_as

F32 = NDArray[np.float32]
_MOST = 0.25
_ELEMENTS = {"fp8": "e4m3", "nvfp4": "e2m1", "mxfp8": "e4m3", "e4m3": "e4m3", "int8": "bfloat16"}


@dataclass(frozen=True, kw_only=True)
class Forms:
    """How a model is opened: arguments of `m31.load`; None is the backend's first."""

    dtype: str | None = None
    kv: str | None = None
    index: str | None = None
    arithmetic: str | None = None

    @property
    def label(self) -> str:
        """What is asked for, for ids."""
        return "/".join(name for name in (self.dtype, self.kv, self.index, self.arithmetic) if name)


@dataclass(eq=False)
class Run:
    """A sequence on a rig.

    Attributes:
        tokens: all that it may be asked for.
        pages: physical pages in order of position.
        done: tokens in the pages.
    """

    tokens: tuple[int, ...]
    pages: list[int]
    done: int = 0


@dataclass(frozen=True)
class Part:
    """The next `count` tokens of a run, in one step; `tokens` instead of the run's own, as drafts are."""

    run: Run
    count: int
    tokens: tuple[int, ...] = field(default=())


class Rig:
    """A checkpoint on a bench, with pages that read as NaN until they are written.

    Args:
        bench: whose backend serves it.
        folder: the checkpoint.
        forms: see there.
        pages: how many.
        taps: layers of the further output `taps`; with some, `engine` takes a drafter.
        drafted: tokens that steps verify, if they do.
        fused: whether the backend's fusions are used.
        order: of the physical pages in which runs get them; None is the last one first, as the engine does.

    Raises:
        NotRun: the backend has no kernel for a part of this model, or refuses these forms.
    """

    def __init__(
        self,
        bench: Bench,
        folder: Path,
        forms: Forms | None = None,
        *,
        pages: int,
        taps: Sequence[int] = (),
        drafted: int = 0,
        fused: bool = True,
        order: Sequence[int] | None = None,
    ) -> None:
        self.bench, self.forms = bench, forms or Forms()
        steps = (*STEPS, verifying(drafted + 1)) if drafted else STEPS
        try:
            self.opened = opened_for(bench, folder, self.forms)
            self.graph = self._graph(taps)
            text = self.opened.checkpoint.config.text
            self.compiler = Compiler(self.serving, self.graph, text if fused else None, self.opened.compiler.weights)
            self.assigned = list(self.compiler.assigned(steps))
            self.layout: KVLayout = self.serving.kv_layout(self.opened.spec, self.assigned)
        except (BackendRefused, NoKernel) as refusal:
            raise NotRun("refused", str(refusal)) from refusal
        for step in steps:
            self.compiler.bind(step)
        self.compiler.weights.seal()
        self.cache: KVCache = self.layout.allocate(pages)
        self.cache.poison(range(pages))
        self._free = list(reversed(order if order is not None else range(pages - 1, -1, -1)))
        self.page_tokens = self.opened.spec.page_tokens

    @property
    def serving(self) -> Any:
        """The sessions."""
        return self.opened.serving

    def _graph(self, taps: Sequence[int]) -> ModelGraph:
        opened = self.opened
        if not taps:
            return opened.compiler.graph
        pages = opened.spec.kv_format, opened.spec.index_format
        rounding = rounding_of(self.serving.session, opened.spec)

        def stored(name: str) -> str:
            return stored_as(opened.checkpoint.tensor(name))

        return trace(opened.checkpoint.config.text, rounding, stored, pages, taps)

    def run(self, tokens: Sequence[int], *, pages: Sequence[int] | None = None) -> Run:
        """A sequence with pages for all of `tokens`."""
        need = -(-len(tokens) // self.page_tokens)
        given = list(pages) if pages is not None else [self._free.pop() for _ in range(need)]
        return Run(tuple(tokens), given)

    def step_class(self, parts: Sequence[Part], *, kind: str | None = None, rows: int | None = None) -> StepClass:
        """The class in which these parts fit; `kind` is `decode` where every part is one token, else `mixed`."""
        counts = [part.count for part in parts]
        kind = kind or ("decode" if set(counts) == {1} else "mixed")
        return StepClass(
            kind=kind,  # type: ignore[arg-type]
            q_len=0 if kind == "mixed" else counts[0],
            tokens=bucket(sum(counts)),
            seqs=bucket(len(parts)),
            rows=bucket(sum(counts) if rows is None else rows),
            pages=max(MIN_PAGES, bucket(max(self._used(part) for part in parts))),
        )

    def _used(self, part: Part) -> int:
        """Pages that a part's sequence has after it."""
        return -(-(part.run.done + part.count) // self.page_tokens)

    def batch(self, parts: Sequence[Part], step: StepClass, into: StepBatch | None = None) -> StepBatch:
        """The buffers of a step over these parts; every token gets logits."""
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        for part in parts:
            run, start = part.run, part.run.done
            tokens += part.tokens or run.tokens[start : start + part.count]
            span = range(start, start + part.count)
            positions += span
            slots += [run.pages[at // self.page_tokens] * self.page_tokens + at % self.page_tokens for at in span]
        batch = into or StepBatch.allocate(step, self.serving.session.device)
        batch.fill(
            tokens=tokens,
            positions=positions,
            q_lens=[part.count for part in parts],
            seq_lens=[part.run.done + part.count for part in parts],
            slot_map=slots,
            page_table=[part.run.pages[: self._used(part)] for part in parts],
            out_rows=range(len(tokens)),
        )
        return batch

    def step(self, *parts: Part, verify: bool = False) -> list[F32]:
        """One forward step; logits of every token of every part [count, V], in float32. The tokens of `Part.tokens`
        are written to the pages and do not count as done."""
        step = self.step_class(parts, kind="verify" if verify else None)
        plan, batch, _ = self.compiler.plan(step)
        logits = plan.run(self.batch(parts, step, batch), self.cache).float().cpu().numpy().copy()
        for part in parts:
            part.run.done += 0 if part.tokens else part.count
        return np.split(logits, np.cumsum([part.count for part in parts])[:-1])

    def feed(self, run: Run, *counts: int) -> F32:
        """The run's next tokens in steps of these sizes, then the rest in steps as large as the engine's."""
        rows = []
        for count in counts:
            rows += self.step(Part(run, count))
        while run.done < len(run.tokens):
            rows += self.step(Part(run, min(CHUNK_TOKENS, len(run.tokens) - run.done)))
        return np.concatenate(rows)

    def engine(
        self, *, drafter: Drafter | None = None, prefix_cache: bool = False, chunk: int = CHUNK_TOKENS
    ) -> Engine:
        """The engine on this rig's pages; what becomes free is poisoned."""
        made = Engine(
            compiler=self.compiler,
            cache=self.cache,
            page_tokens=self.page_tokens,
            chunk_tokens=chunk,
            prefix_cache=prefix_cache,
            drafter=drafter,
        )
        made.pool.poison = True
        self.cache.poison(range(self.cache.pages))
        return made

    @property
    def slack(self) -> float:
        """How far logits may differ, as a part of the largest one, where the same kernels compute the same in another
        order.

        e is the root of the sum of the squares of what each op rounds off (result, and a random walk of its
        accumulation): errors of different ops are independent, and the norms between layers keep them relative. Where
        something is quantised in steps of s, an error of e moves a value over an edge with a probability of e / s, by
        s: that adds e s to the mean square. CONSTANT of those standard deviations are allowed, and a quarter of the
        largest logit at most, beyond which nothing would be said.
        """
        compute = str(self.serving.session.dtypes["model"]).removeprefix("torch.")
        graph = self.compiler.fused(STEPS[1])[0]
        kernels = {op.name: found.kernel for op, found in self.assigned}
        fine, steps = [], []
        for call in graph.calls:
            rounded, step = _rounding(call.op, kernels[call.op.name], compute)
            fine.append(rounded)
            steps.append(step)
        square = sum(x * x for x in fine)
        return float(min(CONSTANT * math.sqrt(square + math.sqrt(square) * sum(steps)), _MOST))

    def noise(self) -> dict[str, float]:
        """By name of the op, what its kernels round off, relative to the result: the coarsest place counts."""
        compute = str(self.serving.session.dtypes["model"]).removeprefix("torch.")
        found: dict[str, float] = {}
        for op, served in self.assigned:
            parts = unfused(op).graph.calls if isinstance(op.spec, FusedOp) else ()
            rounded = _rounding(op, served.kernel, compute)[0]
            for name in [part.op.spec.name for part in parts] or [op.spec.name]:
                if ALL[name].criterion != "exact":
                    found[name] = max(found.get(name, 0.0), rounded)
        return found

    def facts(self) -> dict[str, Any]:
        """Of the evidence: bound and kernels."""
        kernels = {op.spec.name: found.kernel for op, found in self.assigned}
        return {
            "slack": self.slack,
            "kernel": ", ".join(sorted({k.name for k in kernels.values()})),
            "arithmetic": self.serving.session.numerics.name,
            "kv": self.opened.spec.kv_format,
            "index": self.opened.spec.index_format,
        }


def _rounding(op: OpInstance, kernel: Kernel, compute: str) -> tuple[float, float]:
    """Of one op: what it rounds off, relative to its result, and the step in which it quantises."""
    step = 0.0
    for value in op.outputs:
        if isinstance(value, StateType):
            stored = value.index_format if op.spec.name == "index_write" else value.kv_format
            step = max(step, roundoff(_plain(stored)))
    if op.spec.criterion == "exact" and not isinstance(op.spec, FusedOp):
        return 0.0, step
    found = kernel.arithmetic
    widths = [n for value in op.inputs for n in getattr(value, "shape", ()) if isinstance(n, int)]
    widths += [n for decl in op.slots.values() for n in decl.shape[-1:]]
    walk = math.sqrt(max(widths, default=1)) * roundoff(found.accumulate)
    operands = [roundoff(_plain(name)) for name in found.operands.replace(", ", "*").split("*")]
    coarser = [size for size in operands if size > roundoff(compute)]
    return walk + roundoff(found.output), max(step, sum(sorted(coarser)[-2:]))


def _plain(name: str) -> str:
    """A format of elements with the precision of a named way of quantising, such as `nvfp4-token`."""
    return next((element for start, element in _ELEMENTS.items() if name.startswith(start)), name)


def verifying(q_len: int) -> StepClass:
    """The class of a step that verifies, for one sequence."""
    tokens = bucket(q_len)
    return StepClass(kind="verify", q_len=q_len, tokens=tokens, seqs=1, rows=tokens, pages=MIN_PAGES)


def opened_for(bench: Bench, folder: Path, forms: Forms, *, draft: int | None = None) -> Opened:
    """`open_model` with the bench's backend."""
    return open_model(
        folder,
        backend=bench.backend,
        device=bench.device,
        dtype=forms.dtype,
        kv_dtype=forms.kv,
        index_dtype=forms.index,
        v_scale_order=None,
        arithmetic=forms.arithmetic,
        draft=draft,
        options=bench.options,
    )
