"""The portable backend in a whole model: its kernels on the reference's pages, everything else by the reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tests.support import tiny
from tests.unit.test_whole_model import greedy, ids_for, logits

from m31 import ops, sdk
from m31.config import SparseAttention, Text
from m31.conformance.contract import check_release
from m31.engine.api import STEPS
from m31.engine.compiler import Compiler, whole
from m31.engine.engine import Engine
from m31.errors import BackendRefused, NonFiniteWeight
from m31.formats.arithmetic import parse
from m31.formats.layout import ScaleOrder
from m31.graph import Kernel, ModelGraph, OpInstance, Refusal, Rounding, Shard, fuse, trace
from m31.parallel import COLLECTIVES
from m31.sdk.backend import KVSpec
from m31.sdk.serving import Serving
from m31_reference.session import ReferenceBackend
from m31_triton import TritonBackend
from m31_triton.launch import Runner
from m31_triton.session import TritonSession
from m31_triton.weights import ProjectionWeights

SPARSE = SparseAttention(num_index_heads=2, index_dim=16, topk_blocks=2, block_size=16, local_blocks=1, init_blocks=0)
TEXT = tiny.text(num_layers=2, attention=("full", "sparse"), sparse=SPARSE)
VALUES = {name: value.bfloat16().float() for name, value in tiny.weights(trace(TEXT), seed=3).items()}
MINE = ("sparse_attention", "qkv_insert")


def session(arithmetic: str = "w16a16", device: str | None = None) -> TritonSession:
    return TritonBackend(None).open(  # type: ignore[arg-type]
        device=device, dtype="float32", rank=0, world=1, arithmetic=parse(arithmetic), options={}
    )


def processor(arithmetic: str, *, run: Runner | None = None, units: int | None = None) -> TritonSession:
    return TritonSession(torch.device("cpu"), parse(arithmetic), run=run, units=units)


def serving(mine: TritonSession) -> Serving:
    spare = ReferenceBackend(None).open(  # type: ignore[arg-type]
        device=None, dtype="float32", rank=0, world=1, arithmetic=mine.numerics
    )
    others = [name for name in ops.ALL if name not in MINE]
    return Serving("triton", mine, may_fall_back=others, spare=("reference", spare))


def traced(
    mine: TritonSession, kv: str, *, text: Text = TEXT, index: str | None = None, stored: str = "bfloat16"
) -> ModelGraph:
    index = index or kv
    return trace(text, Rounding.of(mine.numerics, kv, index), lambda name: stored, (kv, index))


def engine(mine: TritonSession, kv: str, order: ScaleOrder) -> Engine:
    both, graph = serving(mine), traced(mine, kv)
    weights = whole(both, lambda name: tiny.held(name, VALUES[name]))  # type: ignore[arg-type, return-value]
    compiler = Compiler(both, graph, TEXT, weights)
    cache = both.kv_layout(KVSpec.of(TEXT, kv, kv, order), compiler.assigned(STEPS)).allocate(16)  # type: ignore[arg-type]
    cache.poison(range(16))
    return Engine(compiler=compiler, cache=cache, page_tokens=16, chunk_tokens=2048, prefix_cache=False)


@pytest.mark.parametrize(
    ("kv", "order", "units"), [("bfloat16", "linear", 1), ("nvfp4", "token_quad", 64)], ids=["whole", "shared"]
)
def test_a_model_computes_what_it_does_on_the_reference(kv: str, order: ScaleOrder, units: int) -> None:
    """35 tokens are three blocks, of which two are selected; then decode, two sequences at once."""
    exact = "exact+query=bfloat16"
    mine = engine(processor(exact, units=units), kv, order)  # with many, programs share the blocks of a token
    assert str(mine.compiler.fused(STEPS[0])[1]) == "qkv_insert 0 of 1"
    ids = ids_for(TEXT, 35)
    want = tiny.engine(TEXT, VALUES, dtype="float32", kv=kv, index=kv, order=order, arithmetic=exact)
    expected = logits(want, ids)
    torch.testing.assert_close(logits(mine, ids), expected, rtol=0, atol=1e-4 * float(expected.abs().max()))
    assert mine.fallback_calls["linear"] > 0
    assert "sparse_attention" not in mine.fallback_calls
    prompts = [ids[:18], ids[5:9]]
    assert greedy(mine, prompts, 3) == greedy(want, prompts, 3)


@pytest.mark.parametrize(("kv", "order"), [("bfloat16", "linear"), ("nvfp4", "token_quad")])
def test_a_fused_model_computes_what_it_does_on_the_reference(kv: str, order: ScaleOrder) -> None:
    """Projection, norm, rotation and insert by the kernels too, in the arithmetic that the reference imitates."""
    mine = engine(session(), kv, order)
    assert [str(mine.compiler.fused(step)[1]) for step in STEPS] == ["qkv_insert 1 of 1"] * len(STEPS)
    ids = ids_for(TEXT, 35)
    want = tiny.engine(TEXT, VALUES, dtype="float32", kv=kv, index=kv, order=order, arithmetic="w16a16")
    expected = logits(want, ids)
    got = logits(mine, ids)
    # A sum in another order may land on the other side of a bfloat16 rounding, here and there.
    assert float((got - expected).abs().max()) < 0.01 * float(expected.abs().max())
    assert float((got - expected).abs().mean()) < 0.001 * float(expected.abs().mean())
    assert torch.equal(got.argmax(-1), expected.argmax(-1))
    assert not {"index_write", *MINE} & set(mine.fallback_calls)
    assert mine.fallback_calls["kv_write"] == 1  # of the layer without an index branch


def fused_op(mine: TritonSession, **changes: Any) -> OpInstance:
    text = changes.get("text", TEXT)
    graph, _ = fuse(traced(mine, **{"kv": "nvfp4", **changes}), ("qkv_insert",), lambda op: True, text=text)
    return next(c.op for c in graph.calls if c.op.spec.name == "qkv_insert")


def test_the_manifest_says_what_the_session_does() -> None:
    manifest = sdk.decide("triton").require().manifest
    assert manifest is not None
    others = (set(ops.ALL) | set(ops.ADAPTER)) - set(COLLECTIVES) - set(MINE)
    assert (manifest.ops, set(manifest.fallback)) == (MINE, others)
    assert set(session().fusions()) <= set(manifest.ops)
    for name in manifest.arithmetic:
        op = next(c.op for c in traced(session(name), "nvfp4").calls if c.op.spec.name == "sparse_attention")
        assert isinstance(session(name).kernel(op, STEPS[0]), Kernel)
        spec = parse(name)
        assert (spec.query, spec.kv_read, spec.probability) == ("bfloat16", "exact", None)
    for kv in manifest.formats.kv:
        assert session().shares_pages(serving(session()).sessions["reference"].kv_layout(KVSpec.of(TEXT, kv, kv)))


def test_nobody_gets_it_unasked() -> None:
    """Its kernels are interpreted on a processor: right, and slow."""
    assert {v.name: v.kind for v in sdk.decide(None).verdicts}["triton"] == "outscored"
    assert "interprets its kernels" in session().notes[0]


def attention(kv: str = "bfloat16", **changes: Any) -> OpInstance:
    graph = traced(session(), kv, text=tiny.text(num_layers=2, **changes))
    return next(c.op for c in graph.calls if c.op.spec.name == "sparse_attention")


def test_attention_that_the_kernel_does_not_take_is_refused() -> None:
    kernel = session().kernel(attention(), STEPS[0])
    assert isinstance(kernel, Kernel)
    assert (kernel.name, kernel.arithmetic.operands, kernel.workspace_bytes) == (
        *("m31_triton.sparse_decode", "bfloat16*float32"),
        0,
    )
    narrow = SparseAttention(
        num_index_heads=2, index_dim=8, topk_blocks=2, block_size=16, local_blocks=1, init_blocks=0
    )
    for op, reason in (
        (attention(num_heads=34), "17 query heads share a KV head, the kernel takes 16"),
        (attention(head_dim=8, sparse=narrow), "heads of 8 channels, the kernel takes powers of two from 16"),
        (attention("fp8"), "pages are fp8, the kernels read and write bfloat16 and nvfp4"),
        (next(c.op for c in trace(TEXT).calls if c.op.spec.name == "rope"), "no portable Triton kernel for it"),
    ):
        assert session().kernel(op, STEPS[0]) == Refusal(reason)


def test_inserts_that_the_kernel_does_not_take_are_refused() -> None:
    mine = session()
    kernel = mine.kernel(fused_op(mine), STEPS[0])
    assert isinstance(kernel, Kernel)
    assert kernel.workspace_bytes == 2 * STEPS[0].tokens * (4 + 2 + 2 + 2 + 1) * 16
    assert isinstance(mine.kernel(fused_op(mine, stored="mxfp8"), STEPS[0]), Kernel)
    wide = tiny.text(num_layers=2, attention=("full", "sparse"), head_dim=24, rotary_dim=8, sparse=SPARSE)
    exact = session("exact+query=bfloat16")
    for who, op, reason in (
        (mine, fused_op(mine, stored="float32"), "would be rounded to bfloat16, the kernel is for bfloat16 and mxfp8"),
        (exact, fused_op(exact), "projects other inputs than bfloat16"),
        (mine, fused_op(mine, index="fp8"), "index keys are fp8, the kernel writes bfloat16 and nvfp4"),
        (mine, fused_op(mine, kv="fp8", index="nvfp4"), "pages are fp8"),
        (mine, fused_op(mine, text=wide), "heads of 24 and 16 channels"),
        (mine, fused_op(mine, kv="bfloat16", index="float32"), "this graph does not"),
    ):
        found = who.kernel(op, STEPS[0])
        assert isinstance(found, Refusal)
        assert reason in found.reason


def test_weights_are_one_matrix_and_nothing_else_is_kept() -> None:
    mine = session()
    op = fused_op(mine)
    slots = {slot: tiny.held(decl.name, VALUES[decl.name]) for slot, decl in op.slots.items()}
    handle = mine.prepare(op, slots, Shard(0, 1))  # type: ignore[arg-type]
    assert isinstance(handle, ProjectionWeights)
    assert handle.matrix.shape == (11 * 16, 32)
    used = handle.dequantise()
    assert set(used) == set(op.slots)
    for slot, value in used.items():
        assert torch.equal(value.float(), VALUES[op.slots[slot].name]), slot
    held = handle.matrix.nbytes + sum(norm.nbytes for norm in handle.norms.values())
    assert mine.weight_bytes(op, slots) == held  # type: ignore[arg-type]
    assert (dict(handle.losses), handle.in_place) == ({}, frozenset())
    check_release(mine, op, slots)  # type: ignore[arg-type]
    bad = VALUES[op.slots["ik.weight"].name].clone()
    bad[3, 3] = np.nan
    slots["ik.weight"] = tiny.held("some.index_k_proj.weight", bad)
    with pytest.raises(NonFiniteWeight, match=r"tensor 'some.index_k_proj.weight'.*NaN or infinity"):
        mine.prepare(op, slots, Shard(0, 1))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kv", "block", "shared"),
    [("bfloat16", 16, True), ("nvfp4", 16, True), ("float32", 16, False), ("fp8", 16, False), ("bfloat16", 4, False)],
)
def test_which_pages_it_shares(kv: str, block: int, shared: bool) -> None:
    sparse = SparseAttention(
        num_index_heads=2, index_dim=16, topk_blocks=2, block_size=block, local_blocks=1, init_blocks=0
    )
    spare = serving(session()).sessions["reference"]
    layout = spare.kv_layout(KVSpec.of(tiny.text(sparse=sparse), kv, "bfloat16"))  # type: ignore[arg-type]
    assert session().shares_pages(layout) is shared
    layout.layout_id = layout.layout_id.replace("m31-reference:v2", "m31-reference:v3")
    assert not session().shares_pages(layout)


PARTS: dict[str, dict[str, tuple[torch.dtype, list[int]]]] = {  # as docs/sdk.md has them, pages of 16, D 16
    "float32": {"values": (torch.float32, [2, 2, 16, 16])},
    "bfloat16": {"values": (torch.bfloat16, [2, 2, 16, 16])},
    "fp8": {"codes": (torch.uint8, [2, 2, 16, 16])},
    "nvfp4": {"packed": (torch.uint8, [2, 2, 16, 8]), "scale": (torch.uint8, [2, 2, 16, 1])},
}


@pytest.mark.parametrize("kv", PARTS)
def test_pages_of_the_reference_have_the_documented_components(kv: str) -> None:
    spec = KVSpec.of(TEXT, kv, "int8", "token_quad")  # type: ignore[arg-type]
    layout = serving(session()).sessions["reference"].kv_layout(spec)
    assert layout.layout_id.startswith("m31-reference:v2:")
    found = layout.allocate(2).components()
    want = {f"{layer}.{kind}.{part}": is_ for layer in (0, 1) for kind in "kv" for part, is_ in PARTS[kv].items()}
    if kv == "nvfp4":
        want |= {f"{layer}.v.scale": (torch.uint8, [2, 2, 4, 1, 4]) for layer in (0, 1)}
    want |= {"1.index.codes": (torch.int8, [2, 1, 16, 16]), "1.index.scale": (torch.float32, [2, 1, 16])}
    assert {name: (part.dtype, list(part.shape)) for name, part in found.items()} == want
    assert all(part.is_contiguous() for part in found.values())


@pytest.mark.parametrize("device", ["meta", "no-such"])
def test_devices_without_values_are_refused(device: str) -> None:
    with pytest.raises(BackendRefused, match=rf"device '{device}' cannot be used.*--device cpu"):
        session(device=device)


def test_it_has_no_pages_of_its_own_and_no_other_weights() -> None:
    linear = next(c.op for c in trace(TEXT).calls if c.op.spec.name == "linear")
    with pytest.raises(BackendRefused, match="serves no linear, so it prepares no weights of it"):
        session().prepare(linear, {}, Shard(0, 1))
    with pytest.raises(BackendRefused, match=r"has no pages of its own.*falls back on the reference"):
        session().kv_layout(KVSpec.of(TEXT, "bfloat16", "bfloat16"))
    assert session().memory_free() > 0
