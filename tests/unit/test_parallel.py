"""Ranks, groups and the kernels of collectives, one process. Several: tests/integration/test_tensor_parallel.py."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from m31 import ops
from m31.errors import GraphError, OpRefused
from m31.ops.collective import gathered, reduced
from m31.parallel import CollectiveError, Group, LocalGroup, Shard, ShardRefused, TorchGroup, collective_kernel


@pytest.mark.parametrize(("rank", "world"), [(0, 0), (1, 1), (-1, 2), (2, 2)])
def test_a_rank_outside_its_world(rank: int, world: int) -> None:
    with pytest.raises(ShardRefused, match=f"rank {rank} of {world}; expected 0 <= rank < world"):
        Shard(rank, world)
    assert issubclass(ShardRefused, GraphError)


def test_shares() -> None:
    assert [list(Shard(r, 3).share(6, "things", "here")) for r in range(3)] == [[0, 1], [2, 3], [4, 5]]
    assert [list(Shard(r, 4).share_or_copy(2, "things", "here")) for r in range(4)] == [[0], [0], [1], [1]]
    assert list(Shard(1, 2).share_or_copy(4, "things", "here")) == [2, 3]
    for share in (Shard(0, 4).share, Shard(0, 4).share_or_copy):
        with pytest.raises(ShardRefused, match=r"here: 6 things over 4 ranks; expected a multiple of 4"):
            share(6, "things", "here")


def test_what_ranks_make_together() -> None:
    parts = [np.array([[1.0, 2.0]]), np.array([[10.0, 20.0]]), np.array([[100.0, 200.0]])]
    np.testing.assert_array_equal(reduced(parts), [[111.0, 222.0]])
    np.testing.assert_array_equal(gathered(parts), [[1.0, 2.0, 10.0, 20.0, 100.0, 200.0]])


@pytest.mark.parametrize("spec", [ops.all_reduce, ops.all_gather], ids=lambda s: s.name)
def test_one_part_does_not_say_what_the_others_hold(spec: ops.OpSpec) -> None:
    with pytest.raises(OpRefused, match=rf"op {spec.name}: one part of 2 was given; expected the parts of all ranks"):
        spec.naive({"world": 2}, np.ones((1, 2)))


@pytest.fixture(params=["local", "torch"])
def group(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Group]:
    if request.param == "local":
        yield LocalGroup()
        return
    with TorchGroup.joined(Shard(0, 1), address=f"file://{tmp_path}/m", transport="gloo", seconds=30) as joined:
        yield joined
    assert not dist.is_initialized()


@pytest.mark.parametrize("rows", [0, 1, 5])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_world_of_one_is_the_identity(group: Group, dtype: torch.dtype, rows: int) -> None:
    assert group.shard == Shard(0, 1)
    x = torch.randn(rows, 12, dtype=dtype)
    for spec in (ops.all_reduce, ops.all_gather):
        run = collective_kernel(SimpleNamespace(spec=spec, attrs={"world": 1}), group)
        wide = torch.full((rows, 24), torch.nan, dtype=dtype)
        for out in (torch.full_like(x, torch.nan), wide[:, ::2]):
            run([out], [x], None, None)
            assert torch.equal(out, x)
        assert bool(wide[:, 1::2].isnan().all())  # gaps of a strided destination are not written
        kept = x.clone()
        run([x], [x], None, None)
        assert torch.equal(x, kept)


def test_shapes_that_do_not_fit_are_refused(group: Group) -> None:
    x = torch.ones(2, 3)
    with pytest.raises(
        CollectiveError, match=r"all_reduce, rank 0 of 1: the part has shape \[2, 3\], the sum \[2, 4\]"
    ):
        group.all_reduce(torch.ones(2, 4), x)
    with pytest.raises(CollectiveError, match=r"all_gather, rank 0 of 1: .*into \[2, 6\]; expected \[2, 3\]") as info:
        group.all_gather(torch.ones(2, 6), x)
    assert (info.value.rank, info.value.world) == (0, 1)


@pytest.mark.parametrize("name", ["all_reduce", "all_gather"])
def test_a_rank_that_is_lost_is_an_error_of_our_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    def lost(*args: object, **kwargs: object) -> None:
        raise RuntimeError("Connection closed by peer [127.0.0.1]:53124\nmore")

    with TorchGroup.joined(Shard(0, 1), address=f"file://{tmp_path}/m", transport="gloo", seconds=30) as joined:
        monkeypatch.setattr(dist, name, lost)
        with pytest.raises(CollectiveError, match=rf"{name}, rank 0 of 1: failed \(Connection closed by peer .*\d\);"):
            getattr(joined, name)(torch.ones(1, 2), torch.ones(1, 2))


def test_kernels_of_other_ops_and_other_worlds_are_refused() -> None:
    with pytest.raises(OpRefused, match=r"op add: is no collective; expected all_reduce or all_gather"):
        collective_kernel(SimpleNamespace(spec=ops.add, attrs={}), LocalGroup())
    with pytest.raises(CollectiveError, match=r"all_reduce, rank 0 of 1: the graph was made for a world of 2"):
        collective_kernel(SimpleNamespace(spec=ops.all_reduce, attrs={"world": 2}), LocalGroup())
