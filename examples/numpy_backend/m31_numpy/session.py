"""What the core calls: opening the backend, binding kernels, preparing weights, laying out pages, compiling a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from m31.errors import BackendRefused
from m31.formats.arithmetic import ArithmeticSpec
from m31.graph import Arithmetic, BoundGraph, Kernel, OpInstance, Plan, Refusal, Shard, StepClass, WeightHandle
from m31.ops import Attrs
from m31.sdk import Backend, KVLayout, KVSpec, LazyTensor, Session, host_memory_free
from m31_numpy import weights
from m31_numpy.kernels import KERNELS, Run
from m31_numpy.pages import PageLayout, Pages
from m31_numpy.plan import NumpyPlan

if TYPE_CHECKING:
    pass


@dataclass(frozen=True)
class Bound:
    """A kernel with its attributes, as `m31.graph.RunKernel`.

    Takes numpy arrays from `NumpyPlan` and torch tensors from anybody else: `np.asarray` of a CPU tensor is a view of
    its memory, so both are written in place.
    """

    run: Run
    attrs: Attrs

    def __call__(self, outs: Sequence[Any], ins: Sequence[Any], handle: Any, workspace: Any) -> None:
        w = handle.arrays if handle is not None else {}
        self.run(self.attrs, [_array(x) for x in outs], [_array(x) for x in ins], w)


def _array(x: Any) -> Any:
    return x if isinstance(x, Pages) else np.asarray(x)


class NumpySession(Session):
    """float32 on the processor; nothing is quantised but what is stored so."""

    def __init__(self, numerics: ArithmeticSpec) -> None:
        self.device = torch.device("cpu")
        self.dtypes = {"model": torch.float32, "accum": torch.float32, "int64": torch.int64}
        self.numerics = numerics

    def kernel(self, op: OpInstance, step: StepClass) -> Kernel | Refusal:
        """The same kernel for every step class."""
        run = KERNELS.get(op.spec.name)
        if run is None:
            return Refusal("the numpy backend does not implement it")
        output = "bfloat16" if op.spec.name.startswith("round_") else "float32"
        return Kernel(
            run=Bound(run, op.attrs),
            arithmetic=Arithmetic("float32", "float32", output),
            workspace_bytes=0,
            name=f"m31_numpy.{run.__name__}",
            why="the only one",
        )

    def prepare(self, op: OpInstance, slots: Mapping[str, LazyTensor], shard: Shard) -> WeightHandle:
        """Decode to float32, once."""
        return weights.prepare(slots)

    def weight_bytes(self, op: OpInstance, slots: Mapping[str, LazyTensor]) -> int:
        """See `Session.weight_bytes`."""
        return weights.decoded_bytes(slots)

    def kv_layout(self, spec: KVSpec) -> KVLayout:
        """See `m31_numpy.pages`."""
        return PageLayout(spec)

    def memory_free(self) -> int:
        """See `m31.sdk.host_memory_free`."""
        return host_memory_free()

    def compile(self, graph: BoundGraph, step: StepClass) -> Plan:
        """A plan over numpy arrays, in place of the default one over torch tensors."""
        return NumpyPlan(graph, step)


class NumpyBackend(Backend):
    """See the package docstring."""

    def open(
        self,
        *,
        device: str | None,
        dtype: str,
        rank: int,
        world: int,
        arithmetic: ArithmeticSpec,
        options: Mapping[str, int],
    ) -> NumpySession:
        """See `Backend.open`. The core has refused what the manifest rules out."""
        for what, asked, served in (
            ("device", device, (None, "cpu")),
            ("compute dtype", dtype, ("float32",)),
            ("number of ranks", world, (1,)),
        ):
            if asked not in served:
                raise BackendRefused(
                    f"{what} {asked!r} is not served",
                    where="backend numpy",
                    expected=" or ".join("none" if value is None else str(value) for value in served),
                    fix="ask for that, or choose another backend with --backend",
                )
        return NumpySession(arithmetic)
