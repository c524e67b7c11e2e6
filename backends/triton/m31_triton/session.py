"""The portable backend: Triton kernels where there are some, the reference for the rest, on the reference's pages.

On a processor the kernels are interpreted, which proves them and serves nobody; on an accelerator they are launched.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from m31.errors import BackendRefused
from m31.formats.arithmetic import ArithmeticSpec
from m31.graph import Arithmetic, Kernel, OpInstance, Refusal, RunKernel, Shard, StepClass
from m31.ops import StateType
from m31.sdk.backend import Backend, KVLayout, KVSpec, LazyTensor, Session
from m31.sdk.memory import host_memory_free
from m31_triton.launch import (
    ROWS,
    IndexBranch,
    Pages,
    Runner,
    decode_splits,
    interpreted,
    launch_projection,
    launch_qkv_insert,
    launch_sparse_decode,
    on_device,
    workspace_size,
)
from m31_triton.weights import EXACT, MATRICES, ProjectionWeights, bytes_of

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
    index: Sequence[_Store]


class TritonSession(Session):
    """Serves `sparse_attention`, and `qkv_insert` where the graph is fused; bfloat16 operands, pages read exactly.

    Args:
        device: a processor, where kernels are interpreted, or an accelerator of this torch build.
        numerics: an arithmetic with bfloat16 queries, exact reads and probabilities that are not rounded.
    """

    def __init__(self, device: torch.device, numerics: ArithmeticSpec) -> None:
        self.device, self.numerics = device, numerics
        self.dtypes = {"model": torch.float32, "accum": torch.float32, "int64": torch.int64}
        self.run: Runner = interpreted if device.type == "cpu" else on_device

    @property
    def notes(self) -> tuple[str, ...]:
        """See `Session.notes`."""
        if self.device.type != "cpu":
            return ()
        return ("backend triton interprets its kernels on the processor: right, and slower than any other backend",)

    def fusions(self) -> tuple[str, ...]:
        """See `Session.fusions`."""
        return ("qkv_insert",)

    def kernel(self, op: OpInstance, step: StepClass) -> Kernel | Refusal:
        """At every step class, if sizes, formats and roundings are those of the kernels."""
        if op.spec.name not in ("sparse_attention", "qkv_insert"):
            return Refusal("no portable Triton kernel for it")
        state = next(value for value in op.inputs if isinstance(value, StateType))
        if state.kv_format not in ("", *_FORMATS):
            return Refusal(f"pages are {state.kv_format}, the kernels read and write {' and '.join(_FORMATS)}")
        return self._attention(op, step) if op.spec.name == "sparse_attention" else self._insert(op, step, state)

    @property
    def _how(self) -> str:
        return "interpreted on the processor" if self.device.type == "cpu" else f"compiled for {self.device}"

    def _units(self) -> int:
        """Programs that the device runs at once; the interpreter runs one."""
        if self.device.type == "cpu":
            return 1
        return int(torch.cuda.get_device_properties(self.device).multi_processor_count)

    def _attention(self, op: OpInstance, step: StepClass) -> Kernel | Refusal:
        _, heads, dim = op.inputs[0].shape  # type: ignore[union-attr]
        topk, kv_heads = int(op.inputs[2].shape[2]), op.attrs["kv_heads"]  # type: ignore[union-attr]
        if heads // kv_heads > ROWS:
            return Refusal(f"{heads // kv_heads} query heads share a KV head, the kernel takes {ROWS}")
        if not isinstance(dim, int) or not _fits(dim):
            return Refusal(f"heads of {dim} channels, the kernel takes powers of two from 16")
        splits = decode_splits(step.tokens * kv_heads, topk, self._units())
        return Kernel(
            name="m31_triton.sparse_decode",
            run=self._attend(op.attrs["layer"], op.attrs["scale"], step, splits),
            arithmetic=Arithmetic("bfloat16*float32", "float32", "float32"),
            workspace_bytes=4 * workspace_size(step.tokens, kv_heads, dim, splits),
            why=f"{splits} program{'s' * (splits > 1)} per token and KV head, {self._how}",
        )

    def _attend(self, layer: int, scale: float, step: StepClass, splits: int) -> RunKernel:
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

    def _insert(self, op: OpInstance, step: StepClass, state: StateType) -> Kernel | Refusal:
        shapes = {slot: decl.shape for slot, decl in op.slots.items()}
        sizes = (shapes["q_norm.weight"][0], shapes["iq_norm.weight"][0])
        loose = [f"{name}.weight" for name in MATRICES if op.slots[f"{name}.weight"].stored not in EXACT]
        if loose:
            return Refusal(f"{', '.join(loose)} would be rounded to bfloat16, the kernel is for {' and '.join(EXACT)}")
        if self.numerics.linear_activation != "bfloat16":
            return Refusal(f"arithmetic '{self.numerics.name}' projects other inputs than bfloat16")
        # Pages in bfloat16 round what is written to them, so that the graph does not.
        kv = op.attrs["round_kv"] or state.kv_format == "bfloat16"
        index = op.attrs["round_index"] or state.index_format == "bfloat16"
        if not (op.attrs["round_query"] and kv and index):
            return Refusal("the kernel rounds queries, keys and values to bfloat16, this graph does not")
        if state.index_format not in _FORMATS:
            return Refusal(f"index keys are {state.index_format}, the kernel writes {' and '.join(_FORMATS)}")
        if not all(map(_fits, sizes)):
            return Refusal(f"heads of {sizes[0]} and {sizes[1]} channels, the kernel takes powers of two from 16")
        width = sum(shapes[f"{name}.weight"][0] for name in MATRICES)
        return Kernel(
            name="m31_triton.qkv_insert",
            run=self._project(op.attrs["layer"], op.attrs["eps"], step, width),
            arithmetic=Arithmetic("bfloat16", "float32", "bfloat16"),
            workspace_bytes=2 * step.tokens * width,
            why=f"a projection of all branches, then norm, rotation and insert in one launch, {self._how}",
        )

    def _project(self, layer: int, eps: float, step: StepClass, width: int) -> RunKernel:
        def run(outs: Sequence[Any], ins: Sequence[Any], weights: ProjectionWeights, workspace: Tensor | None) -> None:
            h, cache, slots, cos, sin = ins
            q, iq, _ = outs
            now = replace(step, tokens=len(h))
            assert workspace is not None  # the kernel asked for it
            # The arithmetic rounds what a projection gives to bfloat16.
            rows = workspace[: 2 * len(h) * width].view(torch.bfloat16).view(len(h), width)
            launch_projection(self.run, now, x=h, w=weights.matrix, slot_map=slots, y=rows)
            launch_qkv_insert(
                self.run,
                now,
                rows=rows,
                q_norm=weights.norms["q_norm"],
                k_norm=weights.norms["k_norm"],
                table=(cos, sin),
                slot_map=slots,
                q_out=q,
                k=_pages(cache, layer, "k"),
                v=_pages(cache, layer, "v"),
                index=IndexBranch(
                    q_norm=weights.norms["iq_norm"],
                    k_norm=weights.norms["ik_norm"],
                    q_out=iq,
                    pages=_pages(cache, layer, "index"),
                ),
                eps=eps,
            )

        return run

    def prepare(self, op: OpInstance, slots: Mapping[str, LazyTensor], shard: Shard) -> ProjectionWeights:
        """The matrices of `qkv_insert` as one."""
        if op.spec.name != "qkv_insert":
            raise BackendRefused(f"serves no {op.spec.name}, so it prepares no weights of it", where="backend triton")
        return ProjectionWeights.of(slots, self.device)

    def kv_layout(self, spec: KVSpec) -> KVLayout:
        """Refused: pages are the reference's (`shares_pages`)."""
        raise BackendRefused(
            "has no pages of its own",
            where="backend triton",
            expected="that some op on the cache falls back on the reference, as the manifest declares",
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
        """What the device, or the host within its control group, has free."""
        if self.device.type == "cpu":
            return host_memory_free()
        return int(torch.cuda.mem_get_info(self.device)[0])

    def weight_bytes(self, op: OpInstance, slots: Mapping[str, LazyTensor]) -> int:
        """See `Session.weight_bytes`."""
        return bytes_of(slots)


def _fits(size: int) -> bool:
    return size >= 16 and not size & (size - 1)


def _pages(cache: _SharedPages, layer: int, kind: str) -> Pages:
    spec = cache.layout.spec
    stores = {"k": cache.k, "v": cache.v, "index": cache.index}[kind]
    parts = stores[layer].parts
    index = kind == "index"
    dim, fmt = (spec.index_dim, spec.index_format) if index else (spec.head_dim, spec.kv_format)
    if fmt == "bfloat16":
        return Pages(data=parts["values"], scale=None, order="linear", dim=dim)
    return Pages(
        data=parts["packed"], scale=parts["scale"], order=spec.v_scale_order if kind == "v" else "linear", dim=dim
    )


class TritonBackend(Backend):
    """See the module docstring; what it serves is in backend.toml."""

    def open(
        self,
        *,
        device: str | None,
        dtype: str,
        rank: int,
        world: int,
        arithmetic: ArithmeticSpec,
        options: Mapping[str, int],
    ) -> TritonSession:
        """See `Backend.open`."""
        try:
            target = torch.device(device or "cpu")
            torch.ones(1, device=target).item()  # the meta device has no values
        except (RuntimeError, AssertionError) as error:
            raise BackendRefused(
                f"device '{device}' cannot be used: {str(error).splitlines()[0]}",
                where="backend triton",
                fix="use --device cpu, or a device of this torch build",
            ) from error
        return TritonSession(target, arithmetic)
