"""What a checkpoint folder holds, read with `safetensors` and the standard library alone. Nothing of m31 is imported.

python tests/support/plain_reader.py FOLDER     prints {name: [dtype, shape]} and the totals as JSON
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from safetensors import safe_open

_BYTES = {"F32": 4, "BF16": 2, "U8": 1, "F8_E4M3": 1}


def read(folder: Path) -> dict[str, Any]:
    """Names, dtypes and shapes by the index (or of the single file), the bytes that they add up to, and the claim of
    the index."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        content = json.loads(index.read_text())
        weight_map, claimed = content["weight_map"], content["metadata"]["total_size"]
    else:
        with safe_open(folder / "model.safetensors", framework="np") as handle:
            weight_map, claimed = dict.fromkeys(handle.keys(), "model.safetensors"), None
    tensors: dict[str, list[Any]] = {}
    for file in sorted(set(weight_map.values())):
        with safe_open(folder / file, framework="np") as handle:
            names = list(handle.keys())
            assert sorted(names) == sorted(name for name, where in weight_map.items() if where == file), file
            for name in names:
                part = handle.get_slice(name)
                tensors[name] = [part.get_dtype(), part.get_shape()]
    total = 0
    for dtype, shape in tensors.values():
        size = _BYTES[dtype]
        for extent in shape:
            size *= extent
        total += size
    return {"tensors": tensors, "bytes": total, "claimed": claimed}


if __name__ == "__main__":
    json.dump(read(Path(sys.argv[1])), sys.stdout)
