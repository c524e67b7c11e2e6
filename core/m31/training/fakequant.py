"""Fake quantisation with the encoders of serving, and straight-through gradients (MODEL.md §3.6).

Every number that leaves a function here is one that the served model computes with. Encoders are defined on float32;
a wider compute dtype passes through it, as in the reference.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from m31.checkpoint import TARGET_FORMATS
from m31.checkpoint.encoding import Unit, default_input_scale
from m31.checkpoint.lazy import torch_dtype
from m31.config.model import Text
from m31.errors import OpRefused
from m31.formats import fp8, int8, mxfp8, nvfp4
from m31.formats.arithmetic import NAMED, ArithmeticSpec
from m31.graph import Rounding

Quantise = Callable[[Tensor], Tensor]
_PLAIN = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}
KV_FORMATS = (*_PLAIN, "fp8", "nvfp4")
INDEX_FORMATS = (*KV_FORMATS, "int8")


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """What is quantised while training: one arithmetic, the formats of its pages, and how the weights will be stored.

    Args:
        arithmetic: what the served model rounds while it runs.
        kv_format, index_format: of the pages.
        weights: the format in which the checkpoint will be written; None: weights are not rounded at all.
    Raises:
        OpRefused: an unknown format; an arithmetic that quantises the inputs of MXFP8 projections, for weights that
            will be stored plain; or one that transforms stored weights: such a loss belongs to the backend that takes
            it, and a model that is trained for it would be wrong for all others.
    """

    arithmetic: ArithmeticSpec
    kv_format: str
    index_format: str
    weights: str | None

    def __post_init__(self) -> None:
        _listed("KV format", self.kv_format, KV_FORMATS)
        _listed("index key format", self.index_format, INDEX_FORMATS)
        if self.weights is not None:
            _listed("weight format", self.weights, TARGET_FORMATS)
        for kind in ("linear_weights", "expert_weights"):
            transform = getattr(self.arithmetic, kind)
            if transform is not None:
                raise OpRefused(
                    f"arithmetic '{self.arithmetic.name}' has the transform {transform}",
                    where="training",
                    expected="an arithmetic that computes with the weights as they are stored",
                    fix=f"add +{kind}=none to its name",
                )
        if self.weights == "bf16" and self.arithmetic.linear_activation == "mxfp8":
            raise plain_projections("weights in BF16", self.arithmetic, where="training")
        if self.arithmetic.kv_read != "exact" and self.kv_format not in ("nvfp4", "fp8"):
            raise OpRefused(
                f"arithmetic '{self.arithmetic.name}' reads keys and values as E4M3, the pages are {self.kv_format}",
                where="training",
                expected="nvfp4 or fp8 pages",
            )

    @property
    def rounding(self) -> Rounding:
        """Where values are rounded to BF16, as in the served graph."""
        return Rounding.of(self.arithmetic, self.kv_format, self.index_format)


def plain_projections(which: str, arithmetic: ArithmeticSpec, *, where: str) -> OpRefused:
    """The error for projections that are stored plain, whose inputs serving leaves in BF16 (MODEL.md §3.7)."""
    return OpRefused(
        f"{which}: '{arithmetic.name}' quantises the inputs of MXFP8 projections only",
        where=where,
        expected="MXFP8 projections, or an arithmetic that leaves their inputs in BF16",
    )


def _listed(what: str, name: str, known: tuple[str, ...]) -> None:
    if name not in known:
        raise OpRefused(f"{what} '{name}' is not known", where="training", expected=" or ".join(known))


UNQUANTISED = Scheme(arithmetic=NAMED["exact"], kv_format="float64", index_format="float64", weights=None)
"""The twin: nothing is rounded."""


class _StraightThrough(torch.autograd.Function):
    """y = quantise(x); dx = dy."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, quantise: Quantise) -> Tensor:
        return quantise(x)

    @staticmethod
    def backward(ctx: Any, *grad: Tensor) -> tuple[Tensor, None]:
        return grad[0], None


