"""From kernels written in `m31_cpu.lang` to machine code, and the cache of what was compiled.

A kernel is compiled when it is first bound on a machine, and its object code is kept in `<cache>/m31/cpu`. The name of
a file says all that its contents depend on: the sources of this package, LLVM, the processor that it was made for and
the kernel. Numba's own cache is not used: it goes by the time of one source file, and returned what an older version of
a helper module had compiled to.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import llvmlite
import llvmlite.binding as llvm
from llvmlite import ir

from m31.errors import ConfigError
from m31_cpu.isa import Isa
from m31_cpu.lang import F32, I64, PTR, VOID, Fn, Val

_FIELD = {str(I64): 8, str(PTR): 8, str(F32): 8}  # every field takes eight bytes


class Fields:
    """The fields of a record as values, by name."""

    def __init__(self, values: Mapping[str, Val]) -> None:
        self.__dict__.update(values)

    def __getattr__(self, name: str) -> Val:  # for type checkers: all of them are set above
        raise AttributeError(name)


@dataclass(frozen=True)
class Native:
    """A kernel.

    Args:
        name: says which code this is, all its parameters included: one name, one code.
        fields: name -> LLVM type (int64, float32 or pointer) of what a record gives it.
        emit: `emit(kernel, fields)` writes its body.
    """

    name: str
    fields: Mapping[str, Any]
    emit: Callable[[Kernel, Any], None] = field(repr=False, compare=False)

    def __hash__(self) -> int:
        return hash(self.name)

    def write(self, module: Any, isa: Isa) -> None:
        """Write its function into a module."""
        Kernel(module, self, isa)


class Kernel(Fn):
    """The function of a kernel while it is written: `void(record, thread, threads, counter)`.

    Attributes:
        isa: what it is compiled for.
        thread, threads: which of how many runs it.
    """

    def __init__(self, module: Any, native: Native, isa: Isa) -> None:
        super().__init__(module, native.name, VOID, (PTR, I64, I64, PTR))
        self.isa = isa
        self.record, self.thread, self.threads, self.counter = self.given
        values = {}
        for at, (name, kind) in enumerate(native.fields.items()):
            values[name] = self.load(kind, self.record, 8 * at, align=8)
        native.emit(self, Fields(values))
        self.done()

    def tasks(self, count: Val) -> Any:
        """`for task in k.tasks(n)`: tasks 0 to n-1, shared with the other threads: whoever is free takes the next."""
        task = self.var(self.atomic("add", self.counter, 1, "monotonic"))
        for _ in self.repeat(lambda: task.get() < count):
            yield task.get()
            task.set(self.atomic("add", self.counter, 1, "monotonic"))


def cache_folder(environ: Mapping[str, str] | None = None) -> Path:
    """Where object code is kept: `M31_CACHE`, else `XDG_CACHE_HOME` or `~/.cache`, and `m31/cpu` in it."""
    environ = os.environ if environ is None else environ
    own = environ.get("M31_CACHE")
    if own:
        return Path(own).expanduser() / "cpu"
    base = environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "m31" / "cpu"


@cache
def _sources() -> str:
    """A digest of this package's code: a change anywhere compiles everything again."""
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


@cache
def _started() -> None:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()


@cache
def _machine(isa: Isa) -> Any:
    _started()
    target = llvm.Target.from_default_triple()
    return target.create_target_machine(cpu=isa.cpu, features=isa.features, opt=2, reloc="pic", codemodel="default")


def key(name: str, isa: Isa) -> str:
    """The name under which object code is kept."""
    parts = (
        _sources(),
        llvmlite.__version__,
        ".".join(map(str, llvm.llvm_version_info)),
        llvm.get_default_triple(),
        isa.name,
        isa.cpu,
        isa.features,
        name,
    )
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=16).hexdigest()


Write = Callable[[Any, Isa], None]  # writes functions into a module


