"""From logical weights to stored tensors, a bounded piece at a time. MODEL.md §3.1, §3.2 and chapter 4.

Every weight is checked for NaN and infinity on its way. Where source and target have the same format the stored bytes
are taken over unchanged, so that nothing is rounded twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from m31.checkpoint.inventory import TensorDecl, expected, numel
from m31.checkpoint.lazy import LazyTensor, stored_dtype, torch_dtype
from m31.checkpoint.logical import GlobalScale, LogicalTensor, QuantizedTensor
from m31.config.model import Model, Text, WeightFormat
from m31.errors import CheckpointError, DuplicateTensor, NonFiniteWeight, UnexpectedTensor, WrongDtype, WrongShape
from m31.formats.scales import E8M0_LARGE, check_scale

if TYPE_CHECKING:
    import torch

CHUNK = 2**20  # elements decoded at once: 4 MiB of float32, which stays in the caches and is faster than more
_SMALL_G = 1e-35  # 2688 / G exceeds float32 below 7.9e-36


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """One logical weight and the stored tensors that hold it.

    Attributes:
        name: canonical logical name.
        shape: logical shape.
        format: how the target stores it.
        parts: (role, canonical stored name, declaration); roles as in `QuantizedTensor.parts`, or `weight`.
    """

    name: str
    shape: tuple[int, ...]
    format: WeightFormat
    parts: tuple[tuple[str, str, TensorDecl], ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive rows of a stored tensor, beginning with `row`."""

    name: str
    row: int
    value: torch.Tensor


def units(declared: Mapping[str, TensorDecl]) -> Iterator[Unit]:
    """The logical weights of an inventory, in its order."""
    for name, decl in declared.items():
        if decl.storage == "plain":
            yield Unit(name=name, shape=decl.shape, format="plain", parts=(("weight", name, decl),))
        elif decl.storage == "fp8":
            scale = f"{name}_scale_inv"
            parts = (("codes", name, decl), ("scale", scale, declared[scale]))
            yield Unit(name=name, shape=decl.shape, format="mxfp8", parts=parts)
        elif decl.storage == "fp4_packed":
            logical = name.removesuffix("_packed")
            names = {
                "packed": name,
                "scale": f"{logical}_scale",
                "global_scale": f"{logical}_global_scale",
                "input_global_scale": f"{logical.removesuffix('weight')}input_global_scale",
            }
            shape = (decl.shape[0], decl.shape[1] * 2)
            listed = tuple((role, stored, declared[stored]) for role, stored in names.items())
            yield Unit(name=logical, shape=shape, format="nvfp4", parts=listed)


def default_input_scale(text: Text, name: str) -> float:
    """The `input_global_scale` of an expert's matrix for which no calibration is known.

    w2: `nvfp4.default_input_scale`, under which no activation can saturate.
    w1 and w3: 1.0. Their input is scaled per token, so that the stored number is unused (MODEL.md §3.2).
    """
    if not name.endswith(".w2.weight"):
        return 1.0
    from m31.formats import nvfp4

    return nvfp4.default_input_scale(text.activation.limit, text.activation.beta)


def encode(
    unit: Unit,
    source: LogicalTensor | Held,
    input_scale: float | None,
    *,
    fallback: float,
    partner: LogicalTensor | Held | None = None,
) -> Iterator[Piece]:
    """The stored tensors of one weight, as consecutive pieces of rows.

    Args:
        unit: what to write.
        source: the weight, of the unit's shape.
        input_scale: calibrated encode scale of the activation that meets an NVFP4 unit; None keeps the source's.
        fallback: its value where the source has none either.
        partner: a weight that shall get the same global scale, for an NVFP4 unit that is quantised here.

    Raises:
        NonFiniteWeight: the weight, or a scale of it, is NaN or infinite, or becomes so in the target's dtype.
    """
    if isinstance(source, QuantizedTensor) and source.format == unit.format:
        yield from _copied(unit, source, input_scale)
    elif unit.format == "plain":
        yield from _plain(unit, source)
    elif unit.format == "mxfp8":
        yield from _mxfp8(unit, source)
    else:
        yield from _nvfp4(unit, source, fallback if input_scale is None else input_scale, partner)


