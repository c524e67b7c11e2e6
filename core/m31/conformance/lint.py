"""What a backend's source may name of the core (docs/sdk.md), and whether its manifest will be found (BUG-80, BUG-81).

Read from the syntax tree: nothing of the backend is imported.
"""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from m31.errors import ManifestError, RequestError
from m31.sdk.discovery import GROUP
from m31.sdk.manifest import FILE_NAME, Manifest, normalise, read_manifest
from m31.sdk.version import API_VERSION

PACKAGES = ("m31.sdk", "m31.graph", "m31.ops", "m31.conformance")
"""Public by what they list in `__all__`."""
MODULES = (
    *("m31", "m31.errors", "m31.ops.fused", "m31.ops.body"),
    *(f"m31.formats.{name}" for name in ("arithmetic", "e2m1", "e8m0", "fp8", "int8", "layout", "mxfp8", "nvfp4")),
    *("m31.formats.scales", "m31.formats.transforms"),
)
"""Public in everything whose name has no underscore."""
_FOR_ANNOTATIONS = "m31.config"
_ANOTHER = "m31_"
"""How packages of backends are called."""


@dataclass(frozen=True)
class Finding:
    """One place that a backend's author should change, or know of.

    Args:
        kind: an error breaks with a release of m31, or keeps the backend from being found; a note may.
        path, line: where; line 0 is the whole file.
        what: the rule that is broken, in the words of the place.
        instead: what to write; "" if there is nothing public for it.
    """

    kind: Literal["error", "note"]
    path: Path
    line: int
    what: str
    instead: str = ""

    def __str__(self) -> str:
        place = f"{self.path}:{self.line}" if self.line else str(self.path)
        return f"{place}: {self.kind}: {self.what}" + (f"; {self.instead}" if self.instead else "")


def lint(path: Path) -> list[Finding]:
    """Everything there is to say about a backend.

    Args:
        path: a project folder (with pyproject.toml), a package folder, or a folder with packages.

    Raises:
        RequestError: there is no package, or its pyproject.toml cannot be read.
    """
    if not path.is_dir():
        raise RequestError(f"there is no folder '{path}'", expected="a project or a package")
    project = _project(path)
    packages = _packages(path, project)
    if not packages:
        raise RequestError(f"there is no Python package in '{path}'", expected="a folder with __init__.py in it")
    found: list[Finding] = []
    for package in packages:
        for file in sorted(package.rglob("*.py")):
            found += _source(file, [p.name for p in packages])
        found += _manifest(package, project)
    if project is not None:
        found += _entries(path, project, packages)
    return list(dict.fromkeys(found))  # one line may import several names of one module


# --- which packages -------------------------------------------------------------------------------------------------


def _project(path: Path) -> dict[str, Any] | None:
    file = path / "pyproject.toml"
    if not file.is_file():
        return None
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise RequestError(f"not valid TOML: {error}", where=str(file), fix="repair the file") from error


def _packages(path: Path, project: dict[str, Any] | None) -> list[Path]:
    if (path / "__init__.py").is_file():
        return [path]
    roots = [path, path / "src"]
    if project is not None and _listed(project):
        return [p for name in _listed(project).values() for root in roots if (p := root / name).is_dir()]
    return sorted({init.parent for root in roots for init in root.glob("*/__init__.py") if init.parent.name != "tests"})


def _listed(project: dict[str, Any]) -> dict[str, str]:
    """Backend name -> package of its entry point."""
    entries = project.get("project", {}).get("entry-points", {}).get(GROUP, {})
    return {name: str(target).partition(":")[0].partition(".")[0] for name, target in entries.items()}


# --- source ---------------------------------------------------------------------------------------------------------


def _source(path: Path, own: Collection[str]) -> Iterator[Finding]:
    try:
        tree = ast.parse(path.read_text(), filename=str(path))
    except (SyntaxError, UnicodeDecodeError) as error:
        yield Finding("error", path, getattr(error, "lineno", 0) or 0, f"no Python source: {error}")
        return
    modules = set()
    for node in ast.walk(tree):
        for name, attribute in _named(node):
            root = name.partition(".")[0]
            if root == "m31":
                yield from _judged(path, getattr(node, "lineno", 0), name, attribute)
            elif root.startswith(_ANOTHER) and root not in own:
                yield Finding(
                    "error",
                    path,
                    getattr(node, "lineno", 0),
                    f"imports the backend '{root}'",
                    f"list the op under fallback in {FILE_NAME}",
                )
        if isinstance(node, ast.Import | ast.ImportFrom):
            modules |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names if _of_core(node, alias)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            base = node.value
            while isinstance(base, ast.Attribute):
                base = base.value
            if isinstance(base, ast.Name) and base.id in modules:
                yield Finding("error", path, node.lineno, f"uses '{ast.unparse(node)}', a private name of m31")


def _of_core(node: ast.Import | ast.ImportFrom, alias: ast.alias) -> bool:
    name = node.module or "" if isinstance(node, ast.ImportFrom) and not node.level else alias.name
    return name == "m31" or name.startswith("m31.")


