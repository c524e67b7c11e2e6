"""The fuse pass (DESIGN.md §6): the bodies of fused ops become single nodes, in a copy of the graph."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import fx

from m31.errors import GraphError
from m31.graph.match import Match, Miss, find, nearest
from m31.graph.trace import ModelGraph, OpInstance, infer
from m31.ops.body import FusedOp, Layers
from m31.ops.fused import FUSED

_SHOWN = 4  # misses in a message


@dataclass(frozen=True)
class Fusion:
    """What became of one fused op.

    Attributes:
        name: of the fused op.
        expected: in how many places the graph has its body; always equal to `matched`.
        matched: in how many places it was found: `fused` and `declined` ones.
        fused: how many were replaced.
        declined: the places that were left as they are, because `accepts` said no.
        adapted: the places of the model that are no body any more, because an adapter stands in them; they are left as
            they are and are not among `expected`.
    """

    name: str
    expected: int
    matched: int
    fused: int
    declined: tuple[str, ...]
    adapted: tuple[str, ...] = ()

    def __str__(self) -> str:
        more = f", {len(self.adapted)} more with an adapter" if self.adapted else ""
        return f"{self.name} {self.fused} of {self.expected}{more}"


@dataclass(frozen=True)
class FusionReport:
    """What a fuse pass did, in the order in which the fusions were wanted."""

    fusions: tuple[Fusion, ...]

    def __getitem__(self, name: str) -> Fusion:
        return next(fusion for fusion in self.fusions if fusion.name == name)

    def __str__(self) -> str:
        return ", ".join(map(str, self.fusions)) or "none"


def fuse(
    graph: ModelGraph, wanted: Sequence[str], accepts: Callable[[OpInstance], bool], *, text: Layers
) -> tuple[ModelGraph, FusionReport]:
    """Replace the bodies of fused ops by single nodes.

    Args:
        graph: a traced model; it is not changed.
        wanted: names of `m31.ops.fused.FUSED`, in the order in which they are tried.
        accepts: whether this instance of a fused op is to be used, e.g. whether a backend has a kernel for it at the
            step class in question. Declined places keep their parts and are counted.
        text: the description that the graph was traced from: it says how often each fusion must match.

    Returns:
        The new graph and what was done.

    Raises:
        GraphError: an unknown fused op, or one that did not match exactly as often as the model has its body: names
            the first place that was missed, and why. There is no fusion that is skipped in silence.
    """
    work = _copy(graph.fx)
    done: list[Fusion] = []
    for name in wanted:
        if name not in FUSED:
            raise GraphError(f"there is no fused op '{name}'", expected=" or ".join(FUSED))
        spec = FUSED[name]
        model = infer(work)
        matches, misses = find(spec, model)
        adapted = _adapted(spec, graph)
        expected = spec.expected(text) - len(adapted)
        if len(matches) != expected:
            raise _mismatch(spec, len(matches), expected, misses)
        # All instances are made before the first replacement, while every node still has its type.
        found = [(match, _instance(spec, match, model, f"{name}_{i}")) for i, match in enumerate(matches)]
        declined = []
        for match, op in found:
            if accepts(op):
                _replace(work, spec, match, op.name)
            else:
                declined.append(match.place)
        done.append(Fusion(name, expected, len(matches), len(matches) - len(declined), tuple(declined), adapted))
    work.lint()
    return infer(work), FusionReport(tuple(done))


def _adapted(spec: FusedOp, graph: ModelGraph) -> tuple[str, ...]:
    """Places of a body in the graph without its adapter that contain a product which has one."""
    if graph.adaptation is None:
        return ()
    matches, _ = find(spec, graph.adaptation.base)
    return tuple(m.place for m in matches if any(node.name in graph.adaptation.nodes for node in m.nodes))


def _mismatch(spec: FusedOp, matched: int, expected: int, misses: Sequence[Miss]) -> GraphError:
    near = nearest(misses)
    if matched > expected:
        why = "the description is of another model"
    elif not near:
        why = f"the graph has no more {spec.anchor}"
    else:
        # If they are more than are missing, some are no places of the body, and nothing tells which.
        shown = near[:1] if len(near) <= expected - matched else near[:_SHOWN]
        why = ", ".join(f"missed {miss.place}: {miss.reason}" for miss in shown)
    return GraphError(
        f"fusion '{spec.name}' matched {matched} of {expected} places; {why}",
        fix="the graph and the body that declares the op differ: mend one of them, or do not ask for the fusion",
    )


def _copy(graph: fx.Graph) -> fx.Graph:
    """The same nodes, names and types in a graph of its own."""
    out = fx.Graph()
    values: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        values[node] = out.node_copy(node, lambda old: values[old])
    return out


def _instance(spec: FusedOp, match: Match, model: ModelGraph, name: str) -> OpInstance:
    inputs = tuple(model.types[node.name] for node in match.inputs)
    return OpInstance(name, spec, match.attrs, inputs, spec.types(match.attrs, inputs))


def _replace(graph: fx.Graph, spec: FusedOp, match: Match, name: str) -> None:
    """One node in the place of the last node of the match: its inputs are made by then, nothing reads it before."""
    inside = set(match.nodes)
    with graph.inserting_after(match.nodes[-1]):
        node = graph.create_node("call_function", spec, match.inputs, match.attrs, name)
    items, at = [node], node
    if len(match.outputs) > 1:
        items = []
        for i in range(len(match.outputs)):
            with graph.inserting_after(at):
                at = graph.create_node(
                    "call_function", operator.getitem, (node, i), name=f"{name}_{spec.outputs[i].name}"
                )
            items.append(at)
    for old, new in zip(match.outputs, items, strict=True):
        old.replace_all_uses_with(new, delete_user_cb=lambda user: user not in inside)
    for old in reversed(match.nodes):
        graph.erase_node(old)
