"""The CPU backend and the machine: processors and threads."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import pytest

from m31.errors import ConfigError
from m31.sdk import this_machine
from m31_cpu.crew import thread_count
from m31_cpu.isa import AVX2, AVX512, choose


def test_the_instruction_set_follows_the_processor_and_the_variable() -> None:
    def name(flags: Collection[str], environ: Mapping[str, str], machine: str = "x86_64") -> str:
        return choose(flags, environ, machine)[0].name

    full = ("avx2", "f16c", "fma", "avx512f")
    assert name(full, {}) == "avx2"
    assert name(AVX512.needs | AVX2.needs, {}) == "avx512"
    assert name(("avx2", "fma"), {}) == "portable"
    assert name((), {}) == "portable"
    assert name(full, {"M31_CPU_ISA": "portable"}) == "portable"
    assert name(("asimd",), {}, "aarch64") == "neon"
    assert name(("asimd",), {}, "x86_64") == "portable"
    assert choose(("asimd",), {"M31_CPU_ISA": "portable"}, "aarch64")[0].cpu == "generic"
    with pytest.raises(ConfigError, match="'avx2', and this processor lacks avx2, f16c, fma"):
        choose(("sse2",), {"M31_CPU_ISA": "avx2"}, "x86_64")
    with pytest.raises(ConfigError, match="lacks aarch64"):
        choose(full, {"M31_CPU_ISA": "neon"}, "x86_64")
    with pytest.raises(ConfigError, match="expected avx512 or avx2 or neon or portable"):
        choose(full, {"M31_CPU_ISA": "AVX2"}, "x86_64")


def test_threads_are_counted_by_the_variable_or_the_machine() -> None:
    assert thread_count({}) == this_machine().cpu.cores
    assert thread_count({"M31_NUM_THREADS": "7"}) == 7
    for text in ("0", "-1", "two", "", "1.5", "1025", "²"):
        with pytest.raises(ConfigError, match="M31_NUM_THREADS"):
            thread_count({"M31_NUM_THREADS": text})
