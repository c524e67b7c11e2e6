"""One case of an op on the kernels of a session, as evidence; and the judgement of that evidence without the session.

What only the machine can say is checked when the kernel has run, and raised: what surrounds a buffer has changed, an
input was written, a prepared weight is not what it should be, pages do not hold what their own kernel was given.
Everything else is decided by `judge_case` from the case and the evidence, on any machine.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from m31 import ops
from m31.conformance import intervals, judge, twin
from m31.conformance.bounds import F64
from m31.conformance.buffers import WILD, Buffer, Workspace
from m31.conformance.cases import instance, sizes_of, step_of, weight_of, weights_of
from m31.conformance.item import Evidence, Verdict
from m31.conformance.op_bounds import Given
from m31.conformance.weights import WHOLE, Held, HeldQuantised, require_losses
from m31.errors import ContractViolation
from m31.formats import mxfp8, nvfp4
from m31.graph import Arithmetic, Kernel, OpInstance, Refusal
from m31.ops import Case, OpSpec, StateType, TensorType
from m31.ops.body import FusedOp
from m31.sdk.backend import KVCache, KVSpec, LazyTensor, Session

State = dict[tuple[int, str], F64]
_QUANTISED_PAGES = ("fp8", "nvfp4", "int8")


@dataclass(frozen=True)
class Run:
    """A case in one of the ways in which it can be run.

    Args:
        stored: how its weights are stored; "" if there are none.
        formats: of keys and values, and of index keys, in its pages; "" if there are none.
        gaps: there is something between any two elements of inputs and outputs.
    """

    spec: OpSpec
    case: Case
    stored: str
    formats: tuple[str, str]
    gaps: bool

    @property
    def label(self) -> str:
        """For messages."""
        pages = dict.fromkeys(name for name in self.formats if name)
        return "/".join([self.case.id, *([self.stored] if self.stored else [])]) + (
            f"/{'+'.join(pages)} pages" if pages else ""
        )

    @property
    def op(self) -> OpInstance:
        """As a graph would hold it."""
        return instance(self.spec, self.case, self.stored, self.formats)


def kv_spec(case: Case, formats: tuple[str, str]) -> KVSpec:
    """Of the pages of a case."""
    index, k = case.state.get((0, "index")), case.state.get((0, "k"))
    return KVSpec(
        indexed=(index is not None,),
        kv_heads=k.shape[1] if k is not None else 1,
        head_dim=k.shape[3] if k is not None else index.shape[2],  # type: ignore[union-attr]
        index_dim=index.shape[2] if index is not None else 0,
        page_tokens=k.shape[2] if k is not None else index.shape[1],  # type: ignore[union-attr]
        kv_format=formats[0],  # type: ignore[arg-type]
        index_format=formats[1],  # type: ignore[arg-type]
    )


def execute(session: Session, owner: Session, run: Run, kernel: Kernel) -> Evidence:
    """Run a case.

    Args:
        session: whose kernel it is.
        owner: of the pages, and of the kernels that write them.
        kernel: bound for `run.op`.

    Returns:
        Arrays `out/NAME`, `used/SLOT` (weights as computed with), `before/K` and `after/K` (pages, decoded), and facts.

    Raises:
        ContractViolation: something was written that must not be, or is not what it was said to be.
    """
    spec, case, op = run.spec, run.case, run.op
    where = f"kernel {kernel.name}, case {run.label}"
    slots = {slot: _held(op, slot, value) for slot, value in weights_of(case, spec).items()}
    handle = None
    if slots:
        handle = session.prepare(op, slots, WHOLE)
        require_losses(handle, op, slots)
    arrays: dict[str, Any] = {}
    if handle:
        arrays |= {f"used/{slot}": _native(value) for slot, value in handle.dequantise().items()}
    grid = grid_of(kernel.arithmetic, run.formats, session.dtypes["model"])
    cache = _cache(owner, run, grid, where) if case.state else None
    if cache:
        arrays |= {f"before/{kind}": value for kind, value in _pages(cache, case).items()}

    ins: list[Any] = []
    buffers: dict[str, Buffer] = {}
    digest = hashlib.sha256()
    for arg in spec.inputs:
        if arg.kind == "state":
            ins.append(cache)
        elif arg.kind == "data":
            values = on_grid(case.inputs[arg.name], grid)
            digest.update(values.numpy().tobytes())
            dtype = session.dtypes[arg.dtype]
            buffers[arg.name] = Buffer(
                values.shape,
                dtype,
                session.device,
                values=values.to(session.device, dtype),
                narrow=_narrow(arg.layout),
                gaps=run.gaps,
            )
            ins.append(buffers[arg.name].tensor)
    outs: list[Any] = []
    sizes = sizes_of(spec, case)
    for arg, made in zip(spec.outputs, op.outputs, strict=True):
        if not isinstance(made, TensorType):
            outs.append(cache)
            continue
        shape = [sizes[d] if isinstance(d, str) else d for d in made.shape]
        empty = Buffer(
            shape, session.dtypes[arg.dtype], session.device, narrow=_narrow(arg.layout), gaps=run.gaps and bool(shape)
        )
        buffers[f"output {arg.name}"] = empty
        outs.append(empty.tensor)
    space = Workspace(kernel.workspace_bytes, session.device)
    kernel.run(outs, ins, handle, space.tensor)

    for name, buffer in buffers.items():
        buffer.require_untouched(name, where)
    space.require_untouched(where)
    for arg, out in zip(spec.outputs, outs, strict=True):
        if out is not cache:
            arrays[f"out/{arg.name}"] = _native(out)
    if cache and any(out is cache for out in outs):
        arrays |= {f"after/{kind}": value for kind, value in _pages(cache, case).items()}
    declared = kernel.arithmetic
    facts = {
        "kernel": kernel.name,
        "arithmetic": f"{declared.operands}, accumulated in {declared.accumulate}, written in {declared.output}",
        "declared": [declared.operands, declared.accumulate, declared.output],
        "grid": str(grid).removeprefix("torch."),
        "dtypes": {name: str(dtype).removeprefix("torch.") for name, dtype in session.dtypes.items()},
        "label": run.label,
        "inputs": digest.hexdigest(),
    }
    return Evidence(arrays, facts)


def judge_case(run: Run, evidence: Evidence) -> tuple[Verdict, str | None]:
    """How good the evidence of a case is, and why it has no bound, if it has none and was only compared with nonsense.

    Raises:
        ContractViolation: it is not good enough.
        SuiteError: the case lets nonsense through.
    """
    spec, case = run.spec, run.case
    arithmetic = Arithmetic(*evidence.facts["declared"])
    where = f"kernel {evidence.facts['kernel']}, case {run.label}"
    grid = getattr(torch, evidence.facts["grid"])
    before = _state(evidence, "before") if case.state else {}
    several = sum(arg.kind == "weight" for arg in spec.inputs) > 1
    args: list[Any] = []
    for arg in spec.inputs:
        if arg.kind == "weight":
            prefix = f"used/{arg.name}." if several else "used/"
            slots = weight_of(case, arg.name)
            args.append({slot: np.float64(evidence.arrays[prefix + slot]) for slot in slots})
        elif arg.kind == "state":
            args.append(before)
        else:
            values = on_grid(case.inputs[arg.name], grid)
            args.append(values.double().numpy() if values.is_floating_point() else values.numpy())
    plain = [v["weight"] if isinstance(v, dict) and set(v) == {"weight"} else v for v in args]
    expected = spec.naive(case.attrs, *plain)
    got: list[Any] = []
    for arg, want in zip(spec.outputs, expected, strict=True):
        if arg.kind == "state":
            got.append(_state(evidence, "after"))
            continue
        have = _without_padding(evidence.arrays[f"out/{arg.name}"], want, arg.layout, case)
        _require_written(have, want, arg.name, where)
        got.append(have if arg.dtype == "int64" else np.float64(have))
    given = Given(case.attrs, args, expected, arithmetic, evidence.facts["grid"])
    if spec.criterion != "exact":
        twin.require(spec.name, arithmetic, where, fused=isinstance(spec, FusedOp))
    reason = judge.unjudged(spec, arithmetic, case.attrs)
    if reason:
        return judge.require_likeness(spec, given, got, where), reason
    written = {key: on_grid(v, grid).double().numpy() for key, v in case.state.items()}
    return judge.require(spec, given, got, where, judge.Context(run.stored, run.formats, written)), None


def grid_of(arithmetic: Arithmetic, formats: tuple[str, str], model: torch.dtype) -> torch.dtype:
    """On which numbers inputs lie: what a kernel multiplies as BF16, or quantises itself or into pages, it is given in
    BF16, because a model rounds it so before (MODEL.md §2.3)."""
    operands = arithmetic.operands
    coarse = "bfloat16" in operands or twin.quantises(arithmetic) or any(f in _QUANTISED_PAGES for f in formats)
    return torch.bfloat16 if coarse else model


def on_grid(value: Any, grid: torch.dtype) -> torch.Tensor:
    """Numbers of a case as a kernel is given them; indices as they are. In a dtype that numpy has."""
    tensor = torch.as_tensor(np.asarray(value))
    if not tensor.is_floating_point():
        return tensor
    return tensor.to(grid).float() if grid == torch.bfloat16 else tensor.to(grid)


def _native(value: torch.Tensor) -> Any:
    """As it came from the device, in a dtype that numpy has."""
    value = value.detach().cpu()
    return (value.float() if value.dtype == torch.bfloat16 else value).clone().numpy()


def _require_written(have: Any, want: Any, name: str, where: str) -> None:
    """Every element of an output whose definition is all numbers was written.

    Raises:
        ContractViolation: names the first that was not.
    """
    if not np.isfinite(want).all():
        return
    left = have == WILD if have.dtype == np.int64 else np.isnan(have)
    if left.any():
        raise ContractViolation(
            "arithmetic",
            f"leaves {int(left.sum())} elements of '{name}' as they were, or makes them NaN, the first at"
            f" {np.argwhere(left)[0].tolist()}",
            where=where,
            expected="every element of the outputs to be written",
        )


def _without_padding(have: Any, want: Any, layout: str, case: Case) -> Any:
    """Results as they are, but for the rows of padding: an op that is told the slots may leave those out, and nobody
    reads them (DESIGN.md §5)."""
    slots = case.inputs.get("slots")
    if slots is None or not layout.startswith("T") or not (slots < 0).any():
        return have
    return np.where((slots < 0).reshape(-1, *[1] * (have.ndim - 1)), want, have)


def _held(op: OpInstance, slot: str, value: Any) -> LazyTensor:
    """A weight of the case in memory, stored as the instance says."""
    decl = op.slots[slot]
    x = torch.as_tensor(np.asarray(value), dtype=torch.float32)
    if decl.stored == "mxfp8":
        mx = mxfp8.encode(x)
        return HeldQuantised(decl.name, mxfp8.decode(*mx), "mxfp8", {"codes": mx.codes, "scale": mx.scale})
    if decl.stored == "nvfp4":
        nv = nvfp4.encode(x)
        stored = {**nv._asdict(), "input_global_scale": torch.tensor([twin.INPUT_GLOBAL_SCALE])}
        return HeldQuantised(decl.name, nvfp4.decode(*nv), "nvfp4", stored)
    return Held(decl.name, x.to(getattr(torch, str(decl.stored))))


def _cache(owner: Session, run: Run, grid: torch.dtype, where: str) -> KVCache:
    """Pages with the arrays of the case: poisoned, then written by the owner's kernels where there is a value."""
    case = run.case
    cache = owner.kv_layout(kv_spec(case, run.formats)).allocate(len(next(iter(case.state.values()))))
    cache.poison(range(cache.pages))
    device, dtype = owner.device, owner.dtypes["model"]
    state = {key: on_grid(value, grid).double().numpy() for key, value in case.state.items()}
    for kinds, spec in ((("k", "v"), ops.kv_write), (("index",), ops.index_write)):
        arrays = [state[0, kind] for kind in kinds if (0, kind) in state]
        if not arrays:
            continue
        rows = [np.moveaxis(x, -2, 1).reshape(x.shape[0] * x.shape[-2], -1, x.shape[-1]) for x in arrays]
        slots = np.flatnonzero(~np.isnan(rows[0]).all((1, 2)))
        shape = ("T", *rows[0].shape[1:])
        x_ThD = [torch.as_tensor(x[slots]).to(device, dtype) for x in rows]
        data = [x_ThD[0], *(x.flatten(1) for x in x_ThD[1:]), torch.as_tensor(slots).to(device)]
        types: list[Any] = [StateType("kv", *run.formats), TensorType(shape, "T,h,D", "model")]
        if len(x_ThD) > 1:
            types.append(TensorType(("T", shape[1] * shape[2]), "T,C", "model"))
        types.append(TensorType(("T",), "T", "int64"))
        attrs = {"layer": 0}
        op = OpInstance(f"fill {spec.name}", spec, attrs, tuple(types), spec.types(attrs, types))
        found = owner.kernel(op, replace(step_of(run.spec, case), tokens=max(1, len(slots))))
        if isinstance(found, Refusal):
            raise ContractViolation(
                "arithmetic", f"has pages and no {spec.name}: {found.reason}", where=where, expected="a kernel"
            )
        space = Workspace(found.workspace_bytes, device)
        found.run([cache], [cache, *data], None, space.tensor)
    for kind, got in _pages(cache, case).items():
        form = run.formats[kind == "index"]
        given = torch.as_tensor(state[0, kind]).to(dtype).double().numpy()
        if not np.array_equal(np.float64(got), intervals.stored(form, given), equal_nan=True):
            raise ContractViolation(
                "arithmetic",
                f"'{kind}' in pages is not what {'index_write' if kind == 'index' else 'kv_write'} was given",
                where=where,
                expected=f"the values in {form}, NaN where a poisoned page was not written",
            )
    return cache


def _narrow(layout: str) -> tuple[int, ...]:
    return tuple(i for i, axis in enumerate(layout.split(",")) if axis in ("T", "S", "R", "P"))


def _pages(cache: KVCache, case: Case) -> dict[str, Any]:
    """What the pages hold, decoded, by kind; cases have one layer."""
    read: Sequence[Mapping[str, torch.Tensor]] = [cache.read(0, page) for page in range(cache.pages)]
    return {kind: np.stack([_native(page[kind]) for page in read]) for _, kind in case.state}


def _state(evidence: Evidence, when: str) -> State:
    found = {name.split("/")[1]: v for name, v in evidence.arrays.items() if name.startswith(f"{when}/")}
    return {(0, kind): np.asarray(value, np.float64) for kind, value in found.items()}
