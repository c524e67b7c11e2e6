"""Trace the model once into a torch.fx graph and check every edge of it (DESIGN.md §6).

Placeholders are the step's buffers, the cache and the weights; every other node is a call of a declared op. `infer`
gives each node its type from the shape functions, so a graph that exists is a graph whose shapes and layouts agree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from m31.config import Text
from m31.errors import GraphError, OpRefused
from m31.graph.model import Declare, Step, text_model
from m31.graph.rounding import NO_ROUNDING, Rounding
from m31.ops import Attrs, OpSpec, StateType, TensorDecl, TensorType, ValueType, WeightDecl

STEP_INPUTS: dict[str, TensorType] = {
    "tokens": TensorType(("T",), "T", "int64"),
    "positions": TensorType(("T",), "T", "int64"),
    "cu_q": TensorType(("S+1",), "S", "int64"),
    "seq_lens": TensorType(("S",), "S", "int64"),
    "slot_map": TensorType(("T",), "T", "int64"),
    "page_table": TensorType(("S", "P"), "S,P", "int64"),
    "out_rows": TensorType(("R",), "R", "int64"),
}


@dataclass(frozen=True, eq=False)
class OpInstance:
    """One op of one graph, as a backend sees it when it binds."""

    name: str  # unique in the graph
    spec: OpSpec
    attrs: Attrs
    inputs: tuple[ValueType, ...]
    outputs: tuple[ValueType, ...]

    @property
    def decls(self) -> dict[str, WeightDecl]:
        """Weights by the argument that takes them; a fused op may have several."""
        given = zip(self.spec.inputs, self.inputs, strict=True)
        return {arg.name: value for arg, value in given if isinstance(value, WeightDecl)}

    @property
    def slots(self) -> dict[str, TensorDecl]:
        """All weight tensors, as `prepare` gets them: `<slot>` of a single weight, `<argument>.<slot>` of several."""
        decls = self.decls
        if len(decls) == 1:
            return dict(next(iter(decls.values())).slots)
        return {f"{arg}.{slot}": tensor for arg, decl in decls.items() for slot, tensor in decl.slots.items()}

    @property
    def weights(self) -> WeightDecl | None:
        """The op's weights as one, if it has any: several are called after the op and the first of them."""
        decls = list(self.decls.values())
        if len(decls) < 2:
            return decls[0] if decls else None
        return WeightDecl(f"{self.spec.name}:{decls[0].name}", self.slots)


@dataclass(frozen=True, eq=False)
class Call:
    """One step of the straight line: an op and the names of the values that it reads and writes."""

    op: OpInstance
    reads: tuple[str, ...]  # data and state values, without weights
    writes: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Adaptation:
    """What an adapter changed of a graph (`m31.graph.adapt`).

    Attributes:
        base: the graph without it; what was not changed has the same names there.
        nodes: names of the products in `base` that have an adapter.
    """

    base: ModelGraph
    nodes: frozenset[str]


@dataclass(frozen=True, eq=False)
class ModelGraph:
    """The traced model. `output` names the logits, `fx` is the graph that passes work on.

    `extras` are further outputs by what they are, such as `taps`: a plan keeps their values until its next run, and
    gives them by `ExtraOutputs.extra`. `adaptation` is there before the fuse pass, if an adapter is.
    """

    fx: fx.Graph
    calls: tuple[Call, ...]
    types: dict[str, ValueType]  # every value
    output: str
    extras: Mapping[str, str] = field(default_factory=dict)
    adaptation: Adaptation | None = None

    @property
    def weights(self) -> dict[str, WeightDecl]:
        """Every weight of the model by name."""
        return {c.op.weights.name: c.op.weights for c in self.calls if c.op.weights is not None}

    def tensors(self) -> Iterator[TensorDecl]:
        """Every logical weight tensor of the model."""
        for decl in self.weights.values():
            yield from decl.slots.values()

    def meta_tensors(self) -> dict[str, torch.Tensor]:
        """All weights on the meta device: shapes without storage, to count and to check."""
        return {t.name: torch.empty(t.shape, device="meta") for t in self.tensors()}


class _Declare:
    """Turns weight declarations into placeholders; a name may be used once."""

    def __init__(self, graph: fx.Graph, tracer: fx.proxy.TracerBase, stored: Stored | None) -> None:
        self.graph, self.tracer, self.stored = graph, tracer, stored
        self.seen: set[str] = set()

    def _placeholder(self, decl: WeightDecl) -> Any:
        if decl.name in self.seen:
            raise GraphError(f"weight '{decl.name}' is declared twice")
        self.seen.add(decl.name)
        return _placeholder(self.graph, self.tracer, f"w.{decl.name}", decl)

    def matrix(self, name: str, out: int, in_: int, out_axis: str | None, in_axis: str | None) -> Any:
        """See `m31.graph.model.Declare`."""
        return self.group(name, {"weight": (f"{name}.weight", (out, in_), (out_axis, in_axis))})

    def vector(self, name: str, size: int) -> Any:
        """See `m31.graph.model.Declare`."""
        return self.group(name, {"weight": (f"{name}.weight", (size,), (None,))})

    def group(self, name: str, slots: dict[str, tuple[str, tuple[int, ...], tuple[str | None, ...]]]) -> Any:
        """See `m31.graph.model.Declare`."""
        decls = {
            slot: TensorDecl(*parts, stored=self.stored(parts[0]) if self.stored else None)
            for slot, parts in slots.items()
        }
        return self._placeholder(WeightDecl(name, decls))


