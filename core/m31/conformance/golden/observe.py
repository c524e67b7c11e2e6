"""What a loaded model computes at every position of a prompt: logits, experts, blocks, and how close the choices were.

Legend: T tokens, V vocabulary, E experts, h index heads, B blocks, L layers of the kind in question.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from m31.config import Text
from m31.engine.model import Model
from m31.graph import OpInstance

Bools = NDArray[np.bool_]
F64 = NDArray[np.float64]


@dataclass(frozen=True)
class Choices:
    """What the layers of one kind chose.

    Attributes:
        kept: bool [L,T,E] for experts, [L,T,h,B] for blocks; None where the backend's plan shows no such op.
        gaps: float64, `kept` without its last axis: by how much the score of the last one chosen exceeds that of the
            first one left out; infinite where nothing was left out. None if it was not asked for.
    """

    kept: Bools | None
    gaps: F64 | None


@dataclass(frozen=True)
class Observed:
    """One prompt. `logprobs` float64 [T,V]; experts by MoE layer, blocks by sparse layer."""

    logprobs: F64
    experts: Choices
    blocks: Choices


@dataclass
class _Seen:
    """Chunks of rows by op, in the order of the layers."""

    gaps_wanted: bool
    ids: dict[tuple[str, str], list[torch.Tensor]] = field(default_factory=dict)  # by kind of op and its name
    gaps: dict[tuple[str, str], list[torch.Tensor]] = field(default_factory=dict)

    def __call__(self, op: OpInstance, outs: Sequence[Any], ins: Sequence[Any], weights: Any) -> None:
        """See `m31.engine.compiler.Look`."""
        if op.spec.name not in ("router", "block_select"):
            return
        key = op.spec.name, op.name
        self.ids.setdefault(key, []).append(outs[0].cpu().clone())
        if self.gaps_wanted:
            gaps = _expert_gaps(op, ins[0], weights) if op.spec.name == "router" else _block_gaps(op, ins[0], ins[1])
            self.gaps.setdefault(key, []).append(gaps.cpu())

    def choices(self, kind: str, layers: int, tokens: int, options: int) -> Choices:
        """The chunks of one kind of op together."""
        keys = [key for key in self.ids if key[0] == kind]
        ids = [torch.cat(self.ids[key]) for key in keys]
        if len(ids) != layers or any(len(rows) != tokens for rows in ids):
            return Choices(None, None)
        kept = np.stack([_as_set(rows, options) for rows in ids]) if ids else np.zeros((0, tokens, options), np.bool_)
        if not self.gaps_wanted:
            return Choices(kept, None)
        gaps = [torch.cat(self.gaps[key]).double().numpy() for key in keys]
        return Choices(kept, np.stack(gaps) if gaps else np.zeros((0, tokens)))


def observe(model: Model, ids: Sequence[int], *, gaps: bool) -> Observed:
    """Run a prompt and look at it.

    Args:
        model: of `m31.load`.
        ids: the prompt.
        gaps: whether to compute `Choices.gaps`.

    Raises: what `Model.logits` raises.
    """
    text = model.config.text
    seen = _Seen(gaps)
    compiler = model.engine.compiler
    compiler.watch(seen)
    try:
        logits = model.logits(ids)
    finally:
        compiler.watch(None)
    block = 1 if text.sparse is None else text.sparse.block_size
    return Observed(
        logprobs=np.asarray(torch.log_softmax(logits.double(), -1)),
        experts=seen.choices(
            "router", text.mlp.count("moe"), len(ids), 0 if text.moe is None else text.moe.num_experts
        ),
        blocks=seen.choices("block_select", text.attention.count("sparse"), len(ids), -(-len(ids) // block)),
    )


def first_choice(text: Text) -> int:
    """The first position at which there are more blocks than are read."""
    return 0 if text.sparse is None else text.sparse.topk_blocks * text.sparse.block_size


def _as_set(ids: torch.Tensor, options: int) -> Bools:
    """ids [...,K] with -1 for none -> bool [...,options]."""
    kept = torch.zeros((*ids.shape[:-1], options + 1), dtype=torch.bool)
    kept.scatter_(-1, torch.where(ids < 0, options, ids), True)
    return np.asarray(kept[..., :options])


def _expert_gaps(op: OpInstance, h_TC: torch.Tensor, weights: Any) -> torch.Tensor:
    """[T]: of the biased scores (MODEL.md §2.5)."""
    values: Mapping[str, torch.Tensor] = weights.dequantise()
    device = h_TC.device
    weight_EC, bias_E = (values[slot].to(device, torch.float64) for slot in ("weight", "bias"))
    choice_TE = torch.sigmoid(h_TC.double() @ weight_EC.T) + bias_E
    return _gap(choice_TE, torch.full((len(choice_TE),), int(op.attrs["topk"]), device=device))


def _block_gaps(op: OpInstance, scores_ThB: torch.Tensor, positions_T: torch.Tensor) -> torch.Tensor:
    """[T,h]: of the scores of the blocks that are not forced (MODEL.md §2.4)."""
    attrs = op.attrs
    own_T1 = (positions_T // attrs["block"])[:, None]
    block_B = torch.arange(scores_ThB.shape[-1], device=scores_ThB.device)
    forced_TB = (block_B > own_T1 - attrs["local_blocks"]) | (block_B < attrs["init_blocks"])
    forced_TB = forced_TB & (block_B <= own_T1)
    rest_ThB = scores_ThB.double().masked_fill(forced_TB[:, None] | (block_B > own_T1)[:, None], -torch.inf)
    room_T = attrs["topk"] - forced_TB.sum(-1)
    return _gap(rest_ThB, room_T[:, None].expand(rest_ThB.shape[:-1]))


def _gap(scores: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """Score number `kept` (counted from 1, the highest first) less the next one: [...,N], [...] -> [...]."""
    ordered = scores.sort(-1, descending=True).values
    none = torch.full_like(ordered[..., :1], -torch.inf)
    padded, most = torch.cat([-none, ordered, none], -1), scores.shape[-1] + 1
    last = padded.gather(-1, kept.clamp(max=most)[..., None])[..., 0]
    following = padded.gather(-1, (kept + 1).clamp(max=most)[..., None])[..., 0]
    # Behind the last one there is -inf: also where fewer than `kept` have a score, and nothing is left out.
    return torch.where(following == -torch.inf, torch.inf, last - following)
