"""Threads that stay inside native code, and the program that they run together.

A program is a row of entries (kernel, record, whether to meet afterwards). `Crew.run` hands one to all threads, the
caller among them; each goes through the entries in order, takes tasks of a kernel while there are any, and waits for
the others where an entry says so. Between programs threads spin for some microseconds and then sleep. A forked child
inherits none of them and makes its own when it first runs something.
"""

from __future__ import annotations

import ctypes
import os
import platform
import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llvmlite import ir

from m31.errors import ConfigError
from m31.sdk import this_machine
from m31_cpu.isa import Isa
from m31_cpu.lang import I32, I64, PTR, VOID, Fn, Val
from m31_cpu.native import Library

VARIABLE = "M31_NUM_THREADS"
MOST = 1024

# The state, in bytes: what threads write lies on cache lines of its own.
_EPOCH, _ARRIVED, _MEETING, _SLEEPERS = 0, 64, 128, 192
_PROGRAM, _COUNT, _THREADS, _STOP = 256, 264, 272, 280
_MUTEX, _CONDITION = 320, 448  # room for pthread types of any platform
_STATE = 576
# An entry of a program, in bytes.
ENTRY = 128
_KERNEL, _RECORD, _MEET, _COUNTER = 0, 8, 16, 64
_SPINS_IDLE, _SPINS_MEETING = 20_000, 4_000  # turns before a thread sleeps, or yields its processor


def thread_count(environ: Mapping[str, str] | None = None) -> int:
    """`M31_NUM_THREADS`, or as many as the scheduler and the control group let this process use.

    Raises:
        ConfigError: the variable is not a number from 1 to 1024.
    """
    text = (os.environ if environ is None else environ).get(VARIABLE)
    if text is None:
        return this_machine().cpu.cores
    if not (text.isascii() and text.isdecimal()) or not 1 <= int(text) <= MOST:
        raise ConfigError(
            f"{VARIABLE} is {text!r}",
            where="environment",
            expected=f"a number from 1 to {MOST}",
            fix=f"unset {VARIABLE} to use what the machine grants",
        )
    return int(text)


# --- native code ---


def write(module: Any, isa: Isa) -> None:
    """`m31_run(state, program, count)` for the caller, `m31_work(state, thread)` for every other thread."""
    execute = _execute(module)
    _run(module, execute)
    _work(module, execute)
    start = Fn(module, "m31_start", VOID, (PTR,))
    (state,) = start.given
    none = start.const(I64, 0).v
    null = Val(start, start.b.inttoptr(none, PTR))
    start.call("pthread_mutex_init", I32, state + _MUTEX, null)
    start.call("pthread_cond_init", I32, state + _CONDITION, null)
    start.done()


def _pause(k: Fn) -> None:
    machine = platform.machine()
    if machine in ("x86_64", "AMD64"):
        k.call("llvm.x86.sse2.pause", VOID)
    elif machine in ("aarch64", "arm64"):
        k.call("llvm.aarch64.hint", VOID, k.i32(1))


def _meet(k: Fn, state: Val, threads: Val) -> None:
    """Wait until all threads are here."""
    meeting = k.load_atomic(state, _MEETING)
    before = k.atomic("add", state + _ARRIVED, 1, "acq_rel")
    last = before.eq(threads - 1)
    with k.when(last):
        k.store_atomic(k.i64(0), state, _ARRIVED, "monotonic")
        k.store_atomic(meeting + 1, state, _MEETING)
    with k.unless(last):
        turns = k.var(k.i64(0))
        for _ in k.repeat(lambda: k.load_atomic(state, _MEETING).eq(meeting)):
            turns.add(1)
            _pause(k)
            with k.when(turns.get() > _SPINS_MEETING):  # somebody else has that thread's processor
                k.call("sched_yield", I32)


def _execute(module: Any) -> Any:
    k = Fn(module, "m31_execute", VOID, (PTR, I64))
    state, thread = k.given
    program, count = k.load(PTR, state, _PROGRAM), k.load(I64, state, _COUNT)
    threads = k.load(I64, state, _THREADS)
    signature = ir.FunctionType(VOID, (PTR, I64, I64, PTR))
    for i in k.range(count):
        entry = program + i * ENTRY
        kernel = k.b.inttoptr(k.load(I64, entry, _KERNEL).v, signature.as_pointer())
        record, counter = k.load(PTR, entry, _RECORD), entry + _COUNTER
        k.b.call(kernel, [record.v, thread.v, threads.v, counter.v])
        with k.when(k.load(I64, entry, _MEET).ne(0)):
            _meet(k, state, threads)
    k.done()
    return k.function


def _run(module: Any, execute: Any) -> None:
    k = Fn(module, "m31_run", VOID, (PTR, PTR, I64))
    state, program, count = k.given
    for i in k.range(count):
        k.store(k.i64(0), program + i * ENTRY, _COUNTER)
    k.store(program, state, _PROGRAM)
    k.store(count, state, _COUNT)
    k.atomic("add", state + _EPOCH, 1)
    with k.when(k.load_atomic(state, _SLEEPERS, "seq_cst").ne(0)):
        _wake(k, state)
    k.b.call(execute, [state.v, k.i64(0).v])
    k.done()
    stop = Fn(module, "m31_stop", VOID, (PTR,))
    (state,) = stop.given
    stop.store_atomic(stop.i64(1), state, _STOP)
    stop.atomic("add", state + _EPOCH, 1)
    _wake(stop, state)
    stop.done()


