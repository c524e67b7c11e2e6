"""`m31 conform pack`: a run as one archive that others can check, byte for byte the same from the same journal."""

from __future__ import annotations

import datetime
import gzip
import hashlib
import io
import json
import tarfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from m31.conformance import report
from m31.conformance.files import writing
from m31.conformance.report import document
from m31.conformance.running import journal
from m31.errors import SuiteError

FORMAT = 1
DIGESTS, ABOUT, STATEMENT = "SHA256SUMS", "pack.json", "STATEMENT.txt"
MANIFEST, ENVIRONMENT, EXPECT = "manifest.json", "environment.json", "expect.toml"
REPORTS = (report.JSON, report.JUNIT, report.MARKDOWN, report.HTML)
REQUIRED = (*REPORTS, journal.NAME, MANIFEST, ENVIRONMENT, ABOUT, STATEMENT, DIGESTS)
MAX_BYTES = 256 << 20
"""Of an archive, unpacked: it is somebody else's, and may be made to fill the memory."""


def dirty(provenance: Mapping[str, Any]) -> list[str]:
    """Sources that had changes which no commit has."""
    parts = {"m31": provenance["software"]["checkout"], "the backend": provenance["backend"]["checkout"]}
    if "judged" in provenance:
        parts["the judging m31"] = provenance["judged"]["software"]["checkout"]
    return [name for name, checkout in parts.items() if checkout is not None and checkout["dirty"]]


def contents(folder: Path, *, allow_dirty: bool, today: datetime.date) -> dict[str, bytes]:
    """The files of the archive of a run. The reports are made anew from its journal.

    Raises: SuiteError: the run is incomplete, of a selection, or recorded and not judged; an entry of its `expect.toml`
        has expired; a source had changes and `allow_dirty` is not given.
    """
    run = journal.read(folder)
    made = document.build(run, today=today)
    what = None
    if not run.complete:
        what = "the run is incomplete"
    elif made["recorded"]:
        what = "the run was recorded and not judged"
    elif made["selection"]["expression"] is not None:
        what = "the run is of a selection (-k)"
    elif any("expired" in text for text in made["verdict"]["stale_expectations"]):
        what = "an entry of expect.toml has expired"
    if what is not None:
        raise SuiteError(what, where=str(folder), expected="a whole run of a level", fix="run it again")
    changed = dirty(made["provenance"])
    if changed and not allow_dirty:
        raise SuiteError(
            f"{' and '.join(changed)} had changes that no commit has",
            where=str(folder),
            fix="commit and run again, or say --allow-dirty, which the archive records",
        )
    about = {"format": FORMAT, "packed": today.isoformat(), "allow_dirty": allow_dirty, "dirty": changed}
    files = report.render(made)
    files[journal.NAME] = (folder / journal.NAME).read_bytes()
    files[MANIFEST] = _json(made["manifest"])
    files[ENVIRONMENT] = _json(made["provenance"])
    files[ABOUT] = _json(about)
    files[STATEMENT] = statement(made, about).encode()
    if run.header["expect"]:
        files[EXPECT] = run.header["expect"].encode()
    files[DIGESTS] = digests(files)
    return files


def pack(
    folder: Path, path: Path, *, allow_dirty: bool = False, today: datetime.date | None = None
) -> dict[str, bytes]:
    """Write the archive of a run, a gzipped tar, whole or not at all; its files are returned. See `contents`."""
    files = contents(folder, allow_dirty=allow_dirty, today=today or datetime.date.today())
    partial = path.with_name(path.name + ".partial")
    with writing(path):
        partial.write_bytes(archive(files, path.name.removesuffix(".gz").removesuffix(".tar")))
        partial.replace(path)
    return files


def archive(files: Mapping[str, bytes], top: str) -> bytes:
    """The bytes of the archive: names sorted, no times, no owners."""
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name, data in sorted(files.items()):
            entry = tarfile.TarInfo(f"{top}/{name}")
            entry.size, entry.mode, entry.mtime = len(data), 0o644, 0
            tar.addfile(entry, io.BytesIO(data))
    return gzip.compress(raw.getvalue(), mtime=0)


def unpack(path: Path) -> dict[str, bytes]:
    """The files of an archive, in memory.

    Raises: SuiteError: it cannot be read, or holds anything but files of the names above in one folder.
    """
    files: dict[str, bytes] = {}
    try:
        with gzip.open(path) as packed:  # to its end, so that its checksum is seen
            raw = packed.read(MAX_BYTES + 1)
        if len(raw) > MAX_BYTES:
            raise SuiteError(f"it unpacks to more than {MAX_BYTES:,} bytes", where=str(path))
        with tarfile.open(fileobj=io.BytesIO(raw)) as tar:
            for entry in tar:
                name = entry.name.rpartition("/")[2]
                source = tar.extractfile(entry) if entry.isfile() else None
                if source is None or name not in (*REQUIRED, EXPECT) or name in files:
                    raise SuiteError(f"it holds '{entry.name}', which does not belong there", where=str(path))
                files[name] = source.read()
    except (OSError, EOFError, tarfile.TarError, zlib.error) as error:
        raise SuiteError(f"the archive cannot be read: {error}", where=str(path)) from error
    return files


def digests(files: Mapping[str, bytes]) -> bytes:
    """The content of SHA256SUMS, in the format of the common tool, without itself."""
    lines = [f"{hashlib.sha256(data).hexdigest()}  {n}" for n, data in sorted(files.items()) if n != DIGESTS]
    return ("\n".join(lines) + "\n").encode()


def statement(made: dict[str, Any], about: Mapping[str, Any]) -> str:
    """What the archive says, in sentences."""
    provenance, verdict = made["provenance"], made["verdict"]
    backend, software = provenance["backend"], provenance["software"]
    version = backend["version"] or "not installed"
    lines = [
        "Statement of conformance",
        "",
        f"Backend: {backend['name']}, {backend['distribution'] or backend['entry']} {version}",
        f"Manifest: sha256 {backend['manifest_sha256']}",
        f"Suite: version {software['suite']} of m31 {software['m31']}, catalog sha256 {made['selection']['catalog']}",
        f"Run: levels up to {made['selection']['level']}, {len(made['results'])} items, {provenance['started']}",
        f"Verdict: {verdict['sentence']}",
        f"Level: {verdict['level'] or 'none'}",
    ]
    for name in verdict["waived"]:
        lines.append(f"Waived: {name}")
    if about["dirty"]:
        lines.append(f"Not reproducible: {' and '.join(about['dirty'])} had changes that no commit has.")
    lines += [
        "",
        f"`m31 conform verify` checks this archive and runs a sample of its items again. Packed {about['packed']}.",
    ]
    return "\n".join(lines) + "\n"


def _json(value: object) -> bytes:
    return (json.dumps(value, indent=1, allow_nan=False) + "\n").encode()
