"""Which checkpoints, formats and arithmetics a manifest lets the suite combine."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from m31.conformance.rig import Forms
from m31.formats.arithmetic import NAMED, parse
from m31.ops.cases import rng_for
from m31.sdk.manifest import Manifest

#: synthetic checkpoint -> the format of its routed experts or, where those are plain, of everything
CHECKPOINTS = {"random-bf16": "bfloat16", "random-m31": "nvfp4", "random-m3-mxfp8": "mxfp8"}
_PREFERRED = ("random-m31", "random-bf16", "random-m3-mxfp8")
_COARSE = ("fp8", "nvfp4")  # pages that can be read as E4M3


def checkpoints(manifest: Manifest) -> list[str]:
    """Synthetic checkpoints with weights that the manifest takes, the published model's formats first."""
    return [name for name in _PREFERRED if CHECKPOINTS[name] in manifest.formats.weights]


def arithmetics(manifest: Manifest) -> list[str]:
    """Names of what the manifest claims, the default first."""
    return list(NAMED) if manifest.arithmetic == "all" else list(manifest.arithmetic)


def pages(manifest: Manifest) -> Iterator[tuple[str, Forms]]:
    """Claim -> forms: every format of pages once, under an arithmetic that can read it."""
    for kv in manifest.formats.kv:
        yield f"kv:{kv}", Forms(kv=kv, arithmetic=_reading(manifest, kv))
    for index in manifest.formats.index:
        yield f"index:{index}", Forms(index=index)


def _reading(manifest: Manifest, kv: str) -> str | None:
    """None is the backend's first arithmetic; another where that reads keys and values as E4M3 and these are wider."""
    names = arithmetics(manifest)
    if kv in _COARSE or parse(names[0]).kv_read == "exact":
        return None
    return next((name for name in names if parse(name).kv_read == "exact"), None)


def shown(forms: Forms) -> str:
    """For ids: "default" where nothing is asked for."""
    return forms.label.replace("+", "-").replace("=", "-") or "default"


def prompt(name: str, count: int, vocabulary: int) -> list[int]:
    """Token ids of a prompt: any but the first three."""
    found: list[int] = rng_for(name).integers(3, vocabulary, count).tolist()
    return found


def normal(name: str, *shape: int) -> np.ndarray:
    """Standard normal numbers, as every rank and machine makes them."""
    return rng_for(name).standard_normal(shape)
