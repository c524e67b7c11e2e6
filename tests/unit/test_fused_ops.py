"""Ops declared by their body: what is derived from it, against formulas written out here, and run part by part."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from tests.support import fusing
from tests.unit.test_reference_ops import Pages

from m31 import ops
from m31.errors import GraphError, OpRefused
from m31.formats.transforms import Loss
from m31.graph import OpInstance, PartHandles, compose, unfused
from m31.ops import Arg, Case, StateType, TensorDecl, TensorType, WeightDecl
from m31.ops.body import FusedOp, declare
from m31.ops.examples import Example
from m31.ops.fused import FUSED, add_norm, experts_shared, qkv_insert, qkv_insert_dense
from m31_reference.session import ReferenceBackend
from m31_reference.weights import Weights

CASES = [(spec, case) for spec in FUSED.values() for case in spec.cases()]
IDS = [case.id for _, case in CASES]


def bf16(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float64)


def given(spec: FusedOp, case: Case) -> list[Any]:
    """The inputs of a case, in the order of the signature."""
    return [dict(case.state) if arg.kind == "state" else case.inputs[arg.name] for arg in spec.inputs]


def types(spec: FusedOp, case: Case) -> tuple[Any, ...]:
    """What a graph would say of the inputs of a case."""
    out: list[Any] = []
    for arg in spec.inputs:
        if arg.kind == "state":
            out.append(StateType("kv"))
        elif arg.kind == "weight":
            value = case.inputs[arg.name]
            slots = value if isinstance(value, dict) else {"weight": value}
            decls = {s: TensorDecl(f"{arg.name}.{s}", v.shape, (None,) * v.ndim) for s, v in slots.items()}
            out.append(WeightDecl(f"model.{arg.name}", decls))
        else:
            out.append(TensorType(("T", *case.inputs[arg.name].shape[1:]), arg.layout, arg.dtype))
    return tuple(out)


def instance(spec: FusedOp, case: Case) -> OpInstance:
    found = types(spec, case)
    return OpInstance("it", spec, case.attrs, found, spec.types(case.attrs, found))


def branch(i: dict[str, Any], a: Any, name: str, heads: int, rounded: bool) -> np.ndarray:
    """Projection, Gemma norm per head, NeoX rotation of the first 2 * half channels; one expression each."""
    x = np.einsum("tk,nk->tn", i["h"], i[name]).reshape(len(i["h"]), heads, len(i[f"{name}_norm"]))
    x = x * (1 + i[f"{name}_norm"]) * (np.square(x).mean(-1, keepdims=True) + a["eps"]) ** -0.5
    half = i["cos"].shape[1]
    turned = (x[..., :half] + 1j * x[..., half : 2 * half]) * (i["cos"] + 1j * i["sin"])[:, None]
    x = np.concatenate([turned.real, turned.imag, x[..., 2 * half :]], -1)
    return bf16(x) if rounded else x


def stored(pages: np.ndarray, slots: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Pages [pages,h,tokens,D] after the rows [T,h,D] of real slots were written."""
    flat = np.moveaxis(pages, 2, 1).reshape(-1, *rows.shape[1:]).copy()
    flat[slots[slots >= 0]] = rows[slots >= 0]
    return np.moveaxis(flat.reshape(pages.shape[0], pages.shape[2], *rows.shape[1:]), 1, 2)


def qkv_by_hand(spec: FusedOp, case: Case) -> list[Any]:
    i, a = dict(case.inputs), case.attrs
    query, rounded = a["round_query"], a["round_kv"]
    k = branch(i, a, "k", a["kv_heads"], rounded)
    v = np.einsum("tk,nk->tn", i["h"], i["v"])
    v = (bf16(v) if rounded else v).reshape(k.shape)
    state = {(0, "k"): stored(case.state[0, "k"], i["slots"], k), (0, "v"): stored(case.state[0, "v"], i["slots"], v)}
    q = branch(i, a, "q", a["heads"], query)
    if spec is qkv_insert_dense:
        return [q, state]
    key = branch(i, a, "ik", 1, a["round_index"])
    state[0, "index"] = stored(case.state[0, "index"][:, None], i["slots"], key)[:, 0]
    return [q, branch(i, a, "iq", a["index_heads"], query), state]


def add_norm_by_hand(spec: FusedOp, case: Case) -> list[Any]:
    x, y, w = (case.inputs[name] for name in "xyw")
    total = x + y
    h = total / np.sqrt((total**2).sum(-1, keepdims=True) / total.shape[1] + case.attrs["eps"]) * (1 + w)
    return [total, bf16(h) if case.attrs["rounded"] else h]


