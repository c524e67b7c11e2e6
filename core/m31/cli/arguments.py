"""The command line's grammar. Flags are frozen once released: scripts depend on them.

Misspelt flags and commands name the nearest known one and end with exit code 2.
"""

from __future__ import annotations

import argparse
import difflib
import math
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

from m31.cli import conform_arguments
from m31.cli.output import Output

EXIT_CODES = """exit codes:
  0    done
  1    m31 refused or failed, and said why
  2    the command line is wrong
  3    no backend can be used, or the chosen one cannot
  70   a bug of m31 or of a backend (M31_DEBUG=1 shows the traceback)
  130  interrupted with Ctrl-C
  141  the reader of the output went away"""


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word closest to `word`, or None if none is close."""
    matches = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return matches[0] if matches else None


class Parser(argparse.ArgumentParser):
    """An argument parser that never guesses abbreviations and whose errors say what to type instead."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        kwargs.setdefault("allow_abbrev", False)
        kwargs.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]

    def flags(self) -> list[str]:
        """Every option string that this parser knows."""
        return [flag for action in self._actions for flag in action.option_strings]

    def _print_message(self, message: str, file: Any = None) -> None:
        # argparse's own hides write errors; ours reach `main`, which ends quietly when a pipe is closed.
        if message:
            (Output().text if file is sys.stdout else Output().prompt)(message)

    def error(self, message: str) -> NoReturn:
        """Print the message and where help is, and exit with 2."""
        self.exit(2, f"m31: error: {message}\nm31: try '{self.prog} --help'\n")


def _number(kind: type[int] | type[float], what: str) -> Callable[[str], float]:
    def convert(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"expected {what}, got '{text}'") from None
        if not math.isfinite(value):
            raise argparse.ArgumentTypeError(f"expected {what}, got '{text}'")
        return value

    return convert


_int = _number(int, "a whole number")
_float = _number(float, "a number")


def _add_model(parser: argparse.ArgumentParser) -> None:
    group = _add_formats(parser)
    group.add_argument(
        "--max-context", metavar="N", type=_int, help="tokens of context to reserve (default: what fits)"
    )
    group.add_argument(
        "--draft", metavar="N", type=_int, help="tokens that the draft head proposes per step (default: no drafting)"
    )


