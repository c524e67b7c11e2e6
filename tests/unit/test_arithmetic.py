"""Every named arithmetic of the reference against a naive float64 composition, and its size against exact."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support import numerics, tiny
from tests.unit.test_whole_model import ids_for, logits

from m31.errors import BackendRefused, NonFiniteWeight, OpRefused
from m31.formats import nvfp4
from m31.formats.arithmetic import NAMED, parse
from m31.graph import NO_ROUNDING, Arithmetic, Kernel, ModelGraph, OpInstance, Refusal, Rounding, assign, trace
from m31.graph.step import StepClass
from m31.parallel import WHOLE
from m31.sdk.backend import KVSpec
from m31.sdk.manifest import read_manifest
from m31.sdk.serving import Serving
from m31_reference.emulation import _e4m3_query
from m31_reference.session import ReferenceBackend, ReferenceSession

SMALL = tiny.quantisable(num_layers=2)
DENSE = tiny.quantisable(num_layers=2, mlp=("dense",) * 2)
GRAPH = trace(SMALL)
STORED = tiny.quantised(GRAPH, tiny.weights(GRAPH, seed=1))
SCALES = tiny.input_scales(STORED)
EXACT = sorted(name for name, spec in NAMED.items() if spec.exact)
QUANTISING = sorted(set(NAMED) - set(EXACT))
MANIFESTS = sorted((Path(__file__).resolve().parents[2] / "backends").glob("*/*/backend.toml"))
STEP = StepClass(kind="mixed", q_len=0, tokens=8, seqs=2, rows=2, pages=16)


SIZES = {"bfloat16": (0.0005, 0.01), "mxfp8": (0.01, 0.06), "nvfp4-static": (0.05, 0.3)}


def pages_for(name: str) -> str:
    """Page format that goes with an arithmetic: those that read E4M3 need pages of at most that."""
    return "bfloat16" if NAMED[name].kv_read == "exact" else "nvfp4"


def opened(name: str) -> ReferenceSession:
    return ReferenceBackend(None).open(device=None, dtype="float64", rank=0, world=1, arithmetic=parse(name))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", QUANTISING)
def test_logits_equal_naive(name: str) -> None:
    kv = pages_for(name)
    ids = ids_for(SMALL, 26)
    want = tiny.naive_logits(
        SMALL, tiny.transformed(STORED, NAMED[name]), ids, kv=kv, index=kv, arithmetic=name, input_scales=SCALES
    )
    engine = tiny.engine(SMALL, STORED, dtype="float64", kv=kv, index=kv, arithmetic=name)
    got = logits(engine, ids).double().numpy()
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-6 * np.abs(want).max())


@pytest.mark.parametrize("name", EXACT)
def test_names_for_exact_change_nothing(name: str) -> None:
    ids = ids_for(SMALL, 20)
    want = logits(tiny.engine(SMALL, STORED, dtype="float32"), ids)
    assert torch.equal(logits(tiny.engine(SMALL, STORED, dtype="float32", arithmetic=name), ids), want)


@pytest.mark.parametrize("name", QUANTISING)
def test_an_arithmetic_has_an_effect_of_its_size(name: str) -> None:
    """Per op on the same input, where no flipped choice blurs it: BF16 rounds by up to 1/256, E4M3 1/16, E2M1 1/4."""
    spec, session, exact = NAMED[name], opened(name), opened("exact")
    graph = trace(SMALL)
    for op, kind in (("linear", spec.linear_activation), ("experts", spec.expert_middle)):
        assert kind is not None
        low, high = SIZES[kind]
        call = next(c for c in graph.calls if c.op.spec.name == op)
        plain = tiny.dequantised(STORED)  # no transform of weights applies to them
        slots = {s: tiny.held(t.name, plain[t.name]) for s, t in call.op.weights.slots.items()}  # type: ignore[union-attr]
        rng = torch.Generator().manual_seed(0)
        x = torch.randn(16, 64, generator=rng, dtype=torch.float64).bfloat16().double()
        ins = (
            [x]
            if op == "linear"
            else [x, torch.arange(32).view(16, 2) % 8, torch.rand(16, 2, generator=rng, dtype=torch.float64)]
        )
        out = []
        for s in (session, exact):
            handle = s.prepare(call.op, slots, WHOLE)
            y = torch.empty(16, call.op.outputs[0].shape[1], dtype=torch.float64)  # type: ignore[union-attr, arg-type]
            kernel = s.kernel(call.op, STEP)
            assert isinstance(kernel, Kernel)
            kernel.run([y], ins, handle, None)
            out.append(y)
        error = float((out[0] - out[1]).norm() / out[1].norm())
        assert low < error < high, (op, error)


@pytest.mark.parametrize("name", QUANTISING)
def test_the_whole_model_stays_close(name: str) -> None:
    kv = pages_for(name)
    values = tiny.weights(trace(DENSE), seed=1)
    ids = ids_for(DENSE, 12)
    exact = logits(tiny.engine(DENSE, values, dtype="float64"), ids)
    got = logits(tiny.engine(DENSE, values, dtype="float64", kv=kv, index=kv, arithmetic=name), ids)
    assert 0.0005 < float((got - exact).norm() / exact.norm()) < 0.4


def test_prefill_may_be_split_under_an_arithmetic() -> None:
    """Quantisation is per token and per block, so a chunk boundary does not show."""
    ids = ids_for(SMALL, 23)
    make = {"dtype": "float64", "kv": "nvfp4", "index": "nvfp4", "arithmetic": "w4a4-q8kv4"}
    whole = logits(tiny.engine(SMALL, STORED, **make), ids)  # type: ignore[arg-type]
    for chunk in (1, 5, 11):
        split = logits(tiny.engine(SMALL, STORED, chunk=chunk, **make), ids)  # type: ignore[arg-type]
        torch.testing.assert_close(split, whole, rtol=0, atol=1e-6 * float(whole.abs().max()))


def kernels(name: str) -> dict[str, Arithmetic]:
    session, graph = opened(name), trace(SMALL)
    found = {}
    for call in graph.calls:
        kernel = session.kernel(call.op, STEP)
        assert isinstance(kernel, Kernel)
        found[call.op.spec.name] = kernel.arithmetic
    return found


def test_kernels_declare_their_arithmetic() -> None:
    exact = kernels("exact")
    assert set(exact.values()) == {Arithmetic("float64", "float64", "float64")}
    mega = kernels("w4a4-q8kv4")
    assert mega["linear"] == Arithmetic("mxfp8*float64", "float64", "bfloat16")
    assert mega["experts"].operands == "nvfp4-token*float64, nvfp4-static*float64"
    assert mega["block_scores"].operands == "e4m3*e4m3"
    assert mega["sparse_attention"].operands == "e4m3*e4m3, e4m3*e4m3"
    assert kernels("w4a4-q8kv4-shift3")["sparse_attention"].operands == "e4m3*e4m3-shift3, e4m3*e4m3-shift3"
    assert kernels("w4a16")["linear"] == Arithmetic("bfloat16*float64", "float64", "bfloat16")
    assert kernels("w4a16")["experts"].operands == "bfloat16*float64, bfloat16*float64"
    assert kernels("w8a8-mxfp8")["experts"].operands == "mxfp8*float64, mxfp8*float64"
    untouched = ("router", "gemma_rmsnorm", "lm_head", "kv_write", "swiglu_oai", "add")
    assert all(mega[op] == exact[op] for op in untouched)


def rounded(graph: ModelGraph) -> Counter[tuple[str, str]]:
    """(op whose output is rounded, ops that read it), for every rounding node."""
    made = {name: call.op.spec.name for call in graph.calls for name in call.writes}
    out: Counter[tuple[str, str]] = Counter()
    for call in graph.calls:
        if call.op.spec.name.startswith("round_"):
            readers = sorted({c.op.spec.name for c in graph.calls if call.writes[0] in c.reads})
            out[made[call.reads[0]], "+".join(readers)] += 1
    return out


def test_rounding_nodes_stand_where_the_model_defines_them() -> None:
    """MODEL.md §2.3, §2.5, §3.1: decision 010. Nothing rounds an MLP's activation, and the exact graph has no node."""
    exact, mega = NAMED["exact"], NAMED["w4a4-q8kv4"]
    assert not rounded(trace(SMALL))
    for kv in ("float64", "float32", "bfloat16"):
        assert Rounding.of(exact, kv, kv) == NO_ROUNDING
    assert rounded(trace(SMALL, Rounding.of(exact, "nvfp4", "bfloat16"))) == {
        ("rope", "kv_write"): 2,
        ("linear", "kv_write"): 2,
    }
    assert rounded(trace(SMALL, Rounding.of(exact, "float32", "int8"))) == {("rope", "index_write"): 2}
    assert rounded(trace(SMALL, Rounding.of(mega, "nvfp4", "nvfp4"))) == {
        ("rope", "kv_write"): 2,
        ("linear", "kv_write"): 2,
        ("rope", "index_write"): 2,
        ("rope", "sparse_attention"): 2,
        ("rope", "block_scores"): 2,
        ("gemma_rmsnorm", "linear"): 3,  # two attention inputs, one dense MLP
        ("gemma_rmsnorm", "experts+linear+router"): 1,
        ("sparse_attention", "linear"): 2,
        ("gemma_rmsnorm", "gather_rows"): 1,  # the head's input
    }


