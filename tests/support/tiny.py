"""Tiny models of the architecture, as typed descriptions and random weights, and a naive whole model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tests.support import numerics

from m31.config import Draft, Moe, SparseAttention, SwigluOai, Text
from m31.engine.api import STEPS
from m31.engine.compiler import Compiler, whole
from m31.engine.drafting import DraftCompilers, Drafter, DraftHead
from m31.engine.engine import Engine
from m31.formats import mxfp8, nvfp4
from m31.formats.arithmetic import ArithmeticSpec, parse
from m31.formats.layout import ScaleOrder
from m31.graph import NO_ROUNDING, Call, ModelGraph, Rounding, trace, trace_draft
from m31.ops import StateType, WeightDecl
from m31.ops.moe import activation
from m31.sdk.backend import KVSpec
from m31.sdk.serving import Serving
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


def quantisable(**changes: Any) -> Text:
    """The same with sizes that MXFP8 (32) and NVFP4 (16) divide."""
    moe = Moe(
        num_experts=8,
        experts_per_token=2,
        num_shared_experts=1,
        expert_intermediate_size=64,
        shared_intermediate_size=32,
        routed_scaling_factor=2.0,
    )
    sparse = SparseAttention(
        num_index_heads=2, index_dim=32, topk_blocks=3, block_size=4, local_blocks=1, init_blocks=0
    )
    sizes = {"hidden_size": 64, "head_dim": 32, "rotary_dim": 16, "dense_intermediate_size": 96}
    return text(**{**sizes, "moe": moe, "sparse": sparse, **changes})


@dataclass
class Held:
    """A weight in memory, with the interface of a lazy tensor."""

    name: str
    value: torch.Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.value.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.value.dtype

    @property
    def format(self) -> str:
        return "plain"

    @property
    def path(self) -> str:
        return "memory"

    def load(self) -> torch.Tensor:
        return self.value

    def parts(self) -> dict[str, Held]:
        return {"weight": self}


@dataclass
class Quantised:
    """A quantised weight in memory: decoded values and stored parts."""

    format: str
    value: torch.Tensor
    stored: dict[str, torch.Tensor]


@dataclass
class HeldQuantised:
    """The same with the interface of a lazy tensor. Counts how often it is decoded."""

    name: str
    quantised: Quantised
    loads: int = 0

    @property
    def format(self) -> str:
        return self.quantised.format

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.quantised.value.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.quantised.value.dtype

    def load(self) -> torch.Tensor:
        self.loads += 1
        return self.quantised.value.clone()  # decoding makes a new tensor each time

    def parts(self) -> dict[str, Held]:
        return {role: Held(f"{self.name}_{role}", value) for role, value in self.quantised.stored.items()}


def held(name: str, value: torch.Tensor | Quantised) -> Held | HeldQuantised:
    """A stand-in for the checkpoint's tensor."""
    return Held(name, value) if isinstance(value, torch.Tensor) else HeldQuantised(name, value)


def quantised(graph: ModelGraph, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor | Quantised]:
    """The weights as M3.1-Flash stores them: MXFP8 projections, NVFP4 experts with three different global scales."""
    out: dict[str, torch.Tensor | Quantised] = dict(values)
    for call in graph.calls:
        if call.op.weights is None:
            continue
        for at, tensor in enumerate(call.op.weights.slots.values()):
            value = values[tensor.name]
            if call.op.spec.name == "linear":
                mx = mxfp8.encode(value)
                out[tensor.name] = Quantised("mxfp8", mxfp8.decode(*mx), {"codes": mx.codes, "scale": mx.scale})
            elif call.op.spec.name == "experts":
                nv = nvfp4.encode(value)
                stored = {**nv._asdict(), "input_global_scale": torch.tensor([300.0 + at])}
                out[tensor.name] = Quantised("nvfp4", nvfp4.decode(*nv), stored)
    return out


def dequantised(values: Mapping[str, torch.Tensor | Quantised]) -> dict[str, torch.Tensor]:
    """The values behind quantised weights."""
    return {name: v if isinstance(v, torch.Tensor) else v.value for name, v in values.items()}


