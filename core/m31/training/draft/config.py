"""The configuration of a draft head's training: that of `m31.training.config`, with a target instead of a model."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, StrictStr

from m31.checkpoint.draft import expected_draft
from m31.config import Draft
from m31.config.draft import parse_draft
from m31.config.schema import Finite, PositiveFloat, PositiveInt, Strict
from m31.errors import ConfigError
from m31.formats.arithmetic import parse as parse_arithmetic
from m31.training.config import Fraction, RunConfig, checked, located, read_toml
from m31.training.data import Data
from m31.training.fakequant import Scheme
from m31.training.task import Task

Decay = Annotated[Finite, Field(gt=0, le=1)]


class TargetSection(Strict):
    """Whose drafts are trained, and how it is served meanwhile.

    Attributes:
        checkpoint: its folder; relative to the TOML file.
        arithmetic: name of `m31.formats.arithmetic`.
        kv, index: formats of its pages. The head's own are BF16, or those of the compute dtype under `exact`.
    """

    checkpoint: StrictStr
    arithmetic: StrictStr
    kv: StrictStr
    index: StrictStr


class DraftLossSection(Strict):
    """What is minimised.

    Attributes:
        blocks: how many blocks are drafted per 1,024 tokens of a sequence, each behind a random place of it.
        hard_labels: share of the cross-entropy with the text's own tokens; the rest is the divergence of the target's
            distribution from the head's.
        row_decay: weight of a row, relative to that of the row before it: a row matters only where the rows before it
            are accepted.
        confidence_weight: factor of the confidence head's cross-entropy, which moves nothing but that head.
    """

    blocks: PositiveInt
    hard_labels: Fraction
    row_decay: Decay
    confidence_weight: PositiveFloat


class DraftConfig(RunConfig):
    """The whole file. `head` is what `dspark/config.json` will say (MODEL.md §1.5)."""

    target: TargetSection
    head: dict[str, Any]
    losses: DraftLossSection

    def scheme(self) -> Scheme:
        """What the target rounds; its weights come as they are stored. Raises OpRefused for what does not fit."""
        t = self.target
        arithmetic = parse_arithmetic(t.arithmetic)
        return Scheme(arithmetic=arithmetic, kv_format=t.kv, index_format=t.index, weights=None)

    def draft(self) -> Draft:
        """The typed form of `head`. Raises ConfigError."""
        return parse_draft(self.head, where="[head]")

    def task(self, data: Data) -> Task:
        """A draft head on the target; raises what `DraftTraining` raises."""
        from m31.training.draft.task import DraftTraining  # which reads this module

        return DraftTraining(self, data)

    def fingerprint(self, identity: str) -> str:
        """See `RunConfig.fingerprint`. Where the target lies does not count: `identity` knows its weights."""
        content = self.model_dump(exclude={"run": True, "target": {"checkpoint"}})
        text = json.dumps({"version": 1, "draft": content, "data": identity}, sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def load(path: str | Path) -> DraftConfig:
    """Read and check the configuration of a draft head's training.

    Raises:
        ConfigError: the file cannot be read, is no TOML, or says what is not understood or contradicts itself.
    """
    return parse(read_toml(path), where=str(path), folder=Path(path).parent)


def parse(mapping: Mapping[str, Any], *, where: str, folder: Path) -> DraftConfig:
    """The typed configuration of decoded TOML; paths in it are relative to `folder`. Raises ConfigError."""
    config = checked(DraftConfig, mapping, where=where)
    with located(where):
        config.scheme()
        draft = config.draft()
        expected_draft(draft)
    if config.losses.blocks * draft.block_size > 1024:
        raise ConfigError(
            f"'blocks' is {config.losses.blocks} of {draft.block_size} tokens",
            where=f"{where}: [losses]",
            expected=f"at most {1024 // draft.block_size}: more rows than tokens see the same text twice",
        )
    target = config.target.model_copy(update={"checkpoint": str(folder / config.target.checkpoint)})
    return config.model_copy(update={"target": target})
