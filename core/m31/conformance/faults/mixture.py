"""Faults of the feed-forward part: activation, router, experts, stored weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from m31.conformance.faults.breaks import attrs, in_bf16, inputs, instead, result, slots, stored, values
from m31.conformance.faults.dense_ops import fault
from m31.conformance.faults.fault import Call
from m31.conformance.weights import Held
from m31.sdk.backend import LazyTensor

_MANY = 4  # tokens that an expert takes before it is full


def _gate_clamped(call: Call) -> None:
    gate, up = call.ins
    call.real([gate.clamp(min=-call.op.attrs["limit"]), up])


def _up_not_clamped(call: Call) -> None:
    gate, up = call.ins
    alpha, beta, limit = (call.op.attrs[name] for name in ("alpha", "beta", "limit"))
    gate = gate.clamp(max=limit)
    call.outs[0].copy_((up + beta) * gate * torch.sigmoid(alpha * gate))


def _plain_silu(call: Call) -> None:
    gate, up = call.ins
    call.outs[0].copy_(torch.nn.functional.silu(gate) * up)


def _scored(call: Call, scores: Callable[[Tensor], Tensor], *, biased: bool, weighed: Callable[..., Tensor]) -> None:
    """A router of its own."""
    h = call.ins[0]
    w = {slot: value.to(h.dtype) for slot, value in call.weights.dequantise().items()}
    score = scores(h @ w["weight"].t())
    choice = score + w["bias"] if biased else score
    order = torch.sort(choice, dim=-1, descending=True, stable=True).indices[:, : call.op.attrs["topk"]]
    call.outs[0].copy_(order)
    call.outs[1].copy_(weighed(score, choice, order))


def _normal(score: Tensor, choice: Tensor, order: Tensor) -> Tensor:
    chosen = score.gather(1, order)
    return chosen / chosen.sum(-1, keepdim=True)


def _biased(score: Tensor, choice: Tensor, order: Tensor) -> Tensor:
    chosen = choice.gather(1, order)
    return chosen / chosen.sum(-1, keepdim=True)


def _over_all(score: Tensor, choice: Tensor, order: Tensor) -> Tensor:
    return score.gather(1, order) / score.sum(-1, keepdim=True)


def _tie_upwards(call: Call) -> None:
    h = call.ins[0]
    w = {slot: value.to(h.dtype) for slot, value in call.weights.dequantise().items()}
    score = torch.sigmoid(h @ w["weight"].t())
    n = score.shape[-1]
    flipped = torch.sort((score + w["bias"]).flip(-1), dim=-1, descending=True, stable=True)
    call.outs[0].copy_(n - 1 - flipped.indices[:, : call.op.attrs["topk"]])
    call.outs[1].copy_(_normal(score, score, call.outs[0]))


def _ids_ascending(call: Call) -> None:
    call.real()
    order = call.outs[0].clone().sort(-1)
    call.outs[0].copy_(order.values)
    call.outs[1].copy_(call.outs[1].clone().gather(1, order.indices))


def _with_capacity(call: Call) -> None:
    h, ids, weights = call.ins
    kept = weights.clone()
    for expert in ids.unique().tolist():
        token, slot = (ids == expert).nonzero(as_tuple=True)
        kept[token[_MANY:], slot[_MANY:]] = 0
    call.real([h, ids, kept])


def _weight_before(call: Call) -> None:
    """The first choice's weight multiplies the input of the experts."""
    h, ids, weights = call.ins
    call.real([h * weights[:, :1].to(h.dtype), ids, weights])


def _one_choice(call: Call) -> None:
    h, ids, weights = call.ins
    kept = weights.clone()
    kept[:, 1:] = 0
    call.real([h, ids, kept])


def _next_expert(call: Call) -> None:
    h, ids, weights = call.ins
    call.real([h, (ids + 1) % call.op.attrs["experts"], weights])


def _up_and_gate(slot: str, slots: Mapping[str, LazyTensor]) -> LazyTensor:
    matrix, _, expert = slot.partition(".")
    return slots[{"w1": "w3", "w3": "w1"}.get(matrix, matrix) + "." + expert]


def _interleaved(slot: str, slots: Mapping[str, LazyTensor]) -> LazyTensor:
    """Gate and up are one matrix of alternating rows, and are read as one half after the other."""
    matrix, _, expert = slot.partition(".")
    tensor = slots[slot]
    if matrix == "w2" or tensor.format != "plain":
        return tensor
    both = torch.stack([slots[f"w1.{expert}"].load(), slots[f"w3.{expert}"].load()], 1).flatten(0, 1)
    half = len(both) // 2
    return Held(tensor.name, (both[:half] if matrix == "w1" else both[half:]).clone())


def _of_expert_0(slot: str, slots: Mapping[str, LazyTensor]) -> LazyTensor:
    return slots[slot.partition(".")[0] + ".0"] if slot.startswith("w2") else slots[slot]


