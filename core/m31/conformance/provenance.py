"""Where a report comes from: versions, sources, machine and settings. Nothing about who or which host."""

from __future__ import annotations

import datetime
import hashlib
import importlib.metadata as metadata
import os
import platform
import site
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from m31.sdk.manifest import Manifest

SUITE_VERSION = 1
"""Counts changes of items or criteria after which an earlier verdict does not carry over."""

UNTRACKED = "untracked"
"""In the place of a commit where no repository knows a package that was not installed either."""

_ENVIRONMENT = ("M31_", "OMP_", "MKL_", "OPENBLAS_", "KMP_", "NUMBA_", "PYTORCH_", "TORCH_", "TRITON_")
_ENVIRONMENT_ENDS = ("_VISIBLE_DEVICES", "_LAUNCH_BLOCKING")


def environment() -> dict[str, str]:
    """Variables that can change what is computed."""
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith(_ENVIRONMENT) or name.endswith(_ENVIRONMENT_ENDS)
    }


def manifest_hash(manifest: Manifest) -> str:
    """SHA-256 of what a manifest says, whatever its comments and the order of its keys."""
    return hashlib.sha256(manifest.model_dump_json().encode()).hexdigest()


def checkout(folder: Path) -> dict[str, Any] | None:
    """Commit of the git checkout that tracks a folder, and whether the folder has changes; None for an installed
    package, whose version says what it is. A folder that is neither has changes that no commit has: all of it."""

    def git(*words: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", "-C", str(folder), *words], capture_output=True, text=True, timeout=20, check=False
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    commit = git("rev-parse", "HEAD")
    if commit is None or not git("ls-files", "--", "."):  # an installed package may lie inside some repository
        return None if _installed(folder) else {"commit": UNTRACKED, "dirty": True}
    status = git("status", "--porcelain", "--", ".")
    return {"commit": commit, "dirty": status is None or bool(status)}


def _installed(folder: Path) -> bool:
    places = {sysconfig.get_path(kind) for kind in ("purelib", "platlib")} | {
        *site.getsitepackages(),
        site.getusersitepackages(),
    }
    return any(folder.resolve().is_relative_to(Path(place).resolve()) for place in places)


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def backend_facts(backend: str, manifest: Manifest) -> dict[str, Any]:
    """Which backend, from where."""
    from m31.conformance.running.setup import decision_of
    from m31.sdk.discovery import manifest_path

    facts: dict[str, Any] = {"name": manifest.name, "summary": manifest.summary}
    if ":" in backend:
        facts |= {"distribution": None, "version": None, "entry": backend}
    else:
        chosen = decision_of(backend).require()
        facts |= {"distribution": chosen.distribution, "version": chosen.version, "entry": chosen.entry}
    folder = manifest_path(facts["entry"]).parent
    return facts | {"manifest_sha256": manifest_hash(manifest), "checkout": checkout(folder)}


def software(packages: Sequence[str] = ()) -> dict[str, Any]:
    """Versions of what computes."""
    names = dict.fromkeys(("torch", "numpy", *packages))
    return {
        "m31": sys.modules["m31"].__version__,  # the package that this module is of; no room imports it
        "checkout": checkout(Path(__file__).parents[1]),
        "suite": SUITE_VERSION,
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in names},
    }


def machine() -> dict[str, Any]:
    """The hardware and the operating system, as `m31 backends` sees them."""
    from m31 import sdk

    seen = sdk.this_machine()
    return {
        "system": f"{platform.system()} {platform.release()}",
        "architecture": seen.cpu.arch,
        "processor": seen.cpu.model,
        "cores": seen.cpu.cores,
        "devices": [str(device) for device in seen.devices],
    }


def now() -> str:
    """The time, in UTC, to the second."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def command_line() -> list[str]:
    """Of this process, without the folder of the program."""
    return [Path(sys.argv[0]).name, *sys.argv[1:]]


def gather(
    backend: str, manifest: Manifest, *, command: Sequence[str], device: str | None, salt: str
) -> dict[str, Any]:
    """All of it, for a run that begins now."""
    return {
        "backend": backend_facts(backend, manifest),
        "software": software(tuple(manifest.packages)),
        "machine": machine(),
        "device": device,
        "environment": environment(),
        "started": now(),
        "command": list(command) or command_line(),
        "salt": salt,
    }
