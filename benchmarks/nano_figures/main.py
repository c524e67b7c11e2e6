"""The command: which measurements run, in which order, and what is written."""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from m31.training import bpe, corpus
from m31.training.cache import open_cache

from . import curves, drafting, pages, plots, recall, text
from .job import HEAD, Job
from .served import Setting
from .store import Store, folder_digest, write_atomically
from .tables import filled, render

MEASUREMENTS: dict[str, Callable[[Job], dict[str, Any]]] = {
    "bits-per-byte": text.bits_per_byte,
    "kv-formats": pages.kv_formats,
    "index-formats": pages.index_formats,
    "dense": pages.dense,
    "recall": recall.recall,
    "drafting": drafting.drafting,
    "distributions": drafting.distributions,
}
CURVES = "curves"


def main(argv: list[str] | None = None) -> int:
    """Measure, write, print; 1 if texts with drafting differ from those without."""
    args = _arguments(argv)
    if args.threads:
        torch.set_num_threads(args.threads)
    job = _job(args)
    provenance = {
        **job.key(args.checkpoint),
        "twin": None if args.twin is None else folder_digest(args.twin),
        "draft_head": None if job.head is None else folder_digest(job.head),
        "library": job.texts.python,
        "served": job.served.key(),
        "windows": {"length": job.length, "overlap": job.overlap},
        "machine": platform.machine(),
    }
    path = args.out / f"{_stem(args.label)}.json"
    results = _earlier(path, provenance)
    if "drafting" in (args.only or ()) and job.head is None:
        sys.exit(f"{args.checkpoint} has no draft head (no folder '{HEAD}' in it)")
    for name, measure in MEASUREMENTS.items():
        if args.only and name not in args.only:
            continue
        if name == "drafting" and job.head is None:
            results["skipped"][name] = "the checkpoint has no draft head"
            continue
        results["figures"][name] = measure(job)
        results["skipped"].pop(name, None)
    if not args.only or CURVES in args.only:
        _curves(args, results)
    _plots(args.out, results["figures"])
    write_atomically(path, (json.dumps(results, indent=1) + "\n").encode())
    shown = [*MEASUREMENTS, CURVES]
    tables = "\n".join(f"## {name}\n\n{render(name, results)}" for name in shown)
    write_atomically(args.out / "tables.md", tables.encode())
    print(tables)
    if args.docs is not None:
        publish(args.docs, args.out, path)
    return int(bool(results["figures"].get("drafting", {}).get("mismatches")))


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python benchmarks/nano.py",
        description="Measure a trained nano: what docs/nano.md shows. An interrupted run goes on where it stopped.",
    )
    parser.add_argument("--checkpoint", type=Path, required=True, help="folder of the nano")
    parser.add_argument("--twin", type=Path, help="folder of its unquantised twin")
    parser.add_argument("--out", type=Path, default=Path("build/nano-figures"), help="results, tables and plots")
    parser.add_argument("--only", action="append", choices=[*MEASUREMENTS, CURVES], help="may be repeated")
    parser.add_argument("--quick", action="store_true", help="small sizes, to try the pipeline")
    parser.add_argument("--runs", type=Path, default=Path("build"), help="folder of the runs whose logs are drawn")
    parser.add_argument("--docs", type=Path, help="document whose tables are to be brought up to date")
    parser.add_argument("--label", help="goes into the name of the results' file")
    parser.add_argument("--arithmetic", default="w4a4-megamoe", help="how the nano is served")
    parser.add_argument("--kv", default="nvfp4", help="format of K and V")
    parser.add_argument("--index", default="nvfp4", help="format of the index keys")
    parser.add_argument("--cache", type=Path, default=Path("~/.cache/m31"), help="folder of the token cache")
    parser.add_argument("--seed", type=int, default=1, help="of resampling and sampling")
    parser.add_argument("--threads", type=int, help="of torch")
    return parser.parse_args(argv)


def _job(args: argparse.Namespace) -> Job:
    texts = corpus.load()
    cache = open_cache(args.cache.expanduser(), texts, bpe.build(texts))
    return Job(
        checkpoint=args.checkpoint,
        twin=args.twin,
        served=Setting(arithmetic=args.arithmetic, kv=args.kv, index=args.index),
        texts=texts,
        cache=cache,
        store=Store(args.out / "kept"),
        length=4096,
        overlap=1024,
        quick=args.quick,
        seed=args.seed,
    )


def _stem(label: str | None) -> str:
    return "results" if label is None else f"results-{label}"


def _earlier(path: Path, provenance: dict[str, Any]) -> dict[str, Any]:
    """Results of the same checkpoint and settings, to which more is added; else none."""
    if path.is_file():
        found: dict[str, Any] = json.loads(path.read_bytes())
        if found["provenance"] == json.loads(json.dumps(provenance)):
            return found
    return {"provenance": provenance, "figures": {}, "skipped": {}}


def _curves(args: argparse.Namespace, results: dict[str, Any]) -> None:
    found = curves.runs(args.runs)
    if not found:
        results["skipped"][CURVES] = "no run's log was found"
        return
    results["figures"][CURVES] = curves.figures(found)
    results["skipped"].pop(CURVES, None)
    plots.draw_curves(args.out, found)


def _plots(out: Path, found: dict[str, Any]) -> None:
    if "recall" in found:
        plots.draw_recall(out / "recall.svg", found["recall"])
    if "drafting" in found:
        plots.draw_drafting(out / "drafting.svg", found["drafting"])


def publish(document: Path, out: Path, results: Path) -> None:
    """Bring a document's tables up to date, and copy plots and results into the folder of its name beside it."""
    found = json.loads(results.read_bytes())
    beside = document.with_suffix("")
    text_ = filled(document.read_text(encoding="utf-8"), found, f"{beside.name}/{results.name}")
    beside.mkdir(exist_ok=True)
    for old in beside.glob("results*.json"):
        old.unlink()
    for path in (*sorted(out.glob("*.svg")), results):
        write_atomically(beside / path.name, path.read_bytes())
    write_atomically(document, text_.encode())
