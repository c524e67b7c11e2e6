"""Writing into the CPU backend's pages with plain torch and `m31.formats`: what its own kernels are compared with."""

from __future__ import annotations

from torch import Tensor, bfloat16, int16, uint8

from m31.formats import fp8, int8, nvfp4
from m31_cpu.pages import LANES, Lanes, Store


def encoded(name: str, x: Tensor) -> dict[str, Tensor]:
    """The pieces of vectors `[n, heads, D]` in a format."""
    if name == "bfloat16":
        return {"values": x.to(bfloat16).view(int16)}
    if name == "fp8":
        return {"codes": fp8.encode(x).view(uint8)}
    if name == "nvfp4":
        codes, scale = nvfp4.encode_kv(x, nonfinite="propagate")
        return {"codes": codes, "scale": scale.view(uint8)}
    if name == "int8":
        codes, scale = int8.encode(x, nonfinite="propagate")
        return {"codes": codes, "scale": scale}
    return {"values": x}


def write(store: Store, page: Tensor, offset: Tensor, x_nhD: Tensor) -> None:
    """Store vector i of every head at `offset[i]` of page `page[i]`."""
    for name, value in encoded(store.form.name, x_nhD).items():
        part, piece = store.parts[name], store.form.pieces[name]
        if not piece.per:  # a scale for each index key
            part[page, offset] = value[:, 0]
            continue
        if not store.headed:
            part = part.unsqueeze(1)
        if not isinstance(piece.order, Lanes):
            unit = piece.order.unit
            if unit == 1:
                part[page, :, offset] = value
            else:
                part[page, :, offset // unit, :, offset % unit] = value
        elif piece.order.unit == 1:
            part[page, :, offset // LANES, :, offset % LANES] = value
        else:
            part[page, :, offset // LANES, :, offset % LANES] = value.unflatten(-1, (-1, piece.order.unit))
