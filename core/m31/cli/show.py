"""`m31 backends` and `m31 inspect`: look, compute nothing."""

from __future__ import annotations

import argparse

from m31.cli.output import Output
from m31.cli.session import checkpoint_folder


def command(args: argparse.Namespace, out: Output) -> int:
    """Run the command; the exit code."""
    if args.command == "backends":
        return backends(args, out)
    return inspect(args, out)


def inspect(args: argparse.Namespace, out: Output) -> int:
    """Describe a checkpoint folder.

    Raises: CheckpointError or ConfigError when the folder cannot be described.
    """
    from m31.checkpoint import inspection

    found = inspection.inspect(checkpoint_folder(args), deep=args.deep)
    if args.json:
        out.json(found.to_dict(), indent=2)
    else:
        out.line(inspection.render(found))
    return 0


def backends(args: argparse.Namespace, out: Output) -> int:
    """List every installed backend with its verdict; that none can be used is not a failure of the listing.

    Other distributions' backends are imported in child processes, so that a broken one shows here and not during a run.

    Raises: BackendError when one of m31's environment variables is malformed.
    """
    from m31 import sdk

    decision, machine = sdk.decide(try_load=True), sdk.this_machine()
    if args.json:
        out.json(sdk.backends_dict(decision, machine), indent=2)
    else:
        out.line(sdk.render_backends(decision, machine))
    return 0
