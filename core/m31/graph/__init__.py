"""The model as one readable graph, its steps, and its plans (DESIGN.md §5, §6)."""

from m31.graph.plan import (
    Arithmetic,
    Binder,
    BoundGraph,
    DefaultPlan,
    Kernel,
    Plan,
    Refusal,
    RunKernel,
    WeightHandle,
    bind,
)
from m31.graph.rounding import NO_ROUNDING, Rounding
from m31.graph.step import StepBatch, StepClass, StepSize
from m31.graph.trace import STEP_INPUTS, Call, ModelGraph, OpInstance, infer, trace

__all__ = [
    "NO_ROUNDING",
    "STEP_INPUTS",
    "Arithmetic",
    "Binder",
    "BoundGraph",
    "Call",
    "DefaultPlan",
    "Kernel",
    "ModelGraph",
    "OpInstance",
    "Plan",
    "Refusal",
    "Rounding",
    "RunKernel",
    "StepBatch",
    "StepClass",
    "StepSize",
    "WeightHandle",
    "bind",
    "infer",
    "trace",
]
