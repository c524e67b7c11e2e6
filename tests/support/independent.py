"""MODEL.md chapter 2 in plain numpy float64, written from the chapter and from nothing of m31's.

It shares neither graph nor ops with the product, only the typed description and the tensor names, so it can see
what a model composed of the ops' own definitions cannot: a wrong graph. One sequence, no cache, no pages.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from m31.config import Text

Array = Any


def logits(m: Text, tensors: Mapping[str, Array], ids: list[int]) -> Array:
    """float64 logits [len(ids), V]; `tensors` maps canonical checkpoint names to arrays."""
    w = {name: np.asarray(value, np.float64) for name, value in tensors.items()}
    x = w["model.embed_tokens.weight"][ids]
    for layer in range(m.num_layers):
        at = f"model.layers.{layer}."
        mine = {name.removeprefix(at): value for name, value in w.items() if name.startswith(at)}
        x = x + attention(m, layer, norm(m, x, mine["input_layernorm.weight"]), mine)
        h = norm(m, x, mine["post_attention_layernorm.weight"])
        x = x + (mlp(m, h, mine, "mlp.") if m.mlp[layer] == "dense" else moe(m, h, mine))
    return norm(m, x, w["model.norm.weight"]) @ w["lm_head.weight"].T


def norm(m: Text, x: Array, weight: Array) -> Array:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + m.rms_norm_eps) * (1 + weight)


def rotate(m: Text, x: Array) -> Array:
    """x [n, heads, D]: pairs (d, d + rotary/2); angles in float32 as the recipe says."""
    half = m.rotary_dim // 2
    exponent = (np.arange(half) * 2 / m.rotary_dim).astype(np.float32)
    frequency = np.float32(1) / np.power(m.rope_theta, exponent.astype(np.float64)).astype(np.float32)
    angle = (np.arange(len(x), dtype=np.float32)[:, None] * frequency).astype(np.float64)[:, None]
    a, b = x[..., :half], x[..., half : 2 * half]
    turned = [a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)]
    return np.concatenate([*turned, x[..., 2 * half :]], -1)


def heads(m: Text, h: Array, w: Mapping[str, Array], name: str, dim: int) -> Array:
    projected = (h @ w[f"self_attn.{name}_proj.weight"].T).reshape(len(h), -1, dim)
    return rotate(m, norm(m, projected, w[f"self_attn.{name}_norm.weight"]))


def attention(m: Text, layer: int, h: Array, w: Mapping[str, Array]) -> Array:
    n = len(h)
    q, k = heads(m, h, w, "q", m.head_dim), heads(m, h, w, "k", m.head_dim)
    v = (h @ w["self_attn.v_proj.weight"].T).reshape(n, m.num_kv_heads, m.head_dim)
    visible = np.tril(np.ones((n, n), bool))[None].repeat(m.num_kv_heads, 0)
    if m.attention[layer] == "sparse":
        visible &= selected(m, h, w)
    out = np.zeros((n, m.num_heads, m.head_dim))
    for j in range(m.num_heads):
        g = j * m.num_kv_heads // m.num_heads
        score = np.where(visible[g], q[:, j] @ k[:, g].T / np.sqrt(m.head_dim), -np.inf)
        p = np.exp(score - score.max(-1, keepdims=True))
        out[:, j] = p / p.sum(-1, keepdims=True) @ v[:, g]
    return out.reshape(n, -1) @ w["self_attn.o_proj.weight"].T


def selected(m: Text, h: Array, w: Mapping[str, Array]) -> Array:
    """[index heads, n, n] bool: key t is in a block that query p selected."""
    s = m.sparse
    assert s is not None
    n = len(h)
    q, k = heads(m, h, w, "index_q", s.index_dim), heads(m, h, w, "index_k", s.index_dim)[:, 0]
    out = np.zeros((s.num_index_heads, n, n), bool)
    for i in range(s.num_index_heads):
        for p in range(n):
            own = p // s.block_size
            best = [
                float((k[b * s.block_size : min((b + 1) * s.block_size, p + 1)] @ q[p, i]).max())
                for b in range(own + 1)
            ]
            for b in range(own + 1):
                if own - b < s.local_blocks or b < s.init_blocks:
                    best[b] = np.inf
            ranked = sorted(range(own + 1), key=lambda b, best=best: (-best[b], b))  # type: ignore[misc]
            for b in ranked[: s.topk_blocks]:
                out[i, p, b * s.block_size : (b + 1) * s.block_size] = True
    return out


def act(m: Text, gate: Array, up: Array) -> Array:
    a = m.activation
    gate = np.minimum(gate, a.limit)
    return (np.clip(up, -a.limit, a.limit) + a.beta) * gate / (1 + np.exp(-a.alpha * gate))


def mlp(m: Text, h: Array, w: Mapping[str, Array], at: str) -> Array:
    gate, up = h @ w[f"{at}gate_proj.weight"].T, h @ w[f"{at}up_proj.weight"].T
    return act(m, gate, up) @ w[f"{at}down_proj.weight"].T


def moe(m: Text, h: Array, w: Mapping[str, Array]) -> Array:
    assert m.moe is not None
    score = 1 / (1 + np.exp(-(h @ w["block_sparse_moe.gate.weight"].T)))
    biased = score + w["block_sparse_moe.e_score_correction_bias"]
    out = mlp(m, h, w, "block_sparse_moe.shared_experts.")
    for t in range(len(h)):
        chosen = np.argsort(-biased[t], kind="stable")[: m.moe.experts_per_token]
        for e in chosen:
            at = f"block_sparse_moe.experts.{e}."
            y = act(m, w[f"{at}w1.weight"] @ h[t], w[f"{at}w3.weight"] @ h[t])
            share = m.moe.routed_scaling_factor * score[t, e] / score[t, chosen].sum()
            out[t] += share * (w[f"{at}w2.weight"] @ y)
    return out
