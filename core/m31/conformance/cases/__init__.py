"""Cases of every op as a session can be asked for them: the op's own, and some of sizes that real kernels ask for."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from m31 import ops
from m31.conformance.cases.attention import ATTENTION
from m31.conformance.cases.found import FOUND
from m31.conformance.cases.matrices import MATRICES
from m31.conformance.cases.plain import PLAIN
from m31.conformance.cases.planned import Planned, attributes_of, last_axes
from m31.formats import mxfp8, nvfp4
from m31.graph import OpInstance, StepClass
from m31.ops import Case, OpSpec, StateType, TensorDecl, TensorType, WeightDecl
from m31.ops.fused import FUSED

STORED = ("float32", "bfloat16", "mxfp8", "nvfp4")
_SYMBOLS = {"T": "T", "S": "S", "R": "R", "P": "P"}
_LITTLE, _FEW = 0.04, 17  # seconds and tokens
_BLOCKS = {"mxfp8": mxfp8.GROUP, "nvfp4": nvfp4.GROUP}
_QUANTISED = {
    "mxfp8": ("linear", "experts", "lora_experts", "experts_shared", "qkv_insert", "qkv_insert_dense"),
    "nvfp4": ("experts", "lora_experts", "experts_shared"),
}


def planned(spec: OpSpec) -> Iterator[Planned]:
    """All cases of an op: its own, then those of this package. Nothing of the latter is made before it is built."""
    for case in spec.cases():
        matrices, channels = last_axes(case, spec)
        yield Planned(case.id, partial(_own, spec, case.id), attributes_of(spec, case), matrices, channels, own=True)
    for table in (MATRICES, ATTENTION, PLAIN, FOUND):
        yield from table.get(spec.name, ())


def _own(spec: OpSpec, name: str) -> Case:
    return next(case for case in spec.cases() if case.id == name)


def cases_of(spec: OpSpec) -> Iterator[Case]:
    """The op's own cases, and those of this package that cost little: what a check by hand runs. L1 runs all."""
    yield from spec.cases()
    for table in (MATRICES, ATTENTION, PLAIN, FOUND):
        for plan in table.get(spec.name, ()):
            if plan.seconds <= _LITTLE and plan.attributes.get("tokens", 0) <= _FEW:
                yield plan.build()


def specs() -> dict[str, OpSpec]:
    """Every op by name: of the text model, of the draft head, of adapters, fused ones."""
    return {**ops.ALL, **ops.DRAFT, **ops.ADAPTER, **FUSED}


def weight_of(case: Case, name: str) -> dict[str, Any]:
    """One weight argument of a case, by its own slots."""
    value = case.inputs[name]
    return dict(value) if isinstance(value, dict) else {"weight": value}


def weights_of(case: Case, spec: OpSpec) -> dict[str, Any]:
    """All weights of a case by slot, as `OpInstance.slots` calls them."""
    names = [arg.name for arg in spec.inputs if arg.kind == "weight"]
    if len(names) == 1:
        return weight_of(case, names[0])
    return {f"{name}.{slot}": value for name in names for slot, value in weight_of(case, name).items()}


def storable(spec: OpSpec, matrices: tuple[int, ...] | None) -> list[str]:
    """How the weights of a case can be stored, in the order of `STORED`; "" for an op without weights.

    Args:
        matrices: the last axis of each matrix among the weights; None if there are no weights.
    """
    if matrices is None:
        return [""]
    forms = list(STORED[:2])
    for name, group in _BLOCKS.items():
        if spec.name in _QUANTISED[name] and matrices and all(width % group == 0 for width in matrices):
            forms.append(name)
    return forms


def stored_as(spec: OpSpec, arg: str, slot: str, shape: tuple[int, ...], stored: str) -> str:
    """How one tensor is stored where a case says `stored`: a block format is for matrices, NVFP4 for routed experts,
    beside which a checkpoint has MXFP8 projections and BF16 norms (MODEL.md §3.7), and adapters are plain."""
    if stored not in _BLOCKS:
        return stored
    if len(shape) != 2 or slot.startswith("lora_"):
        return "bfloat16"
    return "mxfp8" if stored == "nvfp4" and spec.name == "experts_shared" and arg != "routed" else stored


def instance(spec: OpSpec, case: Case, stored: str, formats: tuple[str, str]) -> OpInstance:
    """The op of a case, as a graph would hold it.

    Args:
        stored: of its weights.
        formats: of keys and values, and of index keys, in pages.
    """
    given: list[Any] = []
    for arg in spec.inputs:
        if arg.kind == "state":
            given.append(StateType("kv", *formats))
        elif arg.kind == "weight":
            decls = {
                slot: TensorDecl(
                    f"{case.id}.{arg.name}.{slot}",
                    np.shape(value),
                    (None,) * np.ndim(value),
                    stored=stored_as(spec, arg.name, slot, np.shape(value), stored),
                )
                for slot, value in weight_of(case, arg.name).items()
            }
            given.append(WeightDecl(f"{case.id}.{arg.name}", decls))
        else:
            shape = _symbolic(arg.layout, np.shape(case.inputs[arg.name]), arg.name)
            given.append(TensorType(shape, arg.layout, arg.dtype))
    return OpInstance(case.id, spec, case.attrs, tuple(given), spec.types(case.attrs, given))


def _symbolic(layout: str, shape: tuple[int, ...], name: str) -> tuple[int | str, ...]:
    """A case's shape with the step's symbols."""
    axes = layout.split(",")
    dims = tuple(_SYMBOLS.get(axis, n) for axis, n in zip(axes, shape, strict=True))
    return ("S+1",) if name == "cu_q" else dims


def sizes_of(spec: OpSpec, case: Case) -> dict[str, int]:
    """What the step's symbols are in a case."""
    sizes: dict[str, int] = {}
    for arg in spec.inputs:
        if arg.kind == "data" and arg.name != "cu_q":
            for axis, n in zip(arg.layout.split(","), np.shape(case.inputs[arg.name]), strict=True):
                if axis in _SYMBOLS:
                    sizes[axis] = int(n)
    return sizes | ({"S+1": sizes["S"] + 1} if "S" in sizes else {})


def step_of(spec: OpSpec, case: Case) -> StepClass:
    """A step class in which a case fits; capacities are powers of two, as the engine's are."""
    sizes = {"T": 1, "S": 1, "R": 1, "P": 1}
    for axis, n in sizes_of(spec, case).items():
        if axis in sizes:
            sizes[axis] = 1 << max(0, n - 1).bit_length()
    return StepClass(kind="mixed", q_len=0, tokens=sizes["T"], seqs=sizes["S"], rows=sizes["R"], pages=sizes["P"])


__all__ = [
    "STORED",
    "Planned",
    "attributes_of",
    "cases_of",
    "instance",
    "last_axes",
    "planned",
    "sizes_of",
    "specs",
    "step_of",
    "storable",
    "stored_as",
    "weight_of",
    "weights_of",
]
