"""Evidence in files: one per item, whole or not there, readable without the backend that made it."""

from __future__ import annotations

import hashlib
import io
import json
import os
import zipfile
from pathlib import Path
from typing import Any

from m31.conformance.files import writing
from m31.conformance.item import Evidence
from m31.errors import SuiteError

_FACTS = "__facts__"
_KINDS = "biufcSU"  # of numpy dtypes that a file holds without pickling


def file_name(item_id: str) -> str:
    """The file of an item's evidence; ids have characters that not every file system takes."""
    return hashlib.sha256(item_id.encode()).hexdigest()[:32] + ".npz"


def store(path: Path, item_id: str, evidence: Evidence) -> None:
    """Write evidence, all or nothing.

    Raises: SuiteError: it has an array or a fact that no file holds, or the file cannot be written.
    """
    import numpy as np

    arrays: dict[str, Any] = {}  # Any: numpy's stub takes the first keyword for a flag
    for name, value in evidence.arrays.items():
        array = np.asarray(value)
        if array.dtype.kind not in _KINDS or name == _FACTS:
            raise SuiteError(f"array '{name}' of {array.dtype} cannot be recorded", where=item_id)
        arrays[name] = array
    try:
        facts = json.dumps({"id": item_id, "facts": dict(evidence.facts)}, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise SuiteError(f"its facts are not JSON: {error}", where=item_id) from error
    data = io.BytesIO()
    arrays[_FACTS] = np.frombuffer(facts.encode(), np.uint8)
    np.savez(data, **arrays)
    partial = path.with_suffix(".partial")
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as file:
            file.write(data.getbuffer())
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)


def load(path: Path, item_id: str) -> Evidence:
    """Read evidence.

    Raises: SuiteError: the file is absent, damaged, or another item's.
    """
    import numpy as np

    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        about = json.loads(bytes(arrays.pop(_FACTS)))
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise SuiteError(f"recorded evidence cannot be read: {error}", where=str(path)) from error
    if about["id"] != item_id:
        raise SuiteError(f"the evidence is of '{about['id']}'", where=str(path), expected=f"of '{item_id}'")
    return Evidence(arrays=arrays, facts=about["facts"])


def sha256(path: Path) -> str:
    """Of a file's bytes."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()
