"""House rules that a machine can check: sizes, names that do not belong here, docstrings, documents that are true."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import m31.errors

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__)
SOURCES = ("core", "backends", "tests", "benchmarks", "examples", "tools")
MAX_LINES = 500

# What a device is called belongs into manifests and data files. Digits may follow a word (gfx950) and underscores and
# other signs separate words (cuda_version); letters do not (barracuda).
VENDOR_WORDS = (
    *("nvidia", "amd", "intel", "cuda", "rocm", "hip", "nvml", "kfd", "cublas", "cutlass", "cudnn", "tensorrt"),
    *("hopper", "blackwell", "rubin", "mi355x", "mi355", "mi350x", "mi300x", "h100", "h200", "b200", "b300"),
    *("gb200", "gb300", "gfx", "marlin"),
)
VENDOR = re.compile(
    rf"(?<![a-z0-9])(?:lib)?({'|'.join(VENDOR_WORDS)}|sm_?\d{{2,3}}[a-z]?)(?:\d+[a-z]?)?(?![a-z])", re.IGNORECASE
)
# Where a vendor's word is allowed in core/, and why. Planning data files may name any.
VENDOR_EXCEPTIONS = {
    "core/m31/sdk/vendors.toml": "data: which libraries and files tell what hardware is there",
    "core/m31/sdk/accelerators.py": "speaks the vendors' management interfaces, whose names are theirs",
}


def tree(*tops: str) -> Iterator[Path]:
    """Files of the checkout below the given folders (the whole checkout if none), without generated ones."""
    for top in tops or (".",):
        for folder, below, names in os.walk(ROOT / top):
            generated = {"build", "dist", "__pycache__", "node_modules"}
            below[:] = sorted(d for d in below if d not in generated and (d == ".ci" or not d.startswith(".")))
            for name in sorted(names):
                if not name.endswith((".pyc", ".safetensors")) and name != ".git":
                    yield Path(folder, name)


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return ""  # not a text file


def python_files(*tops: str) -> Iterator[Path]:
    return (path for path in tree(*tops) if path.suffix == ".py")


def test_the_walk_sees_the_checkout() -> None:
    seen = {relative(path) for path in tree()}
    assert {"pyproject.toml", ".ci/run", "core/m31/errors.py", "core/m31/py.typed", "docs/decisions/README.md"} <= seen


def test_files_are_short() -> None:
    counted = {relative(path): len(text_of(path).splitlines()) for path in python_files(*SOURCES)}
    assert {path: lines for path, lines in counted.items() if lines > MAX_LINES} == {}


def vendor_words(text: str) -> set[str]:
    return {match.group(0).lower() for match in VENDOR.finditer(text)}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("runs on NVIDIA", {"nvidia"}),
        ("torch.cuda.is_available()", {"cuda"}),
        ("cuda_version, libcuda.so", {"cuda", "libcuda"}),
        ("sm_100a or sm90 or gfx950", {"sm_100a", "sm90", "gfx950"}),
        ("MI355X beats H200", {"mi355x", "h200"}),
        ("a barracuda is on a ship, chips, amdahl, hopperesque, tips, small", set()),
    ],
)
def test_the_vendor_check_itself(text: str, words: set[str]) -> None:
    assert vendor_words(text) == words


def test_core_names_no_vendor() -> None:
    found = {}
    for path in tree("core"):
        name = relative(path)
        if name in VENDOR_EXCEPTIONS or (name.startswith("core/m31/planning/") and path.suffix != ".py"):
            continue
        if words := vendor_words(text_of(path)):
            found[name] = words
    assert found == {}


def test_vendor_exceptions_are_needed() -> None:
    unneeded = [name for name in VENDOR_EXCEPTIONS if not vendor_words(text_of(ROOT / name))]
    assert unneeded == []


# Spelt in two halves, so that this file does not break its own rule.
FOREIGN = (
    *(r"(?<![\w.])/wo" + r"rk/", r"/tm" + r"p/w\b", r"/opt/(?:whe" + r"els|py" + r"pi)"),
    *(r"(?<![\w.])/(?:ro" + r"ot|home)/\w", r"py" + r"pi\.org", r"python" + r"hosted"),
    *(r"pytorch\.or" + r"g/whl", r"registry\.np" + r"mjs", r"\bissu" + r"es show\b"),
    *(r"\bANCHO" + r"RS\.md", r"\bBU" + r"GS\.md", r"\bKERN" + r"ELS\.md", r"\bPE" + r"RF\.md"),
)


def test_nothing_of_the_workshop_is_left_in_the_repository() -> None:
    """No path of the machine on which something was written, no package index, no private document."""
    pattern = re.compile("|".join(FOREIGN))
    found = {relative(p): match.group(0) for p in tree() if (match := pattern.search(text_of(p)))}
    assert found == {}


def test_nothing_is_left_to_do() -> None:
    pattern = re.compile(r"\b(?:TO" + r"DO|FIX" + r"ME|X" + r"XX)\b")
    found = {relative(p): match.group(0) for p in tree(*SOURCES) if (match := pattern.search(text_of(p)))}
    assert found == {}
    assert [relative(p) for p in python_files("core", "backends") if "NotImplementedError" in text_of(p)] == []


def undocumented(source: str, name: str) -> list[str]:
    """Public things at the top of a module, and the module itself, that have no docstring."""
    module = ast.parse(source)
    missing = [] if ast.get_docstring(module) else [name]
    for node in module.body:
        public = isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if public and not node.name.startswith("_") and not ast.get_docstring(node):
            missing.append(f"{name}: {node.name}")
    return missing


def test_the_docstring_check_itself() -> None:
    source = '"""m"""\ndef a(): ...\ndef b():\n    "b"\nclass C: ...\ndef _d(): ...\n'
    assert undocumented(source, "m") == ["m: a", "m: C"]
    assert undocumented("x = 1", "m") == ["m"]


def test_public_things_have_docstrings() -> None:
    found = [item for path in python_files("core", "backends") for item in undocumented(text_of(path), relative(path))]
    assert found == []


def test_every_error_is_raised_somewhere_and_tested() -> None:
    bases = {base for kind in errors() for base in kind.__mro__[1:]}
    code = "\n".join(text_of(p) for p in python_files("core", "backends") if p.name not in ("errors.py", "__init__.py"))
    tests = "\n".join(text_of(path) for path in python_files("tests") if path != HERE)
    leaves = [kind.__name__ for kind in errors() if kind not in bases]
    assert [name for name in leaves if not re.search(rf"\b{name}\b", code)] == []
    assert [name for name in leaves if not re.search(rf"\b{name}\b", tests)] == []


def errors() -> list[type[m31.errors.M31Error]]:
    """Every class of m31.errors."""
    classes = [value for value in vars(m31.errors).values() if isinstance(value, type)]
    return [kind for kind in classes if issubclass(kind, m31.errors.M31Error)]


def test_environment_variables_are_documented() -> None:
    pattern = re.compile(r"\bM31_[A-Z_]+\b")
    used = {name for path in tree("core", "backends") for name in pattern.findall(text_of(path))}
    documented = set(re.findall(r"^\| `(M31_[A-Z_]+)` \|", (ROOT / "docs/environment.md").read_text(), re.MULTILINE))
    assert used == documented


def test_documents_name_targets_that_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for document in ("README.md", "CONTRIBUTING.md", ".ci/run", ".pre-commit-config.yaml", "docs/environment.md"):
        text = (ROOT / document).read_text()
        named = set(
            re.findall(r"^\$ make ([a-z-]+)|^make ([a-z-]+)|`make ([a-z-]+)`|entry: make ([a-z-]+)", text, re.MULTILINE)
        )
        assert {word for words in named for word in words if word} <= targets, document


def test_links_in_documents_lead_somewhere() -> None:
    broken = []
    for path in tree():
        if path.suffix == ".md":
            for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text_of(path)):
                if not (path.parent / target).exists():
                    broken.append(f"{relative(path)}: {target}")
    assert broken == []


def test_scripts_are_executable() -> None:
    for name in (".ci/run", "tools/venv.sh"):
        assert os.access(ROOT / name, os.X_OK), name
