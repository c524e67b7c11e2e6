"""Finding the body of a fused op in a traced graph.

A match is searched from the node of the body's anchor: backwards to what makes a value (one candidate), forwards to
what reads it (several). Attributes are bound as they are met. A complete match is then checked to be replaceable.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from m31.errors import GraphError
from m31.graph.trace import ModelGraph
from m31.ops import OpSpec, WeightDecl
from m31.ops.body import Body, FusedOp, Part, Ref


@dataclass(frozen=True, eq=False)
class Match:
    """One place of a graph where a body stands.

    Attributes:
        place: for messages, e.g. "layer 3".
        attrs: all attributes of the fused op.
        nodes: of the parts, and of the items of parts with several outputs; in order of the graph.
        sources: per input of the fused op, a node of the match and the position at which it reads that input.
        outputs: the node of each output.
    """

    place: str
    attrs: dict[str, Any]
    nodes: tuple[fx.Node, ...]
    sources: tuple[tuple[fx.Node, int], ...]
    outputs: tuple[fx.Node, ...]

    @property
    def inputs(self) -> tuple[fx.Node, ...]:
        """What the fused op reads, as the graph is now."""
        return tuple(node.args[at] for node, at in self.sources)  # type: ignore[misc]


@dataclass(frozen=True, eq=False)
class Miss:
    """An anchor around which the body does not stand.

    Attributes:
        place: as in `Match`.
        near: how close to a match the search came; larger is closer.
        reason: what stopped it there.
    """

    place: str
    near: tuple[int, int]
    reason: str


def find(spec: FusedOp, graph: ModelGraph) -> tuple[list[Match], list[Miss]]:
    """All places of a body, and the anchors that are none, both in order of the graph."""
    order = {node: i for i, node in enumerate(graph.fx.nodes)}
    forms = [(flags, _Form(spec, body)) for flags, body in spec.patterns()]
    taken: set[fx.Node] = set()
    matches: list[Match] = []
    misses: list[Miss] = []
    for anchor in order:
        if not (isinstance(anchor.target, OpSpec) and anchor.target.name == spec.anchor):
            continue
        place = _place(anchor, graph)
        search = _Search(order, taken, place)
        found = next((m for flags, form in forms if (m := search.match(form, flags, anchor)) is not None), None)
        if found is None:
            misses.append(Miss(place, search.near, search.reason))
        else:
            matches.append(found)
            taken.update(found.nodes)
    return matches, misses


def _place(node: fx.Node, graph: ModelGraph) -> str:
    """The layer of a node, from its attributes or its weights."""
    if "layer" in node.kwargs:
        return f"layer {node.kwargs['layer']}"
    for arg in node.all_input_nodes:
        value = graph.types[arg.name]
        if isinstance(value, WeightDecl):
            layer = re.search(r"\blayers\.(\d+)\.(.+)", value.name)
            return f"layer {layer[1]} ({layer[2]})" if layer else value.name
    return f"node {node.name}"


class _Form:
    """One form of a body, indexed by value."""

    def __init__(self, spec: FusedOp, body: Body) -> None:
        self.spec, self.body = spec, body
        self.maker = {value: part for part in body.parts for value in part.results}
        self.names = {value: out.name for value, out in zip(body.outputs, spec.outputs, strict=True)}
        self.anchor = next(part for part in body.parts if part.spec.name == spec.anchor)

    def source(self, parameter: str) -> tuple[Part, int]:
        """A part that reads a parameter, and where."""
        return next((p, at) for p in self.body.parts for at, value in enumerate(p.args) if value == parameter)


@dataclass(eq=False)
class _Bound:
    """A partial match."""

    parts: dict[str, fx.Node] = field(default_factory=dict)  # by first result of the part
    values: dict[str, fx.Node] = field(default_factory=dict)
    attrs: dict[str, Any] = field(default_factory=dict)

    def copy(self) -> _Bound:
        return _Bound(dict(self.parts), dict(self.values), dict(self.attrs))

    def has(self, part: Part) -> bool:
        return part.results[0] in self.parts


# How much a failure says. A form of the body that does not fit here, or a chain that was taken for another one, fails
# where a part is missing; an attribute that differs, or a complete match that may not be replaced, is rarely chance.
_STRUCTURE, _ATTRIBUTE, _OBSTACLE = range(3)


class _Search:
    """The search around one anchor; remembers the failure that says most, and among such the one that came furthest."""

    def __init__(self, order: dict[fx.Node, int], taken: set[fx.Node], place: str) -> None:
        self.order, self.taken, self.place = order, taken, place
        self.near, self.reason = (-1, 0), ""

    def match(self, form: _Form, flags: dict[str, bool], anchor: fx.Node) -> Match | None:
        """The match of one form of the body, if it stands here."""
        start = self._bind(form, _Bound(), form.anchor, anchor)
        bound = None if start is None else self._extend(form, start)
        if bound is None:
            return None
        nodes = {*bound.parts.values(), *(bound.values[v] for v in form.maker)}
        sources = [form.source(parameter) for parameter in form.body.parameters]
        return Match(
            self.place,
            {name: flags.get(name, bound.attrs.get(name)) for name in form.spec.attrs},
            tuple(sorted(nodes, key=self.order.__getitem__)),
            tuple((bound.parts[part.results[0]], at) for part, at in sources),
            tuple(bound.values[value] for value in form.body.outputs),
        )

    def _fail(self, bound: _Bound, kind: int, reason: str) -> None:
        if (kind, len(bound.parts)) > self.near:
            self.near, self.reason = (kind, len(bound.parts)), reason

    def _extend(self, form: _Form, bound: _Bound) -> _Bound | None:
        """Bind the remaining parts, one after the other, going back where a choice was wrong."""
        if len(bound.parts) == len(form.body.parts):
            reason = self._obstacle(form, bound)
            if reason is not None:
                self._fail(bound, _OBSTACLE, reason)
            return bound if reason is None else None
        part, candidates = self._next(form, bound)
        for node in candidates:
            further = self._bind(form, bound, part, node)
            done = None if further is None else self._extend(form, further)
            if done is not None:
                return done
        if not candidates:
            self._fail(bound, _STRUCTURE, f"no {part.spec.name} reads what it should")
        return None

    def _next(self, form: _Form, bound: _Bound) -> tuple[Part, list[fx.Node]]:
        """The part with the fewest candidates, and those."""
        for value, node in bound.values.items():
            part = form.maker.get(value)
            if part is not None and not bound.has(part):
                return part, [_producer(node)]
        readers = [
            (len(bound.values[value].users), i, at)
            for i, part in enumerate(form.body.parts)
            if not bound.has(part)
            for at, value in enumerate(part.args)
            if value in bound.values
        ]
        if not readers:
            raise GraphError("the body is not connected", where=f"op {form.spec.name}")
        _, i, at = min(readers)
        part = form.body.parts[i]
        source = bound.values[part.args[at]]
        users = sorted(source.users, key=self.order.__getitem__)
        return part, [user for user in users if user.target is part.spec]

    def _bind(self, form: _Form, bound: _Bound, part: Part, node: fx.Node) -> _Bound | None:
        """The partial match with one part more; None, with the reason noted, if the node is not that part."""
        for kind, clash in ((_STRUCTURE, self._misfit), (_ATTRIBUTE, self._differs), (_STRUCTURE, self._elsewhere)):
            wrong = clash(form, bound, part, node)
            if wrong is not None:
                self._fail(bound, kind, wrong)
                return None
        further = bound.copy()
        further.parts[part.results[0]] = node
        further.values.update(zip(part.args, _args(node), strict=True))
        further.values.update(zip(part.results, _results(node), strict=True))
        further.attrs.update((ref.name, node.kwargs[a]) for a, ref in part.attrs.items() if isinstance(ref, Ref))
        return further

    def _misfit(self, form: _Form, bound: _Bound, part: Part, node: fx.Node) -> str | None:
        if node.target is not part.spec:
            return f"{node.name} is where {part.spec.name} was expected"
        if node in bound.parts.values() or node in self.taken:
            return f"{node.name} already has another role"
        return None

    def _differs(self, form: _Form, bound: _Bound, part: Part, node: fx.Node) -> str | None:
        attrs = dict(bound.attrs)
        for name, value in part.attrs.items():
            wanted = attrs.setdefault(value.name, node.kwargs[name]) if isinstance(value, Ref) else value
            if node.kwargs[name] != wanted:
                return f"{name} of {node.name} is {node.kwargs[name]!r}, expected {wanted!r}"
        return None

    def _elsewhere(self, form: _Form, bound: _Bound, part: Part, node: fx.Node) -> str | None:
        """A value that is not the one which the rest of the match has to do with, or not read as it should be."""
        made = _results(node)
        values = dict(bound.values)
        for value, got in zip((*part.args, *part.results), (*_args(node), *made), strict=True):
            if values.setdefault(value, got) is not got:
                return f"{node.name} has {got.name} in the place of {values[value].name}"
        for value, got in zip(part.results, made, strict=True):
            output = form.names.get(value, "")
            allowed = form.spec.readers.get(output)
            if allowed is None:
                continue
            readers = [user.target.name if isinstance(user.target, OpSpec) else user.name for user in got.users]
            if not readers or not set(readers) <= set(allowed):
                return f"'{output}' would be {got.name}, which is read by {sorted(readers)}, expected {list(allowed)}"
        return None

    def _obstacle(self, form: _Form, bound: _Bound) -> str | None:
        """What keeps a complete match from being replaced by one node."""
        inside = {*bound.parts.values(), *(bound.values[v] for v in form.maker)}
        last = max(self.order[node] for node in inside)
        for value in form.maker:
            for user in bound.values[value].users:
                if user in inside:
                    continue
                if value not in form.body.outputs:
                    return f"{bound.values[value].name}, an interior value, is read by {user.name}"
                if self.order[user] < last:
                    return f"{bound.values[value].name} is read by {user.name} before the last part"
        for arg in form.spec.inputs:
            node = bound.values[arg.name]
            others = [user for user in node.users if user not in inside]
            if arg.kind == "weight" and len(node.users) != 1:
                return f"weight {node.name} has {len(node.users)} readers, expected one"
            if arg.kind == "state":
                first = min(self.order[user] for user in node.users if user in inside)
                late = [user.name for user in others if self.order[user] > first]
                if late:
                    return f"{node.name}, the state before the writes, is read by {late[0]} after the first of them"
        return None


def _producer(node: fx.Node) -> fx.Node:
    return node.args[0] if node.target is operator.getitem else node  # type: ignore[return-value]


def _args(node: fx.Node) -> tuple[fx.Node, ...]:
    return node.args  # type: ignore[return-value]


def _results(node: fx.Node) -> tuple[fx.Node, ...]:
    """The values that a node makes: itself, or its items in order."""
    spec = node.target
    if not isinstance(spec, OpSpec) or len(spec.outputs) == 1:
        return (node,)
    return tuple(sorted(node.users, key=_index))


def _index(item: fx.Node) -> int:
    return item.args[1]  # type: ignore[return-value]


def nearest(misses: Sequence[Miss]) -> list[Miss]:
    """The misses that came closest to a match: anchors that are no place at all come less far."""
    best = max((miss.near for miss in misses), default=None)
    return [miss for miss in misses if miss.near == best]
