"""Pages and steps of the example backend: what a cache keeps, the whole model, and its plan."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from tests.support import tiny
from tests.support.numpy_example import STEP, kernel, open_numpy

from m31 import ops
from m31.config import Text
from m31.conformance import check_fixed_buffers, check_layout_id, check_linear_arithmetic, check_release
from m31.engine.compiler import Compiler, whole
from m31.engine.engine import Engine, Sequence
from m31.errors import BackendRefused, LayoutMismatch
from m31.graph import DefaultPlan, StepBatch, trace
from m31.sdk.backend import KVCache, KVSpec, Session
from m31.sdk.serving import Serving


@pytest.fixture(autouse=True)
def _no_warnings() -> Iterator[None]:
    """numpy warns where torch is silent: an invalid or overflowing operation on values that count is a fault."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        yield


@pytest.fixture(scope="module")
def session() -> Session:
    return open_numpy()


# --- pages -----------------------------------------------------------------------------------

SPEC = KVSpec(
    indexed=(False, True, True),
    kv_heads=2,
    head_dim=6,
    index_dim=5,
    page_tokens=4,
    kv_format="float32",
    index_format="float32",
)
FORMATS = [("float32", "float32"), ("bfloat16", "bfloat16"), ("bfloat16", "float32"), ("float32", "bfloat16")]


def written(session: Session, spec: KVSpec, count: int) -> tuple[KVCache, dict[tuple[int, str], torch.Tensor]]:
    """A poisoned cache whose pages 1 and 3 are written, all but the last token of page 3, and what was written."""
    cache = session.kv_layout(spec).allocate(count)
    cache.poison(range(count))
    slots = torch.tensor([12, 13, 14, -1, 4, 5, 6, 7])
    rng = torch.Generator().manual_seed(1)
    given = {}
    for layer, indexed in enumerate(spec.indexed):
        k = torch.randn(8, spec.kv_heads, spec.head_dim, generator=rng)
        v = torch.randn(8, spec.kv_heads * spec.head_dim, generator=rng)
        kernel(session, ops.kv_write, {"layer": layer}).run([cache], [cache, k, v, slots], None, None)
        given |= {(layer, "k"): k, (layer, "v"): v.view(k.shape)}
        if indexed:
            key = torch.randn(8, 1, spec.index_dim, generator=rng)
            kernel(session, ops.index_write, {"layer": layer}).run([cache], [cache, key, slots], None, None)
            given[layer, "index"] = key
    return cache, given


@pytest.mark.parametrize(("kv", "index"), FORMATS)
def test_pages_live(session: Session, kv: Any, index: Any) -> None:
    spec = dataclasses.replace(SPEC, kv_format=kv, index_format=index)
    cache, given = written(session, spec, 5)
    assert cache.layout.page_bytes == spec.page_tokens * (spec.main_bytes + spec.index_bytes)
    for (layer, part), x in given.items():
        stored = x.to(getattr(torch, index if part == "index" else kv))
        got = cache.read(layer, 3)[part]
        assert got.dtype == stored.dtype
        if part == "index":
            assert torch.equal(got[:3], stored[:3, 0])
            assert torch.equal(cache.read(layer, 1)[part], stored[4:, 0])
        else:
            assert torch.equal(got[:, :3], stored[:3].transpose(0, 1))
            assert torch.equal(cache.read(layer, 1)[part], stored[4:].transpose(0, 1))
        assert bool(got[..., 3, :].isnan().all())
        assert bool(cache.read(layer, 0)[part].isnan().all())
    assert set(cache.read(0, 0)) == {"k", "v"}

    def page(of: KVCache, number: int) -> list[torch.Tensor]:
        parts = [of.read(layer, number) for layer in range(3)]
        return [x.nan_to_num(nan=-7.0) for layer in parts for x in layer.values()]

    def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
        return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))

    before = {number: page(cache, number) for number in range(5)}
    cache.copy_pages([1, 3], [3, 0])  # 3 is source and target: what is copied is what it was
    assert same(page(cache, 3), before[1])
    assert same(page(cache, 0), before[3])
    assert same(page(cache, 1), before[1])
    exported = cache.export([0, 1])
    assert exported.count == 2
    cache.poison([0, 1])
    assert all(bool((x == -7).all()) for x in page(cache, 1))
    assert same(page(cache, 3), before[1]), "poison reaches the named pages only"
    other = session.kv_layout(spec).allocate(9)
    other.import_(exported, [8, 2])
    assert same(page(other, 8), before[3])
    assert same(page(other, 2), before[1])
    assert cache.export([]).count == 0


