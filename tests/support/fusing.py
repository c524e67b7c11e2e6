"""Fused graphs on the reference backend: every fused op is served by its own body, part by part."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from tests.support import tiny

from m31.config import Text
from m31.engine.compiler import Compiler, whole
from m31.engine.engine import Engine
from m31.graph import Kernel, ModelGraph, OpInstance, Refusal, StepClass, WeightHandle, compose, prepare_parts, unfused
from m31.ops.body import FusedOp
from m31.sdk.serving import Serving

STEP = StepClass(kind="mixed", q_len=0, tokens=8, seqs=2, rows=2, pages=16)


class Composed:
    """A session that serves fused ops with the kernels of their parts, and counts how often it runs each fused op."""

    def __init__(self, real: Any) -> None:
        self.real = real
        self.runs: dict[str, int] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def fusions(self) -> tuple[str, ...]:
        return ()  # the graph that it is given is fused already

    def kernel(self, op: OpInstance, step: StepClass) -> Kernel | Refusal:
        if not isinstance(op.spec, FusedOp):
            return self.real.kernel(op, step)
        body = unfused(op)
        kernels = {call.op.name: self.real.kernel(call.op, step) for call in body.graph.calls}
        run = compose(body, kernels, self.real.dtypes, self.real.device)

        def counted(outs: Any, ins: Any, weights: Any, workspace: Any) -> None:
            self.runs[op.spec.name] = self.runs.get(op.spec.name, 0) + 1
            run(outs, ins, weights, workspace)

        return dataclasses.replace(next(iter(kernels.values())), run=counted)

    def prepare(self, op: OpInstance, slots: Mapping[str, Any], *rest: Any) -> WeightHandle:
        if not isinstance(op.spec, FusedOp):
            return self.real.prepare(op, slots, *rest)
        return prepare_parts(unfused(op), slots, lambda part, own: self.real.prepare(part, own, *rest))


def engines(
    description: Text,
    values: Mapping[str, torch.Tensor | tiny.Quantised],
    fused: Callable[[ModelGraph], ModelGraph],
    **options: Any,
) -> tuple[Engine, Engine]:
    """The same model unfused and fused: `fused` makes the one graph from the other."""
    plain = tiny.engine(description, values, **options)
    again = tiny.engine(description, values, **options)
    serving = Serving("reference", Composed(again.compiler.serving.session))  # type: ignore[arg-type]
    weights = whole(serving, lambda name: tiny.held(name, values[name]))  # type: ignore[arg-type, return-value]
    compiler = Compiler(serving, fused(again.compiler.graph), description, weights)
    other = Engine(
        compiler=compiler,
        cache=again.cache,
        page_tokens=again.page_tokens,
        chunk_tokens=again.chunk_tokens,
        prefix_cache=False,
    )
    return plain, other


def graph_of(engine: Engine) -> ModelGraph:
    """The graph that an engine runs."""
    return engine.compiler.graph


def runs(engine: Engine) -> dict[str, int]:
    """How often each fused op ran."""
    session = engine.compiler.serving.session
    assert isinstance(session, Composed)
    return session.runs
