"""The example backend `examples/numpy_backend` in this process, and how its caches are filled by its own kernels."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from m31 import ops
from m31.formats.arithmetic import NAMED
from m31.graph import Kernel, OpInstance, StepClass
from m31.ops import OpSpec
from m31.sdk.backend import KVCache, KVSpec, Session
from m31.sdk.manifest import read_manifest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "numpy_backend"
MANIFEST = read_manifest(EXAMPLE / "m31_numpy" / "backend.toml")
STEP = StepClass(kind="mixed", q_len=0, tokens=16, seqs=4, rows=16, pages=16)
OPEN: dict[str, Any] = {
    "device": None,
    "dtype": "float32",
    "rank": 0,
    "world": 1,
    "arithmetic": NAMED["exact"],
    "options": {},
}

if str(EXAMPLE) not in sys.path:
    sys.path.append(str(EXAMPLE))  # it is not installed here; another test installs it where it belongs


def open_numpy(**asked: Any) -> Session:
    """A session of the example, asked for `asked` and else for nothing special."""
    from m31_numpy import NumpyBackend

    session: Session = NumpyBackend(MANIFEST).open(**{**OPEN, **asked})
    return session


def kernel(session: Session, spec: OpSpec, attrs: Mapping[str, Any]) -> Kernel:
    """The kernel of an op; its instance has no types, which the example does not look at."""
    found = session.kernel(OpInstance("op", spec, attrs, (), ()), STEP)
    assert isinstance(found, Kernel), found
    return found


def pages(session: Session, state: Mapping[tuple[int, str], Any], form: str = "float32") -> KVCache:
    """A cache that holds the arrays of a case, written by the backend's own kernels."""
    index = state.get((0, "index"))
    k = state.get((0, "k"))
    if k is None:
        k = np.zeros((len(index), 1, index.shape[1], 2))
    spec = KVSpec(
        indexed=(index is not None,),
        kv_heads=k.shape[1],
        head_dim=k.shape[3],
        index_dim=index.shape[2] if index is not None else 0,
        page_tokens=k.shape[2],
        kv_format=form,  # type: ignore[arg-type]
        index_format=form,  # type: ignore[arg-type]
    )
    cache = session.kv_layout(spec).allocate(len(k))
    slots = torch.arange(len(k) * spec.page_tokens)
    k_ThD, v_ThD = (
        torch.tensor(x, dtype=torch.float32).transpose(1, 2).flatten(0, 1) for x in (k, state.get((0, "v"), k))
    )
    kernel(session, ops.kv_write, {"layer": 0}).run([cache], [cache, k_ThD, v_ThD.flatten(1), slots], None, None)
    if index is not None:
        k_T1D = torch.tensor(index, dtype=torch.float32).flatten(0, 1)[:, None]
        kernel(session, ops.index_write, {"layer": 0}).run([cache], [cache, k_T1D, slots], None, None)
    return cache