def experts_by_hand(spec: FusedOp, case: Case) -> list[Any]:
    i, a = case.inputs, case.attrs

    def mlp(x: Any, gate: Any, up: Any, down: Any) -> Any:
        g, u = np.minimum(x @ gate.T, a["limit"]), np.clip(x @ up.T, -a["limit"], a["limit"])
        return (g / (1 + np.exp(-a["alpha"] * g)) * (u + a["beta"])) @ down.T

    out = mlp(i["h"], i["gate"], i["up"], i["down"])
    for e in range(a["experts"]):
        share = np.where(i["ids"] == e, i["weights"], 0).sum(-1, keepdims=True) * a["routed_scaling_factor"]
        out = out + share * mlp(i["h"], *(i["routed"][f"{w}.{e}"] for w in ("w1", "w3", "w2")))
    return [out]


BY_HAND = {
    "qkv_insert": qkv_by_hand,
    "qkv_insert_dense": qkv_by_hand,
    "add_norm": add_norm_by_hand,
    "experts_shared": experts_by_hand,
}


def close(got: Any, want: Any, rounded: bool) -> None:
    """Equal up to float64 rounding; a value that was rounded to BF16 next to a tie may come out one step apart."""
    if isinstance(want, dict):
        assert set(got) == set(want)
        for key in want:
            close(got[key], want[key], rounded)
        return
    scale = np.abs(want).max(initial=0.0)
    off = np.abs(got - want) > 1e-12 * (np.abs(want) + scale)
    assert off.mean() < 0.01 if rounded and off.size else not off.any()
    assert (np.abs(got - want)[off] <= 2.0**-7 * np.abs(want)[off]).all()


@pytest.mark.parametrize(("spec", "case"), CASES, ids=IDS)
def test_naive_is_the_formula(spec: FusedOp, case: Case) -> None:
    """The composition of the parts against the formulas above, which share nothing with it."""
    got = spec.naive(case.attrs, *given(spec, case))
    want = BY_HAND[spec.name](spec, case)
    assert len(got) == len(want) == len(spec.outputs)
    for g, w in zip(got, want, strict=True):
        close(g, w, rounded=any(case.attrs[v] for v in spec.variants))


@pytest.mark.parametrize(("spec", "case"), CASES, ids=IDS)
def test_naive_leaves_its_inputs_alone(spec: FusedOp, case: Case) -> None:
    state = {key: value.copy() for key, value in case.state.items()}
    spec.naive(case.attrs, *given(spec, case))
    for key, value in case.state.items():
        np.testing.assert_array_equal(value, state[key])


@pytest.mark.parametrize(("spec", "case"), CASES, ids=IDS)
def test_the_parts_compute_the_fused_op(spec: FusedOp, case: Case) -> None:
    """The body run with the reference's kernels, in float64, against naive: what a fused kernel is compared with."""
    session = ReferenceBackend(None).open(device=None, dtype="float64", rank=0, world=1)  # type: ignore[arg-type]
    op = instance(spec, case)
    body = unfused(op)
    kernels = {call.op.name: session.kernel(call.op, fusing.STEP) for call in body.graph.calls}
    run = compose(body, kernels, session.dtypes, session.device)  # type: ignore[arg-type]
    pages = Pages(dict(case.state), torch.float64) if case.state else None
    ins: list[Any] = []
    handles: dict[str, Any] = {}
    for arg in spec.inputs:
        if arg.kind == "state":
            ins.append(pages)
        elif arg.kind == "weight":
            value = case.inputs[arg.name]
            slots = value if isinstance(value, dict) else {"weight": value}
            handles[arg.name] = Weights({slot: torch.tensor(v) for slot, v in slots.items()})
        else:
            ins.append(torch.tensor(case.inputs[arg.name]))
    want = spec.naive(case.attrs, *given(spec, case))
    outs = [pages if isinstance(w, dict) else torch.full(w.shape, torch.nan, dtype=torch.float64) for w in want]
    run(outs, ins, PartHandles(handles), None)
    for got, w in zip(outs, want, strict=True):
        rounded = any(case.attrs[v] for v in spec.variants)
        close(got.arrays() if isinstance(got, Pages) else got.numpy(), w, rounded)


