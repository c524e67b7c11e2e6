"""The CPU backend: native kernels generated for the processor at hand, on weights that stay in their file."""

from m31_cpu.session import CpuBackend

__all__ = ["CpuBackend"]
