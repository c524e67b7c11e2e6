"""The training configuration: a strict TOML file. Every number is spelled out; nothing has a hidden default.

The fingerprint covers everything that the losses depend on. What it leaves out (where the run lives, how often it saves
and validates, threads) may change when a run is continued.
"""

from __future__ import annotations

import copy
import hashlib
import json
import tomllib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeVar

from pydantic import Field, StrictStr

from m31 import config as model_config
from m31.checkpoint import expected, target_config
from m31.config.jsonfile import read_bytes
from m31.config.model import Model
from m31.config.schema import Finite, NaturalInt, PositiveFloat, PositiveInt, Strict, validate
from m31.errors import ConfigError, M31Error
from m31.formats.arithmetic import parse as parse_arithmetic
from m31.training.data import Data
from m31.training.fakequant import Scheme

if TYPE_CHECKING:
    from m31.training.task import Task

C = TypeVar("C", bound="RunConfig")
LIMIT = 2**20  # bytes of a TOML file
Fraction = Annotated[Finite, Field(ge=0, le=1)]
Decay = Annotated[Finite, Field(ge=0, lt=1)]
NotNegative = Annotated[Finite, Field(ge=0)]


class RunSection(Strict):
    """Where and how: nothing here changes a loss.

    Attributes:
        folder: of state, log and checkpoint; relative to the TOML file.
        threads: pieces of a batch that are computed at a time, each on one core.
        save_minutes: between two states.
        validate_every: steps between two validations.
    """

    folder: StrictStr
    threads: PositiveInt
    save_minutes: PositiveFloat
    validate_every: PositiveInt


class DataSection(Strict):
    """Where batches come from.

    Attributes:
        provider: `module:function`, called with `options` as keywords; it returns `m31.training.data.Data`.
        options: its arguments.
    """

    provider: StrictStr
    options: dict[str, Any]


class QuantisationSection(Strict):
    """What the trained model is made for.

    Attributes:
        weights: format of the checkpoint: m31, m3-mxfp8 or bf16, in which training rounds; or `none`, the unquantised
            twin, whose weights are not rounded while training and are written in BF16.
        arithmetic: name of `m31.formats.arithmetic`.
        kv, index: formats of the pages.
    """

    weights: StrictStr
    arithmetic: StrictStr
    kv: StrictStr
    index: StrictStr


class OptimiserSection(Strict):
    """AdamW, its learning rate rising over the warmup and falling along a cosine to `final_fraction` of the peak.

    Attributes:
        learning_rate: the peak.
        warmup_steps: steps of the linear rise.
        beta1, beta2, epsilon, weight_decay: AdamW's; decay applies to matrices except the embedding.
        clip_norm: largest norm of the gradient of all weights together.
    """

    learning_rate: PositiveFloat
    final_fraction: Fraction
    warmup_steps: NaturalInt
    beta1: Decay
    beta2: Decay
    epsilon: PositiveFloat
    weight_decay: NotNegative
    clip_norm: PositiveFloat


class LossSection(Strict):
    """Beside the cross-entropy.

    Attributes:
        index_weight: factor of the index branch's divergence.
        balance_rate: by how much the routing bias of an expert moves per step, towards an equal load; falls with the
            learning rate after the warmup.
    """

    index_weight: PositiveFloat
    balance_rate: NotNegative


class BudgetSection(Strict):
    """How long: one of the two.

    Attributes:
        steps: optimiser steps.
        minutes: of training. The number of steps is planned once, when the warmup is over, from the speed so far, and
            kept in the state, so that the schedule of a continued run is the same.
    """

    steps: PositiveInt | None = None
    minutes: PositiveFloat | None = None


class BatchSection(Strict):
    """How a batch is worked off.

    Attributes:
        micro_tokens: a piece is whole sequences up to this many tokens. Batches of fewer pieces than threads leave
            cores idle.
    """

    micro_tokens: PositiveInt


