"""Checkpoints: tensor inventory, lazy reading, writing and inspection (MODEL.md chapters 3.7 and 4)."""

from m31.checkpoint.adapter import Adapter, adaptable, write_adapter
from m31.checkpoint.adapter_config import AdapterConfig
from m31.checkpoint.conversion import convert
from m31.checkpoint.counting import Counts, GroupCount, KvBytes, counts, kv_bytes_per_token
from m31.checkpoint.encoding import default_input_scale, encoded
from m31.checkpoint.inspection import Inspection, inspect, render
from m31.checkpoint.inventory import Group, Storage, TensorDecl, expected
from m31.checkpoint.lazy import LazyTensor
from m31.checkpoint.logical import GlobalScale, LogicalTensor, QuantizedTensor
from m31.checkpoint.reader import Checkpoint, DraftCheckpoint
from m31.checkpoint.scan import check_finite
from m31.checkpoint.target import TARGET_FORMATS, TargetFormat, target_config
from m31.checkpoint.writer import random_tensors, write, write_draft

__all__ = [
    "TARGET_FORMATS",
    "Adapter",
    "AdapterConfig",
    "Checkpoint",
    "Counts",
    "DraftCheckpoint",
    "GlobalScale",
    "Group",
    "GroupCount",
    "Inspection",
    "KvBytes",
    "LazyTensor",
    "LogicalTensor",
    "QuantizedTensor",
    "Storage",
    "TargetFormat",
    "TensorDecl",
    "adaptable",
    "check_finite",
    "convert",
    "counts",
    "default_input_scale",
    "encoded",
    "expected",
    "inspect",
    "kv_bytes_per_token",
    "random_tensors",
    "render",
    "target_config",
    "write",
    "write_adapter",
    "write_draft",
]
