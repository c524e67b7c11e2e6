"""The adapt pass: which ops it puts where, what it refuses, and what fusions make of it."""

from __future__ import annotations

from collections import Counter

import pytest
from tests.support import tiny

from m31.errors import GraphError
from m31.graph import ModelGraph, Shard, adapt, fuse, shard, trace
from m31.ops.fused import FUSED

ALL = tuple(FUSED)
M31 = tiny.text()
M3 = tiny.text(attention=("full", "full", "sparse", "sparse"))
AT = "model.layers.{}.self_attn.{}_proj"


def kinds(graph: ModelGraph) -> Counter[str]:
    return Counter(call.op.spec.name for call in graph.calls)


def new(ranks: dict[str, int]) -> Counter[str]:
    graph = trace(M31)
    return kinds(adapt(graph, ranks)) - kinds(graph)


def test_ops_of_every_place() -> None:
    assert new({AT.format(0, "q"): 2}) == {"linear": 2, "add": 1}
    assert new({AT.format(0, "index_k"): 2, "model.layers.1.mlp.down_proj": 3}) == {"linear": 4, "add": 2}
    assert new({"model.layers.2.block_sparse_moe.shared_experts.up_proj": 1}) == {"linear": 2, "add": 1}
    assert new({"lm_head": 4}) == {"linear": 1, "gather_rows": 1, "lora_logits": 1}
    one = {"model.layers.2.block_sparse_moe.experts.5.w2": 4}
    assert new(one) == {"lora_experts": 1}
    assert kinds(adapt(trace(M31), one))["experts"] == 1  # the other layer's


def test_weights_of_an_adapted_graph() -> None:
    graph = trace(M31, stored=lambda name: "mxfp8")
    expert = "model.layers.2.block_sparse_moe.experts.5.w2"
    adapted = adapt(graph, {AT.format(1, "o"): 2, expert: 4, "lm_head": 1})
    before, after = ({t.name: t for t in g.tensors()} for g in (graph, adapted))
    assert {name: after[name] for name in before} == before  # the base's are what they were, each still there
    new = {name: (tensor.shape, tensor.axes, tensor.stored) for name, tensor in after.items() if name not in before}
    assert new == {
        f"{AT.format(1, 'o')}.lora_A.weight": ((2, 64), (None, "heads"), "float32"),
        f"{AT.format(1, 'o')}.lora_B.weight": ((32, 2), (None, None), "float32"),
        f"{expert}.lora_A.weight": ((4, 24), (None, "ff"), "float32"),
        f"{expert}.lora_B.weight": ((32, 4), (None, None), "float32"),
        "lm_head.lora_A.weight": ((1, 32), (None, None), "float32"),
        "lm_head.lora_B.weight": ((61, 1), ("vocab", None), "float32"),
    }
    assert [call.op.name for call in graph.calls] == [call.op.name for call in trace(M31).calls]  # not changed


def test_without_an_adapter_the_graph_is_itself() -> None:
    graph = trace(M31)
    assert adapt(graph, {}) is graph


@pytest.mark.parametrize("module", ["model.layers.9.self_attn.q_proj", "model.embed_tokens", "model.norm"])
def test_other_modules_are_refused(module: str) -> None:
    with pytest.raises(GraphError, match="no linear layer of this graph"):
        adapt(trace(M31), {module: 2})


def test_a_fused_graph_is_refused() -> None:
    fused, _ = fuse(trace(M31), ALL, lambda op: True, text=M31)
    with pytest.raises(GraphError, match="no linear layer of this graph"):
        adapt(fused, {AT.format(0, "q"): 2})


PLACES = {
    AT.format(1, "q"): {"qkv_insert": ("layer 1",)},
    AT.format(1, "v"): {"qkv_insert": ("layer 1",)},
    AT.format(3, "index_k"): {"qkv_insert": ("layer 3",)},
    AT.format(1, "o"): {},
    "model.layers.0.mlp.up_proj": {},
    "model.layers.2.block_sparse_moe.shared_experts.down_proj": {
        "experts_shared": ("layer 2 (block_sparse_moe.experts)",)
    },
    "model.layers.2.block_sparse_moe.experts.0.w3": {"experts_shared": ("layer 2 (block_sparse_moe.experts)",)},
    "lm_head": {},
}


@pytest.mark.parametrize("module", PLACES)
def test_fusions_leave_adapted_places_and_only_those(module: str) -> None:
    plain = fuse(trace(M31), ALL, lambda op: True, text=M31)[1]
    graph, report = fuse(adapt(trace(M31), {module: 2}), ALL, lambda op: True, text=M31)
    for fusion in report.fusions:
        lost = PLACES[module].get(fusion.name, ())
        assert fusion.adapted == lost
        assert fusion.fused == fusion.expected == fusion.matched == plain[fusion.name].fused - len(lost)
    assert ("1 more with an adapter" in str(report)) == bool(PLACES[module])
    assert kinds(graph)["qkv_insert"] == report["qkv_insert"].fused


def test_dense_layers_too() -> None:
    report = fuse(adapt(trace(M3), {AT.format(0, "k"): 2}), ALL, lambda op: True, text=M3)[1]
    assert report["qkv_insert_dense"].adapted == ("layer 0",)
    assert (report["qkv_insert_dense"].fused, report["qkv_insert"].fused) == (1, 2)


def test_a_graph_that_lost_more_than_its_adapter_explains_is_refused() -> None:
    graph = adapt(trace(M31), {AT.format(0, "q"): 2})
    with pytest.raises(GraphError, match="qkv_insert"):
        fuse(graph, ALL, lambda op: True, text=tiny.text(num_layers=6, mlp=("dense",) * 3 + ("moe",) * 3))


def test_fusions_of_one_rank() -> None:
    even = tiny.text(vocab_size=64)
    adapted = adapt(trace(even), {AT.format(0, "q"): 2, "model.layers.3.block_sparse_moe.experts.1.w1": 2})
    rank = shard(adapted, even, Shard(1, 2))
    report = fuse(rank, ("qkv_insert",), lambda op: True, text=even)[1]
    assert report["qkv_insert"].adapted == ("layer 0",)
    slots = next(c.op.slots for c in rank.calls if c.op.spec.name == "lora_experts")
    assert slots["lora_B.w1.1"].shape == (12, 2)
    assert slots["lora_A.w1.1"].shape == (2, 32)


def test_a_rank_of_zero_is_refused() -> None:
    with pytest.raises(GraphError, match="rank 0"):
        adapt(trace(M31), {AT.format(0, "q"): 0})
