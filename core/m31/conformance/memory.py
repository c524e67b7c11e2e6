"""Which memory came into being while something ran, and which of it is still held.

Allocators of tensors are not Python's, so nothing that counts Python's allocations sees them. What is looked at instead
is every tensor and array that can be reached from an object that is newer than the start, or from given roots.
"""

from __future__ import annotations

import gc
import types
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

Span = tuple[int, int]
"""First address, and the one after the last."""
_OPAQUE = (types.ModuleType, type, types.FrameType, types.CodeType, str, bytes, int, float, np.dtype, torch.dtype)


@contextmanager
def only_newer() -> Iterator[None]:
    """Within, `gc.get_objects` lists what was made since the start, so that the rest of the process costs nothing."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def held(roots: Iterable[Any], *, closed: Iterable[Any] = ()) -> tuple[list[Any], list[Span]]:
    """Tensors and arrays that are reachable, and the memory that they keep alive.

    Args:
        roots: where to start.
        closed: objects that are not looked into.
    """
    seen = {id(item) for item in closed}
    found: list[Any] = []
    queue = list(roots)
    kept: list[Any] = []  # so that no identity is used twice
    while queue:
        item = queue.pop()
        if id(item) in seen or isinstance(item, _OPAQUE):
            continue
        seen.add(id(item))
        kept.append(item)
        if isinstance(item, torch.Tensor | np.ndarray):
            found.append(item)
        elif isinstance(item, types.FunctionType):  # its globals are not what it holds
            queue += [*(item.__closure__ or ()), *(item.__defaults__ or ()), *(item.__kwdefaults__ or {}).values()]
        else:
            queue += gc.get_referents(item)
    return found, [span for item in found if (span := owned(item))[0] < span[1]]


def owned(item: torch.Tensor | np.ndarray) -> Span:
    """All memory that a tensor or an array keeps alive, which may be more than it shows."""
    if isinstance(item, torch.Tensor):
        storage = item.untyped_storage()
        return storage.data_ptr(), storage.data_ptr() + storage.nbytes()
    base: Any = item.base
    if isinstance(base, torch.Tensor | np.ndarray):
        return owned(base)
    return item.ctypes.data, item.ctypes.data + item.nbytes


def shown(item: torch.Tensor | np.ndarray) -> Span:
    """From the first element to the end of the last one."""
    start = item.data_ptr() if isinstance(item, torch.Tensor) else item.ctypes.data
    size = item.element_size() if isinstance(item, torch.Tensor) else item.itemsize
    steps = item.stride() if isinstance(item, torch.Tensor) else [s // size for s in item.strides]
    if 0 in item.shape:
        return start, start
    return start, start + size * (1 + sum((n - 1) * max(s, 0) for n, s in zip(item.shape, steps, strict=True)))


def outside(spans: Iterable[Span], known: Iterable[Span]) -> int:
    """Bytes of `spans` that no span of `known` covers, each counted once."""
    edges = sorted({edge for span in (*spans, *known) for edge in span})
    index = {edge: i for i, edge in enumerate(edges)}
    marks = np.zeros(len(edges), bool)
    for group, value in ((spans, True), (known, False)):
        for low, high in group:
            marks[index[low] : index[high]] = value
    return sum(high - low for low, high, mark in zip(edges, edges[1:], marks, strict=False) if mark)


def overlap(a: Span, b: Span) -> bool:
    """Whether two spans share an address."""
    return a[0] < b[1] and b[0] < a[1]
