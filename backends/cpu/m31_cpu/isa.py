"""Which instructions the kernels use: decided once per session from the processor's flags."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping

from numba.core import config

from m31.errors import ConfigError
from m31_cpu.codegen import Isa

VARIABLE = "M31_CPU_ISA"
_NEEDS = {"avx2": frozenset({"avx2", "fma", "f16c"})}


def choose(flags: Collection[str], environ: Mapping[str, str] | None = None) -> tuple[Isa, str]:
    """The instruction set, and why.

    Args:
        flags: of the processor, as `m31.sdk.inventory` names them.
        environ: None is the process's own.

    Raises:
        ConfigError: `M31_CPU_ISA` names none, or one that this processor does not have.
    """
    environ = os.environ if environ is None else environ
    asked = environ.get(VARIABLE)
    missing = sorted(_NEEDS["avx2"] - set(flags))
    told = vars(config)
    retargeted = bool(told.get("CPU_NAME") or told.get("CPU_FEATURES"))  # numba compiles for another processor
    if asked == "portable":
        return "portable", f"{VARIABLE} asks for it"
    if asked not in (None, "avx2"):
        raise ConfigError(f"{VARIABLE} is {asked!r}", where="environment", expected="avx2 or portable")
    if not missing and not retargeted:
        return "avx2", "this processor has avx2, fma and f16c" if asked is None else f"{VARIABLE} asks for it"
    reason = f"this processor lacks {', '.join(missing)}" if missing else "numba compiles for another processor"
    if asked == "avx2":
        raise ConfigError(
            f"{VARIABLE} is 'avx2', and {reason}", where="environment", fix=f"unset {VARIABLE}, or set it to portable"
        )
    return "portable", reason
