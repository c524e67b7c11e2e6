"""The portable backend: Triton kernels where there are some, the reference for the rest, on the reference's pages.

On a processor the kernels are interpreted, which proves them and serves nobody; on an accelerator they are launched.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from m31.errors import BackendRefused
from m31.formats.arithmetic import ArithmeticSpec, parse
from m31.graph import Arithmetic, Kernel, OpInstance, Refusal, RunKernel, Shard, StepClass
from m31.sdk.backend import Backend, KVLayout, KVSpec, LazyTensor, Limits, Session
from m31_triton.launch import (
    ROWS,
    Pages,
    Runner,
    decode_splits,
    interpreted,
    launch_sparse_decode,
    on_device,
    workspace_size,
)

if TYPE_CHECKING:
    from m31.config import Model
    from m31.graph import WeightHandle

DEFAULT = "exact+query=bfloat16"
_FORMATS = ("bfloat16", "nvfp4")
_MAKER = "m31-reference:v2:"  # the byte order of the pages that the kernels know


class _Store(Protocol):
    parts: Mapping[str, Tensor]


class _Layout(Protocol):
    spec: KVSpec


class _SharedPages(Protocol):
    """As much of the reference's cache as a kernel touches."""

    layout: _Layout
    k: Sequence[_Store]
    v: Sequence[_Store]


class TritonSession(Session):
    """Serves `sparse_attention`; queries are multiplied as bfloat16, pages exactly.

    Args:
        device: a processor, where kernels are interpreted, or an accelerator of this torch build.
        numerics: an arithmetic with bfloat16 queries, exact reads and unrounded probabilities.
    """

    def __init__(self, device: torch.device, numerics: ArithmeticSpec) -> None:
        self.device, self.numerics = device, numerics
        self.dtypes = {"model": torch.float32, "accum": torch.float32, "int64": torch.int64}
        self.run: Runner = interpreted if device.type == "cpu" else on_device
        self.notes = (
            ["backend triton interprets its kernels on the processor: right, and slower than any other backend"]
            if device.type == "cpu"
            else []
        )

    def limits(self, model: Model) -> Limits:
        """The model's own; pages in the formats that the kernels read."""
        return Limits(
            max_context=model.text.max_position,
            kv_formats=("bfloat16", "nvfp4"),
            index_formats=("bfloat16", "float32", "nvfp4", "fp8", "int8"),
            draft_tokens=0,
            image=False,
            video=False,
        )

    def kernel(self, op: OpInstance, step: StepClass) -> Kernel | Refusal:
        """Block-sparse attention at every step class, if the heads fit the kernel."""
        if op.spec.name != "sparse_attention":
            return Refusal("no portable Triton kernel for it")
        _, heads, dim = op.inputs[0].shape  # type: ignore[union-attr]
        kv_heads = op.attrs["kv_heads"]
        if heads // kv_heads > ROWS:
            return Refusal(f"{heads // kv_heads} query heads share a KV head, the kernel takes {ROWS}")
        if not isinstance(dim, int) or not _fits(dim):
            return Refusal(f"heads of {dim} channels, the kernel takes powers of two from 16")
        topk = op.inputs[2].shape[2]  # type: ignore[union-attr]
        splits = decode_splits(step.tokens * kv_heads, int(topk), self._units())
        how = "interpreted on the processor" if self.device.type == "cpu" else f"compiled for {self.device}"
        return Kernel(
            name="m31_triton.sparse_decode",
            run=self._sparse_attention(op.attrs["layer"], op.attrs["scale"], step, splits),
            arithmetic=Arithmetic("bfloat16*float32", "float32", "float32"),
            workspace_bytes=4 * workspace_size(step.tokens, kv_heads, dim, splits),
            why=f"{splits} programs per token and KV head, {how}",
        )

    def _units(self) -> int:
        """Programs that the device runs at once; the interpreter runs one."""
        if self.device.type == "cpu":
            return 1
        return int(torch.cuda.get_device_properties(self.device).multi_processor_count)

    def _sparse_attention(self, layer: int, scale: float, step: StepClass, splits: int) -> RunKernel:
        def run(outs: Sequence[Any], ins: Sequence[Any], weights: None, workspace: Tensor | None) -> None:
            q, cache, blocks, positions, cu_q, _, page_table = ins
            # Where padding was cut off, the buffers are smaller than the step class.
            seqs, pages = page_table.shape
            tokens, heads = blocks.shape[:2]
            size = workspace_size(tokens, heads, q.shape[2], splits)
            launch_sparse_decode(
                self.run,
                replace(step, tokens=tokens, seqs=seqs, pages=pages),
                q=q,
                k=_pages(cache, layer, "k"),
                v=_pages(cache, layer, "v"),
                blocks=blocks,
                positions=positions,
                cu_q=cu_q,
                page_table=page_table,
                out=outs[0],
                scale=scale,
                splits=splits,
                workspace=workspace[: 4 * size].view(torch.float32) if workspace is not None and size else None,
            )

        return run

    def prepare(self, op: OpInstance, slots: Mapping[str, LazyTensor], shard: Shard) -> WeightHandle:
        """Refused: no op that this session serves has weights."""
        raise BackendRefused(f"serves no op with weights, and {op.spec.name} has some", where="backend triton")

    def kv_layout(self, spec: KVSpec) -> KVLayout:
        """Refused: pages are the reference's (`shares_pages`)."""
        raise BackendRefused(
            "has no pages of its own",
            where="backend triton",
            expected="that the ops which write pages fall back on the reference, as the manifest declares",
        )

    def shares_pages(self, layout: KVLayout) -> bool:
        """The reference's, in bfloat16 or NVFP4, of sizes that the kernels take."""
        spec = getattr(layout, "spec", None)
        return (
            isinstance(spec, KVSpec)
            and layout.layout_id.startswith(_MAKER)
            and spec.kv_format in _FORMATS
            and _fits(spec.page_tokens)
            and _fits(spec.head_dim)
        )

    def memory_free(self) -> int:
        """Bytes that are free now. On the host the page cache is not counted, so that this errs on the safe side."""
        if self.device.type == "cpu":
            return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return int(torch.cuda.mem_get_info(self.device)[0])

    def weight_bytes(self, op: OpInstance, slots: Mapping[str, LazyTensor]) -> int:
        """None: see `prepare`."""
        return 0


