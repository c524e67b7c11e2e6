"""The model as one readable graph, its steps, and its plans (DESIGN.md §5, §6)."""

from m31.graph.placement import Cut, KVShare, Part, kv_share, narrow, placement
from m31.graph.plan import (
    Arithmetic,
    Assigned,
    Binder,
    BoundGraph,
    DefaultPlan,
    Handles,
    Kernel,
    Plan,
    Refusal,
    RunKernel,
    WeightHandle,
    assign,
    bind,
)
from m31.graph.rounding import NO_ROUNDING, Rounding
from m31.graph.shard import shard
from m31.graph.step import StepBatch, StepClass, StepSize
from m31.graph.trace import STEP_INPUTS, Call, ModelGraph, OpInstance, infer, trace
from m31.parallel import (
    COLLECTIVES,
    CollectiveError,
    Group,
    LocalGroup,
    Shard,
    ShardRefused,
    TorchGroup,
    collective_kernel,
)

__all__ = [
    "COLLECTIVES",
    "NO_ROUNDING",
    "STEP_INPUTS",
    "Arithmetic",
    "Assigned",
    "Binder",
    "BoundGraph",
    "Call",
    "CollectiveError",
    "Cut",
    "DefaultPlan",
    "Group",
    "Handles",
    "KVShare",
    "Kernel",
    "LocalGroup",
    "ModelGraph",
    "OpInstance",
    "Part",
    "Plan",
    "Refusal",
    "Rounding",
    "RunKernel",
    "Shard",
    "ShardRefused",
    "StepBatch",
    "StepClass",
    "StepSize",
    "TorchGroup",
    "WeightHandle",
    "assign",
    "bind",
    "collective_kernel",
    "infer",
    "kv_share",
    "narrow",
    "placement",
    "shard",
    "trace",
]
