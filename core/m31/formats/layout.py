"""Where bytes lie: packed against logical shapes, the scale swizzle, the two orders of V scales in a page."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from m31.errors import OpRefused

TILE_ROWS, TILE_COLUMNS = 128, 4
PAGE_TOKENS = 128
"""Tokens of a page, which is also a block of the sparse attention (MODEL.md §3.4)."""

ScaleOrder = Literal["linear", "token_quad"]


def packed_shape(logical: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of the bytes of a logical NVFP4 shape [..., K]: [..., K/2]. Refuses K that is not a multiple of 16."""
    _whole(logical, 16, "logical shape")
    return (*logical[:-1], logical[-1] // 2)


def logical_shape(packed: tuple[int, ...]) -> tuple[int, ...]:
    """Logical shape [..., K] of packed NVFP4 bytes [..., K/2]. Refuses K/2 that is not a multiple of 8."""
    _whole(packed, 8, "packed shape")
    return (*packed[:-1], packed[-1] * 2)


def scale_shape(logical: tuple[int, ...], group: int) -> tuple[int, ...]:
    """Shape of the block scales of a *logical* shape [..., K]: [..., K/group] (not of a packed one: BUG-46)."""
    _whole(logical, group, "logical shape")
    return (*logical[:-1], logical[-1] // group)


def _whole(shape: tuple[int, ...], unit: int, where: str) -> None:
    if not shape or shape[-1] <= 0 or shape[-1] % unit:
        raise OpRefused(
            f"{list(shape)}", where=where, expected=f"a last dimension that is a positive multiple of {unit}"
        )


def check_nvfp4_shapes(packed: Tensor, scale: Tensor, where: str) -> None:
    """OpRefused unless packed is uint8 [..., K/2] and scale E4M3 [..., K/16]: two codes a byte, 16 a scale (BUG-46)."""
    if packed.dtype != torch.uint8 or scale.dtype != torch.float8_e4m3fn:
        raise OpRefused(
            f"codes are {packed.dtype}, scales {scale.dtype}",
            where=where,
            expected="torch.uint8 and torch.float8_e4m3fn",
        )
    logical = logical_shape(tuple(packed.shape))
    want = scale_shape(logical, 16)
    if tuple(scale.shape) != want:
        raise OpRefused(
            f"scales of shape {list(scale.shape)} for packed bytes of shape {list(packed.shape)}, "
            f"which is {list(logical)} elements",
            where=where,
            expected=f"{list(want)}: one scale per 16 elements",
        )


def swizzle_128x4(scale: Tensor) -> Tensor:
    """Block scales [..., R, C] in the order that 128x4-tiled tensor-core kernels read: [..., tiles * 512].

    Padded with zero bytes to [128 * mt, 4 * kt], viewed as [mt, 4, 32, kt, 4], axes 1 and 3 swapped, flattened
    (MODEL.md §3.1). The byte of (r, c) lies at ((r // 128) * kt + c // 4) * 512 + (r % 32) * 16 + (r % 128) // 32 * 4
    + c % 4. A layout of run time only: checkpoints store scales row by row.

    Raises OpRefused unless the elements are bytes (uint8 or float8_e4m3fn) with at least two dimensions.
    """
    if scale.element_size() != 1 or scale.dim() < 2:
        raise OpRefused(f"{scale.dtype} {list(scale.shape)}", where="swizzle_128x4", expected="bytes [..., R, C]")
    *lead, rows, columns = scale.shape
    mt, kt = -(-rows // TILE_ROWS), -(-columns // TILE_COLUMNS)
    padded = torch.zeros(*lead, mt * TILE_ROWS, kt * TILE_COLUMNS, dtype=torch.uint8, device=scale.device)
    padded[..., :rows, :columns] = scale.view(torch.uint8)
    tiles = padded.view(*lead, mt, 4, 32, kt, 4).transpose(-2, -4)
    return tiles.reshape(*lead, mt * kt * 512).view(scale.dtype)


def unswizzle_128x4(swizzled: Tensor, rows: int, columns: int) -> Tensor:
    """The inverse of `swizzle_128x4`: [..., tiles * 512] to [..., rows, columns]; what the padding holds is ignored.

    Raises OpRefused if the number of bytes is not that of the padded shape.
    """
    mt, kt = -(-rows // TILE_ROWS), -(-columns // TILE_COLUMNS)
    if swizzled.element_size() != 1 or swizzled.dim() == 0 or swizzled.shape[-1] != mt * kt * 512:
        raise OpRefused(
            f"{swizzled.dtype} {list(swizzled.shape)} for scales [{rows}, {columns}]",
            where="unswizzle_128x4",
            expected=f"{mt * kt * 512} bytes ({mt} x {kt} tiles)",
        )
    lead = swizzled.shape[:-1]
    tiles = swizzled.view(torch.uint8).reshape(*lead, mt, kt, 32, 4, 4).transpose(-2, -4)
    plain = tiles.reshape(*lead, mt * TILE_ROWS, kt * TILE_COLUMNS)[..., :rows, :columns]
    return plain.contiguous().view(swizzled.dtype)


def scale_offset(token: Tensor, group: Tensor, order: ScaleOrder, groups: int = 8) -> Tensor:
    """Byte at which a page stores the scale of (token in page, group): MODEL.md §3.4.

    "linear": token * groups + group. "token_quad": (token // 4) * 4 * groups + group * 4 + token % 4, so that the
    scales of four tokens of one group are one word. Integers, broadcast against each other.
    """
    if order == "linear":
        return token * groups + group
    _known(order)
    return (token // 4) * (4 * groups) + group * 4 + token % 4


def store_order(scale: Tensor, order: ScaleOrder) -> Tensor:
    """Scales [..., T, G] of a page as the bytes [..., T * G] of `order`; T a multiple of 4 for "token_quad"."""
    *lead, tokens, groups = scale.shape
    if order == "linear":
        return scale.reshape(*lead, tokens * groups)
    _known(order)
    _quads(tokens)
    bytes_ = scale.view(torch.uint8).reshape(*lead, tokens // 4, 4, groups).transpose(-1, -2)
    return bytes_.reshape(*lead, tokens * groups).view(scale.dtype)


def load_order(stored: Tensor, order: ScaleOrder, groups: int = 8) -> Tensor:
    """The inverse of `store_order`: bytes [..., T * G] to scales [..., T, G]."""
    *lead, count = stored.shape
    if count % groups:
        raise OpRefused(f"{count} bytes in groups of {groups}", where="load_order", expected=f"a multiple of {groups}")
    if order == "linear":
        return stored.reshape(*lead, count // groups, groups)
    _known(order)
    _quads(count // groups)
    bytes_ = stored.view(torch.uint8).reshape(*lead, count // groups // 4, groups, 4).transpose(-1, -2)
    return bytes_.reshape(*lead, count // groups, groups).view(stored.dtype)


def token_quad(scale: Tensor) -> Tensor:
    """Scales [..., T, G] to the token-quad order [..., T * G]."""
    return store_order(scale, "token_quad")


def linear(scale: Tensor) -> Tensor:
    """Scales [..., T, G] to the linear order [..., T * G]."""
    return store_order(scale, "linear")


def _known(order: str) -> None:
    if order != "token_quad":
        raise OpRefused(f"unknown scale order '{order}'", where="order", expected="'linear' or 'token_quad'")


def _quads(tokens: int) -> None:
    if tokens % 4:
        raise OpRefused(f"{tokens} tokens", where="token-quad scales", expected="a multiple of four tokens")