def test_only_pages_of_the_same_layout_are_imported(session: Session) -> None:
    cache, _ = written(session, SPEC, 5)
    exported = cache.export([1, 3])
    assert exported.layout_id.startswith("m31-numpy:v1:")
    foreign = dataclasses.replace(exported, layout_id=SPEC.name("m31-reference", 2))
    short = {name: t[:1] for name, t in exported.tensors.items()}
    narrow = {name: t[:, 1:] for name, t in exported.tensors.items()}
    for bad, places in (
        (foreign, [0, 2]),
        (exported, [0]),
        (exported, [2, 2]),
        (dataclasses.replace(exported, tensors=short), [0, 2]),
        (dataclasses.replace(exported, tensors=narrow), [0, 2]),
        (dataclasses.replace(exported, tensors={}), [0, 2]),
    ):
        with pytest.raises(LayoutMismatch, match="KV import"):
            cache.import_(bad, places)
    for number in (0, 2):
        assert bool(cache.read(1, number)["k"].isnan().all()), "nothing was written"
    for change in ({"kv_format": "nvfp4"}, {"index_format": "int8"}):
        with pytest.raises(BackendRefused, match=r"backend numpy.*float32 or bfloat16"):
            session.kv_layout(dataclasses.replace(SPEC, **change))  # type: ignore[arg-type]


# --- the whole model -------------------------------------------------------------------------


def compiled(session: Session, text: Text, values: Mapping[str, Any]) -> Compiler:
    serving = Serving("numpy", session)
    weights = whole(serving, lambda name: tiny.held(name, values[name]))  # type: ignore[arg-type, return-value]
    return Compiler(serving, trace(text), text, weights)


def engine(session: Session, text: Text, values: Mapping[str, Any], chunk: int, form: Any = "float32") -> Engine:
    cache = session.kv_layout(KVSpec.of(text, form, form)).allocate(64)
    cache.poison(range(64))
    return Engine(
        compiler=compiled(session, text, values), cache=cache, page_tokens=4, chunk_tokens=chunk, prefix_cache=False
    )


def logits(made: Engine, prompts: list[list[int]]) -> list[np.ndarray]:
    sequences = [
        Sequence(prompt=tuple(p), params=None, seed=0, request=i, stop_ids=frozenset()) for i, p in enumerate(prompts)
    ]
    for sequence in sequences:
        made.add(sequence)
    while made.busy:
        made.step()
    return [s.logits().numpy() for s in sequences]


@pytest.mark.parametrize("chunk", [5, 64])
@pytest.mark.parametrize("mixed", [False, True], ids=["all-sparse", "dense-first"])
def test_the_whole_model_equals_its_naive_definition(session: Session, chunk: int, mixed: bool) -> None:
    """In chunks and at once, three sequences in company, against the graph run in float64 by `naive`."""
    text = tiny.quantisable(**({"attention": ("dense", "sparse", "sparse", "sparse")} if mixed else {}))
    values = tiny.quantised(trace(text), tiny.weights(trace(text), seed=1))
    prompts = [[(7 * i + s) % 61 for i in range(n)] for s, n in enumerate((30, 1, 17))]
    got = logits(engine(session, text, values, chunk), prompts)
    for ids, mine in zip(prompts, got, strict=True):
        want = tiny.naive_logits(text, tiny.dequantised(values), ids)
        np.testing.assert_allclose(mine, want, rtol=0, atol=2e-4 * np.abs(want).max())


