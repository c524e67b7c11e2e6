"""Kernels of the collective ops, for the session of any backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from m31.errors import OpRefused
from m31.ops import Attrs, OpSpec
from m31.parallel.group import CollectiveError, Group

COLLECTIVES = ("all_reduce", "all_gather")
"""Ops that a group computes, not a device."""

Run = Callable[[Sequence[Any], Sequence[Any], Any, Any], None]


class _Op(Protocol):
    @property
    def spec(self) -> OpSpec: ...
    @property
    def attrs(self) -> Attrs: ...


def collective_kernel(op: _Op, group: Group) -> Run:
    """`run(outs, ins, weights, workspace)` of a collective op instance; it has no weights and needs no workspace.

    Raises:
        OpRefused: the op is no collective.
        CollectiveError: the graph was made for a world of another size.
    """
    name = op.spec.name
    if name not in COLLECTIVES:
        raise OpRefused("is no collective", where=f"op {name}", expected=" or ".join(COLLECTIVES))
    if op.attrs["world"] != group.shard.world:
        raise CollectiveError(
            f"the graph was made for a world of {op.attrs['world']}",
            shard=group.shard,
            where=name,
            expected=f"a world of {group.shard.world}",
        )
    collective = group.all_reduce if name == "all_reduce" else group.all_gather

    def run(outs: Sequence[Any], ins: Sequence[Any], weights: Any, workspace: Any) -> None:
        collective(outs[0], ins[0])

    return run
