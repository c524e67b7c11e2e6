"""A backend on the bench: opened in the ways in which items ask for it, once each."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from m31 import sdk
from m31.conformance import synthetic
from m31.engine.opening import open_serving
from m31.sdk.backend import Backend, Session
from m31.sdk.manifest import Manifest
from m31.sdk.serving import Serving

if TYPE_CHECKING:
    from m31.engine.model import Model

T = TypeVar("T")


class Bench:
    """Sessions and models of one backend.

    Args:
        backend: a name, or a backend that the caller made.
        device: see `Backend.open`.
        options: of `Backend.open`.
        scratch: a folder for checkpoints that items make.

    Raises:
        BackendError: it cannot be used here.
    """

    def __init__(
        self,
        backend: str | Backend,
        *,
        device: str | None = None,
        options: Mapping[str, int] | None = None,
        scratch: Path,
    ) -> None:
        self.backend = backend
        self.decision = sdk.decide(backend) if isinstance(backend, str) else sdk.given(backend)
        manifest = self.decision.require().manifest
        assert manifest is not None, "a backend without a manifest is never chosen"
        self.manifest: Manifest = manifest
        self.device, self.options, self.scratch = device, dict(options or {}), scratch
        self._opened: dict[tuple[str | None, str | None], Serving] = {}
        self._made: dict[Hashable, Any] = {}

    def serving(self, dtype: str | None = None, arithmetic: str | None = None) -> Serving:
        """The backend beside what its ops fall back on. None is its first dtype or arithmetic."""
        key = dtype, arithmetic
        if key not in self._opened:
            self._opened[key] = open_serving(
                self.decision, device=self.device, dtype=dtype, arithmetic=arithmetic, options=self.options
            )
        return self._opened[key]

    def session(self, dtype: str | None = None, arithmetic: str | None = None) -> Session:
        """The backend itself."""
        return self.serving(dtype, arithmetic).session

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """What `make` gives, made when it is first asked for: what several items compare with."""
        if key not in self._made:
            self._made[key] = make()
        found: T = self._made[key]
        return found

    def claims(self, op: str) -> bool:
        """Whether the manifest says that the backend serves an op of the model by itself."""
        return self.manifest.ops == "all" or op in self.manifest.ops

    def load(self, folder: Path, **asked: Any) -> Model:
        """`m31.load` with this backend."""
        from m31.engine.api import load

        return load(folder, backend=self.backend, device=self.device, **asked)

    def checkpoint(self, name: str) -> Path:
        """A small checkpoint with random weights, made on first use: see `m31.conformance.synthetic`."""
        folder = self.scratch / name
        if not folder.exists():
            synthetic.write(folder, name)
        return folder
