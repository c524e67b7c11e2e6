"""The reference backend against transformers: one float32 model, one process, rounds in turn.

    python benchmarks/reference.py [--rounds 5] [--json FILE]

Makes a model of the architecture's proportions (8 layers, 142 M active parameters) with transformers, saves it, loads
the same folder on both sides and times, in every round and in turn: prefill of 2,048 tokens, and decode steps on a
cache of 4,096 tokens. Decode is also timed at 2,048 and 16,384 on m31 alone. Caches for decode are filled with random
keys and values on both sides; filling them by prefill would take minutes and change nothing that is timed.
Printed are medians over the rounds of each ratio inside one round; absolute times depend on the machine.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache
from transformers.models.minimax_m3_vl.configuration_minimax_m3_vl import MiniMaxM3VLTextConfig
from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import MiniMaxM3VLForCausalLM

import m31
from m31.engine.engine import Sequence
from m31.engine.model import Model
from m31.engine.sampling import SamplingParams

LAYERS, VOCAB = 8, 32768
STEPS = 8  # decode steps of one measurement; their median counts


def make(folder: Path) -> None:
    """A random model with the proportions of the published one: hidden 1024, 16/4 heads of 128, 16 experts top-4."""
    config = MiniMaxM3VLTextConfig(
        vocab_size=VOCAB,
        hidden_size=1024,
        intermediate_size=512,
        dense_intermediate_size=2048,
        shared_intermediate_size=512,
        num_hidden_layers=LAYERS,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=128,
        rotary_dim=64,
        rope_parameters={"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.5},
        num_local_experts=16,
        num_experts_per_tok=4,
        mlp_layer_types=["dense"] * 2 + ["sparse"] * (LAYERS - 2),
        layer_types=["minimax_m3_sparse"] * LAYERS,
        bos_token_id=1,
        eos_token_id=2,
        max_position_embeddings=1 << 20,
    )
    torch.manual_seed(0)
    MiniMaxM3VLForCausalLM(config).save_pretrained(folder)


class Peer:
    """transformers."""

    def __init__(self, folder: Path) -> None:
        self.model = MiniMaxM3VLForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    @torch.no_grad()
    def prefill(self, ids: list[int]) -> float:
        """Seconds until the logits of the last position, cache included."""
        start = time.perf_counter()
        self.model(input_ids=torch.tensor([ids]), use_cache=True, logits_to_keep=1)
        return time.perf_counter() - start

    @torch.no_grad()
    def decode(self, context: int) -> float:
        """Median seconds of a step on a cache of `context` tokens."""
        cache = DynamicCache(config=self.model.config)
        for layer in range(LAYERS):
            cache.update(torch.randn(1, 4, context, 128), torch.randn(1, 4, context, 128), layer)
            cache.layers[layer].update_index(torch.randn(1, 1, context, 128))
        times = []
        for _ in range(STEPS):
            start = time.perf_counter()
            self.model(input_ids=torch.tensor([[7]]), past_key_values=cache, use_cache=True)
            times.append(time.perf_counter() - start)
        return statistics.median(times)


class Ours:
    """m31's reference backend."""

    def __init__(self, folder: Path) -> None:
        self.model: Model = m31.load(folder, backend="reference", max_context=32768)
        cache = self.model.engine.cache
        for layer in range(LAYERS):
            for store in (cache.k[layer], cache.v[layer], cache.index[layer]):  # type: ignore[attr-defined]
                store.parts["values"].normal_()

    def prefill(self, ids: list[int]) -> float:
        """Seconds until the first token, sampling included."""
        start = time.perf_counter()
        with self.model.generate(ids, max_tokens=1, temperature=0.0) as generation:
            next(generation.events())
        return time.perf_counter() - start

    def decode(self, context: int) -> float:
        """Median seconds of a step on a cache of `context` tokens, sampling included."""
        engine = self.model.engine
        params = SamplingParams(max_tokens=STEPS, temperature=0.0, seed=0)
        sequence = Sequence(prompt=(7,) * (context + 1), params=params, seed=0, request=0, stop_ids=frozenset())
        engine.add(sequence)
        engine._admit()
        assert sequence.table is not None
        sequence.table.place(context)  # as if they had been computed: the pages hold random keys and values
        sequence.table.append(sequence.prompt[:-1])
        times = []
        while not sequence.done:
            start = time.perf_counter()
            engine.step()
            times.append(time.perf_counter() - start)
        return statistics.median(times)


def run(rounds: int) -> dict[str, Any]:
    """All measurements: name -> list with one value per round, in seconds."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make(folder)
        peer, ours = Peer(folder), Ours(folder)
        ids = torch.randint(3, VOCAB, (2048,), generator=torch.Generator().manual_seed(1)).tolist()
        jobs: dict[str, Callable[[], float]] = {
            "prefill 2,048 transformers": lambda: peer.prefill(ids),
            "prefill 2,048 m31": lambda: ours.prefill(ids),
            "decode 4,096 transformers": lambda: peer.decode(4096),
            "decode 4,096 m31": lambda: ours.decode(4096),
            "decode 2,048 m31": lambda: ours.decode(2048),
            "decode 16,384 m31": lambda: ours.decode(16384),
        }
        times: dict[str, list[float]] = {key: [] for key in jobs}
        for number in range(rounds + 1):
            for key, job in jobs.items():
                seconds = job()
                if number:  # the first round warms up
                    times[key].append(seconds)
            print(f"round {number} of {rounds}{' (warm-up, not counted)' if not number else ''}", flush=True)
        return times


def ratio(times: dict[str, list[float]], upper: str, lower: str) -> tuple[float, float, float]:
    """Median, least and greatest of upper / lower, round by round."""
    ratios = [a / b for a, b in zip(times[upper], times[lower], strict=True)]
    return statistics.median(ratios), min(ratios), max(ratios)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="also write all times to this file")
    args = parser.parse_args()
    times = run(args.rounds)
    print(f"\n{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}, float32")
    for key, values in times.items():
        print(
            f"  {key:28s} median {statistics.median(values) * 1e3:8.1f} ms  "
            f"[{min(values) * 1e3:.1f} .. {max(values) * 1e3:.1f}]"
        )
    print("ratios of times inside one round: median [least .. greatest]")
    for title, upper, lower, goal in (
        ("prefill 2,048: transformers / m31", "prefill 2,048 transformers", "prefill 2,048 m31", "at least 1"),
        ("decode at 4,096: transformers / m31", "decode 4,096 transformers", "decode 4,096 m31", "at least 1"),
        ("m31 decode at 16,384 / at 2,048", "decode 16,384 m31", "decode 2,048 m31", "at most 1.5"),
    ):
        middle, low, high = ratio(times, upper, lower)
        print(f"  {title:38s} {middle:5.2f} [{low:.2f} .. {high:.2f}]  goal: {goal}")
    if args.json:
        args.json.write_text(json.dumps(times, indent=1))


if __name__ == "__main__":
    main()
