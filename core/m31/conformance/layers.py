"""Op by op through a model, each op fed with the reference's values: an error shows where it is made, and stays there.

The reference runs the step in float64, under the same arithmetic and on pages of the same formats. Each op of the
backend then gets the inputs that the reference's had, in the backend's dtypes; attention reads pages that the backend's
own kernels have filled with what the reference's pages hold.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from m31 import ops
from m31.conformance import judge, oracle, twin
from m31.conformance.bench import Bench
from m31.conformance.item import Evidence, Verdict
from m31.conformance.op_bounds import BOUNDS, Given
from m31.conformance.rig import Forms, Part, Rig, Run
from m31.engine.opening import Opened
from m31.errors import ContractViolation
from m31.graph import NO_ROUNDING, Arithmetic, Call, ModelGraph, StepClass, StepSize, trace
from m31.ops import OpSpec, StateType, TensorType, ValueType, WeightDecl
from m31.sdk.backend import stored_as

PREFILL, CACHED, VERIFIED = 300, 2304, 4
_ROWS = (0, 1, 2, 63, 126, 127, 128, 129, 130, 200, 254, 255, 256, 257, 298, 299)
"""Queries whose attention is judged in a prefill: the definition is slow, and the edges of pages are what differs."""
_ENDS = -1
_LAYER = re.compile(r"\.layers\.(\d+)\.")
_PAGED = ("block_scores", "sparse_attention", "dense_attention")
_CONTEXT = ("positions", "cu_q", "seq_lens", "page_table")


@dataclass(frozen=True)
class Values:
    """Of one step on the reference.

    Attributes:
        data: every value by its name in the graph, float64 or int64, as large as the step.
        rig: whose pages hold what the step and those before it wrote.
        pages: of the sequence.
        step: its class.
    """

    data: Mapping[str, torch.Tensor]
    rig: Rig
    pages: Sequence[int]
    step: StepClass


def layers_of(graph: ModelGraph) -> dict[int, list[Call]]:
    """The calls of each layer, in order; `-1` are those before the first layer and after the last."""
    found: dict[int, list[Call]] = {}
    layer, last = _ENDS, max(_layers(graph), default=0)
    for call in graph.calls:
        name = next((decl.name for decl in call.op.slots.values()), "")
        if match := _LAYER.search(name):
            layer = int(match.group(1))
        elif name.startswith(("model.norm", "lm_head")):
            layer = _ENDS
        found.setdefault(layer, []).append(call)
    assert last in found, "every layer has weights"
    return found


def _layers(graph: ModelGraph) -> Iterator[int]:
    for tensor in graph.tensors():
        if match := _LAYER.search(tensor.name):
            yield int(match.group(1))


def reference_run(folder: Path, forms: Forms, ids: Sequence[int], done: int) -> tuple[Rig, Run]:
    """A text on the reference in float64, of which the first `done` tokens are computed.

    Args:
        forms: pages and arithmetic; the dtype is not looked at.
    """
    exact = Forms(dtype="float64", kv=forms.kv, index=forms.index, arithmetic=forms.arithmetic)
    pages = -(-len(ids) // 128) + 1
    rig = Rig(oracle.bench(), folder, exact, pages=pages, drafted=VERIFIED - 1, fused=False)
    run = rig.run(ids)
    while run.done < done:
        rig.step(Part(run, min(2048, done - run.done)))
    return rig, run


def reference_values(rig: Rig, run: Run, count: int, *, kind: str) -> Values:
    """The next `count` tokens as one step of that kind, which leaves its keys and values in the pages. They are
    not done afterwards: another step can be asked for at the same place."""
    step = rig.step_class([Part(run, count)], kind=kind)
    bound, batch = rig.compiler.bind(step), rig.batch([Part(run, count)], step)
    data = {name: value.clone() for name, value in batch.narrowed().items()}
    session = rig.serving.session
    for call in bound.graph.calls:
        outs, ins = operands(call, data, bound.graph.types, rig.cache, session.dtypes, session.device, batch.size)
        found = bound.assigned[call.op.name].kernel
        space = torch.empty(found.workspace_bytes, dtype=torch.uint8) if found.workspace_bytes else None
        found.run(outs, ins, bound.handles.get(call.op.name), space)
        data |= {n: o for n, o in zip(call.writes, outs, strict=True) if isinstance(o, torch.Tensor)}
    return Values(data, rig, run.pages[: -(-(run.done + count) // rig.page_tokens)], step)


def operands(
    call: Call,
    data: Mapping[str, torch.Tensor],
    types: Mapping[str, ValueType],
    cache: Any,
    dtypes: Mapping[str, torch.dtype],
    device: torch.device,
    size: StepSize,
) -> tuple[list[Any], list[Any]]:
    """Outputs that are NaN, or an id that nothing has, and inputs in the session's dtypes."""
    outs: list[Any] = []
    for value in call.op.outputs:
        if isinstance(value, TensorType):
            shape = [size.within(dim, dim if isinstance(dim, int) else 0) for dim in value.shape]
            dtype = dtypes[value.dtype]
            outs.append(
                torch.full(shape, torch.nan if dtype.is_floating_point else -(2**40), dtype=dtype, device=device)
            )
        else:
            outs.append(cache)
    ins: list[Any] = []
    for name in call.reads:
        value = types[name]
        ins.append(data[name].to(device, dtypes[value.dtype]) if isinstance(value, TensorType) else cache)
    return outs, ins


