"""Quantised weights on the reference: decoded when used, kept within bounds, checked, and the values used."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support import tiny
from tests.unit.test_whole_model import greedy, ids_for, logits

from m31.errors import BackendRefused, NonFiniteWeight
from m31.formats.arithmetic import parse
from m31.graph import trace
from m31.parallel import WHOLE
from m31_reference.session import ReferenceBackend, ReferenceSession
from m31_reference.weights import DecodedCache

SMALL = tiny.quantisable(num_layers=2)
GRAPH = trace(SMALL)
STORED = tiny.quantised(GRAPH, tiny.weights(GRAPH, seed=1))
EXPERT_BYTES = 64 * 64 * 4


def opened(weight_cache_bytes: int | None = None, arithmetic: str = "exact") -> ReferenceSession:
    return ReferenceBackend(None).open(  # type: ignore[arg-type]
        device=None,
        dtype="float32",
        rank=0,
        world=1,
        arithmetic=parse(arithmetic),
        options={} if weight_cache_bytes is None else {"weight_cache_bytes": weight_cache_bytes},
    )


def experts_call() -> Any:
    return next(call for call in GRAPH.calls if call.op.spec.name == "experts")


def slots_of(call: Any, values: Any = None) -> dict[str, Any]:
    values = values or STORED
    return {slot: tiny.held(t.name, values[t.name]) for slot, t in call.op.weights.slots.items()}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("limit", [None, 3 * EXPERT_BYTES, 0])
def test_a_quantised_model_equals_its_dequantised_twin(dtype: str, limit: int | None) -> None:
    """Whatever the cache holds: logits are equal bit for bit."""
    ids = ids_for(SMALL, 30)
    twin = tiny.dequantised(STORED)
    engine = tiny.engine(SMALL, STORED, dtype=dtype, weight_cache_bytes=limit)
    assert torch.equal(logits(engine, ids), logits(tiny.engine(SMALL, twin, dtype=dtype), ids))
    decoded = engine.compiler.serving.session.decoded  # type: ignore[attr-defined]
    assert decoded.held_bytes <= decoded.limit_bytes
    assert decoded.misses > 0
    assert decoded.hits > 0 if limit is None else limit or not decoded.held_bytes


def test_the_twin_differs_from_the_original() -> None:
    """The comparison above can fail: quantisation is visible in the logits."""
    ids = ids_for(SMALL, 12)
    want = logits(tiny.engine(SMALL, tiny.weights(GRAPH, seed=1), dtype="float32"), ids)
    got = logits(tiny.engine(SMALL, STORED, dtype="float32"), ids)
    assert 0.01 < float((got - want).norm() / want.norm()) < 1


def test_only_experts_that_are_hit_are_decoded() -> None:
    session = opened()
    call = experts_call()
    slots = slots_of(call)
    handle = session.prepare(call.op, slots, WHOLE)
    assert all(slot.loads == 0 for slot in slots.values())
    run = session.kernel(call.op, None).run  # type: ignore[arg-type, union-attr]
    out = torch.empty(3, 64)
    for _ in range(2):
        run([out], [torch.randn(3, 64), torch.tensor([[2, 5], [5, 2], [5, 2]]), torch.rand(3, 2)], handle, None)
    assert {slot: s.loads for slot, s in slots.items() if s.loads} == {
        f"{m}.{e}": 1 for m in ("w1", "w3", "w2") for e in (2, 5)
    }


def test_dequantise_gives_the_values_that_are_used() -> None:
    call = experts_call()
    handle = opened().prepare(call.op, slots_of(call), WHOLE)
    values = handle.dequantise()
    assert set(values) == set(call.op.weights.slots)
    for slot, value in values.items():
        assert torch.equal(value, STORED[call.op.weights.slots[slot].name].value)  # type: ignore[union-attr]
    assert handle.in_place == set(values)  # decoded when used, from where the file is mapped


def test_the_cache_is_least_recently_used_and_bounded() -> None:
    sources = [tiny.HeldQuantised(str(i), tiny.Quantised("nvfp4", torch.full((4,), float(i)), {})) for i in range(4)]
    cache = DecodedCache(2 * 16)

    def get(i: int) -> None:
        assert float(cache.get(sources[i], lambda s: s.load())[0]) == i

    for i in (0, 1, 0, 2, 0, 1):  # 2 evicts 1, since 0 was used after it; then 1 evicts 2
        get(i)
    assert [s.loads for s in sources] == [1, 2, 1, 0]
    assert (cache.hits, cache.misses, cache.held_bytes) == (2, 4, 32)
    big = tiny.HeldQuantised("big", tiny.Quantised("nvfp4", torch.zeros(9), {}))
    cache.get(big, lambda s: s.load())
    assert cache.held_bytes == 32  # too large to hold: nothing was evicted for it
    get(0)
    assert cache.hits == 3


def damaged(name: str, values: dict[str, Any]) -> dict[str, Any]:
    tensor = values[name]
    bad = (tensor if isinstance(tensor, torch.Tensor) else tensor.value).clone()
    bad.view(-1)[7], bad.view(-1)[9] = float("nan"), float("inf")
    return {
        **values,
        name: bad if isinstance(tensor, torch.Tensor) else tiny.Quantised(tensor.format, bad, tensor.stored),
    }


@pytest.mark.parametrize(
    "name", ["self_attn.index_k_proj.weight", "mlp.down_proj.weight", "block_sparse_moe.gate.weight"]
)
def test_what_is_not_an_expert_is_checked_at_load(name: str) -> None:
    at = next(n for n in STORED if n.endswith(name))
    with pytest.raises(NonFiniteWeight, match=rf"{at}.*2 of .* the first at flat index 7"):
        tiny.engine(SMALL, damaged(at, STORED), dtype="float32")


def test_a_plain_expert_is_checked_at_load() -> None:
    twin = {n: v.bfloat16() for n, v in tiny.dequantised(STORED).items()}
    at = next(n for n in twin if n.endswith("experts.5.w2.weight"))
    with pytest.raises(NonFiniteWeight, match=at):
        tiny.engine(SMALL, damaged(at, twin), dtype="float32")


def test_a_quantised_expert_is_checked_when_it_is_decoded() -> None:
    """Decision 011: loading does not read 128 experts of 57 layers; the first token that is routed to a damaged one
    is refused with its name, and the engine stays usable."""
    values = dict(STORED)
    for at in (n for n in STORED if n.endswith(("2.w2.weight", "3.w2.weight", "4.w2.weight", "5.w2.weight"))):
        values = damaged(at, values)
    engine = tiny.engine(SMALL, values, dtype="float32")
    with pytest.raises(NonFiniteWeight, match=r"experts\.[2-5]\.w2\.weight.*the first at flat index 7"):
        greedy(engine, [ids_for(SMALL, 60)], 2)
    assert engine.busy  # nobody has moved: the step can be repeated, or its sequences removed


def test_a_bf16_model_keeps_its_experts_in_the_file() -> None:
    """Plain experts in another dtype than the compute dtype are converted when they are used, within the cache."""
    half = {n: v.bfloat16() for n, v in tiny.dequantised(STORED).items()}
    full = {n: v.float() for n, v in half.items()}
    ids = ids_for(SMALL, 20)
    engine = tiny.engine(SMALL, half, dtype="float32", weight_cache_bytes=2 * EXPERT_BYTES)
    assert torch.equal(logits(engine, ids), logits(tiny.engine(SMALL, full, dtype="float32"), ids))
    assert 0 < engine.compiler.serving.session.decoded.held_bytes <= 2 * EXPERT_BYTES  # type: ignore[attr-defined]
    assert greedy(engine, [ids], 3)


def test_a_negative_cache_is_refused() -> None:
    with pytest.raises(BackendRefused, match=r"a weight cache of -1 bytes; expected 0 or more"):
        opened(-1)
    assert opened().decoded.limit_bytes > 0
