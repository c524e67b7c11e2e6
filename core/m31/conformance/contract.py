"""The rules of the contract that no type can state, and a check for each (docs/sdk.md).

A check returns nothing, or raises `ContractViolation` with the rule's name. They run on any session, in tree or out.
"""

from __future__ import annotations

import gc
import re
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from m31.conformance.bounds import bound
from m31.errors import ContractViolation, LayoutMismatch
from m31.graph import Kernel, OpInstance, Plan, Shard, StepBatch, StepClass
from m31.sdk.backend import ExportedPages, KVCache, KVLayout, LazyTensor, Session, StoredPart

RULES = {
    "arithmetic": "a kernel is as accurate as the arithmetic that it declares",
    "release": "prepare keeps nothing of its source alive but what the handle says that it reads in place",
    "fixed-buffers": "a plan allocates when it is made, not when it runs",
    "prepared-at-load": "which ops a backend serves depends on the kind of step, not on its size",
    "opened": "a session is what it was opened as, and answers with the types of the contract",
    "limits": "a session serves at most what its manifest declares",
    "layout-id": "pages of another layout id, version included, are refused, and nothing is written",
    "extra-outputs": "a plan of a graph with extras gives their values of its last run",
}
"""Name -> what it asks. `opened`, `limits` and `prepared-at-load` are checked wherever a checkpoint is opened and run,
`extra-outputs` where the engine drafts. Two more are enforced where they apply: a fusion that does not match as often
as the model has its body is refused by the fuse pass, and an op falls back only if the manifest lists it
(`m31.sdk.Serving`)."""


def check_linear_arithmetic(session: Session, op: OpInstance, step: StepClass, *, seed: int) -> None:
    """Rule `arithmetic`, on a projection with random float32 inputs.

    Args:
        session: that serves `op`.
        op: an instance of `linear` whose weight is plain.
        step: a class that it serves.
        seed: of weights and inputs.

    Raises:
        ContractViolation: an element is further from the float64 result than the declared arithmetic allows.
    """
    rng = np.random.default_rng(seed)
    (shape,) = (decl.shape for decl in op.slots.values())
    given = str(session.dtypes["model"]).removeprefix("torch.")
    x = _held(rng.standard_normal((16, shape[1])), session.dtypes["model"])
    w = _held(rng.standard_normal(shape), session.dtypes["model"])
    handle = session.prepare(op, {slot: _Held(decl.name, w) for slot, decl in op.slots.items()}, Shard(0, 1))
    kernel = session.kernel(op, step)
    assert isinstance(kernel, Kernel), "the caller gives an op that is served"
    out = torch.full((16, shape[0]), torch.nan, dtype=session.dtypes["model"], device=session.device)
    space = torch.empty(kernel.workspace_bytes, dtype=torch.uint8, device=session.device)
    kernel.run([out], [x.to(session.device)], handle, space if kernel.workspace_bytes else None)
    (used,) = (value.double().cpu().numpy() for value in handle.dequantise().values())
    exact = x.double().numpy()
    reference, magnitude = exact @ used.T, np.abs(exact) @ np.abs(used).T
    error = np.abs(out.double().cpu().numpy() - reference)
    allowed = bound(kernel.arithmetic, reference, magnitude, shape[1], given=given)
    excess = np.where(np.isnan(error), np.inf, error / allowed)
    if excess.max() > 1:
        at = tuple(int(i) for i in np.unravel_index(int(excess.argmax()), excess.shape))
        a = kernel.arithmetic
        raise ContractViolation(
            "arithmetic",
            f"declares {a.operands}, accumulated in {a.accumulate}, written in {a.output}, and is off by"
            f" {error[at]:.3g} at {list(at)}",
            where=f"kernel {kernel.name}",
            expected=f"at most {allowed[at]:.3g} there",
        )


def check_release(session: Session, op: OpInstance, slots: Mapping[str, LazyTensor]) -> None:
    """Rule `release`: every slot is given in memory of its own, and watched.

    Raises:
        ContractViolation: names the slots whose source is still alive although the handle does not list them.
    """
    watched = {slot: _Watched(tensor) for slot, tensor in slots.items()}
    handle = session.prepare(op, watched, Shard(0, 1))
    gc.collect()
    alive = sorted(slot for slot, tensor in watched.items() if tensor.alive and slot not in handle.in_place)
    if alive:
        raise ContractViolation(
            "release",
            f"keeps what it was given for {', '.join(alive)}",
            where=f"prepare of {op.name}",
            expected="it to be free when prepare returns, or to be listed in the handle's in_place",
        )