def run_layer(bench: Bench, folder: Path, forms: Forms, layer: int, values: Values) -> Evidence:
    """Every op of a layer that the backend serves itself, on the reference's values."""
    drafted = VERIFIED - 1 if values.step.kind == "verify" else 0
    rig = bench.once(
        ("layers", folder, forms, values.step.kind),
        lambda: Rig(bench, folder, forms, pages=len(values.pages) + 1, drafted=drafted, fused=False),
    )
    session, types = rig.serving.session, rig.graph.types
    size = _size(values)
    bound = bench.once(("bound", folder, forms, values.step), lambda: rig.compiler.bind(values.step))
    arrays: dict[str, Any] = {}
    done: list[dict[str, Any]] = []
    table = torch.tensor([list(range(len(values.pages)))])
    data = {**values.data, "page_table": table, "slot_map": values.data["positions"]}  # pages in order, see `fill`
    for number in {c.op.attrs["layer"] for c in layers_of(rig.graph).get(layer, []) if "layer" in c.op.attrs}:
        fill(rig, values, number)
        arrays |= {f"kv.{number}.{kind}": value for kind, value in read(rig, number, len(values.pages)).items()}
    scores: torch.Tensor | None = None
    for call in layers_of(rig.graph).get(layer, []):
        found = bound.assigned[call.op.name]
        if found.by != rig.serving.name or any(isinstance(value, StateType) for value in call.op.outputs):
            continue
        outs, ins = operands(call, data, types, rig.cache, session.dtypes, session.device, size)
        handle = bound.handles.get(call.op.name)
        need = found.kernel.workspace_bytes
        space = torch.empty(need, dtype=torch.uint8, device=session.device) if need else None
        found.kernel.run(outs, ins, handle, space)
        name = call.op.name
        for read_name, value in zip(call.reads, ins, strict=True):
            if isinstance(value, torch.Tensor):
                arrays[f"in.{read_name}"] = _array(value)
        arrays |= {f"out.{name}.{i}": _array(out) for i, out in enumerate(outs)}
        if handle is not None:
            arrays |= {f"w.{name}.{slot}": _array(value) for slot, value in handle.dequantise().items()}
        if call.op.spec.name == "block_scores":
            scores = outs[0]
        elif call.op.spec.name == "block_select" and scores is not None:
            own = torch.full_like(outs[0], -(2**40))
            found.kernel.run([own], [scores, ins[1]], None, space)
            arrays[f"own.{name}"] = _array(own)
        done.append({"op": name, "spec": call.op.spec.name, "arithmetic": vars(found.kernel.arithmetic)})
    kernels = ", ".join(sorted({bound.assigned[entry["op"]].kernel.name for entry in done}))
    compute = str(session.dtypes["model"]).removeprefix("torch.")
    facts = {"ops": done, "kernel": kernels, "compute": compute, "arithmetic": session.numerics.name, "layer": layer}
    return Evidence(arrays, {**facts, "kv": rig.opened.spec.kv_format, "index": rig.opened.spec.index_format})


def _size(values: Values) -> StepSize:
    count, rows = len(values.data["tokens"]), len(values.data["out_rows"])
    return StepSize(count, len(values.data["seq_lens"]), rows, len(values.pages))


