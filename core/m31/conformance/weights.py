"""Rules about prepared weights: `release`, `weight-bytes` and `losses`."""

from __future__ import annotations

import gc
import tempfile
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from m31.checkpoint.lazy import LazyTensor as StoredTensor
from m31.checkpoint.lazy import MappedFile, stored_dtype
from m31.conformance import memory
from m31.conformance.memory import Span
from m31.errors import ContractViolation
from m31.formats.transforms import measure
from m31.graph import OpInstance, Shard, WeightHandle
from m31.sdk.backend import LazyTensor, Session, StoredPart

WHOLE = Shard(0, 1)
SLACK_PER_SLOT = 256
"""Bytes beyond `weight_bytes` that `prepare` may take for each slot: addresses, global scales, shapes."""
SLACK_SHARE = 1 / 64
"""And the part of `weight_bytes` that padding may add."""
_SCALAR = 16  # bytes; a handle may keep a global scale as it was given, under `SLACK_PER_SLOT`
_ALIGN = 64  # bytes; the largest item is 8


@dataclass(frozen=True)
class Held:
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

    def parts(self) -> dict[str, Held]:
        """Itself."""
        return {"weight": self}


@dataclass(frozen=True)
class HeldQuantised:
    """A quantised weight in memory: decoded values, and stored tensors by role."""

    name: str
    value: torch.Tensor
    format: str
    stored: Mapping[str, torch.Tensor]

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return tuple(self.value.shape)

    @property
    def dtype(self) -> torch.dtype:
        """float32."""
        return self.value.dtype

    def load(self) -> torch.Tensor:
        """The values, in memory of their own."""
        return self.value.clone()

    def parts(self) -> dict[str, Held]:
        """The stored tensors."""
        return {role: Held(f"{self.name}_{role}", value) for role, value in self.stored.items()}


def check_losses(session: Session, op: OpInstance, slots: Mapping[str, LazyTensor]) -> None:
    """Rule `losses`.

    Args:
        session: that prepares the weights of `op`.
        op: the instance.
        slots: its tensors, as `prepare` gets them.

    Raises:
        ContractViolation: a value differs from the checkpoint's although the handle declares no loss, or by more than
            it declares.
    """
    require_losses(session.prepare(op, slots, WHOLE), op, slots)


def require_losses(handle: WeightHandle, op: OpInstance, slots: Mapping[str, LazyTensor]) -> None:
    """The same, of a handle."""
    declared = handle.losses
    allowed = sum(loss.max_abs for loss in declared.values()) * (1 + 1e-5)
    used = handle.dequantise()
    missing = sorted(set(slots) - set(used))
    if missing:
        raise ContractViolation(
            "losses", f"dequantise gives no {', '.join(missing)}", where=f"prepare of {op.name}", expected="every slot"
        )
    for slot, tensor in slots.items():
        want, got = tensor.load().cpu(), used[slot].cpu()
        if got.shape != want.shape or got.is_complex():
            off = float("inf")
        elif torch.equal(got.double(), want.double()) or _the_same_quotient(tensor, got, want):
            continue
        else:
            off = measure(want, got).max_abs
        if not declared or not off <= allowed:
            raise ContractViolation(
                "losses",
                f"slot {slot} ('{tensor.name}') is off by {off:.3g}{_worst(want, got)}, declared is "
                f"{dict(declared) or 'no loss'}",
                where=f"prepare of {op.name}",
                expected=f"at most {allowed:.3g}" if declared else "exactly the checkpoint's values",
            )


def _worst(want: torch.Tensor, got: torch.Tensor) -> str:
    """Where two tensors differ most, and by what: a factor, a shift or a transposition shows in the numbers."""
    if got.shape != want.shape:
        return f" (it has the shape {list(got.shape)}, the checkpoint's {list(want.shape)})"
    if got.is_complex() or not want.numel():
        return ""
    apart = (got.double() - want.double()).abs().nan_to_num(nan=float("inf"))
    place = tuple(int(axis) for axis in torch.unravel_index(apart.argmax(), want.shape))
    return (
        f" at {list(place)}, where the checkpoint has {float(want[place]):.6g} and the handle {float(got[place]):.6g}"
    )


