"""The rules of the contract that no type can state, and a check for each (docs/sdk.md).

A check returns nothing or what it looked at, or raises `ContractViolation` with the rule's name. They run on any
session, in tree or out.
"""

from __future__ import annotations

from m31.conformance.linear import check_linear_arithmetic
from m31.conformance.operators import Checked, check_op, check_ops
from m31.conformance.pages import check_layout_id
from m31.conformance.plans import check_fixed_buffers
from m31.conformance.weights import check_losses, check_release

RULES = {
    "arithmetic": "a kernel is as accurate as the arithmetic that it declares",
    "losses": "a handle whose losses are empty holds exactly the checkpoint's values",
    "release": "prepare keeps nothing of its source alive but what the handle says that it reads in place",
    "weight-bytes": "prepare allocates at most what weight_bytes says",
    "fixed-buffers": "a plan allocates when it is made, not when it runs",
    "prepared-at-load": "which ops a backend serves depends on the kind of step, not on its size",
    "opened": "a session is what it was opened as, and answers with the types of the contract",
    "limits": "a session serves at most what its manifest declares",
    "layout-id": "pages of another layout id, version included, are refused, and nothing is written",
    "extra-outputs": "a plan of a graph with extras gives their values of its last run",
    "claims": "a manifest claims what is there, and an op runs elsewhere only where the manifest says so",
    "refusals": "what is not served is refused by name, before anything is computed",
    "pages": "pages give back what was written to them, whatever else happens to other pages",
    "order": "the same tokens give the same logits, in whatever steps, pages and company they are computed",
    "determinism": "what the manifest declares to be equal bit for bit is",
    "drafts": "a text does not depend on what was drafted for it",
    "agreement": "a model gives what the reference gives under the same arithmetic",
}
"""Name -> what it asks. `opened`, `limits` and `prepared-at-load` are checked wherever a checkpoint is opened and run,
`extra-outputs` where the engine drafts. Two more are enforced where they apply: a fusion that does not match as often
as the model has its body is refused by the fuse pass, and an op falls back only if the manifest lists it
(`m31.sdk.Serving`). From `claims` on the suite's levels check them (`m31.conformance.levels`)."""

__all__ = [
    "RULES",
    "Checked",
    "check_fixed_buffers",
    "check_layout_id",
    "check_linear_arithmetic",
    "check_losses",
    "check_op",
    "check_ops",
    "check_release",
]
