"""Rule `arithmetic` on a projection of a model's own sizes."""

from __future__ import annotations

import numpy as np
import torch

from m31.conformance.bounds import bound
from m31.conformance.buffers import Buffer, Workspace
from m31.conformance.judge import within
from m31.conformance.weights import WHOLE, Held, require_losses
from m31.errors import OpRefused
from m31.graph import Kernel, OpInstance, StepClass
from m31.sdk.backend import Session

TOKENS = (1, 16, 17)
"""How many at once: alone, and around a tile."""


def check_linear_arithmetic(session: Session, op: OpInstance, step: StepClass, *, seed: int) -> None:
    """Rule `arithmetic`, on a projection with random inputs of one, 16 and 17 tokens, as far as the step class has
    them, side by side and with gaps. `check_op` does the same for every op, on its own cases.

    Args:
        session: that serves `op`.
        op: an instance of `linear` whose weight is plain.
        step: a class that it serves.
        seed: of weights and inputs.

    Raises:
        ContractViolation: an element is further from the float64 result than the declared arithmetic allows, zeros
            would be near enough as well, or something else than the output was written.
        OpRefused: the session does not serve the op.
    """
    rng = np.random.default_rng(seed)
    dtype = session.dtypes["model"]
    (shape,) = (decl.shape for decl in op.slots.values())
    w = torch.from_numpy(rng.standard_normal(shape)).to(dtype)
    slots = {slot: Held(decl.name, w) for slot, decl in op.slots.items()}
    kernel = session.kernel(op, step)
    if not isinstance(kernel, Kernel):
        raise OpRefused(f"no kernel: {kernel.reason}", where=f"op {op.name}", expected="an op that is served")
    handle = session.prepare(op, slots, WHOLE)
    require_losses(handle, op, slots)
    (used,) = (value.double().cpu().numpy() for value in handle.dequantise().values())
    where = f"kernel {kernel.name}"
    for tokens in (n for n in TOKENS if n <= step.tokens):
        x = torch.from_numpy(rng.standard_normal((tokens, shape[1]))).to(dtype)
        exact = x.double().numpy()
        reference, magnitude = exact @ used.T, np.abs(exact) @ np.abs(used).T
        given = str(dtype).removeprefix("torch.")
        allowed = bound(kernel.arithmetic, reference, magnitude, shape[1], given=given)
        for gaps in (False, True):
            source = Buffer(x.shape, dtype, session.device, values=x.to(session.device), gaps=gaps)
            out = Buffer(reference.shape, dtype, session.device, gaps=gaps)
            space = Workspace(kernel.workspace_bytes, session.device)
            kernel.run([out.tensor], [source.tensor], handle, space.tensor)
            source.require_untouched("x", where)
            out.require_untouched("y", where)
            space.require_untouched(where)
            within(out.tensor.double().cpu().numpy(), reference, allowed, kernel.arithmetic, where)
