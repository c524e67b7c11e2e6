"""Compiling kernels for devices that are not there, and judging the code.

A compilation that succeeds proves little: Triton turns what it cannot map onto a matrix unit into something slower
without a word, compiles kernels whose shared memory no device has, and replaces the body of one that overflows the
tensor memory by a trap. So each `KernelSpec` says which instructions must and must not occur on each target, and
`build` checks those, the resources, and that the code is there at all.

What is compiled is what the launch functions launch: a spec calls one of them with tensors that have no memory, and
the resulting launch is specialised as it would be on the device.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import MockTensor

from m31_triton.errors import CodeRejected
from m31_triton.interpreter import ONE_AT_A_TIME
from m31_triton.launch import Launch, Runner


@dataclass(frozen=True, kw_only=True)
class Target:
    """A device to compile for, and what it has.

    Args:
        name: as manifests write it.
        gpu: Triton's own name for it.
        shared: bytes of shared memory that one program may use.
        columns: of tensor memory; 0 where there is none.
    """

    name: str
    gpu: GPUTarget
    shared: int
    columns: int


TARGETS: dict[str, Target] = {
    target.name: target
    for target in (
        Target(name="sm_90", gpu=GPUTarget("cuda", 90, 32), shared=232_448, columns=0),
        Target(name="sm_100", gpu=GPUTarget("cuda", 100, 32), shared=232_448, columns=512),
        # The shared memory of sm_107 is not published; that of sm_100 is the safe assumption.
        Target(name="sm_107", gpu=GPUTarget("cuda", 107, 32), shared=232_448, columns=576),
        Target(name="gfx950", gpu=GPUTarget("hip", "gfx950", 64), shared=163_840, columns=0),
    )
}


@dataclass(frozen=True, kw_only=True)
class KernelSpec:
    """One kernel as it is launched somewhere, and what its code must look like.

    Args:
        name: unique.
        kernel: the name of the kernel.
        launch: calls a `launch_*` function with the given runner, on meta tensors; it may launch others beside.
        must, must_not: regular expressions by target name.
    """

    name: str
    kernel: str
    launch: Callable[[Runner], None]
    must: Mapping[str, tuple[str, ...]]
    must_not: Mapping[str, tuple[str, ...]]


@dataclass(frozen=True, kw_only=True)
class Code:
    """What a compilation produced.

    Args:
        text: assembly, PTX or AMDGCN.
        binary: the loadable object.
        shared: bytes of shared memory; columns: of tensor memory.
        scratch: bytes of a thread's private memory, which is where registers spill to.
    """

    text: str
    binary: bytes
    shared: int
    columns: int
    scratch: int


def launch_of(spec: KernelSpec) -> Launch:
    """The one launch that a spec stands for."""
    seen: list[Launch] = []
    spec.launch(seen.append)
    mine = [launch for launch in seen if launch.name == spec.kernel]
    if len(mine) != 1:
        raise CodeRejected(f"{len(mine)} launches of {spec.kernel}", where=f"kernel spec '{spec.name}'", expected="one")
    return mine[0]


def compile_launch(launch: Launch, target: Target) -> Code:
    """Compile a launch for a target, specialised on its arguments as the device's own compilation would be.

    Raises:
        CodeRejected: Triton or an assembler refused the kernel.
    """
    arguments = {
        name: MockTensor.wrap_dtype(value.dtype) if isinstance(value, Tensor) else value
        for name, value in launch.arguments.items()
    }
    with ONE_AT_A_TIME, _pretend(target), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about defaults of the compiler; launches give theirs
        try:
            kernel = launch.kernel.warmup(grid=launch.grid, **arguments, **launch.options)
        except Exception as error:
            raise CodeRejected(
                f"does not compile: {type(error).__name__}: {str(error).strip()[-400:]}",
                where=f"kernel {launch.name} for {target.name}",
            ) from error
    ptx = "ptx" in kernel.asm
    text, binary = (kernel.asm["ptx"], kernel.asm["cubin"]) if ptx else (kernel.asm["amdgcn"], kernel.asm["hsaco"])
    return Code(
        text=text,
        binary=binary,
        shared=kernel.metadata.shared,
        columns=getattr(kernel.metadata, "tmem_size", 0) or 0,
        scratch=_stack(binary) if ptx else _number(r"\.private_segment_fixed_size:\s*(\d+)", text),
    )


@contextmanager
def _pretend(target: Target) -> Iterator[None]:
    """Make Triton believe that the current device is `target`."""
    before = driver._active
    driver.set_active(_Pretended(target.gpu))
    try:
        yield
    finally:
        driver._active = before


class _Pretended:
    """As much of a driver as compiling needs."""

    def __init__(self, gpu: GPUTarget) -> None:
        self._gpu = gpu

    def get_current_device(self) -> tuple[str, Any]:
        """Key of Triton's cache of compiled kernels: one per target."""
        return self._gpu.backend, self._gpu.arch

    def get_current_stream(self, device: Any) -> int:
        """Nothing is enqueued."""
        return 0

    def get_current_target(self) -> GPUTarget:
        """The device that is not there."""
        return self._gpu


def _stack(cubin: bytes) -> int:
    """Bytes of stack and local memory of the one function in a binary."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    return _number(r"STACK:(\d+)", text) + _number(r"LOCAL:(\d+)", text)


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    if found is None:
        raise CodeRejected("the compiler's report has changed", where=pattern, expected="a number")
    return int(found.group(1))


def faults(spec: KernelSpec, target: Target, code: Code) -> list[str]:
    """Everything that is wrong with the code, in words; empty if nothing is."""
    found = [f"lacks {p}" for p in spec.must.get(target.name, ()) if not re.search(p, code.text)]
    found += [f"has {p}" for p in spec.must_not.get(target.name, ()) if re.search(p, code.text)]
    if re.search(r"\b(?:trap;|s_trap)", code.text):
        found.append("traps: it needs more tensor memory than there is, or asserts")
    if code.shared > target.shared:
        found.append(f"needs {code.shared} bytes of shared memory of {target.shared}")
    if code.columns > target.columns:
        found.append(f"needs {code.columns} columns of tensor memory of {target.columns}")
    if code.scratch:
        found.append(f"spills {code.scratch} bytes per thread")
    return found


def build(spec: KernelSpec, target: Target) -> Code:
    """Compile a spec for a target and check the code.

    Raises:
        CodeRejected: it does not compile, or the code is not what the spec says.
    """
    if target.name not in spec.must:
        raise CodeRejected("nothing is expected of the code", where=f"kernel spec '{spec.name}' for {target.name}")
    code = compile_launch(launch_of(spec), target)
    if found := faults(spec, target, code):
        raise CodeRejected(
            "; ".join(found), where=f"kernel spec '{spec.name}' for {target.name}", expected="code as the spec says"
        )
    return code
