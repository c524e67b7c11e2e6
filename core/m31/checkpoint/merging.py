"""An adapter merged into its base: W + B A, encoded again in the format that the weight has (MODEL.md §3.1, §3.2).

The base's weights lie on a grid that an adapter does not know. What rounding to it costs is measured against the change
that the adapter makes, which is what matters: an error of a thousandth of the weight is large for an adapter that
changes the weight by a hundredth.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

from m31.checkpoint.adapter import Adapter, LowRank
from m31.checkpoint.encoding import Source, Unit, chunk_rows, encode, units
from m31.checkpoint.logical import LogicalTensor, QuantizedTensor
from m31.checkpoint.reader import Checkpoint

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class MergeLoss:
    """What encoding merged weights again cost: sums of squares over all of their elements.

    Attributes:
        matrices: how many were merged.
        error: of (encoded - (W + B A)).
        change: of B A.
        kept: of the product of (encoded - W) and B A.
        weight: of W.
    """

    matrices: int
    error: float
    change: float
    kept: float
    weight: float

    def __add__(self, other: MergeLoss) -> MergeLoss:
        return MergeLoss(
            self.matrices + other.matrices,
            self.error + other.error,
            self.change + other.change,
            self.kept + other.kept,
            self.weight + other.weight,
        )

    @property
    def relative(self) -> float:
        """Root mean square of the error over that of the adapter's change; 0 for an adapter that changes nothing."""
        return float((self.error / self.change) ** 0.5) if self.change else 0.0

    @property
    def share(self) -> float:
        """How much of the adapter's change is in the merged weights, along its direction; 1 without a loss."""
        return self.kept / self.change if self.change else 1.0

    def __str__(self) -> str:
        size = (self.change / self.weight) ** 0.5 if self.weight else 0.0
        return (
            f"merged {self.matrices:,} matrices, which the adapter changes by {size:.2%} (root mean square); encoding "
            f"them again errs by {self.relative:.1%} of that change, and {self.share:.1%} of it is kept"
        )


