"""The adapt pass: a traced graph with a low-rank adapter in it, said in ops that a backend sees like any other.

    linear        y = W x                 becomes   add(linear(x, W), linear(linear(x, A), B))
    lm_head       logits = W x            becomes   lora_logits(lm_head(x, W), linear(x, A) of the same rows, B)
    experts       with any matrix in it   becomes   lora_experts, with A and B among its slots

The weights of the base stay the inputs that they were. The scale of an adapter is in its B. Fused ops are declared by
their bodies, which do not contain these ops: where an adapter stands, a fusion does not match, and its parts run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import fx

from m31.errors import GraphError
from m31.graph.trace import Adaptation, ModelGraph, infer
from m31.ops import OpSpec, TensorDecl, WeightDecl, add, gather_rows, linear, lora_experts, lora_logits

A, B = "lora_A", "lora_B"


def adapt(graph: ModelGraph, ranks: Mapping[str, int], stored: str = "float32") -> ModelGraph:
    """A graph that computes with an adapter.

    Args:
        graph: a traced model, unfused and not spread; it is not changed.
        ranks: module (name of a weight without `.weight`, such as `model.layers.0.self_attn.q_proj`) -> rank of its
            adapter. Its tensors are called `<module>.lora_A.weight` and `<module>.lora_B.weight`.
        stored: see `TensorDecl.stored`, of these tensors.

    Raises:
        GraphError: a module is no linear layer of the graph, or a rank is not positive.
    """
    if not ranks:
        return graph
    for module, rank in ranks.items():
        if rank < 1:
            raise GraphError(f"rank {rank} for '{module}'", where="adapt pass", expected="1 or more")
    work = _Adapting(graph, dict(ranks), stored)
    adapted = infer(work.run())
    if work.left:
        raise GraphError(
            f"'{sorted(work.left)[0]}' has an adapter and is no linear layer of this graph ({len(work.left)} such)",
            where="adapt pass",
            expected="projections, experts and lm_head of the model",
        )
    return replace(adapted, adaptation=Adaptation(graph, frozenset(work.changed)))


class _Adapting:
    """Copies a graph node by node."""

    def __init__(self, graph: ModelGraph, ranks: Mapping[str, int], stored: str) -> None:
        self.old, self.ranks, self.stored = graph.fx, ranks, stored
        self.left = set(ranks)
        self.new = fx.Graph()
        self.copies: dict[fx.Node, fx.Node] = {}
        self.changed: list[str] = []

    def run(self) -> fx.Graph:
        """The new graph, types not yet inferred."""
        for node in self.old.nodes:
            makers = {"linear": self._linear, "lm_head": self._head, "experts": self._experts}
            make = makers.get(node.target.name) if isinstance(node.target, OpSpec) else None
            made = make(node) if make is not None else None
            self.copies[node] = made if made is not None else self.new.node_copy(node, self.copies.__getitem__)
        return self.new

    def _linear(self, node: fx.Node) -> fx.Node | None:
        decl = _weight(node)
        if decl.name not in self.ranks:
            return None
        x_TC, base = self.copies[node.args[0]], self._base(node)  # type: ignore[index]
        a, b = self._pair(decl.name, decl.slots["weight"])
        low_TC = self._call(linear, (x_TC, a), f"{node.name}_lora_a")
        high_TC = self._call(linear, (low_TC, b), f"{node.name}_lora_b")
        return self._call(add, (base, high_TC), f"{node.name}_adapted")

    def _head(self, node: fx.Node) -> fx.Node | None:
        """A takes the rows before they were gathered: `linear` is an op on tokens, and A is small."""
        decl = _weight(node)
        if decl.name not in self.ranks:
            return None
        gathered: Any = node.args[0]
        if gathered.target is not gather_rows:
            raise GraphError(f"the input of '{node.name}' is no gather_rows", where="adapt pass")
        h_TC, rows = (self.copies[arg] for arg in gathered.args)
        base = self._base(node)
        a, b = self._pair(decl.name, decl.slots["weight"])
        low_TC = self._call(linear, (h_TC, a), f"{node.name}_lora_a")
        low_RC = self._call(gather_rows, (low_TC, rows), f"{node.name}_lora_rows")
        return self._call(lora_logits, (base, low_RC, b), f"{node.name}_adapted")

    def _experts(self, node: fx.Node) -> fx.Node | None:
        decl = _weight(node)
        slots = dict(decl.slots)
        for slot, tensor in decl.slots.items():
            module = tensor.name.removesuffix(".weight")
            if module in self.ranks:
                slots |= {f"{part}.{slot}": made for part, made in self._decls(module, tensor).items()}
        if len(slots) == len(decl.slots):
            return None
        self.changed.append(node.name)
        *data, before = (self.copies[arg] for arg in node.args)  # type: ignore[index]
        self.new.erase_node(before)  # its tensors are slots of the new weight
        weights = self._placeholder(WeightDecl(f"{decl.name}.lora", slots))
        return self.new.create_node(
            "call_function", lora_experts, (*data, weights), dict(node.kwargs), f"{node.name}_adapted"
        )

    def _base(self, node: fx.Node) -> fx.Node:
        self.changed.append(node.name)
        return self.new.node_copy(node, self.copies.__getitem__)

    def _pair(self, module: str, tensor: TensorDecl) -> tuple[fx.Node, fx.Node]:
        made = self._decls(module, tensor)
        a, b = (self._placeholder(WeightDecl(f"{module}.{part}", {"weight": made[part]})) for part in (A, B))
        return a, b

    def _decls(self, module: str, tensor: TensorDecl) -> dict[str, TensorDecl]:
        """A keeps the axis of the inputs and B that of the outputs, so that both are cut where W is."""
        self.left.discard(module)
        rank, (out, width), (out_axis, in_axis) = self.ranks[module], tensor.shape, tensor.axes
        return {
            A: TensorDecl(f"{module}.{A}.weight", (rank, width), (None, in_axis), self.stored),
            B: TensorDecl(f"{module}.{B}.weight", (out, rank), (out_axis, None), self.stored),
        }

    def _placeholder(self, decl: WeightDecl) -> fx.Node:
        node = self.new.placeholder(f"w.{decl.name}")
        node.meta["type"] = decl
        return node

    def _call(self, spec: OpSpec, args: tuple[fx.Node, ...], name: str) -> fx.Node:
        return self.new.create_node("call_function", spec, args, {}, name)


def _weight(node: fx.Node) -> WeightDecl:
    decl: WeightDecl = node.args[-1].meta["type"]  # type: ignore[union-attr]
    return decl