def transformed(values: Mapping[str, torch.Tensor | Quantised], spec: ArithmeticSpec) -> dict[str, torch.Tensor]:
    """The values behind quantised weights after the arithmetic's transform, in numpy."""
    out = dequantised(values)
    for name, held_ in values.items():
        if isinstance(held_, torch.Tensor):
            continue
        if held_.format == "mxfp8" and spec.linear_weights:
            out[name] = torch.from_numpy(numerics.block_fp8(held_.value.numpy()))
        elif held_.format == "nvfp4" and spec.expert_weights == "nvfp4-to-mxfp8":
            out[name] = torch.from_numpy(numerics.mxfp8(held_.value.numpy()))
        elif held_.format == "nvfp4" and spec.expert_weights:
            group = [name] if ".w2." in name else [name.replace(".w3.", ".w1."), name.replace(".w1.", ".w3.")]
            made = numerics.shared_scale([_elements(values[n]) for n in group])
            out[name] = torch.from_numpy(made[group.index(name)])
    return out


def _elements(tensor: torch.Tensor | Quantised) -> tuple[np.ndarray, np.ndarray, float]:
    assert isinstance(tensor, Quantised)
    packed = tensor.stored["packed"].numpy()
    codes = np.stack([packed & 15, packed >> 4], -1).reshape(*packed.shape[:-1], -1)
    values = numerics.E2M1[codes & 7] * np.where(codes & 8, -1, 1)
    return values, tensor.stored["scale"].double().numpy(), float(tensor.stored["global_scale"])


def input_scales(values: Mapping[str, torch.Tensor | Quantised]) -> dict[str, float]:
    """input_global_scale of every NVFP4 weight."""
    return {n: float(v.stored["input_global_scale"]) for n, v in values.items() if getattr(v, "format", "") == "nvfp4"}


def draft(target: Text, **changes: Any) -> Draft:
    """A draft head for `target`: two layers, blocks of 5, a window of 9, taps of three layers."""
    values: dict[str, Any] = {
        "num_layers": 2,
        "hidden_size": target.hidden_size,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "vocab_size": target.vocab_size,
        "intermediate_size": 40,
        "block_size": 5,
        "noise_token_id": target.vocab_size - 1,
        "target_layer_ids": tuple(range(target.num_layers))[-3:],
        "target_num_layers": target.num_layers,
        "markov_rank": 6,
        "confidence_with_markov": True,
        "sliding_window": 9,
        "rope_theta": target.rope_theta,
        "rotary_dim": 4,
        "rms_norm_eps": target.rms_norm_eps,
        "activation": target.activation,
        "quantization": None,
    }
    return Draft(**{**values, **changes})


def draft_weights(head: Draft, seed: int) -> dict[str, torch.Tensor]:
    """Random weights of a draft head, without those that it shares with its target."""
    graphs = trace_draft(head, NO_ROUNDING, None, ("", ""))
    found: dict[str, torch.Tensor] = {}
    for at, graph in enumerate((graphs.context, graphs.block, graphs.markov)):
        found = weights(graph, seed + at) | found
    return {name: value for name, value in found.items() if name.startswith("dspark.")}


def weights(graph: ModelGraph, seed: int) -> dict[str, torch.Tensor]:
    """Random float32 weights that make every branch matter: large enough for clamps, norms and biases not zero."""
    rng = torch.Generator().manual_seed(seed)
    out = {}
    for tensor in graph.tensors():
        scale = 0.3 if len(tensor.shape) == 1 else 1.5 * tensor.shape[1] ** -0.5
        out[tensor.name] = torch.randn(tensor.shape, generator=rng) * scale
    return out


