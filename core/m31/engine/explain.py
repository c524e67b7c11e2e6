"""Which kernel runs which op of which layers, and why: the table behind `m31 explain`. No weight is read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from m31.config import Text
from m31.engine.compiler import Compiler
from m31.graph import Assigned, ModelGraph, Refusal, StepClass, assign


@dataclass(frozen=True)
class Row:
    """One op of one class of layers.

    Attributes:
        step: kind of step class.
        fused: whether this is the graph after the fuse pass.
        layers: which layers, such as `0-2`; empty for what stands outside the layers.
        kind: what they are, such as `sparse attention, moe`; `outside the layers`.
        op: name of the op.
        calls: how many of it one layer has (or the model, outside the layers).
        by, kernel, why: the backend, its kernel and its reason; `-` for a part that is served in a fused op only.
        arithmetic: operands, accumulation and output of the kernel.
        fallback: why the chosen backend does not serve it; None if it does.
    """

    step: str
    fused: bool
    layers: str
    kind: str
    op: str
    calls: int
    by: str
    kernel: str
    why: str
    arithmetic: str
    fallback: str | None


def explain(compiler: Compiler, text: Text, steps: Iterable[StepClass]) -> list[Row]:
    """Every op by step class, before and after fusion.

    Raises:
        NoKernel: an op that nobody serves.
    """
    rows: list[Row] = []
    for step in steps:
        rows += _rows(compiler.graph, compiler, text, step, fused=False)
        rows += _rows(compiler.fused(step)[0], compiler, text, step, fused=True)
    return rows


def _rows(graph: ModelGraph, compiler: Compiler, text: Text, step: StepClass, *, fused: bool) -> Iterator[Row]:
    found: Mapping[str, Assigned | Refusal]
    if fused:
        found = assign(graph, compiler.serving, step)
    else:
        found = {call.op.name: compiler.serving.assign(call.op, step) for call in graph.calls}
    outside: dict[tuple[str, ...], int] = {}
    layers: list[dict[tuple[str, ...], int]] = [{} for _ in range(text.num_layers)]
    at: int | None = None
    for call in graph.calls:
        at = _layer(next(iter(slots.values())).name, at) if (slots := call.op.slots) else at
        bucket = outside if at is None else layers[at]
        key = _key(call.op.spec.name, found[call.op.name])
        bucket[key] = bucket.get(key, 0) + 1
    groups: dict[tuple[str, tuple[tuple[tuple[str, ...], int], ...]], list[int]] = {}
    for number, ops in enumerate(layers):
        kind = f"{text.attention[number]} attention, {text.mlp[number]}"
        groups.setdefault((kind, tuple(ops.items())), []).append(number)
    for (kind, ops_), numbers in groups.items():
        for key, calls in ops_:
            yield _row(step.kind, fused, _ranges(numbers), kind, key, calls)
    for key, calls in outside.items():
        yield _row(step.kind, fused, "", "outside the layers", key, calls)


def _layer(weight: str, before: int | None) -> int | None:
    """The layer that a weight belongs to; ops without weights stand in the layer of the op before."""
    parts = weight.split(".")
    return int(parts[2]) if parts[:2] == ["model", "layers"] else None


def _key(op: str, found: Assigned | Refusal) -> tuple[str, ...]:
    if isinstance(found, Refusal):  # before fusion only: a part that the backend serves as part of a fused op
        return op, "", "-", f"not by itself: {found.reason}", "-", ""
    a = found.kernel.arithmetic
    said = f"{a.operands} -> {a.accumulate} -> {a.output}"
    return op, found.by, found.kernel.name, found.kernel.why, said, found.fallback or ""


def _row(step: str, fused: bool, layers: str, kind: str, key: tuple[str, ...], calls: int) -> Row:
    op, by, kernel, why, arithmetic, fallback = key
    return Row(step, fused, layers, kind, op, calls, by, kernel, why, arithmetic, fallback or None)


def _ranges(numbers: list[int]) -> str:
    """`0-2, 5` for [0, 1, 2, 5]."""
    spans: list[list[int]] = []
    for n in numbers:
        if spans and spans[-1][1] == n - 1:
            spans[-1][1] = n
        else:
            spans.append([n, n])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
