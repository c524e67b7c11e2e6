"""Portable Triton kernels: fused projection, norm, rotation and KV insert, and sparse decode attention.

One source per kernel. On a machine without an accelerator a kernel is interpreted on processor tensors
(`m31_triton.interpreter`) and compiled ahead of time for every target (`m31_triton.aot`); with one it is launched as
is. `TritonBackend` runs a model with them, the reference beside it.
"""

from m31_triton.session import TritonBackend

__all__ = ["TritonBackend"]
