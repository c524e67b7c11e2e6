"""The figures as tables of Markdown, and a document whose marked parts are such tables."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, Literal

from .stats import Figure

_ENDS: tuple[Literal["value"], Literal["low"], Literal["high"]] = ("value", "low", "high")
_BLOCK = re.compile(r"(<!-- figures: (?P<name>[a-z-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def plain(figure: Figure, digits: int = 3) -> str:
    """Value and interval; where one unit was measured there is no interval."""
    return _shown(figure, f".{digits}f")


def percent(figure: Figure, digits: int = 1, sign: str = "") -> str:
    """The same times a hundred."""
    return _shown(figure, f"{sign}.{digits}f", factor=100, unit=" %")


def _shown(figure: Figure, form: str, factor: float = 1, unit: str = "") -> str:
    value, low, high = (f"{factor * figure[end]:{form}}" for end in _ENDS)
    return f"{value}{unit} [{low}, {high}]" if figure["n"] > 1 else f"{value}{unit} (n = 1)"


def change(figure: Figure) -> str:
    """A relative difference, with its sign."""
    return percent(figure, 2, "+")


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def bits_per_byte(found: dict[str, Any]) -> str:
    """Model, twin, 5-gram model and compressors."""
    rows = [("nano, as served", plain(found["model"]))]
    if "twin" in found:
        rows.append(("unquantised twin", plain(found["twin"])))
        rows.append(("nano against its twin, paired", change(found["over_twin"])))
    rows += [
        ("5-gram model over the same tokens", plain(found["five_gram"])),
        ("`xz -9e`, behind the training text", f"{found['xz_after_train']:.3f}"),
        ("`xz -9e`", f"{found['xz']:.3f}"),
        ("`gzip -9`", f"{found['gzip']:.3f}"),
    ]
    size = f"{found['files']} files, {found['bytes']:,} bytes, {found['tokens']:,} tokens"
    return f"{size}:\n\n" + _table(("", "Bits per byte"), rows)


def kv_formats(found: dict[str, Any]) -> str:
    """Formats of K and V."""
    rows = [
        (name, plain(found[name]["loss"], 4), change(found[name]["over_bfloat16"]) if name != "bfloat16" else "")
        for name in ("bfloat16", "fp8", "nvfp4")
    ]
    head = _table(("K and V", "Loss, nats per token", "Against BF16, paired"), rows)
    return f"{found['tokens']:,} tokens:\n\n{head}"


def index_formats(found: dict[str, Any]) -> str:
    """Loss and recall of index keys."""
    loss = found["loss"]
    names = ("bfloat16", "nvfp4", "int8", "fp8")
    rows = [
        (name, plain(loss[name]["loss"], 4), change(loss[name]["over_bfloat16"]) if name != "bfloat16" else "")
        for name in names
    ]
    text = f"{loss['tokens']:,} tokens from position 2,048 on:\n\n"
    text += _table(("Index keys", "Loss, nats per token", "Against BF16, paired"), rows)
    recall = []
    for span, formats in found["recall"].items():
        low, high = span.split("-")
        for name, row in formats.items():
            layers = ", ".join(f"{100 * layer['value']:.1f}" for layer in row["layers"])
            place = f"{int(low):,} to {int(high):,}"
            recall.append((place, name, percent(row["all"]), layers, f"{100 * row['chance']:.1f} %"))
    head = ("Positions", "Index keys", "Of BF16's blocks chosen", "By layer, %", "By chance")
    return f"{text}\n{_table(head, recall)}"


def dense(found: dict[str, Any]) -> str:
    """Chosen blocks against all."""
    rows = [
        ("all blocks", plain(found["dense"]["loss"], 4), ""),
        ("the 16 chosen ones", plain(found["sparse"]["loss"], 4), change(found["sparse"]["over_dense"])),
    ]
    head = _table(("Attention reads", "Loss, nats per token", "Against all, paired"), rows)
    return f"{found['tokens']:,} tokens from position 2,048 on:\n\n{head}"


def recall(found: dict[str, Any]) -> str:
    """By distance."""
    rows = []
    for distance, row in found.items():
        without = percent(row["without"]["right"]) if "without" in row else ""
        nats = "{:.2f}".format(row["with"]["nats_per_token"]["value"])
        nats += " / {:.2f}".format(row["without"]["nats_per_token"]["value"]) if without else ""
        n = str(row["with"]["right"]["n"])
        kept = percent(row["block_kept"])
        rows.append((f"{int(distance):,}", n, percent(row["with"]["right"]), without, nats, kept))
    head = ("Tokens back", "Questions", "Right, with it", "Right, without it", "Nats per token", "Its block is read")
    return _table(head, rows)


def drafting(found: dict[str, Any]) -> str:
    """Accepted tokens."""
    rows = []
    for name, kind in (("greedy", "greedy"), ("temperature 1", "temperature_1")):
        row = found[kind]
        kept = ", ".join(f"{100 * share:.0f}" for share in row["kept_at_position"])
        rows.append((name, plain(row["per_verify"], 2), f"{row['verifies']:,}", kept))
    head = ("", f"Accepted of {found['draft']}", "Verifications", "Kept at position 1, 2, ..., %")
    tail = f"{found['prompts']} texts, {found['tokens']:,} greedy tokens, of which {found['mismatches']} differ from "
    plot = "![Drafts kept by position](nano/drafting.svg)\n"
    return f"{tail}those without drafting.\n\n{_table(head, rows)}\n{plot}"


def distributions(found: dict[str, Any]) -> str:
    """Chi-square tests."""
    rows = []
    for name, row in found["pairs"].items():
        p = [f"{row[test]['p']:.3f}" for test in ("against_target", "against_plain")]
        rows.append((name, *p, f"{100 * row['kept']:.2f} %", f"{100 * row['most_kept']:.2f} %"))
    head = ("Draft and target", "p, against the target", "p, against no draft", "Kept", "Most possible")
    return f"{found['draws']:,} tokens each:\n\n{_table(head, rows)}"


def curves(found: dict[str, Any]) -> str:
    """Ends of the runs."""
    rows = []
    for name, row in found.items():
        kl = f"{row['kl']:.4f}" if "kl" in row else ""
        best = f"{row['validation']:.4f} at {row['validation_step']:,}" if "validation" in row else ""
        load = "; ".join(f"{100 * low:.1f} to {100 * high:.1f}" for low, high in row["load"].values())
        rows.append((name, f"{row['steps']:,}", f"{row['loss']:.4f}", best, kl, load))
    head = ("Run", "Steps", "Loss", "Best validation", "Divergence", "Least and greatest load by layer, %")
    text = _table(head, rows)
    if "accepted" in found.get("draft", {}):
        kept = "{accepted:.2f} at temperature 1 and {greedy:.2f} greedily".format(**found["draft"])
        text += f"\nTokens of a draft that would be kept on the text as it is: {kept}.\n"
        text += "\n![Loss of the draft head, and what is kept of its drafts](nano/draft.svg)\n"
    return text


TABLES: dict[str, Callable[[dict[str, Any]], str]] = {
    "bits-per-byte": bits_per_byte,
    "kv-formats": kv_formats,
    "index-formats": index_formats,
    "dense": dense,
    "recall": recall,
    "drafting": drafting,
    "distributions": distributions,
    "curves": curves,
}


def render(name: str, results: dict[str, Any]) -> str:
    """The table of a measurement, or why there is none."""
    if name in results["figures"]:
        return TABLES[name](results["figures"][name])
    return f"Not measured: {results['skipped'].get(name, 'not asked for')}.\n"


def source(results: dict[str, Any], where: str) -> str:
    """What the figures were measured with, and the file that holds them."""
    made = results["provenance"]
    versions, served = made["versions"], made["served"]
    size = f"{len(made['files'])} of the test split's files, Python library of {made['library']}"
    formats = f"arithmetic {served['arithmetic']}, K and V {served['kv']}, index keys {served['index']}"
    return (
        f"All figures: [{where}]({where}). Checkpoint {made['checkpoint'][:12]}, {formats}; {size}; "
        f"m31 {versions['m31']}, torch {versions['torch']}, {made['machine']}; seed {made['seed']}.\n"
    )


def filled(document: str, results: dict[str, Any], where: str) -> str:
    """The document with every `<!-- figures: NAME --> ... <!-- end -->` brought up to date.

    Args:
        document: Markdown.
        results: of `main`.
        where: their file, as the document links it; the part named "source" shows it.
    Raises:
        ValueError: a marker names no measurement, or a measurement has no marker.
    """
    marked = {match["name"] for match in _BLOCK.finditer(document)}
    if marked != {*TABLES, "source"}:
        raise ValueError(f"marked are {sorted(marked)}, measured are {sorted(TABLES)} and their source")

    def part(match: re.Match[str]) -> str:
        text = source(results, where) if match["name"] == "source" else render(match["name"], results)
        return f"{match[1]}\n{text}\n{match[3]}"

    return _BLOCK.sub(part, document)
