"""Kernels of the CPU backend, each beside a plain read of the bytes that it needs, and matrix products beside torch's.

    python benchmarks/cpu_kernels.py [--quick] [--threads 1 2] [--rounds 7] [--megabytes 256]

Products of one token with NVFP4 and MXFP8 weights, of 512 tokens with NVFP4 weights (beside torch's `linear` on the
decoded matrix, in bfloat16 and float32), sparse decode attention, block scores. Weights are random bytes in a file that
is mapped, as a checkpoint is; pages are random too. In every round each contender runs in turn, and printed are medians
with the least and the most of the rounds: of times, and of the ratio of another's time to its own in one round. The
read is native code on the same threads that adds up 64-bit words. Bytes that fit into the processor's caches are read
from there: with --quick, and by attention, which at any context reads 16 blocks for each KV head. The share is what the
threads had of their processors in the worst round: well below 100 % others were at work, and the row says little.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from m31 import ops
from m31.checkpoint import GlobalScale, LazyTensor, QuantizedTensor
from m31.checkpoint.lazy import MappedFile
from m31.formats.arithmetic import NAMED
from m31.graph import OpInstance, Refusal, Shard, StepClass
from m31.ops import StateType, TensorDecl, TensorType, WeightDecl
from m31.ops.cases import Batch, batch
from m31.sdk import KVSpec
from m31_cpu.lang import I64, PTR, Val, vec
from m31_cpu.native import Kernel, Native
from m31_cpu.pages import CpuCache
from m31_cpu.program import Sizes, Work
from m31_cpu.session import CpuSession

PAGE, HEADS, GROUP, DIM, TOPK = 128, 4, 16, 128, 16
PIECE, STRIDE = 256 << 10, 256  # bytes of a task of the read, and of one turn of its loop

Pieces = list[tuple[int, int]]  # addresses and bytes


@dataclass(frozen=True)
class Case:
    """What is measured.

    Args:
        name: of its row.
        pieces: the bytes that it needs.
        run: the kernel.
        peers: others that compute the same.
        operations: multiplications and additions; 0 where the bytes are what counts.
    """

    name: str
    pieces: Pieces
    run: Callable[[], object]
    peers: Mapping[str, Callable[[], object]]
    operations: int = 0


# --- the read ---


def _read(k: Kernel, a: Any) -> None:
    kind = vec(I64, 8)
    sums = [k.var(k.const(kind, 0)) for _ in range(STRIDE // 64)]
    for task in k.tasks(a.count):
        at, size = (k.load(kind_, a.pieces + task * 16, 8 * i, align=8) for i, kind_ in enumerate((PTR, I64)))
        for i in k.range(0, size, STRIDE):
            for j, sum_ in enumerate(sums):
                sum_.add(k.load(kind, at + i, 64 * j, align=1))
    whole: Val = sums[0].get()
    for sum_ in sums[1:]:
        whole = whole + sum_.get()
    k.store(whole, a.sums + k.thread * 64, align=8)


READ = Native("benchmark.read.1", {"pieces": PTR, "count": I64, "sums": PTR}, _read)


def reader(session: CpuSession, pieces: Pieces) -> Callable[[], None]:
    """Reads all of them, but for what is left of a piece behind whole turns of the loop."""
    parts = [(at + i, min(PIECE, size - i) // STRIDE * STRIDE) for at, size in pieces for i in range(0, size, PIECE)]
    table, sums = np.array(parts, np.int64), np.zeros((session.runner.crew.count, 8), np.int64)
    values = {"pieces": table.ctypes.data, "count": len(table), "sums": sums.ctypes.data}
    program = session.runner.program([Work(READ, values, (), (), (table, sums))])
    return lambda: session.runner.crew.run(program)


# --- products ---


def weights(path: Path, stored: str, rows: int, columns: int) -> tuple[QuantizedTensor, Pieces]:
    """A random matrix in a mapped file, and where its bytes lie."""
    rng = np.random.default_rng(0)
    if stored == "nvfp4":
        parts = {
            "packed": ("U8", rng.integers(0, 256, (rows, columns // 2), np.uint8)),
            "scale": ("F8_E4M3", rng.integers(0x30, 0x40, (rows, columns // 16), np.uint8)),
            "global_scale": ("F32", np.array([3.0 * columns**0.5], np.float32)),
        }
    else:
        parts = {
            "codes": ("F8_E4M3", rng.integers(0, 256, (rows, columns), np.uint8) & 0xBF),  # none of them NaN
            "scale": ("U8", np.full((rows, columns // 32), 120, np.uint8)),
        }
    placed, size = {}, 0
    with path.open("wb") as out:
        for role, (dtype, array) in parts.items():
            placed[role] = (dtype, array.shape, size)
            out.write(array.tobytes() + bytes(-array.nbytes % 64))
            size += array.nbytes + -array.nbytes % 64
    file = MappedFile(path, size)
    lazy: dict[str, Any] = {
        role: LazyTensor(name=role, shape=shape, stored_dtype=dtype, offset=offset, file=file)
        for role, (dtype, shape, offset) in placed.items()
    }
    if stored == "nvfp4":
        lazy["global_scale"] = GlobalScale(stored=lazy["global_scale"], inverse=False)
    tensor = QuantizedTensor(
        name="weight",
        shape=(rows, columns),
        format=stored,  # type: ignore[arg-type]
        _parts=tuple(lazy.items()),
    )
    return tensor, [(0, array.nbytes) for _, array in parts.values() if array.nbytes >= STRIDE]


def product(session: CpuSession, path: Path, stored: str, shape: tuple[int, int], tokens: int, torch_too: bool) -> Case:
    """y = x W^T."""
    tensor, pieces = weights(path, stored, *shape)
    decl = WeightDecl("linear", {"weight": TensorDecl("weight", shape, (None, None), stored=stored)})
    inputs = (TensorType(("T", shape[1]), "T,C", "model"), decl)
    op = OpInstance("linear", ops.linear, {}, inputs, ops.linear.types({}, inputs))
    handle = session.prepare(op, {"weight": tensor}, Shard(0, 1))
    x = torch.randn(tokens, shape[1], generator=torch.Generator().manual_seed(1))
    run = bound(session, op, [x], [torch.empty(tokens, shape[0])], handle, {"T": tokens})
    peers: dict[str, Callable[[], object]] = {}
    if torch_too:
        matrix = handle.dequantise()["weight"].float()
        for dtype in (torch.bfloat16, torch.float32):
            given, decoded = x.to(dtype), matrix.to(dtype)
            peers[f"torch {str(dtype).removeprefix('torch.')}"] = _linear(given, decoded)
    where = [(int(handle.table[0, column]), size) for column, (_, size) in zip((0, 2), pieces, strict=True)]
    operations = 2 * tokens * shape[0] * shape[1] if tokens > 1 else 0
    return Case(f"{stored} {shape[0]}x{shape[1]}, {tokens} token{'s' * (tokens > 1)}", where, run, peers, operations)


def _linear(x: torch.Tensor, matrix: torch.Tensor) -> Callable[[], torch.Tensor]:
    return lambda: torch.nn.functional.linear(x, matrix)


# --- pages ---


def filled(session: CpuSession, form: str, index: str, pages: int) -> CpuCache:
    """Pages of one layer, all of them full of random numbers."""
    spec = KVSpec(
        indexed=(True,),
        kv_heads=HEADS,
        head_dim=DIM,
        index_dim=DIM,
        page_tokens=PAGE,
        kv_format=form,  # type: ignore[arg-type]
        index_format=index,  # type: ignore[arg-type]
    )
    made = session.kv_layout(spec).allocate(pages)
    assert isinstance(made, CpuCache)
    rng = torch.Generator().manual_seed(2)
    for _, part in made._parts():
        if part.dtype == torch.uint8:  # codes and scales that are neither NaN nor large
            part.random_(0x28, 0x40, generator=rng)
        elif part.dtype == torch.int16:
            part.copy_(torch.randn(part.shape, generator=rng).bfloat16().view(torch.int16))
        elif part.dtype == torch.int8:
            part.random_(-127, 128, generator=rng)
        else:
            part.uniform_(generator=rng)
    return made


def _context(b: Batch) -> list[torch.Tensor]:
    return [torch.as_tensor(x) for x in (b.positions, b.cu_q, b.seq_lens, b.page_table)]


_CONTEXT = (
    TensorType(("T",), "T", "int64"),
    TensorType(("S+1",), "S", "int64"),
    TensorType(("S",), "S", "int64"),
    TensorType(("S", "P"), "S,P", "int64"),
)


def attention(session: CpuSession, form: str, context: int) -> Case:
    """One token on 16 blocks for each KV head, the last one among them."""
    rng = np.random.default_rng(3)
    b = batch(rng, [1], [context], PAGE)
    cache, count = filled(session, form, "bfloat16", b.num_pages), b.page_table.shape[1]
    lists = [np.sort(np.append(rng.permutation(count - 1)[: TOPK - 1], count - 1)) for _ in range(HEADS)]
    q = torch.randn(1, HEADS * GROUP, DIM, generator=torch.Generator().manual_seed(4))
    inputs = (
        TensorType(("T", HEADS * GROUP, DIM), "T,h,D", "model"),
        StateType("kv", form, "bfloat16"),
        TensorType(("T", HEADS, TOPK), "T,h,K", "int64"),
        *_CONTEXT,
    )
    attrs = {"layer": 0, "kv_heads": HEADS, "scale": DIM**-0.5}
    op = OpInstance("attention", ops.sparse_attention, attrs, inputs, ops.sparse_attention.types(attrs, inputs))
    given = [q, cache, torch.as_tensor(np.stack(lists)[None]), *_context(b)]
    out = torch.empty(1, HEADS * GROUP * DIM)
    run = bound(session, op, given, [out], None, {"T": 1, "S": 1, "S+1": 2, "P": count})
    parts = [part for store in (cache.k[0], cache.v[0]) for part in store.parts.values()]
    pages = [(head, int(page)) for head, chosen in enumerate(lists) for page in b.page_table[0, chosen]]
    where = [(part[page, head].data_ptr(), part[page, head].nbytes) for part in parts for head, page in pages]
    return Case(f"attention, {form} pages, context {context}", where, run, {})


def scores(session: CpuSession, index: str, context: int) -> Case:
    """One token's index queries on all keys."""
    b = batch(np.random.default_rng(5), [1], [context], PAGE, spare=0)
    cache, count = filled(session, "nvfp4", index, b.num_pages), b.page_table.shape[1]
    q = torch.randn(1, HEADS, DIM, generator=torch.Generator().manual_seed(6))
    inputs = (TensorType(("T", HEADS, DIM), "T,h,D", "model"), StateType("kv", "nvfp4", index), *_CONTEXT)
    op = OpInstance("scores", ops.block_scores, {"layer": 0}, inputs, ops.block_scores.types({"layer": 0}, inputs))
    out = torch.empty(1, HEADS, count)
    run = bound(session, op, [q, cache, *_context(b)], [out], None, {"T": 1, "S": 1, "S+1": 2, "P": count})
    store = cache.index[0]
    assert store is not None
    where = [(part.data_ptr(), part.nbytes) for part in store.parts.values()]
    return Case(f"block scores, {index} keys, context {context}", where, run, {})


