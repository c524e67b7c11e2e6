"""The example backend installed with m31 into an environment of its own, and run from there."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from tests.support.numpy_example import EXAMPLE, ROOT


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The commands of a fresh environment with m31 and the example installed; what they need is borrowed from here."""
    folder = tmp_path_factory.mktemp("fresh") / "venv"
    run([sys.executable, "-m", "venv", "--without-pip", str(folder)])
    python = folder / "bin" / "python"
    (site,) = folder.glob("lib/python*/site-packages")
    # Paths in a .pth file are added after the environment's own and their .pth files are not read, so that neither this
    # environment's m31 nor its editable checkout can take the place of the one that is installed now.
    borrowed = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (site / "borrowed.pth").write_text("\n".join(sorted(borrowed)) + "\n")
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check", "--no-input"]
    run(
        [
            *pip,
            "install",
            "-q",
            "--no-deps",
            "--no-build-isolation",
            "--no-index",
            "--no-compile",
            str(ROOT),
            str(EXAMPLE),
        ]
    )
    where = run([str(python), "-c", "import m31, m31_numpy; print(m31.__file__); print(m31_numpy.__file__)"])
    assert all(line.startswith(str(folder)) for line in where.split())
    return folder / "bin"


def run(command: list[str]) -> str:
    env = {"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


# One process, since each one that computes takes seconds to start: makes a checkpoint of each kind, and has both
# backends continue the prompt on both.
_BOTH = """
import contextlib, json, sys
import m31
from m31.cli.main import main
demo, quantised, prompt = sys.argv[1:]
with contextlib.redirect_stdout(sys.stderr):
    assert main(["demo", demo]) == 0
    assert main(["convert", demo, quantised, "--format", "m31"]) == 0
said = []
for folder, form in ((demo, None), (quantised, "bfloat16")):
    for backend in ("numpy", "reference"):
        model = m31.load(folder, backend=backend, max_context=2048, kv_dtype=form, index_dtype=form)
        generation = model.generate(prompt, max_tokens=24, temperature=0, ignore_eos=True)
        list(generation.events())
        said.append((backend, model.formats["weights"], model.formats["kv"], generation.token_ids))
print(json.dumps(said))
"""


def test_installed_it_runs_beside_the_reference(environment: Path, tmp_path: Path) -> None:
    m31, python = str(environment / "m31"), str(environment / "python")
    listed = json.loads(run([m31, "backends", "--json"]))
    (mine,) = [b for b in listed["backends"] if b["name"] == "numpy"]
    assert (mine["distribution"], mine["version"], mine["builtin"]) == ("m31-numpy-backend", "0.1.0", False)
    assert listed["chosen"] == "reference", "an example is never chosen unasked"

    demo, prompt = str(tmp_path / "demo"), "The Andromeda galaxy is"
    said = json.loads(run([python, "-c", _BOTH, demo, str(tmp_path / "quantised"), prompt]))
    assert [backend for backend, *_ in said] == ["numpy", "reference"] * 2
    for (_, *mine_said), (_, *reference_said) in (said[:2], said[2:]):
        assert mine_said == reference_said
        assert len(mine_said[-1]) == 24
    assert set(said[2][1].split("+")) == {"mxfp8", "nvfp4", "bfloat16", "float32"}
    assert said[0][3] != said[2][3], "quantised weights speak otherwise"

    greedy = ["--temperature", "0", "--max-tokens", "24", "--ignore-eos", "--max-context", "2048"]
    out = run([m31, "run", demo, prompt, "--raw", "--backend", "numpy", "--json", *greedy])
    start, *events = [json.loads(line) for line in out.splitlines()]
    assert start["backend"] == {"name": "numpy", "reason": "asked for by argument"}
    assert [i for e in events if e["event"] == "token" for i in e["token_ids"]] == said[0][3]
