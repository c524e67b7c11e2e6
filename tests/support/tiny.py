"""Tiny models of the architecture, as typed descriptions and random weights, and a naive whole model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from m31.config import Moe, SparseAttention, SwigluOai, Text
from m31.engine.engine import Engine
from m31.graph import ModelGraph, trace
from m31.ops import StateType, WeightDecl
from m31.sdk.backend import KVSpec
from m31_reference.session import ReferenceBackend


def text(**changes: Any) -> Text:
    """An M3.1-shaped description: all layers sparse, two dense and two MoE, block 4, top-3."""
    layers = changes.get("num_layers", 4)
    values: dict[str, Any] = {
        "num_layers": layers,
        "hidden_size": 32,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "vocab_size": 61,
        "max_position": 4096,
        "rope_theta": 1e7,
        "rotary_dim": 8,
        "rms_norm_eps": 1e-6,
        "activation": SwigluOai(alpha=1.702, beta=1.0, limit=1.5),
        "dense_intermediate_size": 48,
        "attention": ("sparse",) * layers,
        "mlp": ("dense",) * (layers // 2) + ("moe",) * (layers - layers // 2),
        "sparse": SparseAttention(
            num_index_heads=2, index_dim=16, topk_blocks=3, block_size=4, local_blocks=1, init_blocks=0
        ),
        "moe": Moe(
            num_experts=8,
            experts_per_token=2,
            num_shared_experts=1,
            expert_intermediate_size=24,
            shared_intermediate_size=24,
            routed_scaling_factor=2.0,
        ),
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_ids": (2,),
        "pad_token_id": None,
        "num_mtp_layers": 0,
    }
    return Text(**{**values, **changes})


@dataclass
class Held:
    """A weight in memory, with the interface of a lazy tensor."""

    name: str
    value: torch.Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.value.shape)

    def load(self) -> torch.Tensor:
        return self.value


def weights(graph: ModelGraph, seed: int) -> dict[str, torch.Tensor]:
    """Random float32 weights that make every branch matter: large enough for clamps, norms and biases not zero."""
    rng = torch.Generator().manual_seed(seed)
    out = {}
    for tensor in graph.tensors():
        scale = 0.3 if len(tensor.shape) == 1 else 1.5 * tensor.shape[1] ** -0.5
        out[tensor.name] = torch.randn(tensor.shape, generator=rng) * scale
    return out


def engine(
    description: Text, values: dict[str, torch.Tensor], *, dtype: str, pages: int = 64, chunk: int = 2048
) -> Engine:
    """An engine over the reference backend, its pages poisoned."""
    session = ReferenceBackend(None).open(device=None, dtype=dtype, rank=0, world=1)  # type: ignore[arg-type]
    graph = trace(description)
    spec = KVSpec.of(description, dtype, dtype)  # type: ignore[arg-type]
    cache = session.kv_layout(spec).allocate(pages)
    cache.poison(range(pages))
    handles = {}
    for call in graph.calls:
        if call.op.weights is not None:
            slots = {s: Held(t.name, values[t.name]) for s, t in call.op.weights.slots.items()}
            handles[call.op.weights.name] = session.prepare(call.op, slots)
    return Engine(
        session=session,
        who="reference",
        graph=graph,
        handles=handles,
        cache=cache,
        page_tokens=spec.page_tokens,
        chunk_tokens=chunk,
    )


def naive_logits(description: Text, values: dict[str, torch.Tensor], ids: list[int]) -> np.ndarray:
    """float64 logits of every position: the graph run node by node with the naive definition of each op."""
    graph = trace(description)
    spec = KVSpec.of(description, "float64", "float64")
    n, page = len(ids), spec.page_tokens
    count = -(-n // page)
    table = np.arange(count)[::-1].copy()  # physical order is not logical order
    positions = np.arange(n)
    env: dict[str, Any] = {
        "tokens": np.asarray(ids),
        "positions": positions,
        "cu_q": np.asarray([0, n]),
        "seq_lens": np.asarray([n]),
        "slot_map": table[positions // page] * page + positions % page,
        "page_table": table[None],
        "out_rows": positions,
        "kv": {},
    }
    for layer, indexed in enumerate(spec.indexed):
        for kind in ("k", "v"):
            env["kv"][layer, kind] = np.full((count, spec.kv_heads, page, spec.head_dim), np.nan)
        if indexed:
            env["kv"][layer, "index"] = np.full((count, page, spec.index_dim), np.nan)
    for call in graph.calls:
        reads = iter(call.reads)
        args = []
        for value in call.op.inputs:
            if isinstance(value, WeightDecl):
                slots = {slot: values[t.name].double().numpy() for slot, t in value.slots.items()}
                args.append(slots["weight"] if set(slots) == {"weight"} else slots)
            else:
                args.append(env[next(reads)])
        for name, value, out in zip(
            call.writes, call.op.outputs, call.op.spec.naive(call.op.attrs, *args), strict=True
        ):
            env[name] = out
            assert isinstance(value, StateType) or out.ndim == len(value.shape)
    return env[graph.output]
