"""Pages of the CPU backend in tests: written with plain torch and `m31.formats`, kernels on memory with ends."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from m31.errors import ConfigError
from m31.formats import fp8, int8, nvfp4
from m31.formats.arithmetic import NAMED
from m31.graph import OpInstance, StepClass
from m31.ops import OpSpec, StateType, TensorType
from m31_cpu.pages import LANES, CpuCache, Lanes, Store
from m31_cpu.session import CpuSession

PAGE = mmap.PAGESIZE


def encoded(name: str, x: Tensor) -> dict[str, Tensor]:
    """The pieces of vectors `[n, heads, D]` in a format."""
    if name == "bfloat16":
        return {"values": x.to(torch.bfloat16).view(torch.int16)}
    if name == "fp8":
        return {"codes": fp8.encode(x).view(torch.uint8)}
    if name == "nvfp4":
        codes, scale = nvfp4.encode_kv(x, nonfinite="propagate")
        return {"codes": codes, "scale": scale.view(torch.uint8)}
    if name == "int8":
        codes, scale = int8.encode(x, nonfinite="propagate")
        return {"codes": codes, "scale": scale}
    return {"values": x}


def write(store: Store, page: Tensor, offset: Tensor, x_nhD: Tensor) -> None:
    """Store vector i of every head at `offset[i]` of page `page[i]`."""
    for name, value in encoded(store.form.name, x_nhD).items():
        part, piece = store.parts[name], store.form.pieces[name]
        if not piece.per:  # a scale for each index key
            part[page, offset] = value[:, 0]
            continue
        if not store.headed:
            part = part.unsqueeze(1)
        unit = piece.order.unit
        if not isinstance(piece.order, Lanes):
            at = (offset,) if unit == 1 else (offset // unit, slice(None), offset % unit)
            part[(page, slice(None), *at)] = value
        else:
            units = value if unit == 1 else value.unflatten(-1, (-1, unit))
            part[page, :, offset // LANES, :, offset % LANES] = units


def session(monkeypatch: pytest.MonkeyPatch, isa: str, threads: int = 2) -> CpuSession:
    """One on an instruction set; a test for another processor than this one is left out."""
    monkeypatch.setenv("M31_CPU_ISA", isa)
    monkeypatch.setenv("M31_NUM_THREADS", str(threads))
    try:
        return CpuSession(NAMED["exact"])
    except ConfigError as error:
        pytest.skip(str(error))


def guarded(x: Tensor, *, front: bool = False) -> Tensor:
    """The same numbers in memory that ends where no page is mapped, or, `front`, begins behind such a page."""
    size = x.numel() * x.element_size()
    whole = -(-max(size, 1) // PAGE) * PAGE
    room = mmap.mmap(-1, whole + 2 * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    start = ctypes.addressof(ctypes.c_char.from_buffer(room))
    for at in (start, start + PAGE + whole):
        assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(at), ctypes.c_size_t(PAGE), 0) == 0
    if not size:
        return x
    offset = PAGE if front else PAGE + whole - size
    made = torch.frombuffer(room, dtype=torch.uint8, count=size, offset=offset).view(x.dtype).view(x.shape)
    return made.copy_(x)


def guard(cache: CpuCache) -> CpuCache:
    """Its pages in such memory."""
    for _, store in cache._stores():
        store.parts = {name: guarded(part) for name, part in store.parts.items()}
    return cache


def run(
    cpu: CpuSession, spec: OpSpec, attrs: Mapping[str, Any], ins: Sequence[Any], forms: tuple[str, str] = ("", "")
) -> tuple[Any, ...]:
    """Run an op on guarded copies of its inputs, which must stay as they are; outputs start as NaN or -7."""
    types: list[Any] = []
    sizes: dict[str, int] = {}
    for arg, value in zip(spec.inputs, ins, strict=True):
        if arg.kind == "state":
            types.append(StateType("kv", *forms))
            continue
        dims = {"T": "T", "P": "P", "S": "S+1" if arg.name == "cu_q" else "S"}
        shape = tuple(dims.get(axis, n) for axis, n in zip(arg.layout.split(","), value.shape, strict=True))
        sizes |= {dim: n for dim, n in zip(shape, value.shape, strict=True) if isinstance(dim, str)}
        types.append(TensorType(shape, arg.layout, arg.dtype))
    op = OpInstance(f"{spec.name}_1", spec, attrs, tuple(types), spec.types(attrs, types))
    step = StepClass(kind="mixed", q_len=0, tokens=sizes["T"], seqs=sizes.get("S", 1), rows=1, pages=sizes.get("P", 1))
    given = [guarded(x) if isinstance(x, Tensor) else x for x in ins]
    outs: list[Any] = []
    for arg, made in zip(spec.outputs, op.outputs, strict=True):
        if isinstance(made, StateType):
            outs.append(next(x for x in ins if isinstance(x, CpuCache)))
            continue
        dtype = cpu.dtypes[arg.dtype]
        empty = torch.full(step.shape(made.shape), torch.nan if dtype.is_floating_point else -7, dtype=dtype)  # type: ignore[union-attr]
        outs.append(guarded(empty))
    kernel = cpu.kernel(op, step)
    space = guarded(torch.zeros(kernel.workspace_bytes, dtype=torch.uint8))  # type: ignore[union-attr]
    kernel.run(outs, given, None, space)  # type: ignore[union-attr]
    for x, copy in zip(ins, given, strict=True):
        if isinstance(x, Tensor):
            assert torch.equal(x.nan_to_num(), copy.nan_to_num())
    return tuple(outs)
