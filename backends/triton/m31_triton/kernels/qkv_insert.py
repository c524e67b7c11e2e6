"""Per-head norm, rotation, rounding and insertion into pages of one step's projections, in one launch (MODEL.md §2.3).

A row of the input is what the concatenated projection gives one token: q | k | v | index q | index k, heads one after
the other. One program takes up to HB heads of one branch of one token.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

import triton
import triton.language as tl

from m31_triton.kernels.nvfp4 import encode, scale_offsets


@triton.jit
def qkv_insert(
    rows,  # [T,N] float32 or bfloat16, N = (HQ + 2 HKV) D + (HIQ + 1) DI; without the last term if HIQ is 0
    q_norm,  # [D], stored zero-centred, as all four
    k_norm,
    iq_norm,  # [DI]
    ik_norm,
    cos,  # [T,HALF] float32, as m31.ops.rope_table makes them
    sin,
    slot_map,  # [T] int64; negative: padding, the row is not read and nothing is written
    q_out,  # [T,HQ,D]
    iq_out,  # [T,HIQ,DI]
    k_pages,  # bfloat16 [pages,HKV,PAGE,D], or codes uint8 [pages,HKV,PAGE,D/2]
    k_scale,  # None, or E4M3 bytes uint8 [pages,HKV,PAGE,D/16]
    v_pages,
    v_scale,  # the order of its bytes: V_QUAD
    ik_pages,  # [pages,1,PAGE,DI], or codes
    ik_scale,
    eps,
    HQ: tl.constexpr,
    HKV: tl.constexpr,
    HIQ: tl.constexpr,
    D: tl.constexpr,
    DI: tl.constexpr,
    HALF: tl.constexpr,
    PAGE: tl.constexpr,
    NVFP4: tl.constexpr,
    INDEX_NVFP4: tl.constexpr,
    V_QUAD: tl.constexpr,
    HB: tl.constexpr,
):
    """Grid (T, tiles of q, then of k, of v, of index q, and one for the index key); the last two if HIQ is not 0."""
    t = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    slot = tl.load(slot_map + t)
    if slot < 0:
        return
    N: tl.constexpr = (HQ + 2 * HKV) * D + ((HIQ + 1) * DI if HIQ > 0 else 0)
    TQ: tl.constexpr = (HQ + HB - 1) // HB
    TK: tl.constexpr = (HKV + HB - 1) // HB
    TI: tl.constexpr = (HIQ + HB - 1) // HB
    row = rows + t * N
    table = t * HALF
    if tile < TQ:
        h = tile * HB + tl.arange(0, HB)
        x = _normed_rotated(row, q_norm, cos + table, sin + table, h, eps, HQ, D, HALF)
        _store_heads(q_out + t * HQ * D, x, h, HQ, D)
    elif tile < TQ + TK:
        h = (tile - TQ) * HB + tl.arange(0, HB)
        x = _normed_rotated(row + HQ * D, k_norm, cos + table, sin + table, h, eps, HKV, D, HALF)
        _insert(k_pages, k_scale, x, slot, h, HKV, D, PAGE, NVFP4, False, HB)
    elif tile < TQ + 2 * TK:
        h = (tile - TQ - TK) * HB + tl.arange(0, HB)
        at = (HQ + HKV + h)[:, None] * D + tl.arange(0, D)[None, :]
        x = tl.load(row + at, mask=(h < HKV)[:, None], other=0.0).to(tl.bfloat16).to(tl.float32)
        _insert(v_pages, v_scale, x, slot, h, HKV, D, PAGE, NVFP4, V_QUAD, HB)
    elif HIQ > 0:
        at_iq = row + (HQ + 2 * HKV) * D
        if tile < TQ + 2 * TK + TI:
            h = (tile - TQ - 2 * TK) * HB + tl.arange(0, HB)
            x = _normed_rotated(at_iq, iq_norm, cos + table, sin + table, h, eps, HIQ, DI, HALF)
            _store_heads(iq_out + t * HIQ * DI, x, h, HIQ, DI)
        else:
            one = tl.arange(0, 1)
            key = _normed_rotated(at_iq + HIQ * DI, ik_norm, cos + table, sin + table, one, eps, 1, DI, HALF)
            _insert(ik_pages, ik_scale, key, slot, one, 1, DI, PAGE, INDEX_NVFP4, False, 1)


@triton.jit
def _normed_rotated(x, w, cos, sin, h, eps, HEADS: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr):
    """Heads `h` of x [HEADS,D] after the Gemma norm and the rotation, rounded to bfloat16 once: float32 [len(h),D]."""
    d = tl.arange(0, D)
    rotated = d < 2 * HALF
    partner = tl.where(d < HALF, d + HALF, tl.where(rotated, d - HALF, d))
    there = (h < HEADS)[:, None]
    a = tl.load(x + h[:, None] * D + d[None, :], mask=there, other=0.0).to(tl.float32)
    b = tl.load(x + h[:, None] * D + partner[None, :], mask=there, other=0.0).to(tl.float32)
    # Read before the root: its slow path is a call, across which a value takes fewer registers than its address.
    weight_a = tl.load(w + d).to(tl.float32)
    weight_b = tl.load(w + partner).to(tl.float32)
    c = tl.load(cos + d % HALF, mask=rotated, other=1.0)[None, :]
    s = tl.load(sin + d % HALF, mask=rotated, other=0.0)[None, :]
    # D is a power of two: the product with its reciprocal is the quotient.
    mean = tl.sum(a * a, 1) * (1.0 / D)
    root = tl.sqrt_rn(mean + eps)
    inverse = tl.div_rn(tl.full(root.shape, 1.0, tl.float32), root)[:, None]
    a = a * inverse * (1.0 + weight_a)[None, :]
    b = b * inverse * (1.0 + weight_b)[None, :]
    turned = tl.where((d < HALF)[None, :], a * c - b * s, a * c + b * s)
    return tl.where(rotated[None, :], turned, a).to(tl.bfloat16).to(tl.float32)


@triton.jit
def _store_heads(out, x, h, HEADS: tl.constexpr, D: tl.constexpr):
    at = h[:, None] * D + tl.arange(0, D)[None, :]
    tl.store(out + at, x.to(out.dtype.element_ty), mask=(h < HEADS)[:, None])


@triton.jit
def _insert(
    pages,
    scales,
    x,
    slot,
    h,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    NVFP4: tl.constexpr,
    QUAD: tl.constexpr,
    R: tl.constexpr,
):
    """Store heads `h`, x [R,D] of bfloat16 values, at `slot` = page * PAGE + offset of pages [pages,HEADS,PAGE,...]."""
    page = slot // PAGE
    offset = slot % PAGE
    block = (page * HEADS + h) * PAGE  # token 0 of each head in this page
    there = (h < HEADS)[:, None]
    if NVFP4:
        packed, sf = encode(x, R, D)
        tl.store(pages + (block + offset)[:, None] * (D // 2) + tl.arange(0, D // 2)[None, :], packed, mask=there)
        G: tl.constexpr = D // 16
        at = scale_offsets(offset + tl.zeros((R,), tl.int64), G, QUAD)
        tl.store(scales + block[:, None] * G + at, sf, mask=there)
    else:
        at = (block + offset)[:, None] * D + tl.arange(0, D)[None, :]
        tl.store(pages + at, x.to(pages.dtype.element_ty), mask=there)