def check_fixed_buffers(plan: Plan, batches: Sequence[StepBatch], cache: KVCache) -> None:
    """Rule `fixed-buffers`, over several steps of one class.

    Raises:
        ContractViolation: the result of a later run lies elsewhere than that of the first.
    """
    places = []
    for batch in batches:
        places.append(plan.run(batch, cache).data_ptr())
    if len(set(places)) > 1:
        raise ContractViolation(
            "fixed-buffers",
            f"{len(set(places))} places of the logits in {len(places)} runs",
            where="plan",
            expected="one: whoever replays a captured plan reads where the first run wrote",
        )


def check_layout_id(layout: KVLayout) -> None:
    """Rule `layout-id`: exported pages come back under their own id and under no other.

    Raises:
        ContractViolation: pages of another version, or with a component missing, were taken, or pages were written
            before they were refused.
    """
    cache = layout.allocate(3)
    cache.poison(range(3))
    good = cache.export([0])
    name = re.sub(r":v(\d+)", lambda m: f":v{int(m.group(1)) + 1}", good.layout_id, count=1)
    if name == good.layout_id:
        raise ContractViolation(
            "layout-id", f"'{name}' has no version", where="KV layout", expected="...:v<number>:..."
        )
    short = dict(list(good.tensors.items())[1:])
    for pages, what in (
        (ExportedPages(name, 1, good.tensors), "of another version"),
        (ExportedPages(good.layout_id, 1, short), "without one of their components"),
        (ExportedPages(good.layout_id, 2, good.tensors), "fewer than they say"),
    ):
        if _taken(lambda pages=pages: cache.import_(pages, list(range(1, 1 + pages.count)))):  # type: ignore[misc]
            raise ContractViolation(
                "layout-id", f"takes pages {what}", where=f"KV layout {layout.layout_id}", expected="LayoutMismatch"
            )
    cache.import_(good, [2])


def _taken(action: Callable[[], None]) -> bool:
    try:
        action()
    except LayoutMismatch:
        return False
    return True


def _held(values: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(values).to(dtype)


@dataclass(frozen=True)
class _Held:
    """A plain weight in memory."""

    name: str
    value: torch.Tensor
    format: str = "plain"
    path: str = "memory"

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return tuple(self.value.shape)

    @property
    def dtype(self) -> torch.dtype:
        """Its dtype."""
        return self.value.dtype

    def load(self) -> torch.Tensor:
        """The tensor."""
        return self.value

    def parts(self) -> dict[str, _Held]:
        """Itself."""
        return {"weight": self}


class _Like:
    """Name, shape and dtype of a source."""

    source: LazyTensor | StoredPart

    @property
    def name(self) -> str:
        """Of the source."""
        return self.source.name

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the source."""
        return self.source.shape

    @property
    def dtype(self) -> torch.dtype:
        """Of the source."""
        return self.source.dtype


class _Watched(_Like):
    """A lazy tensor that gives copies in memory of their own, and knows whether that memory is still in use."""

    def __init__(self, source: LazyTensor) -> None:
        self.source: LazyTensor = source
        self._given: list[weakref.ref[np.ndarray]] = []

    @property
    def format(self) -> str:
        """Of the source."""
        return self.source.format

    def load(self) -> torch.Tensor:
        """A watched copy of the values."""
        return self.copy(self.source.load())

    def parts(self) -> dict[str, _WatchedPart]:
        """The stored tensors, their loads watched as well."""
        return {role: _WatchedPart(self, part) for role, part in self.source.parts().items()}

    def copy(self, value: torch.Tensor) -> torch.Tensor:
        """`value` in numpy memory: torch holds the array for as long as any tensor uses its storage."""
        memory = value.contiguous().reshape(-1).view(torch.uint8).numpy().copy()
        self._given.append(weakref.ref(memory))
        return torch.from_numpy(memory).view(value.dtype).reshape(value.shape)

    @property
    def alive(self) -> bool:
        """Whether any copy is still in use."""
        return any(ref() is not None for ref in self._given)


class _WatchedPart(_Like):
    def __init__(self, owner: _Watched, source: StoredPart) -> None:
        self._owner, self.source, self.path = owner, source, source.path

    def load(self) -> torch.Tensor:
        """A watched copy of the stored elements."""
        return self._owner.copy(self.source.load())
