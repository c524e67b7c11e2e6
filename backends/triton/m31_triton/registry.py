"""The kernels of this package as a session launches them on the targets, and what their code must contain.

Nothing here says how a kernel is launched: the session is asked for its kernel of an op, and that is run with a runner
that takes the launches down. Sizes are those of one device of four (MODEL.md §8: tensor parallel 4): 16 query heads,
one KV head, one index head of 128 channels, pages of 128 tokens, 16 blocks selected.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from m31.config import SparseAttention, SwigluOai, Text
from m31.formats.arithmetic import parse
from m31.graph import Call, Kernel, ModelGraph, Rounding, Shard, StepClass, fuse, trace
from m31.ops import StateType, ValueType
from m31_triton.aot import KernelSpec
from m31_triton.errors import CodeRejected
from m31_triton.launch import Runner
from m31_triton.session import TritonSession
from m31_triton.weights import ProjectionWeights

TEXT = Text(
    num_layers=1,
    hidden_size=6144,
    num_heads=16,
    num_kv_heads=1,
    head_dim=128,
    vocab_size=128,
    max_position=1_048_576,
    rope_theta=5e6,
    rotary_dim=64,
    rms_norm_eps=1e-6,
    activation=SwigluOai(alpha=1.702, beta=1.0, limit=7.0),
    dense_intermediate_size=128,
    attention=("sparse",),
    mlp=("dense",),
    sparse=SparseAttention(
        num_index_heads=1, index_dim=128, topk_blocks=16, block_size=128, local_blocks=1, init_blocks=0
    ),
    moe=None,
    tie_word_embeddings=False,
    bos_token_id=0,
    eos_token_ids=(1,),
    pad_token_id=None,
    num_mtp_layers=0,
)
"""One sparse layer of one device of four; what the kernels do not see is small."""
DECODE = StepClass(kind="decode", q_len=1, tokens=32, seqs=32, rows=32, pages=8192)
PREFILL = StepClass(kind="mixed", q_len=0, tokens=4096, seqs=32, rows=32, pages=8192)
SMALL, LARGE = 32, 128
"""Programs that a device runs at once: one for each token of DECODE, or four."""
_CPU, _NUMERICS = torch.device("cpu"), parse("w16a16")


@cache
def _graph(pages: str) -> ModelGraph:
    """The layer with its fused ops, over pages of one format."""
    rounding = Rounding.of(_NUMERICS, pages, pages)
    graph = trace(TEXT, rounding, lambda name: "bfloat16", (pages, pages))
    return fuse(graph, TritonSession(_CPU, _NUMERICS).fusions(), lambda op: True, text=TEXT)[0]


def _call(op: str, pages: str) -> Call:
    return next(call for call in _graph(pages).calls if call.op.spec.name == op)


def launch_op(run: Runner, op: str, step: StepClass, pages: str, units: int) -> None:
    """Give `run` what a session launches for an op at a step class: buffers without memory, weights of zeros.

    Args:
        op: `qkv_insert` or `sparse_attention`.
        pages: their format.
        units: programs that the device runs at once.
    Raises:
        CodeRejected: the session does not serve the op.
    """
    session = TritonSession(_CPU, _NUMERICS, run=run, units=units)
    call = _call(op, pages)
    kernel = session.kernel(call.op, step)
    if not isinstance(kernel, Kernel):
        raise CodeRejected(f"the session does not serve it: {kernel.reason}", where=f"op {op} over {pages} pages")

    def buffer(value: ValueType) -> Any:
        if isinstance(value, StateType):
            return _Pages(pages)
        return _empty(*step.shape(value.shape), dtype=session.dtypes[value.dtype])  # type: ignore[union-attr]

    outs = [buffer(value) for value in call.op.outputs]
    ins = [buffer(_graph(pages).types[name]) for name in call.reads]
    workspace = _empty(kernel.workspace_bytes, dtype=torch.uint8) if kernel.workspace_bytes else None
    kernel.run(outs, ins, _weights() if call.op.weights else None, workspace)


def _empty(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


@dataclass(frozen=True)
class _Pages:
    """The components of the layout m31-reference:v2; four pages: their number is no argument of any kernel."""

    format: str

    def components(self) -> Mapping[str, Tensor]:
        """See `KVCache.components`. V scales lie in the order that K scales do not have."""
        dim, page = TEXT.head_dim, 128
        if self.format == "bfloat16":
            return {f"0.{kind}.values": _empty(4, 1, page, dim, dtype=torch.bfloat16) for kind in ("k", "v", "index")}
        scales = {"k": (page, dim // 16), "v": (page // 4, dim // 16, 4), "index": (page, dim // 16)}
        packed = {f"0.{kind}.packed": _empty(4, 1, page, dim // 2, dtype=torch.uint8) for kind in scales}
        return packed | {f"0.{kind}.scale": _empty(4, 1, *s, dtype=torch.uint8) for kind, s in scales.items()}


@dataclass(frozen=True)
class _Zeros:
    """A weight of the checkpoint, in bfloat16."""

    name: str
    shape: tuple[int, ...]

    def load(self) -> Tensor:
        """See `LazyTensor.load`."""
        return torch.zeros(1, dtype=torch.bfloat16).expand(self.shape)


@cache
def _weights() -> ProjectionWeights:
    """Those of `qkv_insert`, as the session prepares them; the format of the pages does not matter to them."""
    op = _call("qkv_insert", "bfloat16").op
    slots: Any = {slot: _Zeros(decl.name, decl.shape) for slot, decl in op.slots.items()}
    return TritonSession(_CPU, _NUMERICS).prepare(op, slots, Shard(0, 1))


def _expect(**targets: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    """Patterns by target; `sm` stands for every sm_* that is not named."""
    every = targets.pop("sm", ())
    return {**dict.fromkeys(("sm_90", "sm_100", "sm_107"), every), **targets}


# Sixteen rows are the size of the small matrix instruction, which every target has; the big ones need 64 or 128.
_SMALL = r"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.bf16\.bf16\.f32"
_SMALL_GFX = r"v_mfma_f32_16x16x32_bf16"
_TCGEN = r"tcgen05\.mma\.cta_group::1\.kind::f16"
_IEEE = (r"div\.rn\.f32", r"sqrt\.rn\.f32")
# Contracted or approximate arithmetic, where bits are promised. A device's own expansion of a quotient has v_fma.
_LOOSE = (r"\bfma\.rn\.f32", r"\.approx\.", r"div\.full")

SPECS: dict[str, KernelSpec] = {
    spec.name: spec
    for spec in (
        KernelSpec(
            name="projection/decode",
            kernel="projection",
            launch=lambda run: launch_op(run, "qkv_insert", DECODE, "bfloat16", SMALL),
            must=_expect(sm=(_SMALL, r"cp\.async"), gfx950=(_SMALL_GFX,)),
            must_not=_expect(sm=(r"tf32",), gfx950=(r"v_mfma_f32_\d+x\d+x\d+_f32",)),
        ),
        KernelSpec(
            name="projection/prefill",
            kernel="projection",
            launch=lambda run: launch_op(run, "qkv_insert", PREFILL, "bfloat16", SMALL),
            must=_expect(
                sm=(_TCGEN,),
                sm_90=(r"wgmma\.mma_async\.sync\.aligned\.m64n128k16\.f32\.bf16\.bf16",),
                gfx950=(r"v_mfma_f32_32x32x16_bf16",),
            ),
            must_not=_expect(sm=(r"mma\.sync",), gfx950=(r"v_mfma_f32_\d+x\d+x\d+_f32",)),
        ),
        KernelSpec(
            name="qkv_insert/bfloat16",
            kernel="qkv_insert",
            launch=lambda run: launch_op(run, "qkv_insert", DECODE, "bfloat16", SMALL),
            must=_expect(sm=(*_IEEE, r"cvt\.rn\.bf16"), gfx950=(r"v_cvt_pk_bf16_f32", r"v_div_fixup_f32")),
            must_not=_expect(sm=(*_LOOSE, r"e4m3"), gfx950=(r"_fp8_",)),
        ),
        KernelSpec(
            name="qkv_insert/nvfp4",
            kernel="qkv_insert",
            launch=lambda run: launch_op(run, "qkv_insert", DECODE, "nvfp4", SMALL),
            must=_expect(
                sm=(*_IEEE, r"cvt\.rn\.satfinite\.e4m3x2\.f32", r"min\.f32"),
                # The minimum is the saturation that this conversion has only in a mode of its own.
                gfx950=(r"v_cvt_scalef32_pk_fp8_f32", r"v_min_f32", r"v_div_fixup_f32"),
            ),
            must_not=_expect(sm=_LOOSE),
        ),
        KernelSpec(
            name="sparse_decode/bfloat16",
            kernel="sparse_decode",
            launch=lambda run: launch_op(run, "sparse_attention", DECODE, "bfloat16", SMALL),
            must=_expect(sm=(_SMALL, r"ex2\.approx", r"cp\.async"), gfx950=(_SMALL_GFX, r"v_exp_f32")),
            must_not=_expect(sm=(r"tf32", r"e4m3"), gfx950=(r"v_mfma_f32_\d+x\d+x\d+_f32",)),
        ),
        KernelSpec(
            name="sparse_decode/nvfp4",
            kernel="sparse_decode",
            launch=lambda run: launch_op(run, "sparse_attention", DECODE, "nvfp4", LARGE),
            must=_expect(
                sm=(_SMALL, r"ex2\.approx", r"cvt\.rn\.f16x2\.e4m3x2", r"cvt\.rn\.bf16x2\.f32"),
                gfx950=(_SMALL_GFX, r"v_cvt_scalef32_pk_f32_fp8", r"v_cvt_pk_bf16_f32"),
            ),
            # Products of E2M1 and E4M3 are exact in bfloat16; rounding them to E4M3 would not be.
            must_not=_expect(sm=(r"tf32", r"satfinite\.e4m3"), gfx950=(r"v_cvt_scalef32_pk_fp8",)),
        ),
        KernelSpec(
            name="merge_splits",
            kernel="merge_splits",
            launch=lambda run: launch_op(run, "sparse_attention", DECODE, "nvfp4", LARGE),
            must=_expect(sm=(r"ex2\.approx", r"div\.rn\.f32"), gfx950=(r"v_exp_f32", r"v_div_fixup_f32")),
            must_not=_expect(sm=(r"mma", r"tf32"), gfx950=(r"v_mfma",)),
        ),
    )
}