def _placeholder(graph: fx.Graph, tracer: fx.proxy.TracerBase, name: str, value: ValueType) -> fx.Proxy:
    node = graph.placeholder(name)
    node.meta["type"] = value
    return fx.Proxy(node, tracer)


Stored = Callable[[str], str]


def trace(
    text: Text,
    rounding: Rounding = NO_ROUNDING,
    stored: Stored | None = None,
    pages: tuple[str, str] = ("", ""),
    taps: Sequence[int] = (),
) -> ModelGraph:
    """The checked graph of a text model.

    Args:
        text: the description.
        rounding: which values are rounded to BF16 because a format or an arithmetic quantises them. None are when
            nothing is quantised, so that the exact graph has no node for it.
        pages: formats of K and V, and of index keys (`StateType`); empty without pages.
        stored: how the checkpoint stores a tensor, by name (`TensorDecl.stored`); None without a checkpoint.
        taps: layers, ascending, whose residual streams after the layer, side by side, are the further output `taps`
            [T, len(taps) * hidden_size] (MODEL.md §5.1). Without any the graph has no node for them.

    Raises:
        GraphError: the description is inconsistent.
        OpRefused: an op's inputs do not fit its declaration.
    """

    def build(step: Step, kv: Any, weights: Declare, given: Mapping[str, Any]) -> Built:
        logits, after, tapped = text_model(text, step, kv, weights, rounding, taps)
        return logits, after, {} if tapped is None else {"taps": tapped}

    return record(build, stored=stored, pages=pages)


Built = tuple[Any, Any, Mapping[str, Any]]  # the output, the cache after the step, further outputs by name


def record(
    build: Callable[[Step, Any, Declare, Mapping[str, Any]], Built],
    *,
    stored: Stored | None,
    pages: tuple[str, str],
    inputs: Mapping[str, TensorType] | None = None,
) -> ModelGraph:
    """The checked graph of what `build` says over the step's buffers, the cache, weights and further inputs.

    Args:
        build: `build(step, kv, weights, given)`, called once.
        stored, pages: see `trace`.
        inputs: name -> type of what the graph takes besides; `given` has them by name.
    """
    graph = fx.Graph()
    tracer = fx.proxy.GraphAppendingTracer(graph)
    step = Step(**{name: _placeholder(graph, tracer, name, t) for name, t in STEP_INPUTS.items()})
    kv = _placeholder(graph, tracer, "kv", StateType("kv", *pages))
    given = {name: _placeholder(graph, tracer, name, t) for name, t in (inputs or {}).items()}
    output, after, extras = build(step, kv, _Declare(graph, tracer, stored), given)
    more = ({name: value.node for name, value in extras.items()},) if extras else ()
    graph.output((output.node, after.node, *more))
    return infer(graph)


def infer(graph: fx.Graph) -> ModelGraph:
    """Give every node its type and flatten the graph to calls. Also run after each pass that rewrites `graph`."""
    types: dict[str, ValueType] = {}
    calls: list[Call] = []
    output, extras = "", dict[str, str]()
    for node in graph.nodes:
        if node.op == "placeholder":
            types[node.name] = node.meta["type"]
        elif node.op == "output":
            output = node.args[0][0].name
            named = [more for more in node.args[0] if isinstance(more, dict)]
            extras = {name: value.name for more in named for name, value in more.items()}
        elif isinstance(node.target, OpSpec):
            calls.append(_call(node, types))
        elif node.name not in types:
            raise GraphError(f"node '{node.name}' is no call of a declared op", expected="ops of m31.ops only")
    return ModelGraph(graph, tuple(calls), types, output, extras)


def _call(node: fx.Node, types: dict[str, ValueType]) -> Call:
    spec: OpSpec = node.target  # type: ignore[assignment]
    args: list[fx.Node] = list(node.args)  # type: ignore[arg-type]
    given = [types[a.name] for a in args]
    try:
        outputs = spec.types(node.kwargs, given)
    except OpRefused as error:
        raise OpRefused(error.what, where=f"{error.where}, node {node.name}", expected=error.expected) from error
    names = [node.name] if len(outputs) == 1 else _items(node, len(outputs))
    types.update(zip(names, outputs, strict=True))
    reads = tuple(a.name for a, v in zip(args, given, strict=True) if not isinstance(v, WeightDecl))
    op = OpInstance(node.name, spec, dict(node.kwargs), tuple(given), outputs)
    return Call(op, reads, tuple(names))


def _items(node: fx.Node, count: int) -> list[str]:
    """Names of the getitem nodes of a call with several outputs."""
    found = {user.args[1]: user.name for user in node.users}
    if sorted(found) != list(range(count)):  # type: ignore[type-var]
        raise GraphError(f"node '{node.name}' has {count} outputs, the graph takes {sorted(map(str, found))}")
    return [found[i] for i in range(count)]
