"""FP8 and NVFP4 pages (MODEL.md §3.4, §3.5) to pairs of bfloat16, which hold them exactly: E4M3 and the product of an
E2M1 code with its scale have at most six significant bits. Keys stay in lanes, values token by token, as bfloat16
pages have them. NaN stays NaN."""

from __future__ import annotations

from m31_cpu.lang import I8, I32, Val, vec
from m31_cpu.native import Kernel
from m31_cpu.numbers import e4m3, twice_e2m1

GROUP = 16  # channels under a scale, and keys side by side


def _nibbles(packed: Val) -> tuple[Val, Val]:
    return packed & 15, packed >> 4


def _paired(even: Val, odd: Val) -> Val:
    """Two float32 numbers that are bfloat16 numbers, as a pair."""
    kind = vec(I32, even.type.count)
    return (even.bits(kind) >> 16) | (odd.bits(kind) & -65536)


def keys_of(k: Kernel, form: str, dim: int, pages: tuple[Val, Val], to: Val, groups: Val) -> None:
    """The first groups of 16 keys of a head's page, to [groups, dim / 2, 16, 2].

    Args:
        form: fp8 or nvfp4.
        dim: channels, an even number.
        pages: codes and, for nvfp4, scales.
        to: where to.
        groups: how many.
    """
    codes, scales = pages
    if form == "fp8":
        for i in k.range(groups * (dim // 2)):
            first, second = (e4m3(k, k.load(vec(I8, 16), codes + i * 32, 16 * x)) for x in range(2))
            k.store(_paired(first, second), to + i * 64, align=4)
        return
    for i in k.range(groups * (dim // GROUP)):
        scale = e4m3(k, k.load(vec(I8, 16), scales + i * 16)) * 0.5
        for j in range(GROUP // 2):
            low, high = _nibbles(k.load(vec(I8, 16), codes + i * 128, 16 * j))
            pair = _paired(twice_e2m1(k, low) * scale, twice_e2m1(k, high) * scale)
            k.store(pair, to + i * (32 * GROUP), 64 * j, align=4)


def values_of(k: Kernel, form: str, dim: int, pages: tuple[Val, Val], to: Val, tokens: Val) -> None:
    """The first values of a head's page, to [tokens / 2, dim, 2]; behind an odd number of tokens lies the last one
    again. Arguments as in `keys_of`."""
    codes, scales = pages
    row, row_scales = (dim, 0) if form == "fp8" else (dim // 2, dim // GROUP)

    def vector(at: Val, scale: Val | None, c: int) -> Val:
        if scale is None:
            return e4m3(k, k.load(vec(I8, min(16, dim - c)), at, c))
        low, high = _nibbles(k.load(vec(I8, 8), at, c // 2))
        both = low.shuffle([x for i in range(8) for x in (i, 8 + i)], high)
        return twice_e2m1(k, both) * scale.shuffle([c // GROUP] * GROUP)

    for pair in k.range((tokens + 1) // 2):
        both = pair * 2, k.min(pair * 2 + 1, tokens - 1)
        rows = [codes + token * row for token in both]
        factors: list[Val | None] = [None, None]
        if row_scales:  # of all groups of a token at once
            factors = [e4m3(k, k.load(vec(I8, row_scales), scales + token * row_scales)) * 0.5 for token in both]
        for c in range(0, dim, 16):
            first, second = (vector(at, scale, c) for at, scale in zip(rows, factors, strict=True))
            k.store(_paired(first, second), to + pair * (4 * dim), 4 * c, align=4)
