"""Which tensors a checkpoint must hold: canonical name -> shape, dtypes, group and storage. MODEL.md chapter 4.

Canonical names are the official ones without the `language_model.` prefix for text, and as stored for vision.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, get_args

from m31.config.model import Model, Text, Vision, WeightFormat
from m31.errors import UnsupportedFeature

Group = Literal[
    "routed_experts",
    "attention",
    "index",
    "dense_mlp",
    "shared_experts",
    "embeddings",
    "router",
    "norms",
    "vision",
    "projector",
]
Storage = Literal["plain", "fp8", "e8m0_scale", "fp4_packed", "fp8_scale", "global_scale"]

GROUPS: tuple[Group, ...] = get_args(Group)
MX_BLOCK = 32  # inputs per E8M0 scale, MODEL.md §3.1
NV_GROUP = 16  # inputs per E4M3 scale, MODEL.md §3.2
ITEMSIZE = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8, "C64": 8,
}  # bytes per element of every safetensors dtype that occupies whole bytes  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorDecl:
    """What one stored tensor must look like.

    Attributes:
        shape: stored shape. A `global_scale` may also be a scalar (MODEL.md §10.7).
        dtypes: allowed safetensors dtypes; the first is the one that the published checkpoint uses.
        group: row of MODEL.md §3.7.
        logical_numel: weights of the model that the tensor carries; 0 for scales, twice the bytes for packed FP4.
        storage: how the bytes encode them.
        norm: True for zero-centred Gemma norm weights.
    """

    shape: tuple[int, ...]
    dtypes: tuple[str, ...]
    group: Group
    logical_numel: int
    storage: Storage
    norm: bool = False

    @property
    def stored_bytes(self) -> int:
        """Bytes in the dtype that is published."""
        return numel(self.shape) * ITEMSIZE[self.dtypes[0]]


def numel(shape: tuple[int, ...]) -> int:
    """Product of a shape; 1 for a scalar."""
    count = 1
    for size in shape:
        count *= size
    return count


def expected(config: Model) -> dict[str, TensorDecl]:
    """Every tensor of the text model, vision tower and projector, in model order.

    Multi-token-prediction layers (M3) are not part of it: m31 ignores them by name (MODEL.md §2.6).
    """
    return dict(_declare(config))


def _declare(config: Model) -> Iterator[tuple[str, TensorDecl]]:
    yield from _text(config)
    if config.vision is not None:
        yield from _vision(config.vision, config.text.hidden_size, _float_dtypes(config))


def _float_dtypes(config: Model) -> tuple[str, ...]:
    return ("F32", "BF16") if config.dtype == "float32" else ("BF16", "F32")


def plain(shape: tuple[int, ...], group: Group, dtypes: tuple[str, ...], *, norm: bool = False) -> TensorDecl:
    """Declaration of an unquantised tensor."""
    return TensorDecl(shape=shape, dtypes=dtypes, group=group, logical_numel=numel(shape), storage="plain", norm=norm)


def linear(
    out: int, width: int, group: Group, fmt: WeightFormat, dtypes: tuple[str, ...]
) -> tuple[tuple[str, TensorDecl], ...]:
    """Suffixes and declarations of one `y = x W^T` with W [out, width].

    Raises:
        UnsupportedFeature: the format's blocks do not divide the width. Readers disagree on what a scale of a block
            that is only partly there means (BUG-46, BUG-58), so there is no such file.
    """
    weight = plain((out, width), group, dtypes)
    if fmt == "plain":
        return ((".weight", weight),)
    block = MX_BLOCK if fmt == "mxfp8" else NV_GROUP
    if width % block:
        raise UnsupportedFeature(
            f"a linear layer of {group} has {width} inputs, which {fmt}'s blocks of {block} do not divide",
            where="config.json",
            expected="a multiple",
            fix="correct the widths, or use unquantised weights",
        )
    if fmt == "mxfp8":
        scale = (out, width // MX_BLOCK)
        return (
            (".weight", replace(weight, dtypes=("F8_E4M3",), storage="fp8")),
            (".weight_scale_inv", _side(scale, ("U8", "F8_E8M0"), group, "e8m0_scale")),
        )
    packed = replace(weight, shape=(out, width // 2), dtypes=("U8",), storage="fp4_packed")
    return (
        (".weight_packed", packed),
        (".weight_scale", _side((out, width // NV_GROUP), ("F8_E4M3",), group, "fp8_scale")),
        (".weight_global_scale", _side((1,), ("F32",), group, "global_scale")),
        (".input_global_scale", _side((1,), ("F32",), group, "global_scale")),
    )


def _side(shape: tuple[int, ...], dtypes: tuple[str, ...], group: Group, storage: Storage) -> TensorDecl:
    return TensorDecl(shape=shape, dtypes=dtypes, group=group, logical_numel=0, storage=storage)


def _text(config: Model) -> Iterator[tuple[str, TensorDecl]]:
    text, floats = config.text, _float_dtypes(config)
    table = plain((text.vocab_size, text.hidden_size), "embeddings", floats)
    norm = plain((text.hidden_size,), "norms", floats, norm=True)
    yield "model.embed_tokens.weight", table
    for layer in range(text.num_layers):
        stem = f"model.layers.{layer}"
        yield f"{stem}.input_layernorm.weight", norm
        yield from _attention(config, layer, f"{stem}.self_attn")
        yield f"{stem}.post_attention_layernorm.weight", norm
        if text.mlp[layer] == "dense":
            yield from _mlp(config, f"{stem}.mlp", text.dense_intermediate_size, "dense_mlp")
        else:
            yield from _moe(config, f"{stem}.block_sparse_moe")
    yield "model.norm.weight", norm
    yield "lm_head.weight", table


def _attention(config: Model, layer: int, stem: str) -> Iterator[tuple[str, TensorDecl]]:
    text, floats = config.text, _float_dtypes(config)
    fmt: WeightFormat = config.quantization.linears if config.quantization else "plain"
    hidden, head = text.hidden_size, text.head_dim
    for name, out, width in (
        ("q_proj", text.num_heads * head, hidden),
        ("k_proj", text.num_kv_heads * head, hidden),
        ("v_proj", text.num_kv_heads * head, hidden),
        ("o_proj", hidden, text.num_heads * head),
    ):
        for suffix, decl in linear(out, width, "attention", fmt, floats):
            yield f"{stem}.{name}{suffix}", decl
    for name in ("q_norm", "k_norm"):
        yield f"{stem}.{name}.weight", plain((head,), "norms", floats, norm=True)
    if text.attention[layer] == "sparse" and text.sparse is not None:
        msa = text.sparse
        for name, out in (("index_q_proj", msa.num_index_heads * msa.index_dim), ("index_k_proj", msa.index_dim)):
            for suffix, decl in linear(out, hidden, "index", fmt, floats):
                yield f"{stem}.{name}{suffix}", decl
        for name in ("index_q_norm", "index_k_norm"):
            yield f"{stem}.{name}.weight", plain((msa.index_dim,), "norms", floats, norm=True)


def _mlp(config: Model, stem: str, width: int, group: Group) -> Iterator[tuple[str, TensorDecl]]:
    hidden = config.text.hidden_size
    fmt: WeightFormat = config.quantization.linears if config.quantization else "plain"
    for name, out, inner in (("gate_proj", width, hidden), ("up_proj", width, hidden), ("down_proj", hidden, width)):
        for suffix, decl in linear(out, inner, group, fmt, _float_dtypes(config)):
            yield f"{stem}.{name}{suffix}", decl


def _moe(config: Model, stem: str) -> Iterator[tuple[str, TensorDecl]]:
    moe, hidden = config.text.moe, config.text.hidden_size
    assert moe is not None  # the config room guarantees it for a layer of kind moe
    # The router stays in F32 in the published files; BF16 occurs and is allowed (MODEL.md §10.9).
    yield f"{stem}.gate.weight", plain((moe.num_experts, hidden), "router", ("F32", "BF16"))
    yield f"{stem}.e_score_correction_bias", plain((moe.num_experts,), "router", ("F32", "BF16"))
    yield from _mlp(config, f"{stem}.shared_experts", moe.shared_intermediate_size, "shared_experts")
    fmt: WeightFormat = config.quantization.experts if config.quantization else "plain"
    inner, floats = moe.expert_intermediate_size, _float_dtypes(config)
    parts = [
        (f".{name}{suffix}", decl)
        for name, out, width in (("w1", inner, hidden), ("w3", inner, hidden), ("w2", hidden, inner))
        for suffix, decl in linear(out, width, "routed_experts", fmt, floats)
    ]
    for expert in range(moe.num_experts):
        head = f"{stem}.experts.{expert}"
        for suffix, decl in parts:
            yield head + suffix, decl


def _with_bias(
    stem: str, out: int, width: int, group: Group, floats: tuple[str, ...]
) -> Iterator[tuple[str, TensorDecl]]:
    yield f"{stem}.weight", plain((out, width), group, floats)
    yield f"{stem}.bias", plain((out,), group, floats)


def _vision(vision: Vision, text_hidden: int, floats: tuple[str, ...]) -> Iterator[tuple[str, TensorDecl]]:
    """Vision tower and projector, MODEL.md §4.2."""
    hidden, inner = vision.hidden_size, vision.intermediate_size
    stem = "vision_tower.vision_model"
    patch = (hidden, vision.num_channels, vision.temporal_patch_size, vision.patch_size, vision.patch_size)
    yield f"{stem}.embeddings.patch_embedding.weight", plain(patch, "vision", floats)

    def layer_norm(name: str) -> Iterator[tuple[str, TensorDecl]]:
        for part in ("weight", "bias"):
            yield f"{name}.{part}", plain((hidden,), "vision", floats)

    yield from layer_norm(f"{stem}.pre_layrnorm")  # the typo is in the files
    for layer in range(vision.num_layers):
        block = f"{stem}.encoder.layers.{layer}"
        yield from layer_norm(f"{block}.layer_norm1")
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            yield from _with_bias(f"{block}.self_attn.{name}", hidden, hidden, "vision", floats)
        yield from layer_norm(f"{block}.layer_norm2")
        yield from _with_bias(f"{block}.mlp.fc1", inner, hidden, "vision", floats)
        yield from _with_bias(f"{block}.mlp.fc2", hidden, inner, "vision", floats)
    merged, width = text_hidden * vision.spatial_merge_size**2, vision.projector_hidden_size
    for name, first in (("multi_modal_projector", hidden), ("patch_merge_mlp", merged)):
        yield from _with_bias(f"{name}.linear_1", width, first, "projector", floats)
        yield from _with_bias(f"{name}.linear_2", text_hidden, width, "projector", floats)


def text_layer_kinds(text: Text) -> str:
    """Layer kinds in one line, such as `3 dense + 57 moe; 60 sparse`."""
    mlp = " + ".join(f"{n} {kind}" for kind in ("dense", "moe") if (n := text.mlp.count(kind)))
    attention = " + ".join(f"{n} {kind}" for kind in ("full", "sparse") if (n := text.attention.count(kind)))
    return f"{mlp}; {attention}"
