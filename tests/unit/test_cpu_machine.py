"""The CPU backend and the machine: memory that it must not touch, processors, threads, interrupts, forks."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from tests.support.child import child
from tests.support.expert_files import write_experts

from m31.errors import ConfigError
from m31.sdk import this_machine
from m31_cpu.isa import choose
from m31_cpu.threads import Pool, thread_count

_GUARDED = """
    import ctypes, mmap, sys
    import numpy as np
    import torch
    from pathlib import Path
    from tests.support.expert_files import write_experts
    from tests.unit.test_cpu_experts import inputs, run
    libc = ctypes.CDLL(None, use_errno=True)

    class Flush:
        # A stored part that ends where memory that nobody may touch begins, and begins where such memory ends.
        def __init__(self, part, front):
            value = part.load()
            raw = value.contiguous().view(torch.uint8).numpy().tobytes()
            size = -(-len(raw) // mmap.PAGESIZE) * mmap.PAGESIZE
            self.pages = mmap.mmap(-1, size + 2 * mmap.PAGESIZE)
            begin = mmap.PAGESIZE if front else mmap.PAGESIZE + size - len(raw)
            self.pages[begin : begin + len(raw)] = raw
            whole = torch.frombuffer(self.pages, dtype=torch.uint8)
            for page in (whole.data_ptr(), whole.data_ptr() + size + mmap.PAGESIZE):
                assert libc.mprotect(ctypes.c_void_p(page), mmap.PAGESIZE, 0) == 0
            self.value = whole[begin : begin + len(raw)].view(value.dtype).reshape(value.shape)
        def load(self):
            return self.value

    class Guarded:
        def __init__(self, tensor, front):
            self.name, self.shape, self.dtype, self.format = tensor.name, tensor.shape, tensor.dtype, tensor.format
            self.held = {r: p if "global" in r else Flush(p, front) for r, p in tensor.parts().items()}
        def parts(self):
            return self.held

    formats = dict.fromkeys(("w1", "w3", "w2"), sys.argv[2])
    for width, inner in ((80, 144), (64, 128), (16, 16)):
        file = write_experts(Path(sys.argv[1]), formats, 6, width, inner)
        for isa in sys.argv[3:]:
            for tokens in (1, 5):
                given = inputs(tokens, width)
                want = run(file, formats, given, isa=isa)
                slots = file.slots
                for front in (False, True):
                    file.slots = {slot: Guarded(t, front) for slot, t in slots.items()}
                    np.testing.assert_array_equal(run(file, formats, given, isa=isa), want)
                file.slots = slots
    print("untouched")
"""


@pytest.mark.parametrize("stored", ["nvfp4", "bfloat16"])
def test_nothing_beside_the_stored_bytes_is_read(tmp_path: Path, stored: str) -> None:
    """Every matrix lies between pages without access; a load that goes too far ends the child."""
    isas = sorted({"portable", choose(this_machine().cpu.flags, {})[0]})
    assert child(_GUARDED, str(tmp_path / "w"), stored, *isas).strip() == "untouched"


_RUN = """
    import sys, json
    import torch
    from tests.unit.test_cpu_experts import inputs, run
    from m31_cpu.isa import choose
    from m31.sdk import this_machine
    from pathlib import Path
    from tests.support.expert_files import write_experts
    formats = dict.fromkeys(("w1", "w3", "w2"), sys.argv[2])
    file = write_experts(Path(sys.argv[1]), formats, 6, 80, 144)
    isa, why = choose(this_machine().cpu.flags)
    print(json.dumps([isa, why, [run(file, formats, inputs(t, 80), isa=isa).tolist() for t in (1, 7)]]))
"""


@pytest.mark.parametrize("stored", ["nvfp4", "bfloat16"])
def test_any_processor_computes_the_same_within_the_bound(tmp_path: Path, stored: str) -> None:
    """A child that must not use more than the oldest 64-bit processor of this kind has."""
    from tests.unit.test_cpu_experts import expected, inputs

    name = {"x86_64": "x86-64", "aarch64": "generic"}[os.uname().machine]
    isa, why, got = json.loads(
        child(_RUN, str(tmp_path / "w"), stored, NUMBA_CPU_NAME=name, NUMBA_CPU_FEATURES="", M31_CPU_ISA="portable")
    )
    assert (isa, why) == ("portable", "M31_CPU_ISA asks for it")
    formats = dict.fromkeys(("w1", "w3", "w2"), stored)
    values = write_experts(tmp_path / "w", formats, 6, 80, 144).values
    for tokens, found in zip((1, 7), got, strict=True):
        want, bound = expected(values, inputs(tokens, 80))
        assert (np.abs(np.array(found) - want) <= bound).all()


def test_the_instruction_set_follows_the_processor_and_the_variable() -> None:
    full = ("avx2", "f16c", "fma", "avx512f")
    assert choose(full, {})[0] == "avx2"
    assert choose(("avx2", "fma"), {}) == ("portable", "this processor lacks f16c")
    assert choose((), {})[0] == "portable"
    assert choose(full, {"M31_CPU_ISA": "portable"})[0] == "portable"
    with pytest.raises(ConfigError, match="'avx2', and this processor lacks avx2, f16c, fma"):
        choose(("neon",), {"M31_CPU_ISA": "avx2"})
    with pytest.raises(ConfigError, match="expected avx2 or portable"):
        choose(full, {"M31_CPU_ISA": "AVX2"})


def test_threads_are_counted_by_the_variable_or_the_machine() -> None:
    assert thread_count({}) == this_machine().cpu.cores
    assert thread_count({"M31_NUM_THREADS": "7"}) == 7
    for text in ("0", "-1", "two", "", "1.5", "1025", "²"):
        with pytest.raises(ConfigError, match="M31_NUM_THREADS"):
            thread_count({"M31_NUM_THREADS": text})


def test_a_pool_survives_a_part_that_fails_and_ends_with_its_owner() -> None:
    pool, others = Pool(3), set(threading.enumerate())

    def work(part: int, parts: int) -> int:
        if part == fails:
            raise ZeroDivisionError(str(part))
        return 1 << part

    for fails in (0, 1, 2):
        with pytest.raises(ZeroDivisionError, match=str(fails)):
            pool.run(work)
    fails = -1
    assert pool.run(work) == 0b111
    workers = set(threading.enumerate()) - others
    assert len(workers) == 2
    del pool
    for thread in workers:
        thread.join(timeout=20)
        assert not thread.is_alive()


def test_an_interrupt_waits_for_the_parts_that_run() -> None:
    """Ctrl-C in the middle: nobody writes into the caller's buffers afterwards, and the pool works on."""
    pool, ended, begun = Pool(3), [], threading.Barrier(3)

    def work(part: int, parts: int) -> int:
        begun.wait(timeout=60)
        if part == 0:
            raise KeyboardInterrupt
        time.sleep(0.2)
        ended.append(part)
        return 0

    with pytest.raises(KeyboardInterrupt):
        pool.run(work)
    assert sorted(ended) == [1, 2]
    assert pool.run(lambda part, parts: 1 << part) == 0b111


def test_several_callers_take_turns() -> None:
    pool, results = Pool(2), []

    def caller(number: int) -> None:
        for _ in range(200):
            results.append(pool.run(lambda part, parts: number << (8 * part)) == number | number << 8)

    callers = [threading.Thread(target=caller, args=(n,)) for n in (1, 2, 3)]
    for thread in callers:
        thread.start()
    for thread in callers:
        thread.join()
    assert results == [True] * 600


def test_a_forked_child_has_threads_of_its_own(tmp_path: Path) -> None:
    script = """
        import os, sys
        from pathlib import Path
        import numpy as np
        from tests.support.expert_files import write_experts
        from tests.unit.test_cpu_experts import NVFP4, ATTRS, instance, inputs
        from tests.unit.test_cpu_session import session, WHOLE, STEP
        import torch
        from m31_cpu.experts import experts_kernel
        from m31_cpu.threads import Pool
        from m31_cpu.weights import expert_weights
        file = write_experts(Path(sys.argv[1]), NVFP4, 6, 80, 144)
        pool = Pool(3)
        kernel = experts_kernel(instance(file, 2, ATTRS), STEP, ("nvfp4", "nvfp4"), "portable", "test", pool)
        handle = expert_weights(file.slots, ("nvfp4", "nvfp4"))
        given = [torch.as_tensor(x) for x in inputs(1, 80)]
        def run():
            out = torch.empty(1, 80)
            kernel.run([out], given, handle, torch.empty(kernel.workspace_bytes, dtype=torch.uint8))
            return out.numpy().tobytes()
        before = run()
        reading, writing = os.pipe()
        if os.fork() == 0:
            try:
                os.write(writing, run())
            finally:
                os._exit(0)
        os.close(writing)
        with os.fdopen(reading, "rb") as answer:
            print(answer.read() == before == run())
        os.wait()
    """
    assert child(script, str(tmp_path / "w")).strip() == "True"
