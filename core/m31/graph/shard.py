"""The shard pass: the graph of one rank of a tensor-parallel world (DESIGN.md §6; MODEL.md §2.4, §8).

Every value of the full graph is, on a rank, one of three things: *whole*, the same on every rank; the rank's own part
*along* an axis of the model (heads, kv_heads, index_heads, ff, vocab); or *partial*, an addend of a sum over the ranks.
The pass says of each op what it takes and what it makes of it. Where a partial value is needed whole an `all_reduce`
follows it, and an `all_gather` follows the logits. An addition of two partial values is partial, so that routed and
shared experts are added first and reduced once.

Routed experts are cut along ff, each expert on every rank. (An axis of whole experts would need an op that skips the
choices of other ranks.)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from m31.config import Text
from m31.errors import GraphError
from m31.graph.placement import Part, heads_of, placement
from m31.graph.trace import ModelGraph, infer
from m31.ops import OpSpec, TensorDecl, WeightDecl, all_gather, all_reduce
from m31.parallel import Shard

WHOLE, PARTIAL, SAME = "whole", "partial", "same"  # SAME: as the op's first data input, if that is not partial


@dataclass(frozen=True, slots=True)
class _Rule:
    """What an op takes, data and state inputs in order, and what it makes of them."""

    inputs: tuple[str, ...]
    output: str


_CONTEXT = (WHOLE,) * 4
_RULES = {
    "embedding": _Rule((WHOLE,), WHOLE),
    "gather_rows": _Rule((WHOLE, WHOLE), WHOLE),
    "gemma_rmsnorm": _Rule((WHOLE,), WHOLE),
    "router": _Rule((WHOLE,), WHOLE),
    "concat": _Rule((WHOLE, WHOLE), WHOLE),
    "rope_table": _Rule((WHOLE,), WHOLE),
    "head_rmsnorm": _Rule((SAME,), SAME),
    "rope": _Rule((SAME, WHOLE, WHOLE), SAME),
    "round_heads": _Rule((SAME,), SAME),
    "round_channels": _Rule((SAME,), SAME),
    "swiglu_oai": _Rule((SAME, SAME), SAME),
    "kv_write": _Rule((WHOLE, "kv_heads", "kv_heads", WHOLE), WHOLE),
    "index_write": _Rule((WHOLE, WHOLE, WHOLE), WHOLE),
    "block_scores": _Rule(("index_heads", WHOLE, *_CONTEXT), "index_heads"),
    "block_select": _Rule(("index_heads", WHOLE), "index_heads"),
    "sparse_attention": _Rule(("heads", WHOLE, "index_heads", *_CONTEXT), "heads"),
    "dense_attention": _Rule(("heads", WHOLE, *_CONTEXT), "heads"),
}
_COUNTED = {"head_rmsnorm": "heads", "sparse_attention": "kv_heads", "dense_attention": "kv_heads"}  # op -> attribute
_HEADS = ("heads", "kv_heads", "index_heads")


def shard(graph: ModelGraph, text: Text, shard: Shard) -> ModelGraph:
    """The graph that one rank runs: local weight shapes, local head counts, collectives. For a world of one: `graph`.

    Args:
        graph: the whole model's, before any fusion; not changed.
        text: the description that it was traced from.
        shard: the rank.

    Raises:
        ShardRefused: heads, a width, the vocabulary or the blocks of a quantised tensor do not divide.
        GraphError: an op without a rule, or weights cut along axes that do not belong together.
    """
    if shard.world == 1:
        return graph
    spread = infer(_Pass(graph, text, shard, placement(graph, text, shard)).run())
    if graph.adaptation is None:
        return spread
    base = _Pass(graph.adaptation.base, text, shard, placement(graph.adaptation.base, text, shard)).run()
    return replace(spread, adaptation=replace(graph.adaptation, base=infer(base)))


class _Pass:
    """Copies a graph node by node. `spread` says of each new node what its value is on a rank."""

    def __init__(self, graph: ModelGraph, text: Text, shard: Shard, parts: Mapping[str, Part]) -> None:
        self.old, self.text, self.shard, self.parts = graph.fx, text, shard, parts
        self.new = fx.Graph()
        self.copies: dict[fx.Node, fx.Node] = {}
        self.spread: dict[fx.Node, str] = {}
        self.whole: dict[fx.Node, fx.Node] = {}  # the collective after a node

    def run(self) -> fx.Graph:
        """The new graph, types not yet inferred."""
        for node in self.old.nodes:
            if node.op == "output":
                logits, kv, *more = node.args[0]
                extras = [{name: self._given(self.copies[x], WHOLE) for name, x in named.items()} for named in more]
                self.new.output((self._given(self.copies[logits], WHOLE), self.copies[kv], *extras))
                continue
            if node.op == "placeholder":
                made, spread = self._copy(node), WHOLE
                if isinstance(made.meta["type"], WeightDecl):
                    made.meta["type"] = self._local(made.meta["type"])
            elif isinstance(node.target, OpSpec):
                made, spread = self._call(node, node.target)
            else:  # an item of a call with several outputs
                made = self._copy(node)
                spread = self.spread[made.args[0]]  # type: ignore[index]
            self.copies[node], self.spread[made] = made, spread
        return self.new

    def _copy(self, node: fx.Node) -> fx.Node:
        return self.new.node_copy(node, self.copies.__getitem__)

    def _local(self, decl: WeightDecl) -> WeightDecl:
        slots = {slot: replace(tensor, shape=self.parts[tensor.name].shape) for slot, tensor in decl.slots.items()}
        return replace(decl, slots=slots)

    def _call(self, node: fx.Node, spec: OpSpec) -> tuple[fx.Node, str]:
        """The op on the rank's values, and what its outputs are."""
        args = [self.copies[a] for a in node.args]  # type: ignore[index]
        data = [at for at, arg in enumerate(spec.inputs) if arg.kind != "weight"]
        rule = self._rule(node, spec, args)
        first = self.spread[args[data[0]]]
        same = WHOLE if first == PARTIAL else first
        for at, wanted in zip(data, rule.inputs, strict=True):
            args[at] = self._given(args[at], same if wanted == SAME else wanted, node)
        output = same if rule.output == SAME else rule.output
        made = self.new.create_node("call_function", spec, tuple(args), self._attrs(node, spec, output), node.name)
        return made, output

    def _rule(self, node: fx.Node, spec: OpSpec, args: list[fx.Node]) -> _Rule:
        if spec.name == "add":
            spreads = {self.spread[a] for a in args}
            both = spreads.pop() if len(spreads) == 1 else WHOLE
            return _Rule((both, both), both)
        if spec.name in ("linear", "lm_head", "experts", "lora_experts"):
            return self._product(node, spec)
        if spec.name == "lora_logits":  # B is cut where the head is
            product = self._product(node, spec)
            return _Rule((product.output, WHOLE), product.output)
        if spec.name not in _RULES:
            raise GraphError(
                f"no rule for op {spec.name}",
                where=f"shard pass, node {node.name}",
                expected="the graph as it was traced: unfused and not yet spread",
            )
        return _RULES[spec.name]

    def _product(self, node: fx.Node, spec: OpSpec) -> _Rule:
        """A product with weights that are cut along their outputs, their inputs or not at all."""
        decl: WeightDecl = node.args[-1].meta["type"]  # type: ignore[union-attr]
        if spec.name in ("experts", "lora_experts"):  # w2 takes what w1 and w3 made: ff begins and ends inside
            # Of an adapter, B of w1 and w3 and A of w2 are cut like their matrices, and the rest is on every rank.
            base = [tensor for slot, tensor in decl.slots.items() if not slot.startswith("lora_")]
            axes = {self._axis(tensor) for tensor in base}
            if axes not in ({"ff"}, {None}):
                raise GraphError(
                    f"experts '{decl.name}' are cut along {sorted(map(str, axes))}",
                    where=f"shard pass, node {node.name}",
                    expected="all of them along ff",
                )
            return _Rule((WHOLE,) * 3, WHOLE if axes == {None} else PARTIAL)
        (tensor,) = decl.slots.values()
        axis = self._axis(tensor)
        if axis is None:
            return _Rule((WHOLE,), WHOLE)
        return _Rule((WHOLE,), axis) if tensor.axes[0] == axis else _Rule((axis,), PARTIAL)

    def _axis(self, tensor: TensorDecl) -> str | None:
        """Along which axis of the model a weight is cut, if it is."""
        cut = self.parts[tensor.name].cut
        return None if cut is None else tensor.axes[cut.axis]

    def _attrs(self, node: fx.Node, spec: OpSpec, output: str) -> dict[str, Any]:
        """Head counts become the rank's own."""
        attrs: dict[str, Any] = dict(node.kwargs)
        name = _COUNTED.get(spec.name)
        axis = "kv_heads" if name == "kv_heads" else output
        if name is not None and axis in _HEADS:
            attrs[name] = len(heads_of(self.text, self.shard, axis))
        return attrs

    def _given(self, value: fx.Node, wanted: str, node: fx.Node | None = None) -> fx.Node:
        """`value` as an op wants it, through a collective where that can make it so; at most one per value."""
        has = self.spread[value]
        if has == wanted:
            return value
        if value in self.whole and wanted == WHOLE:
            return self.whole[value]
        collective = {PARTIAL: all_reduce, "vocab": all_gather}.get(has)
        if wanted != WHOLE or collective is None:
            raise GraphError(
                f"value '{value.name}' is {_words(has)}",
                where="shard pass, " + (f"node {node.name}" if node is not None else "output"),
                expected=f"one that is {_words(wanted)}; the weights' axes do not fit together",
            )
        made = self.new.create_node("call_function", collective, (value,), {"world": self.shard.world})
        self.whole[value], self.spread[made] = made, WHOLE
        return made


def _words(spread: str) -> str:
    return {WHOLE: "whole", PARTIAL: "a partial sum"}.get(spread, f"spread along {spread}")
