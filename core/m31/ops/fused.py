"""The fused ops (DESIGN.md §4): what a backend may serve with one kernel, each declared by the ops that it replaces.

Bodies are written in the words of `m31.graph.model`, which they must match. Roundings that the graph contains only
under some arithmetics (`m31.graph.Rounding`) are chosen by boolean attributes, which a match binds.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from m31.ops.attention import dense_attention, sparse_attention
from m31.ops.basic import add
from m31.ops.body import FusedOp, Layers, declare
from m31.ops.cache import index_write, kv_write
from m31.ops.cases import batch, rng_for
from m31.ops.examples import Example
from m31.ops.linear import linear
from m31.ops.moe import expert_slots, experts, swiglu_oai
from m31.ops.norm import gemma_rmsnorm, head_rmsnorm
from m31.ops.rope import rope
from m31.ops.rounding import round_channels, round_heads
from m31.ops.select import block_scores

_HEAD_DIM, _PAGE, _HIDDEN = 8, 4, 24


def _head(h: Any, w: Any, norm: Any, cos: Any, sin: Any, eps: float, heads: int, rounded: bool) -> Any:
    """Projection, per-head norm and RoPE of one branch: [T,C] -> [T,h,D] (MODEL.md §2.3)."""
    x_ThD = rope(head_rmsnorm(linear(h, w), norm, eps=eps, heads=heads), cos, sin)
    return round_heads(x_ThD) if rounded else x_ThD


def _qkv_dense_body(
    h: Any,
    kv: Any,
    slots: Any,
    cos: Any,
    sin: Any,
    q: Any,
    q_norm: Any,
    k: Any,
    k_norm: Any,
    v: Any,
    *,
    layer: int,
    heads: int,
    kv_heads: int,
    eps: float,
    round_query: bool,
    round_kv: bool,
) -> tuple[Any, Any]:
    q_ThD = _head(h, q, q_norm, cos, sin, eps, heads, round_query)
    k_ThD = _head(h, k, k_norm, cos, sin, eps, kv_heads, round_kv)
    v_TC = linear(h, v)
    return q_ThD, kv_write(kv, k_ThD, round_channels(v_TC) if round_kv else v_TC, slots, layer=layer)


def _qkv_body(
    h: Any,
    kv: Any,
    slots: Any,
    cos: Any,
    sin: Any,
    q: Any,
    q_norm: Any,
    k: Any,
    k_norm: Any,
    v: Any,
    iq: Any,
    iq_norm: Any,
    ik: Any,
    ik_norm: Any,
    *,
    layer: int,
    heads: int,
    kv_heads: int,
    index_heads: int,
    eps: float,
    round_query: bool,
    round_kv: bool,
    round_index: bool,
) -> tuple[Any, Any, Any]:
    q_ThD, kv = _qkv_dense_body(
        h,
        kv,
        slots,
        cos,
        sin,
        q,
        q_norm,
        k,
        k_norm,
        v,
        layer=layer,
        heads=heads,
        kv_heads=kv_heads,
        eps=eps,
        round_query=round_query,
        round_kv=round_kv,
    )
    iq_ThD = _head(h, iq, iq_norm, cos, sin, eps, index_heads, round_query)
    ik_T1D = _head(h, ik, ik_norm, cos, sin, eps, 1, round_index)
    return q_ThD, iq_ThD, index_write(kv, ik_T1D, slots, layer=layer)


def _add_norm_body(x: Any, y: Any, w: Any, *, eps: float, rounded: bool) -> tuple[Any, Any]:
    sum_TC = add(x, y)
    h_TC = gemma_rmsnorm(sum_TC, w, eps=eps)
    return sum_TC, round_channels(h_TC) if rounded else h_TC


def _experts_body(
    h: Any,
    ids: Any,
    weights: Any,
    routed: Any,
    gate: Any,
    up: Any,
    down: Any,
    *,
    alpha: float,
    beta: float,
    limit: float,
    routed_scaling_factor: float,
    experts: int,
) -> Any:
    act = {"alpha": alpha, "beta": beta, "limit": limit}
    routed_TC = _routed(h, ids, weights, routed, experts=experts, routed_scaling_factor=routed_scaling_factor, **act)
    return add(routed_TC, linear(swiglu_oai(linear(h, gate), linear(h, up), **act), down))


_routed = experts  # the op, which in the body above is hidden by the attribute of the same name


def _table(seed: str, tokens: int, half: int) -> dict[str, Any]:
    angle = rng_for(f"{seed}/angle").uniform(0, 6.3, (tokens, half))
    return {"cos": np.cos(angle), "sin": np.sin(angle)}


def _qkv_examples(op: str, *, indexed: bool) -> Iterator[Example]:
    # (name, queries and contexts of the sequences, query heads, scale of the input). Four tokens and four heads are
    # the ambiguous shape of BUG-1.
    for name, q_lens, ctx, heads, scale in (
        ("two-sequences", [5, 2], [9, 2], 4, 1.0),
        ("one-token", [1], [6], 4, 1.0),
        ("none", [0], [3], 4, 1.0),
        ("heads-equal-tokens", [4], [7], 4, 1.0),
        ("padding", [6], [6], 6, 1.0),
        ("outliers", [3], [11], 4, 1e3),
    ):
        rng = rng_for(f"{op}/{name}")
        b = batch(rng, q_lens, ctx, _PAGE)
        slots = b.slot_map.copy()
        if name == "padding":
            slots[1::2] = -1
        kv_heads, index_heads = (4, 3) if name == "heads-equal-tokens" else (2, 2)
        sizes = {"q": heads, "k": kv_heads, "v": kv_heads}
        attrs = {"layer": 0, "heads": heads, "kv_heads": kv_heads, "eps": 1e-6}
        if indexed:
            sizes |= {"iq": index_heads, "ik": 1}
            attrs |= {"index_heads": index_heads}
        shapes: dict[str, Any] = {w: (n * _HEAD_DIM, _HIDDEN) for w, n in sizes.items()}
        shapes |= {f"{w}_norm": (_HEAD_DIM,) for w in sizes if w != "v"}
        state: dict[tuple[int, str], Any] = {
            (0, kind): rng.standard_normal((b.num_pages, kv_heads, _PAGE, _HEAD_DIM)) for kind in ("k", "v")
        }
        if indexed:
            state[0, "index"] = rng.standard_normal((b.num_pages, _PAGE, _HEAD_DIM))
        yield Example(
            name,
            attrs,
            {"h": (len(slots), _HIDDEN), **shapes},
            given={"slots": slots, **_table(f"{op}/{name}", len(slots), 2)},
            scales={"h": scale},
            state=state,
        )


def _add_norm_examples(op: str) -> Iterator[Example]:
    for name, n, scale in (("one", 1, 1.0), ("none", 0, 1.0), ("many", 7, 1.0), ("large", 3, 1e4), ("tiny", 3, 1e-4)):
        shapes = {"x": (n, 48), "y": (n, 48), "w": (48,)}
        yield Example(name, {"eps": 1e-6}, shapes, scales={"x": scale, "y": scale})


def _experts_examples(op: str) -> Iterator[Example]:
    ordinary = {"alpha": 1.702, "beta": 1.0, "limit": 7.0, "routed_scaling_factor": 2.0}
    # BUG-2: parameters that differ from every plausible default, and inputs beyond the clamps
    odd = {"alpha": 1.25, "beta": 0.5, "limit": 1.5, "routed_scaling_factor": 0.75}
    count, width, inner, shared, topk = 6, 16, 12, 20, 2
    for name, n, attrs in (
        ("many", 13, ordinary),
        ("none", 0, ordinary),
        ("one", 1, ordinary),
        ("one-expert-hit-by-all", 5, ordinary),
        ("other-parameters", 6, odd),
    ):
        rng = rng_for(f"{op}/{name}/ids")
        ids = np.asarray([rng.permutation(count)[:topk] for _ in range(n)], np.int64).reshape(n, topk)
        if name == "one-expert-hit-by-all":
            ids[:] = [3, 5]
        routed = {s: (width, inner) if s.startswith("w2") else (inner, width) for s in expert_slots(count)}
        yield Example(
            name,
            {**attrs, "experts": count},
            {
                "h": (n, width),
                "routed": routed,
                "gate": (shared, width),
                "up": (shared, width),
                "down": (width, shared),
            },
            given={"ids": ids, "weights": rng.uniform(0.1, 1, (n, topk))},
            scales={"h": 2.0},
        )


def _sparse_layers(m: Layers) -> int:
    return sum(kind == "sparse" for kind in m.attention)


qkv_insert = declare(
    "qkv_insert",
    "The five projections of a sparse layer, the Gemma norms of their heads, RoPE, and both cache writes (MODEL.md "
    "§2.3, §2.4). h [T,C] -> q [T,h,D], iq [T,index heads,D], and the cache with this step's K, V and index key at "
    "`slots`. The round_* attributes say which of q and index q, K and V, and the index key are rounded to BF16.",
    _qkv_body,
    outputs=("q", "iq", "kv"),
    anchor=index_write.name,
    readers={"q": (sparse_attention.name,), "iq": (block_scores.name,)},
    expected=_sparse_layers,
    examples=lambda op: _qkv_examples(op, indexed=True),
)

qkv_insert_dense = declare(
    "qkv_insert_dense",
    "The same for a layer without an index branch (M3 layers 0-2): h [T,C] -> q [T,h,D], and the cache.",
    _qkv_dense_body,
    outputs=("q", "kv"),
    anchor=kv_write.name,
    readers={"q": (dense_attention.name,)},
    expected=lambda m: m.num_layers - _sparse_layers(m),
    examples=lambda op: _qkv_examples(op, indexed=False),
)

add_norm = declare(
    "add_norm",
    "The residual sum x + y and its Gemma RMS norm (MODEL.md §2.1, §2.2), rounded to BF16 where what follows quantises "
    "it. [T,C] x 2 -> sum [T,C], h [T,C]. Twice per layer: before the MLP, and before what follows the layer.",
    _add_norm_body,
    outputs=("sum", "h"),
    anchor=gemma_rmsnorm.name,
    expected=lambda m: 2 * m.num_layers,
    examples=_add_norm_examples,
)

experts_shared = declare(
    "experts_shared",
    "The routed experts, the shared expert and their sum (MODEL.md §2.5): routed_scaling_factor multiplies the routed "
    "part only. h [T,C], ids [T,K], weights [T,K] -> [T,C].",
    _experts_body,
    outputs=("y",),
    anchor=experts.name,
    expected=lambda m: sum(kind == "moe" for kind in m.mlp),
    examples=_experts_examples,
)

FUSED: dict[str, FusedOp] = {op.name: op for op in (qkv_insert, qkv_insert_dense, add_norm, experts_shared)}
