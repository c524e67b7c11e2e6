"""Checkpoints: tensor inventory, lazy reading, writing and inspection (MODEL.md chapters 3.7 and 4)."""

from m31.checkpoint.counting import Counts, GroupCount, KvBytes, counts, kv_bytes_per_token
from m31.checkpoint.inspection import Inspection, inspect, render
from m31.checkpoint.inventory import Group, Storage, TensorDecl, expected
from m31.checkpoint.lazy import LazyTensor
from m31.checkpoint.reader import Checkpoint
from m31.checkpoint.scan import check_finite
from m31.checkpoint.writer import random_tensors, write

__all__ = [
    "Checkpoint",
    "Counts",
    "Group",
    "GroupCount",
    "Inspection",
    "KvBytes",
    "LazyTensor",
    "Storage",
    "TensorDecl",
    "check_finite",
    "counts",
    "expected",
    "inspect",
    "kv_bytes_per_token",
    "random_tensors",
    "render",
    "write",
]