ACTIVATION = (
    fault(
        "activation-no-limit",
        "neither gate nor up is clamped",
        "BUG-2, BUG-3",
        "swiglu_oai",
        "beyond-clamps",
        attrs("swiglu_oai", limit=lambda _: 1e30),
    ),
    fault(
        "activation-gate-clamped-below",
        "the gate is clamped below as well",
        "DESIGN §7",
        "swiglu_oai",
        "beyond-clamps",
        instead("swiglu_oai", _gate_clamped),
    ),
    fault(
        "activation-up-not-clamped",
        "up is not clamped",
        "DESIGN §7",
        "swiglu_oai",
        "beyond-clamps",
        instead("swiglu_oai", _up_not_clamped),
    ),
    fault(
        "activation-alpha-one",
        "alpha is 1, the default of a plain SiLU",
        "BUG-2, BUG-3",
        "swiglu_oai",
        "golden",
        attrs("swiglu_oai", alpha=lambda _: 1.0),
    ),
    fault(
        "activation-alpha-usual",
        "alpha is 1.702, whatever the configuration says",
        "BUG-2",
        "swiglu_oai",
        "other-parameters",
        attrs("swiglu_oai", alpha=lambda _: 1.702),
    ),
    fault(
        "activation-without-beta",
        "beta is not added to up",
        "BUG-2, DESIGN §7",
        "swiglu_oai",
        "golden",
        attrs("swiglu_oai", beta=lambda _: 0.0),
    ),
    fault(
        "activation-plain-silu",
        "missing parameters become a plain SiLU",
        "BUG-2",
        "swiglu_oai",
        "golden",
        instead("swiglu_oai", _plain_silu),
    ),
    fault(
        "activation-gate-is-up",
        "gate and up are exchanged",
        "BUG-55",
        "swiglu_oai",
        "golden",
        instead("swiglu_oai", lambda call: call.real([call.ins[1], call.ins[0]])),
    ),
)

ROUTER = (
    fault(
        "router-bias-in-weights",
        "the weights are made of the biased scores that only choose",
        "BUG-12, DESIGN §7",
        "router",
        "",
        instead("router", lambda call: _scored(call, torch.sigmoid, biased=True, weighed=_biased)),
    ),
    fault(
        "router-without-bias",
        "the bias takes no part in the choice",
        "BUG-12",
        "router",
        "",
        instead("router", lambda call: _scored(call, torch.sigmoid, biased=False, weighed=_normal)),
    ),
    fault(
        "router-not-normalised",
        "the weights do not add up to one",
        "BUG-12",
        "router",
        "",
        result("router", lambda w: w * 0.5, at=1),
    ),
    fault(
        "router-normalised-over-all",
        "weights are normalised over all experts instead of the chosen ones",
        "BUG-12",
        "router",
        "",
        instead("router", lambda call: _scored(call, torch.sigmoid, biased=True, weighed=_over_all)),
    ),
    fault(
        "router-softmax",
        "scores are a softmax instead of sigmoids",
        "DESIGN §7",
        "router",
        "",
        instead("router", lambda call: _scored(call, lambda x: x.softmax(-1), biased=True, weighed=_normal)),
    ),
    fault(
        "router-tie-upwards",
        "of equal scores the higher id wins",
        "DESIGN §7",
        "router",
        "",
        instead("router", _tie_upwards),
    ),
    fault(
        "router-ids-ascending",
        "chosen experts are sorted by id instead of by score",
        "DESIGN §7",
        "router",
        "",
        instead("router", _ids_ascending),
    ),
    fault(
        "router-in-bf16",
        "scores are computed of a BF16 gate, and float32 is declared",
        "BUG-12",
        "router",
        "",
        values("router", in_bf16, slot="weight"),
    ),
)

