"""Graphs in which a fusion must not match everywhere: the error counts, and names the layer and the reason."""

from __future__ import annotations

from typing import Any

import pytest
from tests.support import tiny
from tests.unit.test_fuse import EVERY, M31, fused, node, yes

from m31 import ops
from m31.errors import GraphError
from m31.graph import NO_ROUNDING, ModelGraph, Rounding, fuse, infer, trace
from m31.ops.body import FusedOp, declare
from m31.ops.examples import Example
from m31.ops.fused import FUSED, add_norm


def test_fusing_twice_finds_nothing_more_and_says_so() -> None:
    graph = fused(trace(M31))
    with pytest.raises(
        GraphError, match=r"fusion 'qkv_insert' matched 0 of 4 places; the graph has no more index_write"
    ):
        fuse(graph, ["qkv_insert"], yes, text=M31)
    with pytest.raises(
        GraphError, match=r"'add_norm' matched 0 of 8 places; missed layer 0 \(input_layernorm\): embedd"
    ):
        fuse(graph, ["add_norm"], yes, text=M31)
    with pytest.raises(GraphError, match=r"'experts_shared' matched 0 of 2"):
        fuse(trace(M31), ["experts_shared", "experts_shared"], yes, text=M31)


def test_an_unknown_fusion_is_named() -> None:
    with pytest.raises(GraphError, match=r"no fused op 'qkv'.*expected qkv_insert or"):
        fuse(trace(M31), ["qkv"], yes, text=M31)


def test_a_description_of_another_model_is_noticed() -> None:
    """Five layers are in the graph, the description has four: more matches than expected are no success either."""
    with pytest.raises(GraphError, match="matched 5 of 4 places; the description is of another model"):
        fuse(trace(tiny.text(num_layers=5)), ["qkv_insert"], yes, text=M31)


def broken(change: Any, rounding: Rounding = NO_ROUNDING) -> ModelGraph:
    """The graph of M3.1 after `change(graph, node)`; `node(op, n)` is the n-th node of an op."""
    graph = trace(M31, rounding)
    change(graph.fx, lambda op, at: node(graph, op, at))
    return infer(graph.fx)


@pytest.mark.parametrize(("norm", "which"), [(0, "q"), (1, "k"), (2, "index q"), (3, "index k")])
def test_one_head_norm_with_another_eps(norm: int, which: str) -> None:
    def change(g: Any, of: Any) -> None:
        of("head_rmsnorm", 4 * 2 + norm).update_kwarg("eps", 1e-5)

    with pytest.raises(GraphError, match=r"'qkv_insert' matched 3 of 4 places; missed layer 2: eps of head_rmsnorm_"):
        fuse(broken(change), ["qkv_insert"], yes, text=M31)


def test_a_write_into_another_layer() -> None:
    with pytest.raises(GraphError, match="missed layer 2: layer of kv_write_2 is 0, expected 2"):
        fuse(broken(lambda g, of: of("kv_write", 2).update_kwarg("layer", 0)), ["qkv_insert"], yes, text=M31)


def test_a_shared_expert_with_another_activation() -> None:
    def change(g: Any, of: Any) -> None:
        of("swiglu_oai", 3).update_kwarg("limit", 7.0)

    with pytest.raises(GraphError, match=r"1 of 2.*layer 3 \(block_sparse_moe.experts\): limit of swiglu_oai_3 is 7.0"):
        fuse(broken(change), ["experts_shared"], yes, text=M31)


def read_too(op: str, at: int) -> Any:
    """A change that lets a dead node read the n-th value of an op."""

    def change(g: Any, of: Any) -> None:
        value = of(op, at)
        with g.inserting_before(next(n for n in g.nodes if n.op == "output")):
            spec = ops.round_heads if op in ("rope", "head_rmsnorm") else ops.round_channels
            g.call_function(spec, (value,))

    return change


@pytest.mark.parametrize(
    ("fusion", "op", "at", "places", "reason"),
    [
        ("qkv_insert", "rope", 4 * 1 + 1, 4, "layer 1: rope_5, an interior value, is read by round_heads"),
        ("qkv_insert", "linear", 9 * 0 + 2, 4, "layer 0: linear_2, an interior value, is read by round_channels"),
        ("qkv_insert", "rope", 4 * 1, 4, r"layer 1: 'q' would be round_heads, which is read by \[\]"),
        ("add_norm", "gemma_rmsnorm", 3, 8, None),
        ("experts_shared", "experts", 1, 2, "experts_1, an interior value, is read by round_channels"),
    ],
)
def test_an_interior_value_that_is_read_elsewhere(
    fusion: str, op: str, at: int, places: int, reason: str | None
) -> None:
    """Even dead code counts: it would be left without what it reads. An output may be read by anything, unless it is
    told from others by its readers."""
    graph = broken(read_too(op, at))
    if reason is None:
        assert fuse(graph, [fusion], yes, text=M31)[1][fusion].fused == places
    else:
        with pytest.raises(GraphError, match=f"matched {places - 1} of {places} places; missed .*{reason}"):
            fuse(graph, [fusion], yes, text=M31)


def test_a_norm_that_is_read_before_it_is_rounded_keeps_its_rounding_outside() -> None:
    """The larger form of the body does not fit there, the smaller one does: the same values reach every reader."""
    graph = fused(broken(read_too("gemma_rmsnorm", 1), EVERY), wanted=("add_norm",))
    found = [c.op.attrs["rounded"] for c in graph.calls if c.op.spec is add_norm]
    assert found == [False, *[True] * 7]


