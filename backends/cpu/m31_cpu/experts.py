"""The op `experts` on weights that stay in their file (MODEL.md §2.5)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, get_args

import numpy as np
import torch
from numpy.typing import NDArray

from m31.errors import OpRefused
from m31.graph import Arithmetic, Kernel, OpInstance, Refusal, StepClass
from m31.ops import TensorType
from m31_cpu.codegen import CHUNK, GROUP, Isa, Stored, columns
from m31_cpu.kernels import BLOCK_ROWS, compiled, decoded_bytes, group, pack, padded
from m31_cpu.threads import Pool
from m31_cpu.weights import ExpertWeights

_LINE = 64  # bytes; buffers of different threads do not share one


@dataclass(frozen=True)
class _Shape:
    """Sizes of an op instance, and where its buffers lie in the workspace."""

    width: int  # H
    inner: int  # I
    topk: int
    stored: tuple[Stored, Stored]

    def room_bytes(self, choices: int) -> int:
        """Scratch of one thread for at most so many choices of one expert."""
        decoded = max(decoded_bytes(self.stored[0], self.width), decoded_bytes(self.stored[1], self.inner))
        return _whole_lines(4 * 2 * BLOCK_ROWS * choices + 2 * decoded)

    def buffers(self, tokens: int, threads: int) -> list[int]:
        """Bytes of inputs, activations, and every thread's scratch."""
        sizes = [4 * tokens * padded(self.width), 4 * tokens * self.topk * padded(self.inner)]
        return [*map(_whole_lines, sizes), *[self.room_bytes(tokens * self.topk)] * threads]


def _whole_lines(size: int) -> int:
    return -(-size // _LINE) * _LINE


def stored_formats(op: OpInstance, stored: Mapping[str, str]) -> tuple[Stored, Stored] | Refusal:
    """How w1 and w3, and how w2 of an instance are stored, if the kernels read that.

    Args:
        stored: slot -> format.
    """
    found: list[Stored] = []
    for names in (("w1", "w3"), ("w2",)):
        formats = {how for slot, how in stored.items() if slot.partition(".")[0] in names}
        if len(formats) != 1:
            return Refusal(f"{' and '.join(names)} are stored in several ways: {', '.join(sorted(formats))}")
        how = formats.pop()
        known = next((name for name in get_args(Stored) if name == how), None)
        if known is None:
            return Refusal(f"experts stored as {how} are not read in place, only {' and '.join(get_args(Stored))}")
        found.append(known)
    width, inner = _sizes(op)
    if width % GROUP or inner % GROUP:
        return Refusal(f"widths {width} and {inner} are not multiples of {GROUP}")
    return found[0], found[1]


def _sizes(op: OpInstance) -> tuple[int, int]:
    assert op.weights is not None
    inner, width = op.weights.slots["w1.0"].shape
    return width, inner


def experts_kernel(
    op: OpInstance, step: StepClass, stored: tuple[Stored, Stored], isa: Isa, why: str, pool: Pool
) -> Kernel:
    """The kernel, compiled."""
    width, inner = _sizes(op)
    choices = op.inputs[1]
    assert isinstance(choices, TensorType)
    shape = _Shape(width, inner, step.size(choices.shape[1]), stored)
    run = _Run(shape, op.attrs, isa, pool)
    return Kernel(
        name=f"m31_cpu.experts.{isa}",
        why=why,
        run=run,
        arithmetic=Arithmetic("float32", "float32", "float32"),
        workspace_bytes=sum(shape.buffers(step.tokens, pool.count)) + _LINE,
    )


class _Run:
    """`RunKernel` of one instance."""

    def __init__(self, shape: _Shape, attrs: Mapping[str, Any], isa: Isa, pool: Pool) -> None:
        self.shape, self.pool = shape, pool
        self.first, self.second = (compiled(isa, how) for how in shape.stored)
        self.parameters = tuple(np.float32(attrs[name]) for name in ("alpha", "beta", "limit"))
        self.factor = np.float32(attrs["routed_scaling_factor"])
        self.places = tuple(_places(how, n) for how, n in zip(shape.stored, (shape.width, shape.inner), strict=True))
        self.experts = int(attrs["experts"])

    def __call__(
        self, outs: Sequence[Any], ins: Sequence[Any], w: ExpertWeights, workspace: torch.Tensor | None
    ) -> None:
        """`out = factor * sum of weight * w2 act(w1 h, w3 h)`.

        Raises:
            OpRefused: an expert id that does not exist.
            NonFiniteWeight: a weight that a token needs is damaged.
        """
        shape, pool = self.shape, self.pool
        h, ids, weights = (np.ascontiguousarray(value.numpy()) for value in ins)
        tokens = len(h)
        if tokens == 0:
            return
        assert workspace is not None
        x, act, *rooms = _cut(workspace.numpy(), shape.buffers(tokens, pool.count))
        order = np.empty(ids.size, np.int64)
        chosen, start = np.empty(min(ids.size, self.experts), np.int64), np.empty(ids.size + 1, np.int64)
        found = group(ids.reshape(-1), self.experts, chosen, start, order)
        if found < 0:
            raise OpRefused(
                f"ids from {ids.min()} to {ids.max()}", where="op experts", expected=f"from 0 to {self.experts - 1}"
            )
        chosen, start = chosen[:found], start[: found + 1]
        x_stride, act_stride = padded(shape.width), padded(shape.inner)
        pack(h.reshape(-1), shape.width, self.places[0], x, x_stride)
        if shape.inner % CHUNK:
            act[: ids.size * act_stride].reshape(ids.size, -1)[:, shape.inner // CHUNK * CHUNK :] = 0
        inputs = x.ctypes.data + 4 * x_stride * (order // shape.topk)
        middles = act.ctypes.data + 4 * act_stride * np.arange(ids.size)
        given = (w.table, w.divisors, chosen, start)
        bad = pool.run(
            partial(
                _part,
                self.first.gate_up,
                (*given, inputs, shape.width, shape.inner, self.places[1], act, act_stride),
                rooms,
                self.parameters,
            )
        )
        direct = outs[0].is_contiguous()
        out = outs[0].numpy() if direct else np.empty(h.shape, np.float32)
        bad |= pool.run(
            partial(
                _part,
                self.second.down,
                (*given, middles, shape.inner, shape.width, order, shape.topk, weights.reshape(-1), self.factor),
                rooms,
                (out.reshape(-1),),
            )
        )
        if not direct:
            outs[0].copy_(torch.from_numpy(out))
        if bad:
            w.refuse_damage(chosen)


def _part(
    kernel: Callable[..., int],
    given: tuple[Any, ...],
    rooms: Sequence[Any],
    rest: tuple[Any, ...],
    part: int,
    parts: int,
) -> int:
    return kernel(part, parts, *given, rooms[part], *rest)


def _places(stored: Stored, width: int) -> NDArray[np.int64]:
    """Where each column of an input row goes."""
    place = np.empty(CHUNK, np.int64)
    place[columns(stored)] = np.arange(CHUNK)
    column = np.arange(width)
    return column // CHUNK * CHUNK + place[column % CHUNK]


def _cut(workspace: NDArray[np.uint8], sizes: Sequence[int]) -> list[NDArray[np.float32]]:
    """The buffers, each on a line of its own."""
    at = -workspace.ctypes.data % _LINE
    pieces = []
    for size in sizes:
        pieces.append(workspace[at : at + size].view(np.float32))
        at += size
    return pieces
