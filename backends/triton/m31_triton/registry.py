"""The kernels of this package as they are launched on the targets, and what their code must contain.

Sizes are those of one device of four (MODEL.md §8: tensor parallel 4): 16 query heads, one KV head, one index head of
128 channels, pages of 128 tokens, 16 blocks selected.
"""

from __future__ import annotations

import torch
from torch import Tensor

from m31.graph import StepClass
from m31_triton.aot import KernelSpec
from m31_triton.launch import (
    IndexBranch,
    Pages,
    Runner,
    launch_projection,
    launch_qkv_insert,
    launch_sparse_decode,
    workspace_size,
)

HEADS, KV_HEADS, INDEX_HEADS, DIM, PAGE, TOPK, HIDDEN = 16, 1, 1, 128, 128, 16, 6144
ROW = (HEADS + 2 * KV_HEADS + INDEX_HEADS + 1) * DIM
DECODE = StepClass(kind="decode", q_len=1, tokens=32, seqs=32, rows=32, pages=8192)
PREFILL = StepClass(kind="mixed", q_len=0, tokens=4096, seqs=32, rows=32, pages=8192)


def _empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _integers(*shape: int) -> Tensor:
    return _empty(*shape, dtype=torch.int64)


def _pages(nvfp4: bool, heads: int) -> Pages:
    """Four pages: their number is no argument of any kernel."""
    if not nvfp4:
        return Pages(data=_empty(4, heads, PAGE, DIM), scale=None, order="linear", dim=DIM)
    codes, scales = (_empty(4, heads, PAGE, DIM // n, dtype=torch.uint8) for n in (2, 16))
    return Pages(data=codes, scale=scales, order="linear", dim=DIM)


def _projection(run: Runner, step: StepClass) -> None:
    y = _empty(step.tokens, ROW, dtype=torch.float32)
    w, slots = _empty(ROW, HIDDEN), _integers(step.tokens)
    launch_projection(run, step, x=_empty(step.tokens, HIDDEN), w=w, slot_map=slots, y=y)


def _qkv_insert(run: Runner, nvfp4: bool) -> None:
    tokens = DECODE.tokens
    branch = IndexBranch(
        q_norm=_empty(DIM), k_norm=_empty(DIM), q_out=_empty(tokens, INDEX_HEADS, DIM), pages=_pages(nvfp4, 1)
    )
    launch_qkv_insert(
        run,
        DECODE,
        rows=_empty(tokens, ROW, dtype=torch.float32),
        q_norm=_empty(DIM),
        k_norm=_empty(DIM),
        table=(_empty(tokens, 32, dtype=torch.float32), _empty(tokens, 32, dtype=torch.float32)),
        slot_map=_integers(tokens),
        q_out=_empty(tokens, HEADS, DIM),
        k=_pages(nvfp4, KV_HEADS),
        v=_pages(nvfp4, KV_HEADS),
        index=branch,
        eps=1e-6,
    )


def _sparse_decode(run: Runner, nvfp4: bool, splits: int) -> None:
    tokens = DECODE.tokens
    size = workspace_size(tokens, KV_HEADS, DIM, splits)
    launch_sparse_decode(
        run,
        DECODE,
        q=_empty(tokens, HEADS, DIM),
        k=_pages(nvfp4, KV_HEADS),
        v=_pages(nvfp4, KV_HEADS),
        blocks=_integers(tokens, KV_HEADS, TOPK),
        positions=_integers(tokens),
        cu_q=_integers(DECODE.seqs + 1),
        page_table=_integers(DECODE.seqs, DECODE.pages),
        out=_empty(tokens, HEADS * DIM),
        scale=DIM**-0.5,
        splits=splits,
        workspace=_empty(size, dtype=torch.float32) if size else None,
    )


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
            launch=lambda run: _projection(run, DECODE),
            must=_expect(sm=(_SMALL, r"cp\.async"), gfx950=(_SMALL_GFX,)),
            must_not=_expect(sm=(r"tf32",), gfx950=(r"v_mfma_f32_\d+x\d+x\d+_f32",)),
        ),
        KernelSpec(
            name="projection/prefill",
            kernel="projection",
            launch=lambda run: _projection(run, PREFILL),
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
            launch=lambda run: _qkv_insert(run, nvfp4=False),
            must=_expect(sm=(*_IEEE, r"cvt\.rn\.bf16"), gfx950=(r"v_cvt_pk_bf16_f32", r"v_div_fixup_f32")),
            must_not=_expect(sm=(*_LOOSE, r"e4m3"), gfx950=(r"_fp8_",)),
        ),
        KernelSpec(
            name="qkv_insert/nvfp4",
            kernel="qkv_insert",
            launch=lambda run: _qkv_insert(run, nvfp4=True),
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
            launch=lambda run: _sparse_decode(run, nvfp4=False, splits=1),
            must=_expect(sm=(_SMALL, r"ex2\.approx", r"cp\.async"), gfx950=(_SMALL_GFX, r"v_exp_f32")),
            must_not=_expect(sm=(r"tf32", r"e4m3"), gfx950=(r"v_mfma_f32_\d+x\d+x\d+_f32",)),
        ),
        KernelSpec(
            name="sparse_decode/nvfp4",
            kernel="sparse_decode",
            launch=lambda run: _sparse_decode(run, nvfp4=True, splits=4),
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
            launch=lambda run: _sparse_decode(run, nvfp4=True, splits=4),
            must=_expect(sm=(r"ex2\.approx", r"div\.rn\.f32"), gfx950=(r"v_exp_f32", r"v_div_fixup_f32")),
            must_not=_expect(sm=(r"mma", r"tf32"), gfx950=(r"v_mfma",)),
        ),
    )
}
