"""The portable backend in a whole model: its attention on the reference's pages, everything else by the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support import tiny
from tests.unit.test_whole_model import greedy, ids_for, logits

from m31 import ops, sdk
from m31.config import SparseAttention
from m31.engine.api import STEPS
from m31.engine.compiler import Compiler, whole
from m31.engine.engine import Engine
from m31.errors import BackendRefused
from m31.formats.layout import ScaleOrder
from m31.graph import Kernel, OpInstance, Refusal, Rounding, Shard, trace
from m31.sdk.backend import KVSpec
from m31.sdk.serving import Serving
from m31_reference.session import ReferenceBackend
from m31_triton import TritonBackend
from m31_triton.session import DEFAULT, TritonSession

TEXT = tiny.text(
    num_layers=2,
    attention=("full", "sparse"),
    sparse=SparseAttention(
        num_index_heads=2, index_dim=16, topk_blocks=2, block_size=16, local_blocks=1, init_blocks=0
    ),
)
VALUES = tiny.weights(trace(TEXT), seed=3)


def session(**changes: Any) -> TritonSession:
    given = {"device": None, "dtype": "float32", "rank": 0, "world": 1, "arithmetic": None}
    return TritonBackend(None).open(**{**given, **changes})  # type: ignore[arg-type]


def serving(mine: TritonSession) -> Serving:
    spare = ReferenceBackend(None).open(  # type: ignore[arg-type]
        device=None, dtype="float32", rank=0, world=1, arithmetic=mine.numerics.name
    )
    others = [name for name in ops.ALL if name != "sparse_attention"]
    return Serving("triton", mine, may_fall_back=others, spare=("reference", spare))


def engine(kv: str, order: ScaleOrder) -> Engine:
    both = serving(session())
    spec = KVSpec.of(TEXT, kv, kv, order)  # type: ignore[arg-type]
    graph = trace(TEXT, Rounding.of(both.session.numerics, kv, kv))
    compiler = Compiler(both, graph, whole(both, lambda name: tiny.held(name, VALUES[name])))  # type: ignore[arg-type, return-value]
    cache = both.kv_layout(spec, compiler.assigned(STEPS)).allocate(16)
    cache.poison(range(16))
    return Engine(compiler=compiler, cache=cache, page_tokens=16, chunk_tokens=2048)


@pytest.mark.parametrize(
    ("kv", "order", "units"), [("bfloat16", "linear", 1), ("nvfp4", "token_quad", 64)], ids=["whole", "shared"]
)
def test_a_model_computes_what_it_does_on_the_reference(
    kv: str, order: ScaleOrder, units: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """35 tokens are three blocks, of which two are selected; then decode, two sequences at once."""
    monkeypatch.setattr(TritonSession, "_units", lambda self: units)  # then programs share the blocks of a token
    mine = engine(kv, order)
    ids = ids_for(TEXT, 35)
    want = tiny.engine(TEXT, VALUES, dtype="float32", kv=kv, index=kv, order=order, arithmetic=DEFAULT)
    expected = logits(want, ids)
    torch.testing.assert_close(logits(mine, ids), expected, rtol=0, atol=1e-4 * float(expected.abs().max()))
    assert mine.fallback_calls["linear"] > 0
    assert "sparse_attention" not in mine.fallback_calls
    prompts = [ids[:18], ids[5:9]]
    assert greedy(mine, prompts, 3) == greedy(want, prompts, 3)


def test_the_manifest_says_what_the_session_does() -> None:
    manifest = sdk.decide("triton").require().manifest
    assert manifest is not None
    assert (manifest.ops, set(manifest.fallback)) == (
        ("sparse_attention",),
        {name for name in ops.ALL if name != "sparse_attention"},
    )
    limits = session().limits(type("Config", (), {"text": TEXT})())  # type: ignore[arg-type]
    assert limits.kv_formats == manifest.formats.kv
    assert limits.index_formats == manifest.formats.index
    assert session().numerics.name == manifest.arithmetic[0]
    for name in manifest.arithmetic:
        session(arithmetic=name)


def test_nobody_gets_it_unasked() -> None:
    """Its kernels are interpreted on a processor: right, and slow."""
    verdicts = {v.name: v.kind for v in sdk.decide(None).verdicts}
    assert verdicts["triton"] == "outscored"
    assert "interprets its kernels" in session().notes[0]


def attention(**changes: Any) -> OpInstance:
    graph = trace(tiny.text(num_layers=2, **changes))
    return next(c.op for c in graph.calls if c.op.spec.name == "sparse_attention")


def test_what_the_kernel_does_not_take_is_left_to_another() -> None:
    kernel = session().kernel(attention(), STEPS[0])
    assert isinstance(kernel, Kernel)
    assert kernel.workspace_bytes == 0
    assert (kernel.name, kernel.arithmetic.operands) == ("m31_triton.sparse_decode", "bfloat16*float32")
    assert session().kernel(attention(num_heads=34), STEPS[0]) == Refusal(
        "17 query heads share a KV head, the kernel takes 16"
    )
    narrow = SparseAttention(
        num_index_heads=2, index_dim=8, topk_blocks=2, block_size=16, local_blocks=1, init_blocks=0
    )
    assert session().kernel(attention(head_dim=8, sparse=narrow), STEPS[0]) == Refusal(
        "heads of 8 channels, the kernel takes powers of two from 16"
    )
    other = next(c.op for c in trace(TEXT).calls if c.op.spec.name == "rope")
    assert session().kernel(other, STEPS[0]) == Refusal("no portable Triton kernel for it")


@pytest.mark.parametrize(
    ("kv", "block", "shared"),
    [("bfloat16", 16, True), ("nvfp4", 16, True), ("float32", 16, False), ("fp8", 16, False), ("bfloat16", 4, False)],
)
def test_which_pages_it_shares(kv: str, block: int, shared: bool) -> None:
    sparse = SparseAttention(
        num_index_heads=2, index_dim=16, topk_blocks=2, block_size=block, local_blocks=1, init_blocks=0
    )
    both = serving(session())
    spare = both.sessions["reference"]
    layout = spare.kv_layout(KVSpec.of(tiny.text(sparse=sparse), kv, "bfloat16"))  # type: ignore[arg-type]
    assert session().shares_pages(layout) is shared
    layout.layout_id = layout.layout_id.replace("m31-reference:v2", "m31-reference:v3")
    assert not session().shares_pages(layout)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": "float64"}, "compute dtype 'float64' is not served; expected float32"),
        ({"world": 2}, "a world of 2 ranks is not served"),
        ({"weight_cache_bytes": 5}, "keeps no decoded weights"),
        ({"arithmetic": "exact"}, r"arithmetic 'exact' is not that of the kernels.*bfloat16 queries.*--arithmetic"),
        ({"arithmetic": "w4a4-q8kv4"}, "is not that of the kernels"),
        ({"device": "meta"}, r"device 'meta' cannot be used.*--device cpu"),
        ({"device": "no-such"}, "device 'no-such' cannot be used"),
    ],
)
def test_what_it_refuses_to_open(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(BackendRefused, match=message):
        session(**changes)


def test_it_has_neither_weights_nor_pages_of_its_own() -> None:
    linear = next(c.op for c in trace(TEXT).calls if c.op.spec.name == "linear")
    with pytest.raises(BackendRefused, match="serves no op with weights, and linear has some"):
        session().prepare(linear, {}, Shard(0, 1))
    assert session().weight_bytes(linear, {}) == 0
    with pytest.raises(BackendRefused, match=r"has no pages of its own.*fall back on the reference"):
        session().kv_layout(KVSpec.of(TEXT, "bfloat16", "bfloat16"))
    assert session().memory_free() > 0
