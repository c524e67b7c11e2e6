"""One rank of a spread model on the reference backend; run as a module it is one process of a world of processes.

A rank is a session of the reference with the shard pass, narrowed weights and a group around it.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from m31.checkpoint import Adapter, Checkpoint
from m31.engine.compiler import Compiler, PreparedWeights
from m31.graph import (
    Cut,
    Part,
    Rounding,
    Shard,
    StepBatch,
    StepClass,
    adapt,
    kv_share,
    narrow,
    placement,
    shard,
    trace,
)
from m31.ops.collective import gathered, reduced
from m31.parallel import Group, LocalGroup, TorchGroup
from m31.sdk.backend import KVSpec, stored_as
from m31.sdk.serving import Serving
from m31_reference.session import ReferenceBackend

STEP = StepClass(kind="mixed", q_len=0, tokens=32, seqs=2, rows=32, pages=8)
PAGES = ((5, 2, 11, 0, 7, 9), (3, 8, 1, 10))  # physical pages of the two sequences
# Each step: how many tokens of each sequence. A prefill of both, a chunk beside a decode, two decodes.
STEPS = ((19, 6), (2, 1), (1, 1), (1, 1))


def run(
    folder: Path,
    group: Group,
    dtype: str,
    *,
    pages: str | None = None,
    moved: Mapping[str, int] | None = None,
    adapter: Path | None = None,
) -> torch.Tensor:
    """Logits [tokens,V] of all steps as the rank of `group` computes them.

    Args:
        pages: format of all pages; None is the compute dtype.
        moved: tensor name suffix -> ranks by which its part is moved, so that a rank reads what is another's.
        adapter: folder of one, to be applied.
    """
    checkpoint = Checkpoint.open(folder)
    added = None if adapter is None else Adapter.open(adapter, checkpoint.config)
    text, own = checkpoint.config.text, group.shard
    session = ReferenceBackend(None).open(device=None, dtype=dtype, rank=0, world=1)  # type: ignore[arg-type]
    whole = KVSpec.of(text, pages or dtype, pages or dtype)  # type: ignore[arg-type]
    rounding = Rounding.of(session.numerics, whole.kv_format, whole.index_format)
    full = trace(text, rounding, lambda name: stored_as(checkpoint.tensor(name)))
    if added is not None:
        full = adapt(full, {module: pair.rank for module, pair in added.modules.items()})

    def tensor(name: str) -> Any:
        return (None if added is None else added.tensor(name)) or checkpoint.tensor(name)

    parts = placement(full, text, own)
    for suffix, ranks in (moved or {}).items():
        parts |= {n: turned(p, own, ranks) for n, p in parts.items() if n.endswith(suffix)}
    serving = Serving("reference", session, group=group)
    weights = PreparedWeights(serving, lambda name: narrow(tensor(name), parts[name]), own)
    compiler = Compiler(serving, shard(full, text, own), text, weights)
    for call in compiler.graph.calls:
        if call.op.weights is not None:
            declared = {slot: tensor.shape for slot, tensor in call.op.weights.slots.items()}
            assert {slot: tensor.shape for slot, tensor in weights.slots(call.op).items()} == declared
    plan, batch, _ = compiler.plan(STEP)
    share = kv_share(text, own)
    cache = session.kv_layout(replace(whole, kv_heads=share.heads, head_shard=(share.index, share.count))).allocate(12)
    cache.poison(range(12))
    rows = []
    for at in range(len(STEPS)):
        fill(batch, at, text.vocab_size, whole.page_tokens)
        rows.append(plan.run(batch, cache).clone())
    return torch.cat(rows)


def fill(batch: StepBatch, at: int, vocabulary: int, page: int) -> None:
    """Step `at` of STEPS, every row with logits."""
    done = [sum(step[s] for step in STEPS[:at]) for s in range(2)]
    positions = [list(range(done[s], done[s] + STEPS[at][s])) for s in range(2)]
    batch.fill(
        tokens=[3 + (7 * p + 31 * s) % (vocabulary - 3) for s in range(2) for p in positions[s]],
        positions=[p for s in range(2) for p in positions[s]],
        q_lens=STEPS[at],
        seq_lens=[positions[s][-1] + 1 for s in range(2)],
        slot_map=[PAGES[s][p // page] * page + p % page for s in range(2) for p in positions[s]],
        page_table=[PAGES[s][: positions[s][-1] // page + 1] for s in range(2)],
        out_rows=range(sum(STEPS[at])),
    )


def turned(part: Part, own: Shard, ranks: int) -> Part:
    """The part of another rank."""
    if part.cut is None:
        return part
    length = part.cut.stop - part.cut.start
    start = (part.cut.start + ranks * length) % part.whole[part.cut.axis]
    return replace(part, cut=Cut(part.cut.axis, start, start + length))


def alone(folder: Path, dtype: str, pages: str | None = None, adapter: Path | None = None) -> torch.Tensor:
    """The unspread model."""
    return run(folder, LocalGroup(), dtype, pages=pages, adapter=adapter)


class Threads:
    """A world whose ranks are threads, with sum and gather by the definitions in numpy float64."""

    def __init__(self, world: int) -> None:
        self.world, self.given = world, [torch.empty(0)] * world
        self.barrier = threading.Barrier(world, timeout=60)

    def run(
        self, folder: Path, dtype: str, pages: str | None = None, adapter: Path | None = None
    ) -> list[torch.Tensor]:
        """The logits of each rank."""

        def work(rank: int) -> torch.Tensor:
            try:
                return run(folder, ThreadGroup(self, rank), dtype, pages=pages, adapter=adapter)
            except BaseException:
                self.barrier.abort()  # the others need not wait
                raise

        with ThreadPoolExecutor(self.world) as pool:
            futures = [pool.submit(work, rank) for rank in range(self.world)]
        return [future.result() for future in futures]


class ThreadGroup(Group):
    """One thread's view of its world."""

    def __init__(self, threads: Threads, rank: int) -> None:
        self.threads, self.shard = threads, Shard(rank, threads.world)

    def _together(self, out: torch.Tensor, x: torch.Tensor, combine: Any) -> None:
        self.threads.given[self.shard.rank] = x
        self.threads.barrier.wait()
        value = torch.from_numpy(combine([part.double().numpy() for part in self.threads.given]))
        self.threads.barrier.wait()  # nobody writes before everybody has read
        out.copy_(value)

    def _reduce(self, out: torch.Tensor, x: torch.Tensor) -> None:
        self._together(out, x, reduced)

    def _gather(self, out: torch.Tensor, x: torch.Tensor) -> None:
        self._together(out, x, gathered)