def fill(rig: Rig, values: Values, layer: int) -> None:
    """Write what the reference's pages hold into the first pages of the backend's cache, by its own kernels."""
    session = rig.serving.session
    total = int(values.data["seq_lens"][0])
    held = [values.rig.cache.read(layer, page) for page in values.pages]
    calls = [c for c in rig.graph.calls if c.op.attrs.get("layer") == layer and c.op.spec.name in _WRITES]
    for call in calls:
        found = rig.serving.assign(call.op, values.step)
        parts = []
        for kind in _WRITES[call.op.spec.name]:
            x = torch.cat([page[kind] if page[kind].ndim == 3 else page[kind][None] for page in held], dim=1)
            parts.append(x.transpose(0, 1)[:total].to(session.device, session.dtypes["model"]))
        data = [parts[0].contiguous(), *(p.flatten(1).contiguous() for p in parts[1:])]
        slots = torch.arange(total, device=session.device)
        need = found.kernel.workspace_bytes
        space = torch.empty(need, dtype=torch.uint8, device=session.device) if need else None
        for start in range(0, total, values.step.tokens):
            end = min(total, start + values.step.tokens)
            found.kernel.run([rig.cache], [rig.cache, *(x[start:end] for x in data), slots[start:end]], None, space)


_WRITES: Mapping[str, tuple[str, ...]] = {ops.kv_write.name: ("k", "v"), ops.index_write.name: ("index",)}


def read(rig: Rig, layer: int, pages: int) -> dict[str, Any]:
    """What the first pages of a layer hold: `k`, `v` [pages, heads, page, D], `index` [pages, page, D]."""
    held = [rig.cache.read(layer, page) for page in range(pages)]
    return {kind: np.stack([_array(page[kind]) for page in held]) for kind in held[0]}


def _array(tensor: torch.Tensor) -> Any:
    value = tensor.detach().cpu()
    return (value.float() if value.dtype in (torch.bfloat16, torch.float16) else value).numpy()


# --- judgement ------------------------------------------------------------------------------------------------------


def judge_layer(graph: ModelGraph, where: str, evidence: Evidence) -> Verdict:
    """Each op within the bound of its declared arithmetic, ids equal but where scores are nearer than their bounds.

    Raises:
        ContractViolation: names the op.
    """
    facts, arrays = evidence.facts, evidence.arrays
    calls = {call.op.name: call for call in graph.calls}
    worst = Verdict(margin=0.0, note=f"{len(facts['ops'])} ops")
    scores: tuple[Given, Sequence[Any]] | None = None
    alike = []
    for entry in facts["ops"]:
        call, arithmetic = calls[entry["op"]], Arithmetic(**entry["arithmetic"])
        given, got = _given(call, graph.types, arrays, arithmetic, facts["compute"])
        place = f"{where}, op {entry['op']} ({entry['spec']})"
        if call.op.spec.name == "block_scores":
            scores = given, got
        if call.op.spec.name == "block_select" and f"own.{entry['op']}" in arrays and scores is not None:
            _require_blocks(scores[0], arrays[f"own.{entry['op']}"], call.op.attrs, arrays, place)
        if _in_blocks(call.op.spec, arithmetic, call.op.attrs):
            alike.append(entry["op"])
            judge.require_likeness(call.op.spec, given, got, place)
            continue
        judge.require(call.op.spec, given, got, place, judge.Context("", ("", ""), {}))
        worst = max(worst, _margin(call.op.spec, given, got, entry["op"], worst.note), key=lambda v: v.margin or 0.0)
    if alike:
        worst = Verdict(
            **{**vars(worst), "note": f"{worst.note}, {len(alike)} of them by likeness: {', '.join(alike)}"}
        )
    return worst


def _in_blocks(spec: OpSpec, arithmetic: Arithmetic, attrs: Mapping[str, Any]) -> bool:
    """Whether no elementwise bound is known here: operands are quantised, or the op is a fused one without one."""
    return twin.quantises(arithmetic) or judge.unjudged(spec, arithmetic, attrs) is not None


def _given(
    call: Call, types: Mapping[str, ValueType], arrays: Mapping[str, Any], arithmetic: Arithmetic, compute: str
) -> tuple[Given, list[Any]]:
    """The call as the definition takes it, and what came out; of long attention a few queries."""
    op = call.op
    args: list[Any] = []
    reads = iter(call.reads)
    for arg, value in zip(op.spec.inputs, op.inputs, strict=True):
        if isinstance(value, WeightDecl):
            args.append({slot: _real(arrays[f"w.{op.name}.{slot}"]) for slot in value.slots})
        else:
            name = next(reads)
            args.append(_state(arrays, op.attrs["layer"]) if arg.kind == "state" else _real(arrays[f"in.{name}"]))
    got = [_real(arrays[f"out.{op.name}.{i}"]) for i in range(len(op.outputs))]
    if op.spec.name in _PAGED:
        args, got = _few(op.spec, args, got)
    plain = [a["weight"] if isinstance(a, dict) and set(a) == {"weight"} else a for a in args]
    expected = op.spec.naive(op.attrs, *plain)
    return Given(op.attrs, args, expected, arithmetic, compute), got


