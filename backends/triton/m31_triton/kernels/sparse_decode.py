"""Block-sparse attention of a step's queries over paged keys and values (MODEL.md §2.4), for few queries per sequence.

One program is one token and one KV head: its query heads, up to 16, are the rows of the matrix products, and it walks
over the blocks that the head's index branch selected. Made for decode and short verifies, where reading pages is what
takes time; right for any step. A few tokens are too few programs to fill a device: then several share the blocks of
one token and head, and `merge_splits` puts their parts together.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

import triton
import triton.language as tl

from m31_triton.kernels.nvfp4 import decode, scale_offsets


@triton.jit
def sparse_decode(
    q,  # [T,HKV*GROUP,D]; bfloat16 values
    k_pages,  # bfloat16 [pages,HKV,PAGE,D], or codes uint8 [pages,HKV,PAGE,D/2]
    k_scale,  # None, or E4M3 bytes uint8 [pages,HKV,PAGE,D/16]
    v_pages,
    v_scale,
    blocks,  # [T,HKV,TOPK] int64, ascending, -1 where there is none
    positions,  # [T] int64
    cu_q,  # [SEQS+1] int64
    page_table,  # [SEQS,...] int64, P from row to row
    out,  # [T,HKV*GROUP*D]; left alone if SPLITS is not 1
    parts,  # None, or float32 [T,HKV,SPLITS,16,D]: sums of p v, p relative to the largest logit of the split
    stats,  # None, or float32 [T,HKV,SPLITS,16,2]: that logit (times log2(e)) and the sum of p
    scale_log2,  # softmax scale times log2(e)
    P,
    SEQS,
    HKV: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    TOPK: tl.constexpr,
    TOPK_PADDED: tl.constexpr,
    SEQS_PADDED: tl.constexpr,
    NVFP4: tl.constexpr,
    V_QUAD: tl.constexpr,
    TILE: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Grid (T, HKV, SPLITS). Rows of no sequence are padding: nothing of theirs is read or written."""
    t = tl.program_id(0)
    head = tl.program_id(1)
    # The sequence of row t: as many as end at or before it. Padding has no queries, so it ends where the last one does.
    s = tl.arange(0, SEQS_PADDED)
    ends = tl.load(cu_q + 1 + s, mask=s < SEQS, other=0x7FFFFFFF)
    seq = tl.sum((ends <= t).to(tl.int32), 0)
    if seq >= SEQS:
        return
    position = tl.load(positions + t)
    pair = t.to(tl.int64) * HKV + head
    c = tl.arange(0, TOPK_PADDED)
    chosen = tl.load(blocks + pair * TOPK + c, mask=c < TOPK, other=-1)
    count = tl.max(tl.where(chosen >= 0, c + 1, 0), 0)

    g = tl.arange(0, 16)
    d = tl.arange(0, D)
    at_q = (pair * GROUP + g)[:, None] * D + d[None, :]
    rows = (g < GROUP)[:, None]
    q_gD = tl.load(q + at_q, mask=rows, other=0.0).to(tl.bfloat16)
    top = tl.full((16,), float("-inf"), tl.float32)
    total = tl.zeros((16,), tl.float32)
    acc = tl.zeros((16, D), tl.float32)
    PER_BLOCK: tl.constexpr = PAGE // TILE
    tiles = count * PER_BLOCK
    share = tl.cdiv(tiles, SPLITS)
    split = tl.program_id(2)
    for i in range(split * share, tl.minimum(tiles, (split + 1) * share)):
        block = tl.load(blocks + pair * TOPK + i // PER_BLOCK)
        token = (i % PER_BLOCK) * TILE + tl.arange(0, TILE)
        # Tokens after the query may lie in the same block, in a page that was never written that far.
        visible = (block * PAGE + token <= position) & (block >= 0)
        page = tl.load(page_table + seq.to(tl.int64) * P + tl.maximum(block, 0))
        first = (page * HKV + head) * PAGE
        k_nD = _read(k_pages, k_scale, first, token, visible, D, NVFP4, False, TILE)
        logits = tl.dot(q_gD, tl.trans(k_nD)) * scale_log2
        logits = tl.where(visible[None, :], logits, float("-inf"))
        new_top = tl.maximum(top, tl.max(logits, 1))
        # Nothing visible so far: any finite number will do, and -inf minus -inf would not.
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        p = tl.exp2(logits - base[:, None])
        kept = tl.exp2(top - base)
        total = total * kept + tl.sum(p, 1)
        v_nD = _read(v_pages, v_scale, first, token, visible, D, NVFP4, V_QUAD, TILE)
        # Probabilities keep 16 bits: rounded to bfloat16, and what that lost, rounded again.
        high = p.to(tl.bfloat16)
        low = (p - high.to(tl.float32)).to(tl.bfloat16)
        acc = tl.dot(high, v_nD, acc * kept[:, None])
        acc = tl.dot(low, v_nD, acc)
        top = new_top
    if SPLITS == 1:
        tl.store(out + at_q, _quotient(acc, total, D).to(out.dtype.element_ty), mask=rows)
    else:
        at = (pair * SPLITS + split) * 16 + g
        tl.store(parts + at[:, None] * D + d[None, :], acc)
        tl.store(stats + at * 2, top)
        tl.store(stats + at * 2 + 1, total)


@triton.jit
def merge_splits(
    parts,  # as sparse_decode wrote them
    stats,
    cu_q,  # [SEQS+1] int64
    out,  # [T,HKV*GROUP*D]
    SEQS,
    HKV: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Grid (T, HKV). Rows of no sequence are padding: nothing of theirs is read or written."""
    t = tl.program_id(0)
    if t >= tl.load(cu_q + SEQS):
        return
    pair = t.to(tl.int64) * HKV + tl.program_id(1)
    g = tl.arange(0, 16)
    d = tl.arange(0, D)
    s = tl.arange(0, SPLITS)
    at = ((pair * SPLITS + s) * 16)[:, None] + g[None, :]
    tops = tl.load(stats + at * 2)
    top = tl.max(tops, 0)
    base = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.exp2(tops - base[None, :]) * tl.load(stats + at * 2 + 1), 0)
    acc = tl.zeros((16, D), tl.float32)
    for i in range(SPLITS):
        row = (pair * SPLITS + i) * 16 + g
        weight = tl.exp2(tl.load(stats + row * 2) - base)
        acc += weight[:, None] * tl.load(parts + row[:, None] * D + d[None, :])
    at_o = (pair * GROUP + g)[:, None] * D + d[None, :]
    tl.store(out + at_o, _quotient(acc, total, D).to(out.dtype.element_ty), mask=(g < GROUP)[:, None])


@triton.jit
def _quotient(acc, total, D: tl.constexpr):
    """acc [16,D] / total [16]; zero where nothing was visible. NaN stays NaN."""
    return tl.where(total[:, None] == 0.0, 0.0, tl.div_rn(acc, tl.broadcast_to(total[:, None], (16, D))))


@triton.jit
def _read(
    pages,
    scales,
    first,
    token,
    visible,
    D: tl.constexpr,
    NVFP4: tl.constexpr,
    QUAD: tl.constexpr,
    TILE: tl.constexpr,
):
    """bfloat16 [TILE,D]: tokens `token` of the page whose token 0 is vector number `first`; zeros if not visible."""
    mask = visible[:, None]
    at = (first + token)[:, None]
    if NVFP4:
        G: tl.constexpr = D // 16
        packed = tl.load(pages + at * (D // 2) + tl.arange(0, D // 2)[None, :], mask=mask, other=0)
        sf = tl.load(scales + first * G + scale_offsets(token, G, QUAD), mask=mask, other=0)
        return decode(packed, sf, TILE, D)
    return tl.load(pages + at * D + tl.arange(0, D)[None, :], mask=mask, other=0.0).to(tl.bfloat16)
