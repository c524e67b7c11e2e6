"""The Hopper backend (sm_90): Marlin-style W4A16 experts and an FP8 KV cache on eight devices.

Its limits are data in `backend.toml` (MODEL.md §8); its kernels are not in this release.
"""

from __future__ import annotations

from typing import NoReturn

from m31.errors import BackendRefused
from m31.sdk.backend import Backend

__all__ = ["HopperBackend"]


class HopperBackend(Backend):
    """Answers for the manifest and refuses to open: this release ships no kernel for this hardware."""

    def open(
        self,
        *,
        device: str | None,
        dtype: str,
        rank: int,
        world: int,
        arithmetic: str | None,
        weight_cache_bytes: int | None,
    ) -> NoReturn:
        """Refuse.

        Raises:
            BackendRefused: always, in this release.
        """
        raise BackendRefused(
            f"{self.manifest.name} claims no ops yet in this release",
            where=f"backend '{self.manifest.name}'",
            expected="a release whose backend.toml lists ops",
            fix="choose another backend, for example --backend reference",
        )