def _add_formats(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """How a backend is opened for a checkpoint."""
    group = parser.add_argument_group("model")
    group.add_argument(
        "--backend", metavar="NAME", help="backend to use (default: M31_BACKEND, else the best usable one)"
    )
    group.add_argument("--device", metavar="DEVICE", help="device of the backend (default: the backend decides)")
    group.add_argument("--dtype", metavar="DTYPE", help="compute type (default: the backend's)")
    group.add_argument(
        "--kv-dtype", metavar="DTYPE", help="format of keys and values in the pages (default: the backend's)"
    )
    group.add_argument("--index-dtype", metavar="DTYPE", help="format of index keys (default: the backend's)")
    group.add_argument(
        "--v-scale-order",
        choices=("linear", "token_quad"),
        help="order of the V scales in NVFP4 pages; values are the same in both (default: linear)",
    )
    group.add_argument(
        "--arithmetic", metavar="NAME", help="what is quantised while computing (default: the backend's own)"
    )
    group.add_argument("--adapter", metavar="DIR", help="folder of a low-rank adapter in PEFT's layout")
    group.add_argument(
        "--merge-adapter",
        action="store_true",
        help="merge the adapter into the weights, in their format (default: compute it beside them, without loss)",
    )
    return group


def _add_sampling(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling", "A flag that is not given has the default of m31's SamplingParams.")
    group.add_argument("--max-tokens", metavar="N", type=_int, help="stop after N generated tokens")
    group.add_argument("--temperature", metavar="T", type=_float, help="0 is greedy")
    group.add_argument("--top-p", metavar="P", type=_float, help="keep the most likely tokens up to probability P")
    group.add_argument("--top-k", metavar="K", type=_int, help="keep the K most likely tokens")
    group.add_argument(
        "--min-p", metavar="P", type=_float, help="drop tokens below P times the likeliest one's probability"
    )
    group.add_argument("--repetition-penalty", metavar="X", type=_float, help="divide scores of tokens already seen")
    group.add_argument(
        "--presence-penalty", metavar="X", type=_float, help="subtract from scores of tokens already generated"
    )
    group.add_argument("--seed", metavar="N", type=_int, help="seed of the random generator")
    group.add_argument("--stop", metavar="TEXT", action="append", help="stop before TEXT; may be given several times")
    group.add_argument("--ignore-eos", action="store_true", help="go on after the end-of-text token")
    group.add_argument("--system", metavar="TEXT", help="system message for the chat template")


def _add_json_lines(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--json", action="store_true", help="write JSON Lines: start, token ..., done or error")
    group.add_argument(
        "--logprobs", metavar="N", type=_int, help="with --json: log-probabilities of the N likeliest tokens"
    )


def _add_checkpoint(parser: argparse.ArgumentParser, *, bundled: bool) -> None:
    if bundled:
        parser.add_argument(
            "checkpoint",
            metavar="CKPT",
            nargs="?",
            help="checkpoint folder (default: the nano, which m31 brings along)",
        )
    else:
        parser.add_argument("checkpoint", metavar="CKPT", help="checkpoint folder")


def _run(parser: argparse.ArgumentParser) -> None:
    _add_checkpoint(parser, bundled=True)
    _add_model(parser)
    parser.add_argument(
        "prompt", metavar="PROMPT", help="the prompt; - reads standard input, less one final line break"
    )
    _add_sampling(parser)
    group = parser.add_argument_group("prompt and output")
    group.add_argument(
        "--raw", action="store_true", help="give the prompt to the model as it is, without chat template"
    )
    _add_json_lines(group)


def _chat(parser: argparse.ArgumentParser) -> None:
    _add_checkpoint(parser, bundled=False)  # the nano continues text; it has never seen a conversation
    _add_model(parser)
    _add_sampling(parser)
    _add_json_lines(parser.add_argument_group("output"))


def _backends(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="write one JSON document")


def _inspect(parser: argparse.ArgumentParser) -> None:
    _add_checkpoint(parser, bundled=True)
    parser.add_argument("--json", action="store_true", help="write one JSON document")
    parser.add_argument("--deep", action="store_true", help="read every weight: NaN, infinity, broken scales")


def _explain(parser: argparse.ArgumentParser) -> None:
    _add_checkpoint(parser, bundled=True)
    _add_formats(parser)
    parser.add_argument("--json", action="store_true", help="write one JSON document")


def _convert(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="SRC", help="checkpoint folder of any format that m31 reads")
    parser.add_argument("destination", metavar="DST", help="folder to create; must not exist or be empty")
    parser.add_argument(
        "--format",
        required=True,
        choices=("m31", "m3-mxfp8", "bf16"),
        help="m31: MXFP8 linears and NVFP4 experts; m3-mxfp8: MXFP8 throughout; bf16: unquantised",
    )
    parser.add_argument(
        "--input-scales",
        metavar="FILE",
        help="m31: calibrated input_global_scale values, a JSON object from logical weight name to number",
    )
    parser.add_argument(
        "--joint-gate-up",
        action="store_true",
        help="m31: one global scale for gate and up of an expert, as some kernels need (default: one each)",
    )
    parser.add_argument("--adapter", metavar="DIR", help="folder of a low-rank adapter to merge into the weights")


def _demo(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="DIR", help="folder to create; must not exist or be empty")
    parser.add_argument("--seed", metavar="N", type=_int, default=0, help="seed of the weights (default: %(default)s)")
    parser.add_argument("--layers", metavar="N", type=_int, default=4, help="layers, half dense (default: %(default)s)")


def _train(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "config", metavar="CONFIG", help="TOML file; the run that its folder holds is continued where it stopped"
    )
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument(
        "--draft", action="store_true", help="train a draft head for the checkpoint that CONFIG names, not a model"
    )
    kinds.add_argument(
        "--lora", action="store_true", help="train a low-rank adapter of the checkpoint that CONFIG names, not a model"
    )


def _new_backend(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="of the backend: lower case, digits and hyphens")
    parser.add_argument("--dir", metavar="DIR", help="folder to create (default: m31-NAME-backend)")


def _lint_backend(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="PATH", help="project folder, or package folder, of a backend")
    parser.add_argument("--json", action="store_true", help="write one JSON document")


COMMANDS: dict[str, tuple[str, Callable[[argparse.ArgumentParser], None]]] = {
    "run": ("generate text from a prompt", _run),
    "chat": ("talk to a model", _chat),
    "backends": ("list the installed backends and what they say about this machine", _backends),
    "inspect": ("describe a checkpoint folder without running it", _inspect),
    "convert": ("write a checkpoint in another format", _convert),
    "explain": ("show which kernel runs which op, and why", _explain),
    "demo": ("write a small checkpoint with random weights", _demo),
    "new-backend": ("write the package of a new backend, which passes L0 as it is", _new_backend),
    "lint-backend": ("check what a backend's source names of m31, and its manifest", _lint_backend),
    "train": ("train a small model, or a draft head, for the arithmetic that it will be served with", _train),
    "conform": ("judge whether a backend computes this model", lambda parser: None),
}


class _Version(argparse.Action):
    """Like argparse's own, but a closed pipe is noticed."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        import m31

        Output().line(f"m31 {m31.__version__}")
        parser.exit(0)


def build() -> tuple[Parser, dict[str, Parser]]:
    """The top parser and the parser of each command."""
    top = Parser(
        prog="m31",
        description="Run MiniMax-M3.1-Flash and MiniMax-M3 on whatever backend this machine can use.",
        epilog=EXIT_CODES,
    )
    top.add_argument("--version", action=_Version, nargs=0, help="show the version and exit")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=Parser)
    parsers: dict[str, Parser] = {}
    for name, (summary, fill) in COMMANDS.items():
        parsers[name] = commands.add_parser(name, help=summary, description=summary[0].upper() + summary[1:] + ".")
        fill(parsers[name])
    parsers |= conform_arguments.add(parsers["conform"], Parser)
    return top, parsers


def _is_prompt(word: str) -> bool:
    """Whether argparse would take a word for an argument and not for a flag."""
    return not word.startswith("-") or word == "-" or " " in word


def _first_flag(words: Sequence[str]) -> str:
    return next((word for word in words if word.startswith("-")), words[0])


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line.

    Raises: SystemExit with code 2 (and a message on standard error) for a wrong command line, 0 after --help and
    --version.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    top, parsers = build()
    if not words:
        top.print_help(sys.stderr)
        raise SystemExit(2)
    if not words[0].startswith("-") and words[0] not in parsers:
        near = nearest(words[0], parsers)
        hint = f"did you mean '{near}'?" if near else f"commands are {', '.join(parsers)}"
        top.error(f"unknown command '{words[0]}'; {hint}")
    args, extra = top.parse_known_args(words)
    if args.command == "run" and args.checkpoint is None and len(extra) == 1 and _is_prompt(extra[0]):
        # argparse gives the first word to PROMPT when a flag stands between the two: `run CKPT --raw PROMPT`.
        args.checkpoint, args.prompt, extra = args.prompt, extra[0], []
    if extra:
        parser = parsers[conform_arguments.name_of(args)]
        word = _first_flag(extra)
        if not word.startswith("-"):
            parser.error(
                f"unexpected argument '{word}'" + ("; quote a prompt that has spaces" if args.command == "run" else "")
            )
        flag = word.split("=", 1)[0]
        near = nearest(flag, parser.flags())
        parser.error(f"unknown flag '{flag}'" + (f"; did you mean '{near}'?" if near else ""))
    _check(args, parsers[conform_arguments.name_of(args)])
    return args


def _check(args: argparse.Namespace, parser: Parser) -> None:
    """Refuse combinations in which one flag would be ignored in silence."""
    if getattr(args, "merge_adapter", False) and args.adapter is None:
        parser.error("--merge-adapter says how --adapter is used; add --adapter or drop it")
    if args.command not in ("run", "chat"):
        return
    if args.command == "run" and args.system is not None and args.checkpoint is None:
        parser.error("--system goes through a chat template; the bundled nano continues text: name a checkpoint")
    if args.command == "run" and args.raw and args.system is not None:
        parser.error("--system goes through the chat template, which --raw turns off; drop one of them")
    if args.command == "run" and args.checkpoint is None and os.path.isdir(args.prompt):
        parser.error(f"'{args.prompt}' is a folder, and the argument PROMPT is missing behind it")
    if args.logprobs is not None and not args.json:
        parser.error("--logprobs has an effect only with --json; add --json or drop --logprobs")
