"""L4: a checkpoint of the user's, as far as the backend and the reference can hold it. The same criterion as L3."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from m31.conformance import agreement
from m31.conformance.bench import Bench
from m31.conformance.item import Evidence, Item, Verdict
from m31.conformance.levels.forms import prompt
from m31.conformance.rig import Forms
from m31.errors import RequestError
from m31.sdk.manifest import Manifest

_TEXTS = (
    "The first step of a long calculation is to write down what is known, and in which units.",
    "def median(values):\n    ordered = sorted(values)\n    middle = len(ordered) // 2\n",
    "Der Fluss war breit und langsam, und am anderen Ufer brannte ein einziges Licht.",
)
_RANDOM = 160  # tokens of a text of random ones: two pages


def items(manifest: Manifest, folder: Path | None = None) -> Iterator[Item]:
    """Short texts on the backend's own formats; nothing without a folder.

    Args:
        manifest: of the backend.
        folder: the checkpoint, on the machine that runs and on the one that judges.
    """
    if folder is None:
        return
    case = f"L4/agreement/{folder.resolve().name}"
    yield Item(
        id=case,
        level="L4",
        subject="agreement",
        format=manifest.formats.kv[0],
        criterion="agreement",
        claims=(),
        attributes={"checkpoint": folder.name},
        execute=partial(_logits, folder),
        judge=partial(_judge, case, folder),
        seconds=60,
    )


def prompts(folder: Path) -> Sequence[Sequence[int]]:
    """Three texts, where the checkpoint has a tokenizer, and one of random tokens.

    Raises:
        RequestError: the folder is no checkpoint that can be opened.
    """
    from m31.checkpoint import Checkpoint
    from m31.text.tokenizer import Tokenizer

    if not folder.is_dir():
        raise RequestError(f"there is no folder {folder}", where="--checkpoint", expected="a checkpoint folder")
    text = Checkpoint.open(folder).config.text
    found: list[Sequence[int]] = [prompt("L4/random", _RANDOM, text.vocab_size)]
    if (folder / "tokenizer.json").exists():
        tokenizer = Tokenizer.load(folder, vocab_size=text.vocab_size, bos=text.bos_token_id, eos=text.eos_token_ids)
        found += [tokenizer.encode(line, special=False) for line in _TEXTS]
    return [list(ids) for ids in found if len(ids) > 1]


def _logits(folder: Path, bench: Bench) -> Evidence:
    return agreement.run(bench, folder, Forms(), prompts(folder))


def _judge(case: str, folder: Path, evidence: Evidence) -> Verdict:
    return agreement.judge(case, folder, prompts(folder), evidence)