def engine(
    description: Text,
    values: Mapping[str, torch.Tensor | Quantised],
    *,
    dtype: str,
    pages: int = 64,
    chunk: int = 2048,
    kv: str | None = None,
    index: str | None = None,
    order: ScaleOrder = "linear",
    arithmetic: str = "exact",
    weight_cache_bytes: int | None = None,
    prefix_cache: bool = False,
    head: Draft | None = None,
    draft_tokens: int | None = None,
    drafter: Drafter | None = None,
) -> Engine:
    """An engine over the reference backend, its pages poisoned. Pages are in the compute dtype unless told.

    Args:
        head: a draft head, whose weights are among `values`.
        draft_tokens: most tokens of a draft; None is the head's block size.
        drafter: who drafts instead of `head`.
    """
    session = ReferenceBackend(None).open(  # type: ignore[arg-type]
        device=None,
        dtype=dtype,
        rank=0,
        world=1,
        arithmetic=parse(arithmetic),
        options={} if weight_cache_bytes is None else {"weight_cache_bytes": weight_cache_bytes},
    )
    spec = KVSpec.of(description, kv or dtype, index or dtype, order)  # type: ignore[arg-type]
    taps = head.target_layer_ids if head is not None else (0,) if drafter is not None else ()
    graph = trace(description, Rounding.of(session.numerics, spec.kv_format, spec.index_format), taps=taps)
    cache = session.kv_layout(spec).allocate(pages)
    cache.poison(range(pages))
    serving = Serving("reference", session)
    weights = whole(serving, lambda name: held(name, values[name]))  # type: ignore[arg-type, return-value]
    compiler = Compiler(serving, graph, description, weights)
    if head is not None:
        own = KVSpec.of_draft(head, spec, dtype if arithmetic == "exact" else "bfloat16")  # type: ignore[arg-type]
        rounding = Rounding.of(session.numerics, own.kv_format, own.index_format)
        graphs = trace_draft(head, rounding, None, (own.kv_format, own.index_format))
        compilers = DraftCompilers(graphs, serving, weights, draft_tokens or head.block_size)
        compilers.bind()
        rows = session.kv_layout(own).allocate(pages)
        rows.poison(range(pages))
        drafter = DraftHead(compilers, rows, page_tokens=own.page_tokens, noise=head.noise_token_id)
    for step in STEPS:  # as m31.load does: the weights are checked now
        compiler.bind(step)
    return Engine(
        compiler=compiler,
        cache=cache,
        page_tokens=spec.page_tokens,
        chunk_tokens=chunk,
        prefix_cache=prefix_cache,
        drafter=drafter,
    )


def handle_of(engine: Engine, name: str) -> Any:
    """The reference's prepared weights by the name of their declaration."""
    handles = engine.compiler.weights._handles
    return next(handle for (*_, tensors), handle in handles.items() if tensors[0].startswith(f"{name}."))


def naive_logits(
    description: Text,
    values: Mapping[str, torch.Tensor],
    ids: list[int],
    *,
    kv: str = "float64",
    index: str = "float64",
    arithmetic: str = "exact",
    input_scales: Mapping[str, float] | None = None,
) -> np.ndarray:
    """float64 logits of every position: the graph run node by node with the naive definition of each op.

    Args:
        kv, index: formats of the pages: what is written is what the format makes of it.
        arithmetic: what is quantised besides, see `Naive`.
        input_scales: name of a w2 -> its input_global_scale.
    """
    spec = KVSpec.of(description, kv, index)  # type: ignore[arg-type]
    naive = Naive(parse(arithmetic), kv, index, input_scales or {})
    graph = trace(description, Rounding.of(naive.arithmetic, kv, index))
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
        for name, value, out in zip(call.writes, call.op.outputs, naive(call, args), strict=True):
            env[name] = out
            assert isinstance(value, StateType) or out.ndim == len(value.shape)
    return env[graph.output]


