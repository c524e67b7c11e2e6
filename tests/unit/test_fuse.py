"""The fuse pass: what it finds, what it refuses, and that a fused graph computes the same."""

from __future__ import annotations

import dataclasses
import operator
from collections import Counter
from typing import Any

import pytest
import torch
from tests.support import fusing, tiny
from tests.unit.test_whole_model import greedy, ids_for, logits

from m31 import config, ops
from m31.config import Text
from m31.graph import NO_ROUNDING, ModelGraph, OpInstance, Rounding, Shard, fuse, infer, match, shard, trace
from m31.ops.body import declare
from m31.ops.examples import Example
from m31.ops.fused import FUSED, add_norm, experts_shared, qkv_insert
from m31.ops.moe import expert_slots

ALL = tuple(FUSED)
M31 = tiny.text()
M3 = tiny.text(attention=("full", "full", "sparse", "sparse"))
SHAPES = {"m3.1": M31, "m3": M3}
EVERY = Rounding(kv=True, index=True, linear=True, experts=True, query=True)
SOME = Rounding(kv=True, index=False, linear=False, experts=True, query=False)
ROUNDINGS = {"none": NO_ROUNDING, "every": EVERY, "some": SOME}


def yes(op: OpInstance) -> bool:
    return True


def no(op: OpInstance) -> bool:
    return False


def fused(graph: ModelGraph, text: Text = M31, wanted: tuple[str, ...] = ALL) -> ModelGraph:
    return fuse(graph, wanted, yes, text=text)[0]


def kinds(graph: ModelGraph) -> Counter[str]:
    return Counter(call.op.spec.name for call in graph.calls)


def line(graph: ModelGraph) -> list[Any]:
    return [(c.op.name, c.op.spec.name, dict(c.op.attrs), c.reads, c.writes, c.op.inputs) for c in graph.calls]


def node(graph: ModelGraph, op: str, at: int) -> Any:
    return [n for n in graph.fx.nodes if getattr(n.target, "name", "") == op][at]


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("name", SHAPES)
def test_every_place_is_fused(name: str, rounding: str) -> None:
    """What remains is attention, its output projection, dense MLPs, routers, and what stands at the ends."""
    text, places = SHAPES[name], len([k for k in SHAPES[name].attention if k == "sparse"])
    graph = trace(text, ROUNDINGS[rounding])
    after, report = fuse(graph, ALL, yes, text=text)
    assert [(f.name, f.fused, f.expected, f.matched, f.declined) for f in report.fusions] == [
        ("qkv_insert", places, places, places, ()),
        ("qkv_insert_dense", 4 - places, 4 - places, 4 - places, ()),
        ("add_norm", 8, 8, 8, ()),
        ("experts_shared", 2, 2, 2, ()),
    ]
    found = kinds(after)
    assert not set(found) & {"rope", "head_rmsnorm", "round_heads", "kv_write", "index_write", "add", "experts"}
    # the first norm has no sum before it; its rounding and those of the attention outputs are not part of a body
    assert (found["gemma_rmsnorm"], found["router"], found["linear"]) == (1, 2, 4 + 2 * 3)
    assert found["round_channels"] == (5 if ROUNDINGS[rounding].linear else 0)


@pytest.mark.parametrize("name", SHAPES)
def test_roundings_become_attributes(name: str) -> None:
    def flags(rounding: Rounding, op: str) -> list[dict[str, bool]]:
        graph = fused(trace(SHAPES[name], rounding), SHAPES[name])
        found = [dict(c.op.attrs) for c in graph.calls if c.op.spec.name == op]
        return [{key: value for key, value in attrs.items() if "round" in key} for attrs in found]

    assert all(not any(f.values()) for op in ALL for f in flags(NO_ROUNDING, op))
    assert all(all(f.values()) for op in ("qkv_insert", "qkv_insert_dense") for f in flags(EVERY, op))
    assert flags(SOME, "qkv_insert")[0] == {"round_query": False, "round_kv": True, "round_index": False}
    # before the MLPs of layers 2 and 3, and nowhere else: not before dense ones, attention or the end
    assert [f["rounded"] for f in flags(SOME, "add_norm")] == [False, False, False, False, True, False, True, False]
    assert [f["rounded"] for f in flags(EVERY, "add_norm")] == [True] * 8


