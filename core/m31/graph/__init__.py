"""The model as one readable graph, its steps, and its plans (DESIGN.md §5, §6)."""

from m31.graph.fuse import Fusion, FusionReport, fuse
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
from m31.graph.unfuse import PartHandles, Unfused, compose, prepare_parts, unfused
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
    "Fusion",
    "FusionReport",
    "Group",
    "Handles",
    "KVShare",
    "Kernel",
    "LocalGroup",
    "ModelGraph",
    "OpInstance",
    "Part",
    "PartHandles",
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
    "Unfused",
    "WeightHandle",
    "assign",
    "bind",
    "collective_kernel",
    "compose",
    "fuse",
    "infer",
    "kv_share",
    "narrow",
    "placement",
    "prepare_parts",
    "shard",
    "trace",
    "unfused",
]
