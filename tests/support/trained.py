"""Tiny models for the trainer's tests, and what a served model computed at its router and block selection."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tests.support import quantised

from m31 import config
from m31.checkpoint import target_config
from m31.formats.arithmetic import parse
from m31.training.fakequant import UNQUANTISED, Scheme
from m31.training.model import TrainedText
from m31.training.parameters import Parameters
from m31_reference.attention import ATTENTION
from m31_reference.kernels import KERNELS


def tiny(weights: str = "m31", **changes: Any) -> tuple[dict[str, Any], Any]:
    """config.json contents and typed form of `quantised.bf16_config`'s model (block 4, top-3) in a target format."""
    mapping = quantised.bf16_config()
    mapping.update(changes)
    return target_config(mapping, config.parse(mapping, where="tiny"), weights)  # type: ignore[arg-type]


def scheme(
    arithmetic: str = "w4a4-megamoe", *, kv: str = "nvfp4", index: str = "nvfp4", weights: str = "m31"
) -> Scheme:
    """A scheme by names."""
    return Scheme(arithmetic=parse(arithmetic), kv_format=kv, index_format=index, weights=weights)


def model(target: Any, how: Scheme = UNQUANTISED, *, dtype: torch.dtype = torch.float64, seed: int = 3) -> TrainedText:
    """A model whose norms, biases and clamps all matter, ready to run."""
    parameters = Parameters(target, dtype=dtype, quantise=how.weights is not None)
    generator = torch.Generator().manual_seed(seed)
    for _, master in parameters.named():
        scale = 0.2 if master.dim() == 1 else 1.5 * master.shape[1] ** -0.5
        master.copy_(torch.randn(master.shape, generator=generator) * scale)
    parameters.refresh()
    return TrainedText(parameters, how)


def tokens(batch: int, length: int, seed: int = 0, vocabulary: int = 64) -> torch.Tensor:
    """Random token ids [B, T]."""
    return torch.randint(3, vocabulary, (batch, length), generator=torch.Generator().manual_seed(seed))


@contextmanager
def watched(patch: pytest.MonkeyPatch) -> Iterator[dict[str, list[torch.Tensor]]]:
    """Outputs of the reference's router and block selection, in the order of the layers, while this is open."""
    seen: dict[str, list[torch.Tensor]] = {"router": [], "block_select": []}

    def recording(name: str, maker: Any) -> Any:
        def make(*args: Any) -> Any:
            run = maker(*args)

            def recorded(outs: Any, ins: Any, w: Any, workspace: Any) -> None:
                run(outs, ins, w, workspace)
                seen[name].append(outs[0].clone())

            return recorded

        return make

    patch.setitem(KERNELS, "router", recording("router", KERNELS["router"]))
    patch.setitem(ATTENTION, "block_select", recording("block_select", ATTENTION["block_select"]))
    yield seen
