"""The Rubin backend (sm_107): native NVFP4 experts and an NVFP4 KV cache on four devices.

Its limits are data in `backend.toml` (MODEL.md §8); its kernels are not in this release.
"""

from __future__ import annotations

from m31.sdk import AwaitingKernels

__all__ = ["RubinBackend"]


class RubinBackend(AwaitingKernels):
    """See the package docstring; the limits are in backend.toml."""
