"""The CPU backend's kernel language, object cache, threads and programs."""

from __future__ import annotations

import ctypes
import itertools
import math
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from m31.errors import ConfigError
from m31.sdk import this_machine
from m31_cpu import native, simd
from m31_cpu.crew import Crew, Program
from m31_cpu.isa import Isa, choose
from m31_cpu.lang import F32, I64, PTR, vec
from m31_cpu.native import Library, Native, key, packed
from m31_cpu.program import Sizes, Work, meetings


def isas() -> list[Isa]:
    """What runs here: the best, and the portable one."""
    flags = this_machine().cpu.flags
    return [choose(flags, environ)[0] for environ in ({}, {"M31_CPU_ISA": "portable"})]


each_isa = pytest.mark.parametrize("isa", isas(), ids=lambda isa: isa.name)


def once(isa: Isa, folder: Path, kernel: Native, threads: int = 1, **values: Any) -> None:
    """Run one kernel."""
    library = Library(isa, folder)
    given = {name: value.ctypes.data if isinstance(value, np.ndarray) else value for name, value in values.items()}
    Crew(threads, library).run(Program.of([(library.address(kernel), packed(kernel, given), True)]))


# --- arithmetic ---


def _unary(name: str, compute: Any) -> Native:
    def emit(k: Any, a: Any) -> None:
        for lanes, i in simd.strips(k, a.n):
            simd.store_f32(k, compute(k, simd.load_f32(k, a.x, i, lanes)), a.y, i)

    return Native(name, {"x": PTR, "y": PTR, "n": I64}, emit)


EXP = _unary("test_exp", simd.exp)
SIGMOID = _unary("test_sigmoid", simd.sigmoid)
BF16 = _unary("test_bf16", lambda k, x: simd.wide(simd.narrow(k, x)))


@each_isa
def test_the_exponential_is_right_everywhere(isa: Isa, tmp_path: Path) -> None:
    x = np.concatenate([np.linspace(-87.3, 88.3, 20_011), [0.0, -0.0, 1e-30, -1e-30]]).astype(np.float32)
    y = np.empty_like(x)
    once(isa, tmp_path, EXP, x=x, y=y, n=len(x))
    exact = np.exp(x.astype(np.float64))
    assert float(np.max(np.abs(y - exact) / exact)) < 3e-7
    x = np.array([-math.inf, -1e4, -88.0, math.nan], np.float32)
    y = np.empty_like(x)
    once(isa, tmp_path, EXP, x=x, y=y, n=len(x))
    assert y[:3].tolist() == [0.0, 0.0, 0.0]
    assert math.isnan(y[3])


@each_isa
def test_the_sigmoid_saturates_and_keeps_nan(isa: Isa, tmp_path: Path) -> None:
    x = np.array([-math.inf, -200.0, -3.0, 0.0, 3.0, 200.0, math.inf, math.nan], np.float32)
    y = np.empty_like(x)
    once(isa, tmp_path, SIGMOID, x=x, y=y, n=len(x))
    assert y[[0, 1]].max() < 1e-37
    assert y[3] == 0.5
    np.testing.assert_allclose(y[[2, 4]], 1 / (1 + np.exp([3.0, -3.0])), rtol=1e-6)
    assert (y[[5, 6]] == 1.0).all()
    assert math.isnan(y[7])


@each_isa
def test_bfloat16_is_rounded_as_torch_rounds_it(isa: Isa, tmp_path: Path) -> None:
    import torch

    rng = np.random.default_rng(5)
    bits = rng.integers(0, 2**32, 40_003, dtype=np.uint64).astype(np.uint32)
    special = np.array(
        [0x7F800000, 0xFF800000, 0x7FFFFFFF, 0x7F800001, 0x3F808000, 0x3F818000, 0x7F7FFFFF, 1], np.uint32
    )
    x = np.concatenate([bits, special]).view(np.float32)
    y = np.empty_like(x)
    once(isa, tmp_path, BF16, x=x, y=y, n=len(x))
    want = torch.from_numpy(x).bfloat16().float().numpy()
    same = (y.view(np.uint32) == want.view(np.uint32)) | (np.isnan(x) & np.isnan(y))
    assert same.all(), x[~same][:5]


def _sums(k: Any, a: Any) -> None:
    value = simd.load_f32(k, a.x, k.i64(0), k.isa.lanes)
    k.store(simd.total(value), a.y)
    k.store(simd.greatest(k, value), a.y, 4)


@each_isa
def test_lanes_are_summed(isa: Isa, tmp_path: Path) -> None:
    x, y = np.arange(1, isa.lanes + 1, dtype=np.float32), np.zeros(2, np.float32)
    once(isa, tmp_path, Native("test_sums", {"x": PTR, "y": PTR}, _sums), x=x, y=y)
    assert y.tolist() == [x.sum(), x.max()]


