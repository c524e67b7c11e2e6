"""Low-rank adapters where a product with them cannot be told as `linear` and `add`: the head, and the routed experts.

An adapter of a projection is two more `linear` and an `add` (`m31.graph.adapt`). These ops are asked for only where an
adapter is applied to such a place. The scale of an adapter is in its B.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from m31.ops.cases import rng_for
from m31.ops.moe import activation, expert_slots, experts
from m31.ops.spec import Arg, Attrs, Case, OpSpec, TensorDecl, TensorType, WeightDecl, only_slot, weight


def _logits_types(attrs: Attrs, given: Sequence[Any]) -> tuple[TensorType, ...]:
    logits, low, decl = given
    only_slot(lora_logits, decl, (logits.shape[1], low.shape[1]))
    return (logits,)


def _logits_cases() -> Iterator[Case]:
    for name, rows, rank, scale in (("none", 0, 4, 1.0), ("one", 1, 4, 1.0), ("many", 5, 3, 1.0), ("large", 2, 8, 1e4)):
        rng = rng_for(f"lora_logits/{name}")
        inputs = {"logits": rng.standard_normal((rows, 21)) * 3, "a": rng.standard_normal((rows, rank)) * scale}
        yield Case(f"lora_logits/{name}", {}, {**inputs, "w": rng.standard_normal((21, rank))})


lora_logits = OpSpec(
    name="lora_logits",
    doc="z[r,v] = logits[r,v] + sum_k a[r,k] w[v,k], in the accumulation dtype: what an adapter of the head adds. "
    "logits [R,V], a [R,K], w [V,K] -> [R,V].",
    inputs=(Arg("logits", "R,V", "accum"), Arg("a", "R,C"), weight("w")),
    outputs=(Arg("z", "R,V", "accum"),),
    attrs=(),
    infer=_logits_types,
    naive=lambda attrs, logits, a, w: (logits + a @ w.T,),
    cases=_logits_cases,
    refuses=(
        (
            "a matrix of another rank",
            {},
            (
                TensorType(("R", 9), "R,V", "accum"),
                TensorType(("R", 4), "R,C", "model"),
                WeightDecl("w", {"weight": TensorDecl("w", (9, 3), (None, None))}),
            ),
        ),
    ),
    criterion="bound",
)


def adapted_slots(slots: Sequence[str]) -> list[str]:
    """Those of an experts op that have an adapter, from all of its slots."""
    return [slot.removeprefix("lora_A.") for slot in slots if slot.startswith("lora_A.")]


def _types(attrs: Attrs, given: Sequence[Any]) -> tuple[TensorType, ...]:
    decl = given[3]
    base = {slot: tensor for slot, tensor in decl.slots.items() if not slot.startswith("lora_")}
    out: tuple[TensorType, ...] = experts.infer(attrs, (*given[:3], WeightDecl(decl.name, base)))  # type: ignore[assignment]
    adapted = adapted_slots(list(decl.slots))
    pairs = {f"lora_{part}.{slot}" for slot in adapted for part in "AB"}
    if not adapted or set(decl.slots) != {*base, *pairs} or not set(adapted) <= set(base):
        lora_experts.refuse(
            f"weight '{decl.name}' has the slots {sorted(set(decl.slots) - set(base))} beside the experts'",
            expected="lora_A and lora_B of one matrix or more",
        )
    for slot in adapted:
        a, b, (rows, width) = decl.slots[f"lora_A.{slot}"], decl.slots[f"lora_B.{slot}"], base[slot].shape
        if len(a.shape) != 2 or a.shape[1] != width or b.shape != (rows, a.shape[0]):
            lora_experts.refuse(
                f"the adapter of slot {slot} of '{decl.name}' is {a.shape} and {b.shape}",
                expected=f"[r,{width}] and [{rows},r]",
            )
    return out


def _naive(attrs: Attrs, h: Any, ids: Any, weights: Any, w: Any) -> tuple[Any, ...]:
    def product(slot: str, x: Any) -> Any:
        low = w[f"lora_B.{slot}"] @ (w[f"lora_A.{slot}"] @ x) if f"lora_A.{slot}" in w else 0.0
        return w[slot] @ x + low

    out = np.zeros_like(h)
    for t in range(len(h)):
        for e, p in zip(ids[t], weights[t], strict=True):
            act = activation(product(f"w1.{e}", h[t]), product(f"w3.{e}", h[t]), attrs)
            out[t] += attrs["routed_scaling_factor"] * p * product(f"w2.{e}", act)
    return (out,)


def _cases() -> Iterator[Case]:
    every = expert_slots(6)
    chosen = {
        "every-matrix": every,
        "gate-only": [slot for slot in every if slot.startswith("w1")],
        "down-of-some": ["w2.1", "w2.3", "w2.5"],
        "ranks-differ": every,
    }
    base = {case.id.rpartition("/")[2]: case for case in experts.cases()}
    for name, like in (
        ("none", "none"),
        ("every-matrix", "many"),
        ("gate-only", "many"),
        ("down-of-some", "one-expert-hit-by-all"),
        ("ranks-differ", "other-parameters"),
    ):
        rng, case = rng_for(f"lora_experts/{name}"), base[like]
        w = dict(case.inputs["w"])
        for at, slot in enumerate(chosen.get(name, every)):
            rows, width = w[slot].shape
            rank = 1 + at % 5 if name == "ranks-differ" else 3
            w[f"lora_A.{slot}"] = rng.standard_normal((rank, width))
            w[f"lora_B.{slot}"] = rng.standard_normal((rows, rank)) * 0.5
        yield Case(f"lora_experts/{name}", case.attrs, {**case.inputs, "w": w})


def _refused() -> tuple[tuple[str, Attrs, tuple[Any, ...]], ...]:
    attrs = {"alpha": 1.702, "beta": 1.0, "limit": 7.0, "routed_scaling_factor": 2.0, "experts": 1}
    data = (
        TensorType(("T", 8), "T,C", "model"),
        TensorType(("T", 1), "T,K", "int64"),
        TensorType(("T", 1), "T,K", "accum"),
    )

    def given(**more: tuple[int, int]) -> tuple[Any, ...]:
        shapes = {"w1.0": (4, 8), "w3.0": (4, 8), "w2.0": (8, 4)} | {
            f"lora_{name[0]}.w1.0": shape for name, shape in more.items()
        }
        return (*data, WeightDecl("e", {slot: TensorDecl(slot, s, (None, None)) for slot, s in shapes.items()}))

    return (
        ("no adapter", attrs, given()),
        ("an A without its B", attrs, given(A=(2, 8))),
        ("a B of another rank", attrs, given(A=(2, 8), B=(4, 3))),
        ("an A of another width", attrs, given(A=(2, 4), B=(4, 2))),
    )


lora_experts = OpSpec(
    name="lora_experts",
    doc="`experts` with adapters: every matrix W that has one is W + B A. Slots are those of `experts`, and "
    "lora_A.<slot> [r,in] and lora_B.<slot> [out,r] of the matrices with an adapter, each with a rank of its own. "
    "h [T,C], ids [T,K], weights [T,K] -> [T,C].",
    inputs=experts.inputs,
    outputs=experts.outputs,
    attrs=experts.attrs,
    infer=_types,
    naive=_naive,
    cases=_cases,
    refuses=_refused(),
    criterion="bound",
)
