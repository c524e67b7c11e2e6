"""The plan of a Triton session: recorded once, replayed over the same memory with other contents, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.unit.test_triton_session import TEXT, engine, processor

from m31.conformance.contract import check_fixed_buffers
from m31.engine.engine import Engine
from m31.formats.layout import ScaleOrder
from m31.graph import DefaultPlan, StepBatch, StepClass
from m31.sdk.backend import KVCache
from m31_triton import calls
from m31_triton.capture import frozen
from m31_triton.errors import CaptureMismatch
from m31_triton.launch import Launch, Runner, interpreted
from m31_triton.plan import CapturedPlan

PAGE = 16
MIXED = StepClass(kind="mixed", q_len=0, tokens=8, seqs=4, rows=8, pages=4)
DECODE = StepClass(kind="decode", q_len=1, tokens=4, seqs=4, rows=4, pages=4)
# Queries and context of each sequence: all tokens of the class, fewer, fewer sequences, other pages.
STEPS: dict[str, tuple[StepClass, list[tuple[list[int], list[int]]]]] = {
    "mixed": (MIXED, [([3, 1, 2], [40, 20, 50]), ([1, 1], [33, 7]), ([2, 1, 1, 4], [2, 48, 17, 16])]),
    "decode": (DECODE, [([1, 1, 1, 1], [40, 17, 33, 5]), ([1], [64]), ([1, 1, 1], [16, 50, 1])]),
}


def fill(batch: StepBatch, seed: int, q_lens: list[int], ctx: list[int]) -> None:
    rng = np.random.default_rng(seed)
    free = rng.permutation(16).tolist()
    tables = [[free.pop() for _ in range(-(-n // PAGE))] for n in ctx]
    positions = [list(range(n - q, n)) for q, n in zip(q_lens, ctx, strict=True)]
    batch.fill(
        tokens=rng.integers(3, TEXT.vocab_size, sum(q_lens)).tolist(),
        positions=[p for own in positions for p in own],
        q_lens=q_lens,
        seq_lens=ctx,
        slot_map=[
            table[p // PAGE] * PAGE + p % PAGE for table, own in zip(tables, positions, strict=True) for p in own
        ],
        page_table=tables,
        out_rows=[int(end) - 1 for end in np.cumsum(q_lens)],
    )


def cache_of(made: Engine) -> KVCache:
    """Pages as earlier steps may have left them."""
    g = torch.Generator().manual_seed(7)
    cache = made.cache.layout.allocate(16)
    for name, part in cache.components().items():
        if name.endswith(".values"):
            part.copy_(torch.randn(part.shape, generator=g))
        else:  # scales from 1/4 to 2
            low, high = (40, 64) if name.endswith(".scale") else (0, 256)
            part.copy_(torch.randint(low, high, part.shape, generator=g))
    return cache


def contents(cache: KVCache) -> dict[str, bytes]:
    return {name: part.view(torch.uint8).numpy().tobytes() for name, part in cache.components().items()}


def made(
    step: StepClass, *, kv: str = "bfloat16", order: ScaleOrder = "linear", run: Runner = interpreted, units: int = 1
) -> tuple[Engine, CapturedPlan, StepBatch, KVCache]:
    own = engine(processor("w16a16", run=run, units=units), kv, order)
    plan = own.compiler.serving.session.compile(own.compiler.bind(step), step)
    assert isinstance(plan, CapturedPlan)
    return own, plan, StepBatch.allocate(step, torch.device("cpu")), cache_of(own)


def nothing(*given: Any, **named: Any) -> None:
    raise AssertionError("Python decides between two replays")


LAUNCHERS = ("launch_projection", "launch_qkv_insert", "launch_sparse_decode", "pages_of", "replace", "workspace_size")


@pytest.mark.parametrize(
    ("kind", "kv", "order", "units"),
    [("mixed", "bfloat16", "linear", 1), ("mixed", "nvfp4", "token_quad", 64), ("decode", "nvfp4", "linear", 64)],
)
def test_replays_compute_what_the_default_plan_does(
    kind: str, kv: str, order: ScaleOrder, units: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other tokens, positions and pages, fewer tokens and sequences: the same bits, from the same launches over the
    same memory, without the code that made them."""
    executed: list[Launch] = []

    def run(launch: Launch) -> None:
        executed.append(launch)
        interpreted(launch)

    step, steps = STEPS[kind]
    own, plan, batch, cache = made(step, kv=kv, order=order, run=run, units=units)
    results, pages, runs = [], [], []
    places = set()
    for seed, (q_lens, ctx) in enumerate(steps):
        fill(batch, seed, q_lens, ctx)
        if seed == 1:
            for name in LAUNCHERS:
                monkeypatch.setattr(calls, name, nothing)
        executed.clear()
        logits = plan.run(batch, cache)
        assert logits.shape == (len(q_lens), TEXT.vocab_size)
        places.add(logits.data_ptr())
        results.append(logits.clone())
        pages.append(contents(cache))
        runs.append([(launch, {n: frozen(v) for n, v in launch.arguments.items()}) for launch in executed])
    monkeypatch.undo()
    assert len(places) == 1
    assert all(one == runs[0] for one in runs)
    assert [launch for launch, _ in runs[0]] == list(plan.launches)
    merge = ["merge_splits"] * (units > 1)
    assert [launch.name for launch in plan.launches] == ["projection", "qkv_insert", "sparse_decode", *merge]

    session, other = own.compiler.serving.session, cache_of(own)
    default = DefaultPlan(own.compiler.bind(step), step, session.dtypes, session.device)
    for seed, (q_lens, ctx) in enumerate(steps):
        fill(batch, seed, q_lens, ctx)
        assert torch.equal(default.run(batch, other), results[seed])
        assert contents(other) == pages[seed]
        assert results[seed].isfinite().all()


