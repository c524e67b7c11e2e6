"""One rank of a world, and which of several equal things are its own."""

from __future__ import annotations

from dataclasses import dataclass

from m31.errors import GraphError


class ShardRefused(GraphError):
    """A model cannot be spread over so many ranks: something does not divide."""


@dataclass(frozen=True, slots=True)
class Shard:
    """Rank `rank` of `world` tensor-parallel ranks.

    Raises:
        ShardRefused: no such rank.
    """

    rank: int
    world: int

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world:
            raise ShardRefused(f"{self}", expected="0 <= rank < world")

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.world}"

    def share(self, count: int, what: str, where: str) -> range:
        """The rank's own of `count` things in a row: as many for each rank.

        Args:
            what: the things, in the plural, for the message.
            where: whose they are, for the message.

        Raises:
            ShardRefused: `count` is not a multiple of the world.
        """
        if count % self.world:
            raise ShardRefused(
                f"{count:,} {what} over {self.world} ranks",
                where=where,
                expected=f"a multiple of {self.world}",
                fix="use a number of devices that divides it",
            )
        each = count // self.world
        return range(self.rank * each, (self.rank + 1) * each)

    def share_or_copy(self, count: int, what: str, where: str) -> range:
        """The same, but with fewer things than ranks neighbouring ranks have a copy of the same one.

        Eight ranks over four KV heads: ranks 0 and 1 have head 0, ranks 2 and 3 head 1 (MODEL.md §2.4).

        Raises:
            ShardRefused: neither number is a multiple of the other.
        """
        if 0 < count < self.world and self.world % count == 0:
            own = self.rank * count // self.world
            return range(own, own + 1)
        return self.share(count, what, where)


WHOLE = Shard(0, 1)
"""One rank that has everything."""
