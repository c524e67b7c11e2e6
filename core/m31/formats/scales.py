"""Block scales that no encoder writes: NaN, or an E4M3 with its sign bit set. MODEL.md §3.1, §3.2.

Engines disagree about them (one kernel drops the sign, another multiplies by it), so nothing is decoded with them.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Protocol

from m31.errors import DamagedScale

if TYPE_CHECKING:
    import torch

E8M0_NAN = 255
E8M0_LARGE = 246
"""From this scale on 448 * 2^(scale - 127) may exceed float32, whose largest number is just below 2^128."""
_E4M3_NAN = 0x7F  # and every byte above it has the sign bit


class StoredScales(Protocol):
    """A stored tensor of block scales, for messages."""

    @property
    def name(self) -> str:
        """Its name."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""

    @property
    def path(self) -> object:
        """Its file."""


def check_scale(part: StoredScales, value: torch.Tensor, start: int = 0) -> None:
    """Refuse block scales that are NaN or, in E4M3, have the sign bit set, -0 included.

    Args:
        part: the scale tensor, for the message.
        value: consecutive rows of it, uint8 (E8M0) or float8_e4m3fn.
        start: the first of these rows.

    Raises:
        DamagedScale: names the tensor and the flat index of the first bad scale.
    """
    import torch

    raw, e8m0 = value.view(torch.uint8), value.dtype == torch.uint8
    bad = raw == E8M0_NAN if e8m0 else raw >= _E4M3_NAN
    if not bool(bad.any()):
        return
    flat = int(bad.reshape(-1).nonzero()[0])
    number = float("nan") if e8m0 else float(value.reshape(-1)[flat].float())
    raise DamagedScale(
        f"'{part.name}' holds {number} at flat index {start * math.prod(part.shape[1:]) + flat} of shape "
        f"{list(part.shape)} (byte 0x{int(raw.reshape(-1)[flat]):02X})",
        where=str(part.path),
        expected="block scales that are numbers" + ("" if e8m0 else " without a sign"),
        fix="the file is damaged, or its encoder is at fault: fetch it again or use another checkpoint",
    )