class RunConfig(Strict, ABC):
    """What every kind of training has; a subclass adds what is trained, and says how the folder is called that a
    finished run writes beside its state."""

    PRODUCT: ClassVar[str] = "checkpoint"

    seed: NaturalInt
    run: RunSection
    data: DataSection
    optimiser: OptimiserSection
    budget: BudgetSection
    batch: BatchSection

    @abstractmethod
    def task(self, data: Data) -> Task:
        """What the loop trains on this data."""

    def fingerprint(self, identity: str) -> str:
        """A hash of everything that the losses depend on; `identity` is that of the task."""
        content = self.model_dump(exclude={"run"})
        text = json.dumps({"version": 1, "content": content, "data": identity}, sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


class TrainConfig(RunConfig):
    """The whole file. `model` is a config.json without quantisation, as `m31.config.parse` takes it."""

    model: dict[str, Any]
    quantisation: QuantisationSection
    losses: LossSection

    def task(self, data: Data) -> Task:
        """A text model from nothing."""
        from m31.training.pretraining import Pretraining  # which reads this module

        return Pretraining(self, data)

    @property
    def quantised(self) -> bool:
        """Whether training rounds weights."""
        return self.quantisation.weights != "none"

    def scheme(self) -> Scheme:
        """What training rounds. Raises OpRefused for what does not fit together."""
        q = self.quantisation
        return Scheme(
            arithmetic=parse_arithmetic(q.arithmetic),
            kv_format=q.kv,
            index_format=q.index,
            weights=q.weights if self.quantised else None,
        )

    def target(self) -> tuple[dict[str, Any], Model]:
        """config.json contents of the checkpoint to be written, and their typed form. Raises ConfigError."""
        mapping = copy.deepcopy(self.model)
        source = model_config.parse(mapping, where="[model]")
        if source.quantization is not None or source.vision is not None:
            raise ConfigError(
                "describes a vision tower or a quantised model",
                where="[model]",
                expected="a text model without quantization_config: [quantisation] says how it is stored",
            )
        return target_config(mapping, source, self.quantisation.weights if self.quantised else "bf16")  # type: ignore[arg-type]


def load(path: str | Path) -> TrainConfig:
    """Read and check a training configuration.

    Raises:
        ConfigError: the file cannot be read, is no TOML, or says what is not understood or contradicts itself.
    """
    return parse(read_toml(path), where=str(path))


def read_toml(path: str | Path) -> dict[str, Any]:
    """The contents of a TOML file. Raises ConfigError: it cannot be read, or is no TOML."""
    data = read_bytes(Path(path), limit=LIMIT)
    try:
        return tomllib.loads(data.decode("utf-8"))
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as exc:
        raise ConfigError(f"is not valid TOML ({exc})", where=str(path), fix="correct the file") from exc


def parse(mapping: Mapping[str, Any], *, where: str) -> TrainConfig:
    """The typed configuration of decoded TOML. Raises ConfigError."""
    config = checked(TrainConfig, mapping, where=where)
    with located(where):
        scheme = config.scheme()
        expected(config.target()[1])
    if not config.quantised and not scheme.arithmetic.exact:
        raise ConfigError(
            f"'weights' is 'none' and 'arithmetic' is {scheme.arithmetic.name!r}",
            where=f"{where}: [quantisation]",
            expected="the arithmetic 'exact' for the unquantised twin",
        )
    return config


def checked(kind: type[C], mapping: Mapping[str, Any], *, where: str) -> C:
    """A configuration of some kind, section by section, whose budget and warmup fit. Raises ConfigError."""
    for name, part in kind.model_fields.items():
        section = part.annotation
        if isinstance(section, type) and issubclass(section, Strict) and isinstance(mapping.get(name), dict):
            validate(section, mapping[name], where=f"{where}: [{name}]")
    config = validate(kind, mapping, where=where)
    budget = config.budget
    if (budget.steps is None) == (budget.minutes is None):
        raise ConfigError("sets both or neither of 'steps' and 'minutes'", where=f"{where}: [budget]", expected="one")
    if budget.steps is not None and config.optimiser.warmup_steps >= budget.steps:
        raise ConfigError(
            f"'warmup_steps' is {config.optimiser.warmup_steps} of {budget.steps} steps",
            where=f"{where}: [optimiser]",
            expected="fewer than the budget's steps",
        )
    if budget.minutes is not None and not config.optimiser.warmup_steps:
        raise ConfigError(
            "'warmup_steps' is 0 with a budget in minutes",
            where=f"{where}: [optimiser]",
            expected="at least 1: the warmup shows how many steps fit",
        )
    return config


@contextmanager
def located(where: str) -> Iterator[None]:
    """Errors in here become errors of the configuration `where`."""
    try:
        yield
    except M31Error as exc:
        part = f"{where}: {exc.where}" if exc.where else where
        raise ConfigError(exc.what, where=part, expected=exc.expected, fix=exc.fix) from exc
