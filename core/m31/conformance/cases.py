"""Cases of every op as a session can be asked for them: the op's own, and some of sizes that real kernels ask for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from m31.conformance.cases_more import more
from m31.formats import mxfp8, nvfp4
from m31.graph import OpInstance, StepClass
from m31.ops import Case, OpSpec, StateType, TensorDecl, TensorType, WeightDecl
from m31.ops.cases import batch, pages, rng_for
from m31.ops.moe import expert_slots

STORED = ("float32", "bfloat16", "mxfp8", "nvfp4")
_SYMBOLS = {"T": "T", "S": "S", "R": "R", "P": "P"}
_CONTEXT = ("positions", "cu_q", "seq_lens", "page_table")
_ACTIVATION = {"alpha": 1.702, "beta": 1.0, "limit": 7.0}


def cases_of(spec: OpSpec) -> Iterator[Case]:
    """The op's own cases, then those of this module."""
    yield from spec.cases()
    yield from more(spec)
    if spec.name == "linear":
        for tokens in (1, 16, 17):  # around a tile
            rng = rng_for(f"linear/tokens-{tokens}")
            inputs = {"x": rng.standard_normal((tokens, 64)), "w": rng.standard_normal((48, 64)) * 0.2}
            yield Case(f"linear/tokens-{tokens}", {}, inputs)
    elif spec.name == "qkv_insert":
        yield _qkv_insert()
    elif spec.name == "experts":
        for tokens in (1, 16, 17):
            yield _experts(tokens)
    elif spec.name in ("sparse_attention", "dense_attention", "block_scores"):
        for name, q_lens, ctx in (("prefill-wide", [17], [35]), ("decode-wide", [1, 1, 1], [16, 33, 40])):
            yield _attention(spec.name, name, q_lens, ctx)


def _experts(tokens: int) -> Case:
    name = f"experts/tokens-{tokens}"
    rng = rng_for(name)
    count, width, inner, topk = 5, 64, 32, 2
    w = {
        slot: rng.standard_normal((width, inner) if slot.startswith("w2") else (inner, width)) * 0.3
        for slot in expert_slots(count)
    }
    ids = np.stack([rng.permutation(count)[:topk] for _ in range(tokens)])
    h, weights = rng.standard_normal((tokens, width)), rng.uniform(0.1, 1, (tokens, topk))
    attrs = {**_ACTIVATION, "routed_scaling_factor": 2.0, "experts": count}
    return Case(name, attrs, {"h": h, "ids": ids, "weights": weights, "w": w})


def _qkv_insert() -> Case:
    name, page, dim, width = "qkv_insert/wide", 16, 16, 64
    rng = rng_for(name)
    b = batch(rng, [5, 2], [19, 2], page)
    heads = {"q": 4, "k": 2, "v": 2, "iq": 2, "ik": 1}
    angle = rng.uniform(0, 6.3, (7, 4))
    inputs: dict[str, Any] = {"h": rng.standard_normal((7, width)), "slots": b.slot_map}
    inputs |= {"cos": np.cos(angle), "sin": np.sin(angle)}
    inputs |= {arg: rng.standard_normal((n * dim, width)) * width**-0.5 for arg, n in heads.items()}
    inputs |= {f"{arg}_norm": rng.standard_normal(dim) * 0.3 for arg in heads if arg != "v"}
    state: dict[tuple[int, str], Any] = {
        (0, kind): rng.standard_normal((b.num_pages, 2, page, dim)) for kind in ("k", "v")
    }
    state[0, "index"] = rng.standard_normal((b.num_pages, page, dim))
    attrs = {"layer": 0, "heads": 4, "kv_heads": 2, "index_heads": 2, "eps": 1e-6}
    return Case(name, {**attrs, "round_query": True, "round_kv": True, "round_index": True}, inputs, state)


