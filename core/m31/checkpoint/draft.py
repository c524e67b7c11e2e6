"""Tensors of the DSpark draft head, MODEL.md §4.3: their inventory, their names, and whether they fit the target."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from m31.checkpoint.folder import listed
from m31.checkpoint.header import StoredTensor
from m31.checkpoint.inventory import TensorDecl, linear, plain
from m31.checkpoint.validation import Placed, check_forms
from m31.config.draft import Draft
from m31.config.model import Model, WeightFormat
from m31.errors import ConfigError, DuplicateTensor, MissingTensor, UnexpectedTensor

FOLDER = "dspark"
PREFIX = "dspark."
_SPELLINGS = ("language_model.model.dspark.", "model.dspark.", PREFIX)
_FLOATS = ("BF16", "F32")


def expected_draft(config: Draft) -> dict[str, TensorDecl]:
    """Every tensor of the draft head by canonical name, `dspark.` and the rest, in the order of a pass."""
    return dict(_declare(config))


def official(name: str) -> str:
    """The stored name that published files give a canonical one."""
    return _SPELLINGS[0] + name.removeprefix(PREFIX)


def _declare(config: Draft) -> Iterator[tuple[str, TensorDecl]]:
    hidden, head, inner = config.hidden_size, config.head_dim, config.intermediate_size
    fmt: WeightFormat = "plain" if config.quantization is None else config.quantization.linears
    norm = plain((hidden,), "norms", _FLOATS, norm=True)
    yield f"{PREFIX}fc.weight", plain((hidden, hidden * len(config.target_layer_ids)), "projector", _FLOATS)
    yield f"{PREFIX}hidden_norm.weight", norm
    for layer in range(config.num_layers):
        stem = f"{PREFIX}layers.{layer}.decoder_layer"
        yield f"{stem}.input_layernorm.weight", norm
        for name, out, width in (
            ("q_proj", config.num_heads * head, hidden),
            ("k_proj", config.num_kv_heads * head, hidden),
            ("v_proj", config.num_kv_heads * head, hidden),
            ("o_proj", hidden, config.num_heads * head),
        ):
            for suffix, decl in linear(out, width, "attention", fmt, _FLOATS):
                yield f"{stem}.self_attn.{name}{suffix}", decl
        for name in ("q_norm", "k_norm"):
            yield f"{stem}.self_attn.{name}.weight", plain((head,), "norms", _FLOATS, norm=True)
        yield f"{stem}.post_attention_layernorm.weight", norm
        for name, out, width in (
            ("gate_proj", inner, hidden),
            ("up_proj", inner, hidden),
            ("down_proj", hidden, inner),
        ):
            for suffix, decl in linear(out, width, "dense_mlp", fmt, _FLOATS):
                yield f"{stem}.mlp.{name}{suffix}", decl
    yield f"{PREFIX}final_norm.weight", norm
    table = plain((config.vocab_size, config.markov_rank), "embeddings", _FLOATS)
    yield f"{PREFIX}markov_head.markov_w1.weight", table
    yield f"{PREFIX}markov_head.markov_w2.weight", table
    width = hidden + (config.markov_rank if config.confidence_with_markov else 0)
    yield f"{PREFIX}confidence_head.proj.weight", plain((1, width), "projector", _FLOATS)
    yield f"{PREFIX}confidence_head.proj.bias", plain((1,), "projector", _FLOATS)


def map_draft(
    tensors: Mapping[str, StoredTensor], declared: Mapping[str, TensorDecl], *, where: str
) -> tuple[dict[str, Placed], dict[str, TensorDecl], tuple[str, ...]]:
    """Canonical name -> place, the inventory as realised, and notes.

    Raises:
        UnexpectedTensor, MissingTensor, DuplicateTensor, WrongDtype, WrongShape: names, dtypes or shapes differ.
    """
    placed: dict[str, Placed] = {}
    foreign: list[str] = []
    rotary = 0
    for stored in tensors.values():
        name = next((PREFIX + stored.name[len(p) :] for p in _SPELLINGS if stored.name.startswith(p)), stored.name)
        if "rotary_emb." in name:
            rotary += 1
        elif name not in declared:
            foreign.append(stored.name)
        elif name in placed:
            raise DuplicateTensor(f"'{name}' is stored twice", where=where, expected="each logical tensor once")
        else:
            placed[name] = Placed(stored, stored.shape, stored.start)
    real = dict(declared)
    for name, decl in declared.items():
        scale = f"{name}_scale_inv"  # as in the target, its presence decides whether a linear is quantised
        plainly = name in placed and placed[name].stored.dtype in _FLOATS and scale not in placed
        if decl.storage == "fp8" and plainly:
            real[name] = replace(decl, dtypes=_FLOATS, storage="plain")
            del real[scale]
    if foreign:
        raise UnexpectedTensor(
            f"{len(foreign)} tensors do not belong to a draft head: {listed(foreign)}",
            where=where,
            expected=f"names that begin with {' or '.join(_SPELLINGS)}",
        )
    missing = [name for name in real if name not in placed]
    if missing:
        raise MissingTensor(
            f"{len(missing)} of {len(real)} tensors are missing: {listed(missing)}",
            where=where,
            expected="every tensor of the draft head",
            fix="fetch the checkpoint again",
        )
    check_forms(placed, real, where)
    return placed, real, (f"{rotary} stored rotary tables ignored: m31 computes its own",) if rotary else ()


def require_fit(draft: Draft, target: Model, *, where: str) -> None:
    """Refuse a draft head of another target.

    Raises:
        ConfigError: a size that both share differs.
    """
    text = target.text
    for what, ours, theirs in (
        ("layers of its target", draft.target_num_layers, text.num_layers),
        ("hidden size", draft.hidden_size, text.hidden_size),
        ("vocabulary", draft.vocab_size, text.vocab_size),
    ):
        if ours != theirs:
            raise ConfigError(
                f"the draft head was made for another model: {what} {ours}", where=where, expected=str(theirs)
            )
    if draft.noise_token_id >= text.vocab_size:
        raise ConfigError(
            f"'dspark_noise_token_id' {draft.noise_token_id} is outside the vocabulary of {text.vocab_size}",
            where=where,
        )
