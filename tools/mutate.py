"""Mutation testing of the reference and of the definitions of ops: how many changes does the suite see?

    python tools/mutate.py [--quick] [--only SUBSTRING] [--again FILE] [--seed N] [--out FILE]

Prints one line for each mutant that survives and is not explained in tools/mutants.toml, and the score. Exit code 1 if
there is one, or if an explanation is for a mutant that is killed or no longer exists (in a whole run).
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import json
import random
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from m31 import ops
from m31.conformance.bench import Bench
from m31.conformance.catalog import collect
from m31.conformance.faults import mutate
from m31.conformance.item import Item, NotRun

EXPLAINED = Path(__file__).with_name("mutants.toml")
QUICK = 60
_DEAR = 0.3
_ARITHMETICS = ("exact", "w8a8-q8kv4")
"""Seconds; items that cost more, other arithmetics, and gaps between elements are left to the suite itself."""
_PAGES = (
    "kv_write",
    "index_write",
    "dense_attention",
    "sparse_attention",
    "block_scores",
    "rule layout-id",
    "pages write-read",
)
REFERENCE: dict[str, tuple[str, ...]] = {
    "m31_reference.kernels": (
        *(
            "embedding",
            "gemma_rmsnorm",
            "head_rmsnorm",
            "rope_table",
            "rope",
            "round_channels",
            "round_heads",
            "linear",
        ),
        *("kv_write", "index_write", "router", "experts", "swiglu_oai", "add", "gather_rows", "lm_head"),
        *("lora_experts", "lora_logits"),
    ),
    "m31_reference.attention": ("block_scores", "block_select", "dense_attention", "sparse_attention"),
    "m31_reference.cache": _PAGES,
}
"""Module -> subjects of the items that judge it."""
DEFINITIONS = ("basic", "norm", "linear", "rope", "select", "attention", "moe", "cache", "rounding", "lora")
_NOT_JUDGED = ("PagedLayout.__init__", "PagedCache.__init__")  # sizes and names: made once, refused elsewhere


def targets() -> Iterator[tuple[mutate.Mutant, tuple[str, ...]]]:
    """Every mutant, with the subjects of the items that should kill it."""
    for name, subjects in REFERENCE.items():
        for mutant in mutate.mutants(importlib.import_module(name)):
            if mutant.function not in _NOT_JUDGED:
                yield mutant, _nearest(mutant.function, subjects)
    for part in DEFINITIONS:
        module = importlib.import_module(f"m31.ops.{part}")
        specs = [spec for spec in {**ops.ALL, **ops.ADAPTER}.values() if spec.naive.__module__ == module.__name__]
        roots = {name for spec in specs for name in (spec.naive.__name__, *spec.naive.__code__.co_names)}
        subjects = tuple(spec.name for spec in specs)
        for mutant in mutate.mutants(module, mutate.called(module, roots)):
            yield mutant, _nearest(mutant.function, subjects)


def _nearest(function: str, subjects: tuple[str, ...]) -> tuple[str, ...]:
    """The likeliest to kill first."""
    near = {s: difflib.SequenceMatcher(None, function.strip("_"), s).ratio() for s in subjects}
    return tuple(sorted(subjects, key=lambda s: -near[s]))


class Checks:
    """Items on a bench of the reference, as checks."""

    def __init__(self, scratch: Path) -> None:
        self.bench = Bench("reference", options={"weight_cache_bytes": 0}, scratch=scratch)
        self.by_subject: dict[str, list[Item]] = {}
        for item in sorted(collect(self.bench.manifest, ("L0", "L1", "L2")), key=lambda item: item.seconds):
            usual = item.attributes.get("arithmetic", "exact") in _ARITHMETICS and not item.attributes.get("gaps")
            if usual and item.seconds <= _DEAR:
                self.by_subject.setdefault(item.subject, []).append(item)

    def of(self, subjects: tuple[str, ...]) -> list[Callable[[], None]]:
        """Those of some subjects, in order."""
        return [partial(self._check, item) for subject in subjects for item in self.by_subject[subject]]

    def _check(self, item: Item) -> None:
        try:
            item.judge(item.execute(self.bench))
        except NotRun:
            return


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main(argv: list[str] | None = None) -> int:
    """Run it; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=f"a sample of {QUICK}")
    parser.add_argument("--only", default="", help="part of a mutant's id")
    parser.add_argument("--again", type=Path, help="those that survived in an earlier --out file, and no others")
    parser.add_argument("--seed", type=int, default=31, help="of the sample")
    parser.add_argument("--out", type=Path, help="write all results there, as JSON")
    args = parser.parse_args(argv)
    explained: dict[str, str] = tomllib.loads(EXPLAINED.read_text())["mutants"]
    began = time.perf_counter()
    chosen = [(m, s) for m, s in targets() if args.only in m.id]
    if args.again:
        before = json.loads(args.again.read_text())
        chosen = [(m, s) for m, s in chosen if not before.get(m.id, "")]
    total = len(chosen)
    if args.quick:
        chosen = random.Random(args.seed).sample(chosen, min(QUICK, total))
    results: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as scratch:
        checks = Checks(Path(scratch))
        for check in [] if args.again else checks.of(tuple(dict.fromkeys(s for _, found in chosen for s in found))):
            check()  # the healthy reference passes; else every mutant would look dead
        for mutant, subjects in chosen:
            results[mutant.id] = mutate.killed(mutant, checks.of(subjects))
            if not results[mutant.id] and mutant.id not in explained:
                _say(f"SURVIVED line {mutant.line}: {mutant.id}")
    alive = [name for name, how in results.items() if not how]
    unexplained = [name for name in alive if name not in explained]
    whole = not (args.quick or args.only or args.again)
    stale = [name for name in explained if results.get(name, "gone" if whole else "")]
    for name in stale:
        _say(f"EXPLAINED BUT NOT ALIVE: {name}")
    killed = len(results) - len(alive)
    real = len(results) - (len(alive) - len(unexplained))
    _say(
        f"{len(results)} of {total} mutants: {killed} killed, {len(alive) - len(unexplained)} explained,"
        f" {len(unexplained)} survived; score {killed / max(1, real):.1%} (with those: {killed / len(results):.1%});"
        f" {time.perf_counter() - began:.0f} s"
    )
    if args.out:
        args.out.write_text(json.dumps(results, indent=1))
    return int(bool(unexplained or stale))


if __name__ == "__main__":
    sys.exit(main())
