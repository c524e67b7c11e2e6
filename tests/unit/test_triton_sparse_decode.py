"""Sparse decode attention: against the op's own float64 definition, and against the reference backend."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tests.unit.triton_helpers import FORMATS, Step, make_step, pages_of, store
from torch import Tensor

from m31 import ops
from m31.errors import OpRefused
from m31.formats.layout import ScaleOrder
from m31_reference.attention import ATTENTION
from m31_reference.cache import Store
from m31_triton.launch import decode_splits, interpreted, launch_sparse_decode, workspace_size

# Output in float32: probabilities hold 16 bits, sums are float32, exp2 is numpy's.
RELATIVE = 2.0**-15


class Cache:
    """As much of a cache as an attention kernel of the reference takes."""

    def __init__(self, k: Store, v: Store) -> None:
        self.k, self.v, self.page_tokens = [k], [v], k.page


def filled(
    seed: int, s: Step, fmt: str, order: ScaleOrder, *, pages: int, kv_heads: int, page: int, dim: int, ctx: list[int]
) -> Cache:
    """Pages poisoned everywhere but at the tokens of the sequences; with outliers, zero groups and minus zeros."""
    g = torch.Generator().manual_seed(seed)
    k, v = store(fmt, "linear", pages, kv_heads, page, dim), store(fmt, order, pages, kv_heads, page, dim)
    for row, length in enumerate(ctx):
        positions = torch.arange(length)
        places = s.page_table[row][positions // page], positions % page
        for each in (k, v):
            x = torch.randn(length, kv_heads, dim, generator=g)
            x[::7] *= 20
            x[1::5, :, :16] = 0.0
            x[2::5, :, 1::2] = -0.0
            each.write(*places, x.bfloat16().float())
    return Cache(k, v)


def decoded(s: Store) -> Any:
    return torch.stack([s.exact(page) for page in range(len(next(iter(s.parts.values()))))]).double().numpy()


def attend(
    s: Step, q: Tensor, cache: Cache, order: ScaleOrder, scale: float, dtype: torch.dtype, splits: int = 1
) -> Tensor:
    out = torch.full((len(q), q[0].numel()), 7.0, dtype=dtype)
    dim = q.shape[2]
    size = workspace_size(len(q), cache.k[0].heads, dim, splits)
    launch_sparse_decode(
        interpreted,
        s.step,
        q=q,
        k=pages_of(cache.k[0], "linear", dim),
        v=pages_of(cache.v[0], order, dim),
        blocks=s.blocks,
        positions=s.positions,
        cu_q=s.cu_q,
        page_table=s.page_table,
        out=out,
        scale=scale,
        splits=splits,
        workspace=torch.full((size,), torch.nan) if size else None,
    )
    return out


def definition(s: Step, q: Tensor, cache: Cache, scale: float) -> Any:
    """The op's `naive`, of the rows in use, over what the pages decode to."""
    n, kv_heads = s.used, cache.k[0].heads
    state = {(0, "k"): decoded(cache.k[0]), (0, "v"): decoded(cache.v[0])}
    context = (s.positions[:n].numpy(), s.cu_q.numpy(), None, s.page_table.numpy())
    attrs = {"layer": 0, "kv_heads": kv_heads, "scale": scale}
    return ops.sparse_attention.naive(attrs, q[:n].double().numpy(), state, s.blocks[:n].numpy(), *context)[0]


SHAPES: dict[str, dict[str, Any]] = {
    "one-of-four-devices": {"kv_heads": 1, "group": 16, "dim": 128, "page": 128, "ctx": [300, 128]},
    "few-heads": {"kv_heads": 4, "group": 3, "dim": 32, "page": 16, "ctx": [70, 1, 33]},
    "group-of-one": {"kv_heads": 3, "group": 1, "dim": 32, "page": 16, "ctx": [40]},
    "nine-in-a-group": {"kv_heads": 2, "group": 9, "dim": 64, "page": 32, "ctx": [64, 95]},
}


