"""Values that config.json may spell and m31 refuses: each names a feature that no published checkpoint has.

The tables say, key by key, which values describe the model of MODEL.md chapter 2. Anything else would be computed
wrongly, so it is refused rather than ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from m31.config.schema import shown
from m31.errors import ConfigError, UnsupportedFeature

# key -> (accepted values, what any other value would mean)
Rules = dict[str, tuple[tuple[object, ...], str]]

GENERIC: Rules = {
    "attention_dropout": ((None, 0.0), "dropout at inference"),
    "router_jitter_noise": ((None, 0.0), "noise on the router's input"),
    "chunk_size_feed_forward": ((None, 0), "a chunked feed-forward"),
    "is_encoder_decoder": ((None, False), "an encoder-decoder model"),
    "num_reward_heads": ((None, 0), "reward heads"),
    "dtype": ((None, "bfloat16", "float32"), "weights whose range or precision this model was not made for"),
    "torch_dtype": ((None, "bfloat16", "float32"), "weights whose range or precision this model was not made for"),
}

TEXT: Rules = {
    "tie_word_embeddings": ((None, False), "an output head tied to the embedding"),
    "attention_output_gate": ((None, False), "a gate on the attention output"),
    "rope_scaling": ((None,), "a scaled rotary embedding"),
    "use_gemma_norm": ((None, True), "a norm that multiplies by w instead of 1 + w"),
    "use_qk_norm": ((None, True), "attention without query and key norms"),
    "qk_norm_type": ((None, "per_head"), "another query and key norm"),
    "scoring_func": ((None, "sigmoid"), "another router score"),
    "use_routing_bias": ((None, True), "a router without its selection bias"),
    "n_shared_experts": ((None, 1), "another number of shared experts"),
}

TEXT_OFFICIAL: Rules = {"hidden_act": (("swigluoai",), "another activation")}
TEXT_SAVED: Rules = {
    "hidden_act": (("silu",), "another activation"),
    "swiglu_beta": ((None, 1.0), "another beta than the one that transformers computes with"),
}
SPARSE: Rules = {"sparse_score_type": (("max",), "another block score")}
VISION: Rules = {
    "hidden_act": (("gelu",), "another vision activation"),
    "rope_mode": ((None, "3d"), "another vision position embedding"),
    "position_embedding_type": ((None, "rope"), "another vision position embedding"),
}
TOP: Rules = {
    "projector_hidden_act": ((None, "gelu"), "another projector activation"),
    "multimodal_projector_bias": ((None, True), "a projector without biases"),
    "tie_word_embeddings": ((None, False), "an output head tied to the embedding"),
}
COMPRESSION: Rules = {"image_token_compression_method": (("patch_merge",), "another image token compression")}


def enforce(rules: Rules, section: Any, *, where: str) -> None:
    """Check every ruled attribute of a parsed section.

    Raises:
        UnsupportedFeature: a value outside the table; the message names key, value, meaning and what is accepted.
    """
    for key, (accepted, meaning) in rules.items():
        value = getattr(section, key)
        if value not in accepted:
            values = " or ".join(shown(v) if isinstance(v, str) else str(v).lower() for v in accepted if v is not None)
            raise UnsupportedFeature(
                f"'{key}' is {shown(value)}, which asks for {meaning}",
                where=where,
                expected=values or "the key to be absent or null",
                fix="m31 implements the published checkpoints only",
            )


def require_model_type(section: Any, accepted: tuple[str, ...], *, where: str) -> None:
    """`model_type` may be absent, but may not name another model."""
    if section.model_type is not None and section.model_type not in accepted:
        raise ConfigError(
            f"'model_type' is {shown(section.model_type)}", where=where, expected=" or ".join(map(repr, accepted))
        )


def agree(name: str, values: Mapping[str, object], *, where: str) -> Any:
    """The one value that every present spelling gives, or None when all are absent.

    Args:
        name: what the spellings describe, for the message.
        values: spelling -> value, None where absent.

    Raises:
        ConfigError: two spellings differ.
    """
    present = {key: value for key, value in values.items() if value is not None}
    if len(set(map(repr, present.values()))) > 1:
        listed = ", ".join(f"{key} = {shown(value)}" for key, value in present.items())
        raise ConfigError(f"{name} contradicts itself: {listed}", where=where, fix="make them equal")
    return next(iter(present.values()), None)
