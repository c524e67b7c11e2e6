"""The ranks of a world as one of them sees them: what it gives and what all of them get back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from m31.errors import BackendError
from m31.parallel.shard import WHOLE, Shard


class CollectiveError(BackendError):
    """A collective was called with shapes that do not fit, or another rank did not answer."""

    def __init__(
        self, what: str, *, shard: Shard, where: str, expected: str | None = None, fix: str | None = None
    ) -> None:
        self.rank, self.world = shard.rank, shard.world
        super().__init__(what, where=f"{where}, {shard}", expected=expected, fix=fix)


class Group(ABC):
    """All ranks of a world. Every rank calls the same collectives in the same order with the same shapes.

    Every rank gets the same bits, on which the model depends: router and residual are computed on each rank for itself,
    and one that chose another expert than its neighbours would add a part of something else.
    """

    shard: Shard

    def all_reduce(self, out: Tensor, x: Tensor) -> None:
        """out = the sum of the ranks' x, in the accumulation dtype, rounded once. Shapes equal; out may be x itself.

        Raises:
            CollectiveError: the shapes differ, or a rank failed.
        """
        if out.shape != x.shape:
            raise CollectiveError(
                f"the part has shape {list(x.shape)}, the sum {list(out.shape)}",
                shard=self.shard,
                where="all_reduce",
                expected="equal shapes",
            )
        self._reduce(out, x)

    def all_gather(self, out: Tensor, x: Tensor) -> None:
        """out = the ranks' x side by side along the last dimension, in rank order.

        Raises:
            CollectiveError: out is not `world` times as wide as x and otherwise equal, or a rank failed.
        """
        wanted = (*x.shape[:-1], x.shape[-1] * self.shard.world)
        if tuple(out.shape) != wanted:
            raise CollectiveError(
                f"parts of shape {list(x.shape)} into {list(out.shape)}",
                shard=self.shard,
                where="all_gather",
                expected=str(list(wanted)),
            )
        self._gather(out, x)

    @abstractmethod
    def _reduce(self, out: Tensor, x: Tensor) -> None:
        """`all_reduce`, shapes checked."""

    @abstractmethod
    def _gather(self, out: Tensor, x: Tensor) -> None:
        """`all_gather`, shapes checked."""


class LocalGroup(Group):
    """A world of one: both collectives are the identity."""

    def __init__(self) -> None:
        self.shard = WHOLE

    def _reduce(self, out: Tensor, x: Tensor) -> None:
        _copy(out, x)

    def _gather(self, out: Tensor, x: Tensor) -> None:
        _copy(out, x)


class TorchGroup(Group):
    """Ranks that are processes, over torch.distributed.

    Args:
        group: an initialised process group; the world and this process's rank are the group's own.
    """

    def __init__(self, group: Any) -> None:
        self.group = group
        self.shard = Shard(dist.get_rank(group), dist.get_world_size(group))

    @classmethod
    @contextmanager
    def joined(cls, shard: Shard, *, address: str, transport: str, seconds: float) -> Iterator[TorchGroup]:
        """The default process group of this process, from the meeting of all ranks to the end of the block.

        Args:
            address: where the ranks meet, such as `tcp://127.0.0.1:29500` or `file:///tmp/meeting`; the same on all.
            transport: `gloo` for host memory, or another one that this torch was built with.
            seconds: how long to wait for the other ranks, at the meeting and in each collective.

        Raises:
            CollectiveError: the other ranks did not come, or the transport does not exist here.
        """
        with _told(shard, "joining the process group"):
            dist.init_process_group(
                transport,
                init_method=address,
                rank=shard.rank,
                world_size=shard.world,
                timeout=timedelta(seconds=seconds),
            )
        try:
            yield cls(dist.group.WORLD)
        finally:
            dist.destroy_process_group()

    def _reduce(self, out: Tensor, x: Tensor) -> None:
        wide = torch.float32 if x.dtype.itemsize < torch.float32.itemsize else x.dtype
        direct = out.dtype == wide and out.is_contiguous()
        total = out if direct else torch.empty(x.shape, dtype=wide, device=x.device)
        _copy(total, x)
        if x.numel():  # the same on every rank
            with _told(self.shard, "all_reduce"):
                dist.all_reduce(total, group=self.group)
        _copy(out, total)

    def _gather(self, out: Tensor, x: Tensor) -> None:
        if not x.numel():
            return
        parts = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(self.shard.world)]
        with _told(self.shard, "all_gather"):
            dist.all_gather(parts, x.contiguous(), group=self.group)
        torch.cat(parts, dim=-1, out=out) if out.is_contiguous() else out.copy_(torch.cat(parts, dim=-1))


def _copy(out: Tensor, x: Tensor) -> None:
    """Nothing to do where the destination is the source."""
    if out.data_ptr() != x.data_ptr() or out.stride() != x.stride() or out.dtype != x.dtype:
        out.copy_(x)


@contextmanager
def _told(shard: Shard, where: str) -> Iterator[None]:
    """A failure of torch.distributed as an error of our own."""
    try:
        yield
    except (RuntimeError, ValueError, OSError) as error:  # its own errors are RuntimeErrors
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise CollectiveError(
            f"failed ({reason})",
            shard=shard,
            where=where,
            fix="look at what the other ranks report: the first that failed is the cause",
        ) from error
