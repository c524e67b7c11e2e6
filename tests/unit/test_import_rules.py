"""The import rules hold, and the checker notices when they do not."""

from __future__ import annotations

import ast
from pathlib import Path

import import_rules
import pytest
from import_rules import backend_faults, core_faults, files

ROOT = Path(__file__).resolve().parents[2]
GRAPH_PUBLIC = frozenset({"Graph", "StepBatch"})


def exported(path: Path) -> frozenset[str]:
    """`__all__` of a module, read without importing it."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets):
            return frozenset(ast.literal_eval(node.value))
    return frozenset()


def test_core() -> None:
    faults = [
        fault
        for path, module, is_package in files(ROOT / "core")
        for fault in core_faults(path.read_text(), module, is_package=is_package)
    ]
    assert faults == []


def test_backends() -> None:
    public = exported(ROOT / "core/m31/graph/__init__.py")
    roots = sorted(path for path in (ROOT / "backends").iterdir() if path.is_dir())
    assert [root.name for root in roots] != []
    faults = [
        fault
        for root in roots
        for path, module, is_package in files(root)
        for fault in backend_faults(path.read_text(), module, is_package=is_package, graph_public=public)
    ]
    assert faults == []


def test_every_room_of_the_design_is_in_the_table() -> None:
    rooms = {path.parent.name for path in (ROOT / "core/m31").glob("*/__init__.py")}
    assert rooms <= set(import_rules.DIRECT) | set(import_rules.TOP)


def test_the_rule_has_no_cycle_and_is_what_contributing_says() -> None:
    assert all(room not in import_rules.ALLOWED[room] for room in import_rules.DIRECT if room != "errors")
    text = (ROOT / "CONTRIBUTING.md").read_text()
    for room, below in import_rules.DIRECT.items():
        if room in ("errors", "config", "formats", "conformance", "text", "vision"):
            continue  # rows that the page shares or words differently
        assert f"| `{room}` | {', '.join(f'`{other}`' for other in below)} |" in text


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("m31.config.model", "import m31.formats"),
        ("m31.config.model", "from m31 import graph"),
        ("m31.formats.nvfp4", "from ..config import Model"),
        ("m31.ops.norm.spec", "from m31.config import Text"),
        ("m31.ops.norm.spec", "def f():\n    from m31.graph import StepBatch"),
        ("m31.graph.model", "from m31.sdk import Backend"),
        ("m31.graph.model", "if TYPE_CHECKING:\n    from m31.engine import Engine"),
        ("m31.sdk.backend", "import m31.engine.scheduler"),
        ("m31.sdk.loading", "import importlib\nimportlib.import_module('m31_reference')"),
        ("m31.sdk.loading", "import_module(f'm31.engine.{name}')"),
        ("m31.sdk.loading", "__import__('m31.cli')"),
        ("m31.text.template", "from m31.engine.sampling import SamplingParams"),
        ("m31.engine.engine", "from m31.cli import main"),
        ("m31.engine.engine", "import m31"),  # the front knows the engine, not the other way round
        ("m31.engine.engine", "from m31_reference import kernels"),
        ("m31.checkpoint.reader", "from m31.graph import Graph"),
        ("m31.errors", "from m31.config import Model"),
        ("m31", "from m31.cli.main import main"),
        ("m31.kitchen.sink", "x = 1"),
    ],
)
def test_the_checker_finds_a_fault_in_core(module: str, source: str) -> None:
    assert len(core_faults(source, module, is_package=module == "m31")) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("m31.config.model", "from m31.errors import ConfigError\nimport pydantic"),
        ("m31.config", "from m31.config.model import Model"),
        ("m31.config.model", "from .schema import Strict\nfrom . import rules"),
        ("m31.engine.engine", "from m31.graph import Graph\nfrom m31.config import Model\nfrom m31.ops import norm"),
        ("m31.cli.run", "import m31\nfrom m31.engine.sampling import SamplingParams"),
        ("m31", "def f():\n    from m31.engine.api import load"),
    ],
)
def test_the_checker_accepts_what_is_allowed_in_core(module: str, source: str) -> None:
    assert core_faults(source, module, is_package=module in ("m31", "m31.config")) == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("m31_reference.attention", "from m31.engine import Engine"),
        ("m31_reference.attention", "from m31.graph.model import forward"),
        ("m31_reference.attention", "import m31.graph"),
        ("m31_reference.attention", "from m31.graph import secret"),
        ("m31_reference.attention", "from m31.sdk._internal import x"),
        ("m31_reference.attention", "from m31.ops import _private"),
        ("m31_reference.attention", "import m31"),
        ("m31_reference.attention", "from m31_triton import kernels"),
        ("m31_hopper.moe", "from m31_blackwell import moe"),
        ("m31_hopper.moe", "from m31.checkpoint import reader"),
    ],
)
def test_the_checker_finds_a_fault_in_a_backend(module: str, source: str) -> None:
    assert len(backend_faults(source, module, is_package=False, graph_public=GRAPH_PUBLIC)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("m31_reference.attention", "import torch\nfrom m31.sdk import Session\nfrom m31.ops.attention import SPEC"),
        ("m31_reference.attention", "from m31.graph import Graph, StepBatch\nfrom m31.errors import NoKernel"),
        ("m31_reference.attention", "from .tables import rope\nfrom m31.config import Text\nimport m31.formats"),
        ("m31_hopper.moe", "from m31_triton import kernels"),
    ],
)
def test_the_checker_accepts_what_is_allowed_in_a_backend(module: str, source: str) -> None:
    assert backend_faults(source, module, is_package=False, graph_public=GRAPH_PUBLIC) == []
