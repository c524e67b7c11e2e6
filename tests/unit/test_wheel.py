"""What is in the wheel, and that nothing needed at run time is missing from it."""

from __future__ import annotations

import configparser
import re
import shutil
import tomllib
import zipfile
from email import message_from_string
from pathlib import Path
from typing import Any

import pytest
from hatch_build import NanoHook
from hatchling.builders.sdist import SdistBuilder
from hatchling.builders.wheel import WheelBuilder
from pathspec import GitIgnoreSpec
from tests.support import nano

import m31
from m31.checkpoint import bundled
from m31.errors import CheckpointError, NotACheckpoint

ROOT = Path(__file__).resolve().parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]


NANO = Path("core/m31", *bundled.PLACE)
GOLDEN = {f"m31/conformance/golden/data/{path.name}" for path in ROOT.glob("core/m31/conformance/golden/data/*")}


def copied(folder: Path) -> Path:
    """The project, without the bundled checkpoint."""
    for name in ("core", "backends"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "nano", "*.pyc"))
    for name in ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE", "NOTICE", ".gitignore"):
        shutil.copyfile(ROOT / name, folder / name)
    return folder


def build(project: Path) -> zipfile.ZipFile:
    (artifact,) = WheelBuilder(str(project)).build(directory=str(project / "dist"), versions=["standard"])
    return zipfile.ZipFile(artifact)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project with a checkpoint of random weights in the place of the trained one."""
    folder = copied(tmp_path_factory.mktemp("project"))
    shutil.copytree(nano.small_nano(tmp_path_factory.mktemp("nano")), folder / NANO)
    return folder


@pytest.fixture(scope="module")
def wheel(project: Path) -> zipfile.ZipFile:
    return build(project)


def metadata_file(wheel: zipfile.ZipFile, name: str) -> str:
    (path,) = [path for path in wheel.namelist() if re.fullmatch(rf"m31-[^/]+\.dist-info/{name}", path)]
    return wheel.read(path).decode()


def test_every_source_file_is_in_the_wheel_and_nothing_else(project: Path, wheel: zipfile.ZipFile) -> None:
    expected = {
        path.relative_to((project / package).parent).as_posix()
        for package in PACKAGES
        for path in (project / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".pyc"
    }
    packed = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert packed == expected


def test_data_files_are_there(wheel: zipfile.ZipFile) -> None:
    names = set(wheel.namelist())
    for package in PACKAGES:
        name = Path(package).name
        assert f"{name}/py.typed" in names
        assert f"{name}/__init__.py" in names
        if name != "m31":
            assert f"{name}/backend.toml" in names, "without its manifest a backend is not even listed"


def test_no_tests_and_no_weights_but_the_nanos(project: Path, wheel: zipfile.ZipFile) -> None:
    names = wheel.namelist()
    assert not [name for name in names if "test" in name.split("/")[0]]
    weights = {name for name in names if name.endswith(".safetensors")} - GOLDEN
    assert weights == {f"m31/data/nano/{path.name}" for path in (project / NANO).glob("*.safetensors")} != set()
    assert {"m31/data/nano/LICENSE", "m31/data/nano/nano.json"} <= set(names)


def test_without_its_checkpoint_nothing_is_built(tmp_path: Path) -> None:
    project = copied(tmp_path)
    with pytest.raises(NotACheckpoint, match="make nano-install"):
        build(project)
    with pytest.raises(NotACheckpoint, match="make nano-install"):
        list(SdistBuilder(str(project)).build(directory=str(project / "dist"), versions=["standard"]))
    assert not [path for path in project.rglob("*") if path.name.endswith((".whl", ".tar.gz"))]
    hook = NanoHook(str(project), {}, None, None, "", "wheel")
    hook.initialize("editable", {})  # what `make` installs from a source tree; it may lack the checkpoint
    with pytest.raises(NotACheckpoint):
        hook.initialize("standard", {})


def test_with_a_damaged_one_neither(project: Path, tmp_path: Path) -> None:
    whole = Path(shutil.copytree(project, tmp_path / "project", ignore=shutil.ignore_patterns("dist")))
    with (whole / NANO / "tokenizer.json").open("ab") as handle:
        handle.write(b" ")
    with pytest.raises(CheckpointError, match=r"is not what nano\.json says"):
        build(whole)


def test_licence_and_notice(wheel: zipfile.ZipFile) -> None:
    assert "Apache License" in metadata_file(wheel, "licenses/LICENSE")
    assert "Weights that you load with m31 carry the licence of their" in metadata_file(wheel, "licenses/NOTICE")
    assert message_from_string(metadata_file(wheel, "METADATA"))["License-Expression"] == "Apache-2.0"


def test_entry_points_lead_to_packages_of_the_wheel(wheel: zipfile.ZipFile) -> None:
    parser = configparser.ConfigParser()
    parser.read_string(metadata_file(wheel, "entry_points.txt"))
    assert dict(parser["console_scripts"]) == {"m31": "m31.cli.main:main"}
    backends = dict(parser["m31.backends"])
    assert set(backends) == {Path(p).name.removeprefix("m31_") for p in PACKAGES if Path(p).name != "m31"}
    for name, target in backends.items():
        module, _, attribute = target.partition(":")
        assert module == f"m31_{name}"
        assert attribute in wheel.read(f"{module}/__init__.py").decode(), f"{module} does not define {attribute}"


def test_version_is_one(wheel: zipfile.ZipFile) -> None:
    metadata = message_from_string(metadata_file(wheel, "METADATA"))
    assert metadata["Version"] == PROJECT["project"]["version"] == m31.__version__


def test_every_backend_is_known_to_every_tool() -> None:
    """A new backend adds its root to the wheel, to mypy and to ruff; the three lists agree."""
    packages = [Path(package).name for package in PACKAGES]
    roots = [str(Path(package).parent) for package in PACKAGES]
    assert sorted(str(p.parent.relative_to(ROOT)) for p in ROOT.glob("backends/*/m31_*/")) == sorted(roots[1:])
    assert PROJECT["tool"]["mypy"]["packages"] == packages
    assert PROJECT["tool"]["mypy"]["mypy_path"] == roots
    assert PROJECT["tool"]["ruff"]["src"] == [*roots, "tests"]


def test_checkpoints_are_never_ignored() -> None:
    """hatchling leaves ignored files out of the wheel without a word, so a bundled checkpoint would be missing."""
    spec = GitIgnoreSpec.from_lines((ROOT / ".gitignore").read_text().splitlines())
    for name in ("model.safetensors", "model.safetensors.index.json", "backend.toml", "py.typed", "tokenizer.json"):
        assert not spec.match_file(f"core/m31/data/nano/{name}")
    assert spec.match_file(".venv/bin/python"), "the check reads the file at all"
