"""Backends of one mistake each, for the suite to catch. Their manifests are the reference's, or what is given."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from m31.conformance import oracle
from m31.conformance.noise import NoisySession
from m31.graph import Kernel, OpInstance, StepClass
from m31.sdk.backend import Backend, Limits, Session
from m31.sdk.manifest import Determinism, Manifest

Run = Callable[[Kernel, Sequence[Any], Sequence[Any], Any, Any], None]


def manifest(**changes: Any) -> Manifest:
    """The reference's, changed."""
    return oracle.bench().manifest.model_copy(update=changes)


def promising(**promises: bool) -> Determinism:
    """A declaration in which everything else is not promised."""
    return Determinism(**{"run_to_run": False, "batch_invariant": False, "chunk_invariant": False, **promises})


class Faulty(Backend):
    """The reference with one change.

    Args:
        kernels: op -> what runs instead of `kernel.run`.
        limits: what the session serves, made of what the manifest declares.
        manifest: see there.
        noise: see `NoisySession`.
    """

    def __init__(
        self,
        kernels: Mapping[str, Run] | None = None,
        *,
        limits: Callable[[Limits], Limits] | None = None,
        manifest: Manifest | None = None,
        noise: Mapping[str, float] | None = None,
    ) -> None:
        super().__init__(manifest or oracle.bench().manifest)
        self.kernels, self.limits, self.noise, self.opened = dict(kernels or {}), limits, dict(noise or {}), 0

    def open(self, **asked: Any) -> Session:
        """The reference's session, changed."""
        from m31 import sdk

        inner = sdk.open_backend(oracle.bench().decision).open(**asked)
        self.opened += 1
        return FaultySession(inner, self)


class FaultySession(NoisySession):
    """See `Faulty`."""

    def __init__(self, inner: Session, owner: Faulty) -> None:
        super().__init__(inner, owner.noise, owner.opened)
        self.owner = owner

    def limits(self, model: Any, declared: Limits) -> Limits:
        """See `Faulty`."""
        found = self.inner.limits(model, declared)
        return self.owner.limits(found) if self.owner.limits else found

    def kernel(self, op: OpInstance, step: StepClass) -> Any:
        """See `Faulty`."""
        found, wrong = super().kernel(op, step), self.owner.kernels.get(op.spec.name)
        if wrong is None or not isinstance(found, Kernel):
            return found

        def run(outs: Sequence[Any], ins: Sequence[Any], weights: Any, workspace: torch.Tensor | None) -> None:
            wrong(found, outs, ins, weights, workspace)

        return replace(found, run=run)
