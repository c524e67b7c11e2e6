"""A case before it is made, and what it exercises."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from m31.ops import Case, OpSpec

_PARAMETERS = ("layer", "scale", "eps")
"""Attributes whose values are no choice of a model's."""


@dataclass(frozen=True)
class Planned:
    """A case that is made when it is needed.

    Args:
        id: of the case: seeds its values.
        build: makes it.
        attributes: what it exercises, see `attributes_of`; `values` says what is special about its numbers.
        matrices: the last axis of each matrix among its weights, but for adapters', which are stored plain; None if
            there are no weights.
        vector: channels of a vector in its pages; 0 without pages.
        own: of the op's own cases.
        real: of sizes that kernels are made for: served in every format, and by every arithmetic.
        seconds: what it costs, roughly.
    """

    id: str
    build: Callable[[], Case]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    matrices: tuple[int, ...] | None = None
    vector: int = 0
    own: bool = False
    real: bool = False
    seconds: float = 0.02


def attributes_of(spec: OpSpec, case: Case) -> dict[str, Any]:
    """What a case exercises: sizes by the names of their axes, attributes of the op, page sizes."""
    found: dict[str, Any] = {}
    for arg in spec.inputs:
        if arg.kind != "data":
            continue
        shape = np.shape(case.inputs[arg.name])
        if arg.name == "cu_q":
            found["q_len"] = int(np.diff(case.inputs["cu_q"]).max(initial=0))
        elif arg.name == "seq_lens":
            found["context"] = int(case.inputs["seq_lens"].max(initial=0))
            found["sequences"] = shape[0]
        elif arg.layout in ("T,C", "R,C", "R,V", "T", "R") and arg.name not in ("slots", "slot_map", "y", "v"):
            found.setdefault("tokens" if arg.layout[0] == "T" else "rows", shape[0])
            if len(shape) == 2:
                found.setdefault("width", shape[1])
        elif arg.layout == "T,h,D":
            found.setdefault("tokens", shape[0])
            found.setdefault("heads", shape[1])
            found.setdefault("head_dim", shape[2])
        elif arg.layout == "S,P":
            found["pages"] = shape[1]
        elif arg.layout == "T,h,P":
            found |= {"tokens": shape[0], "pages": shape[2]}
    for key, value in case.state.items():
        found["page_tokens"] = value.shape[-2]
        found.setdefault("head_dim", value.shape[-1])
        if key[1] == "k":
            found["kv_heads"] = value.shape[1]
    found |= {name: value for name, value in case.attrs.items() if name not in _PARAMETERS}
    slots = case.inputs.get("slot_map", case.inputs.get("slots"))
    if slots is not None:
        found |= {"tokens": len(slots), "padding": bool((slots < 0).any())}
    return found


def last_axes(case: Case, spec: OpSpec) -> tuple[tuple[int, ...] | None, int]:
    """`Planned.matrices` and `Planned.vector` of a case."""
    names = [arg.name for arg in spec.inputs if arg.kind == "weight"]
    vector = next(iter(case.state.values())).shape[-1] if case.state else 0
    if not names:
        return None, vector
    matrices = []
    for name in names:
        value = case.inputs[name]
        for slot, one in value.items() if isinstance(value, dict) else (("", value),):
            if np.ndim(one) == 2 and not slot.startswith("lora_"):
                matrices.append(np.shape(one)[1])
    return tuple(dict.fromkeys(matrices)), vector