@pytest.mark.parametrize(("spec", "case"), CASES, ids=IDS)
def test_types_are_the_shapes_of_naive(spec: FusedOp, case: Case) -> None:
    op = instance(spec, case)
    for arg, kind, value in zip(spec.outputs, op.outputs, spec.naive(case.attrs, *given(spec, case)), strict=True):
        if isinstance(kind, TensorType):
            assert (value.shape[1:], arg.layout, arg.dtype) == (kind.shape[1:], kind.layout, kind.dtype)
            assert (kind.shape[0], len(value)) == ("T", len(next(iter(case.inputs.values()))))
        else:
            assert kind == StateType("kv")


def test_cases_reach_every_form_and_can_be_made_alone() -> None:
    assert len(set(IDS)) == len(IDS)
    for spec in FUSED.values():
        forms = {tuple(case.attrs[v] for v in spec.variants) for case in spec.cases()}
        assert len(forms) == 2 ** len(spec.variants)
        for once, again in zip(spec.cases(), spec.cases(), strict=True):
            for name, value in once.inputs.items():
                np.testing.assert_equal(again.inputs[name], value)
        sizes = [len(next(iter(case.inputs.values()))) for case in spec.cases()]
        assert {0, 1} < set(sizes)
    padded = [case for case in qkv_insert.cases() if (case.inputs["slots"] < 0).any()]
    assert padded
    assert any(case.inputs["h"].shape[0] == case.attrs["heads"] for case in qkv_insert.cases())


def test_rounding_variants_matter() -> None:
    """A kernel that ignores one of them fails a case."""
    for spec in FUSED.values():
        case = next(c for c in spec.cases() if len(next(iter(c.inputs.values()))) > 1)
        for variant in spec.variants:
            on = spec.naive({**case.attrs, variant: True}, *given(spec, case))
            off = spec.naive({**case.attrs, variant: False}, *given(spec, case))
            with pytest.raises(AssertionError):
                np.testing.assert_equal(on, off)


def test_the_signature_follows_from_the_body() -> None:
    assert qkv_insert.inputs[:5] == (
        Arg("h", "T,C"),
        Arg("kv", "", kind="state"),
        Arg("slots", "T", "int64"),
        Arg("cos", "T,D", "accum"),
        Arg("sin", "T,D", "accum"),
    )
    assert {arg.kind for arg in qkv_insert.inputs[5:]} == {"weight"}
    assert qkv_insert.outputs == (Arg("q", "T,h,D"), Arg("iq", "T,h,D"), Arg("kv", "", kind="state"))
    assert add_norm.outputs == (Arg("sum", "T,C"), Arg("h", "T,C"))
    assert add_norm.attrs == ("eps", "rounded")
    assert add_norm.variants == ("rounded",)
    assert experts_shared.inputs[1:3] == (Arg("ids", "T,K", "int64"), Arg("weights", "T,K", "accum"))
    assert {spec.criterion for spec in FUSED.values()} == {"bound"}
    assert not set(FUSED) & set(ops.ALL)


@pytest.mark.parametrize("spec", FUSED.values(), ids=list(FUSED))
def test_declared_refusals_are_refused(spec: FusedOp) -> None:
    assert len(spec.refuses) == sum(arg.kind == "weight" for arg in spec.inputs) + len(spec.variants)
    for _, attrs, wrong in spec.refuses:
        with pytest.raises(OpRefused, match=f"op {spec.name}"):
            spec.types(attrs, wrong)


def test_a_refusal_names_the_part() -> None:
    what = r"op qkv_insert, part head_rmsnorm of \['linear#8', 'iq_norm'\]: .* shape \[9\]; expected \[8\]"
    attrs, wrong = next((a, w) for why, a, w in qkv_insert.refuses if "'iq_norm'" in why)
    with pytest.raises(OpRefused, match=what):
        qkv_insert.types(attrs, wrong)


@pytest.mark.parametrize("spec", FUSED.values(), ids=list(FUSED))
def test_no_attribute_has_a_default(spec: FusedOp) -> None:
    case = next(spec.cases())
    for name in spec.attrs:
        with pytest.raises(OpRefused, match=name):
            spec.types({k: v for k, v in case.attrs.items() if k != name}, types(spec, case))


def test_only_a_fused_op_has_a_body() -> None:
    op = OpInstance("n", ops.add, {}, (), ())
    with pytest.raises(GraphError, match="node n: op 'add' has no body; expected a fused op"):
        unfused(op)


