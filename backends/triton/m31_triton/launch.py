"""Launches: which kernel, over which grid, with which arguments; and the checks that a kernel cannot make.

A grid depends on capacities only, never on a value in a buffer, so that a launch can be recorded once and repeated
with other contents (`m31_triton.capture`). Everything a kernel must know about the step it reads from the step's own
buffers. Each `launch_*` takes a `Runner`: `interpreted`, `on_device`, or the recorder of a plan.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from m31.errors import OpRefused
from m31.formats.layout import ScaleOrder
from m31.graph import StepClass
from m31_triton.interpreter import interpret
from m31_triton.kernels.projection import projection
from m31_triton.kernels.qkv_insert import qkv_insert
from m31_triton.kernels.sparse_decode import merge_splits, sparse_decode

ROWS = 16
"""Query heads that share a KV head, at most: the rows of the smallest matrix product."""


@dataclass(frozen=True, eq=False)
class Launch:
    """One launch: all arguments of the kernel by name, and how to compile it (`num_warps` and the like)."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: Mapping[str, Any]
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The kernel's name."""
        return str(self.kernel.fn.__name__)


Runner = Callable[[Launch], None]


def interpreted(launch: Launch) -> None:
    """Run on processor tensors."""
    interpret(launch.kernel, launch.grid, **launch.arguments)


def on_device(launch: Launch) -> None:
    """Run on the device of the tensors, compiled for it on first use."""
    launch.kernel[launch.grid](**launch.arguments, **launch.options)


