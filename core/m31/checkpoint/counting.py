"""Parameter, byte and cache arithmetic from a config alone, MODEL.md §3.3 and §3.7."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from m31.checkpoint.inventory import GROUPS, Group, TensorDecl, expected, numel
from m31.config.model import Model


@dataclass(frozen=True, kw_only=True)
class GroupCount:
    """One row of MODEL.md §3.7.

    Attributes:
        logical: weights of the model.
        stored_elements: elements as a hub counts them: packed FP4 bytes once, scales not at all.
        stored_bytes: bytes in the published dtypes, scales included.
        tensors: stored tensors, scales included.
    """

    logical: int
    stored_elements: int
    stored_bytes: int
    tensors: int


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Totals over all groups; `active` is defined in `counts`."""

    groups: Mapping[Group, GroupCount]
    logical: int
    active: int
    active_with_head: int
    hub_elements: int
    stored_bytes: int
    tensors: int


def counts(config: Model) -> Counts:
    """Count the model that a config describes.

    `active` is the published measure (MODEL.md §3.7): linear weights that one text token multiplies with, i.e.
    attention, index branch, dense MLP, shared experts and the chosen experts. It leaves out embedding, output head,
    router, norms and vision; `active_with_head` adds the output head.
    """
    return summarise(config, expected(config))


def summarise(config: Model, declared: Mapping[str, TensorDecl]) -> Counts:
    """`counts` over an inventory that exists already."""
    rows = {group: [0, 0, 0, 0] for group in GROUPS}
    for decl in declared.values():
        row = rows[decl.group]
        row[0] += decl.logical_numel
        row[1] += numel(decl.shape) if decl.logical_numel else 0
        row[2] += decl.stored_bytes
        row[3] += 1
    groups: dict[Group, GroupCount] = {
        group: GroupCount(logical=r[0], stored_elements=r[1], stored_bytes=r[2], tensors=r[3])
        for group, r in rows.items()
        if r[3]
    }
    logical = {group: rows[group][0] for group in GROUPS}
    active = logical["attention"] + logical["index"] + logical["dense_mlp"] + logical["shared_experts"]
    moe = config.text.moe
    if moe is not None:
        active += logical["routed_experts"] // moe.num_experts * moe.experts_per_token
    return Counts(
        groups=groups,
        logical=sum(logical.values()),
        active=active,
        active_with_head=active + config.text.vocab_size * config.text.hidden_size,
        hub_elements=sum(g.stored_elements for g in groups.values()),
        stored_bytes=sum(g.stored_bytes for g in groups.values()),
        tensors=sum(g.tensors for g in groups.values()),
    )


@dataclass(frozen=True, kw_only=True)
class KvBytes:
    """Cache bytes of one token over the whole model.

    Attributes:
        main_format, index_format: formats of K/V and of the index keys.
        main: bytes of K and V; the published 34,560 and 61,440 are this figure.
        index: bytes of index keys.
    """

    main_format: str
    index_format: str
    main: int
    index: int

    @property
    def total(self) -> int:
        """Bytes with the index cache."""
        return self.main + self.index


_PAIRS = (
    ("nvfp4", "nvfp4"),
    ("nvfp4", "fp8"),
    ("nvfp4", "int8"),
    ("nvfp4", "bf16"),
    ("fp8", "fp8"),
    ("fp8", "bf16"),
    ("bf16", "bf16"),
    ("fp32", "fp32"),
)


def kv_bytes_per_token(config: Model) -> tuple[KvBytes, ...]:
    """All rows of MODEL.md §3.3, int8 index keys (a byte per element and a float32 scale per key) and fp32 (the
    reference backend's), for this config.

    NVFP4 rows appear only when the head widths are multiples of its group of 16.
    """
    text = config.text
    sparse_layers = text.attention.count("sparse")
    index_dim = text.sparse.index_dim if text.sparse is not None else 0
    rows = []
    for main_format, index_format in _PAIRS:
        main_row, index_row = _row_bytes(main_format, text.head_dim), _row_bytes(index_format, index_dim)
        if main_row is None or index_row is None:
            continue
        rows.append(
            KvBytes(
                main_format=main_format,
                index_format=index_format,
                main=text.num_layers * text.num_kv_heads * 2 * main_row,
                index=sparse_layers * index_row,
            )
        )
    return tuple(rows)


def _row_bytes(fmt: str, width: int) -> int | None:
    """Bytes of one head's vector of `width` values; None where the format does not apply."""
    if fmt == "nvfp4":
        return None if width % 16 else width // 2 + width // 16
    if fmt == "int8":
        return width + 4 if width else 0
    return width * {"fp8": 1, "bf16": 2, "fp32": 4}[fmt]
