"""The body of one fused op instance, to be run part by part: by a test, by the conformance suite, as a fallback."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from m31.errors import GraphError
from m31.formats.transforms import Loss, worst
from m31.graph.plan import Kernel, RunKernel, WeightHandle
from m31.graph.trace import ModelGraph, OpInstance, infer
from m31.ops import StateType, TensorType, WeightDecl
from m31.ops.body import FusedOp


@dataclass(frozen=True, eq=False)
class Unfused:
    """The body of one instance, typed, its attributes bound.

    Attributes:
        op: the instance of the fused op.
        graph: the body. Its placeholders are called like the fused op's inputs; `graph.output` is the first output.
        inputs: data and state inputs, in the order in which a kernel of `op` takes them.
        outputs: the values of `graph` that a kernel of `op` writes, in its order.
    """

    op: OpInstance
    graph: ModelGraph
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    def argument(self, part: OpInstance) -> str:
        """Which weight argument of the fused op a part takes."""
        return next(arg for arg, decl in self.op.decls.items() if decl is part.weights)


def unfused(op: OpInstance) -> Unfused:
    """The body of a fused instance as a graph of its parts.

    Raises:
        GraphError: the op is not a fused one.
    """
    spec = op.spec
    if not isinstance(spec, FusedOp):
        raise GraphError(f"op '{spec.name}' has no body", where=f"node {op.name}", expected="a fused op")
    graph = fx.Graph()
    tracer = fx.proxy.GraphAppendingTracer(graph)
    inputs = []
    for arg, value in zip(spec.inputs, op.inputs, strict=True):
        node = graph.placeholder(arg.name)
        node.meta["type"] = value
        inputs.append(fx.Proxy(node, tracer))
    made = spec.body(*inputs, **op.attrs)
    outputs = tuple(value.node for value in (made if isinstance(made, tuple) else (made,)))
    graph.output(outputs)
    names = {proxy.node.name: value for proxy, value in zip(inputs, op.inputs, strict=True)}
    flowing = tuple(name for name, value in names.items() if not isinstance(value, WeightDecl))
    return Unfused(op, infer(graph), flowing, tuple(node.name for node in outputs))


class PartHandles:
    """The prepared weights of the parts of a fused op, where its body is run instead: a `WeightHandle` of the instance.

    Attributes:
        parts: by weight argument.
        layout_id: that of every part.
    """

    def __init__(self, parts: Mapping[str, WeightHandle]) -> None:
        self.parts = parts
        self.layout_id = "+".join(f"{arg}={handle.layout_id}" for arg, handle in parts.items())

    @property
    def losses(self) -> Mapping[str, Loss]:
        """See `WeightHandle.losses`: of each transform the worst part."""
        found = [handle.losses for handle in self.parts.values()]
        names = {name: None for losses in found for name in losses}
        return {name: worst([losses[name] for losses in found if name in losses]) for name in names}

    @property
    def in_place(self) -> frozenset[str]:
        """See `WeightHandle.in_place`."""
        return frozenset(self._slots({arg: handle.in_place for arg, handle in self.parts.items()}))

    def dequantise(self) -> Mapping[str, torch.Tensor]:
        """See `WeightHandle.dequantise`."""
        values = {arg: handle.dequantise() for arg, handle in self.parts.items()}
        return _Lazily({slot: (values[arg], own) for slot, (arg, own) in self._slots(values).items()})

    def _slots(self, values: Mapping[str, Iterable[str]]) -> dict[str, tuple[str, str]]:
        """Slot of the fused instance (`OpInstance.slots`) -> weight argument and the part's own slot."""
        several = len(values) > 1
        return {f"{arg}.{own}" if several else own: (arg, own) for arg, slots in values.items() for own in slots}


class _Lazily(Mapping[str, torch.Tensor]):
    """Values of several mappings under other names, read when they are asked for."""

    def __init__(self, places: Mapping[str, tuple[Mapping[str, torch.Tensor], str]]) -> None:
        self._places = places

    def __getitem__(self, name: str) -> torch.Tensor:
        values, key = self._places[name]
        return values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


def prepare_parts(
    body: Unfused, slots: Mapping[str, Any], prepare: Callable[[OpInstance, Mapping[str, Any]], WeightHandle]
) -> PartHandles:
    """Prepare the weights of every part.

    Args:
        body: of the fused instance.
        slots: its weights, called as in `OpInstance.slots`.
        prepare: how a session prepares the weights of one op.
    """
    several = len(body.op.decls) > 1
    handles: dict[str, WeightHandle] = {}
    for call in body.graph.calls:
        if call.op.weights is not None:
            arg = body.argument(call.op)
            own = {slot: slots[f"{arg}.{slot}" if several else slot] for slot in call.op.slots}
            handles[arg] = prepare(call.op, own)
    return PartHandles(handles)


def compose(
    body: Unfused, kernels: Mapping[str, Kernel], dtypes: Mapping[str, torch.dtype], device: torch.device
) -> RunKernel:
    """The kernels of the parts, run one after the other in the place of a kernel of the fused op.

    Interior values are allocated on each run, at the step's real size: this is for comparing and for falling back.

    Args:
        body: of the fused instance.
        kernels: by name of the part's instance, see `OpInstance.name`.
        dtypes: the session's dtype of each declared one.
        device: of the interior values.

    Returns:
        A `run(outs, ins, weights, workspace)` whose weights are the `PartHandles` of the instance and whose workspace
        is as large as that of the most demanding part.
    """
    graph = body.graph
    line = [
        (call, kernels[call.op.name].run, body.argument(call.op) if call.op.weights is not None else None)
        for call in graph.calls
    ]

    def run(outs: Sequence[Any], ins: Sequence[Any], weights: PartHandles | None, workspace: Any) -> None:
        values: dict[str, Any] = dict(zip(body.inputs, ins, strict=True))
        sizes: dict[str, int] = {}
        for name, tensor in values.items():
            value = graph.types[name]
            if isinstance(value, TensorType):
                sizes |= {d: n for d, n in zip(value.shape, tensor.shape, strict=True) if isinstance(d, str)}
        values.update(zip(body.outputs, outs, strict=True))
        for call, kernel, argument in line:
            for name, value in zip(call.writes, call.op.outputs, strict=True):
                if isinstance(value, StateType):
                    values[name] = next(values[r] for r in call.reads if graph.types[r] == value)
                elif isinstance(value, TensorType) and name not in values:
                    shape = [sizes[d] if isinstance(d, str) else d for d in value.shape]
                    values[name] = torch.empty(shape, dtype=dtypes[value.dtype], device=device)
            handle = weights.parts[argument] if weights is not None and argument is not None else None
            kernel([values[n] for n in call.writes], [values[n] for n in call.reads], handle, workspace)

    return run
