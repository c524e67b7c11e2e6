"""Checks a document against the part of JSON Schema that our schema uses, so that `verify` needs no library."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
}
KNOWN = frozenset(
    ("$schema", "$id", "$ref", "$defs", "title", "description", "type", "enum", "const", "properties", "required")
) | frozenset(("additionalProperties", "propertyNames", "items", "pattern", "minimum", "maximum", "format"))
"""Keywords that are understood; a test holds the published schema to them."""


def faults(value: Any, schema: dict[str, Any], root: dict[str, Any] | None = None, at: str = "$") -> Iterator[str]:
    """What is wrong with a document, in words; nothing if it follows the schema."""
    root = schema if root is None else root
    if "$ref" in schema:
        schema = root["$defs"][schema["$ref"].removeprefix("#/$defs/")]
    kinds = schema.get("type", [])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if kinds and not any(_is(value, kind) for kind in kinds):
        yield f"{at}: {type(value).__name__}, expected {' or '.join(kinds)}"
        return
    if "enum" in schema and value not in schema["enum"]:
        yield f"{at}: {value!r} is none of {schema['enum']}"
    if "const" in schema and value != schema["const"]:
        yield f"{at}: {value!r}, expected {schema['const']!r}"
    if isinstance(value, str) and "pattern" in schema and not re.search(schema["pattern"], value):
        yield f"{at}: '{value}' does not match {schema['pattern']}"
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if is_number and not schema.get("minimum", value) <= value <= schema.get("maximum", value):
        yield f"{at}: {value} is out of range"
    if isinstance(value, dict):
        yield from _object(value, schema, root, at)
    if isinstance(value, list) and "items" in schema:
        for number, entry in enumerate(value):
            yield from faults(entry, schema["items"], root, f"{at}[{number}]")


def _is(value: Any, kind: str) -> bool:
    if isinstance(value, bool) and kind in ("integer", "number"):
        return False
    return isinstance(value, _TYPES[kind])


def _object(value: dict[str, Any], schema: dict[str, Any], root: dict[str, Any], at: str) -> Iterator[str]:
    known = schema.get("properties", {})
    for key in schema.get("required", []):
        if key not in value:
            yield f"{at}: without '{key}'"
    others = schema.get("additionalProperties", True)
    for key, entry in value.items():
        if "propertyNames" in schema:
            yield from faults(key, schema["propertyNames"], root, f"{at}: key")
        if key in known:
            yield from faults(entry, known[key], root, f"{at}.{key}")
        elif others is False:
            yield f"{at}: unknown key '{key}'"
        elif isinstance(others, dict):
            yield from faults(entry, others, root, f"{at}.{key}")
