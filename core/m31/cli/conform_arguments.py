"""The grammar of `m31 conform ACTION`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from m31.cli.arguments import Parser

EXIT_CODES = """exit codes of run, report and judge:
  0    as it should be: conformant, or, of a selection, nothing failed
  1    failures, or entries of expect.toml that are not true
  2    not conformant by omission: a claim was never exercised, or nothing that was selected ran
  3    the environment or the suite itself: no backend, a damaged file, a criterion that accepts nonsense
  130  interrupted; what was found so far is reported"""


def _positive(kind: Callable[[str], float], what: str) -> Callable[[str], float]:
    def convert(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"expected {what}, got '{text}'") from None
        if not 0 < value < float("inf"):
            raise argparse.ArgumentTypeError(f"expected {what}, got '{text}'")
        return value

    return convert


def _expression(text: str) -> str:
    from m31.conformance.expression import parse
    from m31.errors import RequestError

    try:
        parse(text)
    except RequestError as error:
        raise argparse.ArgumentTypeError(f"{error.what}; expected {error.expected}, got '{text}'") from None
    return text


def _sample(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected a number of items, or 0, got '{text}'")
    return int(text)


_count = _positive(int, "a whole number above 0")
_seconds = _positive(float, "a number of seconds above 0")


def _backend(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    parser.add_argument(
        "--backend",
        metavar="NAME",
        required=required,
        help="an installed backend, or MODULE:CLASS of one that is not, with its manifest in its package",
    )


def _selection(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--level",
        metavar="LEVEL",
        choices=("L0", "L1", "L2", "L3", "L4"),
        help="run this level and those below it (default: L3, or L4 with --checkpoint)",
    )
    parser.add_argument(
        "-k",
        metavar="EXPR",
        type=_expression,
        help="only items whose id matches: words joined by and, or, not, ( ); `smoke`: a few of all",
    )
    parser.add_argument("--checkpoint", metavar="DIR", help="folder of a real checkpoint, for L4")


def _workers(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-j", metavar="N", type=_count, default=1, help="worker processes (default: %(default)s)")
    parser.add_argument("--timeout", metavar="S", type=_seconds, help="seconds that one item may take (default: 300)")


def _run(parser: argparse.ArgumentParser) -> None:
    _backend(parser)
    parser.add_argument("--device", metavar="DEVICE", help="device of the backend (default: the backend decides)")
    _selection(parser)
    _workers(parser)
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--out", metavar="DIR", help="folder of the reports (default: conformance-NAME)")
    where.add_argument("--record", metavar="DIR", help="keep the evidence here, to be judged on another machine")
    parser.add_argument("--expect", metavar="FILE", help="expect.toml: what is known to fail, and why")
    parser.add_argument("--seed-salt", metavar="TEXT", default="", help="other random values than the usual ones")
    parser.add_argument("--fail-fast", action="store_true", help="stop at the first unexpected failure")


def _list(parser: argparse.ArgumentParser) -> None:
    _backend(parser)
    _selection(parser)
    parser.add_argument("--json", action="store_true", help="write one JSON document")


def _judge(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("record", metavar="DIR", help="folder of a run with --record")
    parser.add_argument("--out", metavar="DIR", required=True, help="folder of the reports")
    parser.add_argument("--checkpoint", metavar="DIR", help="the recorded run's checkpoint, if it lies elsewhere here")
    _workers(parser)


def _report(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="DIR", help="folder of a run, whatever ended it")


def _pack(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="DIR", help="folder of a whole run")
    parser.add_argument("--out", metavar="FILE", help="archive to write (default: DIR.tar.gz)")
    parser.add_argument(
        "--allow-dirty",
        action="store_true",
        help="although sources had changes that no commit has; recorded in the archive",
    )


def _verify(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("pack", metavar="PACK", help="archive of m31 conform pack")
    parser.add_argument(
        "--sample", metavar="N", type=_sample, default=20, help="items to run again; 0 for none (default: %(default)s)"
    )
    _backend(parser, required=False)
    parser.add_argument("--device", metavar="DEVICE", help="device of the backend (default: the backend decides)")
    parser.add_argument("--checkpoint", metavar="DIR", help="folder of the real checkpoint, for items of L4")
    parser.add_argument("--seed-salt", metavar="TEXT", help="salt of the fresh seeds (default: a random one)")
    parser.add_argument("--json", action="store_true", help="write one JSON document")


def _diff(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("a", metavar="A", help="folder of a run, report.json, or archive")
    parser.add_argument("b", metavar="B", help="likewise")
    parser.add_argument("--json", action="store_true", help="write one JSON document")


def _bisect(parser: argparse.ArgumentParser) -> None:
    _backend(parser)
    parser.add_argument(
        "--against", metavar="NAME", default="reference", help="backend to compare with (default: %(default)s)"
    )
    parser.add_argument("--prompt", metavar="TEXT", required=True, help="what to run")
    parser.add_argument("--checkpoint", metavar="DIR", help="folder of a checkpoint (default: a small random one)")
    parser.add_argument("--device", metavar="DEVICE", help="device of the backend (default: the backend decides)")
    parser.add_argument(
        "--out", metavar="DIR", help="folder for the table and the plot (default: print the table only)"
    )


def _selftest(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-k", metavar="EXPR", type=_expression, help="only faults whose name matches: words joined by and, or, not, ( )"
    )
    parser.add_argument(
        "--backend", metavar="NAME", default="reference", help="backend to break (default: %(default)s)"
    )
    parser.add_argument(
        "--matrix", metavar="FILE", help="do not stop at the first item that fails; write fault x item there, as CSV"
    )


ACTIONS: dict[str, tuple[str, Callable[[argparse.ArgumentParser], None]]] = {
    "run": ("run the suite on a backend and report", _run),
    "list": ("list the items that a backend would be asked", _list),
    "judge": ("judge what was recorded on another machine", _judge),
    "report": ("make the reports of a run again from its journal", _report),
    "pack": ("pack a run into an archive that others can verify", _pack),
    "verify": ("check an archive, and run a sample of it again with fresh seeds", _verify),
    "diff": ("compare two reports", _diff),
    "bisect": ("find the first layer and op where two backends differ by more than they may", _bisect),
    "selftest": ("run the suite on backends that are broken on purpose", _selftest),
}


def add(parser: Parser, kind: type[Parser]) -> dict[str, Parser]:
    """Give `m31 conform` its actions; their parsers, as `conform ACTION`."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True, parser_class=kind)
    parsers = {}
    for name, (summary, fill) in ACTIONS.items():
        epilog = EXIT_CODES if name in ("run", "report", "judge") else None
        made = actions.add_parser(name, help=summary, description=summary[0].upper() + summary[1:] + ".", epilog=epilog)
        fill(made)
        parsers[f"conform {name}"] = made
    return parsers


def name_of(args: argparse.Namespace) -> str:
    """Which parser read these arguments."""
    return f"conform {args.action}" if args.command == "conform" else str(args.command)