# --- measuring ---


def bound(
    session: CpuSession, op: OpInstance, ins: list[Any], outs: list[torch.Tensor], handle: Any, sizes: dict[str, int]
) -> Callable[[], None]:
    """An op as a program, as it is part of a step. What it returns keeps the buffers alive: a program has addresses."""
    tokens = sizes["T"]
    kind: Any = "decode" if tokens == 1 else "mixed"
    step = StepClass(kind=kind, q_len=int(tokens == 1), tokens=tokens, seqs=1, rows=1, pages=sizes.get("P", 1))
    kernel = session.kernel(op, step)
    assert not isinstance(kernel, Refusal), kernel.reason
    used = Sizes()
    used.set(sizes)
    room = torch.empty(kernel.workspace_bytes, dtype=torch.uint8)
    program = session.runner.program(list(kernel.works(outs, ins, handle, room, used)))  # type: ignore[attr-defined]
    held = (program, ins, outs)
    return lambda: session.runner.crew.run(held[0])


def timed(run: Callable[[], object], repeats: int) -> float:
    """Seconds of one run, of several in a row."""
    began = time.perf_counter()
    for _ in range(repeats):
        run()
    return (time.perf_counter() - began) / repeats


def measure(case: Case, session: CpuSession, rounds: int) -> tuple[dict[str, list[float]], float]:
    """(seconds by contender and round, processor time per second and thread of the kernel in its worst round); each
    contender first runs once, and then for some milliseconds a round."""
    runs = {"kernel": case.run, "read": reader(session, case.pieces), **case.peers}
    for run in runs.values():
        run()
    repeats = {name: max(1, int(0.02 / timed(run, 1))) for name, run in runs.items()}
    took: dict[str, list[float]] = {name: [] for name in runs}
    shares = []
    for _ in range(rounds):
        for name, run in runs.items():
            began = time.process_time()
            took[name].append(timed(run, repeats[name]))
            if name == "kernel":
                used = time.process_time() - began
                shares.append(used / (took[name][-1] * repeats[name] * session.runner.crew.count))
    return took, min(shares)


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Median, least and most."""
    middle, least, most = statistics.median(values), min(values), max(values)
    return f"{middle:.{digits}f} [{least:.{digits}f}..{most:.{digits}f}]"


def row(case: Case, threads: int, took: dict[str, list[float]], share: float) -> str:
    """A row of the table."""
    own, size = took["kernel"], sum(n for _, n in case.pieces)
    ratios = {name: spread([b / a for a, b in zip(own, t, strict=True)]) for name, t in took.items()}
    rates = f"{size / statistics.median(own) / 1e9:.1f}"
    done = f"{case.operations / statistics.median(own) / 1e9:.0f}" if case.operations else ""
    peers = [ratios.get(f"torch {dtype}", "") for dtype in ("bfloat16", "float32")]
    cells = [case.name, str(threads), f"{100 * share:.0f} %", f"{size / 1e6:.1f}", spread([1e3 * t for t in own], 3)]
    return f"| {' | '.join([*cells, rates, done, ratios['read'], *peers])} |"


def cases(session: CpuSession, folder: Path, quick: bool, megabytes: int) -> Iterator[Case]:
    """One after the other, so that only one takes memory."""
    columns = 4096
    for stored, bits in (("nvfp4", 4.5), ("mxfp8", 8.25)):
        rows = int(megabytes * 1e6 * 8 / bits) // columns // 128 * 128
        yield product(session, folder / stored, stored, (rows, columns), 1, False)
    shape = (1024, 1024) if quick else (3072, 2048)
    yield product(session, folder / "many", "nvfp4", shape, 512, True)
    context = 8192 if quick else 65536
    for form in ("bfloat16", "nvfp4"):
        yield attention(session, form, context)
    for index in ("bfloat16", "int8"):
        yield scores(session, index, context)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes and 3 rounds: a few seconds")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="counts of threads (1 2)")
    parser.add_argument("--rounds", type=int, help="of every case (7)")
    parser.add_argument("--megabytes", type=int, help="of a matrix for one token (256)")
    args = parser.parse_args()
    rounds = args.rounds or (3 if args.quick else 7)
    megabytes = args.megabytes or (16 if args.quick else 256)
    peers = [f"{name} : kernel" for name in ("read", "torch bfloat16", "torch float32")]
    names = ["kernel", "threads", "share", "MB", "ms", "GB/s", "GFLOP/s", *peers]
    for at, threads in enumerate(args.threads):
        os.environ["M31_NUM_THREADS"] = str(threads)
        torch.set_num_threads(threads)
        session = CpuSession(NAMED["exact"])
        if at == 0:
            print(f"instruction set {session.isa.name}, torch {torch.__version__}, {rounds} rounds\n")
            print(f"| {' | '.join(names)} |\n|{'---|' * len(names)}")
        with tempfile.TemporaryDirectory() as folder:
            for case in cases(session, Path(folder), args.quick, megabytes):
                print(row(case, threads, *measure(case, session, rounds)), flush=True)


if __name__ == "__main__":
    main()
