"""The target of a draft head: a checkpoint, computed as it is served, without gradients."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
from torch import Tensor

from m31.checkpoint import Checkpoint, QuantizedTensor, default_input_scale
from m31.checkpoint.encoding import Unit
from m31.checkpoint.workfolder import file_hash
from m31.config.model import Text
from m31.errors import ConfigError
from m31.training.fakequant import Scheme
from m31.training.model import TrainedText
from m31.training.parameters import Parameters


class FrozenTarget:
    """A target that does not change.

    Args:
        folder: its checkpoint.
        scheme: what it rounds.
        dtype: in which it computes.

    Attributes:
        checkpoint: the folder, opened.
        embedding, head: its matrices [V, C], which the draft head shares.
        identity: a hash of its configuration and of every stored weight.

    Raises:
        NotACheckpoint, ConfigError, CheckpointError: the folder is no sound checkpoint, or one that training would not
            compute as it is served.
    """

    def __init__(self, folder: str | Path, scheme: Scheme, *, dtype: torch.dtype = torch.float32) -> None:
        self.checkpoint = Checkpoint.open(folder)
        # Decoded weights are not rounded again: a global scale that is found anew would differ from the stored one.
        parameters = Parameters(self.checkpoint.config, dtype=dtype, quantise=False)
        for unit in parameters.units.values():
            self._require_served(unit, scheme)
        parameters.load({name: self.checkpoint.tensor(name).load().float() for name in parameters.units})
        parameters.refresh()
        parameters.masters.clear()  # nobody moves them
        self._model = TrainedText(parameters, scheme)
        self.embedding, self.head = (
            parameters.leaves[f"{name}.weight"].detach() for name in ("model.embed_tokens", "lm_head")
        )
        digest = hashlib.blake2b(repr(self.checkpoint.config).encode(), digest_size=16)
        for file in self.checkpoint.files:
            digest.update(file_hash(file.path).encode())
        self.identity = digest.hexdigest()

    @property
    def text(self) -> Text:
        """Its description."""
        return self.checkpoint.config.text

    def __call__(self, tokens_BT: Tensor, layers: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """Run sequences from position 0.

        Returns:
            The residual streams after `layers`, side by side [B, T, n * C] (MODEL.md §5.1), and what its head
            multiplies with [B, T, C].
        """
        with torch.no_grad():
            out = self._model(tokens_BT, taps=layers)
        assert out.taps is not None
        return out.taps.view(*tokens_BT.shape, -1), out.hidden.view(*tokens_BT.shape, -1)

    def _require_served(self, unit: Unit, scheme: Scheme) -> None:
        """Refuse what training computes in another way than serving does."""
        stored = self.checkpoint.tensor(unit.name)
        quantised = isinstance(stored, QuantizedTensor)
        projection = unit.name.startswith("model.layers.") and unit.name.endswith("_proj.weight")
        if scheme.arithmetic.linear_activation == "mxfp8" and projection and not quantised:
            raise ConfigError(
                f"'{unit.name}' is stored plain, and '{scheme.arithmetic.name}' quantises the inputs of MXFP8 ones",
                where=str(self.checkpoint.folder),
                expected="MXFP8 projections, or an arithmetic that leaves their inputs in BF16",
                fix="m31 convert writes such a checkpoint",
            )
        if scheme.arithmetic.expert_middle == "nvfp4-static" and unit.name.endswith(".w2.weight"):
            usual = default_input_scale(self.text, unit.name)
            part = stored.parts().get("input_global_scale") if isinstance(stored, QuantizedTensor) else None
            found = None if part is None else float(part.load())
            if found is None or torch.tensor(found) != torch.tensor(usual):
                raise ConfigError(
                    f"'{unit.name}' has the input scale {found}",
                    where=str(self.checkpoint.folder),
                    expected=f"{usual}, the one of a model without calibration",
                    fix="m31 convert without --input-scales writes such a checkpoint",
                )
