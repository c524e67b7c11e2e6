"""The items of a manifest: every level's, in order, and how some of them are selected."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from m31.conformance.expression import parse
from m31.conformance.item import LEVELS, Item, Level
from m31.errors import NothingSelected, RequestError, SuiteError

if TYPE_CHECKING:
    from m31.sdk.manifest import Manifest

HOMES: dict[Level, str] = {
    "L0": "m31.conformance.levels.contract",
    "L1": "m31.conformance.levels.ops",
    "L2": "m31.conformance.levels.state",
    "L3": "m31.conformance.levels.model",
    "L4": "m31.conformance.levels.real",
}
"""Where the items of a level are made: `items(manifest)`; `items(manifest, checkpoint)` for L4, a folder's."""

SMOKE = "smoke"
"""The word of an expression for a few minutes' selection."""

SOURCE = "m31.conformance.catalog:built_in"
"""The catalog of a run, as `module:function` of what `built_in` takes and gives."""


def upto(level: str) -> tuple[Level, ...]:
    """The levels that a run of `level` has: L2 is L0, L1 and L2. Raises: RequestError where there is no such level."""
    if level not in LEVELS:
        raise RequestError(f"there is no level '{level}'", where="--level", expected=", ".join(LEVELS))
    return LEVELS[: LEVELS.index(level) + 1]


def built_in(manifest: Manifest, level: Level, checkpoint: Path | None) -> Iterator[Item]:
    """The items of m31's own suite for one level; of L4 there are some only with a checkpoint's folder."""
    if level == "L4" and checkpoint is None:
        return
    module = import_module(HOMES[level])
    yield from module.items(manifest, checkpoint) if level == "L4" else module.items(manifest)


def collect(
    manifest: Manifest,
    levels: Sequence[Level] = LEVELS,
    expression: str | None = None,
    *,
    checkpoint: Path | None = None,
    source: str = SOURCE,
) -> list[Item]:
    """Items in the order of levels, without making an array.

    Args:
        manifest: of the backend: what it claims decides which items there are.
        levels: whose items.
        expression: see `chosen`; None selects all.
        checkpoint: for L4.
        source: of the items.

    Raises:
        SuiteError: two items have one id, or an item is of another level than its id says.
        RequestError: the expression is malformed.
    """
    made = function_of(source)
    found: dict[str, Item] = {}
    for level in levels:
        for item in made(manifest, level, checkpoint):
            if item.id in found:
                raise SuiteError(f"two items have the id '{item.id}'", where="catalog", fix="report this bug")
            if item.level != level or not item.id.startswith(f"{level}/"):
                raise SuiteError(f"'{item.id}' is listed under {level}", where="catalog", fix="report this bug")
            found[item.id] = item
    return list(found.values()) if expression is None else chosen(list(found.values()), expression)


def chosen(items: Sequence[Item], expression: str) -> list[Item]:
    """The items that an expression selects, in their order: see `m31.conformance.expression`. The word `smoke` holds
    for those of `smoke(items)`.

    Raises: RequestError where it is malformed.
    """
    small = smoke(items)
    words = {item.id: f"{item.id} {SMOKE}" if item.id in small else item.id for item in items}
    if expression in words:
        return [item for item in items if item.id == expression]
    holds = parse(expression)
    return [item for item in items if holds(words[item.id])]


def smoke(items: Iterable[Item]) -> set[str]:
    """Ids of one item for every subject, format and criterion of each level: the cheapest one that has any tokens, and
    of those the one that has most."""
    least: dict[tuple[str, ...], tuple[tuple[bool, float, int], str]] = {}
    for item in items:
        size = int(item.attributes.get("tokens", item.attributes.get("rows", 1)))
        cost = (not size, item.seconds, -size)
        key = (item.level, item.subject, item.format, item.criterion)
        if key not in least or cost < least[key][0]:
            least[key] = cost, item.id
    return {name for _, name in least.values()}


def function_of(source: str) -> Callable[..., Iterator[Item]]:
    """The function that `module:function` names. Raises: SuiteError where there is none."""
    module, _, name = source.partition(":")
    try:
        found: Any = getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise SuiteError(f"cannot be imported: {error}", where=f"catalog '{source}'") from error
    made: Callable[..., Iterator[Item]] = found
    return made


def required(items: list[Item], what: str) -> list[Item]:
    """The items, if there are any. Raises: NothingSelected, since a run of nothing is no success."""
    if not items:
        raise NothingSelected("no item was selected", where=what, fix="`m31 conform list` shows what there is")
    return items


def digest(ids: Sequence[str]) -> str:
    """The identity of a catalog: two reports with the same one were asked the same things."""
    return hashlib.sha256("\n".join(ids).encode()).hexdigest()
