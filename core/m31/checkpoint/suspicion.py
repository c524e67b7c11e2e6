"""What looks wrong in a checkpoint that is valid: each finding is one sentence for a person to judge."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from m31.checkpoint.folder import listed
from m31.checkpoint.reader import Checkpoint
from m31.checkpoint.scan import stats
from m31.config.jsonfile import read_object
from m31.errors import ConfigError

_TOKENIZER_LIMIT = 128 * 2**20  # bytes; a vocabulary of 200,064 needs about 15 MB
_DTYPES = {"bfloat16": "BF16", "float32": "F32"}


def suspicions(checkpoint: Checkpoint, *, deep: bool) -> tuple[str, ...]:
    """All findings; `deep` reads every weight."""
    findings = [*_config(checkpoint), *_dtypes(checkpoint), *_companions(checkpoint)]
    if deep:
        findings += _weights(checkpoint)
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


def _companions(checkpoint: Checkpoint) -> Iterator[str]:
    """Files beside the weights: absent, unreadable, or in disagreement with config.json."""
    folder = checkpoint.folder
    loaded: dict[str, dict[str, Any]] = {}
    for name in ("generation_config.json", "tokenizer_config.json", "tokenizer.json"):
        path = folder / name
        if not path.exists():
            yield f"{name} is missing"
            continue
        try:
            loaded[name] = read_object(path, limit=_TOKENIZER_LIMIT)
        except ConfigError as exc:
            yield f"{name} is unusable: {exc}"
    template = (folder / "chat_template.jinja").exists() or "chat_template" in loaded.get("tokenizer_config.json", {})
    if not template:
        yield "no chat template (chat_template.jinja, or chat_template in tokenizer_config.json)"
    yield from _special_ids(checkpoint, loaded)


def _special_ids(checkpoint: Checkpoint, loaded: Mapping[str, dict[str, Any]]) -> Iterator[str]:
    text = checkpoint.config.text
    bos = set() if text.bos_token_id is None else {text.bos_token_id}
    ours: dict[str, set[int]] = {"bos": bos, "eos": set(text.eos_token_ids)}
    generation = loaded.get("generation_config.json", {})
    tokenizer_ids = _token_ids(loaded)
    for kind, expected in ours.items():
        value = generation.get(f"{kind}_token_id")
        theirs = _ids(value)
        if theirs is None:
            theirs = set()
            yield f"generation_config.json gives {kind}_token_id {value!r}, which is no token id"
        elif theirs and expected != theirs:
            yield f"{kind}_token_id is {_show(expected)} in config.json and {_show(theirs)} in generation_config.json"
        for token in sorted(theirs):
            if token >= text.vocab_size:
                size = text.vocab_size
                yield f"generation_config.json gives {kind}_token_id {token}, outside the vocabulary of {size}"
        content = loaded.get("tokenizer_config.json", {}).get(f"{kind}_token")
        content = content.get("content") if isinstance(content, dict) else content
        if isinstance(content, str):
            token_id = tokenizer_ids.get(content)
            if token_id is None:
                yield f"tokenizer_config.json names the {kind} token {content!r}, which no tokenizer file defines"
            elif expected and token_id not in expected:
                here = _show(expected)
                yield f"{kind}_token_id is {here} in config.json, but the tokenizer's {content!r} is {token_id}"


def _ids(value: object) -> set[int] | None:
    """Token ids from an int, a list or null; None when it is something else."""
    values = [] if value is None else value if isinstance(value, list) else [value]
    ids = {item for item in values if type(item) is int and item >= 0}
    return ids if all(type(item) is int and item >= 0 for item in values) else None


def _show(ids: set[int]) -> str:
    return " and ".join(map(str, sorted(ids))) if ids else "absent"


def _token_ids(loaded: Mapping[str, dict[str, Any]]) -> dict[str, int]:
    """Special-token text -> id, from whichever tokenizer files exist."""
    found: dict[str, int] = {}
    decoder = loaded.get("tokenizer_config.json", {}).get("added_tokens_decoder")
    for key, entry in decoder.items() if isinstance(decoder, dict) else ():
        if isinstance(entry, dict) and isinstance(entry.get("content"), str) and key.isdecimal():
            found[entry["content"]] = int(key)
    tokenizer = loaded.get("tokenizer.json", {})
    model = tokenizer.get("model")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    for content, token in vocab.items() if isinstance(vocab, dict) else ():
        if type(token) is int:
            found.setdefault(content, token)
    added = tokenizer.get("added_tokens")
    for entry in added if isinstance(added, list) else ():
        if isinstance(entry, dict) and isinstance(entry.get("content"), str) and type(entry.get("id")) is int:
            found[entry["content"]] = entry["id"]
    return found


def _weights(checkpoint: Checkpoint) -> Iterator[str]:
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
