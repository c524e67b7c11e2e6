"""`python -m m31.conformance.golden`: write golden values, or check a backend against them."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from m31.checkpoint import bundled
from m31.checkpoint.workfolder import write_file
from m31.conformance.golden.comparing import Agreement, Sets, compare, open_for
from m31.conformance.golden.prompts import nano_prompts
from m31.conformance.golden.values import Recipe, compute, dump, read
from m31.errors import M31Error

DATA = Path(__file__).with_name("data")
NANO = Recipe("w4a4-megamoe", "nvfp4", "nvfp4")  # what the nano is trained for (training/nano.toml)
EXACT = Recipe("exact", "float32", "float32")  # nothing is rounded: a backend that computes so must agree to 1e-9
COLUMNS = "tokens  next max  next mean        KL  KL worst    top-1  other experts (gap)   other blocks (gap)  prompt\n"


def stored(recipe: Recipe) -> Path:
    """The file of the nano's values in the package."""
    return DATA / f"nano-{recipe.name}.safetensors"


def line(a: Agreement) -> str:
    """One prompt as a row under `COLUMNS`."""
    return (
        f"{a.tokens:6,}  {a.next_error:8.2e}  {a.next_mean:9.2e}  {a.kl:8.2e}  {a.kl_worst:8.2e}  {a.top1:7.2%}  "
        f"{_sets(a.experts):>19}  {_sets(a.blocks):>19}  {a.prompt}\n"
    )


def _sets(sets: Sets | None) -> str:
    if sets is None:
        return "not observed"
    return f"{sets.different} of {sets.compared:,} ({sets.widest:.1e})"


def main(argv: Sequence[str] | None = None) -> int:
    """Parse and run; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m m31.conformance.golden", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("write", "check"):
        command = commands.add_parser(name)
        command.add_argument("--checkpoint", type=Path, help="folder (default: the bundled nano)")
        command.add_argument("--arithmetic", default=NANO.arithmetic, help="default: %(default)s")
        command.add_argument("--kv", default=NANO.kv, help="format of K and V (default: %(default)s)")
        command.add_argument("--index", default=NANO.index, help="format of index keys (default: %(default)s)")
        command.add_argument("--file", type=Path, help="of the values (default: in the package)")
        if name == "write":
            command.add_argument(
                "--cache", type=Path, default=Path("~/.cache/m31"), help="for the tokens of the corpus"
            )
        else:
            command.add_argument("--backend", required=True)
            command.add_argument("--dtype")
            command.add_argument("--device")
            command.add_argument("--longest", type=int, help="leave out longer prompts")
    args = parser.parse_args(argv)
    try:
        return _write(args) if args.command == "write" else _check(args)
    except M31Error as error:
        sys.stderr.write(f"golden: {error}\n")
        return error.exit_code


def _write(args: argparse.Namespace) -> int:
    recipe, folder = Recipe(args.arithmetic, args.kv, args.index), args.checkpoint or bundled.folder()
    path = args.file or stored(recipe)
    content = dump(compute(folder, recipe, nano_prompts(args.cache.expanduser())))
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".tmp")
    write_file(draft, content)
    os.replace(draft, path)
    sys.stdout.write(f"wrote {path}: {len(content):,} bytes\n")
    return 0


def _check(args: argparse.Namespace) -> int:
    golden = read(args.file or stored(Recipe(args.arithmetic, args.kv, args.index)))
    folder = args.checkpoint or bundled.folder()
    model = open_for(golden, folder, backend=args.backend, dtype=args.dtype, device=args.device)
    sys.stdout.write(COLUMNS)
    for agreement in compare(golden, model, longest=args.longest):
        sys.stdout.write(line(agreement))
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
