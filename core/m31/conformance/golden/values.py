"""Golden values: what the float64 reference computes for a checkpoint, in a file of less than a megabyte.

One safetensors file per arithmetic. Its header names the version, the checkpoint's digest, the arithmetic, the formats
of the pages and the dtype; its tensors are, for prompt number i:

    i/ids            uint16 or int32 [T]   the prompt
    i/logprob        float32 [T-1]         natural logarithm of the probability of the token that follows
    i/top            uint16 or int32 [T,N] the N likeliest tokens, the likeliest first
    i/top_logprob    float32 [T,N]
    i/experts        uint8 [L,T,E/8]       sets as bits, the first one the highest bit
    i/expert_gaps    float16 [L,T]         `Choices.gaps`
    i/blocks         uint8 [L,T-s,h,B/8]   from position s on: before it every block is read
    i/block_gaps     float16 [L,T-s,h]
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from m31.checkpoint.workfolder import file_hash
from m31.conformance.golden.observe import Bools, Observed, first_choice, observe
from m31.engine.api import load as load_model
from m31.errors import CheckpointError

VERSION = 1
TOP = 4  # likeliest tokens of a position that are kept
F32 = NDArray[np.float32]
Ids = NDArray[np.int64]


@dataclass(frozen=True)
class Recipe:
    """How a model is opened to compute the values: names as `m31.load` takes them."""

    arithmetic: str
    kv: str
    index: str

    @property
    def name(self) -> str:
        """For a file's name."""
        return f"{self.arithmetic}-kv-{self.kv}-index-{self.index}".replace("+", "-").replace("=", "-")


@dataclass(frozen=True)
class Prompt:
    """One prompt and its values.

    Attributes:
        name: where it comes from.
        ids: int64 [T].
        logprob: float32 [T-1].
        top: int64 [T,N]; top_logprob: float32 [T,N].
        experts: bool [L,T,E]; expert_gaps: float32 [L,T], rounded to float16.
        first: the position that `blocks` begin at.
        blocks: bool [L,T-first,h,B]; block_gaps: float32 [L,T-first,h], rounded to float16.
    """

    name: str
    ids: Ids
    logprob: F32
    top: Ids
    top_logprob: F32
    experts: Bools
    expert_gaps: F32
    first: int
    blocks: Bools
    block_gaps: F32


@dataclass(frozen=True)
class Golden:
    """The values of a checkpoint under one recipe. `checkpoint` is its `digest`."""

    checkpoint: str
    recipe: Recipe
    prompts: tuple[Prompt, ...]


def digest(folder: Path) -> str:
    """32 hexadecimal digits over config.json and the weights of a checkpoint folder, without a draft head."""
    found = hashlib.blake2b(digest_size=16)
    for path in (folder / "config.json", *sorted(folder.glob("*.safetensors"))):
        found.update(f"{path.name}\0{file_hash(path)}\0".encode())
    return found.hexdigest()


def compute(folder: Path, recipe: Recipe, prompts: Iterable[tuple[str, Sequence[int]]]) -> Golden:
    """Compute golden values with the reference in float64.

    Args:
        folder: of the checkpoint.
        recipe: how it is opened.
        prompts: (name, token ids).

    Raises: what `m31.load` and `Model.logits` raise.
    """
    model = load_model(
        folder,
        backend="reference",
        dtype="float64",
        arithmetic=recipe.arithmetic,
        kv_dtype=recipe.kv,
        index_dtype=recipe.index,
    )
    first = first_choice(model.config.text)
    found = tuple(_prompt(name, ids, observe(model, ids, gaps=True), first) for name, ids in prompts)
    return Golden(digest(folder), recipe, found)


def _prompt(name: str, ids: Sequence[int], seen: Observed, first: int) -> Prompt:
    assert seen.experts.kept is not None
    assert seen.experts.gaps is not None
    assert seen.blocks.kept is not None
    assert seen.blocks.gaps is not None
    tokens = np.asarray(ids, np.int64)
    order = np.argsort(-seen.logprobs, axis=-1, kind="stable")[:, :TOP]
    return Prompt(
        name=name,
        ids=tokens,
        logprob=next_logprobs(seen.logprobs, tokens).astype(np.float32),
        top=order.astype(np.int64),
        top_logprob=np.take_along_axis(seen.logprobs, order, -1).astype(np.float32),
        experts=seen.experts.kept,
        expert_gaps=_as_stored(seen.experts.gaps),
        first=first,
        blocks=seen.blocks.kept[:, first:],
        block_gaps=_as_stored(seen.blocks.gaps[:, first:]),
    )


