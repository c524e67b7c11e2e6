"""An m31 backend in plain numpy: what somebody outside of m31 writes to run the model on something new.

Read in this order: `backend.toml` (what is claimed), `session.py` (what the core calls), `kernels.py` and
`attention.py` (the ops), `pages.py` (the KV cache), `weights.py` (stored formats), `plan.py` (a step without torch).
"""

from m31_numpy.session import NumpyBackend

__all__ = ["NumpyBackend"]
