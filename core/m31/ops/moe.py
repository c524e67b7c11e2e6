"""Feed-forward: SwiGLU-OAI, router, grouped experts (MODEL.md §2.5)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from m31.ops.cases import rng_for
from m31.ops.spec import Arg, Attrs, Case, OpSpec, TensorDecl, TensorType, WeightDecl, positive, weight


def _sigmoid(x: Any) -> Any:
    return 0.5 * (1.0 + np.tanh(0.5 * x))


def activation(gate: Any, up: Any, attrs: Attrs) -> Any:
    """SwiGLU-OAI in numpy: no lower clamp on the gate, both clamps on up."""
    g = np.minimum(gate, attrs["limit"])
    u = np.clip(up, -attrs["limit"], attrs["limit"])
    return (u + attrs["beta"]) * g * _sigmoid(attrs["alpha"] * g)


_ACT: Attrs = {"alpha": 1.702, "beta": 1.0, "limit": 7.0}
# BUG-2: parameters that differ from every plausible default, and inputs beyond the clamps
_ODD: Attrs = {"alpha": 1.25, "beta": 0.5, "limit": 3.0}


def _act_types(attrs: Attrs, given: Sequence[Any]) -> tuple[TensorType, ...]:
    positive(swiglu_oai, attrs, "alpha", "limit")
    if given[0].shape != given[1].shape:
        swiglu_oai.refuse(f"gate {given[0].shape} and up {given[1].shape} differ", expected="equal shapes")
    return (given[0],)


def _act_cases() -> Iterator[Case]:
    golden = {"gate": np.array([[8.0, 1.0, -9.0, 0.5]]), "up": np.array([[9.0, -9.0, 2.0, 0.25]])}
    yield Case("swiglu_oai/golden", _ACT, golden)
    for name, n, attrs in (("none", 0, _ACT), ("beyond-clamps", 6, _ACT), ("other-parameters", 6, _ODD)):
        rng = rng_for(f"swiglu_oai/{name}")
        inputs = {"gate": rng.standard_normal((n, 12)) * 9, "up": rng.standard_normal((n, 12)) * 9}
        yield Case(f"swiglu_oai/{name}", attrs, inputs)


swiglu_oai = OpSpec(
    name="swiglu_oai",
    doc="y = (clamp(up, -limit, limit) + beta) * g * sigmoid(alpha * g), g = min(gate, limit) (MODEL.md §2.5). "
    "[T,C] x 2 -> [T,C].",
    inputs=(Arg("gate", "T,C"), Arg("up", "T,C")),
    outputs=(Arg("y", "T,C"),),
    attrs=("alpha", "beta", "limit"),
    infer=_act_types,
    naive=lambda attrs, gate, up: (activation(gate, up, attrs),),
    cases=_act_cases,
    refuses=(
        (
            "gate and up of different widths",
            _ACT,
            (TensorType(("T", 8), "T,C", "model"), TensorType(("T", 4), "T,C", "model")),
        ),
    ),
    criterion="bound",
)


def _router_types(attrs: Attrs, given: Sequence[Any]) -> tuple[TensorType, ...]:
    positive(router, attrs, "topk")
    slots = given[1].slots
    if set(slots) != {"weight", "bias"}:
        router.refuse(f"weight '{given[1].name}' has slots {sorted(slots)}", expected="['bias', 'weight']")
    experts, width = slots["weight"].shape
    if width != given[0].shape[1] or slots["bias"].shape != (experts,) or attrs["topk"] > experts:
        router.refuse(
            f"gate {slots['weight'].shape}, bias {slots['bias'].shape}, top-{attrs['topk']}",
            expected=f"[E,{given[0].shape[1]}], [E] and top-k <= E",
        )
    tokens = given[0].shape[0]
    return TensorType((tokens, attrs["topk"]), "T,K", "int64"), TensorType((tokens, attrs["topk"]), "T,K", "accum")


def _router_naive(attrs: Attrs, h: Any, w: Any) -> tuple[Any, ...]:
    ids = np.zeros((len(h), attrs["topk"]), np.int64)
    weights = np.zeros((len(h), attrs["topk"]))
    for t in range(len(h)):
        score = _sigmoid(w["weight"] @ h[t])
        choice = score + w["bias"]
        order = sorted(range(len(choice)), key=lambda e: (-choice[e], e))  # the lower id wins a tie
        ids[t] = order[: attrs["topk"]]
        weights[t] = score[ids[t]] / score[ids[t]].sum()
    return ids, weights


def _router_cases() -> Iterator[Case]:
    for name, n, experts, topk in (("none", 0, 8, 2), ("one", 1, 8, 2), ("many", 17, 16, 4), ("all", 3, 4, 4)):
        rng = rng_for(f"router/{name}")
        w = {"weight": rng.standard_normal((experts, 24)) * 0.3, "bias": rng.standard_normal(experts)}
        yield Case(f"router/{name}", {"topk": topk}, {"h": rng.standard_normal((n, 24)), "w": w})
    golden = {
        "weight": np.array([[0.3], [-1.2], [2.0], [0.9], [0.0], [1.1]]),
        "bias": np.array([0.5, 0.9, 0, 0, 0.45, 0]),
    }
    yield Case("router/golden", {"topk": 4}, {"h": np.array([[1.0]]), "w": golden})
    tie = {"weight": np.zeros((6, 4)), "bias": np.zeros(6)}
    yield Case("router/all-equal", {"topk": 3}, {"h": np.ones((2, 4)), "w": tie})


router = OpSpec(
    name="router",
    doc="s = sigmoid(h W^T); ids = the top-k of s + bias in descending order, the lower id winning ties; weights "
    "= s[ids] / "
    "sum s[ids], from the unbiased scores (MODEL.md §2.5, BUG-12). All in the accumulation dtype. h [T,C] -> "
    "ids [T,K], weights [T,K].",
    inputs=(Arg("h", "T,C"), weight("w")),
    outputs=(Arg("ids", "T,K", "int64"), Arg("weights", "T,K", "accum")),
    attrs=("topk",),
    infer=_router_types,
    naive=_router_naive,
    cases=_router_cases,
    refuses=(
        (
            "more choices than experts",
            {"topk": 5},
            (
                TensorType(("T", 8), "T,C", "model"),
                WeightDecl(
                    "g", {"weight": TensorDecl("g", (4, 8), (None, None)), "bias": TensorDecl("b", (4,), (None,))}
                ),
            ),
        ),
    ),
    criterion="bound",
)


def expert_slots(experts: int) -> list[str]:
    """Slot names of a grouped-experts weight: w1 is gate, w3 is up, w2 is down."""
    return [f"{m}.{e}" for e in range(experts) for m in ("w1", "w3", "w2")]


def _expert_types(attrs: Attrs, given: Sequence[Any]) -> tuple[TensorType, ...]:
    positive(experts, attrs, "alpha", "limit", "routed_scaling_factor", "experts")
    width, decl = given[0].shape[1], given[3]
    if set(decl.slots) != set(expert_slots(attrs["experts"])):
        experts.refuse(
            f"weight '{decl.name}' has {len(decl.slots)} slots", expected=f"w1, w3, w2 of {attrs['experts']} experts"
        )
    inner = decl.slots["w1.0"].shape[0]
    for slot, tensor in decl.slots.items():
        wanted = (width, inner) if slot.startswith("w2") else (inner, width)
        if tensor.shape != wanted:
            experts.refuse(f"slot {slot} of '{decl.name}' has shape {tensor.shape}", expected=str(wanted))
    return (given[0],)


def _expert_naive(attrs: Attrs, h: Any, ids: Any, weights: Any, w: Any) -> tuple[Any, ...]:
    out = np.zeros_like(h)
    for t in range(len(h)):
        for e, p in zip(ids[t], weights[t], strict=True):
            act = activation(w[f"w1.{e}"] @ h[t], w[f"w3.{e}"] @ h[t], attrs)
            out[t] += attrs["routed_scaling_factor"] * p * (w[f"w2.{e}"] @ act)
    return (out,)


def _expert_cases() -> Iterator[Case]:
    for name, n, act, factor in (
        ("none", 0, _ACT, 2.0),
        ("one", 1, _ACT, 2.0),
        ("many", 13, _ACT, 2.0),
        ("one-expert-hit-by-all", 5, _ACT, 2.0),
        ("other-parameters", 6, _ODD, 0.75),
    ):
        rng = rng_for(f"experts/{name}")
        count, width, inner, topk = 6, 16, 12, 2
        w = {
            s: rng.standard_normal((width, inner) if s.startswith("w2") else (inner, width))
            for s in expert_slots(count)
        }
        ids = np.stack([rng.permutation(count)[:topk] for _ in range(n)]) if n else np.zeros((0, topk), np.int64)
        if name == "one-expert-hit-by-all":
            ids[:] = [3, 5]
        weights = rng.uniform(0.1, 1, (n, topk))
        inputs = {"h": rng.standard_normal((n, width)) * 2, "ids": ids, "weights": weights, "w": w}
        yield Case(f"experts/{name}", {**act, "routed_scaling_factor": factor, "experts": count}, inputs)


experts = OpSpec(
    name="experts",
    doc="y[t] = routed_scaling_factor * sum over ids of weight * w2 act(w1 h, w3 h), summed in the accumulation "
    "dtype; the "
    "factor is applied here and nowhere else (MODEL.md §2.5, BUG-27). h [T,C], ids [T,K], weights [T,K] -> [T,C].",
    inputs=(Arg("h", "T,C"), Arg("ids", "T,K", "int64"), Arg("weights", "T,K", "accum"), weight("w")),
    outputs=(Arg("y", "T,C"),),
    attrs=("alpha", "beta", "limit", "routed_scaling_factor", "experts"),
    infer=_expert_types,
    naive=_expert_naive,
    cases=_expert_cases,
    refuses=(
        (
            "a missing expert",
            {**_ACT, "routed_scaling_factor": 2.0, "experts": 2},
            (
                TensorType(("T", 8), "T,C", "model"),
                TensorType(("T", 2), "T,K", "int64"),
                TensorType(("T", 2), "T,K", "accum"),
                WeightDecl("e", {"w1.0": TensorDecl("e", (4, 8), (None, None))}),
            ),
        ),
    ),
    criterion="bound",
)
