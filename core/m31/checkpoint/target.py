"""What a converted checkpoint's config.json says: the source's own, with the target's quantisation. MODEL.md §1.4."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Literal, get_args

from m31.config import Model, parse
from m31.config.model import Text
from m31.errors import UnsupportedFeature

TargetFormat = Literal["m31", "m3-mxfp8", "bf16"]
TARGET_FORMATS: tuple[str, ...] = get_args(TargetFormat)


def quantization_section(text: Text, target: TargetFormat) -> dict[str, Any] | None:
    """The `quantization_config` of a target format; None for BF16.

    The modules that stay in BF16 or F32 are those of MODEL.md §1.4; their order and spelling are ours.
    """
    if target == "bf16":
        return None
    gates = [f"model.layers.{layer}.block_sparse_moe.gate" for layer, kind in enumerate(text.mlp) if kind == "moe"]
    section: dict[str, Any] = {"quant_method": "mxfp8", "weight_block_size": [1, 32], "activation_scheme": "dynamic"}
    if target == "m31":
        section |= {
            "moe_quant_algo": "NVFP4",
            "moe_quant_format": "nvfp4-pack-quantized",
            "group_size": 16,
            "attention_quant_algo": "FP8",
            "kv_cache_quant_algo": "FP8",
            "index_k_quant_type": "nvfp4",
        }
    plain = ["lm_head", "model.embed_tokens", "multi_modal_projector", "patch_merge_mlp", "vision_tower"]
    return section | {"ignored_layers": [*gates, *plain]}


def target_config(source: Mapping[str, Any], model: Model, target: TargetFormat) -> tuple[dict[str, Any], Model]:
    """config.json contents for the converted folder, and their typed form.

    Changed are `quantization_config`, the declared dtype (bfloat16) and the count of multi-token-prediction layers,
    which m31 does not read and therefore cannot write.

    Args:
        source: decoded config.json of the source.
        model: its typed form.
        target: the format to write.

    Raises:
        ConfigError: the widths of this model do not allow the format (see `inventory.linear`), or none is known.
    """
    if target not in TARGET_FORMATS:
        raise UnsupportedFeature(f"no target format '{target}'", expected=" or ".join(TARGET_FORMATS))
    mapping = copy.deepcopy(dict(source))
    mapping.pop("quantization_config", None)
    section = quantization_section(model.text, target)
    if section is not None:
        mapping["quantization_config"] = section
    text = mapping.get("text_config", mapping)
    for part in (mapping, text):
        for key in ("num_nextn_predict_layers", "num_mtp_modules"):
            part.pop(key, None)
        for key in ("torch_dtype", "dtype"):
            if key in part:
                part[key] = "bfloat16"
    if not any(key in part for part in (mapping, text) for key in ("torch_dtype", "dtype")):
        mapping["torch_dtype"] = "bfloat16"
    return mapping, parse(mapping, where="config.json (to be written)")
