"""What a run exercised, attribute by attribute, and what of the space that is declared here it never did.

Coverage by op names let a backend pass whose softmax scale nobody had varied; so every op says which values of its
attributes, sizes and formats matter, and a value without a passed item is listed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from m31.formats.arithmetic import NAMED

if TYPE_CHECKING:
    from m31.conformance.item import Result
    from m31.sdk.manifest import Manifest

Space = Mapping[str, tuple[Any, ...]]

_EDGES = (127, 128, 129)
_LONG = (2047, 2048, 2049)
_SPECIAL = ("outlier-channel", "zero-blocks", "negative-zero", "subnormals")
_CONTEXTS = {"context": (1, 33, 40, 256, 272, 2047, 2048, 2049, 2180), "pages": (1, 16, 17), "page_tokens": (128,)}
_ATTENTION: Space = {
    "tokens": (0, 1, 2, 8),
    "q_len": (0, 1, 8, 17, 20),
    "sequences": (1, 3),
    "heads": (4, 8, 16),
    "kv_heads": (1, 2, 4),
    "head_dim": (128,),
    "values": ("ordinary", "equal-keys", "peaked", "outlier-channel", "zero-blocks", "saturating"),
    **_CONTEXTS,
}
_MOVED: Space = {"tokens": (0, *_EDGES, *_LONG)}
_ACTIVATION: Space = {"alpha": (1.702, 1.25), "beta": (1.0, 0.5)}
_EXPERTS: Space = {
    "tokens": (0, 1, 16, 17, *_EDGES),
    "experts": (5, 6, 8, 128),
    "hit": ("random", "all-one", "one-each", "idle"),
    "limit": (7.0, 3.0, 1.5),
    "routed_scaling_factor": (2.0, 0.75),
    "values": ("ordinary", *_SPECIAL),
    **_ACTIVATION,
}
_WRITES: Space = {
    "tokens": (0, 1, *_EDGES, *_LONG),
    "padding": (False, True),
    "head_dim": (16, 128),
    "page_tokens": (128,),
    "values": ("ordinary", "saturating", *_SPECIAL),
}
_QKV: Space = {
    "tokens": (0, 1, 4, 129),
    "width": (128, 6144),
    "round_query": (True, False),
    "round_kv": (True, False),
    "padding": (True, False),
}

SPACE: Mapping[str, Space] = {
    "embedding": _MOVED,
    "gather_rows": {"tokens": (9, 17, 2049), "rows": (0, 1, *_EDGES)},
    "round_channels": {**_MOVED, "values": ("ordinary", "not-finite", "negative-zero")},
    "round_heads": {**_MOVED, "values": ("ordinary", "not-finite", "negative-zero")},
    "gemma_rmsnorm": {**_MOVED, "width": (16, 80, 128, 6144), "values": ("ordinary", "large", *_SPECIAL)},
    "head_rmsnorm": {**_MOVED, "heads": (1, 2, 4, 64), "values": ("ordinary", *_SPECIAL)},
    "rope": {**_MOVED, "head_dim": (16, 128), "heads": (1, 4, 16)},
    "rope_table": {**_MOVED, "theta": (1e4, 5e6, 1e7), "rotary_dim": (8, 16, 32, 64, 128)},
    "linear": {
        "tokens": (0, 1, 16, 17, *_EDGES, *_LONG),
        "width": (33, 48, 80, 96, 128, 160, 1024, 6144, 16384),
        "values": ("ordinary", *_SPECIAL),
    },
    "lm_head": {"rows": (0, 1, *_EDGES), "width": (33, 128, 6144), "values": ("ordinary", *_SPECIAL)},
    "kv_write": {**_WRITES, "heads": (1, 2, 4)},
    "index_write": _WRITES,
    "block_scores": {name: values for name, values in _ATTENTION.items() if name != "kv_heads"},
    "block_select": {
        "tokens": (0, 1, 4),
        "pages": (1, 2, 16, 17, 40, 8192),
        "topk": (4, 16),
        "local_blocks": (0, 1, 2, 3),
        "init_blocks": (0, 1, 2),
        "values": ("ordinary", "ties", "all-equal", "negative", "nothing-scored"),
    },
    "sparse_attention": _ATTENTION,
    "dense_attention": _ATTENTION,
    "router": {
        "tokens": (0, 1, 17, *_EDGES),
        "topk": (2, 3, 4),
        "width": (128, 6144),
        "values": ("ordinary", "equal-scores", "twin-experts", "bias-decides", *_SPECIAL),
    },
    "experts": _EXPERTS,
    "swiglu_oai": {
        **_MOVED,
        **_ACTIVATION,
        "limit": (7.0, 3.0),
        "values": ("ordinary", "at-the-limits", "far-beyond", *_SPECIAL),
    },
    "add": {**_MOVED, "values": ("ordinary", "cancelling", "huge", *_SPECIAL)},
    "all_reduce": {"tokens": (0, 1, *_EDGES), "world": (1,)},
    "all_gather": {"rows": (0, 1, *_EDGES), "world": (1,)},
    "concat": {"tokens": (0, 1, 7)},
    "draft_attention": {"tokens": (1, 3, 7, 14), "window": (3, 9, 64, 129, 2048), "page_tokens": (4, 128)},
    "markov_embedding": {"rows": (0, 1, *_EDGES, *_LONG)},
    "markov_bias": {"rows": (0, 1, 7)},
    "confidence": {"rows": (0, 1, 5, 7), "with_markov": (True, False)},
    "lora_logits": {"rows": (0, 1, *_EDGES), "width": (21, 1024), "values": ("ordinary", *_SPECIAL)},
    "lora_experts": {
        "tokens": (0, 1, 17, *_EDGES),
        "experts": (5, 6, 8),
        "hit": ("random", "all-one", "idle"),
        "limit": (7.0, 3.0, 1.5),
        "routed_scaling_factor": (2.0, 0.75),
        "values": ("ordinary", *_SPECIAL),
        **_ACTIVATION,
    },
    "qkv_insert": {**_QKV, "round_index": (True, False)},
    "qkv_insert_dense": _QKV,
    "add_norm": {"tokens": (0, 1, 129), "width": (48, 6144), "rounded": (True, False)},
    "experts_shared": {"tokens": (0, 1, 5, 129), "limit": (7.0, 1.5), "routed_scaling_factor": (2.0, 0.75)},
}
"""Op -> attribute -> values that its cases exist to exercise. Formats and arithmetics come from the manifest."""

_ROUTED = ("float32", "bfloat16", "mxfp8", "nvfp4")
_WEIGHTS = {"linear": ("float32", "bfloat16", "mxfp8"), "experts": _ROUTED, "lora_experts": _ROUTED}
_KV = ("kv_write", "sparse_attention", "dense_attention")
_INDEX = ("index_write", "block_scores")


@dataclass(frozen=True)
class Covered:
    """One attribute of an op.

    Args:
        exercised: value -> passed items, in the order of the space, values outside of it last.
        never: values of the space without a passed item.
    """

    exercised: Mapping[Any, int]
    never: tuple[Any, ...]


def space_of(op: str, manifest: Manifest) -> Space:
    """The space of an op, with what the manifest claims of formats and arithmetics."""
    formats = manifest.formats
    space = dict(SPACE[op])
    if op in _WEIGHTS:
        space["stored"] = tuple(form for form in _WEIGHTS[op] if form in formats.weights)
    if op in _KV:
        space["kv"] = formats.kv
    if op in _INDEX:
        space["index"] = formats.index
    if op == "linear":
        names = tuple(NAMED) if manifest.arithmetic == "all" else manifest.arithmetic
        space["arithmetic"] = names
    return {**space, "compute": formats.compute, "gaps": (False, True)}


def coverage(results: Iterable[Result], manifest: Manifest) -> dict[str, dict[str, Covered]]:
    """Op -> attribute -> what of it was exercised by items that passed. Ops without a passed item are left out: that is
    what claims and omissions are about."""
    seen: dict[str, dict[str, dict[Any, int]]] = {}
    for result in results:
        if result.level == "L1" and result.outcome == "passed" and result.subject in SPACE:
            counts = seen.setdefault(result.subject, {})
            for name, value in result.attributes.items():
                there = counts.setdefault(name, {})
                there[value] = there.get(value, 0) + 1
    return {op: _covered(space_of(op, manifest), counts) for op, counts in seen.items()}


def _covered(space: Space, counts: Mapping[str, Mapping[Any, int]]) -> dict[str, Covered]:
    made = {}
    for name in [*space, *(name for name in counts if name not in space)]:
        found, wanted = counts.get(name, {}), space.get(name, ())
        ordered = [value for value in wanted if value in found] + [value for value in found if value not in wanted]
        never = tuple(value for value in wanted if value not in found)
        made[name] = Covered({value: found[value] for value in ordered}, never)
    return made