def test_attributes_and_weights_are_those_of_the_parts() -> None:
    text = tiny.text(rms_norm_eps=3e-5)
    graph = fused(trace(text), text)
    for layer, op in enumerate(c.op for c in graph.calls if c.op.spec is qkv_insert):
        sizes = {"heads": 4, "kv_heads": 2, "index_heads": 2}
        assert {k: v for k, v in op.attrs.items() if "round" not in k} == {"layer": layer, "eps": 3e-5, **sizes}
        at = f"model.layers.{layer}.self_attn"
        main = {"q": "q_proj", "q_norm": "q_norm", "k": "k_proj", "k_norm": "k_norm", "v": "v_proj"}
        index = {"iq": "index_q_proj", "iq_norm": "index_q_norm", "ik": "index_k_proj", "ik_norm": "index_k_norm"}
        assert {arg: decl.name.removeprefix(f"{at}.") for arg, decl in op.decls.items()} == {**main, **index}
        assert op.slots["iq_norm.weight"].name == f"{at}.index_q_norm.weight"
        assert len(op.slots) == 9
        assert op.weights is not None
        assert (op.weights.name, op.weights.slots) == (f"qkv_insert:{at}.q_proj", op.slots)
    norm = next(c.op for c in graph.calls if c.op.spec is add_norm)
    assert set(norm.slots) == {"weight"}
    expert = next(c.op for c in graph.calls if c.op.spec is experts_shared)
    assert {"routed.w1.0", "routed.w2.7", "gate.weight", "up.weight", "down.weight"} <= set(expert.slots)
    assert {t.name: t.shape for t in graph.tensors()} == {t.name: t.shape for t in trace(text).tensors()}


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_a_fused_graph_computes_the_same_bits(name: str, dtype: str) -> None:
    """Prefill and decode, each fused op run by its body: not one bit may differ."""
    text = SHAPES[name]
    values = tiny.weights(trace(text), seed=21)
    ids = ids_for(text, 37)
    plain, other = fusing.engines(text, values, lambda g: fused(g, text), dtype=dtype)
    assert torch.equal(logits(plain, ids), logits(other, ids))
    assert greedy(plain, [ids[:9], ids[:3]], 12) == greedy(other, [ids[:9], ids[:3]], 12)
    runs = fusing.runs(other)
    sparse = sum(kind == "sparse" for kind in text.attention)
    steps = runs["qkv_insert"] // sparse
    expected = {"qkv_insert": sparse, "qkv_insert_dense": 4 - sparse, "add_norm": 8, "experts_shared": 2}
    assert runs == {op: count * steps for op, count in expected.items() if count}


