"""config.json -> a typed, validated model description (MODEL.md chapter 1).

`load` and `parse` import pydantic on first use, so that importing the descriptions alone stays cheap.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from m31.config.draft import Draft
from m31.config.model import (
    AttentionKind,
    Dialect,
    MlpKind,
    Model,
    Moe,
    Quantization,
    ScaleDialect,
    SparseAttention,
    SwigluOai,
    Text,
    Vision,
    WeightFormat,
)
from m31.config.published import PublishedName, published

__all__ = [
    "AttentionKind",
    "Dialect",
    "Draft",
    "MlpKind",
    "Model",
    "Moe",
    "PublishedName",
    "Quantization",
    "ScaleDialect",
    "SparseAttention",
    "SwigluOai",
    "Text",
    "Vision",
    "WeightFormat",
    "load",
    "parse",
    "published",
]


def load(folder_or_file: str | Path) -> Model:
    """Read config.json strictly; see `m31.config.loading.load`."""
    from m31.config import loading

    return loading.load(folder_or_file)


def parse(mapping: Mapping[str, Any], *, where: str) -> Model:
    """Build the description from decoded config.json contents; see `m31.config.loading.parse`."""
    from m31.config import loading

    return loading.parse(mapping, where=where)
