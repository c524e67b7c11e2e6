"""Opening the chosen backend, and the reference beside it where its manifest lets ops fall back."""

from __future__ import annotations

from m31 import sdk
from m31.sdk.backend import Session
from m31.sdk.selection import Decision
from m31.sdk.serving import Serving

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
