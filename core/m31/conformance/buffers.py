"""Inputs and outputs of one kernel call, surrounded by what must not be read or must not be written."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from m31.errors import ContractViolation

_GUARD = 2  # rows or elements around a buffer
_BYTES = 256  # around a workspace
WILD = -(2**40)
"""An index that no table has; what an output of indices holds before it is written."""
_SENTINEL = 12345.0


class Buffer:
    """A tensor inside a larger one.

    Args:
        shape, dtype, device: of the tensor.
        values: its contents; None for an output, which starts as NaN, or as an index that no table has.
        narrow: axes along which the larger one is wider besides the first, as the default plan narrows its buffers.
        gaps: there is something between any two elements.
    """

    def __init__(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        *,
        values: torch.Tensor | None = None,
        narrow: Sequence[int] = (),
        gaps: bool = False,
    ) -> None:
        self.written = values is None
        real = dtype.is_floating_point
        around = (_SENTINEL if self.written else torch.nan) if real else (_SENTINEL if self.written else WILD)
        wide, cut = [], []
        for axis, n in enumerate(shape):
            if gaps:
                step = 2 if axis == len(shape) - 1 else 1
                wide.append(step * n + 1 + _GUARD)
                cut.append(slice(1, 1 + step * n, step))
            elif axis == 0 or axis in narrow:
                wide.append(n + 2 * _GUARD)
                cut.append(slice(_GUARD, _GUARD + n))
            else:
                wide.append(n)
                cut.append(slice(0, n))
        whole = torch.full(wide, around, dtype=dtype, device=device)
        self.tensor = whole[tuple(cut)]
        if values is None:
            self.tensor.fill_(torch.nan if real else WILD)
        else:
            self.tensor.copy_(values)
        inside = torch.zeros(wide, dtype=torch.bool, device=device)
        inside[tuple(cut)] = True
        self._whole, self._before = whole, whole.clone()
        self._fixed = ~inside if self.written else torch.ones_like(inside)

    def require_untouched(self, name: str, where: str) -> None:
        """Nothing around an output, and nothing of an input, has changed.

        Raises:
            ContractViolation: something has.
        """
        changed = (_bits(self._whole) != _bits(self._before)) & self._fixed
        if bool(changed.any()):
            what = f"writes {int(changed.sum())} elements {'around' if self.written else 'of or around'} '{name}'"
            raise ContractViolation(
                "arithmetic", what, where=where, expected="every element of the outputs and nothing else to be written"
            )


class Workspace:
    """Scratch with guards on both sides, full of ones."""

    def __init__(self, size: int, device: torch.device) -> None:
        self._whole = torch.full((size + 2 * _BYTES,), 255, dtype=torch.uint8, device=device)
        self.tensor = self._whole[_BYTES : _BYTES + size] if size else None

    def require_untouched(self, where: str) -> None:
        """Nothing around it has changed.

        Raises:
            ContractViolation: something has.
        """
        if not bool((self._whole[:_BYTES] == 255).all() and (self._whole[-_BYTES:] == 255).all()):
            raise ContractViolation(
                "arithmetic", "writes around its workspace", where=where, expected="workspace_bytes and no more"
            )


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    kinds = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
    return tensor.view(kinds[tensor.element_size()])