def module_of(name: str, write: Write, isa: Isa, triple: str) -> Any:
    """LLVM IR as it is written, not yet optimised."""
    module = ir.Module(name=name)
    module.triple = triple
    write(module, isa)
    return module


def optimised(module: Any, machine: Any) -> Any:
    """Parsed, verified and optimised."""
    parsed = llvm.parse_assembly(str(module))
    parsed.verify()
    options = llvm.create_pipeline_tuning_options(speed_level=2)
    options.loop_vectorization = options.slp_vectorization = False  # vectors are written by hand
    options.loop_unrolling = False
    llvm.create_pass_builder(machine, options).getModulePassManager().run(
        parsed, llvm.create_pass_builder(machine, options)
    )
    return parsed


class Library:
    """The machine code of kernels in this process, for one instruction set.

    Args:
        isa: what for.
        folder: where object code is kept; None is `cache_folder()`.
        report: told the name of each kernel that has to be compiled, before it is.
    """

    def __init__(self, isa: Isa, folder: Path | None = None, report: Callable[[str], None] | None = None) -> None:
        self.isa, self.folder, self.report = isa, folder or cache_folder(), report
        self._addresses: dict[str, int] = {}
        self._engines: list[Any] = []  # they hold the code

    def address(self, native: Native) -> int:
        """Where the kernel's code is."""
        found = self._addresses.get(native.name)
        if found is None:
            engine = self.load(native.name, lambda module, isa: native.write(module, isa))
            found = self._addresses[native.name] = int(engine.get_function_address(native.name))
        return found

    def load(self, name: str, write: Write) -> Any:
        """The engine that holds what `write` writes, from the cache or compiled now."""
        path = self.folder / f"{key(name, self.isa)}.o"
        try:
            code = path.read_bytes()
        except OSError:
            code = b""
        if not _whole(code):
            code = self._compiled(name, write)
            _keep(path, code)
        engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), _fresh(self.isa))
        engine.add_object_file(llvm.ObjectFileRef.from_data(code[_HEAD:]))
        engine.finalize_object()
        self._engines.append(engine)
        return engine

    def _compiled(self, name: str, write: Write) -> bytes:
        if self.report is not None:
            self.report(name)
        machine = _machine(self.isa)
        code = machine.emit_object(optimised(module_of(name, write, self.isa, machine.triple), machine))
        return hashlib.blake2b(code, digest_size=_HEAD).digest() + bytes(code)


_HEAD = 16  # bytes in front of the object code: its digest, so that a file that is not whole is compiled again


def _whole(code: bytes) -> bool:
    return len(code) > _HEAD and hashlib.blake2b(code[_HEAD:], digest_size=_HEAD).digest() == code[:_HEAD]


def _keep(path: Path, code: bytes) -> None:
    """Write a file at once or not at all; a cache that cannot be written is no error: the code is there anyway."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, draft = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".tmp")
    except OSError:
        return
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(code)
        os.replace(draft, path)
    except OSError:
        Path(draft).unlink(missing_ok=True)


def _fresh(isa: Isa) -> Any:
    """An engine takes its target machine over: each has its own."""
    _started()
    target = llvm.Target.from_default_triple()
    return target.create_target_machine(cpu=isa.cpu, features=isa.features, opt=2, jit=True)


def packed(native: Native, values: Mapping[str, int | float]) -> Any:
    """A record for a kernel: its fields in order, eight bytes each.

    Raises:
        ConfigError: a field is missing, or there is one too many.
    """
    if values.keys() != native.fields.keys():
        raise ConfigError(
            f"{native.name} takes {sorted(native.fields)}, and was given {sorted(values)}", where="backend cpu"
        )
    record = (ctypes.c_int64 * len(native.fields))()
    for at, (name, kind) in enumerate(native.fields.items()):
        value = values[name]
        if kind == F32:
            ctypes.cast(ctypes.byref(record, 8 * at), ctypes.POINTER(ctypes.c_float))[0] = value
        else:
            record[at] = int(value)
    return record
