"""Who may import whom (DESIGN.md §2), checked on the syntax tree, so that imports inside functions and
`if TYPE_CHECKING` count as well: the rule is about what a room knows, not about when it learns it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# Room -> rooms that it may name. What those may name, it may name as well: a type of `config` travels through `graph`.
DIRECT: dict[str, tuple[str, ...]] = {
    "errors": (),
    "config": (),
    "formats": (),
    "checkpoint": ("config", "formats"),
    "ops": ("formats",),
    "parallel": ("ops",),
    "graph": ("ops", "config", "parallel"),
    "sdk": ("ops", "formats", "config", "graph"),
    "text": ("config",),
    "vision": ("config",),
    "engine": ("graph", "sdk", "checkpoint", "text", "vision"),
    "training": ("graph", "ops", "formats", "checkpoint", "engine"),
    "conformance": ("engine", "training"),
}
TOP = ("planning", "server", "cli")  # may import every room; no room imports them
FRONT = ""  # m31/__init__.py and other modules beside the rooms: what users import
BACKEND_ROOMS = ("sdk", "ops", "formats", "config", "errors", "graph")
GPU_BACKENDS = ("m31_hopper", "m31_blackwell", "m31_rubin", "m31_mi355x")


@dataclass(frozen=True)
class Import:
    """One imported name: `module` as written after resolving dots, `names` of a from-import (empty for `import x`)."""

    module: str
    names: tuple[str, ...]
    line: int

    def targets(self) -> Iterator[str]:
        """Dotted paths that this import may mean: `from m31 import sdk` names m31.sdk."""
        if not self.names:
            yield self.module
        for name in self.names:
            yield f"{self.module}.{name}"


def imports(source: str, module: str, *, is_package: bool) -> list[Import]:
    """All imports of a file, wherever they stand, and literal arguments of `import_module` and `__import__`."""
    package = module if is_package else module.rpartition(".")[0]
    found: list[Import] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [Import(alias.name, (), node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            path = ".".join([*base, *([node.module] if node.module else [])])
            found.append(Import(path, tuple(alias.name for alias in node.names), node.lineno))
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant | ast.JoinedStr):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            text = _leading_text(node.args[0])
            if name in ("import_module", "__import__") and text:
                found.append(Import(text, (), node.lineno))
    return found


def _leading_text(node: ast.Constant | ast.JoinedStr) -> str:
    first = node.values[0] if isinstance(node, ast.JoinedStr) and node.values else node
    return first.value.rstrip(".") if isinstance(first, ast.Constant) and isinstance(first.value, str) else ""


def closure() -> dict[str, frozenset[str]]:
    """Room -> every room that it may name."""
    allowed: dict[str, frozenset[str]] = {}

    def resolve(room: str) -> frozenset[str]:
        if room not in allowed:
            below = frozenset(DIRECT[room])
            allowed[room] = below.union({"errors"}, *(resolve(other) for other in below))
        return allowed[room]

    for room in DIRECT:
        resolve(room)
    everything = frozenset(DIRECT) | frozenset(TOP)
    return allowed | {top: everything | {FRONT} for top in TOP} | {FRONT: everything - {"server", "cli"}}


ALLOWED = closure()


def room_of(path: str) -> str | None:
    """The room of a dotted path below m31 (`m31.graph.model` -> graph), FRONT for other modules, None outside m31."""
    parts = path.split(".")
    if parts[0] != "m31":
        return None
    if path == "m31.__main__":  # `python -m m31` is the command line's second door
        return "cli"
    return parts[1] if len(parts) > 1 and (parts[1] in DIRECT or parts[1] in TOP) else FRONT


def core_faults(source: str, module: str, *, is_package: bool) -> list[str]:
    """What a file of core/m31 imports and may not."""
    room = room_of(module)
    faults = []
    if room is None or (room == FRONT and len(module.split(".")) > 2):
        return [f"{module}: belongs to no room; add it to the table in tests/unit/import_rules.py and to DESIGN.md §2"]
    for found in imports(source, module, is_package=is_package):
        for target in found.targets():
            other = room_of(target)
            if target.split(".")[0].startswith("m31_"):
                faults.append(f"{module}:{found.line}: core imports the backend package {target}")
            elif other is not None and other != room and other not in ALLOWED[room]:
                faults.append(f"{module}:{found.line}: {room or 'the front'} may not import {target}")
    return faults


def backend_faults(source: str, module: str, *, is_package: bool, graph_public: frozenset[str]) -> list[str]:
    """What a file of a backend package imports and may not.

    `graph_public` is what `m31.graph` exports: a backend may import those names from it and none of its modules.
    """
    own = module.split(".")[0]
    friends = {own, "m31_triton"} if own in GPU_BACKENDS else {own}
    faults = []
    for found in imports(source, module, is_package=is_package):
        for target in found.targets():
            parts = target.split(".")
            if parts[0].startswith("m31_") and parts[0] not in friends:
                faults.append(f"{module}:{found.line}: {own} may not import {target}")
            if parts[0] != "m31":
                continue
            room = room_of(target)
            if room not in BACKEND_ROOMS:
                faults.append(f"{module}:{found.line}: a backend may not import {target}; the SDK is m31.sdk")
            elif any(part.startswith("_") for part in parts):
                faults.append(f"{module}:{found.line}: {target} is private")
            elif room == "graph" and not (found.module == "m31.graph" and parts[2:3] and parts[2] in graph_public):
                faults.append(f"{module}:{found.line}: {target} is not a public name of m31.graph")
    return faults


def files(root: Path) -> Iterator[tuple[Path, str, bool]]:
    """(path, dotted module, is it a package) of each Python file below a source root."""
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        yield path, ".".join(parts[:-1] if is_package else parts), is_package
