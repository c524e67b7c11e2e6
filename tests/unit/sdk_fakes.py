"""Fake distributions, inventories and manifests for the SDK's tests."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path
from typing import Any

from m31.sdk.discovery import Candidate
from m31.sdk.inventory import Cpu, Device, Inventory
from m31.sdk.manifest import Manifest, parse_manifest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("m31", "m31_reference", "m31_cpu", "m31_triton", "m31_hopper", "m31_blackwell", "m31_rubin", "m31_mi355x")
GPU_BACKENDS = ("hopper", "blackwell", "rubin", "mi355x")

GOOD_BACKEND = """
from m31.sdk.backend import Backend

class Plugin(Backend):
    def open(self, *, device, dtype, rank, world, arithmetic, options):
        raise NotImplementedError("a test's backend is never opened")
"""


def manifest_text(name: str, /, **changes: Any) -> str:
    """A valid manifest as TOML; `changes` replace top-level keys or whole tables (None removes the key)."""
    data: dict[str, Any] = {
        "name": name,
        "summary": "a test's backend",
        "requires": ">=1.0,<2",
        "score": 50,
        "conformance": "none",
        "ops": "all",
        "fallback": [],
        "arithmetic": ["exact"],
        "options": [],
        "device": {"kind": "cpu"},
        "packages": {},
        "formats": {"compute": ["float32"], "weights": ["bfloat16"], "kv": ["bfloat16"], "index": ["bfloat16"]},
        "limits": {
            "context_tokens": 4096,
            "kv_page_tokens": 128,
            "draft_tokens": 0,
            "image": False,
            "video": False,
            "tensor_parallel": 1,
        },
    }
    data.update(changes)
    flat = {k: v for k, v in data.items() if not isinstance(v, dict) and v is not None}
    tables = {k: v for k, v in data.items() if isinstance(v, dict)}
    lines = [f"{k} = {json.dumps(v)}" for k, v in flat.items()]
    for table, content in tables.items():
        lines += [f"[{table}]", *(f"{k} = {json.dumps(v)}" for k, v in content.items())]
    return "\n".join(lines) + "\n"


def manifest(name: str, /, **changes: Any) -> Manifest:
    return parse_manifest(manifest_text(name, **changes), "test.toml")


def candidate(name: str, *, dist: str | None = None, version: str = "1.0", **fields: Any) -> Candidate:
    """A candidate as discovery would list it; without `manifest`, `failure` or `blocked` it gets a valid manifest."""
    if not {"manifest", "failure", "blocked"} & set(fields):
        fields["manifest"] = manifest(name)
    return Candidate(
        name=name,
        raw_name=name,
        entry=f"{name}_package:Plugin",
        distribution=dist or f"{name}-dist",
        version=version,
        builtin=False,
        location="somewhere",
        **fields,
    )


def shipped_manifest(name: str) -> Manifest:
    """The manifest of one of m31's own backends."""
    path = package_folder(f"m31_{name}") / f"m31_{name}" / "backend.toml"
    return parse_manifest(path.read_text(encoding="utf-8"), str(path))


def shipped_candidates() -> tuple[Candidate, ...]:
    """m31's own five, as on a machine where every required package is installed."""
    return tuple(
        candidate(name, dist="m31", version="0.1.0", manifest=shipped_manifest(name))
        for name in sorted((*GPU_BACKENDS, "reference"))
    )


def devices(count: int, vendor: str, arch: str, **fields: Any) -> tuple[Device, ...]:
    values: dict[str, Any] = {
        "name": "Board",
        "memory_bytes": 2**37,
        "driver": "580.65",
        "toolkit": "13.4",
        "uuid": None,
        "usable": True,
        "problem": None,
    }
    return tuple(Device(vendor=vendor, arch=arch, **{**values, **fields}) for _ in range(count))


def machine_with(*listed: Device) -> Inventory:
    cpu = Cpu(vendor="Test", model="Test", arch="x86_64", flags=("avx2",), affinity=4, quota=None, cores=4)
    return Inventory(cpu=cpu, devices=tuple(listed), notes=())


# --- distributions on disk ----------------------------------------------------------------------


def write_dist(
    site: Path, name: str, entries: list[tuple[str, str]], *, version: str = "1.0", meta: bool = True
) -> Path:
    """A `.dist-info` folder with entry points of the group `m31.backends`; returns the entry_points.txt."""
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    if meta:
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    lines = ["[m31.backends]", *(f"{key} = {value}" for key, value in entries)]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    return info / "entry_points.txt"


def write_package(site: Path, package: str, body: str, toml: str | None) -> Path:
    folder = site / package
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "__init__.py").write_text(textwrap.dedent(body))
    if toml is not None:
        (folder / "backend.toml").write_text(toml)
    return folder


def plugin(site: Path, name: str, body: str = GOOD_BACKEND, *, dist: str | None = None, **changes: Any) -> str:
    """A whole installed plugin; returns its package's name."""
    package = f"{name.replace('-', '_')}_package"
    write_package(site, package, body, manifest_text(name, **changes))
    write_dist(site, dist or f"{name}-dist", [(name, f"{package}:Plugin")])
    return package


def package_folder(package: str) -> Path:
    """The folder that holds a package, wherever the test run found it (checkout, editable or wheel)."""
    spec = importlib.util.find_spec(package)
    if spec is not None and spec.submodule_search_locations:
        return Path(next(iter(spec.submodule_search_locations))).parent
    base = "core" if package == "m31" else f"backends/{package.removeprefix('m31_')}"
    return ROOT / base


def home_dist(site: Path) -> None:
    """The metadata of m31 itself, as pyproject.toml declares it, so that an uninstalled checkout can be tested too."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    write_dist(site, "m31", list(project["entry-points"]["m31.backends"].items()), version=project["version"])


def run_python(code: str, *sites: Path, cwd: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run a script in a fresh interpreter that sees the given site folders first, then m31 and its backends."""
    folders = dict.fromkeys([*map(str, sites), *(str(package_folder(p)) for p in PACKAGES)])
    clean = {k: v for k, v in os.environ.items() if not k.startswith("M31_")}
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**clean, "PYTHONPATH": os.pathsep.join(folders), **environ},
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def answer(code: str, *sites: Path, cwd: Path, **environ: str) -> Any:
    """The JSON that the script printed last; fails with its standard error if it did not end well."""
    done = run_python(code, *sites, cwd=cwd, **environ)
    assert done.returncode == 0, f"status {done.returncode}\n{done.stderr}\n{done.stdout}"
    return json.loads(done.stdout.splitlines()[-1])
