"""The public names and signatures of the backend contract, as text.

    python -m tests.support.api > tests/unit/api-1.txt

What is listed: every name in `__all__` of the public rooms, the modules of `m31.formats` that backends call, and the
public members and fields of each class. A change of this text is a change of the contract: see docs/sdk.md, "Versions".
"""

from __future__ import annotations

import importlib
import inspect
import types
from collections.abc import Iterator
from typing import Any

ROOMS = ("m31.sdk", "m31.graph", "m31.ops", "m31.conformance")
MODULES = (
    *("m31.formats.arithmetic", "m31.formats.e2m1", "m31.formats.e8m0", "m31.formats.fp8", "m31.formats.int8"),
    *("m31.formats.layout", "m31.formats.mxfp8", "m31.formats.nvfp4", "m31.formats.scales", "m31.formats.transforms"),
    *("m31.ops.fused", "m31.ops.body"),
)


def _names(module: types.ModuleType) -> list[str]:
    """`__all__`, or what the module defines itself."""
    if hasattr(module, "__all__"):
        return sorted(module.__all__)
    own = {
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", module.__name__) == module.__name__
    }
    return sorted(name for name in own if not isinstance(getattr(module, name), types.ModuleType))


def _signature(value: Any) -> str:
    try:
        return str(inspect.signature(value)).replace("'", "")
    except (TypeError, ValueError):
        return "(...)"


def _members(cls: type) -> Iterator[str]:
    own = {name for base in cls.__mro__ if base.__module__.startswith("m31") for name in vars(base)}
    fields: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        if base.__module__.startswith("m31"):
            fields |= inspect.get_annotations(base)
    fields = {name: kind for name, kind in fields.items() if not name.startswith("_") and name != "model_config"}
    for name, kind in fields.items():
        yield f"    {name}: {kind}"
    for name in sorted(own - set(fields)):
        value = inspect.getattr_static(cls, name)
        if name.startswith("_"):
            continue
        if isinstance(value, property):
            yield f"    {name}: property"
        elif callable(value) or isinstance(value, classmethod | staticmethod):
            yield f"    {name}{_signature(getattr(cls, name))}"


def _describe(name: str, value: Any) -> Iterator[str]:
    if isinstance(value, type):
        yield f"  class {name}"
        yield from _members(value)
    elif callable(value) and not isinstance(value, type) and inspect.isfunction(value):
        yield f"  def {name}{_signature(value)}"
    elif type(value).__name__ in ("OpSpec", "FusedOp"):
        inputs = ", ".join(f"{arg.name}: {arg.layout or arg.kind}" for arg in value.inputs)
        outputs = ", ".join(f"{arg.name}: {arg.layout or arg.kind}" for arg in value.outputs)
        yield f"  op {value.name}({inputs}) -> {outputs}; {', '.join(value.attrs)}"
    elif isinstance(value, dict):
        yield f"  {name} = {{{', '.join(map(str, value))}}}"
        if name in ("ALL", "DRAFT", "FUSED"):
            for key in value:
                yield from _describe(key, value[key])
    else:
        yield f"  {name}: {type(value).__name__}" + (f" = {value!r}" if isinstance(value, str | int | float) else "")


def snapshot() -> str:
    """The text."""
    lines: list[str] = []
    for path in (*ROOMS, *MODULES):
        module = importlib.import_module(path)
        lines.append(path)
        for name in _names(module):
            lines += _describe(name, getattr(module, name))
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(snapshot(), end="")
