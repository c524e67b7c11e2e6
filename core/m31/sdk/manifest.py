"""The static description of a backend: `backend.toml` beside the package's `__init__`, read without importing it.

Strict: an unknown key, a wrong type, a contradiction or a missing number is a `ManifestError` that names file and key.
No number has a default, because a limit that nobody wrote is a limit that nobody checked. DESIGN.md §3.
"""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, field_validator, model_validator

from m31.errors import ManifestError, OpRefused
from m31.formats.arithmetic import parse as parse_arithmetic

FILE_NAME = "backend.toml"

WeightFormat = Literal["float32", "bfloat16", "mxfp8", "nvfp4"]
Option = Literal["weight_cache_bytes"]
ComputeType = Literal["float64", "float32", "bfloat16", "float16"]
CacheFormat = Literal["float64", "float32", "bfloat16", "fp8", "nvfp4"]
IndexFormat = Literal["float64", "float32", "bfloat16", "fp8", "nvfp4", "int8"]  # int8 has one float32 scale per key
ConformanceLevel = Literal["none", "L0", "L1", "L2", "L3", "L4"]
DeviceKind = Literal["cpu", "gpu", "probe"]

BackendName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9]+(-[a-z0-9]+)*$", max_length=64)]
Architecture = Annotated[str, StringConstraints(pattern=r"^[a-z0-9_]+$")]
OpName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9_]+(\.[a-z0-9_]+)*$")]
Target = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$")]
Positive = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]


def normalise(name: str) -> str:
    """One spelling of a backend or distribution name: lower case, runs of `-`, `_` and `.` become one `-`."""
    return re.sub(r"[-_.]+", "-", name.strip()).lower()


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class DeviceMatch(_Strict):
    """Which hardware the backend runs on.

    kind: `cpu` any processor; `gpu` a device of the core's inventory; `probe` hardware that the core cannot see and
    that the manifest's own probe finds (a new vendor's accelerator).
    """

    kind: DeviceKind
    vendor: str | None = None  # gpu: the vendor's name in the inventory
    architectures: tuple[Architecture, ...] = ()  # gpu: any of these, as the inventory writes them
    min_count: Positive | None = None  # gpu: devices that must be usable at once
    min_driver: str | None = None
    min_toolkit: str | None = None  # newest toolkit that the installed driver or runtime serves

    @field_validator("min_driver", "min_toolkit")
    @classmethod
    def _is_version(cls, value: str | None) -> str | None:
        return value if value is None else _version(value)

    @model_validator(mode="after")
    def _complete(self) -> Self:
        given = [k for k in ("vendor", "min_count", "min_driver", "min_toolkit") if getattr(self, k) is not None]
        if self.architectures:
            given.append("architectures")
        if self.kind == "gpu":
            missing = [k for k in ("vendor", "architectures", "min_count") if k not in given]
            if missing:
                raise ValueError(f'kind = "gpu" needs {", ".join(missing)}')
        elif given:
            raise ValueError(f'kind = "{self.kind}" does not take {", ".join(given)}')
        return self


class Formats(_Strict):
    """Number formats that the backend accepts. The first of each list is the one it prefers."""

    compute: Annotated[tuple[ComputeType, ...], Field(min_length=1)]  # of activations between ops
    weights: Annotated[tuple[WeightFormat, ...], Field(min_length=1)]  # as stored in the checkpoint
    kv: Annotated[tuple[CacheFormat, ...], Field(min_length=1)]
    index: Annotated[tuple[IndexFormat, ...], Field(min_length=1)]  # index keys of sparse attention


class DeclaredLimits(_Strict):
    """The most that the backend serves on any model; a session narrows it (`Session.limits`). MODEL.md §8."""

    context_tokens: Positive
    kv_page_tokens: Literal[128]  # the one page size of this model family
    draft_tokens: NonNegative  # 0: no speculation
    image: bool
    video: bool
    tensor_parallel: Positive  # ranks that one model is spread over


class Determinism(_Strict):
    """Where results are equal bit for bit, at one step class's kernels on one machine. Tested as declared."""

    run_to_run: bool  # the same steps again
    batch_invariant: bool  # a sequence in whatever company
    chunk_invariant: bool  # a prompt in whatever pieces, and one token at a time