def _fits(size: object) -> bool:
    return isinstance(size, int) and size >= 16 and not size & (size - 1)


def _pages(cache: _SharedPages, layer: int, kind: str) -> Pages:
    spec = cache.layout.spec
    parts = (cache.k if kind == "k" else cache.v)[layer].parts
    if spec.kv_format == "bfloat16":
        return Pages(data=parts["values"], scale=None, order="linear", dim=spec.head_dim)
    order = "linear" if kind == "k" else spec.v_scale_order
    return Pages(data=parts["packed"], scale=parts["scale"], order=order, dim=spec.head_dim)


class TritonBackend(Backend):
    """See the module docstring; the limits are in backend.toml."""

    def open(
        self,
        *,
        device: str | None,
        dtype: str,
        rank: int,
        world: int,
        arithmetic: str | None = None,
        weight_cache_bytes: int | None = None,
    ) -> TritonSession:
        """See `Backend.open`."""
        where = "backend triton"
        if dtype != "float32":
            raise BackendRefused(f"compute dtype '{dtype}' is not served", where=where, expected="float32")
        if world != 1:
            raise BackendRefused(f"a world of {world} ranks is not served", where=where, expected="1")
        if weight_cache_bytes is not None:
            raise BackendRefused("keeps no decoded weights", where=where, expected="no size for a weight cache")
        numerics = parse(arithmetic or DEFAULT)
        if (numerics.query, numerics.kv_read, numerics.probability) != ("bfloat16", "exact", None):
            raise BackendRefused(
                f"arithmetic '{numerics.name}' is not that of the kernels",
                where=where,
                expected="bfloat16 queries, exact reads of pages, probabilities that are not rounded",
                fix=f"leave --arithmetic out, which means {DEFAULT}",
            )
        try:
            target = torch.device(device or "cpu")
            torch.ones(1, device=target).item()
        except (RuntimeError, AssertionError) as error:
            raise BackendRefused(
                f"device '{device}' cannot be used: {str(error).splitlines()[0]}",
                where=where,
                fix="use --device cpu, or a device of this torch build",
            ) from error
        return TritonSession(target, numerics)
