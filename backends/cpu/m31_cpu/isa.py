"""Instruction sets: what LLVM may use, and the few things that each does in its own way."""

from __future__ import annotations

import os
import platform
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from m31.errors import ConfigError

VARIABLE = "M31_CPU_ISA"


@dataclass(frozen=True)
class Isa:
    """An instruction set.

    Args:
        name: avx512, avx2, neon or portable.
        lanes: float32 numbers of a register.
        cpu: LLVM's name of the oldest processor that has it.
        features: what LLVM may use beyond that.
        needs: flags of the processor, as `m31.sdk.inventory` names them.
        machine: of the platform; empty: any.
    """

    name: str
    lanes: int
    cpu: str
    features: str
    needs: frozenset[str]
    machine: str = ""

    @property
    def fused(self) -> bool:
        """Whether it multiplies and adds with one rounding."""
        return self.name != "portable"

    @property
    def dots(self) -> bool:
        """Whether it multiplies pairs of bfloat16 numbers and adds both products to a float32 at once."""
        return self.name == "avx512"


AVX512 = Isa(
    "avx512",
    16,
    "x86-64-v4",
    "+avx512vbmi,+avx512vnni,+avx512bf16,+gfni,-prefer-256-bit",
    frozenset({"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vbmi", "avx512_vnni", "avx512_bf16"}),
    "x86_64",
)
AVX2 = Isa("avx2", 8, "x86-64-v3", "", frozenset({"avx2", "fma", "f16c"}), "x86_64")
NEON = Isa("neon", 4, "generic", "+neon", frozenset({"asimd"}), "aarch64")
PORTABLE = Isa("portable", 4, "", "", frozenset())
ALL = (AVX512, AVX2, NEON, PORTABLE)  # the best first
_OLDEST = {"x86_64": "x86-64", "aarch64": "generic"}


def portable(machine: str) -> Isa:
    """What every processor of a kind has."""
    return Isa("portable", 4, _OLDEST.get(machine, "generic"), "", frozenset())


def choose(
    flags: Collection[str], environ: Mapping[str, str] | None = None, machine: str | None = None
) -> tuple[Isa, str]:
    """The instruction set, and why.

    Args:
        flags: of the processor, as `m31.sdk.inventory` names them.
        environ: None is the process's own.
        machine: None is this one.

    Raises:
        ConfigError: `M31_CPU_ISA` names none, or one that this processor does not have.
    """
    environ = os.environ if environ is None else environ
    machine = platform.machine() if machine is None else machine
    machine = {"AMD64": "x86_64", "arm64": "aarch64"}.get(machine, machine)
    asked = environ.get(VARIABLE)
    names = [isa.name for isa in ALL]
    if asked is not None and asked not in names:
        raise ConfigError(f"{VARIABLE} is {asked!r}", where="environment", expected=" or ".join(names))
    for isa in ALL:
        if asked not in (None, isa.name):
            continue
        missing = sorted(isa.needs - set(flags)) if isa.machine in ("", machine) else [isa.machine]
        if not missing:
            found = portable(machine) if isa is PORTABLE else isa
            if asked is not None:
                return found, f"{VARIABLE} asks for it"
            return found, f"this processor has {', '.join(sorted(isa.needs))}" if isa.needs else "any processor"
        if asked is not None:
            raise ConfigError(
                f"{VARIABLE} is '{asked}', and this processor lacks {', '.join(missing)}",
                where="environment",
                fix=f"unset {VARIABLE}, or set it to portable",
            )
    raise AssertionError("the portable one asks for nothing")