def recorded(kv: str = "bfloat16") -> tuple[CapturedPlan, StepBatch, KVCache, Engine]:
    own, plan, batch, cache = made(DECODE, kv=kv)
    fill(batch, 0, [1, 1], [20, 3])
    plan.run(batch, cache)
    return plan, batch, cache, own


def moved(tensor: torch.Tensor) -> None:
    tensor.set_(tensor.clone())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p, b, c: moved(b.slot_map), r"batch\.slot_map: torch.int64 \[4\].*at 0x.*expected as recorded: torch"),
        (lambda p, b, c: moved(b.tokens), r"batch\.tokens: .*refill the batch that the plan was first run with"),
        (lambda p, b, c: setattr(b, "page_table", b.page_table[:, :3]), r"batch\.page_table: torch.int64 \[4, 3\]"),
        (lambda p, b, c: moved(c.components()["1.v.values"]), r"pages 1\.v\.values: torch.bfloat16"),
        (lambda p, b, c: moved(p.launches[0].arguments["y"]), "launch 0 of projection: argument 'y' is torch.bfloat16"),
        (lambda p, b, c: moved(p.launches[2].arguments["out"]), "launch 0 of sparse_decode: argument 'out' is"),
        (lambda p, b, c: p.launches[1].arguments.update(eps=1e-3), r"launch 1 of qkv_insert: argument 'eps' is 0\.001"),
        (lambda p, b, c: p.launches[2].options.update(num_warps=8), r"the options: .*'num_warps': 8"),
    ],
    ids=["input", "unread-input", "shape", "page", "workspace", "buffer", "scalar", "option"],
)
def test_whatever_changes_besides_contents_is_named(change: Callable[..., Any], message: str) -> None:
    plan, batch, cache, _ = recorded()
    change(plan, batch, cache)
    with pytest.raises(CaptureMismatch, match=message):
        plan.run(batch, cache)


def test_another_batch_and_another_cache_are_refused() -> None:
    plan, batch, cache, own = recorded()
    with pytest.raises(CaptureMismatch, match=r"batch\.cu_q: "):
        plan.run(StepBatch.allocate(DECODE, torch.device("cpu")), cache)
    with pytest.raises(CaptureMismatch, match=r"pages 0\.k\.values: .*keep its cache"):
        plan.run(batch, cache_of(own))
    check_fixed_buffers(plan, [batch] * 3, cache)


def test_a_launch_that_would_differ_is_found_without_running(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, batch, cache, _ = recorded("nvfp4")
    before = contents(cache)
    fill(batch, 1, [1, 1, 1], [60, 9, 33])
    plan.check(batch, cache)
    real = calls.launch_sparse_decode
    monkeypatch.setattr(
        calls, "launch_sparse_decode", lambda run, step, *, scale, **rest: real(run, step, scale=2 * scale, **rest)
    )
    with pytest.raises(CaptureMismatch, match=r"sparse_decode: argument 'scale_log2' is .*expected as recorded"):
        plan.check(batch, cache)
    assert contents(cache) == before


def test_a_kernel_that_does_more_than_launching_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is refused is not recorded, and the plan can still be run when it is mended."""
    _, plan, batch, cache = made(DECODE)
    fill(batch, 0, [1, 1], [20, 3])
    real = calls.launch_projection
    monkeypatch.setattr(calls, "launch_projection", lambda run, step, *, x, **rest: real(run, step, x=x + 1, **rest))
    with pytest.raises(CaptureMismatch, match=r"aten::add.Tensor between launches is not captured"):
        plan.run(batch, cache)
    assert plan.launches == ()
    monkeypatch.undo()
    plan.run(batch, cache)
    assert len(plan.launches) == 3


def test_an_engine_runs_captured_plans() -> None:
    own = engine(processor("w16a16"), "bfloat16", "linear")
    assert isinstance(own.compiler.plan(DECODE)[0], CapturedPlan)