def test_operands_are_those_of_the_pages() -> None:
    """The bound of a kernel follows from what it declares: an index in FP8 is E4M3, one in float32 stays float32."""
    session = opened("w4a4-q8kv4")
    for kv, index, main, scores in (
        ("nvfp4", "nvfp4", "e4m3*e4m3, e4m3*e4m3", "e4m3*e4m3"),
        ("nvfp4", "float64", "e4m3*e4m3, e4m3*e4m3", "e4m3*float64"),
        ("fp8", "fp8", "e4m3*e4m3, e4m3*e4m3", "e4m3*e4m3"),
    ):
        found = {}
        for call in trace(SMALL, pages=(kv, index)).calls:
            kernel = session.kernel(call.op, STEP)
            assert isinstance(kernel, Kernel)
            found[call.op.spec.name] = kernel.arithmetic.operands
        assert (found["sparse_attention"], found["block_scores"]) == (main, scores)


def test_queries_beyond_e4m3_saturate() -> None:
    """MODEL.md §3.4: unit scale, saturating; torch's own cast would give NaN on older versions."""
    call = next(c for c in GRAPH.calls if c.op.spec.name == "sparse_attention")
    seen = []

    def attend(outs: Any, ins: Any, w: Any, workspace: Any) -> None:
        seen.append(ins[0])

    _e4m3_query(attend)([], [torch.tensor([[[1000.0, -449.0, 448.0, 17.0]]])], None, None)
    assert seen[0].tolist() == [[[448.0, -448.0, 448.0, 16.0]]]
    assert isinstance(opened("w4a4-q8kv4").kernel(call.op, STEP), Kernel)


