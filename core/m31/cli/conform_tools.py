"""`m31 conform selftest` and `bisect`: is the suite itself any good, and where do two backends part."""

from __future__ import annotations

import argparse
import tempfile
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from m31.cli.output import Output

if TYPE_CHECKING:
    from m31.conformance.item import Item
    from m31.sdk.manifest import Manifest


def selftest(args: argparse.Namespace, out: Output) -> int:
    """Run the items on backends that are broken on purpose; 1 if one of them is not caught.

    Raises: BackendError when the backend cannot be used here, NothingSelected when no fault was selected.
    """
    from m31 import sdk
    from m31.conformance.catalog import collect
    from m31.conformance.expression import select
    from m31.conformance.running.setup import backend_of
    from m31.errors import NothingSelected

    faults: Any = import_module("m31.conformance.faults")
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

        done = faults.selftest(chosen, items, make, said=out.line)
    out.line(str(done).splitlines()[-1])
    for name, why in done.healthy.items():
        out.note(f"the healthy backend does not pass {name}: {why}")
    return 0 if done.ok else 1


def bisect(args: argparse.Namespace, out: Output) -> int:
    """Compare two backends layer by layer; 1 if one op is outside its bound.

    Raises: BackendError when one of them cannot be used here.
    """
    raise AssertionError