@pytest.mark.parametrize("arithmetic", ["w4a4-megamoe", "w8a8-q8kv4"])
def test_a_fused_graph_with_roundings_computes_the_same_bits(arithmetic: str) -> None:
    """MXFP8 projections, NVFP4 experts, quantised activations and pages: the roundings are inside the bodies."""
    text = tiny.quantisable(attention=("full", "sparse", "sparse", "sparse"))
    plain_values = tiny.weights(trace(text), seed=22)
    values = tiny.quantised(trace(text), plain_values)
    ids = ids_for(text, 29)
    options = {"dtype": "float32", "kv": "fp8", "index": "fp8", "arithmetic": arithmetic}
    plain, other = fusing.engines(text, values, lambda g: fused(g, text), **options)
    assert kinds(fusing.graph_of(plain))["round_heads"] > 0
    assert torch.equal(logits(plain, ids), logits(other, ids))


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("name", ["m3.1-flash", "m3"])
def test_the_published_models(name: str, rounding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All layers of the 428B models, in a number of trials that is a small multiple of the number of nodes."""
    trials, bind = [0], match._Search._bind

    def counted(*args: Any) -> Any:
        trials[0] += 1
        return bind(*args)

    monkeypatch.setattr(match._Search, "_bind", counted)
    text = config.parse(config.published(name), where=name).text  # type: ignore[arg-type]
    graph = trace(text, ROUNDINGS[rounding])
    after, report = fuse(graph, ALL, yes, text=text)
    dense = 3 if name == "m3" else 0
    assert [f.fused for f in report.fusions] == [60 - dense, dense, 120, 57]
    assert {t.name: t.shape for t in after.tensors()} == {t.name: t.shape for t in graph.tensors()}
    assert trials[0] < 10 * len(graph.calls)


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("rank", [0, 1])
def test_the_graph_of_one_rank(rank: int, rounding: str) -> None:
    """Fusing comes after the shard pass: local head counts are bound, collectives stay between the bodies."""
    text = tiny.text(attention=M3.attention, vocab_size=62)
    graph = shard(trace(text, ROUNDINGS[rounding]), text, Shard(rank, 2))
    after, report = fuse(graph, ALL, yes, text=text)
    assert [f.fused for f in report.fusions] == [2, 2, 8, 2]
    assert kinds(after)["all_reduce"] == kinds(graph)["all_reduce"] == 8
    makers = {name: call.op.spec.name for call in after.calls for name in call.writes}
    assert [makers[c.reads[1]] for c in after.calls if c.op.spec is add_norm] == ["all_reduce"] * 8
    assert [makers[c.reads[0]] for c in after.calls if c.op.spec.name == "all_reduce"][-1] == "experts_shared"
    op = next(c.op for c in after.calls if c.op.spec is qkv_insert)
    assert [op.attrs[name] for name in ("heads", "kv_heads", "index_heads")] == [2, 1, 1]


def test_the_given_graph_is_unchanged() -> None:
    graph = trace(M31, EVERY)
    before, nodes = line(graph), [str(n.format_node()) for n in graph.fx.nodes]
    fused(graph)
    assert line(graph) == before == line(infer(graph.fx))
    assert [str(n.format_node()) for n in graph.fx.nodes] == nodes


def test_declined_places_stay_and_are_counted() -> None:
    graph = trace(M31, EVERY)
    same, report = fuse(graph, ALL, no, text=M31)
    assert line(same) == line(graph)
    assert [(f.matched, f.fused, len(f.declined)) for f in report.fusions] == [
        (4, 0, 4),
        (0, 0, 0),
        (8, 0, 8),
        (2, 0, 2),
    ]
    seen: list[OpInstance] = []

    def odd(op: OpInstance) -> bool:
        seen.append(op)
        return op.attrs["layer"] % 2 == 1

    some, report = fuse(graph, ["qkv_insert"], odd, text=M31)
    assert report["qkv_insert"].declined == ("layer 0", "layer 2")
    assert (report["qkv_insert"].fused, kinds(some)["qkv_insert"], kinds(some)["kv_write"]) == (2, 2, 2)
    assert str(report) == "qkv_insert 2 of 4"
    # what was asked about is what came to be
    made = {c.op.name: c.op for c in some.calls if c.op.spec is qkv_insert}
    asked = {op.name: op for op in seen if op.attrs["layer"] % 2}
    assert {n: (o.attrs, o.inputs, o.outputs) for n, o in made.items()} == {
        n: (o.attrs, o.inputs, o.outputs) for n, o in asked.items()
    }
    _, report = fuse(graph, ["qkv_insert"], lambda op: op.attrs["layer"] in (0, 2), text=M31)
    assert report["qkv_insert"].declined == ("layer 1", "layer 3")


def test_a_partly_fused_graph_computes_the_same_bits() -> None:
    values = tiny.weights(trace(M31), seed=23)
    ids = ids_for(M31, 30)

    def some(graph: ModelGraph) -> ModelGraph:
        return fuse(graph, ALL, lambda op: op.attrs.get("layer", 1) != 2, text=M31)[0]

    plain, other = fusing.engines(M31, values, some, dtype="float32")
    assert kinds(fusing.graph_of(other))["kv_write"] == 1
    assert torch.equal(logits(plain, ids), logits(other, ids))


ALIKE = tiny.text(num_heads=2)  # query and index query have the same shape, attributes and parts


def check_roles(graph: ModelGraph) -> None:
    """What an op calls q is the query of attention, what it calls iq that of the block scores."""
    found = [call for call in graph.calls if call.op.spec.name == "qkv_insert"]
    assert len(found) == 4
    for call in found:
        q, iq, _ = call.writes
        assert call.op.outputs[0] == call.op.outputs[1]
        assert [c.op.spec.name for c in graph.calls if q in c.reads] == ["sparse_attention"]
        assert [c.op.spec.name for c in graph.calls if iq in c.reads] == ["block_scores"]
        assert [call.op.decls[arg].name.split(".")[-1] for arg in ("q", "q_norm")] == ["q_proj", "q_norm"]
        assert [call.op.decls[arg].name.split(".")[-1] for arg in ("iq", "iq_norm")] == ["index_q_proj", "index_q_norm"]


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_query_and_index_query_keep_their_roles(rounding: str) -> None:
    check_roles(fused(trace(ALIKE, ROUNDINGS[rounding]), ALIKE))


def test_swapped_readers_would_swap_the_roles(monkeypatch: pytest.MonkeyPatch) -> None:
    """The readers are what tells the two apart, and the check above sees it."""
    swapped = dataclasses.replace(qkv_insert, readers={"q": ("block_scores",), "iq": ("sparse_attention",)})
    monkeypatch.setitem(FUSED, "qkv_insert", swapped)
    with pytest.raises(AssertionError):
        check_roles(fused(trace(ALIKE), ALIKE))


def test_crossed_outputs_would_show_in_the_logits() -> None:
    """The comparison of bits can fail: the shapes fit, the numbers do not."""

    def crossed(graph: ModelGraph) -> ModelGraph:
        after = fused(graph, ALIKE)
        for n in after.fx.nodes:
            if n.target is operator.getitem and n.args[0].target is qkv_insert and n.args[1] < 2:
                n.update_arg(1, 1 - n.args[1])
        return infer(after.fx)

    values = tiny.weights(trace(ALIKE), seed=24)
    ids = ids_for(ALIKE, 30)
    plain, other = fusing.engines(ALIKE, values, crossed, dtype="float64")
    assert not torch.equal(logits(plain, ids), logits(other, ids))


def test_parts_with_several_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A router makes two values, which reach the graph as items of its node."""

    def body(
        h: Any,
        gate: Any,
        w: Any,
        *,
        topk: int,
        alpha: float,
        beta: float,
        limit: float,
        routed_scaling_factor: float,
        experts: int,
    ) -> Any:
        ids, weights = ops.router(h, gate, topk=topk)
        act = {"alpha": alpha, "beta": beta, "limit": limit}
        return ops.experts(h, ids, weights, w, routed_scaling_factor=routed_scaling_factor, experts=experts, **act)

    attrs = {"topk": 1, "alpha": 1.0, "beta": 1.0, "limit": 7.0, "routed_scaling_factor": 1.0, "experts": 2}
    shapes = {
        "h": (1, 8),
        "gate": {"weight": (2, 8), "bias": (2,)},
        "w": {s: (8, 6) if s.startswith("w2") else (6, 8) for s in expert_slots(2)},
    }
    moe = declare(
        "routed",
        "Router and experts.",
        body,
        outputs=("y",),
        anchor="experts",
        expected=lambda m: sum(kind == "moe" for kind in m.mlp),
        examples=lambda op: iter([Example("one", attrs, shapes)]),
    )
    monkeypatch.setitem(FUSED, "routed", moe)
    values = tiny.weights(trace(M31), seed=25)
    ids = ids_for(M31, 12)
    plain, other = fusing.engines(M31, values, lambda g: fused(g, wanted=("routed", "qkv_insert")), dtype="float32")
    assert kinds(fusing.graph_of(other))["routed"] == 2
    assert not {"router", "experts"} & set(kinds(fusing.graph_of(other)))
    assert torch.equal(logits(plain, ids), logits(other, ids))
    # its bias is a slot like any other
    assert {"gate.weight", "gate.bias"} <= set(
        next(c.op for c in fusing.graph_of(other).calls if c.op.spec is moe).slots
    )
