"""From a parsed vision section of either dialect to `Vision`, MODEL.md §1.3."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from m31.config import rules, saved
from m31.config.model import Vision
from m31.config.official import OfficialVision
from m31.config.saved import SavedVision, SavedVisionRope
from m31.config.schema import TokenCompression, TopGeneric, shown, validate
from m31.errors import ConfigError, UnsupportedFeature

_VISION_TYPES = ("clip_vision_model", "minimax_m3_vl_vision")


def official_vision(section: Mapping[str, Any], top: TopGeneric, hidden: int, *, where: str, file: str) -> Vision:
    """Parse the official `vision_config`; `hidden` is the text width that the projector ends in.

    Raises:
        ConfigError: missing, unknown, contradictory or unsupported keys.
    """
    parsed = validate(OfficialVision, section, where=where)
    return _vision(parsed, top, hidden, parsed.rope_theta, parsed.vision_segment_max_frames, where, file)


def saved_vision(section: Mapping[str, Any], top: TopGeneric, hidden: int, *, where: str, file: str) -> Vision:
    """Parse the `vision_config` that transformers writes.

    Raises:
        ConfigError: missing, unknown, contradictory or unsupported keys.
    """
    parsed = validate(SavedVision, section, where=where)
    rope_where = f"{where}.rope_parameters"
    kind = parsed.rope_parameters.get("rope_type")
    if isinstance(kind, str) and kind != "axial":
        raise UnsupportedFeature(f"'rope_type' is {shown(kind)}", where=rope_where, expected="'axial'")
    rope = validate(SavedVisionRope, parsed.rope_parameters, where=rope_where)
    frames = parsed.vision_segment_max_frames
    return _vision(
        parsed, top, hidden, rope.rope_theta, saved.SEGMENT_MAX_FRAMES if frames is None else frames, where, file
    )


def _vision(
    parsed: OfficialVision | SavedVision,
    top: TopGeneric,
    hidden: int,
    theta: float,
    frames: int,
    where: str,
    file: str,
) -> Vision:
    rules.enforce(rules.GENERIC | rules.VISION, parsed, where=where)
    rules.require_model_type(parsed, _VISION_TYPES, where=where)
    merge, temporal = _merge_sizes(parsed, top, where, file)
    if parsed.hidden_size % parsed.num_attention_heads:
        raise ConfigError(
            f"hidden_size {parsed.hidden_size} does not divide among {parsed.num_attention_heads} attention heads",
            where=where,
            expected="a multiple",
        )
    rules.agree(
        "the width that the projector ends in",
        {"vision_config.projection_dim": parsed.projection_dim, "text_config.hidden_size": hidden},
        where=file,
    )
    rules.agree(
        "the merged patch width",
        {"merged_hidden_size": top.merged_hidden_size, "text hidden_size * spatial_merge_size^2": hidden * merge**2},
        where=file,
    )
    return Vision(
        hidden_size=parsed.hidden_size,
        num_layers=parsed.num_hidden_layers,
        num_heads=parsed.num_attention_heads,
        intermediate_size=parsed.intermediate_size,
        patch_size=parsed.patch_size,
        temporal_patch_size=temporal,
        spatial_merge_size=merge,
        num_channels=parsed.num_channels,
        layer_norm_eps=parsed.layer_norm_eps,
        rope_theta=theta,
        image_size=parsed.image_size,
        segment_max_frames=frames,
        projector_hidden_size=top.projector_hidden_size,
    )


def _merge_sizes(parsed: OfficialVision | SavedVision, top: TopGeneric, where: str, file: str) -> tuple[int, int]:
    """Spatial and temporal merge sizes from up to three places, which must agree (§1.1: repeated in the file)."""
    places: dict[str, Any] = {"vision_config": parsed}
    for name, section, at in (
        ("img_token_compression_config", top.img_token_compression_config, file),
        ("vision_config.img_token_compression_config", parsed.img_token_compression_config, where),
    ):
        if section is not None:
            compression = validate(TokenCompression, section, where=f"{at}: img_token_compression_config")
            rules.enforce(rules.COMPRESSION, compression, where=f"{at}: img_token_compression_config")
            places[name] = compression
    sizes = []
    for key in ("spatial_merge_size", "temporal_patch_size"):
        spellings = {f"{place}.{key}": getattr(section, key) for place, section in places.items()}
        value = rules.agree(f"'{key}'", spellings, where=file)
        if value is None:
            raise ConfigError(
                f"missing key '{key}'", where=where, expected="it here or in img_token_compression_config"
            )
        sizes.append(int(value))
    return sizes[0], sizes[1]