def test_experts_alone_have_their_input_rounded() -> None:
    """The node stands before router and experts even where no projection asks for it."""
    spec = parse("exact+expert_input=nvfp4-token")
    assert rounded(trace(SMALL, Rounding.of(spec, "float64", "float64"))) == {
        ("gemma_rmsnorm", "experts+linear+router"): 1
    }


def test_what_a_transform_did_is_told() -> None:
    def told(name: str, values: Any) -> list[str]:
        engine = tiny.engine(SMALL, values, dtype="float32", kv="bfloat16", index="bfloat16", arithmetic=name)
        return list(engine.compiler.serving.session.notes)

    assert told("w8a8-mxfp8", STORED) == [
        "weights stored in NVFP4 are computed after the lossy transform nvfp4-to-mxfp8"
    ]
    assert told("w4a16-block-fp8", tiny.dequantised(STORED)) == [
        "arithmetic 'w4a16-block-fp8' has the transform mxfp8-to-block-fp8, and no weight is stored in MXFP8"
    ]
    assert told("w4a16", STORED) == []


def test_a_read_rule_needs_pages_that_it_can_read() -> None:
    spec = KVSpec.of(SMALL, "bfloat16", "bfloat16")
    with pytest.raises(
        BackendRefused, match=r"'w4a4-q8kv4' reads keys and values as E4M3, the pages are bfloat16; .*--kv-dtype nvfp4"
    ):
        opened("w4a4-q8kv4").kv_layout(spec)


