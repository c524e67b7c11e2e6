"""Portable Triton kernels: fused projection, norm, rotation and KV insert, and sparse decode attention.

One source per kernel. On a machine without an accelerator a kernel is interpreted on processor tensors
(`m31_triton.interpreter`) and compiled ahead of time for every target (`m31_triton.aot`); with one it is launched as
is. Importing this package imports neither torch nor triton.
"""