def _real(value: Any) -> Any:
    return value.astype(np.float64) if value.dtype.kind == "f" else value


def _state(arrays: Mapping[str, Any], layer: int) -> dict[tuple[int, str], Any]:
    kinds = ("k", "v", "index")
    return {(layer, kind): _real(arrays[f"kv.{layer}.{kind}"]) for kind in kinds if f"kv.{layer}.{kind}" in arrays}


def _few(spec: OpSpec, args: list[Any], got: list[Any]) -> tuple[list[Any], list[Any]]:
    """Some queries of one sequence, each as a sequence of its own."""
    names = [arg.name for arg in spec.inputs]
    by_name = dict(zip(names, args, strict=True))
    total = len(by_name["q"])
    rows = [row for row in _ROWS if row < total] if total > len(_ROWS) else list(range(total))
    by_name["page_table"] = np.repeat(by_name["page_table"], len(rows), axis=0)
    by_name["positions"] = by_name["positions"][rows]
    by_name["seq_lens"] = by_name["positions"] + 1
    by_name["cu_q"] = np.arange(len(rows) + 1)
    for name in ("q", "blocks"):
        if name in by_name:
            by_name[name] = by_name[name][rows]
    return [by_name[name] for name in names], [out[rows] for out in got]


def _margin(spec: OpSpec, given: Given, got: Sequence[Any], where: str, note: str) -> Verdict:
    if spec.criterion == "exact" or spec.name == "router":
        return Verdict(margin=0.0, note=note)
    best = Verdict(margin=0.0, note=note)
    for have, want, allowed in zip(got, given.expected, BOUNDS[spec.name](given), strict=True):
        real = np.isfinite(want) & (allowed > 0)
        if not real.any():
            continue
        error = np.where(real, np.abs(have - np.where(real, want, 0)), 0)
        ratio = np.where(real, error / np.where(real, allowed, 1), 0)
        at = np.unravel_index(int(ratio.argmax()), ratio.shape)
        if ratio[at] > (best.margin or 0):
            spot = f"{where} {[int(i) for i in at]}"
            best = Verdict(
                margin=float(ratio[at]), max_error=float(error[at]), allowed=float(allowed[at]), where=spot, note=note
            )
    return best


def _require_blocks(scores: Given, own: Any, attrs: Mapping[str, Any], arrays: Mapping[str, Any], where: str) -> None:
    """Blocks chosen from the backend's own scores are those of the exact scores, but where two are nearer to each
    other than both may be off."""
    (exact,) = scores.expected
    (off,) = BOUNDS["block_scores"](scores)
    positions = scores.args[2]
    (wanted,) = ops.block_select.naive(attrs, exact, positions)
    total = len(own)
    rows = [row for row in _ROWS if row < total] if total > len(_ROWS) else list(range(total))
    for t, (mine, right) in enumerate(zip(own[rows], wanted, strict=True)):
        for head in range(mine.shape[0]):
            extra, missing = set(mine[head].tolist()) - set(right[head]), set(right[head].tolist()) - set(mine[head])
            if len(extra) != len(missing) or any(not 0 <= block < exact.shape[2] for block in extra):
                raise ContractViolation(
                    "arithmetic",
                    f"chooses blocks {sorted(extra)} for query {t}",
                    where=where,
                    expected=f"{right[head]}",
                )
            for block in extra:
                gap = min(abs(exact[t, head, block] - exact[t, head, other]) for other in missing)
                room = off[t, head, block] + max(off[t, head, other] for other in missing)
                if not gap <= room:
                    raise ContractViolation(
                        "arithmetic",
                        f"chooses block {block} for query {t}, head {head}, whose score is {gap:.3g} away",
                        where=where,
                        expected=f"{sorted(missing)}: only scores nearer than {room:.3g} may be taken for each other",
                    )


def graph_for(opened: Opened, compute: str) -> ModelGraph:
    """The graph of a model as a session of another compute dtype has it: in BF16 nothing is rounded to BF16 first."""
    if compute != "bfloat16":
        return opened.compiler.graph

    def stored(name: str) -> str:
        return stored_as(opened.checkpoint.tensor(name))

    pages = opened.spec.kv_format, opened.spec.index_format
    return trace(opened.checkpoint.config.text, NO_ROUNDING, stored, pages)
