"""The model as it is served: losses of whole windows, and the blocks that its attention read.

Everything goes through `m31.load` and the engine (prefill, pages, block selection of the reference backend); nothing
here uses the training forward.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

import m31
from m31.engine.model import Model
from m31_reference.attention import ATTENTION

F64 = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How a checkpoint is served: arithmetic, formats of the pages, compute dtype, drafted tokens (0: none)."""

    arithmetic: str
    kv: str
    index: str
    dtype: str = "float32"
    draft: int = 0

    def key(self) -> dict[str, Any]:
        """Plain JSON."""
        return asdict(self)


TWIN = Setting(arithmetic="exact", kv="float32", index="float32")


def load(folder: Path, setting: Setting) -> Model:
    """The checkpoint on the reference backend, which imitates every arithmetic and has every page format."""
    return m31.load(
        folder,
        backend="reference",
        dtype=setting.dtype,
        arithmetic=setting.arithmetic,
        kv_dtype=setting.kv,
        index_dtype=setting.index,
        draft=setting.draft or None,
    )


def nats(model: Any, tokens: Tensor, targets: Tensor) -> F64:
    """Losses of one window, float64 [T], in nats; 0 where the target is -1.

    Args:
        model: anything with `logits(ids) -> [T, V]`.
        tokens, targets: int64 [T].
    """
    logits = model.logits(tokens.tolist())
    loss = functional.cross_entropy(logits.float(), targets, reduction="none", ignore_index=-1)
    return np.asarray(loss.double().numpy())


@contextmanager
def watched() -> Iterator[list[Tensor]]:
    """While this is open, models that are loaded and run in it append what their block selection chose.

    One tensor [T, heads, topk] of block ids (-1: none) per sparse layer and step, in order. Plans are made when they
    are first needed, so a model must be loaded and run inside.
    """
    seen: list[Tensor] = []
    make = ATTENTION["block_select"]

    def recording(*args: Any, **named: Any) -> Any:
        run = make(*args, **named)

        def recorded(outs: Any, ins: Any, w: Any, workspace: Any) -> None:
            run(outs, ins, w, workspace)
            seen.append(outs[0].clone())

        return recorded

    ATTENTION["block_select"] = recording
    try:
        yield seen
    finally:
        ATTENTION["block_select"] = make


def by_layer(seen: Sequence[Tensor], layers: int) -> list[Tensor]:
    """What `watched` saw of one sequence, joined over its steps: [T, heads, topk] per sparse layer."""
    return [torch.cat(list(seen[layer::layers])) for layer in range(layers)]


@contextmanager
def reading_everything(folder: Path, length: int) -> Iterator[Path]:
    """The same checkpoint under a config whose queries may read every block of `length` tokens.

    Raises:
        ValueError: the config is not that of a text model with sparse attention.
    """
    config = json.loads((folder / "config.json").read_text())
    sparse = config.get("sparse_attention_config")
    if not isinstance(sparse, dict):
        raise ValueError(f"{folder}: config.json has no sparse_attention_config at its top")
    sparse["sparse_topk_blocks"] = -(-length // sparse["sparse_block_size"])
    with TemporaryDirectory() as name:
        for path in folder.iterdir():
            if path.name != "config.json":
                Path(name, path.name).symlink_to(path.resolve())
        Path(name, "config.json").write_text(json.dumps(config))
        yield Path(name)
