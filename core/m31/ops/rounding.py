"""Rounding to BF16 where the model defines it (MODEL.md §2.3, §3.1; decision 010).

A value that is quantised afterwards is quantised from its BF16-rounded form. The rounding is a node of its own, so that
a fused body says the same as the kernels that it replaces. The two ops differ in layout only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from m31.ops.cases import rng_for
from m31.ops.spec import Arg, Attrs, Case, OpSpec, TensorType


def to_bf16(x: Any) -> Any:
    """`x` rounded to the nearest BF16 value, ties to even, returned in float64; by integer arithmetic on the bits."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    out = rounded.astype(np.uint32).view(np.float32).astype(np.float64)
    return np.where(np.isfinite(x), out, x).reshape(np.shape(x))


def _types(attrs: Attrs, given: Sequence[Any]) -> tuple[TensorType, ...]:
    return (given[0],)


def _cases(name: str, shape: tuple[int, ...]) -> Iterator[Case]:
    yield Case(f"{name}/none", {}, {"x": np.zeros((0, *shape))})
    for case, scale in (("ordinary", 1.0), ("large", 1e30), ("small", 1e-30)):
        rng = rng_for(f"{name}/{case}")
        # float32 values: every backend then starts from the same number
        x = (rng.standard_normal((5, *shape)) * scale).astype(np.float32).astype(np.float64)
        yield Case(f"{name}/{case}", {}, {"x": x})
    ties = np.array([1 + 2.0**-8, 1 + 3 * 2.0**-8, -1 - 2.0**-8, 1 + 2.0**-8 + 2.0**-20, 0.0])
    yield Case(f"{name}/ties", {}, {"x": np.resize(ties, (5, *shape))})


def _spec(name: str, layout: str, shape: tuple[int, ...]) -> OpSpec:
    other = TensorType((5, *([4] * (2 - layout.count(",") + 1))), "T,h,D" if layout == "T,C" else "T,C", "model")
    return OpSpec(
        name=name,
        doc=f"y = the BF16 value nearest to x, ties to even, in the compute dtype (MODEL.md §2.3). [{layout}].",
        inputs=(Arg("x", layout),),
        outputs=(Arg("y", layout),),
        attrs=(),
        infer=_types,
        naive=lambda attrs, x: (to_bf16(x),),
        cases=lambda: _cases(name, shape),
        refuses=((f"a layout that is not {layout}", {}, (other,)),),
        criterion="exact",
    )


round_channels = _spec("round_channels", "T,C", (12,))
round_heads = _spec("round_heads", "T,h,D", (3, 4))