@dataclass(frozen=True, eq=False, kw_only=True)
class Pages:
    """The stored parts of one kind of vector of one layer.

    Args:
        data: bfloat16 [pages,heads,page,D], or E2M1 codes uint8 [pages,heads,page,D/2].
        scale: of codes: E4M3 bytes uint8, page * D/16 of them for each page and head; else None.
        order: in which those bytes lie inside a page (MODEL.md §3.4); it has no meaning without a scale.
        dim: D.
    """

    data: Tensor
    scale: Tensor | None
    order: ScaleOrder
    dim: int

    def check(self, name: str, heads: int, page: int) -> None:
        """Refuse parts that are not of `heads` heads and `page` tokens, contiguous, in a stored format."""
        count = self.data.shape[0]
        nvfp4 = self.scale is not None
        width, dtype = (self.dim // 2, torch.uint8) if nvfp4 else (self.dim, torch.bfloat16)
        _check(f"{name} pages", self.data, (count, heads, page, width), (dtype,))
        if self.scale is None:
            return
        if self.dim % 16 or (self.order == "token_quad" and page % 4):
            raise OpRefused(f"{page} vectors of {self.dim} as NVFP4", where=f"{name} pages", expected="groups of 16")
        groups = self.dim // 16
        linear, quads = (count, heads, page, groups), (count, heads, page // 4, groups, 4)
        _check(f"{name} scales", self.scale, linear if self.order == "linear" else quads, (torch.uint8,))


@dataclass(frozen=True, eq=False, kw_only=True)
class IndexBranch:
    """What a layer with block selection has besides: norm weights [DI], index queries' destination, index key pages."""

    q_norm: Tensor
    k_norm: Tensor
    q_out: Tensor  # [T,HIQ,DI]
    pages: Pages


_FLOATS = (torch.bfloat16, torch.float32)


def launch_projection(run: Runner, step: StepClass, *, x: Tensor, w: Tensor, slot_map: Tensor, y: Tensor) -> None:
    """y [T,N] = x [T,K] Wᵀ, operands bfloat16, sums float32; rows of padding are left alone.

    Raises OpRefused for tensors that do not belong together or are not contiguous.
    """
    (n, k), tokens = w.shape, step.tokens
    _check("x", x, (tokens, k), _FLOATS)
    _check("w", w, (n, k), (torch.bfloat16,))
    _check("slot_map", slot_map, (tokens,), (torch.int64,))
    _check("y", y, (tokens, n), _FLOATS)
    tile = projection_tile(tokens)
    grid = (-(-tokens // tile["BT"]), -(-n // tile["BN"]))
    arguments = {"x": x, "w": w, "slot_map": slot_map, "y": y, "T": tokens, "N": n, "K": k, **tile}
    # Four warps would spill the big tile's addresses and sums on some targets.
    run(Launch(projection, grid, arguments, {"num_warps": 4 if tile["BT"] == 16 else 8, "enable_fp_fusion": True}))


def projection_tile(tokens: int) -> dict[str, int]:
    """Tile of the projection at a token capacity: few rows for decode, the matrix units' own size for prefill."""
    return {"BT": 16, "BN": 64, "BK": 128} if tokens <= 64 else {"BT": 128, "BN": 128, "BK": 64}


def launch_qkv_insert(
    run: Runner,
    step: StepClass,
    *,
    rows: Tensor,
    q_norm: Tensor,
    k_norm: Tensor,
    table: tuple[Tensor, Tensor],
    slot_map: Tensor,
    q_out: Tensor,
    k: Pages,
    v: Pages,
    index: IndexBranch | None,
    eps: float,
) -> None:
    """Norm, rotate, round, and store one step's projections (`m31_triton.kernels.qkv_insert`).

    Args:
        rows: [T,N] concatenated projections q | k | v | index q | index k.
        q_norm, k_norm: [D] zero-centred.
        table: cos and sin [T,rotary/2] float32.
        slot_map: [T]; the rows with a negative slot are padding: nothing is written for them anywhere.
        q_out: [T,HQ,D], the queries after norm and rotation.
        k, v: pages of one format. `index`: None for a layer without block selection.
    Raises:
        OpRefused: tensors that do not belong together, sizes that are not powers of two.
    """
    tokens, (_, hq, d), (_, hkv, page, _) = step.tokens, q_out.shape, k.data.shape
    half = table[0].shape[1]
    _check("q_out", q_out, (tokens, hq, d), _FLOATS)
    for name, weight in (("q_norm", q_norm), ("k_norm", k_norm)):
        _check(name, weight, (d,), _FLOATS)
    for name, part in zip(("cos", "sin"), table, strict=True):
        _check(name, part, (tokens, half), (torch.float32,))
    _check("slot_map", slot_map, (tokens,), (torch.int64,))
    k.check("k", hkv, page)
    v.check("v", hkv, page)
    hiq, di = (index.q_out.shape[1], index.q_out.shape[2]) if index else (0, d)
    if (k.dim, v.dim) != (d, d) or (k.scale is None) != (v.scale is None) or half < 1 or 2 * half > min(d, di):
        raise OpRefused(
            f"keys of {k.dim} and values of {v.dim} in pages, heads of {d}, {2 * half} of them rotated",
            where="qkv_insert",
            expected="one size, one format, and a table no wider than a head",
        )
    for size in (d, di):
        _power_of_two("head size", size)
    if index:
        _check("index q_out", index.q_out, (tokens, hiq, di), _FLOATS)
        for name, weight in (("index q_norm", index.q_norm), ("index k_norm", index.k_norm)):
            _check(name, weight, (di,), _FLOATS)
        index.pages.check("index", 1, page)
    _check("rows", rows, (tokens, (hq + 2 * hkv) * d + ((hiq + 1) * di if index else 0)), _FLOATS)
    heads = 4  # of a program: 512 elements of 128-wide heads, four per thread
    tiles = sum(-(-n // heads) for n in (hq, hkv, hkv, hiq)) + (1 if index else 0)
    arguments = dict(
        rows=rows,
        q_norm=q_norm,
        k_norm=k_norm,
        iq_norm=index.q_norm if index else None,
        ik_norm=index.k_norm if index else None,
        cos=table[0],
        sin=table[1],
        slot_map=slot_map,
        q_out=q_out,
        iq_out=index.q_out if index else None,
        ik_pages=index.pages.data if index else None,
        ik_scale=index.pages.scale if index else None,
        eps=eps,
        HQ=hq,
        HIQ=hiq,
        DI=di,
        HALF=half,
        INDEX_NVFP4=bool(index and index.pages.scale is not None),
        HB=heads,
        **_stored(k, v, hkv, d, page),
    )
    # Not contracted: see m31_triton.kernels.
    run(Launch(qkv_insert, (tokens, tiles), arguments, {"num_warps": 4, "enable_fp_fusion": False}))


def launch_sparse_decode(
    run: Runner,
    step: StepClass,
    *,
    q: Tensor,
    k: Pages,
    v: Pages,
    blocks: Tensor,
    positions: Tensor,
    cu_q: Tensor,
    page_table: Tensor,
    out: Tensor,
    scale: float,
    splits: int,
    workspace: Tensor | None,
) -> None:
    """Attention of q [T,h,D] over the selected blocks [T,kv_heads,K] of pages, into out [T,h*D] (MODEL.md §2.4).

    The arguments are those of the op `sparse_attention`; q holds bfloat16 values. Rows beyond cu_q's last entry are
    padding and left alone; a row for which no token is visible is zero.

    `splits` programs share the blocks of a token and head, a power of two (`decode_splits`); more than one need the
    float32 `workspace` [workspace_size].

    Raises OpRefused for tensors that do not belong together, more than 16 query heads per KV head, or sizes that are
    not powers of two.
    """
    tokens, (_, heads, d), (_, hkv, page, _), topk = step.tokens, q.shape, k.data.shape, blocks.shape[2]
    _check("q", q, (tokens, heads, d), _FLOATS)
    k.check("k", hkv, page)
    v.check("v", hkv, page)
    _check("blocks", blocks, (tokens, hkv, topk), (torch.int64,))
    _check("positions", positions, (tokens,), (torch.int64,))
    _check("cu_q", cu_q, (step.seqs + 1,), (torch.int64,))
    if tuple(page_table.shape) != (step.seqs, step.pages) or page_table.stride(1) != 1:
        raise OpRefused(
            f"shape {list(page_table.shape)}, strides {list(page_table.stride())}",
            where="argument 'page_table'",
            expected=f"shape {[step.seqs, step.pages]}, entries of a row side by side",
        )
    _check("out", out, (tokens, heads * d), _FLOATS)
    group, rest = divmod(heads, hkv)
    if rest or not 1 <= group <= ROWS:
        raise OpRefused(
            f"{heads} query heads over {hkv} KV heads", where="sparse_decode", expected=f"1 to {ROWS} for each"
        )
    if (k.dim, v.dim) != (d, d) or (k.scale is None) != (v.scale is None):
        raise OpRefused(
            f"keys of {k.dim}, values of {v.dim}, queries of {d}", where="sparse_decode", expected="one size and format"
        )
    _power_of_two("head size", d)
    _power_of_two("page size", page)
    if splits < 1 or splits & (splits - 1):
        raise OpRefused(f"{splits} splits", where="sparse_decode", expected="a power of two")
    parts, stats = None, None
    if splits > 1:
        shape = (tokens, hkv, splits, ROWS)
        if workspace is None:
            raise OpRefused(f"no workspace for {splits} splits", where="sparse_decode", expected="float32 workspace")
        _check("workspace", workspace, (workspace_size(tokens, hkv, d, splits),), (torch.float32,))
        rows = math.prod(shape)
        parts, stats = workspace[: rows * d].view(*shape, d), workspace[rows * d :].view(*shape, 2)
    common = {"cu_q": cu_q, "out": out, "parts": parts, "stats": stats, "GROUP": group, "SEQS": step.seqs}
    arguments = dict(
        q=q,
        blocks=blocks,
        positions=positions,
        page_table=page_table,
        scale_log2=scale * math.log2(math.e),
        P=page_table.stride(0),
        TOPK=topk,
        TOPK_PADDED=_padded(topk),
        SEQS_PADDED=_padded(step.seqs),
        TILE=min(page, 64),
        SPLITS=splits,
        **common,
        **_stored(k, v, hkv, d, page),
    )
    options = {"num_warps": 4, "num_stages": 2, "enable_fp_fusion": True}
    run(Launch(sparse_decode, (tokens, hkv, splits), arguments, options))
    if splits > 1:
        run(Launch(merge_splits, (tokens, hkv), {**common, "HKV": hkv, "D": d, "SPLITS": splits}, options))


def decode_splits(pairs: int, topk: int, units: int) -> int:
    """How many programs should share one token and head.

    Args:
        pairs: tokens times KV heads, at capacity.
        topk: blocks of each, at most; one program for each block is the most that is useful.
        units: programs that the device runs at once.
    """
    splits = 1
    while splits * 2 * pairs <= units and splits * 2 <= topk:
        splits *= 2
    return splits


def workspace_size(tokens: int, kv_heads: int, dim: int, splits: int) -> int:
    """float32 elements of the parts of `splits` splits; 0 for one."""
    return 0 if splits == 1 else tokens * kv_heads * splits * ROWS * (dim + 2)


def _stored(k: Pages, v: Pages, heads: int, dim: int, page: int) -> dict[str, Any]:
    """What both kernels must know about the pages of keys and values."""
    return {
        "k_pages": k.data,
        "k_scale": k.scale,
        "v_pages": v.data,
        "v_scale": v.scale,
        "HKV": heads,
        "D": dim,
        "PAGE": page,
        "NVFP4": k.scale is not None,
        "V_QUAD": v.scale is not None and v.order == "token_quad",
    }


def _padded(count: int) -> int:
    """The next power of two: the widths that Triton has."""
    return 1 << max(0, count - 1).bit_length()


def _power_of_two(what: str, size: int) -> None:
    if size < 16 or size & (size - 1):
        raise OpRefused(f"{what} {size}", where="m31_triton", expected="a power of two, 16 or more")


def _check(name: str, tensor: Tensor, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...]) -> None:
    if tuple(tensor.shape) != shape or tensor.dtype not in dtypes or not tensor.is_contiguous():
        kind = "" if tensor.is_contiguous() else ", not contiguous"
        raise OpRefused(
            f"{tensor.dtype} of shape {list(tensor.shape)}{kind}",
            where=f"argument '{name}'",
            expected=f"{' or '.join(map(str, dtypes))} of shape {list(shape)}, contiguous",
        )
