"""One model on several devices: which part is whose, and how ranks exchange what they computed (DESIGN.md §2)."""

from m31.parallel.group import CollectiveError, Group, LocalGroup, TorchGroup
from m31.parallel.kernels import COLLECTIVES, collective_kernel
from m31.parallel.shard import WHOLE, Shard, ShardRefused

__all__ = [
    "COLLECTIVES",
    "WHOLE",
    "CollectiveError",
    "Group",
    "LocalGroup",
    "Shard",
    "ShardRefused",
    "TorchGroup",
    "collective_kernel",
]
