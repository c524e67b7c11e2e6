"""Faults of ops that not every model has: those of the draft head and of adapters."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from m31.conformance.faults.breaks import attrs, identity, in_bf16, inputs, instead, result, slots, values
from m31.conformance.faults.dense_ops import fault
from m31.conformance.faults.fault import Call
from m31.sdk.backend import LazyTensor


def _other_way(call: Call) -> None:
    call.outs[0].copy_(torch.cat([call.ins[1], call.ins[0]], -1))


def _no_sigmoid(call: Call) -> None:
    call.real()
    call.outs[0].copy_(torch.logit(call.outs[0]))


def _of_the_next_expert(name: str, given: Mapping[str, LazyTensor]) -> LazyTensor:
    """The adapter of another expert, where that has one of the same shape."""
    if not name.startswith("lora_B."):
        return given[name]
    stem, _, expert = name.rpartition(".")
    after = given.get(f"{stem}.{int(expert) + 1}", given[name])
    return after if after.shape == given[name].shape else given[name]


DRAFT = (
    fault(
        "taps-other-way",
        "residual streams are put side by side in the other order",
        "MODEL §5.1",
        "concat",
        "",
        instead("concat", _other_way),
    ),
    fault(
        "draft-window-and-one",
        "the window of the draft head has one token more",
        "DESIGN §4",
        "draft_attention",
        "",
        attrs("draft_attention", window=lambda n: n + 1),
    ),
    fault(
        "draft-pages-in-order",
        "the draft head takes its page table for the identity",
        "DESIGN §7",
        "draft_attention",
        "",
        inputs("draft_attention", page_table=identity),
    ),
    fault(
        "draft-block-not-seen",
        "of its own block a row sees the first key only",
        "MODEL §5.2",
        "draft_attention",
        "",
        inputs("draft_attention", k=lambda k: k[:1].expand_as(k).clone()),
    ),
    fault(
        "markov-after",
        "the Markov head looks up the token after the one before",
        "MODEL §5.3",
        "markov_embedding",
        "",
        inputs("markov_embedding", prev=lambda ids: ids.roll(1)),
    ),
    fault(
        "markov-base-twice",
        "the base logits are added twice",
        "MODEL §5.3",
        "markov_bias",
        "",
        inputs("markov_bias", base=lambda base: 2 * base),
    ),
    fault(
        "confidence-is-a-logit",
        "the sigmoid of the confidence is left out",
        "MODEL §5.3",
        "confidence",
        "",
        instead("confidence", _no_sigmoid),
    ),
    fault(
        "confidence-without-markov",
        "the confidence does not see the token before",
        "MODEL §5.3",
        "confidence",
        "",
        inputs("confidence", m=torch.zeros_like),
    ),
)

ADAPTERS = (
    fault(
        "head-adapter-alone",
        "what an adapter adds is taken for the logits",
        "DESIGN §4",
        "lora_logits",
        "",
        inputs("lora_logits", logits=torch.zeros_like),
    ),
    fault(
        "head-adapter-in-bf16",
        "logits are rounded to BF16 after the adapter",
        "A12",
        "lora_logits",
        "",
        result("lora_logits", in_bf16),
    ),
    fault(
        "adapter-of-down-left-out",
        "adapters of w2 are not applied",
        "DESIGN §4",
        "lora_experts",
        "",
        values("lora_experts", torch.zeros_like, slot="lora_B.w2"),
    ),
    fault(
        "adapter-scaled-twice",
        "the scale of an adapter, which is in its B, is applied again",
        "BUG-42",
        "lora_experts",
        "",
        values("lora_experts", lambda b: 2 * b, slot="lora_B."),
    ),
    fault(
        "adapter-of-the-next-expert",
        "an expert gets the adapter of its neighbour",
        "BUG-59",
        "lora_experts",
        "",
        slots("lora_experts", _of_the_next_expert),
    ),
    fault(
        "adapter-loses-a-rank",
        "the last of an adapter's ranks is not read",
        "A12, BUG-58",
        "lora_experts",
        "",
        values(
            "lora_experts",
            lambda a: torch.where(torch.arange(len(a))[:, None] == len(a) - 1, 0, a),
            slot="lora_A.",
        ),
    ),
)

BEYOND = (*DRAFT, *ADAPTERS)
