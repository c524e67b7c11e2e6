"""Where two backends part: one prompt, layer by layer and op by op.

Two kinds of error are told apart. *Made here*: an op gets the inputs that the other backend's had, and what it makes of
them is compared with the definition, within the bound of its declared arithmetic; the first op outside is the one to
look at. *Grown*: both run the whole step by themselves, and the residual stream after each layer is compared; growth
without an op that is outside its bound is rounding that adds up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from m31.conformance import layers
from m31.conformance.bench import Bench
from m31.conformance.rig import Forms, Part, Rig
from m31.errors import ContractViolation, RequestError
from m31.graph import ModelGraph
from m31.ops import StateType

_TOKENS = 2048  # of the prompt at most: it is one step


@dataclass(frozen=True)
class Local:
    """One op that got the other backend's inputs.

    Attributes:
        layer: -1 for what is before the first layer and after the last.
        op, spec: name of the instance, and of the op.
        off: the largest difference of the two backends' results, as a part of the largest result.
        fault: how it breaks the bound of its arithmetic, or None.
    """

    layer: int
    op: str
    spec: str
    off: float
    fault: str | None


@dataclass(frozen=True)
class Bisection:
    """What `bisect` found.

    Attributes:
        names: of the two backends.
        ops: in the order of the step, as far as both have a kernel for them.
        growth: per layer, the difference of the residual streams of two runs by themselves, as a part of the largest.
        logits: the same of the logits.
    """

    names: tuple[str, str]
    ops: tuple[Local, ...]
    growth: tuple[float, ...]
    logits: float

    @property
    def first(self) -> Local | None:
        """The first op outside its bound."""
        return next((op for op in self.ops if op.fault is not None), None)

    def table(self) -> str:
        """The verdict and a line for each layer, as text."""
        first = self.first
        lines = [f"{self.names[0]} against {self.names[1]}"]
        if first is None:
            lines.append("no op is outside the bound of its declared arithmetic when it gets the other's inputs")
        else:
            lines.append(f"first outside its bound: layer {_shown(first.layer)}, {first.op} ({first.spec})")
            lines.append(f"  {first.fault}")
        lines.append("")
        lines.append(f"{'layer':>7}  {'grown':>9}  {'made here':>9}  by")
        for layer, grown in enumerate(self.growth):
            here = [op for op in self.ops if op.layer == layer]
            worst = max(here, key=lambda op: op.off, default=None)
            by = f"{worst.off:9.2e}  {worst.op}" if worst else f"{'-':>9}"
            lines.append(f"{layer:>7}  {grown:9.2e}  {by}")
        lines.append(f"{'logits':>7}  {self.logits:9.2e}")
        return "\n".join(lines)

    def svg(self) -> str:
        """Error by layer on a logarithmic scale: grown (line) and made here (dots), the faulty layer marked."""
        return _plot(self)


def _shown(layer: int) -> str:
    return "ends" if layer < 0 else str(layer)


def bisect(
    bench_a: Bench, bench_b: Bench, folder: Path, prompt_ids: Sequence[int], *, forms: Forms | None = None
) -> Bisection:
    """Compare two backends on a prompt.

    Args:
        bench_a: the one that is looked into.
        bench_b: the one that it is compared with; its values are what `bench_a`'s ops get.
        folder: a checkpoint that both serve.
        prompt_ids: up to 2,048 tokens.
        forms: of both; None is each one's own.

    Raises:
        NotRun: one of the two does not serve this model in these forms.
        RequestError: no prompt, or one that is too long.
        ContractViolation: the two do not have the same graph, because they round at different places.
    """
    if not 0 < len(prompt_ids) <= _TOKENS:
        raise RequestError(f"a prompt of {len(prompt_ids):,} tokens", expected=f"1 to {_TOKENS:,}")
    asked = forms or Forms()
    a, b = (_Traced(bench, folder, asked, prompt_ids) for bench in (bench_a, bench_b))
    missing = sorted({call.op.name for call in a.rig.graph.calls} ^ {call.op.name for call in b.rig.graph.calls})
    if missing:
        raise ContractViolation(
            "arithmetic",
            f"{missing[0]} is in one graph and not in the other",
            where=f"bisect {a.name} against {b.name}",
            expected="two backends that round at the same places",
        )
    own_a, own_b = a.run(None), b.run(None)
    found: list[Local] = []
    fed = a.run(own_b)
    place = layers.layers_of(a.rig.graph)
    where = {call.op.name: layer for layer, calls in place.items() for call in calls}
    values = layers.Values(own_b, b.rig, b.pages, b.step)
    faults: dict[str, str] = {}
    for layer in sorted(place, key=lambda at: (at < 0, at)):
        evidence = layers.run_layer(bench_a, folder, asked, layer, values)
        for entry in evidence.facts["ops"]:
            one = type(evidence)(evidence.arrays, {**evidence.facts, "ops": [entry]})
            try:
                layers.judge_layer(a.rig.graph, f"layer {_shown(layer)}", one)
            except ContractViolation as violation:
                faults[entry["op"]] = str(violation)
    for call in a.rig.graph.calls:
        off = max((_apart(fed[name], own_b[name]) for name in call.writes if name in fed), default=0.0)
        if not any(isinstance(value, StateType) for value in call.op.outputs):
            found.append(Local(where[call.op.name], call.op.name, call.op.spec.name, off, faults.get(call.op.name)))
    ends = residuals(a.rig.graph)
    growth = tuple(_apart(own_a[name], own_b[name]) for name in ends)
    logits = _apart(own_a[a.rig.graph.output], own_b[b.rig.graph.output])
    return Bisection((a.name, b.name), tuple(found), growth, logits)


def residuals(graph: ModelGraph) -> list[str]:
    """The value after each layer: the last sum of its calls."""
    place = layers.layers_of(graph)
    return [
        next(call.writes[0] for call in reversed(place[layer]) if call.op.spec.name == "add")
        for layer in sorted(place)
        if layer >= 0
    ]


class _Traced:
    """A backend whose every value can be seen, or replaced by another's."""

    def __init__(self, bench: Bench, folder: Path, forms: Forms, ids: Sequence[int]) -> None:
        count = -(-len(ids) // 128) + 1
        self.rig = Rig(bench, folder, forms, pages=count, fused=False)
        self.name = bench.manifest.name
        run = self.rig.run(ids)
        self.pages = run.pages
        part = Part(run, len(ids))
        self.step = self.rig.step_class([part])
        self.batch = self.rig.batch([part], self.step)
        self.bound = self.rig.compiler.bind(self.step)

    def run(self, given: dict[str, torch.Tensor] | None) -> dict[str, torch.Tensor]:
        """Every value of the step, float64 or int64, on the host.

        Args:
            given: what each op reads instead of what this backend computed.
        """
        session, types = self.rig.serving.session, self.rig.graph.types
        data: dict[str, Any] = {name: value.clone() for name, value in self.batch.narrowed().items()}
        made: dict[str, torch.Tensor] = {}
        for call in self.rig.graph.calls:
            source = (
                data if given is None else {**{k: given[k] for k in call.reads if k in given}, **_batch(data, call)}
            )
            outs, ins = layers.operands(
                call, source, types, self.rig.cache, session.dtypes, session.device, self.batch.size
            )
            found = self.bound.assigned[call.op.name].kernel
            need = found.workspace_bytes
            space = torch.empty(need, dtype=torch.uint8, device=session.device) if need else None
            found.run(outs, ins, self.bound.handles.get(call.op.name), space)
            for name, out in zip(call.writes, outs, strict=True):
                if isinstance(out, torch.Tensor):
                    data[name] = out
                    made[name] = out.detach().cpu().double() if out.is_floating_point() else out.detach().cpu()
        return {**{name: value.cpu() for name, value in self.batch.narrowed().items()}, **made}


def _batch(data: dict[str, Any], call: Any) -> dict[str, Any]:
    """The step's own buffers: each backend has its own pages."""
    return {name: data[name] for name in call.reads if name in ("slot_map", "page_table")}


def _apart(got: torch.Tensor, want: torch.Tensor) -> float:
    """The largest difference as a part of the largest value; of ids the part that differs."""
    if not want.is_floating_point():
        return float((got != want).double().mean())
    x, y = got.numpy().astype(np.float64), want.numpy().astype(np.float64)
    same = np.isinf(y) & (x == y)
    off = np.abs(np.where(same, 0, x) - np.where(same, 0, y))
    scale = np.abs(y[np.isfinite(y)]).max(initial=0.0)
    worst = float(np.where(np.isnan(off), np.inf, off).max(initial=0.0))
    return worst / scale if scale else worst


# --- plot -----------------------------------------------------------------------------------------------------------

_W, _H, _LEFT, _TOP, _RIGHT, _BOTTOM = 760, 360, 70, 40, 20, 50
_DECADES = (-17, 1)


def _plot(found: Bisection) -> str:
    count = max(1, len(found.growth))

    def x(layer: float) -> float:
        return _LEFT + (layer + 0.5) / count * (_W - _LEFT - _RIGHT)

    def y(value: float) -> float:
        low, high = _DECADES
        at = min(max(np.log10(value) if value > 0 else low, low), high)
        return float(_TOP + (high - at) / (high - low) * (_H - _TOP - _BOTTOM))

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_W} {_H}" font-family="sans-serif" font-size="12">',
        f'<rect width="{_W}" height="{_H}" fill="white"/>',
        f'<text x="{_LEFT}" y="22" font-size="14">{_escaped(f"{found.names[0]} against {found.names[1]}")}</text>',
    ]
    for decade in range(_DECADES[0] + 1, _DECADES[1] + 1, 2):
        at = y(10.0**decade)
        parts.append(f'<line x1="{_LEFT}" x2="{_W - _RIGHT}" y1="{at:.1f}" y2="{at:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">1e{decade}</text>')
    if found.first is not None and found.first.layer >= 0:
        at = x(found.first.layer)
        parts.append(f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{_TOP}" y2="{_H - _BOTTOM}" stroke="#c00"/>')
        label = f"{found.first.spec}, layer {found.first.layer}"
        parts.append(f'<text x="{at + 6:.1f}" y="{_TOP + 12}" fill="#c00">{_escaped(label)}</text>')
    for op in found.ops:
        if op.layer >= 0 and op.off > 0:
            colour = "#c00" if op.fault else "#999"
            title = _escaped(f"{op.op}: {op.off:.2e}")
            place = f'cx="{x(op.layer):.1f}" cy="{y(op.off):.1f}"'
            parts.append(f'<circle {place} r="3" fill="{colour}"><title>{title}</title></circle>')
    line = " ".join(f"{x(layer):.1f},{y(value):.1f}" for layer, value in enumerate(found.growth))
    parts.append(f'<polyline points="{line}" fill="none" stroke="#06c" stroke-width="2"/>')
    every = max(1, count // 20)
    for layer in range(0, count, every):
        parts.append(f'<text x="{x(layer):.1f}" y="{_H - _BOTTOM + 18}" text-anchor="middle">{layer}</text>')
    legend = "layer; line: grown over the layers, dots: made by one op on the other's inputs, relative to the largest"
    parts.append(f'<text x="{_LEFT}" y="{_H - 12}">{legend}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