def next_logprobs(logprobs: NDArray[np.float64], ids: Ids) -> NDArray[np.float64]:
    """[T,V], [T] -> [T-1]: of the tokens that follow."""
    found: NDArray[np.float64] = np.take_along_axis(logprobs[:-1], ids[1:, None], -1)[:, 0]
    return found


def _as_stored(gaps: NDArray[np.float64]) -> F32:
    with np.errstate(over="ignore"):  # a gap beyond 65,504 is as good as infinite
        return gaps.astype(np.float16).astype(np.float32)


# -- the file ---------------------------------------------------------------------------------------------------------


def dump(golden: Golden) -> bytes:
    """The file's content; the same values always give the same bytes."""
    tensors: dict[str, NDArray[Any]] = {}
    heads: list[dict[str, Any]] = []
    for i, prompt in enumerate(golden.prompts):
        heads.append(
            {
                "name": prompt.name,
                "first": prompt.first,
                "experts": prompt.experts.shape[-1],
                "blocks": prompt.blocks.shape[-1],
            }
        )
        parts = {
            "ids": _narrow(prompt.ids),
            "logprob": prompt.logprob,
            "top": _narrow(prompt.top),
            "top_logprob": prompt.top_logprob,
            "experts": np.packbits(prompt.experts, -1),
            "expert_gaps": prompt.expert_gaps.astype(np.float16),
            "blocks": np.packbits(prompt.blocks, -1),
            "block_gaps": prompt.block_gaps.astype(np.float16),
        }
        tensors |= {f"{i}/{name}": np.ascontiguousarray(part) for name, part in parts.items()}
    said = {"checkpoint": golden.checkpoint, "recipe": asdict(golden.recipe), "dtype": "float64", "prompts": heads}
    return save(tensors, {"m31": json.dumps({"version": VERSION, **said}, sort_keys=True)})


def _narrow(ids: Ids) -> NDArray[Any]:
    return ids.astype(np.uint16 if not ids.size or int(ids.max()) < 2**16 else np.int32)


def read(path: Path) -> Golden:
    """Read a file of `dump`.

    Raises:
        CheckpointError: it cannot be read, is damaged, or of another version.
    """
    try:
        with safe_open(path, framework="numpy") as file:
            said = json.loads((file.metadata() or {})["m31"])
            if said["version"] != VERSION:
                raise _damaged(path, f"has version {said['version']}")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # it is no mapping
        prompts = tuple(_restored(i, head, tensors) for i, head in enumerate(said["prompts"]))
        return Golden(said["checkpoint"], Recipe(**said["recipe"]), prompts)
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as exc:
        raise _damaged(path, f"cannot be read ({exc})") from exc


def _restored(i: int, head: Mapping[str, Any], tensors: Mapping[str, NDArray[Any]]) -> Prompt:
    part = {name.partition("/")[2]: tensor for name, tensor in tensors.items() if name.startswith(f"{i}/")}
    return Prompt(
        name=head["name"],
        ids=part["ids"].astype(np.int64),
        logprob=part["logprob"],
        top=part["top"].astype(np.int64),
        top_logprob=part["top_logprob"],
        experts=_bits(part["experts"], head["experts"]),
        expert_gaps=part["expert_gaps"].astype(np.float32),
        first=head["first"],
        blocks=_bits(part["blocks"], head["blocks"]),
        block_gaps=part["block_gaps"].astype(np.float32),
    )


def _bits(packed: NDArray[np.uint8], count: int) -> Bools:
    return np.unpackbits(packed, axis=-1, count=count).astype(np.bool_)


def _damaged(path: Path, what: str) -> CheckpointError:
    return CheckpointError(
        what,
        where=str(path),
        expected=f"golden values of version {VERSION}",
        fix="compute them again: python -m m31.conformance.golden write",
    )
