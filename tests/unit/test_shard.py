"""The shard pass: what each rank gets, which collectives it runs, and what it refuses (MODEL.md §2.4, §8)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from tests.support import tiny
from torch import fx

from m31 import config
from m31.config import Moe, SparseAttention, Text
from m31.errors import GraphError, M31Error, OpRefused
from m31.graph import ModelGraph, Part, Rounding, Shard, ShardRefused, infer, kv_share, placement, shard, trace
from m31.ops import OpSpec, WeightDecl

PUBLISHED = config.parse(config.published("m3.1-flash"), where="published").text
WORLDS = (2, 4, 8)


def eight(**changes: Any) -> Text:
    """A tiny model that eight ranks divide; they have two KV heads and two index heads between them."""
    moe = Moe(
        num_experts=8,
        experts_per_token=2,
        num_shared_experts=1,
        expert_intermediate_size=24,
        shared_intermediate_size=40,
        routed_scaling_factor=2.0,
    )
    return tiny.text(**{"num_heads": 8, "vocab_size": 64, "moe": moe, **changes})


TEXTS = {"tiny": eight(), "m3": eight(attention=("full", "full", "sparse", "sparse")), "published": PUBLISHED}
GRAPHS = {name: trace(text) for name, text in TEXTS.items()}


def spread(text: Text, own: Shard, stored: Mapping[str, str] | None = None) -> ModelGraph:
    """The rank's graph of a model that is stored in BF16 but for the given tensors."""
    return shard(trace(text, stored=lambda name: (stored or {}).get(name, "bfloat16")), text, own)