def straight_through(x: Tensor, quantise: Quantise | None) -> Tensor:
    """`quantise(x)`, whose gradient is that of x; x itself where there is nothing to do."""
    if quantise is None:
        return x
    out: Tensor = _StraightThrough.apply(x, quantise)  # type: ignore[no-untyped-call]
    return out


def bf16(x: Tensor) -> Tensor:
    """The nearest BF16 values, in the dtype of x."""
    return x.to(torch.bfloat16).to(x.dtype)


def e4m3(x: Tensor) -> Tensor:
    """The nearest E4M3 values at unit scale, saturating, in the dtype of x."""
    return fp8.decode(fp8.encode(x.float(), saturate=True), x.dtype)


def probability(p: Tensor) -> Tensor:
    """E4M3(448 p) / 448, the softmax weights of an arithmetic that rounds them (MODEL.md §3.4)."""
    return e4m3(p * fp8.E4M3_MAX) / fp8.E4M3_MAX


def _dynamic(quantise: Callable[..., Tensor]) -> Quantise:
    return lambda x: quantise(x.float(), nonfinite="propagate").to(x.dtype)


_DYNAMIC = {"mxfp8": _dynamic(mxfp8.quantise), "nvfp4-token": _dynamic(nvfp4.quantise_per_token), "bfloat16": bf16}


def activation(kind: str | None, *, static_scale: Tensor | None = None) -> Quantise | None:
    """The quantiser of a field of `ArithmeticSpec` (`linear_activation`, `expert_input`, `expert_middle`, `query`).

    Args:
        kind: the field's value.
        static_scale: G of "nvfp4-static", float32 [1].
    """
    if kind is None:
        return None
    if kind == "e4m3":
        return e4m3
    if kind == "nvfp4-static":
        assert static_scale is not None
        scale = static_scale
        return lambda x: nvfp4.quantise_static(x.float(), scale, nonfinite="propagate").to(x.dtype)
    return _DYNAMIC[kind]


def page(kind: str, read: str) -> Quantise | None:
    """What attention reads of a key or value that was written: encoded as pages of format `kind`, read by rule `read`.

    NVFP4 pages are written from BF16 values (MODEL.md §3.4); round before. None where the format holds any value.
    """
    if kind == "float64":
        return None
    if kind in _PLAIN:
        return lambda x: x.to(_PLAIN[kind]).to(x.dtype)
    if kind == "fp8":
        return e4m3
    if kind == "int8":
        return lambda x: int8.decode(*int8.encode(x.float(), nonfinite="propagate"), x.dtype)
    if read == "exact":
        return lambda x: nvfp4.decode_kv(*nvfp4.encode_kv(x.float(), nonfinite="propagate"), x.dtype)
    shift = 3 if read == "e4m3-shift3" else 0

    def rounded(x: Tensor) -> Tensor:
        codes = nvfp4.encode_kv(x.float(), nonfinite="propagate")
        return nvfp4.decode_kv_e4m3(*codes, x.dtype, scale_shift=shift)

    return rounded


def weight(unit: Unit, value: Tensor) -> Tensor:
    """What serving decodes from a weight that is stored as `unit` says: float32 [...] of the same shape.

    Raises OpRefused for NaN or infinity: the training has diverged.
    """
    if unit.format == "mxfp8":
        return mxfp8.quantise(value)
    if unit.format == "nvfp4":
        return nvfp4.decode(*nvfp4.encode(value, where=unit.name))
    return value.to(torch_dtype(unit.parts[0][2].dtypes[0])).float()


def middle_scale(text: Text) -> Tensor:
    """G of the routed experts' second input, float32 [1]: the one under which nothing saturates (MODEL.md §3.2).

    It is what `m31.checkpoint.encoded` writes for a model without calibration, so that the exported checkpoint serves
    with the numbers that were trained.
    """
    return torch.tensor([default_input_scale(text, ".w2.weight")])