def _wake(k: Fn, state: Val) -> None:
    k.call("pthread_mutex_lock", I32, state + _MUTEX)
    k.call("pthread_cond_broadcast", I32, state + _CONDITION)
    k.call("pthread_mutex_unlock", I32, state + _MUTEX)


def _work(module: Any, execute: Any) -> None:
    k = Fn(module, "m31_work", VOID, (PTR, I64))
    state, thread = k.given
    seen, turns = k.var(k.i64(0)), k.var(k.i64(0))

    def idle() -> Val:
        return k.load_atomic(state, _EPOCH, "seq_cst").eq(seen.get())

    for _ in k.repeat(lambda: k.load_atomic(state, _STOP).eq(0)):
        turns.set(k.i64(0))
        for _ in k.repeat(lambda: idle() & (turns.get() < _SPINS_IDLE)):
            turns.add(1)
            _pause(k)
        with k.when(idle()):
            k.call("pthread_mutex_lock", I32, state + _MUTEX)
            k.atomic("add", state + _SLEEPERS, 1)
            for _ in k.repeat(idle):
                k.call("pthread_cond_wait", I32, state + _CONDITION, state + _MUTEX)
            k.atomic("sub", state + _SLEEPERS, 1)
            k.call("pthread_mutex_unlock", I32, state + _MUTEX)
        seen.set(k.load_atomic(state, _EPOCH, "seq_cst"))
        with k.when(k.load_atomic(state, _STOP).eq(0)):
            k.b.call(execute, [state.v, thread.v])
    k.done()


# --- programs ---


@dataclass(frozen=True, eq=False)
class Program:
    """Entries in memory, and what they point at.

    Args:
        entries: as the native code reads them.
        count: how many.
        held: records, buffers and whatever else must live as long.
    """

    entries: ctypes.Array[ctypes.c_char]
    count: int
    held: Sequence[Any]

    @classmethod
    def of(cls, rows: Sequence[tuple[int, Any, bool]]) -> Program:
        """Of (address of the kernel, its record, whether threads meet afterwards)."""
        entries = (ctypes.c_char * (ENTRY * len(rows) + 64))()
        base = aligned(entries)
        for at, (kernel, record, meet) in enumerate(rows):
            words = (ctypes.c_int64 * 3).from_address(base + at * ENTRY)
            words[:] = [kernel, ctypes.addressof(record), int(meet)]
        return cls(entries, len(rows), [record for _, record, _ in rows])


def aligned(buffer: Any) -> int:
    """The first address in a buffer that begins a cache line."""
    return -(-ctypes.addressof(buffer) // 64) * 64


_assembling = threading.Lock()  # held while a crew makes its threads: callers that come meanwhile take the same ones


def _forked() -> None:
    global _assembling
    _assembling = threading.Lock()  # who held it has not come along


os.register_at_fork(after_in_child=_forked)


class Crew:
    """`count` threads, the caller of `run` among them. One program at a time; another caller waits.

    Args:
        count: threads.
        library: gives the native code.
    """

    def __init__(self, count: int, library: Library) -> None:
        self.count, self.library = count, library
        self._process = -1
        self._lock = threading.Lock()

    def run(self, program: Program) -> None:
        """Run a program to its end. The GIL is not held meanwhile."""
        if self._process != os.getpid():
            with _assembling:
                if self._process != os.getpid():
                    self._assemble()
        with self._lock:
            self._run(self._state, aligned(program.entries), program.count)

    def _assemble(self) -> None:
        """Threads of this process; what a parent had is not ours."""
        self._lock = threading.Lock()
        engine = self.library.load("crew", write)
        call = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
        start, stop = (call(engine.get_function_address(f"m31_{name}")) for name in ("start", "stop"))
        work = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64)(engine.get_function_address("m31_work"))
        run = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)
        self._run = run(engine.get_function_address("m31_run"))
        room = (ctypes.c_char * (_STATE + 64))()
        self._state = aligned(room)
        ctypes.c_int64.from_address(self._state + _THREADS).value = self.count
        start(self._state)
        members = [
            threading.Thread(
                target=_member, args=(work, self._state, i, (room, engine)), name=f"m31-cpu-{i}", daemon=True
            )
            for i in range(1, self.count)
        ]
        for member in members:
            member.start()
        self._process = os.getpid()
        self._held = (room, engine)
        weakref.finalize(self, _dismiss, stop, self._state, (room, engine), os.getpid())


def _member(work: Any, state: int, thread: int, held: object) -> None:
    """A thread's life; it holds the memory that it waits on and the code that it runs."""
    work(state, thread)


def _dismiss(stop: Any, state: int, held: object, process: int) -> None:
    if os.getpid() == process:
        stop(state)
