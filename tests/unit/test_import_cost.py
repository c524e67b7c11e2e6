"""`import m31` is cheap: what it loads is counted, not timed; a clock on a busy machine proves nothing (BUG-92)."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from sdk_fakes import ROOT, answer, home_dist, plugin, run_python

import m31
from m31 import sdk

HEAVY = ("torch", "numpy", "pydantic", "pydantic_core", "stevedore", "packaging", "safetensors", "tokenizers", "jinja2")


def loaded_by(statement: str, *sites: Path, cwd: Path) -> list[str]:
    code = f"""
    import json, sys
    before = set(sys.modules)
    {statement}
    print(json.dumps(sorted(set(sys.modules) - before)))
    """
    modules: list[str] = answer(code, *sites, cwd=cwd)
    return modules


def test_bug_92_the_top_package_loads_its_errors_and_nothing_else(tmp_path: Path) -> None:
    """BUG-92: scanning every installed distribution at import cost each start 0.3 s."""
    home_dist(tmp_path)
    plugin(tmp_path, "spy", "raise RuntimeError('a plugin was imported')")
    ours = [m for m in loaded_by("import m31", tmp_path, cwd=tmp_path) if m.split(".")[0] == "m31"]
    assert ours == ["m31", "m31.errors"]


@pytest.mark.parametrize("statement", ["import m31", "import m31, m31.sdk", "import m31; dir(m31); m31.__version__"])
def test_nothing_heavy_is_loaded(tmp_path: Path, statement: str) -> None:
    modules = {m.split(".")[0] for m in loaded_by(statement, cwd=tmp_path)}
    assert not modules & {*HEAVY, "importlib_metadata", "ctypes", "subprocess", "asyncio"}
    assert "importlib.metadata" not in loaded_by(statement, cwd=tmp_path)


def test_deciding_loads_neither_torch_nor_a_plugin(tmp_path: Path) -> None:
    home_dist(tmp_path)
    package = plugin(tmp_path, "spy", "raise RuntimeError('a plugin was imported')", score=90)
    modules = loaded_by("import m31; assert m31.backend.name == 'spy', m31.backend", tmp_path, cwd=tmp_path)
    assert not {package, "torch", "numpy", "stevedore", "m31_reference", "m31_hopper"} & set(modules)


def test_version_is_that_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert m31.__version__ == project["version"]


def test_public_names() -> None:
    assert {"backend", "load", "use", "M31Error", "__version__"} <= set(m31.__all__) <= set(dir(m31))
    with pytest.raises(AttributeError, match="module 'm31' has no attribute 'bakend'"):
        _ = m31.bakend  # type: ignore[attr-defined]


def test_every_public_name_of_the_sdk_resolves() -> None:
    assert sdk.__all__ == ["API_VERSION", *(name for names in sdk._HOMES.values() for name in names)]
    for name in sdk.__all__:
        assert getattr(sdk, name) is not None
    assert set(sdk.__all__) <= set(dir(sdk))
    with pytest.raises(AttributeError, match=r"module 'm31\.sdk' has no attribute 'Backnd'"):
        _ = sdk.Backnd  # type: ignore[attr-defined]


def test_an_uninstalled_checkout_says_what_to_do(tmp_path: Path) -> None:
    """Running from a folder on the path, without installed metadata: no traceback, and the way out in the text."""
    code = """
    import importlib.metadata
    importlib.metadata.distributions = lambda: iter(())
    import m31
    print(m31.backend)
    """
    done = run_python(code, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("no backend: no backend is installed, not even the reference that comes with m31")
    assert "install m31 with pip" in done.stdout
