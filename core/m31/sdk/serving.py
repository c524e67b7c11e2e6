"""Who serves which op: the chosen backend, and for ops that its manifest lets fall back, the reference (DESIGN.md §3).

Nothing falls back silently: the manifest lists the ops that may, each assignment carries the reason, and the engine
counts the calls.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any, Literal

from m31.errors import BackendRefused, ContractViolation
from m31.graph import Arithmetic, Assigned, Kernel, Refusal
from m31.ops import StateType
from m31.parallel import COLLECTIVES, Group, LocalGroup, collective_kernel

if TYPE_CHECKING:
    from m31.graph import OpInstance, StepClass
    from m31.sdk.backend import KVLayout, KVSpec, Session


class Serving:
    """An open session, and a second one for what it does not serve.

    Args:
        name: of the chosen backend.
        session: its session.
        claimed: ops that its manifest says it serves.
        may_fall_back: ops that its manifest lets run elsewhere.
        spare: name and session of the backend that they run on; None if there is none.
        group: the ranks of this world; it serves the collectives, whatever the backend.

    Raises:
        BackendRefused: the two sessions do not share device and dtypes, so that they cannot share buffers.
    """

    def __init__(
        self,
        name: str,
        session: Session,
        *,
        claimed: Literal["all"] | Collection[str] = "all",
        may_fall_back: Collection[str] = (),
        spare: tuple[str, Session] | None = None,
        group: Group | None = None,
    ) -> None:
        self.name, self.session, self.group = name, session, group or LocalGroup()
        self._claimed, self._may, self._spare = claimed, frozenset(may_fall_back), spare
        self.sessions: dict[str, Session] = {name: session} | ({spare[0]: spare[1]} if spare else {})
        if spare and (spare[1].device != session.device or dict(spare[1].dtypes) != dict(session.dtypes)):
            raise BackendRefused(
                f"computes in {_buffers(session)}, and falls back on {spare[0]}, which does in {_buffers(spare[1])}",
                where=f"backend {name}",
                expected="one device and the same dtypes: both read and write the step's buffers",
                fix="give --device and --dtype that both serve",
            )

    def assign(self, op: OpInstance, step: StepClass) -> Assigned | Refusal:
        """See `m31.graph.Binder`."""
        if op.spec.name in COLLECTIVES:
            return Assigned(self.name, self._collective(op), None)
        found = self._asked(op, step)
        if not isinstance(found, Refusal):
            return Assigned(self.name, found, None)
        if self._spare is None or op.spec.name not in self._may:
            return found
        name, session = self._spare
        instead = session.kernel(op, step)
        if isinstance(instead, Refusal):
            return Refusal(f"{found.reason}; {name}: {instead.reason}")
        return Assigned(name, instead, found.reason)

    def _asked(self, op: OpInstance, step: StepClass) -> Kernel | Refusal:
        """The chosen backend's answer; it is asked for what its manifest claims only."""
        if self._claimed != "all" and op.spec.name not in self._claimed:
            return Refusal(f"backend {self.name} does not claim it")
        found = self.session.kernel(op, step)
        if not isinstance(found, Kernel | Refusal):
            raise ContractViolation(
                "opened",
                f"answers {found!r} for {op.spec.name}",
                where=f"backend {self.name}",
                expected="a Kernel, or a Refusal with a reason",
            )
        if what := _malformed(found):
            raise ContractViolation("opened", f"answers {what} for {op.spec.name}", where=f"backend {self.name}")
        return found

    def wants(self, op: OpInstance, step: StepClass) -> bool:
        """Whether the chosen backend has a kernel for this fused op."""
        return isinstance(self._asked(op, step), Kernel)

    def _collective(self, op: OpInstance) -> Kernel:
        dtype = str(self.session.dtypes[op.spec.outputs[0].dtype]).removeprefix("torch.")
        return Kernel(
            name=f"{type(self.group).__name__}.{op.spec.name}",
            run=collective_kernel(op, self.group),
            arithmetic=Arithmetic(dtype, dtype, dtype),
            workspace_bytes=0,
            why=f"rank {self.group.shard.rank} of {self.group.shard.world}",
        )

    def kv_layout(self, spec: KVSpec, assigned: Iterable[tuple[OpInstance, Assigned]]) -> KVLayout:
        """The page layout for everything that reads or writes the cache.

        It is that of the chosen backend if it serves all of it, else the other one's; then the chosen backend must
        say that its kernels work on those pages (`Session.shares_pages`).

        Args:
            spec: what the pages hold.
            assigned: every op instance of every step class that will run.

        Raises:
            BackendRefused: nobody serves the format, or the two cannot share pages.
        """
        owners = {found.by for op, found in assigned if any(isinstance(v, StateType) for v in op.inputs)}
        if self._spare is None or self._spare[0] not in owners:
            return self.session.kv_layout(spec)
        layout = self._spare[1].kv_layout(spec)
        if self.name in owners and not self.session.shares_pages(layout):
            raise BackendRefused(
                f"serves some ops on the KV cache and leaves others to {self._spare[0]}, whose pages"
                f" ('{layout.layout_id}') it does not read",
                where=f"backend {self.name}",
                expected="one layout for all of them",
                fix="choose another --kv-dtype or --index-dtype, or another backend",
            )
        return layout


def _malformed(answer: Any) -> str:
    """What of a Kernel or Refusal has no meaning, whatever its annotations say; "" if all of it has one."""
    if isinstance(answer, Refusal):
        return "" if str(answer.reason or "").strip() else "a Refusal without a reason"
    if not isinstance(answer.arithmetic, Arithmetic):
        return f"a Kernel with the arithmetic {answer.arithmetic!r}, which is no m31.graph.Arithmetic,"
    size = answer.workspace_bytes
    if not isinstance(size, int) or size < 0:
        return f"a Kernel with workspace_bytes = {size!r}, which is no number of bytes,"
    if not isinstance(answer.name, str) or not answer.name:
        return f"a Kernel with the name {answer.name!r}"
    return ""


def _buffers(session: Session) -> str:
    names = ", ".join(sorted({str(dtype).removeprefix("torch.") for dtype in session.dtypes.values()}))
    return f"{names} on {session.device}"