EXPERTS = (
    fault(
        "experts-factor-twice",
        "the routed scaling factor is in the router's weights already",
        "BUG-27",
        "experts",
        "one",
        attrs("experts", routed_scaling_factor=lambda x: x * x),
    ),
    fault(
        "experts-without-factor",
        "the routed scaling factor is not applied",
        "BUG-27",
        "experts",
        "one",
        attrs("experts", routed_scaling_factor=lambda _: 1.0),
    ),
    fault("experts-gate-is-up", "w1 and w3 are exchanged", "BUG-55", "experts", "one", slots("experts", _up_and_gate)),
    fault(
        "experts-interleaved",
        "alternating rows of gate and up are read as two halves",
        "BUG-2",
        "experts",
        "one",
        slots("experts", _interleaved),
    ),
    fault(
        "experts-down-of-the-first",
        "the second product has the first expert's matrix for all experts",
        "BUG-40",
        "experts",
        "one",
        slots("experts", _of_expert_0),
    ),
    fault(
        "experts-no-limit",
        "gate and up are not clamped between the products",
        "BUG-2, BUG-27",
        "experts",
        "other-parameters",
        attrs("experts", limit=lambda _: 1e30),
    ),
    fault(
        "experts-alpha-one",
        "alpha is 1 between the products",
        "BUG-2",
        "experts",
        "one",
        attrs("experts", alpha=lambda _: 1.0),
    ),
    fault(
        "experts-without-beta",
        "beta is not added to up between the products",
        "BUG-2",
        "experts",
        "one",
        attrs("experts", beta=lambda _: 0.0),
    ),
    fault(
        "experts-next-id",
        "the expert after the chosen one is taken",
        "DESIGN §7",
        "experts",
        "one",
        instead("experts", _next_expert),
    ),
    fault(
        "experts-full",
        "an expert takes four tokens and drops the rest",
        "DESIGN §7",
        "experts",
        "one-expert-hit-by-all",
        instead("experts", _with_capacity),
    ),
    fault(
        "experts-weight-before",
        "the weight multiplies the input of an expert instead of its output",
        "BUG-27",
        "experts",
        "one",
        instead("experts", _weight_before),
    ),
    fault(
        "experts-first-choice-only",
        "all choices but the first are left out",
        "DESIGN §7",
        "experts",
        "one",
        instead("experts", _one_choice),
    ),
    fault(
        "experts-middle-in-bf16",
        "the activations of experts are rounded to BF16, and float32 is declared",
        "A12, BUG-11",
        "experts",
        "one",
        inputs("experts", h=in_bf16),
    ),
)


def _swapped(packed: Tensor) -> Tensor:
    return (packed >> 4) | (packed << 4)


def _doubled(scale: Tensor) -> Tensor:
    """One block scale of E4M3, times two: an exponent more; half where twice is too large."""
    codes = scale.view(torch.uint8)
    flat = codes.view(-1)
    at = int(flat.argmin())
    flat[at] += 8 if flat[at] <= 118 else -8
    return codes.view(scale.dtype)


def _further(scale: Tensor) -> Tensor:
    return scale.view(torch.uint8).roll(1, -1).view(scale.dtype)


def _last_block(codes: Tensor) -> Tensor:
    x = codes.view(torch.uint8).clone()
    x[..., -8:] = 0
    return x.view(codes.dtype)


STORED = (
    fault(
        "nibbles-swapped",
        "of two codes in a byte the upper half is taken for the first",
        "A12, BUG-56",
        "experts",
        "",
        stored("experts", "nvfp4", packed=_swapped),
    ),
    fault(
        "nibbles-swapped-and-told",
        "the same, and the handle tells the wrong values",
        "A12, BUG-56",
        "experts",
        "",
        stored("experts", "nvfp4", honest=True, packed=_swapped),
    ),
    fault(
        "global-scale-inverted",
        "the encode scale is multiplied with instead of divided by",
        "A12, BUG-42, BUG-43",
        "experts",
        "",
        stored("experts", "nvfp4", global_scale=lambda g: 1 / g),
    ),
    fault(
        "global-scale-left-out",
        "block scales are taken for the whole scale",
        "BUG-42",
        "experts",
        "",
        stored("experts", "nvfp4", global_scale=lambda g: g * 0 + 1),
    ),
    fault(
        "global-scale-one-ulp",
        "the reciprocal of the global scale is rounded before the product",
        "BUG-44",
        "experts",
        "",
        stored("experts", "nvfp4", honest=True, global_scale=lambda g: torch.nextafter(g, g * 2)),
    ),
    fault(
        "one-block-scale-doubled",
        "one of all block scales is twice what it should be",
        "A12",
        "experts",
        "",
        stored("experts", "nvfp4", scale=_doubled),
    ),
    fault(
        "block-scales-shifted",
        "scales belong to the block before",
        "BUG-59, BUG-46",
        "experts",
        "",
        stored("experts", "nvfp4", scale=_further),
    ),
    fault(
        "last-block-dropped",
        "the last 16 codes of each row are not read",
        "A12, BUG-58",
        "experts",
        "",
        stored("experts", "nvfp4", packed=_last_block),
    ),
    fault(
        "mxfp8-exponent-bias",
        "the exponent of block scales has a bias of 126",
        "BUG-50",
        "linear",
        "",
        stored("linear", "mxfp8", scale=lambda s: s + 1),
    ),
    fault(
        "mxfp8-one-scale",
        "one block scale is twice what it should be",
        "A12",
        "linear",
        "",
        stored("linear", "mxfp8", scale=lambda s: s + (torch.arange(s.numel()).view(s.shape) == 0).to(s.dtype)),
    ),
    fault(
        "mxfp8-scales-of-the-next-row",
        "scales belong to the row before",
        "BUG-59",
        "linear",
        "",
        stored("linear", "mxfp8", scale=lambda s: s.roll(1, 0)),
    ),
    fault(
        "weights-cut-to-bf16",
        "float32 weights are kept in BF16, and no loss is declared",
        "DESIGN §7",
        "linear",
        "",
        values("linear", in_bf16, honest=True),
    ),
)

MIXTURE = (*ACTIVATION, *ROUTER, *EXPERTS, *STORED)
