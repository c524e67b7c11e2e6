"""Put a trained nano into the package: python tools/nano_install.py [RUN] [--draft FOLDER] [--to FOLDER]

RUN is the folder of the run (build/nano); its checkpoint goes with a licence file and nano.json to core/m31/data/nano,
whose old content is replaced only when the new one is complete, small enough and opens as a checkpoint. That the run
belongs to nano.toml and to this interpreter's standard library is verified: its fingerprint is computed again.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from m31.checkpoint import Checkpoint, bundled
from m31.checkpoint.draft import FOLDER as DRAFT
from m31.checkpoint.workfolder import sync_folder
from m31.config.jsonfile import read_object
from m31.errors import M31Error, TrainingStateError
from m31.training import config as training_config
from m31.training import corpus
from m31.training.data import provided
from m31.training.state import STATE
from m31.training.trainer import CHECKPOINT

ROOT = Path(__file__).resolve().parents[1]
CONFIG = ROOT / "core/m31/training/nano.toml"
LICENCE = """\
The weights of the nano, and the files beside them, are part of m31 and carry its licence: Apache-2.0.

They were trained from random numbers, by m31's own trainer, on two kinds of text:
- the sources of Python's standard library ({text}),
  Copyright (c) Python Software Foundation and their contributors, under the PSF License Agreement
  (https://docs.python.org/3/license.html). Its tokenizer was trained on the same text. The folder holds none of these
  sources; like every language model, this one can write short passages that resemble what it was trained on;
- synthetic documents that m31 makes itself of such sources and of random names and numbers.

No weight, token or sentence of any other model is in them.
"""


def provenance(run: Path) -> dict[str, Any]:
    """How the weights came about, once it is certain that `run` is a finished run of nano.toml on this Python's text.

    Raises:
        TrainingStateError: it is another run, or not finished.
    """
    state = read_object(run / STATE, error=TrainingStateError)
    if state.get("step") != state.get("total") or not (run / CHECKPOINT).is_dir():
        raise TrainingStateError(
            f"the run is at step {state.get('step')} of {state.get('total')}",
            where=str(run),
            expected="a finished run with a checkpoint",
            fix="continue it with `m31 train`",
        )
    config = training_config.load(CONFIG)
    text = corpus.load()
    data = provided(config.data.provider, config.data.options, where=f"{CONFIG}: [data]")
    if state.get("fingerprint") != config.fingerprint(data.identity):
        raise TrainingStateError(
            "the run belongs to another configuration or text",
            where=str(run / STATE),
            expected=f"a run of {CONFIG.name} on the standard library of {text.python}",
            fix="use the interpreter that trained it, and its nano.toml",
        )
    return {
        "text": f"the standard library of {text.python}",
        "corpus": text.digest,
        "fingerprint": state["fingerprint"],
        "steps": state["step"],
        "best_step": state["best_step"],
        "validation_loss": state["best_loss"],
    }


def install(checkpoint: Path, target: Path, about: Mapping[str, Any], draft: Path | None = None) -> int:
    """Make `target` the checkpoint with its licence and manifest, all or nothing; the bytes of all files.

    Args:
        checkpoint: a folder in the official layout; a draft head in it goes along.
        target: replaced.
        about: for nano.json; its `text` is named in the licence file.
        draft: folder of a draft head, instead of the checkpoint's own.

    Raises:
        CheckpointError: it is no checkpoint, lacks a file, or is too large.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    above = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    fresh, old = above / "new", above / "old"
    try:
        shutil.copytree(checkpoint, fresh, copy_function=shutil.copyfile)
        if draft is not None:
            shutil.rmtree(fresh / DRAFT, ignore_errors=True)
            shutil.copytree(draft, fresh / DRAFT, copy_function=shutil.copyfile)
        (fresh / bundled.LICENCE).write_text(LICENCE.format(text=about["text"]), encoding="utf-8")
        content = bundled.manifest(fresh, about)
        (fresh / bundled.MANIFEST).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        bundled.check(fresh)
        opened = Checkpoint.open(fresh)
        if opened.notes or (draft is not None and opened.draft is None):
            raise TrainingStateError("opens with remarks: " + "; ".join(opened.notes), where=str(checkpoint))
        for folder in (fresh, *(path for path in fresh.rglob("*") if path.is_dir())):
            sync_folder(folder)
        if target.exists():
            os.rename(target, old)
        os.rename(fresh, target)
        sync_folder(target.parent)
    finally:
        if old.exists() and not target.exists():
            os.rename(old, target)
        shutil.rmtree(above, ignore_errors=True)
    return sum(path.stat().st_size for path in target.rglob("*") if path.is_file())


def main(argv: Sequence[str] | None = None) -> int:
    """Parse and install; the exit code."""
    parser = argparse.ArgumentParser(description="Put a trained nano into the package.")
    parser.add_argument("run", nargs="?", type=Path, default=ROOT / "build/nano", help="folder of the run")
    parser.add_argument("--draft", type=Path, help="folder of its draft head (default: the checkpoint's own, if any)")
    parser.add_argument("--to", type=Path, default=ROOT / "core/m31" / Path(*bundled.PLACE), help="where")
    args = parser.parse_args(argv)
    try:
        size = install(args.run / CHECKPOINT, args.to, provenance(args.run), args.draft)
    except M31Error as error:
        sys.stderr.write(f"nano_install: {error}\n")
        return 1
    sys.stderr.write(f"nano_install: wrote {args.to}: {size:,} bytes of at most {bundled.MAX_BYTES:,}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