def _attention(op: str, name: str, q_lens: list[int], ctx: list[int]) -> Case:
    page, dim, heads, kv_heads, topk = 16, 16, 4, 2, 2
    rng = rng_for(f"{op}/{name}")
    b = batch(rng, q_lens, ctx, page)
    inputs = {"q": rng.standard_normal((sum(q_lens), heads, dim)), **b.inputs(*_CONTEXT)}
    if op == "block_scores":
        return Case(f"{op}/{name}", {"layer": 0}, inputs, {(0, "index"): pages(rng, b, page, dim)})
    state: dict[tuple[int, str], Any] = {(0, kind): pages(rng, b, page, kv_heads, dim) for kind in ("k", "v")}
    if op == "sparse_attention":
        blocks = np.full((sum(q_lens), kv_heads, topk), -1, np.int64)
        for t, position in enumerate(b.positions):
            own = int(position) // page
            for h in range(kv_heads):
                chosen = np.sort(np.append(rng.permutation(own)[: topk - 1], own))
                blocks[t, h, : len(chosen)] = chosen
        inputs["blocks"] = blocks
    return Case(f"{op}/{name}", {"layer": 0, "kv_heads": kv_heads, "scale": dim**-0.5}, inputs, state)


def weight_of(case: Case, name: str) -> dict[str, Any]:
    """One weight argument of a case, by its own slots."""
    value = case.inputs[name]
    return dict(value) if isinstance(value, dict) else {"weight": value}


def weights_of(case: Case, spec: OpSpec) -> dict[str, Any]:
    """All weights of a case by slot, as `OpInstance.slots` calls them."""
    names = [arg.name for arg in spec.inputs if arg.kind == "weight"]
    if len(names) == 1:
        return weight_of(case, names[0])
    return {f"{name}.{slot}": value for name in names for slot, value in weight_of(case, name).items()}


def storable(spec: OpSpec, slots: Mapping[str, Any]) -> list[str]:
    """How the weights of a case can be stored, in the order of `STORED`."""
    forms = list(STORED[:2])
    matrices = [shape for value in slots.values() if len(shape := np.shape(value)) == 2]
    for name, group, ops in (
        ("mxfp8", mxfp8.GROUP, ("linear", "experts")),
        ("nvfp4", nvfp4.GROUP, ("experts",)),
    ):
        if spec.name in ops and matrices and all(shape[1] % group == 0 for shape in matrices):
            forms.append(name)
    return forms if slots else [""]


def instance(spec: OpSpec, case: Case, stored: str, formats: tuple[str, str]) -> OpInstance:
    """The op of a case, as a graph would hold it.

    Args:
        stored: of its weights.
        formats: of keys and values, and of index keys, in pages.
    """
    given: list[Any] = []
    for arg in spec.inputs:
        if arg.kind == "state":
            given.append(StateType("kv", *formats))
        elif arg.kind == "weight":
            decls = {
                slot: TensorDecl(
                    f"{case.id}.{arg.name}.{slot}", np.shape(value), (None,) * np.ndim(value), stored=stored
                )
                for slot, value in weight_of(case, arg.name).items()
            }
            given.append(WeightDecl(f"{case.id}.{arg.name}", decls))
        else:
            shape = _symbolic(arg.layout, np.shape(case.inputs[arg.name]), arg.name)
            given.append(TensorType(shape, arg.layout, arg.dtype))
    return OpInstance(case.id, spec, case.attrs, tuple(given), spec.types(case.attrs, given))


def _symbolic(layout: str, shape: tuple[int, ...], name: str) -> tuple[int | str, ...]:
    """A case's shape with the step's symbols."""
    axes = layout.split(",")
    dims = tuple(_SYMBOLS.get(axis, n) for axis, n in zip(axes, shape, strict=True))
    return ("S+1",) if name == "cu_q" else dims


def step_of(spec: OpSpec, case: Case) -> StepClass:
    """A step class in which a case fits; capacities are powers of two, as the engine's are."""
    sizes = {"T": 1, "S": 1, "R": 1, "P": 1}
    for arg in spec.inputs:
        if arg.kind == "data" and arg.name != "cu_q":
            for axis, n in zip(arg.layout.split(","), np.shape(case.inputs[arg.name]), strict=True):
                if axis in sizes:
                    sizes[axis] = max(sizes[axis], 1 << max(0, int(n) - 1).bit_length())
    return StepClass(kind="mixed", q_len=0, tokens=sizes["T"], seqs=sizes["S"], rows=sizes["R"], pages=sizes["P"])
