"""A small corpus for tests: some files of the installed library, under their own paths, which decide their splits."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from pathlib import Path

from sdk_fakes import ROOT

from m31.training import corpus
from m31.training.corpus import Corpus

# Files that 3.11, 3.12 and 3.13 have; validation and test ones first. The split of a path never changes.
FILES = (
    *("hashlib.py", "stat.py", "warnings.py"),
    *("lzma.py", "symtable.py", "reprlib.py"),
    *("argparse.py", "ast.py", "bisect.py", "calendar.py", "copy.py", "csv.py", "enum.py", "heapq.py", "queue.py"),
    *("json/decoder.py", "json/encoder.py", "json/scanner.py", "textwrap.py", "threading.py", "token.py", "typing.py"),
)


def small_library(folder: Path) -> Path:
    """A folder that looks like a small standard library."""
    stdlib = Path(sysconfig.get_path("stdlib"))
    for name in FILES:
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(stdlib / name, target)
    return folder


def small_corpus(folder: Path) -> Corpus:
    """The corpus of `small_library`."""
    return corpus.load(small_library(folder), min_bytes=1, min_split_bytes=1)


def other_environment() -> dict[str, str]:
    """For a child process whose hashes, locale and threads differ from those here."""
    names = ("OMP_NUM_THREADS", "PATH", "HOME", "TMPDIR")
    kept = {name: os.environ[name] for name in names if name in os.environ}
    seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    sources = os.pathsep.join([str(ROOT / "core"), *(path for path in sys.path if path)])
    return kept | {"PYTHONHASHSEED": seed, "LC_ALL": "C", "PYTHONPATH": sources, "RAYON_NUM_THREADS": "2"}