def run(
    shape: dict[str, Any],
    fmt: str,
    order: ScaleOrder,
    *,
    q_lens: list[int] | None = None,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> tuple[Step, Tensor, Cache, float, Tensor]:
    kv_heads, group, dim, page, ctx = (shape[n] for n in ("kv_heads", "group", "dim", "page", "ctx"))
    q_lens = q_lens or [1] * len(ctx)
    s = make_step(
        seed, q_lens, ctx, page=page, kv_heads=kv_heads, topk=3, capacity=sum(q_lens) + 2, seqs=5, width=7, pages=17
    )
    cache = filled(seed, s, fmt, order, pages=17, kv_heads=kv_heads, page=page, dim=dim, ctx=ctx)
    g = torch.Generator().manual_seed(seed)
    q = (torch.randn(sum(q_lens) + 2, kv_heads * group, dim, generator=g) * 2).bfloat16()
    q[s.used :] = torch.nan
    return s, q, cache, dim**-0.5, attend(s, q, cache, order, dim**-0.5, dtype)


def largest_value(cache: Cache) -> float:
    return float(np.nanmax(np.abs(decoded(cache.v[0]))))


@pytest.mark.parametrize(("fmt", "order"), FORMATS)
@pytest.mark.parametrize("name", SHAPES)
def test_it_is_the_definition(name: str, fmt: str, order: ScaleOrder) -> None:
    s, q, cache, scale, out = run(SHAPES[name], fmt, order)
    want = definition(s, q, cache, scale)
    assert np.isfinite(want).all()
    np.testing.assert_allclose(
        out[: s.used].double().numpy(), want, rtol=RELATIVE, atol=RELATIVE * largest_value(cache)
    )
    assert (out[s.used :] == 7).all()


@pytest.mark.parametrize(("fmt", "order"), FORMATS)
def test_the_reference_backend_computes_the_same(fmt: str, order: ScaleOrder) -> None:
    s, q, cache, scale, out = run(SHAPES["few-heads"], fmt, order, seed=1)
    n = s.used
    want = torch.empty(n, q[0].numel())
    ins = [q[:n].float(), cache, s.blocks[:n], s.positions[:n], s.cu_q[:4], None, s.page_table]
    ATTENTION["sparse_attention"]({"layer": 0, "kv_heads": 4, "scale": scale})([want], ins, None, None)
    torch.testing.assert_close(out[:n], want, rtol=RELATIVE, atol=RELATIVE * largest_value(cache))


def test_a_verify_step_and_empty_sequences() -> None:
    """Several queries per sequence, one sequence without any: rows find their sequence by cu_q."""
    s, q, cache, scale, out = run(SHAPES["few-heads"], "bfloat16", "linear", q_lens=[4, 0, 3], seed=2)
    assert s.cu_q.tolist() == [0, 4, 4, 7, 7, 7]
    np.testing.assert_allclose(
        out[: s.used].double().numpy(),
        definition(s, q, cache, scale),
        rtol=RELATIVE,
        atol=RELATIVE * largest_value(cache),
    )


@pytest.mark.parametrize("splits", [2, 4, 8])
def test_programs_that_share_the_blocks_compute_the_same(splits: int) -> None:
    """Also more of them than blocks, some without a visible token, one that reads NaN."""
    s, q, cache, scale, _ = run(SHAPES["few-heads"], "bfloat16", "linear", seed=8)
    want = definition(s, q, cache, scale)
    s.blocks[1, 1] = -1
    want[1].reshape(4, -1)[1] = 0.0
    out = attend(s, q, cache, "linear", scale, torch.float32, splits)
    atol = RELATIVE * largest_value(cache)
    np.testing.assert_allclose(out[: s.used].double().numpy(), want, rtol=RELATIVE, atol=atol)
    assert (out[s.used :] == 7).all()
    cache.k[0].codec.poison(cache.k[0].parts, [int(s.page_table[0, int(s.blocks[0, 2, 0])])])
    out = attend(s, q, cache, "linear", scale, torch.float32, splits).unflatten(1, (4, -1))
    assert out[0, 2].isnan().all()
    assert out[0, :2].isfinite().all()


def test_how_many_programs_share() -> None:
    assert [decode_splits(pairs, 16, 132) for pairs in (1, 4, 32, 66, 67, 1000)] == [16, 16, 4, 2, 1, 1]
    assert decode_splits(1, 3, 132) == 2
    assert decode_splits(1, 16, 1) == 1


def test_bfloat16_output_is_rounded_once() -> None:
    wide, narrow = (run(SHAPES["few-heads"], "nvfp4", "linear", dtype=t)[4] for t in (torch.float32, torch.bfloat16))
    assert torch.equal(wide.bfloat16(), narrow)


def test_physical_order_of_pages_does_not_matter() -> None:
    s, q, cache, scale, out = run(SHAPES["few-heads"], "nvfp4", "token_quad", seed=3)
    order = torch.randperm(17, generator=torch.Generator().manual_seed(9))
    place = torch.argsort(order)
    for each in (cache.k[0], cache.v[0]):
        for part in each.parts.values():
            part.copy_(part[order].clone())
    s.page_table.copy_(torch.where(s.page_table < 0, -1, place[s.page_table]))
    assert torch.equal(attend(s, q, cache, "token_quad", scale, torch.float32), out)


def test_only_selected_blocks_and_visible_tokens_are_read() -> None:
    """Everything else decodes to NaN already; now a selected token becomes NaN, and shows in its own head only."""
    s, q, cache, scale, out = run(SHAPES["few-heads"], "bfloat16", "linear", seed=4)
    assert out.isfinite().all()
    block = int(s.blocks[0, 2, 0])
    cache.v[0].parts["values"][int(s.page_table[0, block]), 2, 5] = torch.nan
    after = attend(s, q, cache, "linear", scale, torch.float32).unflatten(1, (4, -1))
    assert after[0, 2].isnan().any()
    after[0, 2] = out.unflatten(1, (4, -1))[0, 2]
    assert torch.equal(after.flatten(1), out)


def test_nan_keys_reach_the_output() -> None:
    """A poisoned key must not be lost in a maximum or a comparison: it would be a wrong number instead of none."""
    s, q, cache, scale, _ = run(SHAPES["few-heads"], "nvfp4", "linear", seed=5)
    cache.k[0].codec.poison(cache.k[0].parts, [int(s.page_table[0, int(s.blocks[0, 1, 0])])])
    out = attend(s, q, cache, "linear", scale, torch.float32).unflatten(1, (4, -1))
    assert out[0, 1].isnan().all()


def test_ids_of_minus_one_are_no_block() -> None:
    """Also in front of others, where the definition does not put them; and a row with none is zero, not NaN."""
    s, q, cache, scale, _ = run(SHAPES["few-heads"], "bfloat16", "linear", seed=6)
    s.blocks[0, 0] = torch.tensor([-1, -1, 2])
    s.blocks[1, 0] = -1
    out = attend(s, q, cache, "linear", scale, torch.float32).unflatten(1, (4, -1))
    assert (out[1, 0] == 0).all()
    s.blocks[0, 0] = torch.tensor([2, -1, -1])
    moved = attend(s, q, cache, "linear", scale, torch.float32).unflatten(1, (4, -1))
    assert torch.equal(out[0, 0], moved[0, 0])


def test_large_logits_do_not_overflow() -> None:
    s, q, cache, scale, _ = run(SHAPES["group-of-one"], "bfloat16", "linear", seed=7)
    q[: s.used] *= 200
    out = attend(s, q, cache, "linear", scale, torch.float32)
    want = definition(s, q, cache, scale)
    assert np.abs(want).max() > 0.1
    # Logits near 10^4 carry float32 errors near 10^-3, which the exponential turns into a share of the result.
    np.testing.assert_allclose(out[: s.used].double().numpy(), want, atol=5e-3 * largest_value(cache))


def test_what_does_not_fit_is_refused() -> None:
    s, q, cache, scale, _ = run(SHAPES["group-of-one"], "bfloat16", "linear")
    three = len(q)
    with pytest.raises(OpRefused, match=r"51 query heads over 3 KV heads.*1 to 16"):
        attend(s, torch.zeros(three, 51, 32).bfloat16(), cache, "linear", scale, torch.float32)
    with pytest.raises(OpRefused, match=r"4 query heads over 3 KV heads"):
        attend(s, torch.zeros(three, 4, 32).bfloat16(), cache, "linear", scale, torch.float32)
    with pytest.raises(OpRefused, match=r"argument 'k pages'.*expected .*\[17, 3, 16, 16\]"):
        attend(s, q[:, :, :16].contiguous(), cache, "linear", scale, torch.float32)
    with pytest.raises(OpRefused, match=r"3 splits.*power of two"):
        attend(s, q, cache, "linear", scale, torch.float32, 3)
    table, s.page_table = s.page_table, s.page_table.t().contiguous().t()
    with pytest.raises(OpRefused, match=r"argument 'page_table'.*strides \[1, 5\].*side by side"):
        attend(s, q, cache, "linear", scale, torch.float32)
    s.page_table = table
    s.blocks = s.blocks[:, :2].contiguous()
    with pytest.raises(OpRefused, match=r"argument 'blocks'"):
        attend(s, q, cache, "linear", scale, torch.float32)
