"""From stored tensor names to canonical ones, MODEL.md §4.1.

Three spellings occur: the official names, the text-only names with or without `language_model.`, and the names that
transformers uses in memory and writes for text-only models. The last stacks experts and fuses gate with up; such a
tensor becomes several canonical ones, each a contiguous byte range of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from m31.checkpoint.inventory import ITEMSIZE, numel

# M3's drafting layers and stored rotary tables: known, not needed (MODEL.md §2.6, §4.3).
_IGNORED = re.compile(r"^(language_model\.)?(model\.)?(language_model\.)?mtp\.|rotary_emb\.")
_VISION = (
    "vision_tower.",
    "multi_modal_projector.",
    "patch_merge_mlp.",
    "model.vision_tower.",
    "model.multi_modal_projector.",
)

_PREFIXES = (
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("model.language_model.", "model."),
    ("model.vision_tower.embeddings.proj.", "vision_tower.vision_model.embeddings.patch_embedding."),
    ("model.vision_tower.layers.", "vision_tower.vision_model.encoder.layers."),
    ("model.vision_tower.pre_layrnorm.", "vision_tower.vision_model.pre_layrnorm."),
    ("model.multi_modal_projector.merge_linear_", "patch_merge_mlp.linear_"),
    ("model.multi_modal_projector.", "multi_modal_projector."),
)
_OFFICIAL_PREFIX = "language_model."
_OFFICIAL_TEXT = ("language_model.model.", "language_model.lm_head.")
_LAYER = re.compile(r"^(model\.layers\.\d+)\.(.+)$")
_REST = (
    (re.compile(r"^self_attn\.indexer\.([qk])_(proj|norm)\."), r"self_attn.index_\1_\2."),
    (re.compile(r"^mlp\.gate\.e_score_correction_bias$"), "block_sparse_moe.e_score_correction_bias"),
    (re.compile(r"^mlp\.(gate|experts|shared_experts)\."), r"block_sparse_moe.\1."),
)


def is_ignored(name: str) -> bool:
    """True for tensors that m31 knows and leaves unread."""
    return _IGNORED.search(name) is not None


def is_vision(name: str) -> bool:
    """True for names of the vision tower or projector, in any spelling."""
    return name.startswith(_VISION)


def strip_official(name: str) -> str:
    """The canonical name of an officially named tensor."""
    return name[len(_OFFICIAL_PREFIX) :] if name.startswith(_OFFICIAL_TEXT) else name


def add_official(name: str) -> str:
    """The official stored name of a canonical one, for the vision-language architecture."""
    return name if is_vision(name) else _OFFICIAL_PREFIX + name


_ROUTED = ".experts."  # not `.shared_experts.`


def from_modelopt(name: str, dtype: str) -> str:
    """ModelOpt's name of a part of a quantised tensor, in the spelling of MODEL.md §3; other names are left alone.

    What the part is follows from its suffix and its dtype together: `weight` is packed FP4 only where it is U8, and
    `weight_scale` belongs to MXFP8 only outside the routed experts. The values of the two global scales are
    reciprocals of ours; see `m31.checkpoint.logical`.
    """
    stem, _, suffix = name.rpartition(".")
    if suffix == "weight" and dtype == "U8" and _ROUTED in name:
        return f"{name}_packed"
    if suffix == "weight_scale" and dtype == "U8" and _ROUTED not in name:
        return f"{stem}.weight_scale_inv"
    if suffix in ("weight_scale_2", "input_scale") and _ROUTED in name:
        return f"{stem}.{'weight' if suffix == 'weight_scale_2' else 'input'}_global_scale"
    return name


def rename(name: str) -> str:
    """The canonical spelling of any stored name. Stacked and fused names stay one name; see `split`."""
    for old, new in _PREFIXES:
        if name.startswith(old):
            name = new + name[len(old) :]
            break
    match = _LAYER.match(name)
    if match is None:
        return name
    rest = match[2]
    for pattern, replacement in _REST:
        rest, hits = pattern.subn(replacement, rest)
        if hits:
            break
    return f"{match[1]}.{rest}"


@dataclass(frozen=True, slots=True)
class Piece:
    """A canonical tensor inside a stored one: `offset` and its size are in bytes from the stored tensor's start."""

    name: str
    shape: tuple[int, ...]
    offset: int


def split(name: str, shape: tuple[int, ...], dtype: str) -> Iterator[Piece]:
    """The canonical tensors in one renamed stored tensor; an ordinary tensor yields itself.

    Stacked experts are `gate_up_proj` [E, 2I, H] and `down_proj` [E, H, I]; fused MLPs `gate_up_proj.weight` [2F, H].
    Gate is the first half, up the second (MODEL.md §2.5). A shape that cannot be such a stack yields itself too, so
    that validation reports it under its stored name.
    """
    if name.endswith(".experts.gate_up_proj") and len(shape) == 3 and shape[1] % 2 == 0:
        stem, half = name.removesuffix("gate_up_proj"), (shape[1] // 2, shape[2])
        step = numel(half) * ITEMSIZE[dtype]
        for expert in range(shape[0]):
            yield Piece(f"{stem}{expert}.w1.weight", half, 2 * expert * step)
            yield Piece(f"{stem}{expert}.w3.weight", half, (2 * expert + 1) * step)
    elif name.endswith(".experts.down_proj") and len(shape) == 3:
        stem, one = name.removesuffix("down_proj"), shape[1:]
        step = numel(one) * ITEMSIZE[dtype]
        for expert in range(shape[0]):
            yield Piece(f"{stem}{expert}.w2.weight", one, expert * step)
    elif name.endswith(".gate_up_proj.weight") and len(shape) == 2 and shape[0] % 2 == 0:
        stem, half = name.removesuffix("gate_up_proj.weight"), (shape[0] // 2, shape[1])
        yield Piece(f"{stem}gate_proj.weight", half, 0)
        yield Piece(f"{stem}up_proj.weight", half, numel(half) * ITEMSIZE[dtype])
    else:
        yield Piece(name, shape, 0)
