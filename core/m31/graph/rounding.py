"""Where a graph rounds to BF16: which values are quantised afterwards (MODEL.md §2.3, §3.1, decision 010)."""

from __future__ import annotations

from dataclasses import dataclass

from m31.formats.arithmetic import ArithmeticSpec

_UNQUANTISED = ("float64", "float32", "bfloat16")  # the cast to bfloat16 is itself the rounding


@dataclass(frozen=True, kw_only=True)
class Rounding:
    """The values that are rounded to BF16 because what follows quantises them.

    Args:
        kv: K after norm and RoPE, and V, before they are written.
        index: the index key, likewise.
        linear: inputs of projections and of the head, and the attention's output before `o_proj`. The activation of an
            MLP is not rounded here: it is quantised from the accumulation dtype (§2.5), or rounded by its kernel.
        experts: the input of router and experts.
        query: q and index q after RoPE.
    """

    kv: bool
    index: bool
    linear: bool
    experts: bool
    query: bool

    @classmethod
    def of(cls, arithmetic: ArithmeticSpec, kv_format: str, index_format: str) -> Rounding:
        """What an arithmetic and the formats of the pages ask for; nothing for exact ones."""
        return cls(
            kv=kv_format not in _UNQUANTISED,
            index=index_format not in _UNQUANTISED,
            linear=arithmetic.linear_activation is not None,
            experts=arithmetic.expert_input is not None,
            query=arithmetic.query is not None,
        )


NO_ROUNDING = Rounding(kv=False, index=False, linear=False, experts=False, query=False)
