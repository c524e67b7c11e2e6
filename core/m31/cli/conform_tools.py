"""`m31 conform selftest` and `bisect`: is the suite itself any good, and where do two backends part."""

from __future__ import annotations

import argparse
import csv
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from m31.cli.output import Output

if TYPE_CHECKING:
    from m31.conformance.faults import Fault
    from m31.conformance.faults.selftest import MakeBench
    from m31.conformance.item import Item
    from m31.sdk.manifest import Manifest

SMALL = "random-m31"
"""The checkpoint of `bisect` unless one is given: random weights in the formats of the published model."""


def selftest(args: argparse.Namespace, out: Output) -> int:
    """Run the items on backends that are broken on purpose; 1 if one of them is not caught.

    Raises: BackendError when the backend cannot be used here, NothingSelected when no fault was selected.
    """
    from m31 import sdk
    from m31.conformance import faults
    from m31.conformance.catalog import collect
    from m31.conformance.expression import select
    from m31.conformance.running.setup import backend_of
    from m31.errors import NothingSelected

    chosen = list(faults.FAULTS)
    if args.k is not None:
        names = set(select([fault.name for fault in chosen], args.k))
        chosen = [fault for fault in chosen if fault.name in names]
    if not chosen:
        raise NothingSelected("no fault was selected", where=f"-k '{args.k}'")
    backend = backend_of(args.backend)
    if isinstance(backend, str):
        backend = sdk.open_backend(sdk.decide(backend))
    with tempfile.TemporaryDirectory(prefix="m31-conformance-") as scratch:
        make = faults.bench_maker(backend, Path(scratch))

        def items(manifest: Manifest) -> list[Item]:
            return collect(manifest, ("L0", "L1", "L2", "L3"))

        if args.matrix is not None:
            return _matrix(chosen, items, make, Path(args.matrix), out)
        done = faults.selftest(chosen, items, make, said=out.line)
    out.line(str(done).splitlines()[-1])
    for name, why in done.healthy.items():
        out.note(f"the healthy backend does not pass {name}: {why}")
    return 0 if done.ok else 1


def _matrix(
    chosen: list[Fault], items: Callable[[Manifest], list[Item]], make: MakeBench, path: Path, out: Output
) -> int:
    """Every fault against every item of its subject, into a file; 1 if a fault is not seen by any."""
    from m31.conformance import faults

    unseen = []
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(("fault", "item", "outcome", "said"))
        for fault in chosen:
            row = list(faults.matrix([fault], items, make))
            table.writerows((cell.fault, cell.item, cell.outcome, cell.how) for cell in row)
            caught = sum(cell.outcome == "caught" for cell in row)
            idle = sum(cell.outcome == "not run" for cell in row)
            out.line(f"{fault.name}: {caught} of {len(row)} items fail" + (f", {idle} do not run" if idle else ""))
            unseen += [] if faults.seen(fault, row) else [fault.name]
    out.line(
        f"{len(chosen)} faults, {len(chosen) - len(unseen)} caught, {len(unseen)} survived"
        + "".join(f" {n}" for n in unseen)
    )
    out.note(f"wrote {path}")
    return int(bool(unseen))


def bisect(args: argparse.Namespace, out: Output) -> int:
    """Compare two backends layer by layer; 1 if an op is outside its bound.

    Raises: BackendError when one of them cannot be used here, RequestError when they do not serve the checkpoint.
    """
    from m31.conformance.bench import Bench
    from m31.conformance.bisect import bisect as compare
    from m31.conformance.files import writing
    from m31.conformance.item import NotRun
    from m31.conformance.running.setup import backend_of
    from m31.errors import RequestError

    with tempfile.TemporaryDirectory(prefix="m31-conformance-") as scratch:
        benches = [
            Bench(backend_of(name), device=device, scratch=Path(scratch))
            for name, device in ((args.backend, args.device), (args.against, None))
        ]
        folder = Path(args.checkpoint) if args.checkpoint else benches[0].checkpoint(SMALL)
        try:
            found = compare(benches[0], benches[1], folder, _ids(folder, args.prompt))
        except NotRun as reason:
            raise RequestError(
                f"the two cannot be compared: {reason}", where=str(folder), fix="choose another --checkpoint"
            ) from reason
    table = found.table()
    out.line(table)
    if args.out is not None:
        where = Path(args.out)
        with writing(where):
            where.mkdir(parents=True, exist_ok=True)
            (where / "bisect.txt").write_text(table + "\n", encoding="utf-8")
            (where / "bisect.svg").write_text(found.svg(), encoding="utf-8")
        out.note(f"wrote {where / 'bisect.txt'} and {where / 'bisect.svg'}")
    return 0 if found.first is None else 1


def _ids(folder: Path, prompt: str) -> list[int]:
    """The tokens of a prompt, with the tokenizer of the checkpoint and no template."""
    from m31 import config
    from m31.text.tokenizer import Tokenizer

    text = config.load(folder).text
    return Tokenizer.load(folder, vocab_size=text.vocab_size).encode(prompt, special=False)
