"""Opening a checkpoint on a backend, before any weight is read: what `m31.load` and `m31 explain` share.

The reference is opened beside the chosen backend where its manifest lets ops fall back.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from m31 import sdk
from m31.checkpoint import Checkpoint
from m31.engine.compiler import Compiler, whole
from m31.errors import BackendRefused, RequestError
from m31.formats.layout import ScaleOrder
from m31.graph import NO_ROUNDING, Assigned, OpInstance, Rounding, trace
from m31.sdk.backend import KVSpec, LazyTensor, Session
from m31.sdk.manifest import Manifest
from m31.sdk.selection import Decision
from m31.sdk.serving import Serving

_SHORT = {"bf16": "bfloat16", "fp32": "float32", "f32": "float32", "fp64": "float64", "fp4": "nvfp4", "e4m3": "fp8"}
SPARE = "reference"  # what an op falls back on: the one backend that serves every op


def open_serving(
    decision: Decision,
    *,
    device: str | None,
    dtype: str,
    arithmetic: str | None,
    weight_cache_bytes: int | None,
) -> Serving:
    """Sessions for a decision.

    Args:
        decision: of `m31.sdk.decide`.
        device, dtype, arithmetic: see `Backend.open`. What falls back is computed in the chosen backend's arithmetic.
        weight_cache_bytes: for whichever decodes weights while it runs: the reference, if ops fall back on it.

    Raises:
        BackendError: nothing was chosen, or a backend refuses to be opened so.
    """
    candidate = decision.require()
    assert candidate.manifest is not None, "a backend without a manifest is never chosen"
    name, fallback = candidate.manifest.name, candidate.manifest.fallback

    def opened(backend: sdk.Backend, arithmetic: str | None, cache: int | None) -> Session:
        return backend.open(
            device=device, dtype=dtype, rank=0, world=1, arithmetic=arithmetic, weight_cache_bytes=cache
        )

    session = opened(sdk.open_backend(decision), arithmetic, None if fallback else weight_cache_bytes)
    if not fallback:
        return Serving(name, session)
    spare = opened(sdk.open_backend(sdk.decide(SPARE)), session.numerics.name, weight_cache_bytes)
    return Serving(name, session, may_fall_back=fallback, spare=(SPARE, spare))


@dataclass(frozen=True, eq=False)
class Opened:
    """A checkpoint on a backend; no weight has been read and no page allocated."""

    checkpoint: Checkpoint
    decision: Decision
    manifest: Manifest
    serving: Serving
    spec: KVSpec
    compiler: Compiler


def open_model(
    path: Path,
    *,
    backend: str | None,
    device: str | None,
    dtype: str,
    kv_dtype: str | None,
    index_dtype: str | None,
    v_scale_order: str | None,
    arithmetic: str | None,
    weight_cache_bytes: int | None,
) -> Opened:
    """Validate a folder, open a backend for it, and trace the model for the two. Arguments and errors: `m31.load`."""
    decision = sdk.decide(backend)
    manifest = decision.require().manifest
    assert manifest is not None, "a backend without a manifest is never chosen"
    checkpoint = Checkpoint.open(path)
    text = checkpoint.config.text
    serving = open_serving(
        decision, device=device, dtype=dtype, arithmetic=arithmetic, weight_cache_bytes=weight_cache_bytes
    )
    session = serving.session
    limits = session.limits(checkpoint.config)
    if kv_dtype is None and session.numerics.kv_read != "exact" and "nvfp4" in limits.kv_formats:
        # What an arithmetic that reads E4M3 is made for; the backend's default may be unreadable to it.
        kv_dtype = "nvfp4"
    kv_format = _choose("KV", kv_dtype, limits.kv_formats, manifest.name)
    index_format = _choose("index key", index_dtype, limits.index_formats, manifest.name)
    spec = KVSpec.of(text, kv_format, index_format, _order(v_scale_order, kv_format))
    graph = trace(text, _rounding(session, spec), lambda tensor: stored_as(checkpoint.tensor(tensor)))
    compiler = Compiler(serving, graph, whole(serving, checkpoint.tensor))
    return Opened(checkpoint, decision, manifest, serving, spec, compiler)


F = TypeVar("F", bound=str)


def fallback_note(name: str, assigned: Iterable[tuple[OpInstance, Assigned]]) -> Iterator[str]:
    """What the backend leaves to another one, if it leaves anything."""
    elsewhere: dict[str, set[str]] = {}
    for op, found in assigned:
        if found.fallback is not None:
            elsewhere.setdefault(found.by, set()).add(op.spec.name)
    for other, ops in elsewhere.items():
        yield f"backend {name} leaves these ops to {other}, as its manifest declares: {', '.join(sorted(ops))}"


def _choose(what: str, name: str | None, served: tuple[F, ...], who: str) -> F:
    """The format asked for if it is served; without a wish the first, which is the backend's default."""
    if name is None:
        return served[0]
    for known in served:
        if known == name:
            return known
    meant = _SHORT.get(name) or next(iter(difflib.get_close_matches(name, served, n=1)), None)
    raise BackendRefused(
        f"{what} format '{name}' is not served",
        where=f"backend {who}",
        expected=" or ".join(served),
        fix=f"did you mean '{meant}'?" if meant in served else None,
    )


def _order(name: str | None, kv_format: str) -> ScaleOrder:
    if name is None or name == "linear":
        return "linear"
    if name != "token_quad":
        raise RequestError(f"v_scale_order is {name!r}", expected="'linear' or 'token_quad'")
    if kv_format != "nvfp4":
        raise RequestError(
            f"v_scale_order is '{name}' with {kv_format} pages", expected="nvfp4 pages: others have no V scales"
        )
    return "token_quad"


def _rounding(session: Session, spec: KVSpec) -> Rounding:
    """What the graph rounds to BF16 before it is quantised; nothing where activations are BF16 already."""
    if str(session.dtypes["model"]) == "torch.bfloat16":
        return NO_ROUNDING
    return Rounding.of(session.numerics, spec.kv_format, spec.index_format)


def stored_as(tensor: LazyTensor) -> str:
    """`TensorDecl.stored` of a checkpoint's tensor."""
    return tensor.format if tensor.format != "plain" else str(tensor.dtype).removeprefix("torch.")
