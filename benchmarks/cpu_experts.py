"""One token through the routed experts of a layer: the CPU backend, the reference, and a plain read of the same bytes.

    python benchmarks/cpu_experts.py [--stored nvfp4] [--hidden 2048] [--inner 3072] [--experts 8] [--rounds 7]

Experts are random bytes in a file that is mapped, as a checkpoint is. In every round each contender runs in turn on
the same choice of experts, another one each round; printed are medians with the least and the most. The reference
decodes on every use (no cache of decoded weights): that is the first use of an expert, and every use where the cache
does not hold them all. The read sums the chosen experts' bytes as 64-bit words, on the threads that the kernels use.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

from m31 import ops
from m31.checkpoint import GlobalScale, LazyTensor, QuantizedTensor
from m31.checkpoint.lazy import MappedFile
from m31.graph import Kernel, OpInstance, Shard, StepClass
from m31.ops import TensorDecl, TensorType, WeightDecl
from m31_cpu import CpuBackend
from m31_reference import ReferenceBackend

TOPK = 4
ATTRS = {"alpha": 1.702, "beta": 1.0, "limit": 7.0, "routed_scaling_factor": 2.0}


def expert_file(path: Path, stored: str, experts: int, hidden: int, inner: int) -> tuple[dict[str, Any], list[slice]]:
    """(slots, where each expert's bytes lie)."""
    rng = np.random.default_rng(0)
    plans, spans, size = [], [], 0
    with path.open("wb") as out:
        for expert in range(experts):
            start = size
            for name in ("w1", "w3", "w2"):
                n, k = (hidden, inner) if name == "w2" else (inner, hidden)
                placed = {}
                for role, dtype, array in _parts(rng, stored, n, k):
                    placed[role] = (dtype, array.shape, size)
                    out.write(array.tobytes())
                    size += array.nbytes
                plans.append((f"{name}.{expert}", (n, k), placed))
            spans.append(slice(start // 8, size // 8))
    file = MappedFile(path, size)
    slots: dict[str, Any] = {}
    for slot, shape, placed in plans:
        parts: dict[str, Any] = {
            role: LazyTensor(name=slot, shape=dims, stored_dtype=dtype, offset=offset, file=file)
            for role, (dtype, dims, offset) in placed.items()
        }
        if stored == "nvfp4":
            parts["global_scale"] = GlobalScale(stored=parts["global_scale"], inverse=False)
            slots[slot] = QuantizedTensor(name=slot, shape=shape, format="nvfp4", _parts=tuple(parts.items()))
        else:
            slots[slot] = parts["weight"]
    return slots, spans


def _parts(rng: np.random.Generator, stored: str, n: int, k: int) -> list[tuple[str, str, np.ndarray]]:
    if stored == "bfloat16":
        value = (rng.standard_normal((n, k), np.float32) * k**-0.5).view(np.uint32) >> 16
        return [("weight", "BF16", value.astype(np.uint16))]
    return [
        ("packed", "U8", rng.integers(0, 256, (n, k // 2), dtype=np.uint8)),
        ("scale", "F8_E4M3", rng.integers(0x30, 0x40, (n, k // 16), dtype=np.uint8)),
        ("global_scale", "F32", np.array([3.0 * k**0.5], np.float32)),
        ("padding", "F32", np.zeros(1, np.float32)),
    ]


def instance(slots: dict[str, Any], stored: str, hidden: int) -> OpInstance:
    """The op of one layer."""
    decls = {slot: TensorDecl(slot, t.shape, (None, None), stored=stored) for slot, t in slots.items()}
    attrs = {**ATTRS, "experts": len(slots) // 3}
    inputs = (
        TensorType(("T", hidden), "T,C", "model"),
        TensorType(("T", TOPK), "T,K", "int64"),
        TensorType(("T", TOPK), "T,K", "accum"),
        WeightDecl("experts", decls),
    )
    return OpInstance("experts", ops.experts, attrs, inputs, ops.experts.types(attrs, inputs))


class Reader:
    """Reads the chosen experts' bytes, split over the backend's own threads."""

    def __init__(self, path: Path, spans: list[slice], threads: int) -> None:
        self.words = np.memmap(path, np.uint64, "r", shape=(path.stat().st_size // 8,))
        self.spans, self.threads, self.pool = spans, threads, ThreadPoolExecutor(threads)

    def __call__(self, ids: list[int]) -> None:
        """Read them."""

        def part(index: int) -> None:
            for expert in ids:
                span = self.spans[expert]
                size = span.stop - span.start
                low, high = (span.start + size * i // self.threads for i in (index, index + 1))
                int(self.words[low:high].sum())

        list(self.pool.map(part, range(self.threads)))


def contender(session: Any, op: OpInstance, slots: dict[str, Any], hidden: int) -> Callable[[list[int]], torch.Tensor]:
    """One token's experts on a session."""
    step = StepClass(kind="decode", q_len=1, tokens=1, seqs=1, rows=1, pages=1)
    kernel = session.kernel(op, step)
    assert isinstance(kernel, Kernel), kernel
    print(f"{kernel.name}: {kernel.why}")
    handle = session.prepare(op, slots, Shard(0, 1))
    h = torch.randn(1, hidden, generator=torch.Generator().manual_seed(1))
    weights, out = torch.full((1, TOPK), 1 / TOPK), torch.empty(1, hidden)
    workspace = torch.empty(kernel.workspace_bytes, dtype=torch.uint8)

    def run(ids: list[int]) -> torch.Tensor:
        kernel.run([out], [h, torch.tensor([ids]), weights], handle, workspace)
        return out

    return run


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stored", choices=("nvfp4", "bfloat16"), default="nvfp4")
    for name, value in (("hidden", 2048), ("inner", 3072), ("experts", 8), ("rounds", 7)):
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()
    given: dict[str, Any] = {"device": None, "dtype": "float32", "rank": 0, "world": 1}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "experts.bin")
        slots, spans = expert_file(path, args.stored, args.experts, args.hidden, args.inner)
        op = instance(slots, args.stored, args.hidden)
        cpu = CpuBackend(None).open(**given)  # type: ignore[arg-type]
        reference = ReferenceBackend(None).open(**given, options={"weight_cache_bytes": 0})  # type: ignore[arg-type]
        began = time.perf_counter()
        runs: dict[str, Callable[[list[int]], Any]] = {"cpu": contender(cpu, op, slots, args.hidden)}
        print(f"compiled and prepared in {time.perf_counter() - began:.1f} s")
        runs["reference"] = contender(reference, op, slots, args.hidden)
        runs["read"] = Reader(path, spans, cpu.runner.crew.count)
        took: dict[str, list[float]] = {name: [] for name in runs}
        rng = np.random.default_rng(2)
        repeats = {"cpu": 5, "reference": 1, "read": 5}
        for turn in range(args.rounds + 1):
            choices = [rng.permutation(args.experts)[:TOPK].tolist() for _ in range(5)]
            for name, run in runs.items():
                began = time.perf_counter()
                for ids in choices[: repeats[name]]:
                    run(ids)
                if turn:  # the first round warms up
                    took[name].append((time.perf_counter() - began) / repeats[name])
        off = float((runs["cpu"](choices[0]).clone() - runs["reference"](choices[0])).abs().max())
    size = TOPK * 8 * (spans[0].stop - spans[0].start)
    print(f"{args.stored}, hidden {args.hidden}, inner {args.inner}, top {TOPK}: {size / 1e6:.1f} MB per token")
    print(f"largest difference between the two: {off:.2e}\n")
    print("| | ms per token | GB/s | time of the reference : this | of the read : this |")
    print("|---|---|---|---|---|")
    for name, times in took.items():
        ratios = [[b / a for a, b in zip(times, took[other], strict=True)] for other in ("reference", "read")]
        cells = [_spread([1e3 * t for t in times], 2), f"{size / statistics.median(times) / 1e9:.2f}"]
        print(f"| {name} | {' | '.join([*cells, *(_spread(r, 2) for r in ratios)])} |")


def _spread(values: list[float], digits: int) -> str:
    middle, least, most = statistics.median(values), min(values), max(values)
    return f"{middle:.{digits}f} [{least:.{digits}f}..{most:.{digits}f}]"


if __name__ == "__main__":
    main()
