"""MODEL.md chapter 5 in plain numpy float64, written from the chapter. No cache, no pages, no graph of m31's.

Norm, rotation and MLP are those of tests/support/independent.py, which was written from chapter 2 in the same way.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from tests.support import independent

from m31.config import Draft, Text

Array = Any


def residuals(m: Text, w: Mapping[str, Array], ids: list[int]) -> list[Array]:
    """The target's residual stream after each layer, each [len(ids), C]."""
    x = w["model.embed_tokens.weight"][ids]
    out = []
    for layer in range(m.num_layers):
        at = f"model.layers.{layer}."
        mine = {name.removeprefix(at): value for name, value in w.items() if name.startswith(at)}
        x = x + independent.attention(m, layer, independent.norm(m, x, mine["input_layernorm.weight"]), mine)
        h = independent.norm(m, x, mine["post_attention_layernorm.weight"])
        x = x + (independent.mlp(m, h, mine, "mlp.") if m.mlp[layer] == "dense" else independent.moe(m, h, mine))
        out.append(x)
    return out


def rotate(d: Draft, x: Array, positions: Array) -> Array:
    """x [n, heads, D] at any positions."""
    high = int(max(positions)) + 1
    every = np.zeros((high, *x.shape[1:]))
    every[positions] = x
    return independent.rotate(d, every)[positions]  # type: ignore[arg-type]


def keys(d: Draft, x: Array, w: Mapping[str, Array], at: str, name: str, positions: Array) -> Array:
    projected = (x @ w[f"{at}.{name}_proj.weight"].T).reshape(len(x), -1, d.head_dim)
    normed = independent.norm(d, projected, w[f"{at}.{name}_norm.weight"])  # type: ignore[arg-type]
    return rotate(d, normed, positions)


def base(d: Draft, m: Text, tensors: Mapping[str, Array], ids: list[int], count: int) -> tuple[Array, Array]:
    """Base logits [count, V] and final rows u [count, C] after the committed `ids[:-1]` with the anchor `ids[-1]`."""
    w = {name: np.asarray(value, np.float64) for name, value in tensors.items()}
    length = len(ids) - 1
    streams = residuals(m, w, ids[:-1])
    tapped = np.concatenate([streams[layer] for layer in d.target_layer_ids], 1)
    context = independent.norm(d, tapped @ w["dspark.fc.weight"].T, w["dspark.hidden_norm.weight"])  # type: ignore[arg-type]
    old, new = np.arange(length), np.arange(length, length + count)
    x = w["model.embed_tokens.weight"][[ids[-1]] + [d.noise_token_id] * (count - 1)]
    for layer in range(d.num_layers):
        at = f"dspark.layers.{layer}.decoder_layer"
        h = independent.norm(d, x, w[f"{at}.input_layernorm.weight"])  # type: ignore[arg-type]
        mine = f"{at}.self_attn"
        q = keys(d, h, w, mine, "q", new)
        k = np.concatenate([keys(d, context, w, mine, "k", old), keys(d, h, w, mine, "k", new)])
        v = np.concatenate([context, h]) @ w[f"{mine}.v_proj.weight"].T
        v = v.reshape(length + count, d.num_kv_heads, d.head_dim)
        o = np.zeros((count, d.num_heads, d.head_dim))
        for row, position in enumerate(new):
            seen = np.concatenate([old > position - d.sliding_window, np.ones(count, bool)])
            for j in range(d.num_heads):
                kv = j // (d.num_heads // d.num_kv_heads)
                score = k[seen, kv] @ q[row, j] / np.sqrt(d.head_dim)
                p = np.exp(score - score.max())
                o[row, j] = p @ v[seen, kv] / p.sum()
        x = x + o.reshape(count, -1) @ w[f"{mine}.o_proj.weight"].T
        h = independent.norm(d, x, w[f"{at}.post_attention_layernorm.weight"])  # type: ignore[arg-type]
        gate, up, down = (w[f"{at}.mlp.{name}_proj.weight"].T for name in ("gate", "up", "down"))
        a = d.activation
        g, u = np.minimum(h @ gate, a.limit), np.clip(h @ up, -a.limit, a.limit)
        x = x + (u + a.beta) * g / (1 + np.exp(-a.alpha * g)) @ down
    u = independent.norm(d, x, w["dspark.final_norm.weight"])  # type: ignore[arg-type]
    return u @ w["lm_head.weight"].T, u


def greedy(
    d: Draft, m: Text, tensors: Mapping[str, Array], ids: list[int], count: int
) -> tuple[list[int], list[Array], list[float]]:
    """The tokens of a greedy draft, the logits that each came from, and the confidence in each."""
    w = {name: np.asarray(value, np.float64) for name, value in tensors.items()}
    rows, u = base(d, m, tensors, ids, count)
    prev, tokens, logits, sure = ids[-1], [], [], []
    for i in range(count):
        markov = w["dspark.markov_head.markov_w1.weight"][prev]
        logits.append(rows[i] + w["dspark.markov_head.markov_w2.weight"] @ markov)
        x = np.concatenate([u[i], markov]) if d.confidence_with_markov else u[i]
        at = "dspark.confidence_head.proj"
        sure.append(float(1 / (1 + np.exp(-(w[f"{at}.weight"][0] @ x + w[f"{at}.bias"][0])))))
        prev = int(np.argmax(logits[-1]))
        tokens.append(prev)
    return tokens, logits, sure
