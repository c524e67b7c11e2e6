"""The kernels. Plain Triton, no vendor's name: what differs between targets is a constant that the launch gives.

bfloat16 operands are widened to float32 before any arithmetic other than `tl.dot`; where the last bit matters the
correctly rounded forms (`tl.div_rn`, `tl.sqrt_rn`) are used, and those kernels are compiled without contraction of
products and sums, so that a device computes the bits that the processor does, up to the order of the sum in a norm.
"""
