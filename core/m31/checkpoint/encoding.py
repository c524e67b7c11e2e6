"""From logical weights to stored tensors, a bounded piece at a time. MODEL.md §3.1, §3.2 and chapter 4.

Every weight is checked for NaN and infinity on its way. Where source and target have the same format the stored bytes
are taken over unchanged, so that nothing is rounded twice.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING, Protocol

from m31.checkpoint.inventory import TensorDecl, expected, numel
from m31.checkpoint.lazy import LazyTensor, stored_dtype, torch_dtype
from m31.checkpoint.logical import GlobalScale, QuantizedTensor
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


class Source(Protocol):
    """What encoding needs of a weight: `LazyTensor`, `QuantizedTensor` and `Held` have it."""

    @property
    def name(self) -> str:
        """For messages."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Logical shape."""

    @property
    def path(self) -> object:
        """Where it comes from, for messages."""

    def slice(self, dim: int, start: int, stop: int) -> Source:
        """The part `start:stop` along `dim`."""

    def load(self) -> torch.Tensor:
        """The values."""


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

    Raises:
        OpRefused: the activation's limits are such that float32 cannot hold the number, or not divide by it.
    """
    if not name.endswith(".w2.weight"):
        return 1.0
    from m31.formats import nvfp4

    return nvfp4.default_input_scale(text.activation.limit, text.activation.beta)


def default_input_scales(text: Text, written: Iterable[Unit], known: Container[str]) -> dict[str, float]:
    """`default_input_scale` of the NVFP4 weights among `written` whose scale is not `known`, by logical name."""
    return {u.name: default_input_scale(text, u.name) for u in written if u.format == "nvfp4" and u.name not in known}


def encode(
    unit: Unit,
    source: Source,
    input_scale: float | None,
    *,
    partner: Source | None = None,
) -> Iterator[Piece]:
    """The stored tensors of one weight, as consecutive pieces of rows.

    Args:
        unit: what to write.
        source: the weight, of the unit's shape.
        input_scale: encode scale of the activation that meets an NVFP4 unit; None keeps the source's, which only an
            NVFP4 source has.
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
        assert input_scale is not None, f"'{unit.name}' is quantised here and has no input scale"
        yield from _nvfp4(unit, source, input_scale, partner)


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


def _loaded(source: Source, start: int, stop: int) -> torch.Tensor:
    if isinstance(source, QuantizedTensor):
        _check_scales(source, start, stop)  # here too: a slice does not know where in the tensor it begins
    value = source.slice(0, start, stop).load()
    _require_finite(source, value, value, start)
    return value


def _require_finite(source: Source, value: torch.Tensor, result: torch.Tensor, start: int) -> None:
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


def _plain(unit: Unit, source: Source) -> Iterator[Piece]:
    dtype = torch_dtype(unit.parts[0][2].dtypes[0])
    for start, stop in chunk_rows(unit.shape):
        value = _loaded(source, start, stop)
        rounded = value.to(dtype)
        if rounded is not value:
            _require_finite(source, value, rounded, start)
        yield Piece(unit.name, start, rounded)


def _mxfp8(unit: Unit, source: Source) -> Iterator[Piece]:
    from m31.formats import mxfp8

    (_, codes, _), (_, scale, _) = unit.parts
    for start, stop in chunk_rows(unit.shape):
        encoded = mxfp8.encode(_loaded(source, start, stop).float())
        yield Piece(codes, start, encoded.codes)
        yield Piece(scale, start, encoded.scale)


def _nvfp4(unit: Unit, source: Source, input_scale: float, partner: Source | None) -> Iterator[Piece]:
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
        CheckpointError: an input scale that float32 cannot hold or divide by, or that belongs to no NVFP4 weight.
        OpRefused: no input scale is given, and the activation's limits allow no default (`default_input_scale`).
    """
    import torch

    plan = {unit.name: unit for unit in units(expected(config))}
    input_scales = check_input_scales(plan, input_scales)
    input_scales |= default_input_scales(config.text, plan.values(), input_scales)
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
        for piece in encode(unit, Held(name, tensor.detach().cpu()), input_scales.get(name)):
            pieces.setdefault(piece.name, []).append(piece.value)
        for stored, values in pieces.items():
            yield stored, torch.cat(values) if len(values) > 1 else values[0]


def _float32(scale: object) -> float | None:
    """What a float32 holds of a number, infinity included; None for what is no number."""
    import torch

    if isinstance(scale, bool) or not isinstance(scale, Real):
        return None
    try:
        return float(torch.tensor([float(scale)], dtype=torch.float64).float())
    except OverflowError:  # an integer beyond float64
        return math.inf if scale > 0 else -math.inf  # type: ignore[operator]  # typeshed gives Real no order


def check_input_scales(
    plan: Mapping[str, Unit], input_scales: Mapping[str, float], *, where: str = "input_scales"
) -> dict[str, float]:
    """Refuse calibration that is not usable, before anything is written.

    Args:
        plan: what will be written, by logical name.
        input_scales: see `encoded`.
        where: what they come from, for messages.

    Returns:
        The scales as float32 holds them.

    Raises:
        CheckpointError: a scale that float32 cannot hold or divide by, or a name that is no NVFP4 weight.
    """
    import torch

    from m31.formats import nvfp4

    usable: dict[str, float] = {}
    for name, scale in input_scales.items():
        unit = plan.get(name)
        if unit is None or unit.format != "nvfp4":
            raise _no_scale(name, plan, where)
        stored = _float32(scale)
        if stored is None or not nvfp4.divisible(torch.tensor([stored])):
            raise CheckpointError(
                f"the input scale of '{name}' is {_told(scale, stored)}",
                where=where,
                expected="a finite number above zero that float32 can hold, and whose reciprocal it can hold",
            )
        usable[name] = stored
    return usable


def _no_scale(name: str, plan: Mapping[str, Unit], where: str) -> CheckpointError:
    """An input scale is given for something that has none."""
    known = [unit.name for unit in plan.values() if unit.format == "nvfp4"]
    if known:
        # Official prefixes and names of parts contain the logical name; a search for similar ones takes seconds.
        near = [n for n in known if n.removesuffix("weight") in name] or difflib.get_close_matches(name, known, n=1)
        expected = f"logical names of NVFP4 weights, such as '{known[0]}'"
        fix = f"did you mean '{near[0]}'?" if near else None
    else:
        expected = "none: no weight is written in NVFP4, and only those have one"
        fix = "leave the scales (--input-scales) out, or write a model with experts as m31 (--format m31)"
    return CheckpointError(f"an input scale is given for '{name:.200}'", where=where, expected=expected, fix=fix)


def _told(scale: object, stored: float | None) -> str:
    """A scale that is refused, for a message, and what float32 makes of it where that differs."""
    if stored is None:
        return repr(scale)[:80]
    if isinstance(scale, int) and math.isinf(stored):
        return f"an integer of many digits, as float32 {stored}"
    return f"{scale}" + (f", as float32 {stored}" if stored in (0, math.inf, -math.inf) and stored != scale else "")
