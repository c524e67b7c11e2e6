"""A checkpoint that says what it is told to, on real weights: greedily, each token is followed by the one given.

All branches add nothing, the embedding of each named token is a unit vector of its own, and the output head gives the
token that follows it the only positive logit.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from m31.checkpoint import random_tensors, write
from m31.cli import demo
from m31.config import parse
from m31.text import demo as text

_ADDS = ("o_proj.weight", "down_proj.weight", "w2.weight")


def tokenizer_json(vocab_size: int = demo.VOCAB_SIZE) -> dict[str, Any]:
    """The demo's tokenizer.json; `vocab_size` below the model's leaves the ids above it without a token."""
    loaded: dict[str, Any] = json.loads(text.tokenizer_files(vocab_size)["tokenizer.json"])
    return loaded


def checkpoint(folder: Path, *scripts: Iterable[int], tokenizer: dict[str, Any] | None = None) -> Path:
    """Write a one-layer demo checkpoint whose greedy continuation runs along each script.

    Args:
        folder: new or empty.
        scripts: token ids in their order; a token has one follower.
        tokenizer: tokenizer.json's content, by default the demo's.
    """
    follows: dict[int, int] = {}
    for script in scripts:
        for token, after in pairwise(script):
            assert follows.setdefault(token, after) == after, f"token {token} has two followers"
    raw = demo.config(layers=1, vocab_size=demo.VOCAB_SIZE, special_ids=text.special_ids())
    files = {"tokenizer.json": json.dumps(tokenizer or tokenizer_json()).encode()}
    write(folder, raw, _tensors(raw, follows), max_shard_bytes=1 << 20, extra_files=files)
    return folder


def _tensors(raw: dict[str, Any], follows: dict[int, int]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in random_tensors(parse(raw, where="scripted"), seed=0, dtype=torch.bfloat16):
        if name.endswith(_ADDS) or name == "model.norm.weight":  # the norm multiplies by 1 + weight
            tensor = torch.zeros_like(tensor)
        if name in ("model.embed_tokens.weight", "lm_head.weight"):
            tensor = torch.zeros_like(tensor)
            for channel, (token, after) in enumerate(follows.items()):
                tensor[after if name == "lm_head.weight" else token, channel] = 1.0
        yield name, tensor
