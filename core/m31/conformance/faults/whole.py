"""Faults that only show where more than one op, layer, step or sequence is at work."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from m31.conformance.faults.breaks import inputs, instead, other, result
from m31.conformance.faults.fault import Break, Call, Fault
from m31.conformance.item import Level
from m31.graph import Kernel, OpInstance, Refusal
from m31.sdk.manifest import Determinism, Manifest

_FEW = 64  # tokens


def whole(name: str, what: str, source: str, level: Level, subject: str, break_: Break, case: str = "") -> Fault:
    """A fault that an item of steps or of a model catches, whose id goes on with `subject` and `case`."""
    return Fault(
        name=name,
        what=what,
        source=source,
        level=level,
        subject=subject,
        catches=f"{level}/{subject}/{case}*",
        break_=break_,
    )


def _layer_0(call: Call) -> None:
    call.kernel(other(call.op, layer=0))(call.outs, call.ins, call.weights, call.workspace)


def _not_for_one_head(call: Call) -> None:
    if call.ins[0].shape[1] == 1:
        call.outs[0].copy_(call.ins[0])
    else:
        call.real()


def _few_rows(y: Tensor) -> Tensor:
    y[_FEW:] = 0
    return y


def _first_row(x: Tensor) -> Tensor:
    return x[:1].expand_as(x).clone()


def _table_of_the_first(table: Tensor) -> Tensor:
    return torch.where((table < 0) | (table[:1] < 0), table, table[:1])


STEPS = (
    whole(
        "decode-not-itself",
        "in decode steps a query does not see its own token",
        "DESIGN §7",
        "L2",
        "chunks",
        inputs("sparse_attention", kinds=("decode",), positions=lambda p: (p - 1).clamp(min=0)),
        case="one-by-one",
    ),
    whole(
        "decode-of-the-first-sequence",
        "in decode steps all sequences read the pages of the first",
        "BUG-64",
        "L2",
        "batch",
        inputs("sparse_attention", kinds=("decode",), page_table=_table_of_the_first),
        case="2-together",
    ),
    whole(
        "decode-index-keys-left",
        "index keys are written while the prompt is computed, and not afterwards",
        "DESIGN §7",
        "L2",
        "written",
        instead("index_write", lambda call: None, kinds=("decode",)),
        case="decode",
    ),
    whole(
        "verify-first-row-only",
        "of several rows of a verify step all get the first one's logits",
        "BUG-74, DESIGN §7",
        "L2",
        "verify",
        inputs("lm_head", kinds=("verify",), x=_first_row),
        case="step-of-3",
    ),
    whole(
        "verify-one-query",
        "verify steps attend for all queries at the first one's position",
        "BUG-74",
        "L2",
        "verify",
        inputs("rope", kinds=("verify",), cos=_first_row, sin=_first_row),
        case="step-of-3",
    ),
)

LAYERS = (
    whole(
        "layer-0-for-all",
        "attention of every layer reads the pages of the first",
        "DESIGN §7",
        "L3",
        "layers",
        instead("sparse_attention", _layer_0),
        case="random-m31/prefill/layer-1",
    ),
    whole(
        "index-key-not-rotated",
        "the index key, whose branch has one head, is not rotated",
        "BUG-29",
        "L3",
        "layers",
        instead("rope", _not_for_one_head),
        case="random-m31/prefill/layer-0",
    ),
    whole(
        "many-tokens-lost",
        "of many tokens only the first 64 are computed",
        "BUG-61",
        "L2",
        "chunks",
        result("experts", _few_rows),
        case="300-split-1",
    ),
    whole(
        "norm-of-one-layer",
        "the last norm is left out",
        "BUG-118",
        "L3",
        "agreement",
        instead("gemma_rmsnorm", lambda call: _last_norm_left(call)),
        case="random-m31/float32/kv",
    ),
)


def _last_norm_left(call: Call) -> None:
    name = call.op.weights.name if call.op.weights is not None else ""
    if "layers" in name or "/" in name:
        call.real()
    else:
        call.outs[0].copy_(call.ins[0])


def _old_sum(call: Call) -> None:
    """The norm of the second term instead of that of the sum."""
    call.real()
    first = call.outs[0].clone()
    call.real([torch.zeros_like(call.ins[0]), call.ins[1]])
    call.outs[0].copy_(first)


def _factor_on_all(call: Call) -> None:
    """The routed factor multiplies the shared expert as well."""
    factor = call.op.attrs["routed_scaling_factor"]
    run = call.kernel(other(call.op, routed_scaling_factor=1.0))
    run(call.outs, call.ins, call.weights, call.workspace)
    call.outs[0].mul_(factor)


def _shared_left(call: Call) -> None:
    """The shared expert is left out where every token has two routed ones."""
    call.real()
    out = call.outs[0].clone()
    h, ids, weights = call.ins
    call.real([h, ids, weights * 0])
    call.outs[0].copy_(out - call.outs[0])


def _refused(kernel: Kernel, op: OpInstance) -> Kernel | Refusal:
    return Refusal("not today")


def _next_slot(slots: Tensor) -> Tensor:
    return torch.where(slots < 0, slots, slots ^ 1)


FUSIONS = (
    whole(
        "fused-norm-of-one-term",
        "the fused norm is that of the second term, not of the sum",
        "DESIGN §7",
        "L1",
        "add_norm",
        replace(instead("add_norm", _old_sum), fused=("add_norm",)),
    ),
    whole(
        "fused-factor-on-shared",
        "the routed scaling factor multiplies the shared expert as well",
        "BUG-27, DESIGN §7",
        "L1",
        "experts_shared",
        replace(instead("experts_shared", _factor_on_all), fused=("experts_shared",)),
    ),
    whole(
        "fused-shared-left-out",
        "the fused experts leave the shared one out",
        "BUG-40",
        "L1",
        "experts_shared",
        replace(instead("experts_shared", _shared_left), fused=("experts_shared",)),
    ),
    whole(
        "fused-insert-next-slot",
        "the fused projection writes into the neighbouring slot",
        "DESIGN §7",
        "L1",
        "qkv_insert",
        replace(inputs("qkv_insert", slots=_next_slot), fused=("qkv_insert",)),
    ),
    whole(
        "fused-insert-rope-half",
        "the fused projection rotates backwards",
        "BUG-16",
        "L1",
        "qkv_insert",
        replace(inputs("qkv_insert", sin=lambda s: -s), fused=("qkv_insert",)),
    ),
    Fault(
        name="fusion-never-used",
        what="a fusion is asked for, and its kernel refuses every place in silence",
        source="DESIGN §7, BUG-98",
        level="L2",
        subject="claims",
        catches="op:add_norm",
        break_=Break(op="add_norm", fused=("add_norm",), kernel=_refused),
        by="omission",
    ),
)


class _Shaky:
    """The last bit of some elements, another one each time."""

    def __init__(self) -> None:
        self.random = torch.Generator().manual_seed(0)

    def __call__(self, y: Tensor) -> Tensor:
        up = torch.rand(y.shape, generator=self.random) < 0.5
        return torch.where(up.to(y.device), torch.nextafter(y, y.abs() * 2 + 1), y)


def _with_company(call: Call) -> None:
    """The last bits depend on how many tokens are computed together."""
    call.real()
    for _ in range(len(call.outs[0]) % 5):
        call.outs[0].copy_(torch.nextafter(call.outs[0], call.outs[0].abs() * 2 + 1))


def _promising(manifest: Manifest) -> Manifest:
    """The manifest, with a promise of equal bits."""
    everything = Determinism(run_to_run=True, batch_invariant=True, chunk_invariant=True)
    return manifest.model_copy(update={"determinism": everything})


DETERMINISM = (
    whole(
        "shaky",
        "the same step twice gives other last bits",
        "BUG-115",
        "L2",
        "repeat",
        replace(result("linear", _Shaky()), manifest=_promising),
        case="run-to-run",
    ),
    whole(
        "depends-on-company",
        "the last bits of a sequence depend on what else is in its step",
        "BUG-70, BUG-115",
        "L2",
        "batch",
        replace(instead("linear", _with_company), manifest=_promising),
        case="2-together",
    ),
)

WHOLE: tuple[Fault, ...] = (*STEPS, *LAYERS, *FUSIONS, *DETERMINISM)
