"""From a parsed text section of either dialect to `Text`: cross-field rules of MODEL.md §1.2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from m31.config import rules, saved
from m31.config.model import AttentionKind, MlpKind, Moe, SparseAttention, SwigluOai, Text
from m31.config.official import OfficialSparse, OfficialText
from m31.config.saved import SavedRope, SavedText
from m31.config.schema import MAX_EXPERTS_IN_ALL, shown, validate
from m31.errors import ConfigError, UnsupportedFeature


def official_text(section: Mapping[str, Any], *, where: str) -> tuple[Text, OfficialText]:
    """Parse the official dialect.

    Raises:
        ConfigError: missing, unknown, contradictory or unsupported keys.
    """
    parsed = validate(OfficialText, section, where=where)
    rules.enforce(rules.GENERIC | rules.TEXT | rules.TEXT_OFFICIAL, parsed, where=where)
    sparse_where = f"{where}.sparse_attention_config"
    sparse = validate(OfficialSparse, parsed.sparse_attention_config, where=sparse_where)
    rules.enforce(rules.SPARSE, sparse, where=sparse_where)
    attention = _official_attention(sparse, parsed.num_hidden_layers, sparse_where)
    _check_length("moe_layer_freq", parsed.moe_layer_freq, parsed.num_hidden_layers, where)
    mlp: tuple[MlpKind, ...] = tuple("moe" if flag else "dense" for flag in parsed.moe_layer_freq)
    _check_index_value(sparse, attention, sparse_where)
    msa = SparseAttention(
        num_index_heads=sparse.sparse_num_index_heads,
        index_dim=sparse.sparse_index_dim,
        topk_blocks=sparse.sparse_topk_blocks,
        block_size=sparse.sparse_block_size,
        local_blocks=_blocks(
            "sparse_local", sparse.sparse_local_block, sparse.sparse_local_tokens, sparse, 1, sparse_where
        ),
        init_blocks=_blocks(
            "sparse_init", sparse.sparse_init_block, sparse.sparse_init_tokens, sparse, 0, sparse_where
        ),
    )
    beta = 1.0 if parsed.swiglu_beta is None else parsed.swiglu_beta
    rotary = rotary_width(parsed.rotary_dim, parsed.partial_rotary_factor, parsed.head_dim, where)
    text = _assemble(parsed, attention, mlp, msa, beta, parsed.rope_theta, rotary, parsed.n_shared_experts)
    _check_text(text, msa, where)
    return text, parsed


def saved_text(section: Mapping[str, Any], *, where: str) -> tuple[Text, SavedText]:
    """Parse the transformers dialect.

    Raises:
        ConfigError: missing, unknown, contradictory or unsupported keys.
    """
    parsed = validate(SavedText, section, where=where)
    rules.enforce(rules.GENERIC | rules.TEXT | rules.TEXT_SAVED, parsed, where=where)
    rope = _saved_rope(parsed.rope_parameters, f"{where}.rope_parameters")
    for key in ("layer_types", "mlp_layer_types"):
        _check_length(key, getattr(parsed, key), parsed.num_hidden_layers, where)
    attention: tuple[AttentionKind, ...] = tuple(
        "sparse" if kind == "minimax_m3_sparse" else "full" for kind in parsed.layer_types
    )
    mlp: tuple[MlpKind, ...] = tuple("moe" if kind == "sparse" else "dense" for kind in parsed.mlp_layer_types)
    msa = SparseAttention(
        num_index_heads=parsed.index_n_heads,
        index_dim=parsed.index_head_dim,
        topk_blocks=parsed.index_topk_blocks,
        block_size=parsed.index_block_size,
        local_blocks=parsed.index_local_blocks,
        init_blocks=saved.INIT_BLOCKS,
    )
    rotary = rotary_width(parsed.rotary_dim, rope.partial_rotary_factor, parsed.head_dim, where)
    text = _assemble(parsed, attention, mlp, msa, saved.SWIGLU_BETA, rope.rope_theta, rotary, saved.SHARED_EXPERTS)
    _check_text(text, msa, where)
    return text, parsed


def _saved_rope(section: Mapping[str, Any], where: str) -> SavedRope:
    kind = section.get("rope_type")
    if isinstance(kind, str) and kind != "default":
        raise UnsupportedFeature(
            f"'rope_type' is {shown(kind)}, which asks for a scaled rotary embedding", where=where, expected="'default'"
        )
    return validate(SavedRope, section, where=where)


def _official_attention(sparse: OfficialSparse, layers: int, where: str) -> tuple[AttentionKind, ...]:
    freq = sparse.sparse_attention_freq
    _check_length("sparse_attention_freq", freq, layers, where)
    if sparse.use_sparse_attention != any(freq):
        raise ConfigError(
            f"'use_sparse_attention' is {str(sparse.use_sparse_attention).lower()}, but "
            f"{sum(freq)} entries of 'sparse_attention_freq' are 1",
            where=where,
            fix="make them agree",
        )
    return tuple("sparse" if flag else "full" for flag in freq)


def _check_length(key: str, values: list[Any], layers: int, where: str) -> None:
    if len(values) != layers:
        raise ConfigError(
            f"'{key}' has {len(values)} entries", where=where, expected=f"num_hidden_layers = {layers}, one per layer"
        )


def _check_index_value(sparse: OfficialSparse, attention: tuple[AttentionKind, ...], where: str) -> None:
    """The index-value branch has no tensors in any checkpoint, MODEL.md §2.4."""
    flags = sparse.sparse_disable_index_value
    if isinstance(flags, int):
        flags = [flags] * len(attention)
    _check_length("sparse_disable_index_value", flags, len(attention), where)
    enabled = [layer for layer, kind in enumerate(attention) if kind == "sparse" and flags[layer] != 1]
    if enabled:
        raise UnsupportedFeature(
            f"'sparse_disable_index_value' is 0 on sparse layer {enabled[0]}, which asks for the index-value branch",
            where=where,
            expected="1 on every sparse layer",
            fix="m31 implements the published checkpoints only",
        )


def _blocks(stem: str, blocks: int | None, tokens: int | None, sparse: OfficialSparse, extra: int, where: str) -> int:
    """Forced blocks from either spelling; tokens convert by ceil-division, plus one on the local side (§1.2)."""
    converted = None if tokens is None else -(-tokens // sparse.sparse_block_size) + extra
    value = rules.agree(
        f"the number of forced blocks ('{stem}_tokens' counted in blocks)",
        {f"{stem}_block": blocks, f"{stem}_tokens": converted},
        where=where,
    )
    if value is None:
        raise ConfigError(
            f"missing key '{stem}_block'", where=where, fix="peers assume different values when it is absent: add it"
        )
    return int(value)


def rotary_width(rotary: int | None, factor: float | None, head_dim: int, where: str) -> int:
    """Rotated channels per head from one or both spellings; never scaled twice (BUG-13), never in conflict (BUG-14)."""
    if factor is not None:
        product = head_dim * factor
        if not 0 < product <= head_dim or product != round(product):
            raise ConfigError(
                f"'partial_rotary_factor' {factor} times head_dim {head_dim} is {product}",
                where=where,
                expected="a whole number of channels up to head_dim",
            )
        if rotary is not None and rotary != product:
            raise ConfigError(
                f"'rotary_dim' is {rotary}, but head_dim {head_dim} * 'partial_rotary_factor' {factor} is {product:g}",
                where=where,
                expected="the same width from both",
                fix="correct the one that is wrong; transformers obeys the factor, other engines rotary_dim",
            )
        rotary = int(product)
    if rotary is None:
        raise ConfigError("missing both 'rotary_dim' and 'partial_rotary_factor'", where=where, expected="at least one")
    if rotary % 2 or rotary > head_dim:
        raise ConfigError(f"rotary width {rotary}", where=where, expected=f"an even number up to head_dim = {head_dim}")
    return rotary


def _assemble(
    parsed: OfficialText | SavedText,
    attention: tuple[AttentionKind, ...],
    mlp: tuple[MlpKind, ...],
    msa: SparseAttention,
    beta: float,
    theta: float,
    rotary: int,
    shared: int,
) -> Text:
    moe = Moe(
        num_experts=parsed.num_local_experts,
        experts_per_token=parsed.num_experts_per_tok,
        num_shared_experts=shared,
        expert_intermediate_size=parsed.intermediate_size,
        shared_intermediate_size=parsed.shared_intermediate_size,
        routed_scaling_factor=parsed.routed_scaling_factor,
    )
    eos = parsed.eos_token_id
    # num_nextn_predict_layers counts the layers that the checkpoint holds; num_mtp_modules the drafting steps.
    mtp = parsed.num_nextn_predict_layers if parsed.num_nextn_predict_layers is not None else parsed.num_mtp_modules
    return Text(
        num_layers=parsed.num_hidden_layers,
        hidden_size=parsed.hidden_size,
        num_heads=parsed.num_attention_heads,
        num_kv_heads=parsed.num_key_value_heads,
        head_dim=parsed.head_dim,
        vocab_size=parsed.vocab_size,
        max_position=parsed.max_position_embeddings,
        rope_theta=theta,
        rotary_dim=rotary,
        rms_norm_eps=parsed.rms_norm_eps,
        activation=SwigluOai(alpha=parsed.swiglu_alpha, beta=beta, limit=parsed.swiglu_limit),
        dense_intermediate_size=parsed.dense_intermediate_size,
        attention=attention,
        mlp=mlp,
        sparse=msa if "sparse" in attention else None,
        moe=moe if "moe" in mlp else None,
        tie_word_embeddings=False,
        bos_token_id=parsed.bos_token_id,
        eos_token_ids=() if eos is None else (eos,) if isinstance(eos, int) else tuple(eos),
        pad_token_id=parsed.pad_token_id,
        num_mtp_layers=mtp or 0,
    )


def _check_text(text: Text, msa: SparseAttention, where: str) -> None:
    """Cross-field rules that hold in both dialects."""

    def require(holds: bool, what: str, expected: str) -> None:
        if not holds:
            raise ConfigError(what, where=where, expected=expected)

    require(
        text.num_heads % text.num_kv_heads == 0,
        f"{text.num_heads} attention heads cannot share {text.num_kv_heads} key-value heads",
        "a multiple",
    )
    if text.sparse is not None:
        require(
            msa.num_index_heads == text.num_kv_heads,
            f"{msa.num_index_heads} index heads for {text.num_kv_heads} key-value heads",
            "equal numbers: each index head selects the blocks of one key-value head",
        )
        require(
            msa.init_blocks + msa.local_blocks <= msa.topk_blocks,
            f"{msa.init_blocks} initial and {msa.local_blocks} local forced blocks exceed top-k {msa.topk_blocks}",
            "forced blocks within top-k",
        )
        require(
            text.rotary_dim <= msa.index_dim,
            f"rotary width {text.rotary_dim} exceeds the index head width {msa.index_dim}",
            "index heads at least as wide as the rotation that they share",
        )
    if text.moe is not None:
        total = text.moe.num_experts * text.mlp.count("moe")
        require(
            total <= MAX_EXPERTS_IN_ALL,
            f"{text.moe.num_experts} experts on {text.mlp.count('moe')} layers are {total:,}",
            f"at most {MAX_EXPERTS_IN_ALL:,} experts in all",
        )
        require(
            text.moe.experts_per_token <= text.moe.num_experts,
            f"{text.moe.experts_per_token} experts per token of {text.moe.num_experts} experts",
            "num_experts_per_tok up to num_local_experts",
        )
    for key, ids in (
        ("bos_token_id", (text.bos_token_id,)),
        ("eos_token_id", text.eos_token_ids),
        ("pad_token_id", (text.pad_token_id,)),
    ):
        for token in ids:
            require(
                token is None or token < text.vocab_size,
                f"'{key}' {token} is outside the vocabulary of {text.vocab_size}",
                f"an id from 0 to {text.vocab_size - 1}",
            )
