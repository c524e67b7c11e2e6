"""Writing keys, values and index keys into pages (MODEL.md §2.4 "Caches", DESIGN.md §5).

A page holds `page_tokens` tokens of every layer: K and V `[pages, kv_heads, page_tokens, head_dim]` and, on sparse
layers, the index key `[pages, page_tokens, index_dim]`. `slot_map[t] = page * page_tokens + offset`; a negative slot
marks padding and is never written.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from m31.ops.cases import batch, rng_for
from m31.ops.spec import KV, Arg, Attrs, Case, OpSpec, StateType, TensorType

SLOTS = Arg("slot_map", "T", "int64")
KVMap = dict[tuple[int, str], Any]


def _copy(kv: KVMap) -> KVMap:
    return {key: value.copy() for key, value in kv.items()}


def _kv_types(attrs: Attrs, given: Sequence[Any]) -> tuple[StateType, ...]:
    k, v = given[1], given[2]
    if v.shape[1] != k.shape[1] * k.shape[2]:
        kv_write.refuse(f"v has {v.shape[1]} channels", expected=f"{k.shape[1]} heads of {k.shape[2]}, as k")
    return (given[0],)


def _kv_naive(attrs: Attrs, kv: KVMap, k: Any, v: Any, slot_map: Any) -> tuple[KVMap, ...]:
    kv, layer = _copy(kv), attrs["layer"]
    page_tokens = kv[layer, "k"].shape[2]
    for t, slot in enumerate(slot_map):
        if slot >= 0:
            page, offset = divmod(int(slot), page_tokens)
            kv[layer, "k"][page, :, offset] = k[t]
            kv[layer, "v"][page, :, offset] = v[t].reshape(k[t].shape)
    return (kv,)


def _state(rng: np.random.Generator, pages: int, heads: int, page: int, dim: int) -> KVMap:
    return {
        (0, "k"): rng.standard_normal((pages, heads, page, dim)),
        (0, "v"): rng.standard_normal((pages, heads, page, dim)),
        (0, "index"): rng.standard_normal((pages, page, dim)),
    }


def _slots(name: str, n: int) -> tuple[np.random.Generator, Any, int]:
    rng = rng_for(name)
    b = batch(rng, [n, 2], [n + 3, 2], 4)
    slots = b.slot_map.copy()
    if name.endswith("padding"):
        slots[1::2] = -1
    return rng, slots, b.num_pages


def _kv_cases() -> Iterator[Case]:
    # heads == tokens is the ambiguous shape of BUG-1
    for name, n in (("kv_write/two-sequences", 7), ("kv_write/padding", 6), ("kv_write/heads-equal-tokens", 2)):
        rng, slots, pages = _slots(name, n)
        heads = 4 if name.endswith("tokens") else 2
        inputs = {
            "k": rng.standard_normal((len(slots), heads, 8)),
            "v": rng.standard_normal((len(slots), heads * 8)),
            "slot_map": slots,
        }
        yield Case(name, {"layer": 0}, inputs, _state(rng, pages, heads, 4, 8))


kv_write = OpSpec(
    name="kv_write",
    doc="Store K (after norm and RoPE) [T,h,D] and V (raw projection) [T,h*D] of this step at slot_map; returns "
    "the cache.",
    inputs=(KV, Arg("k", "T,h,D"), Arg("v", "T,C"), SLOTS),
    outputs=(KV,),
    attrs=("layer",),
    infer=_kv_types,
    naive=_kv_naive,
    cases=_kv_cases,
    refuses=(
        (
            "v of another width than k",
            {"layer": 0},
            (
                StateType("kv"),
                TensorType(("T", 2, 8), "T,h,D", "model"),
                TensorType(("T", 8), "T,C", "model"),
                TensorType(("T",), "T", "int64"),
            ),
        ),
    ),
    criterion="exact",
)


def _index_types(attrs: Attrs, given: Sequence[Any]) -> tuple[StateType, ...]:
    if given[1].shape[1] != 1:
        index_write.refuse(f"{given[1].shape[1]} index-key heads", expected="one, shared by all index heads")
    return (given[0],)


def _index_naive(attrs: Attrs, kv: KVMap, k: Any, slot_map: Any) -> tuple[KVMap, ...]:
    kv, layer = _copy(kv), attrs["layer"]
    page_tokens = kv[layer, "index"].shape[1]
    for t, slot in enumerate(slot_map):
        if slot >= 0:
            page, offset = divmod(int(slot), page_tokens)
            kv[layer, "index"][page, offset] = k[t, 0]
    return (kv,)


def _index_cases() -> Iterator[Case]:
    for name, n in (("index_write/two-sequences", 7), ("index_write/padding", 6)):
        rng, slots, pages = _slots(name, n)
        inputs = {"index_k": rng.standard_normal((len(slots), 1, 8)), "slot_map": slots}
        yield Case(name, {"layer": 0}, inputs, _state(rng, pages, 2, 4, 8))


index_write = OpSpec(
    name="index_write",
    doc="Store the index key (after norm and RoPE, one head) [T,1,D] of this step at slot_map; returns the cache.",
    inputs=(KV, Arg("index_k", "T,h,D"), SLOTS),
    outputs=(KV,),
    attrs=("layer",),
    infer=_index_types,
    naive=_index_naive,
    cases=_index_cases,
    refuses=(
        (
            "two index-key heads",
            {"layer": 0},
            (StateType("kv"), TensorType(("T", 2, 8), "T,h,D", "model"), TensorType(("T",), "T", "int64")),
        ),
    ),
    criterion="exact",
)
