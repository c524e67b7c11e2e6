"""A deterministic fuzzer of the calibration file of `m31 convert --input-scales`.

Case `n` is the same for everybody: a damaged file, and a conversion with it. What may happen is an error of m31, or a
folder whose scales are those that the file says, by an independent reader: Python's own JSON, rounded by numpy.
"""

from __future__ import annotations

import json
import math
import random
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from tests.support.fuzz import bytes_damage, json_damage

from m31.checkpoint import Checkpoint, QuantizedTensor, convert
from m31.cli.convert import input_scales
from m31.errors import M31Error

_NUMBERS = (
    *(0, 1, -1, 3, 2**64, 10**400, 10**5000, 0.5, -0.0, 2.5, 48.0),
    *(1e-50, 1e-40, 2.9e-39, 3e-39, 1e-38, 1.1754944e-38, 3.4e38, 3.5e38, 1e39, 1e308, 5e-324),
    *(math.nan, math.inf, -math.inf, "1", True, None, [1.0]),
)


def _text(value: Any) -> str:
    """JSON, with integers of any length."""
    if isinstance(value, int) and abs(value) > 10**300:
        return "1" + "0" * (400 if value < 10**1000 else 5000)
    return json.dumps(value)


def damaged(rng: random.Random, names: list[str]) -> bytes:
    """A calibration file: mostly unusual numbers under the right names, else a change of names or bytes."""
    chosen = rng.sample(names, rng.randrange(1, 4))
    values = {name: rng.uniform(0.1, 200.0) for name in chosen}
    kind = rng.random()
    if kind < 0.6:
        values[chosen[0]] = rng.choice(_NUMBERS) if rng.random() < 0.8 else 10 ** rng.uniform(-45, 45)
    elif kind < 0.8:
        values = json_damage(rng, values)
    if not isinstance(values, dict):
        return json.dumps(values).encode("utf-8", "surrogatepass")
    data = "{" + ", ".join(f"{json.dumps(name)}: {_text(value)}" for name, value in values.items()) + "}"
    raw = data.encode("utf-8", "surrogatepass")
    return bytes_damage(rng, raw) if kind >= 0.8 else raw


def _scale(checkpoint: Checkpoint, name: str) -> float:
    tensor = checkpoint.tensor(name)
    assert isinstance(tensor, QuantizedTensor)
    return float(tensor.parts()["input_global_scale"].load())


def run_case(case: int, source: Path, default: dict[str, float], folder: Path) -> str:
    """`refused`, `written`, or what went wrong. `default` holds the scales of a conversion without a file."""
    rng = random.Random(case)
    file, goal = folder / "scales.json", folder / "out"
    file.write_bytes(damaged(rng, list(default)))
    try:
        written = convert(source, goal, target="m31", max_shard_bytes=10**9, input_scales=input_scales(str(file)))
    except M31Error as error:
        left = sorted(path.name for path in folder.iterdir() if path != file)
        return f"left {left} behind" if left else "refused" if str(error) and error.what else "an error without text"
    except Exception as error:  # noqa: BLE001  # whatever it is, it is the finding
        return f"{type(error).__name__}: {str(error)[:300]}"
    try:
        with np.errstate(over="ignore"):
            wanted = default | {name: float(np.float32(v)) for name, v in json.loads(file.read_bytes()).items()}
        found = {name: _scale(written, name) for name in wanted}
    except M31Error as error:
        return f"what was written cannot be read: {error}"
    else:
        if found != wanted:
            return f"{sorted(name for name in wanted if found[name] != wanted[name])} were written differently"
        bad = [name for name, scale in found.items() if not (0 < scale < math.inf and 1 / scale < 3.4028235e38)]
        return f"{bad} cannot be divided by" if bad else "written"
    finally:
        shutil.rmtree(goal)


def run(first: int, count: int, source: Path, folder: Path) -> tuple[Counter[str], list[str]]:
    """Cases `first` to `first + count - 1`: outcomes, and a line for each that failed."""
    plain = convert(source, folder / "plain", target="m31", max_shard_bytes=10**9, input_scales={})
    default = {name: _scale(plain, name) for name in plain.names if plain.tensor(name).format == "nvfp4"}
    (folder / "scratch").mkdir()
    outcomes: Counter[str] = Counter()
    failures: list[str] = []
    for case in range(first, first + count):
        outcome = run_case(case, source, default, folder / "scratch")
        outcomes[outcome if outcome in ("refused", "written") else "failed"] += 1
        if outcome not in ("refused", "written"):
            failures.append(f"case {case}: {outcome}")
    return outcomes, failures