def test_a_world_of_one_is_the_identity() -> None:
    assert shard(GRAPHS["tiny"], TEXTS["tiny"], Shard(0, 1)) is GRAPHS["tiny"]
    assert all(part.cut is None for part in placement(GRAPHS["tiny"], TEXTS["tiny"], Shard(0, 1)).values())


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", TEXTS)
def test_every_element_is_on_exactly_one_rank_or_on_all(name: str, world: int) -> None:
    """Or, KV and index heads fewer than ranks, on as many ranks as share a head."""
    text = TEXTS[name]
    ranks = [placement(GRAPHS[name], text, Shard(rank, world)) for rank in range(world)]
    for tensor in GRAPHS[name].tensors():
        parts = [rank[tensor.name] for rank in ranks]
        assert {part.whole for part in parts} == {tensor.shape}
        if parts[0].cut is None:
            assert set(parts) == {parts[0]}
            continue
        copies = max(1, world // text.num_kv_heads) if tensor.name.endswith(COPIED) else 1
        size = tensor.shape[parts[0].cut.axis]
        each = size * copies // world
        for rank, part in enumerate(parts):
            start = rank // copies * each
            assert part.cut is not None
            assert (part.cut.axis, part.cut.start, part.cut.stop) == (parts[0].cut.axis, start, start + each)
        assert parts[-1].cut is not None
        assert parts[-1].cut.stop == size


COPIED = tuple(f"self_attn.{w}_proj.weight" for w in ("k", "v", "index_q"))
WHOLE = ("norm.weight", "index_k_proj.weight", "gate.weight", "e_score_correction_bias", "embed_tokens.weight")


@pytest.mark.parametrize("name", TEXTS)
def test_what_is_on_every_rank(name: str) -> None:
    """Norms, index key, router, embedding table; nothing else."""
    parts = placement(GRAPHS[name], TEXTS[name], Shard(1, 2))
    assert {n for n, part in parts.items() if part.cut is None} == {n for n in parts if n.endswith(WHOLE)}


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", TEXTS)
def test_the_graph_has_the_shapes_of_the_parts_and_the_ranks_heads(name: str, world: int) -> None:
    text, own = TEXTS[name], Shard(world - 1, world)
    graph = shard(GRAPHS[name], text, own)
    parts = placement(GRAPHS[name], text, own)
    assert {t.name: t.shape for t in graph.tensors()} == {n: part.shape for n, part in parts.items()}
    kv = max(1, text.num_kv_heads // world)
    norms = {c.op.name: c for c in graph.calls if c.op.spec.name == "head_rmsnorm"}
    heads = Counter(c.op.attrs["heads"] for c in norms.values())
    sparse, full = text.attention.count("sparse"), text.attention.count("full")
    want = Counter({text.num_heads // world: sparse + full})
    want += Counter({kv: sparse + full}) + Counter({kv: sparse}) + Counter({1: sparse})
    assert heads == want
    attention = [c.op for c in graph.calls if c.op.spec.name.endswith("_attention")]
    assert {op.attrs["kv_heads"] for op in attention} == {kv}
    assert {op.attrs["scale"] for op in attention} == {text.head_dim**-0.5}
    assert graph.types[graph.output].shape == ("R", text.vocab_size)  # type: ignore[union-attr]


@pytest.mark.parametrize("name", TEXTS)
def test_two_sums_a_layer_and_one_gather(name: str) -> None:
    """After o_proj, and after the MLP: routed and shared experts are added first and reduced once."""
    graph = shard(GRAPHS[name], TEXTS[name], Shard(0, 2))
    made_by = {out: c for c in graph.calls for out in c.writes}
    sums = [made_by[c.reads[0]] for c in graph.calls if c.op.spec.name == "all_reduce"]
    assert len(sums) == 2 * TEXTS[name].num_layers
    moe = TEXTS[name].mlp.count("moe")
    assert Counter(c.op.spec.name for c in sums) == {"linear": 2 * TEXTS[name].num_layers - moe, "add": moe}
    products = [c.op.weights.name.rsplit(".", 1)[-1] for c in sums if c.op.weights is not None]
    assert Counter(products) == {"o_proj": TEXTS[name].num_layers, "down_proj": TEXTS[name].num_layers - moe}
    added = [{made_by[n].op.spec.name for n in c.reads} for c in sums if c.op.spec.name == "add"]
    assert added == [{"experts", "linear"}] * moe
    (gather,) = [c for c in graph.calls if c.op.spec.name == "all_gather"]
    assert made_by[gather.reads[0]].op.spec.name == "lm_head"
    assert graph.output == gather.writes[0]
    assert {c.op.attrs["world"] for c in graph.calls if "world" in c.op.attrs} == {2}


def test_the_full_graph_is_left_as_it_was() -> None:
    text = TEXTS["tiny"]
    graph = trace(text)
    before = [(n.name, n.target, n.args, dict(n.kwargs), n.meta.get("type")) for n in graph.fx.nodes]
    shard(graph, text, Shard(1, 4))
    assert [(n.name, n.target, n.args, dict(n.kwargs), n.meta.get("type")) for n in graph.fx.nodes] == before
    assert [c.op.name for c in infer(graph.fx).calls] == [c.op.name for c in graph.calls]


def test_rounding_nodes_round_the_ranks_own() -> None:
    """What is quantised afterwards is rounded where it lies; nothing is summed for it that was not summed before."""
    text = TEXTS["tiny"]
    graph = trace(text, Rounding(kv=True, index=True, linear=True, experts=True, query=True))
    one = shard(graph, text, Shard(0, 2))
    whole, mine = ([c.op for c in g.calls if c.op.spec.name.startswith("round_")] for g in (graph, one))
    assert [op.name for op in whole] == [op.name for op in mine]
    assert Counter(c.op.spec.name for c in one.calls)["all_reduce"] == 2 * text.num_layers
    sizes = {(a.outputs[0].shape[1], b.outputs[0].shape[1]) for a, b in zip(whole, mine, strict=True)}  # type: ignore[union-attr]
    assert sizes == {(32, 32), (8, 4), (2, 1), (1, 1), (128, 64), (32, 16)}  # hidden; q, k, index k; o's input; v


def test_published_sizes() -> None:
    """MODEL.md §8: at TP4 2048, 128, 128, 128, 128 and 768 per rank; at TP8 1024, KV heads in pairs, and 384."""
    for world, q, inner in ((4, 2048, 768), (8, 1024, 384)):
        parts = placement(GRAPHS["published"], PUBLISHED, Shard(1, world))
        at = "model.layers.7.self_attn."
        shapes = [parts[f"{at}{w}_proj.weight"].shape[0] for w in ("q", "k", "v", "index_q", "index_k")]
        assert shapes == [q, 128, 128, 128, 128]
        assert parts[f"{at}o_proj.weight"].shape == (6144, q)
        expert = "model.layers.7.block_sparse_moe.experts.127"
        assert [parts[f"{expert}.{w}.weight"].shape for w in ("w1", "w3", "w2")] == [
            (inner, 6144),
            (inner, 6144),
            (6144, inner),
        ]
        assert parts["lm_head.weight"].shape == (200_064 // world, 6144)
        total = sum(math.prod(part.shape) for part in parts.values())
        full = sum(math.prod(part.whole) for part in parts.values())
        assert full / world < total < 1.03 * full / world  # what is on every rank is a few per cent


def test_published_formats_divide_at_every_world() -> None:
    """MXFP8 blocks of 32 and NVFP4 groups of 16 stay whole (MODEL.md §8)."""
    graph = trace(PUBLISHED, stored=lambda name: "nvfp4" if ".experts." in name else "mxfp8")
    for world in WORLDS:
        own = shard(graph, PUBLISHED, Shard(world - 1, world))
        assert Counter(t.stored for t in own.tensors()) == Counter(t.stored for t in graph.tensors())


@pytest.mark.parametrize("name", ["tiny", "published"])
@pytest.mark.parametrize("world", WORLDS)
def test_an_index_head_serves_its_kv_head_and_that_its_query_heads(name: str, world: int) -> None:
    text = TEXTS[name]
    assert text.sparse is not None
    group = text.num_heads // text.num_kv_heads
    for rank in range(world):
        parts = placement(GRAPHS[name], text, Shard(rank, world))

        def heads(weight: str, dim: int, parts: dict[str, Part] = parts) -> list[int]:
            cut = parts[f"model.layers.2.self_attn.{weight}_proj.weight"].cut
            assert cut is not None
            assert cut.start % dim == cut.stop % dim == 0
            return list(range(cut.start // dim, cut.stop // dim))

        kv = heads("k", text.head_dim)
        assert kv == heads("v", text.head_dim) == heads("index_q", text.sparse.index_dim)
        assert sorted({q // group for q in heads("q", text.head_dim)}) == kv
        share = kv_share(text, Shard(rank, world))
        assert list(range(share.index * share.heads, (share.index + 1) * share.heads)) == kv
        assert share.count == text.num_kv_heads // len(kv)


def test_ranks_with_a_copy_of_a_head_have_the_same_share() -> None:
    shares = [kv_share(PUBLISHED, Shard(rank, 8)) for rank in range(8)]
    assert [share.index for share in shares] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert {(share.heads, share.count) for share in shares} == {(1, 4)}


def index(heads: int) -> SparseAttention:
    return SparseAttention(
        num_index_heads=heads, index_dim=16, topk_blocks=3, block_size=4, local_blocks=1, init_blocks=0
    )


@pytest.mark.parametrize(
    ("text", "world", "message"),
    [
        (eight(), 3, r"rank 2 of 3: 8 heads over 3 ranks; expected a multiple of 3; use a number of devices"),
        (eight(num_heads=6), 4, r"rank 3 of 4: 6 heads over 4 ranks"),
        (eight(num_heads=12, num_kv_heads=3, sparse=index(3)), 2, r"3 kv heads over 2 ranks"),
        (eight(num_heads=12, num_kv_heads=2), 3, r"2 kv heads over 3 ranks; expected a multiple of 3"),
        (eight(vocab_size=61), 2, r"tensor 'lm_head.weight': 61 tokens of the vocabulary over 2 ranks"),
        (
            eight(dense_intermediate_size=50),
            4,
            r"rank 3 of 4, tensor 'model.layers.0.mlp.gate_proj.weight': 50 feed-forward channels over 4 ranks",
        ),
    ],
)
def test_what_does_not_divide_is_refused(text: Text, world: int, message: str) -> None:
    with pytest.raises(ShardRefused, match=message):
        spread(text, Shard(world - 1, world))


@pytest.mark.parametrize(
    ("stored", "weight", "world", "message"),
    [
        (
            "mxfp8",
            "model.layers.0.mlp.down_proj.weight",
            2,
            r"48 inputs over 2 ranks divide a block of mxfp8.*of 64, 32",
        ),
        (
            "nvfp4",
            "model.layers.2.block_sparse_moe.experts.3.w2.weight",
            2,
            r"24 inputs .* nvfp4; expected .*of 32, 16",
        ),
        ("mxfp8", "model.layers.1.self_attn.o_proj.weight", 8, r"rank 7 of 8, tensor '.*o_proj.weight': 128 inputs"),
    ],
)
def test_a_cut_through_a_block_is_refused(stored: str, weight: str, world: int, message: str) -> None:
    with pytest.raises(ShardRefused, match=message):
        spread(eight(), Shard(world - 1, world), {weight: stored})


def test_outputs_may_be_cut_anywhere() -> None:
    """Rows of a quantised matrix have blocks of their own: 48 rows in six parts of 6 cut none."""
    rows = [t.name for t in GRAPHS["tiny"].tensors() if t.name.endswith(("gate_proj.weight", "q_proj.weight"))]
    spread(eight(), Shard(3, 8), dict.fromkeys(rows, "mxfp8"))


def reaxed(weight: str, slot: str, axes: tuple[str | None, ...]) -> ModelGraph:
    """The tiny graph with other axes of one tensor."""
    graph = trace(TEXTS["tiny"])
    for node in graph.fx.nodes:
        decl = node.meta.get("type")
        if isinstance(decl, WeightDecl) and decl.name == weight:
            node.meta["type"] = replace(decl, slots={**decl.slots, slot: replace(decl.slots[slot], axes=axes)})
            return infer(graph.fx)
    raise AssertionError(weight)


CUT = {
    (decl.name, slot): tensor.axes
    for decl in GRAPHS["tiny"].weights.values()
    if decl.name.startswith(("model.layers.0", "model.layers.2", "lm_head"))
    for slot, tensor in decl.slots.items()
    if any(tensor.axes) and not decl.name.endswith(".gate") and slot in ("weight", "w1.5", "w2.5", "w3.5")
}
OTHER = {"heads": "kv_heads", "kv_heads": "heads", "index_heads": "kv_heads", "ff": "heads", "vocab": "ff"}


@pytest.mark.parametrize("wrong", ["turned", "missing", "other"])
@pytest.mark.parametrize(("weight", "slot"), CUT)
def test_a_wrong_axis_does_not_get_through(weight: str, slot: str, wrong: str) -> None:
    """Cut along the other dimension, not at all, or with the parts of another axis."""
    axes = CUT[weight, slot]
    if wrong == "turned":
        axes = axes[::-1]
    elif wrong == "missing":
        axes = (None,) * len(axes)
    else:
        axes = tuple(None if axis is None else OTHER[axis] for axis in axes)
    graph = reaxed(weight, slot, axes)
    if weight == "lm_head" and wrong == "missing":  # every rank then computes all logits: right, and no gather
        whole = shard(graph, TEXTS["tiny"], Shard(0, 2))
        assert "all_gather" not in {c.op.spec.name for c in whole.calls}
        return
    with pytest.raises((GraphError, OpRefused)) as info:
        shard(graph, TEXTS["tiny"], Shard(1, 2))
    assert isinstance(info.value, M31Error)


def test_the_message_for_axes_that_do_not_fit() -> None:
    graph = reaxed("model.layers.0.self_attn.o_proj", "weight", ("heads", None))
    with pytest.raises(
        GraphError,
        match=r"shard pass, node linear.*'sparse_attention' is spread along heads; expected one that is whole",
    ):
        shard(graph, TEXTS["tiny"], Shard(0, 2))


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        (("ff", "heads"), r"spreads along \['ff', 'heads'\]"),
        (("rows", None), r"spreads along 'rows'; expected heads or ff"),
    ],
)
def test_axes_that_cannot_be_spread(axes: tuple[str | None, ...], message: str) -> None:
    with pytest.raises(GraphError, match=message):
        placement(reaxed("model.layers.0.mlp.gate_proj", "weight", axes), TEXTS["tiny"], Shard(0, 2))


def test_an_op_without_a_rule_is_refused() -> None:
    """A fused op, or a graph that has been spread already."""
    text, own = TEXTS["tiny"], Shard(0, 2)
    once = shard(GRAPHS["tiny"], text, own)
    halved = replace(text, num_heads=4, num_kv_heads=1, dense_intermediate_size=24, vocab_size=32)
    with pytest.raises(GraphError, match=r"node all_reduce: no rule for op all_reduce; expected the graph as it was"):
        shard(once, halved, own)
    graph = trace(text)
    fused: fx.Node = next(n for n in graph.fx.nodes if isinstance(n.target, OpSpec) and n.target.name == "gather_rows")
    fused.target = replace(fused.target, name="gather_and_head")  # type: ignore[type-var]
    with pytest.raises(GraphError, match="no rule for op gather_and_head"):
        shard(infer(graph.fx), text, own)
