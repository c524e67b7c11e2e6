"""Fine-tuning a low-rank adapter of a quantised checkpoint: `m31 train --lora CONFIG.toml` (docs/lora.md)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from pydantic import StrictBool, StrictStr

from m31.checkpoint import AdapterConfig, Checkpoint, adaptable, bundled, write_adapter
from m31.checkpoint.adapter import official_module
from m31.checkpoint.adapter_config import parse_adapter
from m31.checkpoint.encoding import default_input_scale
from m31.checkpoint.workfolder import file_hash
from m31.config.schema import PositiveFloat, PositiveInt, Strict
from m31.errors import ConfigError, UnsupportedFeature
from m31.formats.arithmetic import parse as parse_arithmetic
from m31.training.adapting import AdaptedText, AdapterWeights, FrozenBase, Pair
from m31.training.config import RunConfig, checked, located, read_toml
from m31.training.data import Data
from m31.training.fakequant import Scheme, plain_projections
from m31.training.task import Piece, Sum, Task


class TargetSection(Strict):
    """The frozen base, and how it will be served.

    Attributes:
        checkpoint: its folder; relative to the TOML file. Left out it is the bundled nano.
        arithmetic: name of `m31.formats.arithmetic`.
        kv, index: formats of the pages.
    """

    checkpoint: StrictStr | None = None
    arithmetic: StrictStr
    kv: StrictStr
    index: StrictStr


class LoraSection(Strict):
    """The adapter.

    Attributes:
        r: rank.
        alpha: its products are scaled by alpha / r, or with `rslora` by alpha / sqrt(r).
        targets: names of modules or endings of names behind a dot, or one regular expression for whole names, as
            PEFT's `target_modules`.
    """

    r: PositiveInt
    alpha: PositiveFloat
    rslora: StrictBool
    targets: StrictStr | list[StrictStr]


class LossSection(Strict):
    """Beside the cross-entropy.

    Attributes:
        index_weight: factor of the index branch's divergence, which teaches adapters of that branch; without one
            there is nothing that it could move.
    """

    index_weight: PositiveFloat


class LoraConfig(RunConfig):
    """The whole file."""

    PRODUCT: ClassVar[str] = "adapter"

    target: TargetSection
    lora: LoraSection
    losses: LossSection

    def task(self, data: Data) -> Task:
        """An adapter of the checkpoint."""
        return Finetuning(self, data)

    def scheme(self) -> Scheme:
        """What is rounded while the model runs. Raises OpRefused for what does not fit together."""
        t = self.target
        return Scheme(arithmetic=parse_arithmetic(t.arithmetic), kv_format=t.kv, index_format=t.index, weights=None)

    def adapter(self) -> AdapterConfig:
        """As the adapter's folder will say it. Raises ConfigError."""
        content = {
            "peft_type": "LORA",
            "r": self.lora.r,
            "lora_alpha": self.lora.alpha,
            "use_rslora": self.lora.rslora,
            "target_modules": self.lora.targets,
        }
        return parse_adapter(content, where="[lora]")

    def fingerprint(self, identity: str) -> str:
        """See `RunConfig.fingerprint`; where the base lies changes no loss, what it is does (`Finetuning.identity`)."""
        content = self.model_dump(exclude={"run": True, "target": {"checkpoint"}})
        text = json.dumps({"version": 1, "content": content, "data": identity}, sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def load(path: str | Path) -> LoraConfig:
    """Read and check a configuration; `[target] checkpoint` is resolved against the file's folder.

    Raises:
        ConfigError: the file cannot be read, is no TOML, or says what is not understood or contradicts itself.
    """
    mapping, path = read_toml(path), Path(path)
    target = mapping.get("target")
    if isinstance(target, dict) and isinstance(target.get("checkpoint"), str):
        target["checkpoint"] = str(path.parent / Path(target["checkpoint"]).expanduser())
    return parse(mapping, where=str(path))


def parse(mapping: Mapping[str, Any], *, where: str) -> LoraConfig:
    """The typed configuration of decoded TOML. Raises ConfigError."""
    config = checked(LoraConfig, mapping, where=where)
    with located(where):
        config.scheme()
        config.adapter()
    return config


class Finetuning:
    """The task of `LoraConfig`; see `m31.training.task.Task`.

    Args:
        config: what to do.
        data: what to learn; its files stay with the base.
        dtype: in which is computed.

    Raises:
        ConfigError, CheckpointError: the checkpoint, or targets that it does not have.
        OpRefused, UnsupportedFeature: a checkpoint that training would not compute as it is served.
    """

    def __init__(self, config: LoraConfig, data: Data, dtype: torch.dtype = torch.float32) -> None:
        named = config.target.checkpoint
        checkpoint = Checkpoint.open(bundled.folder() if named is None else named)
        self.target, self._name = checkpoint.config, checkpoint.folder.resolve().name
        scheme, self._config = config.scheme(), config.adapter()
        _require_projections(checkpoint, scheme)
        _require_scales(checkpoint, scheme)
        shapes = adaptable(self.target)
        names = {module: official_module(module, self.target) for module in shapes}
        pairs = {
            module: Pair(self._config.rank(name), *shapes[module], self._config.scale(name))
            for module, name in names.items()
            if self._config.targets(name)
        }
        if not pairs:
            raise ConfigError(
                "'targets' names no linear layer of the checkpoint",
                where="[lora]",
                expected=f"for example ['{next(iter(names.values())).rpartition('.')[2]}']",
            )
        self.parameters = AdapterWeights(pairs, dtype=dtype)
        self.model = AdaptedText(FrozenBase(checkpoint, dtype=dtype), self.parameters, scheme)
        self.identity = f"{data.identity}/{_digest(checkpoint)}"
        # The divergence reaches the index branch only: without an adapter there, it is a number to look at.
        self._index_weight = config.losses.index_weight if any(".index_" in module for module in pairs) else 0.0

    def gradient(self, piece: Piece) -> Sum:
        """Of the mean cross-entropy over targets, and of the mean divergence over tokens, for the adapter."""
        tokens, targets = piece.batch
        leaves = self.parameters.leaves
        out = self.model(piece.tokens)
        loss = self.model.loss(out.hidden, piece.targets.flatten())
        total = loss / max(1, int((targets >= 0).sum()))
        if self._index_weight:
            total = total + self._index_weight * out.kl / tokens.numel()
        grads = torch.autograd.grad(total, list(leaves.values()), allow_unused=True, materialize_grads=True)
        figures = {"kl": out.kl.detach().double()}
        return Sum(float(loss.detach()), _targets(piece), figures, dict(zip(leaves, grads, strict=True)))

    def measure(self, piece: Piece) -> Sum:
        """The cross-entropy."""
        with torch.no_grad():
            loss = float(self.model.loss(self.model(piece.tokens).hidden, piece.targets.flatten()))
        return Sum(loss, _targets(piece))

    def after_step(self, found: Sum, fall: float) -> None:
        """Nothing: the routing bias is the base's."""

    def shown(self, found: Sum, tokens: int) -> dict[str, Any]:
        """kl in nats per token; nothing of a validation."""
        return {"kl": float(found.figures["kl"]) / tokens} if "kl" in found.figures else {}

    def export(self, folder: Path) -> None:
        """The adapter in PEFT's layout."""
        tensors = self.parameters.tensors()
        write_adapter(folder, self._config, tensors, model=self.target, base=self._name)


def _targets(piece: Piece) -> int:
    return int((piece.targets >= 0).sum())


def _digest(checkpoint: Checkpoint) -> str:
    """Changes with every byte of the base's weights and its description."""
    hashes = [file_hash(path) for path in (checkpoint.folder / "config.json", *(f.path for f in checkpoint.files))]
    return hashlib.blake2b("".join(hashes).encode(), digest_size=16).hexdigest()


def _require_projections(checkpoint: Checkpoint, scheme: Scheme) -> None:
    """Refuse projections that are stored plain where training would quantise their inputs, and serving does not."""
    if scheme.arithmetic.linear_activation != "mxfp8":
        return
    for name in checkpoint.names:
        projection = name.startswith("model.layers.") and name.endswith("_proj.weight")
        if projection and checkpoint.tensor(name).format == "plain":
            raise plain_projections(f"'{name}' is stored plain", scheme.arithmetic, where=str(checkpoint.folder))


def _require_scales(checkpoint: Checkpoint, scheme: Scheme) -> None:
    """Refuse calibrated static scales of the experts' second input: training rounds with the one that fits all."""
    if scheme.arithmetic.expert_middle != "nvfp4-static":
        return
    for name in checkpoint.names:
        if not name.endswith(".w2.weight"):
            continue
        part = checkpoint.tensor(name).parts().get("input_global_scale")
        default = torch.tensor([default_input_scale(checkpoint.config.text, name)])
        if part is not None and not torch.equal(part.load(), default):
            raise UnsupportedFeature(
                f"'{name}' has the calibrated input_global_scale {float(part.load()):g}",
                where=str(checkpoint.folder),
                expected=f"{float(default):g}, with which training rounds the experts' second input",
                fix="train for an arithmetic without a static scale, such as w4a16",
            )
