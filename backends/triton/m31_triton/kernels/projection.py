"""y = x Wᵀ with bfloat16 operands and float32 sums: the matrix product before `qkv_insert` (MODEL.md §2.3)."""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

import triton
import triton.language as tl


@triton.jit
def projection(
    x,  # [T,K] float32 or bfloat16; multiplied as bfloat16
    w,  # [N,K] bfloat16
    slot_map,  # [T] int64; rows with a negative slot are padding, neither read nor written
    y,  # [T,N]
    T,
    N,
    K,
    BT: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """Grid (T / BT, N / BN), rounded up."""
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    rows = t < T
    used = tl.load(slot_map + t, mask=rows, other=-1) >= 0
    at_x = x + t.to(tl.int64)[:, None] * K + k[None, :]
    at_w = w + n.to(tl.int64)[:, None] * K + k[None, :]
    acc = tl.zeros((BT, BN), tl.float32)
    for at in range(0, K, BK):
        inside = k < K - at
        a = tl.load(at_x + at, mask=used[:, None] & inside[None, :], other=0.0).to(tl.bfloat16)
        b = tl.load(at_w + at, mask=(n < N)[:, None] & inside[None, :], other=0.0)
        acc = tl.dot(a, tl.trans(b), acc)
    where = t.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(y + where, acc.to(y.dtype.element_ty), mask=used[:, None] & (n < N)[None, :])
