"""`m31 new-backend NAME`: a package of its own that serves one op, leaves the rest to the reference, and passes L0."""

from __future__ import annotations

import argparse
import keyword
import os
import re
import shutil
import tempfile
from importlib import resources
from pathlib import Path

from m31.cli.output import Output
from m31.errors import RequestError

_FILES = {
    "pyproject.toml": "pyproject.toml.txt",
    "README.md": "README.md.txt",
    "expect.toml": "expect.toml.txt",
    ".gitignore": "gitignore.txt",
    ".github/workflows/conformance.yml": "conformance.yml.txt",
    "@PACKAGE@/__init__.py": "__init__.py.txt",
    "@PACKAGE@/backend.toml": "backend.toml.txt",
    "@PACKAGE@/session.py": "session.py.txt",
    "@PACKAGE@/py.typed": "",
    "tests/test_ops.py": "test_ops.py.txt",
    "tests/test_conformance.py": "test_conformance.py.txt",
}
"""What is written -> its template in `m31.cli.templates.backend`; "" is an empty file."""
_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
_LONGEST = 40


def command(args: argparse.Namespace, out: Output) -> int:
    """Run the command; the exit code.

    Raises: RequestError for a name or a folder that cannot be used, or when the folder cannot be written.
    """
    name = checked(args.name)
    folder = Path(args.dir if args.dir is not None else f"m31-{name}-backend")
    write(folder, name)
    out.note(f"wrote the backend '{name}' to {folder}: it serves gemma_rmsnorm, and leaves the rest to the reference")
    for line in (f"pip install -e '{folder}'", f"m31 lint-backend {folder}", f"m31 run CKPT 'Hello' --backend {name}"):
        out.line(line)
    return 0


def checked(name: str) -> str:
    """The name, if a backend can have it (PEP 503, in the one spelling) and none here has.

    Raises: RequestError.
    """
    from m31.sdk.discovery import Policy, discover
    from m31.sdk.manifest import normalise

    where = "new-backend"
    if not _NAME.fullmatch(name) or len(name) > _LONGEST:
        meant = normalise(name)
        raise RequestError(
            f"'{name}' cannot be the name of a backend",
            where=where,
            expected=f"lower case letters, digits and single hyphens, a letter first, at most {_LONGEST}",
            fix=f"did you mean '{meant}'?" if meant != name and _NAME.fullmatch(meant) else None,
        )
    if keyword.iskeyword(name) or keyword.issoftkeyword(name) or name in ("auto", "m31"):
        raise RequestError(f"'{name}' means something else", where=where, expected="a name that is free")
    taken = {candidate.name: candidate.origin for candidate in discover(Policy.from_environment())}
    if name in taken:
        raise RequestError(f"there is a backend '{name}' already, of {taken[name]}", where=where, fix="choose another")
    return name


def write(folder: Path, name: str) -> None:
    """Write the package, all or nothing.

    Args:
        folder: must not exist.
        name: checked.

    Raises: RequestError when it exists, or cannot be written.
    """
    title = "".join(part.capitalize() for part in name.split("-"))
    words = {
        "@NAME@": name,
        "@DISTRIBUTION@": f"m31-{name}-backend",
        "@PACKAGE@": f"m31_{name.replace('-', '_')}",
        "@CLASS@": f"{title}Backend",
        "@SESSION@": f"{title}Session",
    }
    if folder.exists() or folder.is_symlink():
        raise RequestError(f"'{folder}' exists", where="new-backend", expected="a folder to create")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
        try:
            for place, template in _FILES.items():
                path = work / _filled(place, words)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(_filled(_read(template), words) if template else "")
            work.chmod(0o777 & ~_umask())  # mkdtemp lets nobody else in
            os.rename(work, folder)
        except BaseException:
            shutil.rmtree(work, ignore_errors=True)
            raise
    except OSError as error:
        raise RequestError(f"'{folder}' cannot be written: {error.strerror}", where="new-backend") from error


def _read(template: str) -> str:
    return resources.files("m31.cli").joinpath("templates", "backend", template).read_text()


def _filled(text: str, words: dict[str, str]) -> str:
    for word, value in words.items():
        text = text.replace(word, value)
    return text


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
