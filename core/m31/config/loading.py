"""`load` and `parse`: recognise architecture and dialect, then build the `Model`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from m31.config import rules
from m31.config.jsonfile import read_object
from m31.config.model import Dialect, Model, Text, Vision
from m31.config.modelopt import MODELOPT_FILE, with_modelopt
from m31.config.official import OfficialText
from m31.config.quantization import parse_quantization
from m31.config.saved import SavedText
from m31.config.schema import TopGeneric, shown, validate
from m31.config.text import official_text, saved_text
from m31.config.vision import official_vision, saved_vision
from m31.errors import ConfigError

VISION_LANGUAGE = "MiniMaxM3SparseForConditionalGeneration"
TEXT_OFFICIAL = "MiniMaxM3SparseForCausalLM"
TEXT_SAVED = "MiniMaxM3VLForCausalLM"
ARCHITECTURES = (VISION_LANGUAGE, TEXT_OFFICIAL, TEXT_SAVED)

# Keys that only one dialect has. A file with keys of both would be read differently by different engines.
_OFFICIAL_MARKS = ("moe_layer_freq", "sparse_attention_config", "rope_theta", "partial_rotary_factor")
_SAVED_MARKS = (
    "layer_types",
    "mlp_layer_types",
    "index_n_heads",
    "index_head_dim",
    "index_block_size",
    "index_topk_blocks",
    "index_local_blocks",
    "rope_parameters",
)
_TEXT_TYPES = ("minimax_m2", "minimax_m3", "minimax_m3_vl_text")
_TOP_TYPES = ("minimax_m3_vl",)


def load(folder_or_file: str | Path) -> Model:
    """Read config.json strictly.

    Args:
        folder_or_file: a checkpoint folder, or a config.json. In a folder, ModelOpt's `hf_quant_config.json` is read
            as well: older exports keep the quantisation there alone.

    Raises:
        ConfigError: unreadable or invalid JSON, an unknown, missing, contradictory or unsupported key, or two files
            that describe different quantisations.
    """
    path = Path(folder_or_file)
    if not path.is_dir():
        return parse(read_object(path), where=str(path))
    model = parse(read_object(path / "config.json"), where=str(path / "config.json"))
    beside = path / MODELOPT_FILE
    return with_modelopt(model, read_object(beside), where=str(beside)) if beside.exists() else model


def parse(mapping: Mapping[str, Any], *, where: str) -> Model:
    """Build the typed description from decoded config.json contents.

    Args:
        mapping: the decoded object.
        where: its name in error messages, usually the path.

    Raises:
        ConfigError: an unknown, missing, contradictory or unsupported key (UnknownKey and UnsupportedFeature included).
    """
    architecture = _architecture(mapping, where)
    nested = "text_config" in mapping
    if not nested and architecture == VISION_LANGUAGE:
        raise ConfigError("missing key 'text_config'", where=where, fix=f"{VISION_LANGUAGE} keeps its text model there")
    dialect = _dialect(mapping, architecture, where)
    return _nested(mapping, architecture, dialect, where) if nested else _flat(mapping, architecture, dialect, where)


def _architecture(mapping: Mapping[str, Any], where: str) -> str:
    names = mapping.get("architectures")
    supported = ", ".join(ARCHITECTURES)
    if names is None:
        raise ConfigError("missing key 'architectures'", where=where, expected=f"one of {supported}")
    if not isinstance(names, list) or len(names) != 1 or names[0] not in ARCHITECTURES:
        only = names[0] if isinstance(names, list) and len(names) == 1 else names
        raise ConfigError(
            f"architecture {shown(only)} is not supported",
            where=where,
            expected=f"one of {supported}",
            fix="m31 runs MiniMax-M3.1-Flash and MiniMax-M3 only",
        )
    return str(names[0])


def _section(mapping: Mapping[str, Any], key: str, where: str) -> Mapping[str, Any]:
    section = mapping[key]
    if not isinstance(section, Mapping):
        raise ConfigError(f"'{key}' is {shown(section)}", where=where, expected="an object")
    return section


def _dialect(mapping: Mapping[str, Any], architecture: str, where: str) -> Dialect:
    text = _section(mapping, "text_config", where) if "text_config" in mapping else mapping
    vision = mapping.get("vision_config")
    marked = [text, vision] if isinstance(vision, Mapping) else [text]
    official = [key for key in _OFFICIAL_MARKS if any(key in part for part in marked)]
    saved = [key for key in _SAVED_MARKS if any(key in part for part in marked)]
    if official and saved:
        raise ConfigError(
            f"mixes two dialects: {', '.join(official)} (official) and {', '.join(saved)} (transformers)",
            where=where,
            expected="one of them",
            fix="keep the keys of the tool that wrote the checkpoint",
        )
    dialect: Dialect = "transformers" if saved or (not official and architecture == TEXT_SAVED) else "official"
    required: dict[str, Dialect] = {TEXT_OFFICIAL: "official", TEXT_SAVED: "transformers"}
    if required.get(architecture, dialect) != dialect:
        raise ConfigError(
            f"architecture '{architecture}' comes with the {required[architecture]} dialect, "
            f"but {(official or saved)[0]} belongs to the {dialect} dialect",
            where=where,
            expected=TEXT_SAVED if dialect == "transformers" else TEXT_OFFICIAL,
        )
    return dialect


def _text(section: Mapping[str, Any], dialect: Dialect, where: str) -> tuple[Text, OfficialText | SavedText]:
    text, parsed = (saved_text if dialect == "transformers" else official_text)(section, where=where)
    rules.require_model_type(parsed, _TEXT_TYPES, where=where)
    return text, parsed


def _flat(mapping: Mapping[str, Any], architecture: str, dialect: Dialect, where: str) -> Model:
    section = {key: value for key, value in mapping.items() if key != "quantization_config"}
    text, parsed = _text(section, dialect, where)
    return Model(
        architecture=architecture,
        dialect=dialect,
        text=text,
        vision=None,
        image_token_id=None,
        video_token_id=None,
        quantization=_quantization(mapping, where),
        dtype=rules.agree(
            "the weights' dtype", {"dtype": parsed.dtype, "torch_dtype": parsed.torch_dtype}, where=where
        ),
    )


def _nested(mapping: Mapping[str, Any], architecture: str, dialect: Dialect, where: str) -> Model:
    if architecture != VISION_LANGUAGE and mapping.get("vision_config") is None:
        # A text-only file has no images: its vision numbers are never read, so they need not be there.
        mapping = {"image_token_index": 0, "video_token_index": 0, "projector_hidden_size": 1} | dict(mapping)
    top = validate(TopGeneric, mapping, where=where)
    rules.enforce(rules.GENERIC | rules.TOP, top, where=where)
    rules.require_model_type(
        top, _TOP_TYPES if architecture == VISION_LANGUAGE else _TOP_TYPES + _TEXT_TYPES, where=where
    )
    text, parsed = _text(_section(mapping, "text_config", where), dialect, f"{where}: text_config")
    vision = _vision(mapping, top, text, architecture, dialect, where)
    dtype = {
        "dtype": top.dtype,
        "torch_dtype": top.torch_dtype,
        "text_config.dtype": parsed.dtype,
        "text_config.torch_dtype": parsed.torch_dtype,
    }
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        spellings = {key: getattr(top, key), f"text_config.{key}": getattr(parsed, key)}
        rules.agree(f"'{key}'", spellings, where=where)
        if getattr(parsed, key) is None and getattr(top, key) is not None:
            raise ConfigError(f"'{key}' stands at the top only", where=where, fix="move it into text_config")
    return Model(
        architecture=architecture,
        dialect=dialect,
        text=text,
        vision=vision,
        image_token_id=None if vision is None else top.image_token_index,
        video_token_id=None if vision is None else top.video_token_index,
        quantization=_quantization(mapping, where),
        dtype=rules.agree("the weights' dtype", dtype, where=where),
    )


def _vision(
    mapping: Mapping[str, Any], top: TopGeneric, text: Text, architecture: str, dialect: Dialect, where: str
) -> Vision | None:
    """The vision section; checked but not built for the text-only alias over a whole multimodal folder."""
    if mapping.get("vision_config") is None:
        if architecture == VISION_LANGUAGE:
            raise ConfigError(
                "missing key 'vision_config'", where=where, fix=f"use {TEXT_OFFICIAL} for a text-only model"
            )
        return None
    build = saved_vision if dialect == "transformers" else official_vision
    section = _section(mapping, "vision_config", where)
    vision = build(section, top, text.hidden_size, where=f"{where}: vision_config", file=where)
    return vision if architecture == VISION_LANGUAGE else None


def _quantization(mapping: Mapping[str, Any], where: str) -> Any:
    if mapping.get("quantization_config") is None:
        return None
    section = _section(mapping, "quantization_config", where)
    return parse_quantization(section, where=f"{where}: quantization_config")
