"""The whole model over pages of every format against the naive whole model that quantises the same values."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support import tiny
from tests.unit.test_whole_model import greedy, ids_for, logits

from m31.formats.layout import ScaleOrder

SMALL = tiny.quantisable(num_layers=2)  # one dense, one MoE
M3 = tiny.quantisable(num_layers=2, attention=("full", "sparse"))
PAIRS = [
    ("bfloat16", "bfloat16"),
    ("fp8", "fp8"),
    ("fp8", "bfloat16"),
    ("nvfp4", "nvfp4"),
    ("nvfp4", "bfloat16"),
    ("nvfp4", "fp8"),
    ("float32", "int8"),
    ("nvfp4", "int8"),
    ("float64", "nvfp4"),
]
DENSE = tiny.quantisable(num_layers=2, mlp=("dense",) * 2)
# relative size of the error in the logits: half a unit of the format's last place, a few times over
SIZES = {"float64": (0, 0), "float32": (0, 1e-6), "bfloat16": (3e-4, 1e-2), "fp8": (5e-3, 0.1), "nvfp4": (1e-2, 0.3)}
IDS = [f"{kv}+{index}" for kv, index in PAIRS]


@pytest.mark.parametrize(("kv", "index"), PAIRS, ids=IDS)
def test_logits_equal_naive(kv: str, index: str) -> None:
    """37 tokens are 10 pages, the last one partial, all poisoned before. In float64 both sides round the same
    numbers, so quantisation costs no tolerance."""
    values = tiny.weights(tiny.trace(SMALL), seed=1)
    ids = ids_for(SMALL, 37)
    want = tiny.naive_logits(SMALL, values, ids, kv=kv, index=index)
    got = logits(tiny.engine(SMALL, values, dtype="float64", kv=kv, index=index), ids).double().numpy()
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-6 * np.abs(want).max())


def test_dense_layers_read_quantised_pages_too() -> None:
    values = tiny.weights(tiny.trace(M3), seed=2)
    ids = ids_for(M3, 21)
    want = tiny.naive_logits(M3, values, ids, kv="nvfp4", index="nvfp4")
    got = logits(tiny.engine(M3, values, dtype="float64", kv="nvfp4", index="nvfp4"), ids).double().numpy()
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-6 * np.abs(want).max())


@pytest.mark.parametrize(("kv", "index"), PAIRS, ids=IDS)
def test_a_format_has_an_effect_of_its_size(kv: str, index: str) -> None:
    """Not zero, or the format was not used; not large, or it was used wrongly."""
    # No router, and three pages, which are all selected: a flipped choice would blur the size.
    values = tiny.weights(tiny.trace(DENSE), seed=1)
    ids = ids_for(DENSE, 12)
    exact = logits(tiny.engine(DENSE, values, dtype="float64"), ids)
    got = logits(tiny.engine(DENSE, values, dtype="float64", kv=kv, index=index), ids)
    error = float((got - exact).norm() / exact.norm())
    low, high = SIZES[kv]
    assert low <= error <= high


@pytest.mark.parametrize("index", ["bfloat16", "fp8", "nvfp4", "int8"])
def test_an_index_format_changes_selections_only(index: str) -> None:
    """While every block is selected the format of index keys has no effect at all; beyond, it has one."""
    values = tiny.weights(tiny.trace(DENSE), seed=1)
    ids = ids_for(DENSE, 60)
    exact = logits(tiny.engine(DENSE, values, dtype="float64"), ids)
    got = logits(tiny.engine(DENSE, values, dtype="float64", index=index), ids)
    assert torch.equal(got[:12], exact[:12])
    assert (index == "bfloat16") or not torch.equal(got[12:], exact[12:])


@settings(max_examples=15, deadline=None)
@given(chunk=st.integers(1, 30), n=st.integers(2, 30), pair=st.sampled_from(PAIRS))
def test_prefill_may_be_split_anywhere(chunk: int, n: int, pair: tuple[str, str]) -> None:
    """Attention reads this step's K and V back through the pages, so chunks see quantised values like everybody."""
    values = tiny.weights(tiny.trace(SMALL), seed=3)
    ids = ids_for(SMALL, n, seed=n)
    kv, index = pair
    whole = logits(tiny.engine(SMALL, values, dtype="float64", kv=kv, index=index), ids)
    split = logits(tiny.engine(SMALL, values, dtype="float64", kv=kv, index=index, chunk=chunk), ids)
    torch.testing.assert_close(split, whole, rtol=0, atol=1e-6 * float(whole.abs().max()))


@pytest.mark.parametrize(("kv", "index"), PAIRS, ids=IDS)
def test_decode_equals_prefill(kv: str, index: str) -> None:
    values = tiny.weights(tiny.trace(SMALL), seed=4)
    prompt = ids_for(SMALL, 9)
    out = greedy(tiny.engine(SMALL, values, dtype="float64", kv=kv, index=index), [prompt], 20)[0]
    rows = logits(tiny.engine(SMALL, values, dtype="float64", kv=kv, index=index), prompt + out[:-1])
    assert rows.argmax(-1).tolist()[len(prompt) - 1 :] == out


@pytest.mark.parametrize(("kv", "index"), PAIRS, ids=IDS)
def test_physical_pages_do_not_matter(kv: str, index: str) -> None:
    values = tiny.weights(tiny.trace(SMALL), seed=6)
    prompt = ids_for(SMALL, 23)
    fresh = tiny.engine(SMALL, values, dtype="float64", kv=kv, index=index)
    churned = tiny.engine(SMALL, values, dtype="float64", kv=kv, index=index)
    churned.pool._free = np.random.default_rng(0).permutation(churned.pool.pages).tolist()
    assert torch.equal(logits(churned, prompt), logits(fresh, prompt))
    assert greedy(churned, [prompt], 9) == greedy(fresh, [prompt], 9)


@pytest.mark.parametrize(("kv", "index"), PAIRS, ids=IDS)
def test_pages_of_earlier_sequences_do_not_leak(kv: str, index: str) -> None:
    """The same sequence after others have used and left every page, and after those pages were poisoned (BUG-5)."""
    values = tiny.weights(tiny.trace(SMALL), seed=7)
    engine = tiny.engine(SMALL, values, dtype="float64", kv=kv, index=index, pages=12)
    prompt = ids_for(SMALL, 22)
    first = logits(engine, prompt)
    for seed in range(3):
        logits(engine, ids_for(SMALL, 47, seed=seed))
    assert torch.equal(logits(engine, prompt), first)
    engine.cache.poison(range(12))
    assert torch.equal(logits(engine, prompt), first)


@pytest.mark.parametrize("order", ["linear", "token_quad"])
def test_both_scale_orders_give_the_same_model(order: ScaleOrder) -> None:
    values = tiny.weights(tiny.trace(SMALL), seed=8)
    ids = ids_for(SMALL, 30)
    want = logits(tiny.engine(SMALL, values, dtype="float32", kv="nvfp4", index="nvfp4"), ids)
    got = logits(tiny.engine(SMALL, values, dtype="float32", kv="nvfp4", index="nvfp4", order=order, chunk=7), ids)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5 * float(want.abs().max()))
