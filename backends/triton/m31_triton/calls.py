"""From the arguments of an op to launches: what the session's kernels do when they run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from m31.graph import StepClass
from m31.sdk import KVCache
from m31_triton.launch import (
    IndexBranch,
    Pages,
    Runner,
    launch_projection,
    launch_qkv_insert,
    launch_sparse_decode,
    workspace_size,
)
from m31_triton.plan import LaunchAll
from m31_triton.weights import ProjectionWeights


def attend(layer: int, scale: float, step: StepClass, splits: int) -> LaunchAll:
    """`sparse_attention` of a layer, the blocks of a token and head shared by `splits` programs."""

    def launch(run: Runner, outs: Sequence[Any], ins: Sequence[Any], weights: None, workspace: Tensor | None) -> None:
        q, cache, blocks, positions, cu_q, _, page_table = ins
        # Where padding was cut off, the buffers are smaller than the step class.
        seqs, pages = page_table.shape
        tokens, heads = blocks.shape[:2]
        size = workspace_size(tokens, heads, q.shape[2], splits)
        launch_sparse_decode(
            run,
            replace(step, tokens=tokens, seqs=seqs, pages=pages),
            q=q,
            k=pages_of(cache, layer, "k"),
            v=pages_of(cache, layer, "v"),
            blocks=blocks,
            positions=positions,
            cu_q=cu_q,
            page_table=page_table,
            out=outs[0],
            scale=scale,
            splits=splits,
            workspace=workspace[: 4 * size].view(torch.float32) if workspace is not None and size else None,
        )

    return launch


def insert(layer: int, eps: float, step: StepClass, width: int) -> LaunchAll:
    """`qkv_insert` of a layer; `width` columns of the five matrices together."""

    def launch(
        run: Runner, outs: Sequence[Any], ins: Sequence[Any], weights: ProjectionWeights, workspace: Tensor | None
    ) -> None:
        h, cache, slots, cos, sin = ins
        q, iq, _ = outs
        now = replace(step, tokens=len(h))
        assert workspace is not None  # the kernel asked for it
        # The arithmetic rounds what a projection gives to bfloat16.
        rows = workspace[: 2 * len(h) * width].view(torch.bfloat16).view(len(h), width)
        launch_projection(run, now, x=h, w=weights.matrix, slot_map=slots, y=rows)
        launch_qkv_insert(
            run,
            now,
            rows=rows,
            q_norm=weights.norms["q_norm"],
            k_norm=weights.norms["k_norm"],
            table=(cos, sin),
            slot_map=slots,
            q_out=q,
            k=pages_of(cache, layer, "k"),
            v=pages_of(cache, layer, "v"),
            index=IndexBranch(
                q_norm=weights.norms["iq_norm"],
                k_norm=weights.norms["ik_norm"],
                q_out=iq,
                pages=pages_of(cache, layer, "index"),
            ),
            eps=eps,
        )

    return launch


def pages_of(cache: KVCache, layer: int, kind: str) -> Pages:
    """The stored parts of one kind of vector (`k`, `v`, `index`) of a cache whose layout is m31-reference:v2."""
    parts, name = cache.components(), f"{layer}.{kind}"
    values = parts.get(f"{name}.values")
    if values is not None:
        return Pages(data=values, scale=None, order="linear", dim=values.shape[3])
    packed, scale = parts[f"{name}.packed"], parts[f"{name}.scale"]
    return Pages(data=packed, scale=scale, order="token_quad" if scale.ndim == 5 else "linear", dim=2 * packed.shape[3])
