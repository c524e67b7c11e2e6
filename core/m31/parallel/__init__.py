"""Ranks of a world, and what they exchange."""

from __future__ import annotations

from dataclasses import dataclass

from m31.errors import GraphError


@dataclass(frozen=True)
class Shard:
    """Which rank of how many.

    Raises:
        GraphError: no such rank.
    """

    rank: int
    world: int

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world:
            raise GraphError(f"rank {self.rank} of {self.world}", expected="0 <= rank < world")


WHOLE = Shard(0, 1)
"""One rank that has everything."""