def test_a_body_is_typed_and_keeps_the_attributes() -> None:
    case = next(case for case in qkv_insert.cases() if case.attrs["round_index"] and not case.attrs["round_query"])
    body = unfused(instance(qkv_insert, case))
    names = [call.op.spec.name for call in body.graph.calls]
    assert (names.count("linear"), names.count("round_heads"), names[-1]) == (5, 2, "index_write")
    assert [len(body.inputs), len(body.outputs)] == [5, 3]
    assert {body.argument(call.op) for call in body.graph.calls if call.op.weights is not None} == set(body.op.decls)
    assert all(isinstance(body.graph.types[name], TensorType) for name in body.outputs[:2])
    heads = [call.op.attrs["heads"] for call in body.graph.calls if call.op.spec.name == "head_rmsnorm"]
    assert heads == [case.attrs[a] for a in ("heads", "kv_heads", "index_heads")] + [1]


def loss(size: float) -> Loss:
    return Loss(max_abs=size, rms=size, max_rel=size, exact=False)


class Handle:
    """Prepared weights that lost something in one transform."""

    layout_id = "plain"

    def __init__(self, *slots: str, lost: float, kept: tuple[str, ...] = ()) -> None:
        self.slots, self.losses, self.in_place = slots, {"shared_scale": loss(lost)}, frozenset(kept)

    def dequantise(self) -> dict[str, torch.Tensor]:
        return {slot: torch.full((1,), float(i)) for i, slot in enumerate(self.slots)}


def test_handles_of_parts_speak_for_the_instance() -> None:
    routed = Handle("w1.0", "w2.0", lost=0.5, kept=("w2.0",))
    several = PartHandles({"routed": routed, "gate": Handle("weight", lost=0.25)})
    assert {slot: float(v) for slot, v in several.dequantise().items()} == {
        "routed.w1.0": 0,
        "routed.w2.0": 1,
        "gate.weight": 0,
    }
    assert several.layout_id == "routed=plain+gate=plain"
    assert several.losses == {"shared_scale": loss(0.5)}
    assert several.in_place == {"routed.w2.0"}
    single = PartHandles({"w": Handle("weight", lost=0.0, kept=("weight",))})
    assert set(single.dequantise()) == single.in_place == {"weight"}


def example(op: str) -> Any:
    return iter([Example("one", {}, {"x": (1, 4), "y": (1, 4)})])


def declared(body: Any, **changes: Any) -> FusedOp:
    options = {"outputs": ("z",), "anchor": "add", "expected": lambda m: 0, "examples": example, **changes}
    return declare("odd", "An op.", body, **options)


def test_declarations_that_contradict_themselves() -> None:
    def good(x: Any, y: Any) -> Any:
        return ops.add(x, y)

    def unused(x: Any, y: Any) -> Any:
        return ops.add(x, x)

    def twice(x: Any, y: Any) -> Any:
        return ops.add(ops.add(x, y), y)

    def two_layouts(x: Any, y: Any) -> Any:
        return ops.add(ops.round_channels(x), y), ops.round_heads(x)

    def attribute(x: Any, y: Any, *, eps: float) -> Any:
        return ops.add(x, y)

    def constant(x: Any, y: Any) -> Any:
        return ops.add(ops.add(x, y), 1.0)

    assert declared(good).criterion == "bound"
    for body, options, what in (
        (unused, {}, r"op odd: parameters \['y'\] of the body are not used"),
        (twice, {}, "op odd: anchor 'add' does not occur once in the body"),
        (good, {"anchor": "linear"}, "anchor 'linear' does not occur once"),
        (two_layouts, {"outputs": ("z", "r")}, r"op odd: value 'x' of the body is used as \[\('T,C'"),
        (attribute, {}, r"op odd: attributes \['eps'\] are not used"),
        (constant, {}, "gives 'add' a constant"),
        (good, {"outputs": ("a", "b")}, r"op odd: the body returns 1 values; expected a, b"),
    ):
        with pytest.raises(GraphError, match=what):
            declared(body, **options)


def test_moves_only_are_exact() -> None:
    def copies(x: Any, rows: Any) -> Any:
        return ops.gather_rows(ops.round_channels(x), rows)

    made = declare(
        "copies",
        "Moves.",
        copies,
        outputs=("y",),
        anchor="gather_rows",
        expected=lambda m: 0,
        examples=lambda op: iter([Example("one", {}, {"x": (3, 4)}, given={"rows": np.asarray([0, 2])})]),
    )
    assert made.criterion == "exact"
    assert made.outputs == (Arg("y", "R,C"),)