def _the_same_quotient(tensor: LazyTensor, got: torch.Tensor, want: torch.Tensor) -> bool:
    """NVFP4 values are quotients, which `load` rounds to float32; float64 may hold them with more places."""
    return tensor.format == "nvfp4" and got.dtype == torch.float64 and torch.equal(got.to(want.dtype), want)


def check_release(session: Session, op: OpInstance, slots: Mapping[str, LazyTensor]) -> None:
    """Rules `release` and `weight-bytes`, twice.

    First every load gives a copy in memory, as a reader does with what lies misaligned in its file: nothing of it may
    be alive when `prepare` has returned, listed or not, scalars aside. Then everything lies in one file that is mapped:
    a slot that is not in `in_place` must not be held, and one that is must be there: its mapped bytes, or its lazy
    tensor. Both times the memory that came into being, and is still reachable from anywhere, is at most what
    `weight_bytes` says, give or take `SLACK_PER_SLOT` and `SLACK_SHARE`; and rule `losses` holds. A session's bounded
    cache of decoded weights counts as well: open the session with `weight_cache_bytes=0`.

    Args:
        session: that prepares the weights of `op`.
        op: the instance.
        slots: its tensors, to be copied from.

    Raises:
        ContractViolation: names the slots, or the bytes.
    """
    _in_memory(session, op, slots)
    with tempfile.TemporaryDirectory() as folder:
        _in_a_file(session, op, slots, Path(folder) / "weights")


def _in_memory(session: Session, op: OpInstance, slots: Mapping[str, LazyTensor]) -> None:
    watched = {slot: Watched(tensor) for slot, tensor in slots.items()}
    with memory.only_newer():
        _, before = memory.held([session, *slots.values()])
        said = session.weight_bytes(op, watched)
        handle = session.prepare(op, watched, WHOLE)
        alive = sorted(slot for slot, tensor in watched.items() if tensor.alive)
        if alive:
            gc.collect()
            alive = sorted(slot for slot, tensor in watched.items() if tensor.alive)
        if alive:
            raise ContractViolation(
                "release",
                f"keeps what it was given for {', '.join(alive)}, which is no part of a file",
                where=f"prepare of {op.name}",
                expected="a copy of its own, counted by weight_bytes, and the source free when prepare returns",
            )
        _, spans = memory.held([session, handle, *gc.get_objects()], closed=[*watched.values(), watched, slots])
        _require_bytes(op, memory.outside(spans, before), said, len(slots))


def _in_a_file(session: Session, op: OpInstance, slots: Mapping[str, LazyTensor], path: Path) -> None:
    stored = {slot: _write(path, tensor) for slot, tensor in slots.items()}
    file = MappedFile(path, path.stat().st_size)
    base = file.storage().data_ptr()
    mapped = {slot: Mapped(tensor, file, stored[slot]) for slot, tensor in slots.items()}
    places = {slot: tensor.spans(base) for slot, tensor in mapped.items()}
    lazy = {slot: weakref.ref(tensor) for slot, tensor in mapped.items()}
    with memory.only_newer():
        _, before = memory.held([session, *slots.values()])
        said = session.weight_bytes(op, mapped)
        handle = session.prepare(op, mapped, WHOLE)
        claimed = handle.in_place
        mapped.clear()  # what is alive now is held by the session
        gc.collect()
        newer = [item for item in gc.get_objects() if item is not mapped]
        tensors = [ref() for ref in lazy.values()]
        found, spans = memory.held([session, handle, *newer], closed=[*tensors, tensors, slots, file, newer])
        kept = [memory.shown(item) for item in found]
        file_span = (base, base + file.size)
        _require_bytes(op, memory.outside(spans, [*before, file_span]), said, len(slots))
        for slot in slots:
            inside = any(memory.overlap(span, place) for span in kept for place in places[slot])
            if inside and slot not in claimed:
                what = f"goes on reading {slot} in its file and does not list it"
                raise ContractViolation("release", what, where=f"prepare of {op.name}", expected="it in in_place")
            if slot in claimed and not inside and lazy[slot]() is None:
                raise ContractViolation(
                    "release",
                    f"lists {slot} as read in place, and holds neither its mapped bytes nor its lazy tensor",
                    where=f"prepare of {op.name}",
                    expected="in_place to list what is read in the file, and nothing else",
                )
    require_losses(handle, op, slots)