NOTHING = MergeLoss(0, 0.0, 0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Summed:
    """Rows `start:stop` of W + B A, computed in float64 when they are loaded; what `encode` takes.

    Attributes:
        source: W.
        pair: its adapter.
    """

    source: LogicalTensor
    pair: LowRank
    start: int
    stop: int

    @classmethod
    def of(cls, source: LogicalTensor, pair: LowRank) -> Summed:
        """All rows."""
        return cls(source, pair, 0, source.shape[0])

    @property
    def name(self) -> str:
        """Of W."""
        return self.source.name

    @property
    def shape(self) -> tuple[int, ...]:
        """Of these rows."""
        return (self.stop - self.start, *self.source.shape[1:])

    @property
    def path(self) -> str:
        """Where both come from."""
        return f"{self.source.path} with {self.pair.a.path}"

    def slice(self, dim: int, start: int, stop: int) -> Summed:
        """Some of the rows; `dim` is 0."""
        assert dim == 0, "encoding takes rows"
        return Summed(self.source, self.pair, self.start + start, self.start + stop)

    def load(self) -> torch.Tensor:
        """float32."""
        rows = self.source.slice(0, self.start, self.stop).load().double()
        return (rows + self.pair.delta(self.start, self.stop)).float()


@dataclass(frozen=True, slots=True)
class Merged:
    """Stored tensors of one merged weight, by canonical stored name, and what encoding cost."""

    stored: Mapping[str, torch.Tensor]
    loss: MergeLoss


def merge(
    unit: Unit, source: LogicalTensor, pair: LowRank, *, input_scale: float | None, partner: Source | None = None
) -> Merged:
    """Encode W + B A as `unit` says.

    Args:
        unit: how it is stored.
        source: W.
        pair: its adapter.
        input_scale: of an NVFP4 unit; None keeps the source's, which only an NVFP4 source has.
        partner: see `encode`.

    Raises:
        NonFiniteWeight: a weight, A or B is NaN or infinite, or the sum is.
    """
    import torch

    if unit.format == "nvfp4" and input_scale is None:
        input_scale = float(source.parts()["input_global_scale"].load())
    pieces: dict[str, list[torch.Tensor]] = {}
    for piece in encode(unit, Summed.of(source, pair), input_scale, partner=partner):
        pieces.setdefault(piece.name, []).append(piece.value)
    stored = {name: torch.cat(values) if len(values) > 1 else values[0] for name, values in pieces.items()}
    roles = {role: stored[name] for role, name, _ in unit.parts}
    loss = NOTHING
    for start, stop in chunk_rows(unit.shape):
        before, change = source.slice(0, start, stop).load().double(), pair.delta(start, stop)
        after = decoded(unit.format, roles, start, stop).double()
        loss += MergeLoss(
            0,
            error=float((after - before - change).square().sum()),
            change=float(change.square().sum()),
            kept=float(((after - before) * change).sum()),
            weight=float(before.square().sum()),
        )
    return Merged(stored, loss + MergeLoss(1, 0.0, 0.0, 0.0, 0.0))


def decoded(format_: str, roles: Mapping[str, torch.Tensor], start: int, stop: int) -> torch.Tensor:
    """Rows of a weight from its stored tensors by role (`QuantizedTensor.parts`)."""
    from m31.formats import mxfp8, nvfp4

    if format_ == "plain":
        return roles["weight"][start:stop]
    if format_ == "mxfp8":
        return mxfp8.decode(roles["codes"][start:stop], roles["scale"][start:stop])
    return nvfp4.decode(roles["packed"][start:stop], roles["scale"][start:stop], roles["global_scale"])


@dataclass(frozen=True, slots=True)
class HeldPart:
    """A stored tensor in memory; see `m31.sdk.backend.StoredPart`."""

    name: str
    value: torch.Tensor
    path: object

    @property
    def shape(self) -> tuple[int, ...]:
        """As stored."""
        return tuple(self.value.shape)

    @property
    def dtype(self) -> torch.dtype:
        """As stored."""
        return self.value.dtype

    def load(self) -> torch.Tensor:
        """The tensor."""
        return self.value


@dataclass(frozen=True)
class MergedTensor:
    """A merged weight, encoded when it is first used and held from then on. A lazy tensor.

    Attributes:
        unit: how it is stored.
        source: W.
        pair: its adapter.
    """

    unit: Unit
    source: LogicalTensor
    pair: LowRank
    format: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "format", self.source.format)

    @property
    def name(self) -> str:
        """Canonical name."""
        return self.source.name

    @property
    def shape(self) -> tuple[int, ...]:
        """Logical shape."""
        return self.source.shape

    @property
    def dtype(self) -> torch.dtype:
        """Of `load`: the stored one of a plain weight, else float32."""
        return self.source.dtype

    @cached_property
    def merged(self) -> Merged:
        """The encoded weight."""
        return merge(self.unit, self.source, self.pair, input_scale=None)

    def parts(self) -> dict[str, HeldPart]:
        """See `m31.sdk.backend.LazyTensor`."""
        stored = self.merged.stored
        return {role: HeldPart(name, stored[name], self.source.path) for role, name, _ in self.unit.parts}

    def load(self) -> torch.Tensor:
        """See `m31.sdk.backend.LazyTensor`."""
        roles = {role: part.value for role, part in self.parts().items()}
        return roles["weight"] if self.format == "plain" else decoded(self.format, roles, 0, self.shape[0])


class MergedCheckpoint:
    """The weights of a checkpoint that an adapter changes, merged.

    An adapter whose A or B is all zero in a module leaves that module as it is stored.
    """

    def __init__(self, checkpoint: Checkpoint, adapter: Adapter) -> None:
        plan = {unit.name: unit for unit in units(checkpoint.declared)}
        self.tensors: dict[str, MergedTensor] = {}
        for module, pair in adapter.modules.items():
            name = f"{module}.weight"
            source = checkpoint.tensor(name)
            if changes(pair):
                self.tensors[name] = MergedTensor(_as_stored(plan[name], source), source, pair)

    @property
    def nbytes(self) -> int:
        """What the merged weights take in memory."""
        return sum(tensor.source.nbytes for tensor in self.tensors.values())

    def loss(self) -> MergeLoss:
        """What encoding cost; encodes what is not yet encoded."""
        return total(tensor.merged.loss for tensor in self.tensors.values())


def changes(pair: LowRank) -> bool:
    """Whether an adapter does anything: PEFT begins with a B of zeros."""
    return bool(pair.a.load().any()) and bool(pair.b.load().any())


def total(losses: Iterable[MergeLoss]) -> MergeLoss:
    """The sum of several."""
    return sum(losses, NOTHING)


def _as_stored(unit: Unit, source: LogicalTensor) -> Unit:
    """The unit of a weight in a folder that may store a plain one in any of several dtypes."""
    if isinstance(source, QuantizedTensor):
        return unit
    (role, name, decl), *_ = unit.parts
    return replace(unit, parts=((role, name, replace(decl, dtypes=(source.stored_dtype,))),))
