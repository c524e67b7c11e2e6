"""Listing: which backends are installed, from which distribution, and what their manifests say. No plugin code runs.

Through `importlib.metadata`, distribution by distribution, since the usual shortcuts lose the distribution, miss
duplicate names that are not adjacent, or serve a stale list (BUG-94, BUG-95), and since one distribution with a broken
`entry_points.txt` must not hide the others.
"""

from __future__ import annotations

import importlib.metadata as metadata
import importlib.util
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from packaging.version import InvalidVersion, Version

from m31.errors import BackendError, ManifestError
from m31.sdk.child import Outcome
from m31.sdk.manifest import FILE_NAME, Manifest, normalise, read_manifest

if TYPE_CHECKING:
    from m31.sdk.backend import Backend

GROUP = "m31.backends"
HOME_DISTRIBUTION = "m31"


@dataclass(frozen=True, kw_only=True)
class Policy:
    """Which installed backends the user allows at all."""

    plugins: bool  # False: only those of the m31 distribution itself
    allow: tuple[str, ...] | None  # None: every name

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> Policy:
        """Read `M31_NO_PLUGINS` (1 or 0) and `M31_BACKENDS_ALLOW` (names separated by commas).

        Raises:
            BackendError: `M31_NO_PLUGINS` is neither 1 nor 0.
        """
        environ = os.environ if environ is None else environ
        switch = environ.get("M31_NO_PLUGINS", "").strip()
        if switch not in ("", "0", "1"):
            raise BackendError(
                f"'{switch}' is not a value of this variable",
                where="M31_NO_PLUGINS",
                expected="1 (only m31's own backends) or 0",
                fix="set one of the two, or unset it",
            )
        names = tuple(normalise(n) for n in environ.get("M31_BACKENDS_ALLOW", "").split(",") if n.strip())
        return cls(plugins=switch != "1", allow=names or None)


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One installed backend as far as it is known without running its code.

    Exactly one of `manifest`, `failure` and `blocked` is set. `missing`, `probed` and `trial` are facts that selection,
    which is pure, cannot gather for itself.
    """

    name: str  # normalised
    raw_name: str  # as the distribution spells it
    entry: str  # "module:attribute"
    distribution: str | None  # None: its metadata names none
    version: str | None
    builtin: bool  # comes with m31
    location: str | None  # the folder that its metadata was found in
    manifest: Manifest | None = None
    failure: str | None = None  # why there is no manifest
    blocked: str | None = None  # the user's own setting that forbids it
    missing: tuple[str, ...] = ()  # required packages that are absent or too old, in words
    probed: Outcome | None = None  # what the manifest's probe answered, in a child process
    trial: Outcome | None = None  # what importing it in a child process answered
    instance: Backend | None = None  # a backend that was given as an object, not found

    @property
    def origin(self) -> str:
        """`distribution version`, for messages."""
        if self.distribution is None:
            return f"an unnamed distribution in {self.location}"
        return f"{self.distribution} {self.version or '(version unknown)'}"


def discover(policy: Policy | None = None) -> tuple[Candidate, ...]:
    """List every installed backend, sorted by name and distribution.

    A fault of a plugin (stale metadata, a package that is gone, a broken manifest) is a candidate with `failure` set,
    never an exception, and never keeps another backend from being listed.

    Raises:
        BackendError: the user's own environment variables are malformed.
    """
    policy = Policy.from_environment() if policy is None else policy
    found = [_describe(c, policy) for c in _entries()]
    return tuple(sorted(found, key=lambda c: (c.name, c.distribution or "", c.entry)))


def _entries() -> Iterator[Candidate]:
    """One bare candidate per entry point of the group, earlier folders of `sys.path` shadowing later ones."""
    seen: set[str] = set()
    for dist in metadata.distributions():
        text = _entry_text(dist)
        if text is None or GROUP not in text:
            continue
        name, version = _identity(dist)
        key = normalise(name) if name else str(dist.locate_file(""))
        if key in seen or (name is not None and _shadowed(name, text)):
            continue
        seen.add(key)
        base = Candidate(
            name="",
            raw_name="",
            entry="",
            distribution=name,
            version=version,
            builtin=name is not None and normalise(name) == HOME_DISTRIBUTION,
            location=str(dist.locate_file("")),
        )
        yield from _parsed(dist, base)


def _entry_text(dist: metadata.Distribution) -> str | None:
    try:
        return dist.read_text("entry_points.txt")
    except (OSError, UnicodeDecodeError):
        return None  # unreadable metadata names no backend; there is nothing to report it under


def _identity(dist: metadata.Distribution) -> tuple[str | None, str | None]:
    """Name and version; each None where the METADATA file is absent or damaged (a half-removed installation)."""
    try:
        meta = dist.metadata
        return meta["Name"] or None, meta["Version"] or None
    except Exception:  # noqa: BLE001 - damaged files of others raise whatever their parser happens to raise
        return None, None


def _shadowed(name: str, text: str) -> bool:
    """Whether Python itself would take another installation of the same distribution, earlier on the path."""
    try:
        return metadata.distribution(name).read_text("entry_points.txt") != text
    except metadata.PackageNotFoundError:
        return False


def _parsed(dist: metadata.Distribution, base: Candidate) -> Iterator[Candidate]:
    try:
        points = [e for e in dist.entry_points if e.group == GROUP]
        pairs = [(e.name, e.value) for e in points]
    except Exception as error:  # noqa: BLE001 - one broken entry_points.txt must not hide every other backend
        label = base.distribution or "unnamed"
        broken = f"its entry_points.txt cannot be parsed: {error}"
        yield replace(base, name=normalise(label), raw_name=label, failure=broken)
        return
    for name, value in pairs:
        yield replace(base, name=normalise(name), raw_name=name, entry=value)


def _describe(candidate: Candidate, policy: Policy) -> Candidate:
    if not policy.plugins and not candidate.builtin:
        return replace(candidate, failure=None, blocked="M31_NO_PLUGINS=1 allows only m31's own backends")
    if policy.allow is not None and candidate.name not in policy.allow:
        return replace(candidate, failure=None, blocked=f"M31_BACKENDS_ALLOW={','.join(policy.allow)} does not list it")
    if candidate.failure is not None:
        return candidate
    try:
        manifest = read_manifest(manifest_path(candidate.entry))
        if manifest.name != candidate.name:
            raise ManifestError(
                f"the manifest is of '{manifest.name}', the entry point of '{candidate.name}'",
                fix="give both the same name",
            )
    except ManifestError as error:
        return replace(candidate, failure=str(error))
    return replace(candidate, manifest=manifest, missing=_missing(manifest))


def manifest_path(entry: str) -> Path:
    """Where the manifest of the backend `module:attribute` should be; imports nothing.

    Only the top-level package is looked up: looking up a dotted name would import its parents.

    Raises:
        ManifestError: malformed entry point, or no such package installed.
    """
    module, colon, attribute = (part.strip() for part in entry.partition(":"))
    top = module.split(".")[0]
    if not colon or not attribute.isidentifier() or not all(p.isidentifier() for p in module.split(".")):
        raise ManifestError(f"the entry point '{entry}' is malformed", expected="package.module:Class")
    try:
        spec = importlib.util.find_spec(top)
    except Exception as error:  # import hooks of other packages run here, and raise what they like
        raise ManifestError(f"looking up package '{top}' failed: {type(error).__name__}: {error}") from error
    if spec is None:
        raise ManifestError(
            f"package '{top}' is not installed, though its metadata is",
            fix="reinstall or uninstall the distribution",
        )
    if spec.origin is None or not spec.submodule_search_locations:
        raise ManifestError(f"'{top}' is not a package with an __init__", expected=f"a package that holds {FILE_NAME}")
    return Path(spec.origin).parent / FILE_NAME


def _missing(manifest: Manifest) -> tuple[str, ...]:
    lacks = []
    for package, minimum in sorted(manifest.packages.items()):
        try:
            installed = metadata.version(package)
        except metadata.PackageNotFoundError:
            lacks.append(f"{package} >= {minimum} is not installed")
            continue
        try:
            too_old = Version(installed) < Version(minimum)
        except (InvalidVersion, TypeError):
            lacks.append(f"{package} >= {minimum}: the installed version '{installed}' is not a version number")
            continue
        if too_old:
            lacks.append(f"{package} >= {minimum}: {installed} is installed")
    return tuple(lacks)
