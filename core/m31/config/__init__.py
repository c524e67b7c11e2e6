"""config.json -> a typed, validated model description (MODEL.md chapter 1)."""

from m31.config.model import Model, Moe, Quantization, SparseAttention, SwigluOai, Text, Vision

__all__ = ["Model", "Moe", "Quantization", "SparseAttention", "SwigluOai", "Text", "Vision"]
