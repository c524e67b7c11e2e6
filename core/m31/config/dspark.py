"""Parsing of `dspark/config.json`, MODEL.md §1.5. Fields sit at the top or under `text_config`, never differently."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import StrictBool, StrictStr

from m31.config import rules
from m31.config.draft import Draft
from m31.config.model import SwigluOai
from m31.config.quantization import parse_quantization
from m31.config.schema import (
    Finite,
    Flag01,
    LayerCount,
    NaturalInt,
    PositiveFloat,
    PositiveInt,
    Strict,
    TextGeneric,
    shown,
    validate,
)
from m31.config.text import rotary_width
from m31.errors import ConfigError, UnsupportedFeature

ARCHITECTURE = "DSparkMiniMaxDraftModel"


class _Flash(Strict):
    num_target_layers: PositiveInt
    num_hidden_layers: LayerCount
    target_layer_ids: list[NaturalInt] | None = None
    layer_types: list[StrictStr] | None = None


class _Nested(Strict):
    use_dense_ffn: StrictBool | None = None
    ffn_hidden_size: PositiveInt | None = None


class _Draft(TextGeneric):
    num_hidden_layers: LayerCount
    hidden_size: PositiveInt
    num_attention_heads: PositiveInt
    num_key_value_heads: PositiveInt
    head_dim: PositiveInt
    vocab_size: PositiveInt
    dense_intermediate_size: PositiveInt
    rms_norm_eps: PositiveFloat
    rope_theta: PositiveFloat
    rotary_dim: PositiveInt | None = None
    partial_rotary_factor: PositiveFloat | None = None
    hidden_act: StrictStr | None = None
    swiglu_alpha: Finite
    swiglu_beta: Finite | None = None
    swiglu_limit: PositiveFloat
    use_gemma_norm: StrictBool
    use_qk_norm: StrictBool | None = None
    qk_norm_type: StrictStr | None = None
    sliding_window: PositiveInt
    layer_types: list[StrictStr]
    moe_layer_freq: list[Flag01] | None = None
    sparse_attention_config: dict[str, Any] | None = None
    dspark_block_size: PositiveInt
    dspark_noise_token_id: NaturalInt
    dspark_target_layer_ids: list[NaturalInt] | None = None
    dspark_markov_rank: PositiveInt
    dspark_markov_head_type: StrictStr
    dspark_use_dense_ffn: StrictBool | None = None
    dspark_ffn_hidden_size: PositiveInt | None = None
    dspark_hybrid_context_fusion: StrictBool | None = None
    enable_confidence_head: StrictBool
    confidence_head_with_markov: StrictBool
    sample_from_anchor: StrictBool | None = None
    dflash_config: dict[str, Any]
    dspark_config: dict[str, Any] | None = None
    quantization_config: dict[str, Any] | None = None
    # Copied from the target by the tools that write these files; the draft has neither experts nor long tables.
    max_position_embeddings: PositiveInt | None = None
    intermediate_size: PositiveInt | None = None
    shared_intermediate_size: PositiveInt | None = None


_RULES: rules.Rules = {
    "use_gemma_norm": ((True,), "a norm that multiplies by w instead of 1 + w"),
    "use_qk_norm": ((None, True), "attention without query and key norms"),
    "qk_norm_type": ((None, "per_head"), "another query and key norm"),
    "hidden_act": ((None, "swigluoai"), "another activation"),
    "tie_word_embeddings": ((None, False), "an output head tied to the embedding"),
    "attention_output_gate": ((None, False), "a gate on the attention output"),
    "rope_scaling": ((None,), "a scaled rotary embedding"),
    "sparse_attention_config": ((None,), "sparse attention in the draft"),
    "dspark_markov_head_type": (("vanilla",), "another Markov head"),
    "dspark_use_dense_ffn": ((None, True), "experts in the draft"),
    "dspark_hybrid_context_fusion": ((None, False), "another fusion of the target's layers"),
    "enable_confidence_head": ((True,), "a draft without its confidence head"),
    "sample_from_anchor": ((None, True), "a draft of one row more"),
}


def parse_draft(mapping: Mapping[str, Any], *, where: str) -> Draft:
    """Build the description.

    Raises:
        ConfigError: an unknown, missing, contradictory or unsupported key.
    """
    parsed = validate(_Draft, _flattened(mapping, where), where=where)
    if parsed.architectures != [ARCHITECTURE]:
        raise ConfigError(
            f"'architectures' is {shown(parsed.architectures)}", where=where, expected=f"['{ARCHITECTURE}']"
        )
    rules.enforce(rules.GENERIC | _RULES, parsed, where=where)
    flash = validate(_Flash, parsed.dflash_config, where=f"{where}: dflash_config")
    nested = validate(_Nested, parsed.dspark_config or {}, where=f"{where}: dspark_config")
    rules.enforce({"use_dense_ffn": ((None, True), "experts in the draft")}, nested, where=f"{where}: dspark_config")
    layers = _agreed("num_hidden_layers", where, top=parsed.num_hidden_layers, dflash_config=flash.num_hidden_layers)
    width = _agreed(
        "the width of the MLP",
        where,
        dense_intermediate_size=parsed.dense_intermediate_size,
        dspark_ffn_hidden_size=parsed.dspark_ffn_hidden_size,
        dspark_config=nested.ffn_hidden_size,
    )
    for name, kinds in (("layer_types", parsed.layer_types), ("dflash_config.layer_types", flash.layer_types)):
        if kinds is not None and kinds != ["sliding_attention"] * layers:
            raise UnsupportedFeature(
                f"'{name}' is {shown(kinds)}", where=where, expected=f"{layers} x sliding_attention"
            )
    if parsed.moe_layer_freq not in (None, [0] * layers):
        raise UnsupportedFeature(f"'moe_layer_freq' is {shown(parsed.moe_layer_freq)}", where=where, expected="zeros")
    quantization = None
    if parsed.quantization_config is not None:
        quantization = parse_quantization(parsed.quantization_config, where=f"{where}: quantization_config")
        if (quantization.linears, quantization.experts, quantization.dialect) != ("mxfp8", "mxfp8", "official"):
            raise UnsupportedFeature("quantises the draft in another way", where=where, expected="plain mxfp8")
    if parsed.num_attention_heads % parsed.num_key_value_heads:
        raise ConfigError(
            f"{parsed.num_attention_heads} attention heads cannot share {parsed.num_key_value_heads} key-value heads",
            where=where,
            expected="a multiple",
        )
    return Draft(
        num_layers=layers,
        hidden_size=parsed.hidden_size,
        num_heads=parsed.num_attention_heads,
        num_kv_heads=parsed.num_key_value_heads,
        head_dim=parsed.head_dim,
        vocab_size=parsed.vocab_size,
        intermediate_size=width,
        block_size=parsed.dspark_block_size,
        noise_token_id=parsed.dspark_noise_token_id,
        target_layer_ids=_taps(parsed, flash, where),
        target_num_layers=flash.num_target_layers,
        markov_rank=parsed.dspark_markov_rank,
        confidence_with_markov=parsed.confidence_head_with_markov,
        sliding_window=parsed.sliding_window,
        rope_theta=parsed.rope_theta,
        rotary_dim=rotary_width(parsed.rotary_dim, parsed.partial_rotary_factor, parsed.head_dim, where),
        rms_norm_eps=parsed.rms_norm_eps,
        activation=SwigluOai(
            alpha=parsed.swiglu_alpha,
            beta=1.0 if parsed.swiglu_beta is None else parsed.swiglu_beta,
            limit=parsed.swiglu_limit,
        ),
        quantization=quantization,
    )


def _flattened(mapping: Mapping[str, Any], where: str) -> dict[str, Any]:
    section = mapping.get("text_config")
    if section is None:
        return {key: value for key, value in mapping.items() if key != "text_config"}
    if not isinstance(section, Mapping):
        raise ConfigError(f"'text_config' is {shown(section)}", where=where, expected="an object")
    flat = dict(section)
    own = ("text_config", "architectures", "model_type")  # these two name the outer and the inner class
    for key, value in mapping.items():
        if key not in own and key in flat and flat[key] != value:
            raise ConfigError(f"'{key}' differs between the top and text_config", where=where, fix="make them equal")
        if key != "text_config":
            flat[key] = value
    return flat


def _agreed(name: str, where: str, **values: int | None) -> int:
    return int(rules.agree(name, values, where=where))


def _taps(parsed: _Draft, flash: _Flash, where: str) -> tuple[int, ...]:
    ids = rules.agree(
        "the list of target layers",
        {"dspark_target_layer_ids": parsed.dspark_target_layer_ids, "dflash_config": flash.target_layer_ids},
        where=where,
    )
    if not ids:
        raise ConfigError("missing key 'dspark_target_layer_ids'", where=where, expected="it or dflash_config's list")
    if sorted(set(ids)) != ids or ids[-1] >= flash.num_target_layers:
        raise ConfigError(
            f"the list of target layers is {shown(ids)}",
            where=where,
            expected=f"ascending numbers below num_target_layers = {flash.num_target_layers}",
        )
    return tuple(ids)