def test_bfloat16_pages_round_what_they_hold(session: Session) -> None:
    """Against `naive` with pages of the same format, and far from it with exact ones."""
    text = tiny.quantisable()
    values = tiny.weights(trace(text), seed=1)
    ids = [(7 * i) % 61 for i in range(11)]  # three blocks: all are selected, so that no tie decides
    (got,) = logits(engine(session, text, values, 64, "bfloat16"), [ids])
    want = tiny.naive_logits(text, values, ids, kv="bfloat16", index="bfloat16")
    exact = tiny.naive_logits(text, values, ids)
    assert np.abs(got - want).max() < 0.2 * np.abs(got - exact).max()


def filled(batch: StepBatch, seed: int, lengths: list[int]) -> None:
    rng = np.random.default_rng(seed)
    order = rng.permutation(16)
    tables = [order[4 * s : 4 * s + -(-n // 4)].tolist() for s, n in enumerate(lengths)]
    positions = [p for n in lengths for p in range(n)]
    batch.fill(
        tokens=rng.integers(0, 61, len(positions)).tolist(),
        positions=positions,
        q_lens=lengths,
        seq_lens=lengths,
        slot_map=[table[p // 4] * 4 + p % 4 for table, n in zip(tables, lengths, strict=True) for p in range(n)],
        page_table=tables,
        out_rows=[int(end) - 1 for end in np.cumsum(lengths)],
    )


def test_a_plan_is_replayed_over_the_same_memory(session: Session) -> None:
    """Changed contents and sizes, the same buffers; and the same bits as the core's own plan over the same kernels."""
    text = tiny.text()
    bound = compiled(session, text, tiny.weights(trace(text), seed=2)).bind(STEP)
    plan = session.compile(bound, STEP)
    other = DefaultPlan(bound, STEP, session.dtypes, session.device)
    batch = StepBatch.allocate(STEP, session.device)
    mine, theirs = (session.kv_layout(KVSpec.of(text, "float32", "float32")).allocate(16) for _ in range(2))
    addresses, results = set(), []
    for seed, lengths in ((1, [9, 7]), (2, [9, 7]), (3, [1, 3, 2]), (1, [9, 7])):
        filled(batch, seed, lengths)
        for cache in (mine, theirs):
            cache.poison(range(16))
        got = plan.run(batch, mine)
        assert got.shape == (len(lengths), 61)
        assert torch.equal(got, other.run(batch, theirs))
        addresses.add(got.data_ptr())
        results.append(got.clone())
    assert len(addresses) == 1, "the logits lie where they lay"
    assert torch.equal(results[0], results[3])
    assert not torch.equal(results[0], results[1])


@pytest.mark.parametrize("seed", range(3))
def test_it_keeps_the_rules_of_the_contract(session: Session, seed: int) -> None:
    """The core's own checks, on a backend that the core does not know."""
    text = tiny.quantisable()
    graph = trace(text)
    values = tiny.quantised(graph, tiny.weights(graph, seed=seed))
    check_layout_id(session.kv_layout(SPEC))
    for op in {call.op.spec.name: call.op for call in graph.calls if call.op.weights is not None}.values():
        check_release(session, op, {s: tiny.held(t.name, values[t.name]) for s, t in op.slots.items()})
    linear = next(call.op for call in graph.calls if call.op.spec.name == "linear")
    check_linear_arithmetic(session, linear, STEP, seed=seed)
    bound = compiled(session, text, values).bind(STEP)
    batches = [StepBatch.allocate(STEP, session.device) for _ in range(3)]
    for batch, lengths in zip(batches, ([9, 7], [1, 2, 3], [16]), strict=True):
        filled(batch, seed, lengths)
    cache = session.kv_layout(KVSpec.of(text, "float32", "float32")).allocate(16)
    assert check_fixed_buffers(session, bound, STEP, batches, cache) > 20