class Manifest(_Strict):
    """A parsed, validated `backend.toml`. Units: tokens and counts; versions are strings as `packaging` reads them."""

    name: BackendName
    summary: Annotated[str, StringConstraints(min_length=1, max_length=120)]
    requires: str  # range of m31.sdk.API_VERSION
    score: Annotated[int, Field(ge=0, le=1000)]  # the highest usable score wins
    conformance: ConformanceLevel  # the level that this release claims; the suite decides
    ops: Literal["all"] | tuple[OpName, ...]
    # Ops that may run on the reference instead; each use is counted and shown. One that `ops` claims may be among them:
    # a kernel may serve some formats of its weights and refuse others.
    fallback: tuple[OpName, ...]
    arithmetic: Literal["all"] | Annotated[tuple[str, ...], Field(min_length=1)]  # names of m31.formats.arithmetic
    options: tuple[Option, ...]  # of `Backend.open`, that it takes
    determinism: Determinism | None = None  # None promises nothing (API 1.1)
    probe: Target | None = None  # "module:function", run in a child process
    device: DeviceMatch
    packages: dict[str, str]  # distribution -> minimum version
    formats: Formats
    limits: DeclaredLimits

    @field_validator("requires")
    @classmethod
    def _is_range(cls, value: str) -> str:
        try:
            parsed = SpecifierSet(value)
        except InvalidSpecifier:
            raise ValueError(f"'{value}' is not a version range such as '>=1.0,<2'") from None
        if not len(parsed):
            raise ValueError("an empty range accepts every future API; write one such as '>=1.0,<2'")
        return value

    @field_validator("arithmetic")
    @classmethod
    def _are_arithmetics(cls, value: Literal["all"] | tuple[str, ...]) -> Literal["all"] | tuple[str, ...]:
        for name in () if value == "all" else value:
            try:
                parse_arithmetic(name)
            except OpRefused as error:
                raise ValueError(str(error)) from None
        return value

    @field_validator("packages")
    @classmethod
    def _are_versions(cls, value: dict[str, str]) -> dict[str, str]:
        for package, minimum in value.items():
            try:
                _version(minimum)
            except ValueError as error:
                raise ValueError(f"{package}: {error}") from None
        return value

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.device.kind == "probe" and self.probe is None:
            raise ValueError('device.kind = "probe" needs the key probe = "module:function"')
        if self.device.min_count is not None and self.limits.tensor_parallel > self.device.min_count:
            raise ValueError(
                f"limits.tensor_parallel = {self.limits.tensor_parallel} needs more devices than"
                f" device.min_count = {self.device.min_count}"
            )
        repeated = [op for op in self.fallback if self.fallback.count(op) > 1]
        if repeated:
            raise ValueError(f"fallback lists '{repeated[0]}' more than once")
        if self.ops == "all" and self.fallback:
            raise ValueError(f"fallback lists ops of a backend that claims to serve all: {', '.join(self.fallback)}")
        return self


def _version(value: str) -> str:
    try:
        Version(value)
    except InvalidVersion:
        raise ValueError(f"'{value}' is not a version number") from None
    return value


def parse_manifest(text: str, where: str) -> Manifest:
    """Parse the text of a `backend.toml`.

    Args:
        text: the file's content.
        where: the file's path, for messages.

    Raises:
        ManifestError: not TOML, an unknown or missing key, a wrong type, a contradiction. All mistakes are listed.
    """
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ManifestError(f"not valid TOML: {error}", where=where, fix="repair the file") from error
    try:
        # Through JSON, because strict mode then takes an array for a tuple and still refuses 10.0 or "10" for an int.
        return Manifest.model_validate_json(json.dumps(data))
    except TypeError as error:  # TOML dates have no JSON form, and no key of a manifest is a date
        raise ManifestError(f"a value is of a kind that no key takes: {error}", where=where) from error
    except ValidationError as error:
        faults = [_fault(detail["loc"], detail["type"], detail["msg"], detail["input"]) for detail in error.errors()]
        raise ManifestError(
            "; ".join(faults),
            where=where,
            fix="correct these keys (the manifest's keys are listed in m31.sdk.manifest)",
        ) from error


def read_manifest(path: Path) -> Manifest:
    """Read and parse one manifest file.

    Raises:
        ManifestError: the file is absent or unreadable, or `parse_manifest` refuses it.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ManifestError(
            "the manifest is missing",
            where=str(path),
            expected=f"a {FILE_NAME} beside the package's __init__",
            fix="include it in the package's wheel",
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ManifestError(f"the manifest cannot be read: {error}", where=str(path)) from error
    return parse_manifest(text, str(path))


def _fault(loc: tuple[int | str, ...], kind: str, message: str, value: Any) -> str:
    """One mistake in words: the key as it is written in the file, and what is wrong with it."""
    key = ".".join(str(part) for part in _without_union_tags(loc))
    if kind == "extra_forbidden":
        near = difflib.get_close_matches(str(loc[-1]), _known_keys(loc[:-1]), n=1)
        return f"unknown key '{key}'" + (f" (did you mean '{near[0]}'?)" if near else "")
    if kind == "missing":
        return f"key '{key}' is missing"
    message = message.removeprefix("Value error, ")
    if not key:
        return message
    shown = "" if isinstance(value, dict) else f" (got {value!r})"
    return f"key '{key}': {message[0].lower()}{message[1:]}{shown}"


def _without_union_tags(loc: tuple[int | str, ...]) -> list[int | str]:
    # pydantic inserts the member of a union that it tried ("literal['all']", "tuple[...]") into the location
    return [part for part in loc if not (isinstance(part, str) and "[" in part)]


def _known_keys(path: tuple[int | str, ...]) -> list[str]:
    model: Any = Manifest
    for part in path:
        model = model.model_fields[part].annotation
    return list(model.model_fields)
