"""A backend whose manifest exists before its kernels do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NoReturn

from m31.errors import BackendRefused
from m31.sdk.backend import Backend

if TYPE_CHECKING:
    from m31.formats.arithmetic import ArithmeticSpec


class AwaitingKernels(Backend):
    """Answers for its manifest (limits, formats, device match) and refuses to open: it ships no kernel yet.

    Selection never chooses a manifest with `ops = []`; this is what a direct call meets.
    """

    def open(
        self,
        *,
        device: str | None,
        dtype: str,
        rank: int,
        world: int,
        arithmetic: ArithmeticSpec,
        options: Mapping[str, int],
    ) -> NoReturn:
        """Refuse.

        Raises:
            BackendRefused: always.
        """
        raise BackendRefused(
            f"{self.manifest.name} claims no ops yet in this release",
            where=f"backend '{self.manifest.name}'",
            expected="a release whose backend.toml lists ops",
            fix="choose another backend, for example --backend reference",
        )
