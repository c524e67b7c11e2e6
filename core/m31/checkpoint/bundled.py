"""The checkpoint that comes with m31: the nano, a small model of the M3.1 architecture that continues Python code.

It lies in the package as data, with `nano.json`, which lists every other file with its size and digest. The build of
a wheel loads this file alone and refuses to go on unless `check` is content, so it imports nothing but the errors.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from m31.errors import CheckpointError, NotACheckpoint

NAME = "bundled nano"
PLACE = ("data", "nano")  # in the package m31
MANIFEST = "nano.json"
LICENCE = "LICENSE"
MAX_BYTES = 16_000_000  # all files together
NEEDED = (
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"),
    LICENCE,
)
_VERSION = 1
_extracted: dict[str, Path] = {}


def folder() -> Path:
    """The folder of the bundled checkpoint. Of a package in an archive, a copy that lives as long as the process.

    Raises:
        NotACheckpoint: this source tree does not have it.
    """
    place = resources.files("m31")
    for part in PLACE:
        place = place / part
    if not (place / MANIFEST).is_file():
        raise NotACheckpoint(
            "the bundled nano is not in this source tree",
            where=str(place),
            expected="its trained weights, which every release of m31 has",
            fix="give a checkpoint folder; or train the nano (m31 train core/m31/training/nano.toml), then "
            "`make nano-install`",
        )
    if isinstance(place, Path):
        return place
    if "nano" not in _extracted:
        above = Path(tempfile.mkdtemp(prefix="m31-nano-"))
        atexit.register(shutil.rmtree, above, ignore_errors=True)
        _extract(place, above / "nano")
        _extracted["nano"] = above / "nano"
    return _extracted["nano"]


def _extract(source: Traversable, target: Path) -> None:
    """Copy a folder out of an archive (`importlib.resources.as_file` takes folders from Python 3.12 on only)."""
    target.mkdir()
    for entry in source.iterdir():
        if entry.is_dir():
            _extract(entry, target / entry.name)
        else:
            (target / entry.name).write_bytes(entry.read_bytes())


def manifest(place: Path, about: Mapping[str, Any]) -> dict[str, Any]:
    """What `nano.json` of a folder says: `about`, and bytes and SHA-256 of every other file."""
    files = {name: {"bytes": path.stat().st_size, "sha256": _sha256(path)} for name, path in _files(place).items()}
    return {"version": _VERSION, "about": dict(about), "files": files}


def check(place: Path) -> dict[str, Any]:
    """The content of `nano.json`, if the folder is what it says, complete, licensed and small enough.

    Raises:
        NotACheckpoint: there is no such folder.
        CheckpointError: a file is missing, unlisted or changed, or together they are larger than `MAX_BYTES`.
    """
    path = place / MANIFEST
    try:
        said: dict[str, Any] = json.loads(path.read_bytes())
        listed: dict[str, Any] = said["files"]
    except FileNotFoundError as exc:
        raise NotACheckpoint(
            f"has no {MANIFEST}", where=str(place), expected="the bundled nano", fix="run `make nano-install`"
        ) from exc
    except (OSError, ValueError, KeyError, TypeError) as exc:
        raise _wrong(path, f"cannot be read ({exc})") from exc
    found = _files(place)
    missing = sorted({*NEEDED, *listed} - set(found))
    if missing or not any(name.endswith(".safetensors") and "/" not in name for name in found):
        raise _wrong(place, f"has no {missing[0] if missing else '*.safetensors'}")
    if unlisted := sorted(set(found) - set(listed)):
        raise _wrong(place, f"holds {unlisted[0]}, which {MANIFEST} does not list")
    if said != manifest(place, said.get("about", {})):
        now = manifest(place, {})["files"]
        changed = [name for name in listed if listed[name] != now[name]]
        raise _wrong(place / changed[0] if changed else path, f"is not what {MANIFEST} says")
    size = path.stat().st_size + sum(entry["bytes"] for entry in listed.values())
    if size > MAX_BYTES:
        raise _wrong(place, f"has {size:,} bytes", expected=f"at most {MAX_BYTES:,}")
    return said


def _wrong(path: Path, what: str, expected: str = "what `make nano-install` wrote") -> CheckpointError:
    return CheckpointError(
        what, where=str(path), expected=expected, fix="restore the folder, or run `make nano-install` again"
    )


def _files(place: Path) -> dict[str, Path]:
    """Every file but `nano.json`, by its name relative to the folder; sorted."""
    found = {}
    for here, folders, names in os.walk(place):
        folders.sort()
        for name in sorted(names):
            path = Path(here, name)
            found[path.relative_to(place).as_posix()] = path
    found.pop(MANIFEST, None)
    return dict(sorted(found.items()))


def _sha256(path: Path) -> str:
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()
