"""Stored tensors against the inventory: everything is decided here, before any byte of weights is read."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from m31.checkpoint.folder import listed
from m31.checkpoint.header import StoredTensor, printable
from m31.checkpoint.inventory import TensorDecl
from m31.checkpoint.naming import from_modelopt, is_ignored, is_vision, rename, split, strip_official
from m31.config.model import Dialect, Model
from m31.errors import DuplicateTensor, MissingTensor, UnexpectedTensor, WrongDtype, WrongShape

_FLOATS = ("BF16", "F32")
_SHOWN = 5
_NEAR_LIMIT = 4000  # names that a nearest-name search may compare; a layer of 128 quantised experts has about 1,560


class Placed(NamedTuple):
    """A canonical tensor and where it lies."""

    stored: StoredTensor
    shape: tuple[int, ...]
    start: int


@dataclass(frozen=True, kw_only=True)
class Mapped:
    """Result of `map_names`: canonical name -> place; names that match nothing; notes; the dialect of the names."""

    placed: dict[str, Placed]
    unexpected: tuple[str, ...]
    notes: tuple[str, ...]
    dialect: Dialect


def map_names(tensors: Mapping[str, StoredTensor], declared: Mapping[str, TensorDecl], config: Model) -> Mapped:
    """Give every stored tensor its canonical name.

    Raises:
        DuplicateTensor: one logical tensor is stored under two names.
    """
    placed: dict[str, Placed] = {}
    unexpected: list[str] = []
    twice: list[str] = []
    skipped: dict[str, int] = {}
    dialect: Dialect = "official"
    modelopt = config.quantization is not None and config.quantization.dialect == "modelopt"

    def put(name: str, stored: StoredTensor, shape: tuple[int, ...], start: int) -> None:
        if name in placed:
            twice.append(f"'{name}' as '{placed[name].stored.name}' and '{stored.name}'")
        else:
            placed[name] = Placed(stored, shape, start)

    for stored in tensors.values():
        official = strip_official(stored.name)
        if modelopt:
            official = from_modelopt(official, stored.dtype)
        if official in declared:
            put(official, stored, stored.shape, stored.start)
        elif is_ignored(stored.name):
            kind = "rotary_emb" if "rotary_emb." in stored.name else "mtp"
            skipped[kind] = skipped.get(kind, 0) + 1
        elif config.vision is None and is_vision(stored.name):
            skipped["vision"] = skipped.get("vision", 0) + 1
        else:
            pieces = list(split(rename(stored.name), stored.shape, stored.dtype))
            if not pieces or any(piece.name not in declared for piece in pieces):
                unexpected.append(stored.name)
                continue
            dialect = "transformers"
            for piece in pieces:
                put(piece.name, stored, piece.shape, stored.start + piece.offset)
    if twice:
        raise DuplicateTensor(
            f"{len(twice)} tensors are stored twice: {listed(twice, _SHOWN)}", expected="each logical tensor once"
        )
    reasons = {
        "mtp": "multi-token-prediction tensors ignored: this version does not draft with them",
        "rotary_emb": "stored rotary tables ignored: m31 computes its own",
        "vision": "vision tensors ignored: the architecture is text-only",
    }
    notes = tuple(f"{count} {reasons[kind]}" for kind, count in sorted(skipped.items()))
    return Mapped(placed=placed, unexpected=tuple(unexpected), notes=notes, dialect=dialect)


def validate(
    mapped: Mapped, declared: dict[str, TensorDecl], config: Model, *, where: str
) -> tuple[dict[str, TensorDecl], tuple[str, ...]]:
    """Check names, dtypes and shapes.

    Returns:
        the inventory as this checkpoint realises it (see `_unquantised`), and notes.

    Raises:
        UnexpectedTensor, MissingTensor, WrongDtype, WrongShape: each lists the first offenders and counts all.
    """
    declared, notes = _unquantised(mapped, declared, config)
    missing = [name for name in declared if name not in mapped.placed]
    if mapped.unexpected:
        raise _unexpected(mapped.unexpected, missing, declared, where)
    if missing:
        raise MissingTensor(
            f"{len(missing)} of {len(declared)} tensors are missing: {listed(missing, _SHOWN)}",
            where=where,
            expected=f"every tensor of {config.architecture}",
            fix="fetch the checkpoint again, or correct the layer lists in config.json",
        )
    check_forms(mapped.placed, declared, where)
    return declared, notes


def check_forms(placed: Mapping[str, Placed], declared: Mapping[str, TensorDecl], where: str) -> None:
    """Check the dtypes and shapes of tensors whose names are right.

    Raises:
        WrongDtype, WrongShape: each lists the first offenders and counts all.
    """
    _check_dtypes(placed, declared, where)
    _check_shapes(placed, declared, where)


def _unexpected(
    names: tuple[str, ...], missing: list[str], declared: Mapping[str, TensorDecl], where: str
) -> UnexpectedTensor:
    described = []
    for name in names[:_SHOWN]:
        near = nearest(rename(name), missing) or nearest(rename(name), declared)
        described.append(f"'{printable(name)}'" + (f" (nearest: '{near}')" if near else ""))
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    also = f"; {len(missing)} expected ones are missing: {listed(missing, _SHOWN)}" if missing else ""
    return UnexpectedTensor(
        f"{len(names)} tensors do not belong to this architecture: {', '.join(described)}{more}{also}",
        where=where,
        expected="only the tensors that config.json implies",
        fix="check that config.json and the weights come from the same checkpoint",
    )


def nearest(name: str, candidates: Mapping[str, TensorDecl] | list[str]) -> str | None:
    """The closest candidate, looked for in the same layer first because comparing 89,632 names takes seconds."""
    stem = ".".join(name.split(".")[:3])
    pool = [candidate for candidate in candidates if candidate.startswith(stem)] or list(candidates)
    near = difflib.get_close_matches(name, pool[:_NEAR_LIMIT], n=1, cutoff=0.7)
    return near[0] if near else None


def _unquantised(
    mapped: Mapped, declared: dict[str, TensorDecl], config: Model
) -> tuple[dict[str, TensorDecl], tuple[str, ...]]:
    """Modules that a quantised checkpoint keeps in BF16 or F32.

    MXFP8 releases differ in whether the index projections are quantised, and `ignored_layers` may name any module:
    the presence of `weight_scale_inv` decides, tensor by tensor (MODEL.md §3.7, §10.9). ModelOpt lists modules by
    pattern, so there the presence decides for every linear.
    """
    if config.quantization is None:
        return declared, ()
    ignored, modelopt = set(config.quantization.ignored), config.quantization.dialect == "modelopt"
    real, kept = dict(declared), 0
    for name, decl in declared.items():
        if decl.storage != "fp8" or name not in mapped.placed:
            continue
        scale = f"{name}_scale_inv"
        floating = mapped.placed[name].stored.dtype in _FLOATS
        module = name.removeprefix("model.").removesuffix(".weight")
        if floating and scale not in mapped.placed and (modelopt or decl.group == "index" or module in ignored):
            real[name] = replace(decl, dtypes=_FLOATS, storage="plain")
            del real[scale]
            kept += 1
    return real, (f"{kept} linear layers are stored unquantised",) if kept else ()


def _check_dtypes(placed: Mapping[str, Placed], declared: Mapping[str, TensorDecl], where: str) -> None:
    wrong = [
        f"'{name}' is {place.stored.dtype} (allowed: {', '.join(declared[name].dtypes)})"
        for name, place in placed.items()
        if name in declared and place.stored.dtype not in declared[name].dtypes
    ]
    if wrong:
        half = any(" is F16 " in text for text in wrong)
        raise WrongDtype(
            f"{len(wrong)} tensors have a dtype that they may not have: {listed(wrong, _SHOWN)}",
            where=where,
            fix="F16 overflows above 65,504, which this model's values exceed: convert the weights to BF16"
            if half
            else "check that config.json's quantization_config matches the weights",
        )


def _check_shapes(placed: Mapping[str, Placed], declared: Mapping[str, TensorDecl], where: str) -> None:
    wrong = [
        f"'{name}' is {list(place.shape)}, expected {list(declared[name].shape)}"
        for name, place in placed.items()
        if place.shape != declared[name].shape and not (declared[name].storage == "global_scale" and place.shape == ())
    ]
    if wrong:
        raise WrongShape(
            f"{len(wrong)} tensors have the wrong shape: {listed(wrong, _SHOWN)}",
            where=where,
            fix="check that config.json and the weights come from the same checkpoint",
        )
