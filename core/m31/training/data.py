"""What the trainer needs of a data set."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from m31.errors import ConfigError

Batch = tuple[Tensor, Tensor]
"""tokens and targets, int64 [B, T]; target -1: no loss there."""


class Source(Protocol):
    """Training batches by number: the same number always gives the same batch, so that a run can continue anywhere."""

    def batch(self, step: int) -> Batch:
        """The batch of an optimiser step, counted from 0."""


@dataclass(frozen=True)
class Data:
    """A data set.

    Attributes:
        train: what is trained on.
        validation: whose mean loss chooses the checkpoint that is kept; not empty.
        identity: changes when the batches do, such as a hash of the text.
        files: go into the checkpoint's folder: tokenizer.json and its like.
    """

    train: Source
    validation: Sequence[Batch]
    identity: str
    files: Mapping[str, bytes] = field(default_factory=dict)


def provided(provider: str, options: Mapping[str, Any], *, where: str) -> Data:
    """Call a provider of the configuration.

    Raises:
        ConfigError: it cannot be imported, does not take the options, or returns something else.
    """
    module, colon, function = provider.partition(":")
    try:
        make = getattr(importlib.import_module(module), function) if colon else None
    except (ImportError, AttributeError, ValueError) as exc:
        raise ConfigError(f"'provider' {provider!r} cannot be imported ({exc})", where=where) from exc
    if not callable(make):
        raise ConfigError(f"'provider' is {provider!r}", where=where, expected="module:function")
    try:
        data = make(**options)
    except TypeError as exc:
        raise ConfigError(f"'options' do not fit {provider} ({exc})", where=where) from exc
    if not isinstance(data, Data) or not data.validation:
        raise ConfigError(
            f"{provider} returns {type(data).__name__}", where=where, expected="a Data with validation batches"
        )
    return data
