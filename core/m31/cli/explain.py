"""`m31 explain CKPT`: layer class, op, kernel and why; fallbacks marked; before and after fusion."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from m31.cli.output import Output
from m31.cli.session import checkpoint_folder, formats

if TYPE_CHECKING:
    from m31.engine.explain import Row


def command(args: argparse.Namespace, out: Output) -> int:
    """Run the command; the exit code.

    Raises: M31Error when the folder cannot be described, the backend not be opened, or an op not be served.
    """
    from m31.engine.api import STEPS
    from m31.engine.explain import explain
    from m31.engine.opening import open_model

    opened = open_model(
        checkpoint_folder(args),
        options={},
        draft=None,
        adapter=None if args.adapter is None else Path(args.adapter),
        merge_adapter=args.merge_adapter,
        **formats(args),
    )
    rows = explain(opened.compiler, opened.checkpoint.config.text, STEPS)
    fusions: dict[str, str] = {step.kind: str(opened.compiler.fused(step)[1]) for step in STEPS}
    layout = opened.serving.kv_layout(opened.spec, list(opened.compiler.assigned(STEPS)))
    if args.json:
        out.json(
            {
                "backend": opened.manifest.name,
                "reason": opened.decision.reason,
                "arithmetic": opened.serving.session.numerics.name,
                "kv_layout": layout.layout_id,
                "ops": [asdict(row) for row in rows],
            },
            indent=2,
        )
        return 0
    out.line(f"backend {opened.manifest.name}: {opened.decision.reason}")
    out.line(f"arithmetic {opened.serving.session.numerics.name}; pages {layout.layout_id}")
    for kind in dict.fromkeys(row.step for row in rows):
        before = [row for row in rows if row.step == kind and not row.fused]
        after = [row for row in rows if row.step == kind and row.fused]
        for line in _section(kind, before, after, fusions[kind]):
            out.line(line)
    return 0


def _section(kind: str, before: Sequence[Row], after: Sequence[Row], fusions: str) -> Iterator[str]:
    if before == [replace(row, fused=False) for row in after]:
        yield f"\n{kind} step, nothing is fused"
        yield from _table(before)
        return
    yield f"\n{kind} step, before fusion"
    yield from _table(before)
    yield f"\n{kind} step, after fusion ({fusions})"
    yield from _table(after)


def _table(rows: Sequence[Row]) -> Iterator[str]:
    width = (
        max(len(row.op) for row in rows),
        max(len(row.kernel) for row in rows),
        max(len(row.arithmetic) for row in rows),
    )
    for (layers, kind), group in groupby(rows, key=lambda row: (row.layers, row.kind)):
        yield f"  layers {layers}: {kind}" if layers else f"  {kind}"
        for row in group:
            mark = f"   FALLBACK on {row.by}: {row.fallback}" if row.fallback else f"   {row.why}"
            yield (
                f"    {row.calls:3} x {row.op:{width[0]}}  {row.kernel:{width[1]}}  {row.arithmetic:{width[2]}}{mark}"
            )
