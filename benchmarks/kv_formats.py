"""Decode steps of the reference backend by format of the pages, relative to float32, in one process.

    python benchmarks/kv_formats.py [--context 4096] [--rounds 5] [--json FILE]

A model of the architecture's proportions (4 layers, hidden 1024, 16/4 heads of 128) with random weights; every format
gets its own engine and a sequence whose pages hold random keys and values. In every round each engine makes a few steps
in turn; printed are medians over the rounds of the ratio to float32 inside one round. The reference decodes pages in
plain torch: these ratios say nothing about a backend made for speed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import torch

from m31.config import Moe, SparseAttention, SwigluOai, Text
from m31.engine.compiler import Compiler, whole
from m31.engine.engine import Engine, Sequence
from m31.engine.sampling import SamplingParams
from m31.graph import Rounding, trace
from m31.sdk.backend import KVSpec
from m31.sdk.serving import Serving
from m31_reference import ReferenceBackend

LAYERS = 4
STEPS = 6
PAIRS = (
    ("float32", "float32"),
    ("bfloat16", "bfloat16"),
    ("fp8", "fp8"),
    ("nvfp4", "nvfp4"),
    ("nvfp4", "bfloat16"),
    ("float32", "int8"),
)
TEXT = Text(
    num_layers=LAYERS,
    hidden_size=1024,
    num_heads=16,
    num_kv_heads=4,
    head_dim=128,
    vocab_size=4096,
    max_position=1 << 20,
    rope_theta=1e7,
    rotary_dim=64,
    rms_norm_eps=1e-6,
    activation=SwigluOai(alpha=1.702, beta=1.0, limit=7.0),
    dense_intermediate_size=2048,
    attention=("sparse",) * LAYERS,
    mlp=("dense", "moe", "moe", "moe"),
    sparse=SparseAttention(
        num_index_heads=4, index_dim=128, topk_blocks=16, block_size=128, local_blocks=1, init_blocks=0
    ),
    moe=Moe(
        num_experts=8,
        experts_per_token=4,
        num_shared_experts=1,
        expert_intermediate_size=512,
        shared_intermediate_size=512,
        routed_scaling_factor=2.0,
    ),
    tie_word_embeddings=False,
    bos_token_id=1,
    eos_token_ids=(2,),
    pad_token_id=None,
    num_mtp_layers=0,
)


class Held:
    """A random weight in memory."""

    format, dtype, path = "plain", torch.float32, "memory"

    def __init__(self, name: str, shape: tuple[int, ...]) -> None:
        self.name, self.shape = name, shape
        self.value = torch.randn(shape) * (shape[-1] ** -0.5 if len(shape) > 1 else 0.1)

    def load(self) -> torch.Tensor:
        """The values."""
        return self.value

    def parts(self) -> dict[str, Held]:
        """Itself."""
        return {"weight": self}


def engine(kv: str, index: str, weights: dict[str, Held], context: int) -> Engine:
    """An engine with one sequence of `context` tokens in random pages, ready to decode."""
    session = ReferenceBackend(None).open(device=None, dtype="float32", rank=0, world=1)  # type: ignore[arg-type]
    spec = KVSpec.of(TEXT, kv, index)  # type: ignore[arg-type]
    graph = trace(TEXT, Rounding.of(session.numerics, kv, index))
    pages = context // spec.page_tokens + 2
    cache = session.kv_layout(spec).allocate(pages)
    serving = Serving("reference", session)
    compiler = Compiler(serving, graph, TEXT, whole(serving, lambda name: weights[name]))
    made = Engine(compiler=compiler, cache=cache, page_tokens=spec.page_tokens, chunk_tokens=2048, prefix_cache=False)
    at = torch.arange(context)
    page, offset = at // spec.page_tokens, at % spec.page_tokens
    for layer in range(LAYERS):
        for store in (cache.k[layer], cache.v[layer], cache.index[layer]):  # type: ignore[attr-defined]
            heads = store.heads
            store.write(page, offset, torch.randn(context, heads, 128).bfloat16().float())
    params = SamplingParams(max_tokens=100, temperature=0.0)
    sequence = Sequence(prompt=(7,) * context, params=params, seed=0, request=0, stop_ids=frozenset())
    made.add(sequence)
    made._admit()
    assert sequence.table is not None
    sequence.table.place(context - 1)
    sequence.table.append(sequence.prompt[:-1])
    return made


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.manual_seed(0)
    weights = {t.name: Held(t.name, t.shape) for t in trace(TEXT).tensors()}
    engines = {pair: engine(*pair, weights, args.context) for pair in PAIRS}
    for made in engines.values():
        made.step()
    rounds: list[dict[tuple[str, str], float]] = []
    for _ in range(args.rounds):
        times = {}
        for pair, made in engines.items():
            steps = []
            for _ in range(STEPS):
                start = time.perf_counter()
                made.step()
                steps.append(time.perf_counter() - start)
            times[pair] = statistics.median(steps)
        rounds.append(times)
    base = PAIRS[0]
    rows = []
    for pair, made in engines.items():
        ratio = statistics.median(times[pair] / times[base] for times in rounds)
        seconds = statistics.median(times[pair] for times in rounds)
        spec = KVSpec.of(TEXT, *pair)  # type: ignore[arg-type]
        rows.append(
            {
                "kv": pair[0],
                "index": pair[1],
                "ratio": ratio,
                "ms": seconds * 1e3,
                "bytes": made.cache.layout.page_bytes,
            }
        )
        print(
            f"kv {pair[0]:9} index {pair[1]:9} {ratio:5.2f} x float32  {seconds * 1e3:7.2f} ms/step  "
            f"{spec.main_bytes + spec.index_bytes:7,} B/token"
        )
    if args.json:
        args.json.write_text(json.dumps({"context": args.context, "rows": rows}, indent=2))


if __name__ == "__main__":
    main()
