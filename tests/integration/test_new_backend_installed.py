"""What `m31 new-backend` writes, installed with m31 into an environment of its own: its tests, L0, and a run."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(command: list[str], cwd: Path) -> str:
    env = {"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "HOME": str(cwd)}
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=cwd, timeout=280, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


@pytest.mark.nightly
def test_a_new_backend_is_installed_and_conforms(tmp_path: Path) -> None:
    folder = tmp_path / "venv"
    run([sys.executable, "-m", "venv", "--without-pip", str(folder)], tmp_path)
    python, command = str(folder / "bin" / "python"), str(folder / "bin" / "m31")
    (site,) = folder.glob("lib/python*/site-packages")
    # What both need is borrowed. Paths of a .pth file come after the environment's own, and theirs are not read.
    borrowed = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (site / "borrowed.pth").write_text("\n".join(sorted(borrowed)) + "\n")
    pip = [sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check", "install", "-q"]
    pip += ["--no-deps", "--no-build-isolation", "--no-index"]
    run([*pip, str(ROOT)], tmp_path)
    run([command, "new-backend", "acme"], tmp_path)
    made = tmp_path / "m31-acme-backend"
    run([*pip, str(made)], tmp_path)

    listed = run([command, "backends"], tmp_path)
    assert any(line.startswith("acme ") and "m31-acme-backend 0.1.0" in line for line in listed.splitlines())
    run([python, "-m", "pytest", "-q", "-p", "no:cacheprovider"], made)
    run([command, "demo", "model"], tmp_path)
    asked = [command, "run", "model", "Hello", "--raw", "--temperature", "0", "--max-tokens", "4", "--backend"]
    assert run([*asked, "acme"], tmp_path) == run([*asked, "reference"], tmp_path)
