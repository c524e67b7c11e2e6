"""The model as one readable graph, its steps, and its plans (DESIGN.md §5, §6)."""

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
    "Handles",
    "Kernel",
    "ModelGraph",
    "OpInstance",
    "Plan",
    "Refusal",
    "Rounding",
    "RunKernel",
    "Shard",
    "StepBatch",
    "StepClass",
    "StepSize",
    "WeightHandle",
    "assign",
    "bind",
    "infer",
    "trace",
]
