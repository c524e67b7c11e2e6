"""The reference with the rounding of another backend: how far apart two healthy models of one arithmetic are.

Thresholds of a whole model cannot be derived op by op, because choices of experts and blocks are not continuous. They
are measured: every op of the reference gets a random relative error of the size that the backend's kernel declares for
it (result, and a random walk of its accumulation), and the model's answers are compared with those without.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from m31 import sdk
from m31.conformance import oracle
from m31.formats.arithmetic import ArithmeticSpec
from m31.graph import Kernel, OpInstance, Refusal, Shard, StepClass, WeightHandle
from m31.sdk.backend import Backend, KVLayout, KVSpec, LazyTensor, Limits, Session


class NoisySession(Session):
    """Another session, whose results have a relative error.

    Args:
        inner: does the work.
        noise: standard deviation by name of the op; others are left as they are.
        seed: of the errors.
    """

    def __init__(self, inner: Session, noise: Mapping[str, float], seed: int) -> None:
        self.inner, self.noise = inner, noise
        self.device, self.dtypes, self.numerics = inner.device, inner.dtypes, inner.numerics
        self._random = torch.Generator(device=inner.device).manual_seed(seed)

    def limits(self, model: Any, declared: Limits) -> Limits:
        """The inner one's."""
        return self.inner.limits(model, declared)

    def kernel(self, op: OpInstance, step: StepClass) -> Kernel | Refusal:
        """The inner one's, and an error on each floating-point result."""
        found, size = self.inner.kernel(op, step), self.noise.get(op.spec.name, 0.0)
        if isinstance(found, Refusal) or not size:
            return found
        run = found.run

        def noisy(outs: Sequence[Any], ins: Sequence[Any], weights: Any, workspace: torch.Tensor | None) -> None:
            run(outs, ins, weights, workspace)
            for out in outs:
                if isinstance(out, torch.Tensor) and out.is_floating_point():
                    error = torch.randn(out.shape, generator=self._random, dtype=out.dtype, device=out.device)
                    out.mul_(1 + size * error)

        return replace(found, run=noisy)

    def prepare(self, op: OpInstance, slots: Mapping[str, LazyTensor], shard: Shard) -> WeightHandle:
        """The inner one's."""
        return self.inner.prepare(op, slots, shard)

    def kv_layout(self, spec: KVSpec) -> KVLayout:
        """The inner one's."""
        return self.inner.kv_layout(spec)

    def memory_free(self) -> int:
        """The inner one's."""
        return self.inner.memory_free()

    def weight_bytes(self, op: OpInstance, slots: Mapping[str, LazyTensor]) -> int:
        """The inner one's."""
        return self.inner.weight_bytes(op, slots)


class NoisyReference(Backend):
    """The reference as a backend of its own, with errors."""

    def __init__(self, noise: Mapping[str, float], seed: int) -> None:
        super().__init__(oracle.bench().manifest)
        self.noise, self.seed = noise, seed

    def open(
        self,
        *,
        device: str | None,
        dtype: str,
        rank: int,
        world: int,
        arithmetic: ArithmeticSpec,
        options: Mapping[str, int],
    ) -> Session:
        """See `Backend.open`."""
        inner = sdk.open_backend(oracle.bench().decision).open(
            device=device, dtype=dtype, rank=rank, world=world, arithmetic=arithmetic, options=options
        )
        return NoisySession(inner, self.noise, self.seed)
