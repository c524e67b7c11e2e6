"""The public names and signatures of the backend contract, as text.

    python -m tests.support.api > tests/unit/api-1.txt

What is listed: every name in `__all__` of the public rooms, the modules of `m31.formats` that backends call, and the
public members and fields of each class. A change of this text is a change of the contract: see docs/sdk.md, "Versions".
"""

from __future__ import annotations

import importlib
import inspect
import re
import types
from collections.abc import Iterator
from typing import Any

ROOMS = ("m31.sdk", "m31.graph", "m31.ops", "m31.conformance", "m31.errors")
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
        return re.sub(r" at 0x[0-9a-f]+", "", str(inspect.signature(value)).replace("'", ""))
    except (TypeError, ValueError):
        return "(...)"


def _members(cls: type) -> Iterator[str]:
    own = {name for base in cls.__mro__ if base.__module__.startswith("m31") for name in vars(base)}
    if "__init__" in own and not getattr(cls, "model_fields", None):  # dataclasses included: keywords, defaults, order
        yield f"    __init__{_signature(cls.__init__)}"  # type: ignore[misc]
    fields: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        if base.__module__.startswith("m31"):
            fields |= inspect.get_annotations(base)
    fields = {name: kind for name, kind in fields.items() if not name.startswith("_") and name != "model_config"}
    for name, kind in fields.items():
        yield f"    {name}: {_type(kind)}"
    abstract = getattr(cls, "__abstractmethods__", frozenset())
    for name in sorted(own - set(fields)):
        value = inspect.getattr_static(cls, name)
        if name.startswith("_"):
            continue
        mark = "abstract " if name in abstract else ""
        if isinstance(value, property):
            yield f"    {mark}{name}: property{_signature(value.fget)}"
        elif callable(value) or isinstance(value, classmethod | staticmethod):
            yield f"    {mark}{name}{_signature(getattr(cls, name))}"


def _type(kind: Any) -> str:
    return kind if isinstance(kind, str) else str(kind).replace("typing.", "")


def _arg(arg: Any) -> str:
    return f"{arg.name}: {arg.layout} {arg.dtype}" if arg.kind == "data" else f"{arg.name}: {arg.kind}"


def _describe(name: str, value: Any) -> Iterator[str]:
    if isinstance(value, type):
        bases = ", ".join(base.__name__ for base in value.__bases__ if base is not object)
        yield f"  class {name}({bases})"
        yield from _members(value)
    elif inspect.isfunction(value):
        yield f"  def {name}{_signature(value)}"
    elif type(value).__name__ in ("OpSpec", "FusedOp"):
        inputs, outputs = (", ".join(_arg(arg) for arg in args) for args in (value.inputs, value.outputs))
        yield f"  op {value.name}({inputs}) -> {outputs}; {', '.join(value.attrs)}"
    elif isinstance(value, dict):
        yield f"  {name} = {{{', '.join(map(str, value))}}}"
        if name in ("ADAPTER", "ALL", "DRAFT", "FUSED"):
            for key in value:
                yield from _describe(key, value[key])
    elif isinstance(value, str | int | float):
        yield f"  {name}: {type(value).__name__} = {value!r}"
    else:  # an alias such as Literal["fp8", ...], a union, a callable's type
        shown = _type(value)
        yield f"  {name} = {shown}" if " at 0x" not in shown else f"  {name}: {type(value).__name__}"


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