def _named(node: ast.AST) -> Iterator[tuple[str, str]]:
    """(module, attribute) that a node imports; the attribute is "" for a whole module."""
    if isinstance(node, ast.Import):
        yield from ((alias.name, "") for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
        yield from ((node.module, alias.name) for alias in node.names)
    elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
        function = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if function in ("import_module", "__import__") and isinstance(node.args[0].value, str):
            yield node.args[0].value, ""


def _judged(path: Path, line: int, module: str, name: str) -> Iterator[Finding]:
    full = f"{module}.{name}" if name else module
    if module == _FOR_ANNOTATIONS and name:
        if name != "Model":
            yield Finding("note", path, line, f"'{full}' is not held by the version of the API")
    elif any(part.startswith("_") and part != "__version__" for part in full.split(".")):
        yield Finding("error", path, line, f"imports '{full}', a private name of m31", _instead(name))
    elif not _public(module, name):
        yield Finding("error", path, line, f"imports '{full}', which is no part of the SDK", _instead(name))


def _public(module: str, name: str) -> bool:
    if module in MODULES:
        return not name or module != "m31" or f"m31.{name}" in (*PACKAGES, *MODULES) or name in _all("m31")
    if module in PACKAGES:
        return not name or name == "*" or name in _all(module) or f"{module}.{name}" in MODULES
    return module == "m31.formats" and (not name or f"m31.formats.{name}" in MODULES)


def _all(package: str) -> tuple[str, ...]:
    return tuple(getattr(import_module(package), "__all__", ()))


def _instead(name: str) -> str:
    """Where the name is public."""
    homes = [package for package in PACKAGES if name in _all(package)]
    return f"import it from {homes[0]}" if name and homes else ""


# --- manifest -------------------------------------------------------------------------------------------------------


def _manifest(package: Path, project: dict[str, Any] | None) -> Iterator[Finding]:
    file = package / FILE_NAME
    if not file.is_file():
        if project is None or package.name in _listed(project).values():
            yield Finding("error", file, 0, "there is no manifest", "write it: docs/sdk.md, The manifest")
        return
    try:
        manifest = read_manifest(file)
    except ManifestError as error:
        yield Finding("error", file, 0, " ".join(str(error).split()))
        return
    yield from _claims(file, manifest)
    if project is not None:
        yield from _packaged(package, project)
        names = [name for name, target in _listed(project).items() if target == package.name]
        if names and normalise(names[0]) != manifest.name:
            yield Finding("error", file, 0, f"the name is '{manifest.name}', and the entry point '{names[0]}'")


def _claims(file: Path, manifest: Manifest) -> Iterator[Finding]:
    from packaging.specifiers import SpecifierSet

    from m31 import ops
    from m31.ops.fused import FUSED

    if not SpecifierSet(manifest.requires).contains(API_VERSION):
        yield Finding("error", file, 0, f"requires API {manifest.requires}, and this m31 has {API_VERSION}")
    known = {*ops.ALL, *ops.DRAFT, *ops.ADAPTER, *FUSED}
    for name in (*(() if manifest.ops == "all" else manifest.ops), *manifest.fallback):
        if name not in known:
            yield Finding("error", file, 0, f"there is no op '{name}'")
    if manifest.ops != "all":
        needed = [n for n in ops.ALL if n not in ("all_reduce", "all_gather")]
        missing = [name for name in needed if name not in {*manifest.ops, *manifest.fallback}]
        if missing and manifest.ops:
            more = ", ".join(missing)
            yield Finding("note", file, 0, f"neither served nor left to the reference, so that no model runs: {more}")


def _packaged(package: Path, project: dict[str, Any]) -> Iterator[Finding]:
    """Whether the manifest gets into the wheel."""
    tool, system = project.get("tool", {}), str(project.get("build-system", {}).get("build-backend", "setuptools"))
    file = package / FILE_NAME
    if system.startswith("setuptools"):
        data = tool.get("setuptools", {}).get("package-data", {})
        globs = [*data.get(package.name, ()), *data.get("*", ())]
        if not any(g in (FILE_NAME, "*.toml", "*", "**/*") for g in globs):
            yield Finding(
                "error",
                file,
                0,
                "does not get into the wheel",
                f'add [tool.setuptools.package-data] {package.name} = ["{FILE_NAME}"] to pyproject.toml',
            )
    elif system.startswith("hatchling"):
        wheel = tool.get("hatch", {}).get("build", {}).get("targets", {}).get("wheel", {})
        packages = [Path(p).name for p in wheel.get("packages", [package.name])]
        if package.name not in packages:
            yield Finding("error", file, 0, f"the wheel has {packages}, and not '{package.name}'")


def _entries(path: Path, project: dict[str, Any], packages: list[Path]) -> Iterator[Finding]:
    """Entry points that lead somewhere."""
    file = path / "pyproject.toml"
    entries = project.get("project", {}).get("entry-points", {}).get(GROUP, {})
    if not entries:
        yield Finding("error", file, 0, f'no entry point in the group "{GROUP}"', "m31 finds backends by it")
    for name, target in entries.items():
        module, _, attribute = str(target).partition(":")
        package = next((p for p in packages if p.name == module.partition(".")[0]), None)
        if package is None:
            yield Finding("error", file, 0, f"entry point '{name}' leads to '{module}', which is not here")
            continue
        inner = package.joinpath(*module.split(".")[1:])
        source = inner / "__init__.py" if inner.is_dir() else inner.with_suffix(".py")
        if not source.is_file() or attribute not in _defined(source):
            yield Finding("error", file, 0, f"entry point '{name}' leads to '{target}', and there is no '{attribute}'")


def _defined(source: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return names