class WithoutSum(Group):
    """A group that forgets to add."""

    def __init__(self, group: TorchGroup) -> None:
        self.inner, self.shard = group, group.shard

    def _reduce(self, out: torch.Tensor, x: torch.Tensor) -> None:
        out.copy_(x)

    def _gather(self, out: torch.Tensor, x: torch.Tensor) -> None:
        self.inner.all_gather(out, x)


def given(rank: int, dtype: torch.dtype) -> torch.Tensor:
    """What a rank gives to a collective."""
    return torch.randn(3, 10, generator=torch.Generator().manual_seed(rank), dtype=torch.float64).to(dtype)


def exchanged(group: Group) -> dict[str, torch.Tensor]:
    """Sum and gather of `given`, by dtype and collective, into strided destinations and over the source."""
    done = {}
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        x = given(group.shard.rank, dtype)
        strided = torch.full((3, 20), torch.nan, dtype=dtype)[:, ::2]
        group.all_reduce(strided, x.T.contiguous().T)
        wide = torch.full((3, 20 * group.shard.world), torch.nan, dtype=dtype)[:, ::2]
        group.all_gather(wide, x)
        group.all_reduce(torch.empty(0, 10, dtype=dtype), x[:0])
        group.all_gather(torch.empty(0, 10 * group.shard.world, dtype=dtype), x[:0])
        group.all_reduce(x, x)
        done |= {f"{dtype}/all_reduce": strided, f"{dtype}/in place": x, f"{dtype}/all_gather": wide}
    return done


def main(rank: int, world: int, address: str, out: str, jobs: dict[str, dict[str, Any]]) -> None:
    """Run each job and save its logits by name."""
    torch.set_num_threads(1)
    done = {}
    with TorchGroup.joined(Shard(rank, world), address=address, transport="gloo", seconds=60) as group:
        done |= exchanged(group)
        for name, job in jobs.items():
            chosen: Group = WithoutSum(group) if job.get("without_sum") else group
            done[name] = run(Path(job["folder"]), chosen, job["dtype"], moved=job.get("moved"))
    torch.save(done, out)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4], json.loads(sys.argv[5]))