def test_the_read_rule_rounds_the_product() -> None:
    """MODEL.md §3.4: E4M3(E2M1 * scale) where attention reads; what is stored and exported stays exact."""
    spec = KVSpec.of(SMALL, "nvfp4", "nvfp4")
    cache = opened("w4a4-q8kv4").kv_layout(spec).allocate(2)
    x = torch.randn(4, 2, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    cache.k[0].write(torch.zeros(4, dtype=torch.int64), torch.arange(4), x)  # type: ignore[attr-defined]
    stored = nvfp4.decode_kv(*nvfp4.encode_kv(x))
    read = cache.k[0].head([0], 1, torch.float64)  # type: ignore[attr-defined]
    np.testing.assert_array_equal(read.numpy(), numerics.e4m3(stored[:, 1].numpy()))
    assert not torch.equal(read.float(), stored[:, 1])
    assert torch.equal(cache.read(0, 0)["k"][1], stored[:, 1])


def test_widths_that_blocks_do_not_divide_are_refused_when_binding() -> None:
    """The tiny model of issue 2 has 48 and 24 inner channels."""
    graph = trace(tiny.text())
    session = opened("w8a8-mxfp8")
    reasons = {k.reason for k in (session.kernel(c.op, STEP) for c in graph.calls) if isinstance(k, Refusal)}
    assert reasons == {
        "mxfp8 needs a multiple of 32 inputs, this op has 48",
        "mxfp8 needs a multiple of 32 inputs, this op has 24",
        "mxfp8 needs a multiple of 32 inner channels, this op has 24",
    }
    with pytest.raises(Exception, match=r"no kernel for experts .*24.*, linear"):
        assign(graph, Serving("reference", session), STEP)


def test_a_plain_projection_of_a_quantised_checkpoint_has_plain_inputs() -> None:
    """MODEL.md §3.7: some M3 builds keep index projections in BF16; their products are BF16 ones."""
    session = opened("w8a8-mxfp8")
    ops: dict[str, OpInstance] = {}
    mixed = trace(SMALL, stored=lambda name: "bfloat16" if ".index_" in name else "mxfp8")
    for call in mixed.calls:
        if call.op.spec.name == "linear":
            name = call.op.weights.name  # type: ignore[union-attr]
            plain = ".index_" in name
            value = STORED[f"{name}.weight"]
            session.prepare(call.op, {"weight": tiny.held(name, value.value if plain else value)}, WHOLE)  # type: ignore[union-attr]
            ops[name] = call.op
    assert session.notes == [
        "4 projections are not stored in MXFP8: arithmetic 'w8a8-mxfp8' rounds their inputs to BF16",
        *session.notes[1:],
    ]
    for name, op in ops.items():
        kernel = session.kernel(op, STEP)
        assert isinstance(kernel, Kernel)
        assert kernel.arithmetic.operands == ("bfloat16*float64" if ".index_" in name else "mxfp8*float64")
        if ".index_" in name:
            x = torch.randn(5, 64, dtype=torch.float64)
            w = torch.randn(op.outputs[0].shape[1], 64, dtype=torch.float64)  # type: ignore[union-attr, arg-type]
            out = torch.empty(5, len(w), dtype=torch.float64)
            kernel.run([out], [x], type("W", (), {"tensors": {"weight": w}}), None)
            np.testing.assert_array_equal(out.numpy(), numerics.bf16(numerics.bf16(x.numpy()) @ w.numpy().T))


def experts_with(change: Any) -> ReferenceSession:
    call = next(c for c in GRAPH.calls if c.op.spec.name == "experts")
    slots = {s: tiny.held(t.name, STORED[t.name]) for s, t in call.op.weights.slots.items()}  # type: ignore[union-attr]
    slots["w2.4"] = change(slots["w2.4"])
    session = opened("w4a4-megamoe")
    session.prepare(call.op, slots, WHOLE)
    return session


def test_a_static_scale_must_be_usable() -> None:
    for bad in (0.0, -1.0, 1e-40, float("inf"), float("nan")):
        stored = {"input_global_scale": torch.tensor([bad])}
        with pytest.raises(NonFiniteWeight, match=r"experts\.4\.w2.*input_global_scale is .*a positive finite number"):
            experts_with(lambda t, s=stored: tiny.HeldQuantised(t.name, tiny.Quantised("nvfp4", t.quantised.value, s)))


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(OpRefused, match=r"unknown arithmetic 'w4a4-megamo'.*did you mean 'w4a4-megamoe'"):
        opened("w4a4-megamo")
    assert opened("W4A4 MegaMoE").numerics is parse("w4a4-megamoe")


def test_where_no_static_scale_is_stored_one_that_cannot_saturate_is_taken_and_told() -> None:
    """Experts of a BF16 or MXFP8 folder: 2688 / ((limit + beta) * limit), MODEL.md §2.5 and §3.2."""
    (note,) = experts_with(lambda t: tiny.Held(t.name, t.quantised.value)).notes
    assert "stored plain, without input_global_scale" in note
    assert f"{2688 / ((1.5 + 1) * 1.5):g}" in note
    stored = {"codes": torch.zeros(1), "scale": torch.zeros(1)}
    (note,) = experts_with(
        lambda t: tiny.HeldQuantised(t.name, tiny.Quantised("mxfp8", t.quantised.value, stored))
    ).notes
    assert "stored mxfp8" in note
    values, scales = tiny.dequantised(STORED), dict.fromkeys(SCALES, 2688 / 3.75)
    ids = ids_for(SMALL, 12)
    how = {"kv": "bfloat16", "index": "bfloat16", "arithmetic": "w4a4-megamoe"}
    want = tiny.naive_logits(SMALL, values, ids, input_scales=scales, **how)  # type: ignore[arg-type]
    engine = tiny.engine(SMALL, values, dtype="float64", **how)  # type: ignore[arg-type]
    np.testing.assert_allclose(logits(engine, ids).numpy(), want, rtol=0, atol=1e-6 * np.abs(want).max())


def prepared(name: str, op: str) -> tuple[Any, dict[str, Any]]:
    call = next(c for c in GRAPH.calls if c.op.spec.name == op)
    slots = {s: tiny.held(t.name, STORED[t.name]) for s, t in call.op.weights.slots.items()}  # type: ignore[union-attr]
    return opened(name).prepare(call.op, slots, WHOLE), slots


@pytest.mark.parametrize(
    ("name", "op", "transform"),
    [
        ("w8a8-mxfp8", "experts", "nvfp4-to-mxfp8"),
        ("w4a16-shared-scale", "experts", "nvfp4-shared-scale"),
        ("w4a16-block-fp8", "linear", "mxfp8-to-block-fp8"),
    ],
)
def test_a_transform_of_weights_is_declared_with_its_loss(name: str, op: str, transform: str) -> None:
    """DESIGN.md §3: kernels are judged on `dequantise()`, the transform's loss is a line of its own."""
    handle, slots = prepared(name, op)
    loss = handle.losses[transform]
    assert set(handle.losses) == {transform}
    changed = {s: float((handle.dequantise()[s].float() - slots[s].load()).abs().max()) for s in slots}
    assert loss.max_abs == pytest.approx(max(changed.values()), rel=1e-6)
    assert 0.001 < loss.rms < 0.05
    exact, _ = prepared("w4a16", op)
    assert exact.losses == {}
    assert all(torch.equal(exact.dequantise()[s].float(), slots[s].load()) for s in slots)


def test_a_transform_leaves_other_formats_alone() -> None:
    call = next(c for c in GRAPH.calls if c.op.spec.name == "experts")
    plain = tiny.dequantised(STORED)
    slots = {s: tiny.held(t.name, plain[t.name]) for s, t in call.op.weights.slots.items()}  # type: ignore[union-attr]
    handle = opened("w8a8-mxfp8").prepare(call.op, slots, WHOLE)
    assert handle.losses == {}
    assert all(torch.equal(handle.dequantise()[s].float(), slots[s].load()) for s in slots)


def test_a_name_can_be_changed_field_by_field() -> None:
    spec = parse("W4A16 + kv_read=e4m3+probability=e4m3")
    assert (spec.expert_input, spec.kv_read, spec.probability) == ("bfloat16", "e4m3", "e4m3")
    assert parse(spec.name) == spec
    assert parse("w4a4-q8kv4+query=none").query is None
    for wrong, text in (
        ("w4a16+kvread=e4m3", "unknown field of an arithmetic 'kvread'.*did you mean 'kv_read'"),
        ("w4a16+kv_read", r"'kv_read' has no value.*\+kv_read=value"),
        ("w4a16+kv_read=fp4", "kv_read is fp4.*exact or e4m3"),
        ("w4a16+kv_read=none", "kv_read is none"),
        ("w4a16+query=e4m3+query=none", "'query' is given twice; expected each field once"),
        ("w4a16+query=e4m3+ query = e4m3", "'query' is given twice"),
    ):
        with pytest.raises(OpRefused, match=text):
            parse(wrong)


def test_every_backend_has_a_manifest() -> None:
    """Otherwise the test below would be about none, without a word."""
    assert [path.parent.name for path in MANIFESTS] == [
        *("m31_blackwell", "m31_cpu", "m31_hopper", "m31_mi355x", "m31_reference", "m31_rubin", "m31_triton")
    ]


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda p: p.parent.name)
def test_every_declared_arithmetic_has_a_twin(path: Path) -> None:
    """What a manifest declares parses, and the reference computes it: `test_logits_equal_naive` runs each by name."""
    declared = read_manifest(path).arithmetic
    assert declared
    assert declared == "all" or {parse(name).name for name in declared} <= set(NAMED)
    assert (declared == "all") == (path.parent.name == "m31_reference")
