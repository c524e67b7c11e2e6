"""`dspark/config.json` -> the typed description of the draft head, MODEL.md §1.5 and chapter 5."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from m31.config.model import Quantization, SwigluOai


@dataclass(frozen=True, kw_only=True)
class Draft:
    """The DSpark draft head.

    Attributes:
        num_layers, hidden_size, num_heads, num_kv_heads, head_dim, vocab_size: as in the target.
        intermediate_size: width of its dense MLP.
        block_size: tokens drafted in one pass.
        noise_token_id: what fills the block behind the anchor.
        target_layer_ids: layers of the target whose residual streams condition the head, in order.
        target_num_layers: layers that the target must have.
        markov_rank: rank of the correction between drafted tokens.
        confidence_with_markov: whether the confidence head also reads the Markov embedding.
        sliding_window: context positions that a row sees.
        rope_theta, rotary_dim, rms_norm_eps, activation: as in `Text`.
        quantization: None for BF16 weights.
    """

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    intermediate_size: int
    block_size: int
    noise_token_id: int
    target_layer_ids: tuple[int, ...]
    target_num_layers: int
    markov_rank: int
    confidence_with_markov: bool
    sliding_window: int
    rope_theta: float
    rotary_dim: int
    rms_norm_eps: float
    activation: SwigluOai
    quantization: Quantization | None


def load_draft(folder: Path) -> Draft:
    """Read `config.json` of a `dspark` folder strictly; see `m31.config.dspark.parse_draft`."""
    from m31.config.dspark import parse_draft
    from m31.config.jsonfile import read_object

    path = folder / "config.json"
    return parse_draft(read_object(path), where=str(path))


def parse_draft(mapping: Mapping[str, Any], *, where: str) -> Draft:
    """Build the description from decoded contents; see `m31.config.dspark.parse_draft`."""
    from m31.config import dspark

    return dspark.parse_draft(mapping, where=where)
