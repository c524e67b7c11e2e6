"""Launches recorded once and repeated with other buffer contents, the way a device's graph capture does it.

What a device records is addresses and numbers. Between two replays only the contents of buffers may change, and
whatever else the program did between its launches is not part of the graph: a tensor operation would be left out, a
value that was read and branched on would stay what it was. On a device both go wrong in silence; here both are
refused by name. Recording executes each launch, so that what is recorded has also run once. `m31_triton.plan` makes
plans of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from m31_triton.errors import CaptureMismatch
from m31_triton.launch import Launch, Runner


@dataclass(frozen=True)
class Pointer:
    """A tensor argument as a graph keeps it."""

    address: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)} with strides {list(self.stride)} at {self.address:#x}"


def frozen(value: Any) -> Any:
    """A launch's argument as a graph keeps it: a tensor is where and what it is, not what it holds."""
    if isinstance(value, Tensor):
        return Pointer(value.data_ptr(), tuple(value.shape), value.stride(), str(value.dtype))
    return value


@dataclass(frozen=True)
class _Node:
    """A recorded launch; `launch` keeps its tensors alive, so that their memory stays theirs."""

    launch: Launch
    arguments: Mapping[str, Any]
    options: Mapping[str, Any]

    @classmethod
    def of(cls, launch: Launch) -> _Node:
        return cls(launch, {name: frozen(value) for name, value in launch.arguments.items()}, dict(launch.options))


class Capture:
    """Launches recorded once and replayed.

    Args:
        run: what executes a launch.
    """

    def __init__(self, run: Runner) -> None:
        self._run = run
        self._nodes: list[_Node] = []
        self._sealed = False

    @property
    def recorded(self) -> bool:
        """Whether there is something to replay."""
        return self._sealed

    @property
    def launches(self) -> tuple[Launch, ...]:
        """What was recorded, in order."""
        return tuple(node.launch for node in self._nodes)

    @contextmanager
    def record(self) -> Iterator[Runner]:
        """Execute and record everything that is launched with the runner that this gives.

        Raises CaptureMismatch if something was recorded before, or if the block does anything else with tensors than
        launching and making views. Nothing is recorded then.
        """
        if self._sealed:
            raise CaptureMismatch("recorded already", where="capture", fix="make another one")
        nodes: list[_Node] = []

        with _launches_only() as watch:

            def record(launch: Launch) -> None:
                with watch.launching():
                    nodes.append(_Node.of(launch))
                    self._run(launch)

            yield record
        self._nodes, self._sealed = nodes, True

    @contextmanager
    def check(self) -> Iterator[Runner]:
        """Compare what is launched with the record and execute nothing.

        Raises CaptureMismatch at the first launch that differs, naming the argument, and at the end if some are
        missing.
        """
        self._recorded()
        position = 0

        with _launches_only() as watch:

            def compare(launch: Launch) -> None:
                nonlocal position
                with watch.launching():
                    if position == len(self._nodes):
                        what = f"launch {position} of {launch.name}"
                        raise CaptureMismatch(what, where="capture", expected="none")
                    _compare(position, self._nodes[position], _Node.of(launch))
                    position += 1

            yield compare
        if position != len(self._nodes):
            missing = self._nodes[position].launch.name
            raise CaptureMismatch(f"launch {position} of {missing} is missing", where="capture")

    def replay(self) -> None:
        """Repeat the recorded launches with what their buffers hold now.

        Raises CaptureMismatch if a recorded tensor has been given other memory since, or nothing was recorded.
        """
        self._recorded()
        for position, node in enumerate(self._nodes):
            _compare(position, node, _Node.of(node.launch))
        for node in self._nodes:
            self._run(node.launch)

    def _recorded(self) -> None:
        if not self._sealed:
            raise CaptureMismatch("nothing is recorded", where="capture", fix="use record() first")


def _compare(position: int, was: _Node, now: _Node) -> None:
    where = f"launch {position} of {was.launch.name}"
    if now.launch.kernel is not was.launch.kernel:
        raise CaptureMismatch(f"is {now.launch.name}", where=where, expected=was.launch.name)
    for what, before, after in (
        ("the grid", was.launch.grid, now.launch.grid),
        ("the options", was.options, now.options),
        ("the arguments' names", sorted(was.arguments), sorted(now.arguments)),
    ):
        if before != after:
            raise CaptureMismatch(f"{what}: {after}", where=where, expected=str(before))
    for name, before in was.arguments.items():
        after = now.arguments[name]
        if type(before) is not type(after) or before != after:
            raise CaptureMismatch(
                f"argument '{name}' is {after}",
                where=where,
                expected=f"as recorded: {before}",
                fix="change the contents of buffers only; record another plan for other sizes",
            )


class _Watch:
    """Whether what happens now is between launches (watched) or part of one."""

    def __init__(self) -> None:
        self.between = True

    @contextmanager
    def launching(self) -> Iterator[None]:
        self.between = False
        try:
            yield
        finally:
            self.between = True


class _Views(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own __init_subclass__ is untyped
    """Refuses every operation that is not a view: it would run now and not in a replay."""

    def __init__(self, watch: _Watch) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._watch = watch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._watch.between and not func.is_view:
            raise CaptureMismatch(
                f"{func.name()} between launches is not captured",
                where="capture",
                expected="launches and views only",
                fix="allocate before recording, and compute in kernels",
            )
        return func(*args, **(kwargs or {}))


# Ways from a tensor to a number or an array that need no operation below.
_READS = frozenset({"item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__", "__array__"})


class _NoReads(TorchFunctionMode):
    """Refuses reading values on the host: a decision made from them would not be made again in a replay."""

    def __init__(self, watch: _Watch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if self._watch.between and name in _READS:
            raise CaptureMismatch(
                f"a tensor's value is read on the host ({name}) between launches",
                where="capture",
                expected="launches and views only",
                fix="let the kernel read it",
            )
        return func(*args, **(kwargs or {}))


@contextmanager
def _launches_only() -> Iterator[_Watch]:
    watch = _Watch()
    with _NoReads(watch), _Views(watch):
        yield watch