def _require_bytes(op: OpInstance, taken: int, said: int, slots: int) -> None:
    allowed = said + int(said * SLACK_SHARE) + SLACK_PER_SLOT * slots
    if taken > allowed:
        raise ContractViolation(
            "weight-bytes",
            f"took {taken:,} bytes, weight_bytes says {said:,}",
            where=f"prepare of {op.name}",
            expected=f"at most {allowed:,}, which leaves {SLACK_PER_SLOT} for each slot",
        )


def _bytes(value: torch.Tensor) -> torch.Tensor:
    return value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def _write(path: Path, tensor: LazyTensor) -> dict[str, int]:
    """Append the stored tensors; offsets by role."""
    offsets = {}
    with path.open("ab") as out:
        for role, part in tensor.parts().items():
            out.write(bytes(-out.tell() % _ALIGN))
            offsets[role] = out.tell()
            out.write(_bytes(part.load()).numpy().tobytes())
    return offsets


class _Named(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> torch.dtype: ...


class _Like:
    """Name, shape and dtype of a source."""

    def __init__(self, source: _Named) -> None:
        self.named = source

    @property
    def name(self) -> str:
        """Of the source."""
        return self.named.name

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the source."""
        return self.named.shape

    @property
    def dtype(self) -> torch.dtype:
        """Of the source."""
        return self.named.dtype


class Watched(_Like):
    """A lazy tensor that gives copies in memory of their own, and knows whether that memory is still in use."""

    def __init__(self, source: LazyTensor) -> None:
        super().__init__(source)
        self.source = source
        self._given: list[weakref.ref[np.ndarray]] = []

    @property
    def format(self) -> str:
        """Of the source."""
        return self.source.format

    def load(self) -> torch.Tensor:
        """The values: a watched copy of plain ones. Decoded ones are new memory anyway, which `weight-bytes` counts."""
        value = self.source.load()
        return self.copy(value) if self.format == "plain" else value.clone()

    def parts(self) -> dict[str, _WatchedPart]:
        """The stored tensors, their loads watched as well."""
        return {role: _WatchedPart(self, part) for role, part in self.source.parts().items()}

    def copy(self, value: torch.Tensor) -> torch.Tensor:
        """`value` in numpy memory: torch holds the array for as long as any tensor uses its storage."""
        memory = _bytes(value).numpy().copy()
        if memory.nbytes > _SCALAR:
            self._given.append(weakref.ref(memory))
        return torch.from_numpy(memory).view(value.dtype).reshape(value.shape)

    @property
    def alive(self) -> bool:
        """Whether any copy is still in use."""
        return any(ref() is not None for ref in self._given)


class _WatchedPart(_Like):
    def __init__(self, owner: Watched, source: StoredPart) -> None:
        super().__init__(source)
        self._owner, self.source, self.path = owner, source, source.path

    def load(self) -> torch.Tensor:
        """A watched copy of the stored elements."""
        return self._owner.copy(self.source.load())


class Mapped(_Like):
    """A lazy tensor whose stored elements lie in a mapped file."""

    def __init__(self, source: LazyTensor, file: MappedFile, offsets: Mapping[str, int]) -> None:
        super().__init__(source)
        self.source = source
        self.format = source.format
        self._parts = {
            role: StoredTensor(
                name=part.name,
                shape=tuple(part.shape),
                stored_dtype=stored_dtype(part.dtype),
                offset=offsets[role],
                file=file,
            )
            for role, part in source.parts().items()
        }

    def load(self) -> torch.Tensor:
        """Plain values as they lie in the file; quantised ones decoded, in memory of their own."""
        return self._parts["weight"].load() if self.format == "plain" else self.source.load().clone()

    def parts(self) -> dict[str, Any]:
        """The stored tensors; each keeps the whole alive, so that holding one is holding the lazy tensor."""
        return {role: _MappedPart(self, part) for role, part in self._parts.items()}

    def spans(self, base: int) -> list[Span]:
        """Addresses of the stored tensors in a map that starts at `base`."""
        return [(base + part.offset, base + part.offset + part.nbytes) for part in self._parts.values()]


class _MappedPart(_Like):
    def __init__(self, owner: Mapped, source: StoredTensor) -> None:
        super().__init__(source)
        self._owner, self.source, self.path = owner, source, source.path

    def load(self) -> torch.Tensor:
        """The stored elements, in the map."""
        return self.source.load()
