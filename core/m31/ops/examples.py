"""Cases of a fused op: an example says the sizes, the seed gives the values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from m31.ops.cases import rng_for
from m31.ops.spec import Arg, Attrs, StateType, TensorDecl, TensorType, ValueType, WeightDecl

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Example:
    """Sizes of a case of a fused op; the values come from the seed.

    Args:
        name: unique within the op.
        attrs: all attributes but the variants.
        shapes: input -> shape, for weights with several slots slot -> shape.
        given: inputs whose values matter: indices, rotation tables.
        scales: factor on an input's values.
        state: the KV arrays, see `Case.state`.
    """

    name: str
    attrs: Attrs
    shapes: Mapping[str, Shape | Mapping[str, Shape]]
    given: Mapping[str, Any] = field(default_factory=dict)
    scales: Mapping[str, float] = field(default_factory=dict)
    state: Mapping[tuple[int, str], Any] = field(default_factory=dict)


def values(inputs: Sequence[Arg], example: Example, seed: str) -> dict[str, Any]:
    """Normal values, scaled so that no branch of a body drowns another."""
    rng = rng_for(seed)

    def drawn(shape: Shape, kind: Literal["data", "weight", "state"]) -> Any:
        spread = 1.0 if kind == "data" else 0.3 if len(shape) == 1 else 1.5 * shape[-1] ** -0.5
        return rng.standard_normal(shape) * spread

    out: dict[str, Any] = {}
    for arg in inputs:
        if arg.name in example.given:
            out[arg.name] = example.given[arg.name]
        elif arg.kind != "state":
            shape, scale = example.shapes[arg.name], example.scales.get(arg.name, 1.0)
            if isinstance(shape, tuple):
                out[arg.name] = drawn(shape, arg.kind) * scale
            else:
                out[arg.name] = {slot: drawn(inner, arg.kind) * scale for slot, inner in shape.items()}
    return out


def types(inputs: Sequence[Arg], example: Example, *, grown: str = "") -> tuple[ValueType, ...]:
    """Types of an example's inputs; the weight `grown` is one wider than it may be."""
    out: list[ValueType] = []
    for arg in inputs:
        if arg.kind == "state":
            out.append(StateType(arg.name))
            continue
        shape = example.given[arg.name].shape if arg.name in example.given else example.shapes[arg.name]
        if isinstance(shape, tuple) and arg.kind == "data":
            out.append(TensorType((arg.layout.split(",")[0], *shape[1:]), arg.layout, arg.dtype))
            continue
        more = int(arg.name == grown)
        slots = {"weight": shape} if isinstance(shape, tuple) else shape
        sizes = {slot: (*inner[:-1], inner[-1] + more) for slot, inner in slots.items()}
        decls = {slot: TensorDecl(f"{arg.name}.{slot}", s, (None,) * len(s)) for slot, s in sizes.items()}
        out.append(WeightDecl(arg.name, decls))
    return tuple(out)
