"""Rule `layout-id`: what a cache does with pages that are not its own, and with those that are."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from m31.errors import ContractViolation, LayoutMismatch
from m31.sdk.backend import ExportedPages, KVCache, KVLayout

_PAGES = 5
Bytes = dict[str, torch.Tensor]


def check_layout_id(layout: KVLayout, *, layers: int = 1) -> None:
    """Rule `layout-id`: exported pages come back under their own id and under no other.

    Every page is filled with other made-up bytes, and all bytes of all pages are compared after each step: a refusal
    writes nothing, an import writes what it was given, a copy copies, and what was exported does not change afterwards.
    Poisoned pages read as NaN.

    Args:
        layout: of a session.
        layers: how many of its first layers are read.

    Raises:
        ContractViolation: says which of these is not so.
    """
    cache = layout.allocate(_PAGES)
    cache.poison(range(_PAGES))
    blank = cache.export(range(_PAGES))
    name = re.sub(r":v(\d+)", lambda m: f":v{int(m.group(1)) + 1}", blank.layout_id, count=1)
    if name == blank.layout_id or blank.layout_id != layout.layout_id:
        _broken(layout, f"exports under '{name}'", "the layout's own id, ...:v<number>:...")
    if not blank.tensors or any(len(t) != _PAGES for t in blank.tensors.values()):
        _broken(layout, "exports no component, or one without a row for each page", "components [pages, ...]")
    made = _made_up(blank, seed=1)
    cache.import_(made, range(_PAGES))
    _require(layout, cache, _bytes(made), "does not hold what was imported")
    _poison(layout, cache, _bytes(made), layers)
    cache.import_(made, range(_PAGES))

    other = _made_up(blank, seed=2)
    for pages, places, what in _bad(other, name):
        if _taken(lambda pages=pages, places=places: cache.import_(pages, places)):  # type: ignore[misc]
            _broken(layout, f"takes pages {what}", "LayoutMismatch")
        _require(layout, cache, _bytes(made), f"refuses pages {what}, and has written to some before")

    expected = _bytes(made)
    kept = cache.export([3, 1])
    cache.import_(_rows(other, [4, 0]), [1, 4])
    for at, source in ((1, 4), (4, 0)):
        for part, rows in _bytes(other).items():
            expected[part][at] = rows[source]
    _require(layout, cache, expected, "does not hold what was imported over some pages")
    was = {part: rows[[3, 1]] for part, rows in _bytes(made).items()}
    if not _same(_bytes(kept), was):
        _broken(layout, "exported pages that changed when the cache did", "copies of the pages, in the order asked for")
    cache.copy_pages([4, 1], [2, 0])
    for part in expected:
        expected[part][[2, 0]] = expected[part][[4, 1]]
    _require(layout, cache, expected, "does not hold what was copied from page to page")


def _bad(other: ExportedPages, name: str) -> list[tuple[ExportedPages, Sequence[int], str]]:
    one = _rows(other, [0])
    first, *rest = one.tensors
    short = {part: one.tensors[part] for part in rest}
    cut = {**one.tensors, first: one.tensors[first][..., :-1].contiguous()}
    return [
        (replace(one, layout_id=name), [1], "of another version"),
        (replace(one, layout_id="m31-nobody:v1"), [1], "of another maker"),
        (replace(one, tensors=short), [1], "without one of their components"),
        (replace(one, tensors=cut), [1], "with a component of another shape"),
        (replace(one, tensors={**one.tensors, "more": one.tensors[first]}), [1], "with one component more"),
        (replace(one, count=2), [1, 2], "fewer than they say"),
        (_rows(other, [0, 1]), [1], "more than there are places for"),
        (_rows(other, [0, 1]), [2, 2], "for one place twice"),
    ]


def _poison(layout: KVLayout, cache: KVCache, held: Bytes, layers: int) -> None:
    cache.poison([1])
    for layer in range(layers):
        for kind, values in cache.read(layer, 1).items():
            if not bool(values.isnan().all()):
                _broken(layout, f"poisoned, reads {kind} of layer {layer} as numbers", "NaN everywhere")
    now = _bytes(cache.export(range(_PAGES)))
    rest = [page for page in range(_PAGES) if page != 1]
    if not _same({part: rows[rest] for part, rows in now.items()}, {part: rows[rest] for part, rows in held.items()}):
        _broken(layout, "poisons pages that were not named", "page 1 alone")


def _made_up(blank: ExportedPages, *, seed: int) -> ExportedPages:
    """Other bytes in every page, all of them small: finite numbers in every format."""
    rng = torch.Generator().manual_seed(seed)
    tensors = {}
    for part, tensor in blank.tensors.items():
        row = tensor[0].numel() * tensor.element_size()
        raw = torch.randint(1 + 48 * (seed - 1), 48 * seed, (len(tensor), row), generator=rng, dtype=torch.uint8)
        tensors[part] = raw.view(tensor.dtype).reshape(tensor.shape).to(tensor.device)
    return replace(blank, tensors=tensors)


def _rows(pages: ExportedPages, which: list[int]) -> ExportedPages:
    return replace(pages, count=len(which), tensors={part: t[which] for part, t in pages.tensors.items()})


def _bytes(pages: ExportedPages) -> Bytes:
    return {
        part: t.detach().cpu().contiguous().reshape(-1).view(torch.uint8).reshape(len(t), -1).clone()
        for part, t in pages.tensors.items()
    }


def _same(a: Bytes, b: Bytes) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[part], b[part]) for part in a)


def _require(layout: KVLayout, cache: KVCache, expected: Bytes, what: str) -> None:
    if not _same(_bytes(cache.export(range(_PAGES))), expected):
        _broken(layout, what, "the bytes of every page, of all layers, to be those")


def _broken(layout: KVLayout, what: str, expected: str) -> Any:
    raise ContractViolation("layout-id", what, where=f"KV layout {layout.layout_id}", expected=expected)


def _taken(action: Callable[[], None]) -> bool:
    try:
        action()
    except LayoutMismatch:
        return False
    return True
