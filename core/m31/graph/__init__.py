"""The model as one readable graph, its steps, and its plans (DESIGN.md §5, §6)."""

from m31.graph.fuse import Fusion, FusionReport, fuse
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
from m31.graph.step import StepBatch, StepClass, StepSize
from m31.graph.trace import STEP_INPUTS, Call, ModelGraph, OpInstance, infer, trace
from m31.graph.unfuse import PartHandles, Unfused, compose, prepare_parts, unfused
from m31.parallel import Shard

__all__ = [
    "NO_ROUNDING",
    "STEP_INPUTS",
    "Arithmetic",
    "Assigned",
    "Binder",
    "BoundGraph",
    "Call",
    "DefaultPlan",
    "Fusion",
    "FusionReport",
    "Handles",
    "Kernel",
    "ModelGraph",
    "OpInstance",
    "PartHandles",
    "Plan",
    "Refusal",
    "Rounding",
    "RunKernel",
    "Shard",
    "StepBatch",
    "StepClass",
    "StepSize",
    "Unfused",
    "WeightHandle",
    "assign",
    "bind",
    "compose",
    "fuse",
    "infer",
    "prepare_parts",
    "trace",
    "unfused",
]