def _control(k: Any, a: Any) -> None:
    total = k.var(k.i64(0))
    for i in k.range(2, a.n, 3):
        with k.when((i % 2).eq(0)):
            total.add(i)
        with k.unless((i % 2).eq(0)):
            total.add(i * 1000)
    turns = k.var(k.i64(0))
    for _ in k.repeat(lambda: turns.get() * turns.get() < a.n):
        turns.add(1)
    k.store(total.get(), a.out)
    k.store(turns.get(), a.out, 8)
    k.store(k.min(k.i64(-3), -2) - (k.i64(-16).sar(2)), a.out, 16)


@given(n=st.integers(0, 60))
@settings(max_examples=15, deadline=None)
def test_loops_and_conditions(n: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    out = np.zeros(3, np.int64)
    folder = tmp_path_factory.getbasetemp() / "control"
    once(isas()[0], folder, Native("test_control", {"n": I64, "out": PTR}, _control), n=n, out=out)
    want = sum(i if i % 2 == 0 else 1000 * i for i in range(2, n, 3))
    assert out.tolist() == [want, math.ceil(math.sqrt(n)), 1]


def test_a_record_says_what_is_missing() -> None:
    kernel = Native("test_record", {"x": PTR, "scale": F32}, lambda k, a: None)
    with pytest.raises(ConfigError, match="test_record takes"):
        packed(kernel, {"x": 1})
    record = packed(kernel, {"x": 7, "scale": 0.5})
    assert record[0] == 7
    assert ctypes.cast(ctypes.byref(record, 8), ctypes.POINTER(ctypes.c_float))[0] == 0.5


# --- the cache of object code ---


def _three(k: Any, a: Any) -> None:
    k.store(k.i64(3), a.out)


THREE = Native("test_three", {"out": PTR}, _three)


def _told(folder: Path) -> tuple[list[str], np.ndarray[Any, Any]]:
    """Names of what had to be compiled, and what came out."""
    told: list[str] = []
    library = Library(isas()[0], folder, told.append)
    out = np.zeros(1, np.int64)
    Crew(1, library).run(Program.of([(library.address(THREE), packed(THREE, {"out": out.ctypes.data}), True)]))
    return told, out


def test_code_is_compiled_once_for_a_machine(tmp_path: Path) -> None:
    assert _told(tmp_path)[0] == ["test_three", "crew"]
    told, out = _told(tmp_path)
    assert (told, out.tolist()) == ([], [3])
    assert not list(tmp_path.glob("*.tmp"))


@pytest.mark.parametrize("damage", [b"", b"short", None])
def test_damaged_code_is_never_run(tmp_path: Path, damage: bytes | None) -> None:
    """BUG-class: a cache that was cut off, or that something else wrote, is compiled again and replaced."""
    _told(tmp_path)
    files = sorted(tmp_path.glob("*.o"))
    for path in files:
        whole = bytearray(path.read_bytes())
        if damage is None:
            whole[-1] ^= 1
        path.write_bytes(bytes(whole) if damage is None else damage)
    assert sorted(_told(tmp_path)[0]) == ["crew", "test_three"]
    assert _told(tmp_path)[0] == []


def test_a_changed_source_is_compiled_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever file of the package it is in: numba's cache looked at one of them and returned stale code."""
    isa = isas()[0]
    before = key("test_three", isa)
    monkeypatch.setattr(native, "_sources", lambda: "another")
    assert key("test_three", isa) != before
    monkeypatch.undo()
    folder = tmp_path / "package"
    folder.mkdir()
    for name in ("a.py", "b.py"):
        (folder / name).write_text("x = 1")
    monkeypatch.setattr(native, "__file__", str(folder / "a.py"))
    native._sources.cache_clear()
    first = native._sources()
    (folder / "b.py").write_text("x = 2")
    native._sources.cache_clear()
    assert native._sources() != first
    native._sources.cache_clear()


def test_a_cache_that_cannot_be_written_costs_only_time(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("no folder")
    told, out = _told(blocked)
    assert (told, out.tolist()) == (["test_three", "crew"], [3])


def test_the_cache_lies_where_the_variables_say() -> None:
    assert native.cache_folder({"M31_CACHE": "/a"}) == Path("/a/cpu")
    assert native.cache_folder({"XDG_CACHE_HOME": "/b"}) == Path("/b/m31/cpu")
    assert native.cache_folder({}) == Path.home() / ".cache/m31/cpu"


# --- threads ---


def _square(k: Any, a: Any) -> None:
    for task in k.tasks(a.n):
        k.store(k.load(I64, a.x, task * 8) * 3 + 1, a.y, task * 8)


SQUARE = Native("test_square", {"x": PTR, "y": PTR, "n": I64}, _square)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_every_task_is_done_once_and_in_order(tmp_path: Path, threads: int) -> None:
    """A chain of kernels, each of which reads what the one before wrote; more threads than processors, many times."""
    library = Library(isas()[0], tmp_path)
    crew = Crew(threads, library)
    buffers = [np.zeros(97, np.int64) for _ in range(40)]
    pairs = list(itertools.pairwise(buffers))
    address = library.address(SQUARE)
    rows = [(address, packed(SQUARE, {"x": x.ctypes.data, "y": y.ctypes.data, "n": 97}), True) for x, y in pairs]
    program = Program.of(rows)
    for seed in range(30):
        buffers[0][:] = np.arange(97) + seed
        crew.run(program)
        want = buffers[0].copy()
        for _ in pairs:
            want = want * 3 + 1
        np.testing.assert_array_equal(buffers[-1], want)


def test_callers_wait_for_each_other(tmp_path: Path) -> None:
    library = Library(isas()[0], tmp_path)
    crew = Crew(2, library)
    address = library.address(SQUARE)
    wrong: list[int] = []

    def work(seed: int) -> None:
        x, y = np.arange(64) + seed, np.zeros(64, np.int64)
        record = packed(SQUARE, {"x": x.ctypes.data, "y": y.ctypes.data, "n": 64})
        program = Program.of([(address, record, True)])
        for _ in range(50):
            y[:] = 0
            crew.run(program)
            if (y != x * 3 + 1).any():
                wrong.append(seed)

    callers = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not wrong


def test_callers_of_a_new_crew_find_the_same_threads(tmp_path: Path) -> None:
    """The first of them makes the threads; whoever comes meanwhile waits."""
    again, made = threading.Event(), []

    class Watched(Library):
        def load(self, name: str, write: Any) -> Any:
            if name == "crew":
                made.append(name)
                if len(made) > 1:
                    again.set()
                again.wait(0.2)  # time for another caller to come here as well
            return super().load(name, write)

    library = Watched(isas()[0], tmp_path)
    crew, address, outs = Crew(2, library), library.address(THREE), [np.zeros(1, np.int64) for _ in range(3)]
    programs = [Program.of([(address, packed(THREE, {"out": out.ctypes.data}), True)]) for out in outs]
    callers = [threading.Thread(target=crew.run, args=(program,)) for program in programs]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert made == ["crew"]
    assert [int(out[0]) for out in outs] == [3, 3, 3]


def test_a_forked_child_makes_its_own_threads(tmp_path: Path) -> None:
    library = Library(isas()[0], tmp_path)
    crew = Crew(2, library)
    x, y = np.arange(64), np.zeros(64, np.int64)
    program = Program.of(
        [(library.address(SQUARE), packed(SQUARE, {"x": x.ctypes.data, "y": y.ctypes.data, "n": 64}), True)]
    )
    crew.run(program)
    child = os.fork()
    if child == 0:  # no assertion here: it would run the rest of the tests in the child
        y[:] = 0
        crew.run(program)
        os._exit(0 if (y == x * 3 + 1).all() else 1)
    assert os.waitpid(child, 0)[1] == 0
    crew.run(program)


def test_threads_end_with_their_crew(tmp_path: Path) -> None:
    """And not before they have left the native code, which is freed with the last that holds it."""
    for _ in range(20):
        others = set(threading.enumerate())
        crew = Crew(3, Library(isas()[0], tmp_path))
        out = np.zeros(1, np.int64)
        crew.run(Program.of([(crew.library.address(THREE), packed(THREE, {"out": out.ctypes.data}), True)]))
        members = {t for t in threading.enumerate() if t.name.startswith("m31-cpu-")} - others
        assert len(members) == 2
        del crew
        for member in members:
            member.join(20)
            assert not member.is_alive()


# --- where threads meet ---


def _touching(*pairs: tuple[str, str]) -> list[bool]:
    places = {name: (ord(name), ord(name) + 1) for name in "abcdefgh"}
    works = [
        Work(THREE, {}, tuple(places[c] for c in reads), tuple(places[c] for c in writes)) for reads, writes in pairs
    ]
    return meetings(works)


def test_threads_meet_only_where_one_needs_what_another_wrote() -> None:
    assert _touching(("a", "b"), ("a", "c"), ("a", "d")) == [False, False, True]  # three projections of one input
    assert _touching(("a", "b"), ("b", "c")) == [True, True]  # a value that is read
    assert _touching(("a", "b"), ("c", "a")) == [True, True]  # a buffer that is used again
    assert _touching(("a", "b"), ("c", "b")) == [True, True]  # two writers
    assert _touching(("a", "b"), ("c", "d"), ("b", "e"), ("d", "f"), ("e", "g")) == [False, True, False, True, True]
    assert _touching() == []


def test_sizes_have_addresses() -> None:
    sizes = Sizes()
    sizes.set({"T": 5, "S+1": 3})
    read = {dim: ctypes.c_int64.from_address(sizes.at(dim)).value for dim in ("T", "S+1", 12)}
    assert read == {"T": 5, "S+1": 3, 12: 12}
    sizes.set({"T": 6})
    assert ctypes.c_int64.from_address(sizes.at("T")).value == 6
    assert vec(F32, 4).count == 4
