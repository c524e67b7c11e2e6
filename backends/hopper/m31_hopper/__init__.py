"""The Hopper backend (sm_90): Marlin-style W4A16 experts and an FP8 KV cache on eight devices.

Its limits are data in `backend.toml` (MODEL.md §8); its kernels are not in this release.
"""

from __future__ import annotations

from m31.sdk import AwaitingKernels

__all__ = ["HopperBackend"]


class HopperBackend(AwaitingKernels):
    """See the package docstring; the limits are in backend.toml."""