def test_the_state_before_the_writes_is_not_read_after_them() -> None:
    """A reader of the old token that stands behind the write would change its meaning."""

    def change(g: Any, of: Any) -> None:
        attention = of("sparse_attention", 1)
        attention.update_arg(1, of("kv_write", 1).args[0])

    with pytest.raises(
        GraphError, match=r"missed layer 1: index_write, the state before the writes, is read by sparse"
    ):
        fuse(broken(change), ["qkv_insert"], yes, text=M31)


def test_a_write_between_the_two_writes() -> None:
    """The token is threaded from the one to the other: whatever stands between is no part of the body."""

    def change(g: Any, of: Any) -> None:
        first, second = of("kv_write", 1), of("index_write", 1)
        with g.inserting_after(first):
            again = g.call_function(ops.kv_write, (first, *first.args[1:]), dict(first.kwargs))
        second.update_arg(0, again)

    with pytest.raises(GraphError, match=r"missed layer 1: rope_5, an interior value, is read by kv_write_1"):
        fuse(broken(change), ["qkv_insert"], yes, text=M31)


def test_a_weight_that_two_ops_use() -> None:
    def change(g: Any, of: Any) -> None:
        of("head_rmsnorm", 5).update_arg(1, of("head_rmsnorm", 4).args[1])  # k of layer 1 takes the norm of q

    with pytest.raises(GraphError, match=r"missed layer 1: weight w_model_layers_1_self_attn_q_norm has 2 readers"):
        fuse(broken(change), ["qkv_insert"], yes, text=M31)


def test_branches_that_do_not_share_their_input() -> None:
    def change(g: Any, of: Any) -> None:
        value = of("linear", 9 + 2)  # nine projections in a layer with a dense MLP
        assert value.args[1].name == "w_model_layers_1_self_attn_v_proj"
        value.update_arg(0, of("gemma_rmsnorm", 0))

    with pytest.raises(
        GraphError, match=r"missed layer 1: linear_\d+ has gemma_rmsnorm\S* in the place of gemma_rmsnorm"
    ):
        fuse(broken(change), ["qkv_insert"], yes, text=M31)


def test_a_query_that_nobody_reads() -> None:
    def change(g: Any, of: Any) -> None:
        of("sparse_attention", 1).update_arg(0, of("sparse_attention", 0).args[0])

    with pytest.raises(GraphError, match="3 of 4 places; missed layer 1: "):
        fuse(broken(change), ["qkv_insert"], yes, text=M31)


def test_one_projection_in_two_roles() -> None:
    """Gate and up are two parts, so they must be two nodes."""

    def change(g: Any, of: Any) -> None:
        act = of("swiglu_oai", 3)
        act.update_arg(1, act.args[0])

    with pytest.raises(GraphError, match=r"1 of 2 places; missed layer 3 .*: linear_\d+ already has another role"):
        fuse(broken(change), ["experts_shared"], yes, text=M31)


def test_one_sum_in_two_matches() -> None:
    """Two norms of one sum: it becomes part of the first, the second finds it taken."""

    def change(g: Any, of: Any) -> None:
        of("gemma_rmsnorm", 4).update_arg(0, of("gemma_rmsnorm", 3).args[0])

    taken = r"7 of 8 places; missed .*layer 2 \(input_layernorm\): add_\d already has another role"
    with pytest.raises(GraphError, match=taken):
        fuse(broken(change), ["add_norm"], yes, text=M31)


def test_places_that_cannot_be_told_from_others_are_all_named() -> None:
    """The first norm of the model never has a sum before it; here that of layer 1 has none either."""

    def change(g: Any, of: Any) -> None:
        of("gemma_rmsnorm", 2).update_arg(0, of("gemma_rmsnorm", 1))

    both = (
        r"7 of 8 places; missed layer 0 \(input_layernorm\): .*, missed layer 1 \(input_layernorm\): gemma_rmsnorm_1 is"
    )
    with pytest.raises(GraphError, match=both):
        fuse(broken(change), ["add_norm"], yes, text=M31)


def test_a_query_that_is_needed_before_the_write() -> None:
    """The fused node stands where the last part stood; what reads a result earlier would be left without it."""

    def change(g: Any, of: Any) -> None:
        query = of("rope", 4)  # of layer 1
        with g.inserting_after(query):
            early = g.call_function(
                ops.sparse_attention,
                (query, *of("sparse_attention", 0).args[1:]),
                dict(of("sparse_attention", 1).kwargs),
            )
        assert early.args[0] is query

    with pytest.raises(GraphError, match=r"missed layer 1: rope_4 is read by sparse_attention_\d before the last part"):
        fuse(broken(change), ["qkv_insert"], yes, text=M31)


def test_a_place_is_used_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two fused ops over the same parts: the one that comes second finds less and says so."""

    def body(h: Any, gate: Any, up: Any, down: Any, *, alpha: float, beta: float, limit: float) -> Any:
        act = {"alpha": alpha, "beta": beta, "limit": limit}
        return ops.linear(ops.swiglu_oai(ops.linear(h, gate), ops.linear(h, up), **act), down)

    monkeypatch.setitem(FUSED, "mlp", mlp(body))
    graph = trace(M31)
    assert fuse(graph, ["mlp"], yes, text=M31)[1]["mlp"].fused == 4
    with pytest.raises(GraphError, match=r"fusion 'mlp' matched 2 of 4 places; the graph has no more swiglu_oai"):
        fuse(graph, ["experts_shared", "mlp"], yes, text=M31)


def mlp(body: Any) -> FusedOp:
    return declare(
        "mlp",
        "The MLP.",
        body,
        outputs=("y",),
        anchor="swiglu_oai",
        expected=lambda m: m.num_layers,
        examples=lambda op: iter(
            [
                Example(
                    "one",
                    {"alpha": 1.0, "beta": 1.0, "limit": 7.0},
                    {"h": (1, 8), "gate": (6, 8), "up": (6, 8), "down": (8, 6)},
                )
            ]
        ),
    )
