"""What a manifest claims, in words that items use: what no passed item exercises is not conformant by omission."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

from m31.conformance.item import Item, Level

if TYPE_CHECKING:
    from m31.sdk.manifest import Manifest

STORED_BY = {"linear": ("float32", "bfloat16", "mxfp8"), "experts": ("float32", "bfloat16", "mxfp8", "nvfp4")}
"""Ops whose weights a checkpoint stores in several formats (MODEL.md §3): each pair is a claim of its own.

float32 is one for backends that compute in it. All others list it among their weights for the router alone, which every
checkpoint may store so."""


def of_manifest(manifest: Manifest) -> list[str]:
    """The claims of a manifest, in its order.

    `op:NAME` of what `ops` lists, and `op:NAME/FORMAT` unless it may fall back (then it need not serve every format):
    see `STORED_BY`;
    `weights:F`, `kv:F`, `index:F`, `compute:F`, `arithmetic:A`; `determinism:NAME` where it is declared; `limit:NAME`
    of every limit that promises something.
    """
    from m31 import ops
    from m31.formats.arithmetic import NAMED

    drafting = manifest.limits.draft_tokens > 0
    everything = [*ops.ALL, *(ops.DRAFT if drafting else ())]
    if manifest.limits.tensor_parallel == 1:
        everything = [name for name in everything if name not in ("all_reduce", "all_gather")]
    served = everything if manifest.ops == "all" else list(manifest.ops)
    own = [name for name in served if name not in manifest.fallback]
    formats = manifest.formats
    claims = [f"op:{name}" for name in served]
    forms = [form for form in formats.weights if form != "float32" or "float32" in formats.compute]
    claims += [f"op:{name}/{form}" for name in own for form in STORED_BY.get(name, ()) if form in forms]
    claims += [f"weights:{form}" for form in formats.weights]
    claims += [f"kv:{form}" for form in formats.kv]
    claims += [f"index:{form}" for form in formats.index]
    claims += [f"compute:{form}" for form in formats.compute]
    claims += [f"arithmetic:{name}" for name in (NAMED if manifest.arithmetic == "all" else manifest.arithmetic)]
    promised = getattr(manifest, "determinism", None)
    claims += [f"determinism:{name}" for name, value in (promised or ()) if value]
    limits = manifest.limits
    claims.append("limit:context_tokens")
    claims += ["limit:draft_tokens"] if drafting else []
    claims += [f"limit:{name}" for name in ("image", "video") if getattr(limits, name)]
    claims += ["limit:tensor_parallel"] if limits.tensor_parallel > 1 else []
    return claims


def exercised_by(claims: Collection[str]) -> set[str]:
    """What an item with these claims exercises: them, and the pair of an op and the format of its weights."""
    ops = [claim for claim in claims if claim.startswith("op:") and "/" not in claim]
    forms = [claim.removeprefix("weights:") for claim in claims if claim.startswith("weights:")]
    return {*claims, *(f"{op}/{form}" for op in ops for form in forms)}


def first_levels(manifest: Manifest, items: Iterable[Item]) -> dict[str, Level | None]:
    """Claim -> the first level with an item that exercises it; None where the whole catalog has none."""
    found: dict[str, Level | None] = dict.fromkeys(of_manifest(manifest))
    for item in items:
        for claim in exercised_by(item.claims):
            if claim in found and (found[claim] is None or item.level < str(found[claim])):
                found[claim] = item.level
    return found