@dataclass(frozen=True, slots=True)
class Held:
    """A weight in memory, with as much of `LazyTensor`'s interface as encoding needs."""

    name: str
    value: torch.Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return tuple(self.value.shape)

    @property
    def path(self) -> str:
        """Where it comes from, for messages."""
        return "memory"

    def slice(self, dim: int, start: int, stop: int) -> Held:
        """The part `start:stop` along `dim`."""
        return Held(self.name, self.value.narrow(dim, start, stop - start))

    def load(self) -> torch.Tensor:
        """The tensor."""
        return self.value


def chunk_rows(shape: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """Ranges of the first dimension that hold at most `CHUNK` elements, but at least one row."""
    step = max(1, CHUNK // max(1, numel(shape[1:])))
    for start in range(0, shape[0], step):
        yield start, min(start + step, shape[0])


def _loaded(source: LogicalTensor | Held, start: int, stop: int) -> torch.Tensor:
    if isinstance(source, QuantizedTensor):
        _check_scales(source, start, stop)  # here too: a slice does not know where in the tensor it begins
    value = source.slice(0, start, stop).load()
    _require_finite(source, value, value, start)
    return value


def _require_finite(source: LogicalTensor | Held, value: torch.Tensor, result: torch.Tensor, start: int) -> None:
    """Refuse rows (from `start` on) whose `result` is not finite; `value` is what they were before rounding."""
    finite = result.float().isfinite()
    if bool(finite.all()):
        return
    flat = int((~finite).reshape(-1).nonzero()[0])
    became = "" if value is result else f", which {str(result.dtype).removeprefix('torch.')} cannot hold"
    raise NonFiniteWeight(
        f"'{source.name}' holds {float(value.reshape(-1)[flat])} at flat index "
        f"{start * numel(source.shape[1:]) + flat} of shape {list(source.shape)}{became}",
        where=str(source.path),
        expected="finite weights",
        fix="the file is damaged or the training diverged: fetch it again or use another checkpoint",
    )


def _plain(unit: Unit, source: LogicalTensor | Held) -> Iterator[Piece]:
    dtype = torch_dtype(unit.parts[0][2].dtypes[0])
    for start, stop in chunk_rows(unit.shape):
        value = _loaded(source, start, stop)
        rounded = value.to(dtype)
        if rounded is not value:
            _require_finite(source, value, rounded, start)
        yield Piece(unit.name, start, rounded)


def _mxfp8(unit: Unit, source: LogicalTensor | Held) -> Iterator[Piece]:
    from m31.formats import mxfp8

    (_, codes, _), (_, scale, _) = unit.parts
    for start, stop in chunk_rows(unit.shape):
        encoded = mxfp8.encode(_loaded(source, start, stop).float())
        yield Piece(codes, start, encoded.codes)
        yield Piece(scale, start, encoded.scale)


def _nvfp4(
    unit: Unit, source: LogicalTensor | Held, input_scale: float, partner: LogicalTensor | Held | None
) -> Iterator[Piece]:
    """Two passes: the global scale needs the largest weight of the whole matrix."""
    import torch

    from m31.formats import nvfp4

    amax = torch.zeros(1)
    for matrix in (source, partner) if partner is not None else (source,):
        for start, stop in chunk_rows(matrix.shape):
            amax = torch.maximum(amax, _loaded(matrix, start, stop).float().abs().max().reshape(1))
    overall = nvfp4.global_scale(amax)
    names = {role: name for role, name, _ in unit.parts}
    for start, stop in chunk_rows(unit.shape):
        encoded = nvfp4.encode(source.slice(0, start, stop).load().float(), global_scale=overall)
        yield Piece(names["packed"], start, encoded.packed)
        yield Piece(names["scale"], start, encoded.scale)
    yield Piece(names["global_scale"], 0, overall)
    yield Piece(names["input_global_scale"], 0, torch.tensor([input_scale], dtype=torch.float32))


def _check_scales(source: QuantizedTensor, start: int, stop: int) -> torch.Tensor:
    """The block scales of some rows, none of them damaged."""
    part = source.parts()["scale"]
    assert isinstance(part, LazyTensor)
    value = part.slice(0, start, stop).load()
    check_scale(part, value, start)
    return value


def _copied(unit: Unit, source: QuantizedTensor, input_scale: float | None) -> Iterator[Piece]:
    import torch

    parts = source.parts()
    _check_copied(source)
    for role, name, decl in unit.parts:
        part = parts[role]
        if role == "input_global_scale" and input_scale is not None:
            yield Piece(name, 0, torch.tensor([input_scale], dtype=torch.float32))
        elif isinstance(part, GlobalScale):
            yield Piece(name, 0, part.load())  # which refuses what cannot be divided by
        else:
            for start, stop in chunk_rows(decl.shape):
                yield Piece(name, start, part.slice(0, start, stop).load())


def _check_copied(source: QuantizedTensor) -> None:
    """Refuse what would be refused if it were decoded; rows are decoded only where their scales allow an overflow."""
    parts = source.parts()
    overall = parts.get("global_scale")
    overflows = overall is not None and float(overall.load()) < _SMALL_G
    for start, stop in chunk_rows(source.shape):
        scale = _check_scales(source, start, stop)
        codes = parts.get("codes")
        if isinstance(codes, LazyTensor):
            value = codes.slice(0, start, stop).load()
            _require_finite(codes, value, value, start)
            overflows = bool((scale >= E8M0_LARGE).any())
        if overflows:
            _loaded(source, start, stop)


def encoded(
    config: Model, tensors: Iterable[tuple[str, torch.Tensor]], *, input_scales: Mapping[str, float]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Quantise logical weights for `write`, as `config.quantization` says.

    Args:
        config: of the checkpoint to be written, in the official dialect.
        tensors: (canonical logical name, BF16 or F32 tensor) in any order; consumed one at a time.
        input_scales: calibrated encode scales of expert inputs by logical name; see `default_input_scale` for those
            that are not given.

    Yields:
        (canonical stored name, tensor), for `write`.

    Raises:
        UnexpectedTensor, DuplicateTensor, WrongShape, WrongDtype, NonFiniteWeight: a tensor that cannot be written.
        CheckpointError: an input scale that is not a finite number above zero or belongs to no NVFP4 weight.
    """
    import torch

    plan = {unit.name: unit for unit in units(expected(config))}
    check_input_scales(plan, input_scales)
    done: set[str] = set()
    for name, tensor in tensors:
        unit = plan.get(name)
        if unit is None:
            raise UnexpectedTensor(f"'{name}' does not belong to this architecture", expected="canonical names only")
        if name in done:
            raise DuplicateTensor(f"'{name}' was given twice", expected="each tensor once")
        if tuple(tensor.shape) != unit.shape:
            raise WrongShape(f"'{name}' is {list(tensor.shape)}", expected=str(list(unit.shape)))
        if tensor.dtype not in (torch.bfloat16, torch.float32):
            raise WrongDtype(f"'{name}' is {stored_dtype(tensor.dtype)}", expected="BF16 or F32")
        done.add(name)
        pieces: dict[str, list[torch.Tensor]] = {}
        held, fallback = Held(name, tensor.detach().cpu()), default_input_scale(config.text, name)
        for piece in encode(unit, held, input_scales.get(name), fallback=fallback):
            pieces.setdefault(piece.name, []).append(piece.value)
        for stored, values in pieces.items():
            yield stored, torch.cat(values) if len(values) > 1 else values[0]


def check_input_scales(plan: Mapping[str, Unit], input_scales: Mapping[str, float]) -> None:
    """Refuse calibration that is not usable, before anything is written.

    Raises:
        CheckpointError: a scale that is not a finite number above zero, or a name that is no NVFP4 weight.
    """
    for name, scale in input_scales.items():
        unit = plan.get(name)
        if unit is None or unit.format != "nvfp4":
            raise CheckpointError(f"an input scale is given for '{name}'", expected="logical names of NVFP4 weights")
        if not 0 < scale < float("inf"):
            raise CheckpointError(f"the input scale of '{name}' is {scale}", expected="a finite number above zero")
