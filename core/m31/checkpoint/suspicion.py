"""What looks wrong in a checkpoint that is valid: each finding is one sentence for a person to judge."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator

from m31.checkpoint.companions import companions
from m31.checkpoint.deep import quantised
from m31.checkpoint.folder import listed
from m31.checkpoint.reader import Checkpoint, TensorFolder
from m31.checkpoint.scan import stats
from m31.errors import M31Error

_DTYPES = {"bfloat16": "BF16", "float32": "F32"}


def suspicions(checkpoint: Checkpoint, *, deep: bool) -> tuple[str, ...]:
    """All findings; `deep` reads every weight."""
    findings = [*_config(checkpoint), *_dtypes(checkpoint), *companions(checkpoint)]
    if deep:
        findings += [*_weights(checkpoint), *quantised(checkpoint)]
    try:
        draft = checkpoint.draft
    except M31Error as exc:
        findings.append(f"dspark/ is unusable: {exc}")
    else:
        if draft is not None and deep:
            findings += [f"draft head: {text}" for text in (*_weights(draft), *quantised(draft))]
    return tuple(findings)


def _config(checkpoint: Checkpoint) -> Iterator[str]:
    config, text = checkpoint.config, checkpoint.config.text
    longest = 2 * math.pi * text.rope_theta ** ((text.rotary_dim - 2) / text.rotary_dim)
    if longest < text.max_position:
        yield (
            f"the slowest rotary angle repeats after {longest:,.0f} tokens, "
            f"before max_position_embeddings {text.max_position:,}: rope_theta {text.rope_theta:g} looks too small"
        )
    if not text.eos_token_ids:
        yield "config.json has no eos_token_id: only --max-tokens ends a generation"
    for key, token in (("image_token_index", config.image_token_id), ("video_token_index", config.video_token_id)):
        if token is not None and token >= text.vocab_size:
            yield f"{key} {token} is outside the vocabulary of {text.vocab_size}: images and video cannot be placed"


def _dtypes(checkpoint: Checkpoint) -> Iterator[str]:
    declared = _DTYPES.get(checkpoint.config.dtype or "")
    groups: dict[str, set[str]] = defaultdict(set)
    differing = 0
    for name, decl in checkpoint.declared.items():
        if decl.storage != "plain":
            continue
        dtype = checkpoint.stored(name).stored_dtype
        groups[decl.group].add(dtype)
        # The published router is F32 in a bfloat16 model, so it says nothing.
        differing += declared is not None and dtype != declared and decl.group != "router"
    mixed = [group for group, seen in groups.items() if len(seen) > 1 and group != "router"]
    if mixed:
        yield f"BF16 and F32 are mixed within: {', '.join(mixed)}"
    if differing:
        yield f"config.json declares {checkpoint.config.dtype}, but {differing} tensors are stored otherwise"


def _weights(checkpoint: TensorFolder) -> Iterator[str]:
    """One pass over all weights."""
    bad: list[str] = []
    zero: list[str] = []
    constant: list[str] = []
    shifted: list[str] = []
    for name, decl in checkpoint.declared.items():
        if decl.storage == "fp4_packed":
            continue
        found = stats(checkpoint.stored(name), decl)
        if found.first_bad is not None:
            bad.append(f"'{name}' ({found.bad_value} at flat index {found.first_bad})")
        elif decl.storage not in ("plain", "fp8"):
            continue
        elif found.low == found.high == 0:
            zero.append(name)
        elif found.low == found.high and math.prod(decl.shape) > 1:
            constant.append(name)
        elif decl.norm and found.mean > 0.75:
            shifted.append(name)
    for names, what in (
        (bad, "hold NaN or infinity"),
        (zero, "are all zero"),
        (constant, "hold one value only"),
        (shifted, "average above 0.75: the +1 of the Gemma norm may be baked in already"),
    ):
        if names:
            yield f"{len(names)} tensors {what}: {listed(names)}"
