"""The MI355X backend (gfx950): MXFP8 experts and an NVFP4 KV cache by lookup table on four devices.

Its limits are data in `backend.toml` (MODEL.md §8); its kernels are not in this release.
"""

from __future__ import annotations

from m31.sdk import AwaitingKernels

__all__ = ["MI355XBackend"]


class MI355XBackend(AwaitingKernels):
    """See the package docstring; the limits are in backend.toml."""
