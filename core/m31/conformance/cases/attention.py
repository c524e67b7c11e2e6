"""Cases of everything that has to do with pages, and of block selection."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from m31.conformance.cases.matrices import special
from m31.conformance.cases.planned import Planned
from m31.ops import Case
from m31.ops.cases import Batch, batch, pages, rng_for

_CONTEXT = ("positions", "cu_q", "seq_lens", "page_table")

# name -> query lengths, context lengths (queries included), page, channels, query heads, KV heads, top-k, values.
# Contexts lie around the edge between 16 and 17 blocks; pages are in random physical order, the last one partial.
_Shape = tuple[list[int], list[int], int, int, int, int, int, str]
_SHAPES: dict[str, _Shape] = {
    "prefill-wide": ([17], [35], 16, 16, 4, 2, 2, "ordinary"),
    "decode-wide": ([1, 1, 1], [16, 33, 40], 16, 16, 4, 2, 2, "ordinary"),
    "nothing-to-do": ([0, 0], [5, 17], 16, 16, 4, 2, 2, "ordinary"),
    "one-of-three-has-none": ([2, 0, 1], [18, 20, 33], 16, 16, 4, 2, 2, "ordinary"),
    "blocks-16": ([1, 3], [255, 256], 16, 16, 4, 2, 16, "ordinary"),
    "blocks-17": ([1, 3], [257, 272], 16, 16, 4, 2, 16, "ordinary"),
    "chunk-over-edges": ([20], [42], 16, 16, 2, 2, 2, "ordinary"),
    "tokens-equal-heads-wide": ([4], [20], 16, 16, 4, 2, 2, "ordinary"),
    "one-kv-head": ([2, 1], [40, 17], 16, 32, 8, 1, 2, "ordinary"),
    "as-many-kv-heads": ([3], [40], 16, 16, 4, 4, 2, "ordinary"),
    "real-decode-2047": ([1], [2047], 128, 128, 16, 1, 16, "ordinary"),
    "real-decode-2048": ([1], [2048], 128, 128, 2, 2, 16, "ordinary"),
    "real-decode-2049": ([1], [2049], 128, 128, 16, 1, 16, "ordinary"),
    "real-verify-2180": ([8], [2180], 128, 128, 2, 1, 16, "ordinary"),
    "real-decode-batch": ([1, 1, 1, 1], [127, 128, 129, 300], 128, 128, 4, 2, 2, "ordinary"),
    "real-mixed": ([5, 1, 8], [130, 257, 8], 128, 128, 4, 2, 2, "ordinary"),
    "real-equal-keys": ([2], [200], 128, 128, 4, 2, 2, "equal-keys"),
    "real-peaked": ([2], [200], 128, 128, 4, 2, 2, "peaked"),
    "real-outlier-channel": ([2], [200], 128, 128, 4, 2, 2, "outlier-channel"),
    "real-zero-blocks": ([2], [200], 128, 128, 4, 2, 2, "zero-blocks"),
    "real-saturating": ([2], [200], 128, 128, 4, 2, 2, "saturating"),
}


def _vectors(x: Any, kind: str) -> Any:
    """Keys or values [..., D] with something in them."""
    if kind == "equal-keys":
        return np.where(np.isnan(x), x, np.linspace(-1, 1, x.shape[-1]))
    if kind == "saturating":  # beyond 448, the largest number of an 8-bit page without scales
        return x * 300
    if kind in ("outlier-channel", "zero-blocks"):
        rows = x.reshape(-1, x.shape[-1])
        out = np.where(np.isnan(rows), rows, special(np.nan_to_num(rows), kind)).reshape(x.shape)
        return np.where(np.abs(out) > 400, out / 100, out) if kind == "outlier-channel" else out
    return x


def _choices(rng: np.random.Generator, b: Batch, page: int, kv_heads: int, topk: int) -> Any:
    blocks = np.full((len(b.positions), kv_heads, topk), -1, np.int64)
    for t, position in enumerate(b.positions):
        own = int(position) // page
        for h in range(kv_heads):
            chosen = np.sort(np.append(rng.permutation(own)[: topk - 1], own))
            blocks[t, h, : len(chosen)] = chosen
    return blocks


def _attention(op: str, name: str) -> Case:
    q_lens, ctx, page, dim, heads, kv_heads, topk, kind = _SHAPES[name]
    rng = rng_for(f"{op}/{name}")
    b = batch(rng, q_lens, ctx, page)
    q = rng.standard_normal((sum(q_lens), heads, dim)) * (30 if kind == "peaked" else 1)
    inputs = {"q": q, **b.inputs(*_CONTEXT)}
    if op == "block_scores":
        return Case(f"{op}/{name}", {"layer": 0}, inputs, {(0, "index"): _vectors(pages(rng, b, page, dim), kind)})
    state: dict[tuple[int, str], Any] = {
        (0, part): pages(rng, b, page, kv_heads, dim)
        if part == "v" and kind in ("equal-keys", "saturating")
        else _vectors(pages(rng, b, page, kv_heads, dim), kind)
        for part in ("k", "v")
    }
    if op == "sparse_attention":
        inputs["blocks"] = _choices(rng, b, page, kv_heads, topk)
    return Case(f"{op}/{name}", {"layer": 0, "kv_heads": kv_heads, "scale": dim**-0.5}, inputs, state)


def _attentions(op: str) -> Iterator[Planned]:
    for name, (q_lens, ctx, page, dim, heads, kv_heads, _, kind) in _SHAPES.items():
        sizes: dict[str, Any] = {
            "tokens": sum(q_lens),
            "heads": heads,
            "head_dim": dim,
            "q_len": max(q_lens),
            "context": max(ctx),
            "sequences": len(ctx),
            "pages": max(-(-n // page) for n in ctx),
            "page_tokens": page,
            "values": kind,
        }
        if op != "block_scores":
            sizes["kv_heads"] = kv_heads
        yield Planned(
            f"{op}/{name}",
            partial(_attention, op, name),
            sizes,
            None,
            dim,
            real=page == 128 or name.endswith("-wide"),
            seconds=0.02 + 4e-6 * sum(q * n for q, n in zip(q_lens, ctx, strict=True)) * heads,
        )


# ------------------------------------------------------------------------------------------------------ block_select


def _select(name: str, positions: list[int], block: int, topk: int, init: int, local: int, kind: str) -> Case:
    case = f"block_select/{name}"
    rng = rng_for(case)
    at = np.asarray(positions, np.int64)
    count = int(at.max(initial=0)) // block + 1
    scores = rng.standard_normal((len(at), 2, count)).astype(np.float32).astype(np.float64)
    if kind == "all-equal":
        scores[:] = 0.25
    elif kind == "ties":
        scores = np.round(scores * 2) / 2
    elif kind == "nothing-scored":  # but the forced blocks: what block_scores makes of keys that are all NaN
        scores[:] = -np.inf
    elif kind == "negative":
        scores = -np.abs(scores) - 1e4
    visible = np.arange(count)[None] <= at[:, None] // block
    scores = np.where(visible[:, None], scores, -np.inf)
    attrs = {"topk": topk, "block": block, "local_blocks": local, "init_blocks": init}
    return Case(case, attrs, {"scores": scores, "positions": at})


def _selects() -> Iterator[Planned]:
    for name, positions, block, topk, init, local, kind in (
        ("real-none", [], 128, 16, 0, 1, "ordinary"),
        ("real-one", [0], 128, 16, 0, 1, "ordinary"),
        ("real-edge-of-page", [126, 127, 128, 129], 128, 16, 0, 1, "ordinary"),
        ("real-blocks-16", [2046, 2047], 128, 16, 0, 1, "ordinary"),
        ("real-blocks-17", [2047, 2048, 2049, 2175], 128, 16, 0, 1, "ordinary"),
        ("real-blocks-17-ties", [2175, 2175, 2100], 128, 16, 0, 1, "ties"),
        ("real-blocks-40-all-equal", [5100, 5119], 128, 16, 0, 1, "all-equal"),
        ("real-negative", [5100, 5119], 128, 16, 0, 1, "negative"),
        ("real-nothing-scored", [5119], 128, 16, 0, 1, "nothing-scored"),
        ("real-init-and-local", [4000, 5119], 128, 16, 2, 2, "ordinary"),
        ("real-all-forced", [4000, 5119], 128, 4, 1, 3, "ordinary"),
        ("real-none-forced", [4000, 5119], 128, 16, 0, 0, "ordinary"),
        ("real-last-positions", [1_048_447, 1_048_448, 1_048_575], 128, 16, 0, 1, "ordinary"),
    ):
        yield Planned(
            f"block_select/{name}",
            partial(_select, name, positions, block, topk, init, local, kind),
            {
                "tokens": len(positions),
                "pages": max(positions, default=0) // block + 1,
                "topk": topk,
                "block": block,
                "local_blocks": local,
                "init_blocks": init,
                "values": kind,
            },
            real=True,
        )


# ------------------------------------------------------------------------------------------------------------- writes


def _written(op: str, name: str, q_lens: list[int], ctx: list[int], page: int, dim: int, heads: int, kind: str) -> Case:
    case = f"{op}/{name}"
    rng = rng_for(case)
    b = batch(rng, q_lens, ctx, page)
    slots = b.slot_map.copy()
    if kind == "padding":
        slots[1::2] = -1
    if kind == "all-padding":
        slots[:] = -1
    k = _written_values(rng.standard_normal((len(slots), heads, dim)), kind)
    state: dict[tuple[int, str], Any] = {(0, "index"): rng.standard_normal((b.num_pages, page, dim))}
    if op == "index_write":
        return Case(case, {"layer": 0}, {"index_k": k, "slot_map": slots}, state)
    state = {(0, part): rng.standard_normal((b.num_pages, heads, page, dim)) for part in ("k", "v")}
    v = _written_values(rng.standard_normal((len(slots), heads, dim)), kind).reshape(len(slots), heads * dim)
    return Case(case, {"layer": 0}, {"k": k, "v": v, "slot_map": slots}, state)


def _written_values(x: Any, kind: str) -> Any:
    if kind == "saturating":
        return x * 300
    flat = special(x.reshape(-1, x.shape[-1]), kind) if x.size else x
    return flat.reshape(x.shape)


def _writes(op: str) -> Iterator[Planned]:
    for name, q_lens, ctx, page, dim, heads, kind in (
        ("nothing", [0], [17], 16, 16, 2, "ordinary"),
        ("all-padding", [3], [19], 16, 16, 2, "all-padding"),
        ("tokens-2047", [2047], [2047], 128, 16, 1, "ordinary"),
        ("tokens-2048", [2048], [2048], 128, 16, 1, "ordinary"),
        ("tokens-2049", [2049], [2049], 128, 16, 1, "ordinary"),
        ("tokens-equal-heads", [4], [9], 16, 16, 4, "ordinary"),
        ("real-one", [1], [129], 128, 128, 4, "ordinary"),
        ("real-127", [127], [127], 128, 128, 2, "ordinary"),
        ("real-128", [128], [128], 128, 128, 2, "ordinary"),
        ("real-129", [129], [129], 128, 128, 2, "ordinary"),
        ("real-decode-batch", [1, 1, 1, 1], [1, 128, 129, 300], 128, 128, 4, "ordinary"),
        ("real-over-edges", [140, 3], [258, 130], 128, 128, 2, "ordinary"),
        ("real-padding", [7, 2], [130, 2], 128, 128, 2, "padding"),
        ("real-saturating", [5], [130], 128, 128, 2, "saturating"),
        *((f"real-{kind}", [5], [130], 128, 128, 2, kind) for kind in ("outlier-channel", "zero-blocks")),
        *((f"real-{kind}", [5], [130], 128, 128, 2, kind) for kind in ("negative-zero", "subnormals")),
    ):
        width = 1 if op == "index_write" else heads
        sizes: dict[str, Any] = {"tokens": sum(q_lens), "heads": width, "head_dim": dim, "page_tokens": page}
        yield Planned(
            f"{op}/{name}",
            partial(_written, op, name, q_lens, ctx, page, dim, width, kind),
            {**sizes, "values": kind, "padding": "padding" in kind},
            None,
            dim,
            real=name.startswith("real"),
        )


# -------------------------------------------------------------------------------------------------- fused projections

_HEADS = {"q": 4, "k": 2, "v": 2, "iq": 2, "ik": 1}


def _qkv(op: str, name: str, q_lens: list[int], ctx: list[int], page: int, dim: int, width: int, rounded: bool) -> Case:
    case = f"{op}/{name}"
    rng = rng_for(case)
    b = batch(rng, q_lens, ctx, page)
    n = sum(q_lens)
    heads = {arg: count for arg, count in _HEADS.items() if op == "qkv_insert" or not arg.startswith("i")}
    angle = rng.uniform(0, 6.3, (n, dim // 4))
    inputs: dict[str, Any] = {"h": rng.standard_normal((n, width)), "slots": b.slot_map.copy()}
    if "padding" in name:
        inputs["slots"][1::2] = -1
    inputs |= {"cos": np.cos(angle), "sin": np.sin(angle)}
    inputs |= {arg: rng.standard_normal((count * dim, width)) * width**-0.5 for arg, count in heads.items()}
    inputs |= {f"{arg}_norm": rng.standard_normal(dim) * 0.3 for arg in heads if arg != "v"}
    state: dict[tuple[int, str], Any] = {
        (0, kind): rng.standard_normal((b.num_pages, 2, page, dim)) for kind in ("k", "v")
    }
    attrs: dict[str, Any] = {"layer": 0, "heads": 4, "kv_heads": 2, "eps": 1e-6}
    attrs |= {"round_query": rounded, "round_kv": rounded}
    if op == "qkv_insert":
        state[0, "index"] = rng.standard_normal((b.num_pages, page, dim))
        attrs |= {"index_heads": 2, "round_index": rounded}
    return Case(case, attrs, inputs, state)


def _qkvs(op: str) -> Iterator[Planned]:
    for name, q_lens, ctx, page, dim, width, rounded in (
        ("wide", [5, 2], [19, 2], 16, 16, 64, True),
        ("real", [3, 1], [130, 129], 128, 128, 128, True),
        ("real-unrounded", [3, 1], [130, 129], 128, 128, 128, False),
        ("real-padding", [5], [6], 128, 128, 128, True),
        ("real-129", [129], [129], 128, 64, 128, True),
        ("hidden-6144", [2], [5], 128, 128, 6144, True),
    ):
        yield Planned(
            f"{op}/{name}",
            partial(_qkv, op, name, q_lens, ctx, page, dim, width, rounded),
            {"tokens": sum(q_lens), "width": width, "page_tokens": page, "head_dim": dim, "round_query": rounded},
            (width,),
            dim,
            real=True,
            seconds=0.04 if sum(q_lens) * width < 4096 else 0.2,
        )


# --------------------------------------------------------------------------------------------------------------- draft


def _draft(name: str, q_lens: list[int], ctx: list[int], window: int) -> Case:
    case, page, dim, heads, kv_heads = f"draft_attention/{name}", 128, 128, 4, 2
    rng = rng_for(case)
    b = batch(rng, q_lens, ctx, page)
    n = sum(q_lens)
    state: dict[tuple[int, str], Any] = {(0, kind): pages(rng, b, page, kv_heads, dim) for kind in ("k", "v")}
    for s, (length, count) in enumerate(zip(ctx, q_lens, strict=True)):
        for at in range(length - count, length):  # the block's own slots are never read
            for array in state.values():
                array[b.page_table[s, at // page], :, at % page] = np.nan
    inputs = {
        "q": rng.standard_normal((n, heads, dim)),
        "k": rng.standard_normal((n, kv_heads, dim)),
        "v": rng.standard_normal((n, kv_heads * dim)),
        **b.inputs(*_CONTEXT),
    }
    return Case(case, {"layer": 0, "kv_heads": kv_heads, "scale": dim**-0.5, "window": window}, inputs, state)


def _drafts() -> Iterator[Planned]:
    for name, q_lens, ctx, window in (
        ("real-block-of-7", [7], [200], 2048),
        ("real-window", [7, 7], [400, 140], 129),
        ("real-no-context", [7], [7], 2048),
    ):
        sizes = {"tokens": sum(q_lens), "context": max(ctx), "window": window, "head_dim": 128, "page_tokens": 128}
        yield Planned(
            f"draft_attention/{name}",
            partial(_draft, name, q_lens, ctx, window),
            sizes,
            None,
            128,
            real=True,
        )


ATTENTION: dict[str, list[Planned]] = {
    **{op: list(_attentions(op)) for op in ("block_scores", "sparse_attention", "dense_attention")},
    "block_select": list(_selects()),
    **{op: list(_writes(op)) for op in ("kv_write", "index_write")},
    **{op: list(_qkvs(op)) for op in ("qkv_insert", "qkv_insert_dense")},
    "draft_attention": list(_drafts()),
}