@dataclass(frozen=True)
class Naive:
    """One op in float64 under an arithmetic and page formats, with the quantisers of tests/support/numerics.py."""

    arithmetic: ArithmeticSpec
    kv: str
    index: str
    input_scales: Mapping[str, float]

    def __call__(self, call: Call, args: list[Any]) -> tuple[Any, ...]:
        a, op = self.arithmetic, call.op
        name, naive = op.spec.name, op.spec.naive
        if name == "linear" and a.linear_activation:
            quantise = numerics.bf16 if a.linear_activation == "bfloat16" else numerics.mxfp8
            (y,) = naive(op.attrs, quantise(args[0]), args[1])
            return (numerics.bf16(y),)
        if name == "experts" and (a.expert_input or a.expert_middle):
            assert op.weights is not None
            return (self._experts(op.attrs, op.weights, *args),)
        if name == "kv_write":
            state, k, v, slots = args
            heads = np.asarray(v).reshape(k.shape)
            store = numerics.STORED[self.kv]
            return naive(op.attrs, state, store(k), store(heads).reshape(v.shape), slots)
        if name == "index_write":
            return naive(op.attrs, args[0], numerics.STORED[self.index](args[1]), args[2])
        if name in ("block_scores", "sparse_attention", "dense_attention"):
            q, state, *rest = args
            q = numerics.e4m3(q) if a.query == "e4m3" else q
            if a.probability and name != "block_scores":
                return (self._attend(name, op.attrs, q, self._read(state), *rest),)
            return naive(op.attrs, q, self._read(state), *rest)
        return naive(op.attrs, *args)

    def _read(self, state: dict[tuple[int, str], Any]) -> dict[tuple[int, str], Any]:
        """Pages as the arithmetic's kernels read them; only NVFP4 pages are read in a way of their own."""
        if self.arithmetic.kv_read == "exact":
            return state
        formats = {"k": self.kv, "v": self.kv, "index": self.index}
        read = numerics.e4m3 if self.arithmetic.kv_read == "e4m3" else numerics.nvfp4_shift3
        return {
            key: np.where(np.isnan(x), np.nan, read(np.nan_to_num(x))) if formats[key[1]] == "nvfp4" else x
            for key, x in state.items()
        }

    def _attend(self, name: str, attrs: Any, q: Any, state: Any, *rest: Any) -> Any:
        """One query, one head, one key at a time; the weights rounded to E4M3, their sum not (MODEL.md §3.4)."""
        blocks = rest[0] if name == "sparse_attention" else None
        positions, cu_q, _, page_table = rest[-4:]
        k, v = state[attrs["layer"], "k"], state[attrs["layer"], "v"]
        page, out = k.shape[2], np.zeros((len(q), q.shape[1] * q.shape[2]))
        for s, table in enumerate(page_table):
            for t in range(cu_q[s], cu_q[s + 1]):
                for j in range(q.shape[1]):
                    h = j // (q.shape[1] // attrs["kv_heads"])
                    chosen = range(positions[t] // page + 1) if blocks is None else [b for b in blocks[t, h] if b >= 0]
                    keys = [b * page + i for b in chosen for i in range(page) if b * page + i <= positions[t]]
                    score = np.array([q[t, j] @ k[table[n // page], h, n % page] for n in keys]) * attrs["scale"]
                    p = np.exp(score - score.max())
                    weight = numerics.e4m3(448 * p) / 448 / p.sum()
                    values = np.stack([v[table[n // page], h, n % page] for n in keys])
                    out[t, j * q.shape[2] : (j + 1) * q.shape[2]] = weight @ values
        return out

    def _experts(self, attrs: Any, decl: WeightDecl, h: Any, ids: Any, weights: Any, w: Any) -> Any:
        a, out = self.arithmetic, np.zeros_like(h)
        first = {
            "nvfp4-token": numerics.nvfp4_token,
            "mxfp8": numerics.mxfp8,
            "bfloat16": numerics.bf16,
            None: lambda x: x,
        }[a.expert_input]
        for t in range(len(h)):
            x = first(h[t : t + 1])[0]
            for e, p in zip(ids[t], weights[t], strict=True):
                gate, up = (numerics.bf16(w[f"{m}.{e}"] @ x) for m in ("w1", "w3"))
                middle = activation(gate, up, attrs)
                if a.expert_middle == "nvfp4-static":
                    middle = numerics.nvfp4_static(middle, self.input_scales[decl.slots[f"w2.{e}"].name])
                elif a.expert_middle:
                    middle = numerics.bf16(middle) if a.expert_middle == "bfloat16" else numerics.mxfp8(middle)
                out[t] += attrs["routed_scaling_factor"] * p * numerics.bf16(w[f"w2.{e}"] @ middle)
        return out
