"""ModelOpt's description of a quantised M3: other names, and scales that decode instead of encode (MODEL.md §1.4).

The layout of the tensors is decided by the tensors; this file decides only what may be in them. Whatever it names that
m31 cannot read exactly is refused by the name of the module.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pydantic import StrictStr

from m31.config.model import Model, Quantization
from m31.config.schema import NaturalInt, Strict, shown, validate
from m31.errors import ConfigError, UnsupportedFeature

MODELOPT_FILE = "hf_quant_config.json"
_MARKS = ("quant_algo", "quantized_layers", "exclude_modules", "producer")
_EXPERT = re.compile(r"(^|\.)experts(\.|$)")
_GROUPS = {"NVFP4": 16, "MXFP8": 32}


class _Section(Strict):
    quant_algo: StrictStr
    quant_method: StrictStr | None = None
    producer: dict[str, Any] | None = None
    group_size: NaturalInt | None = None
    kv_cache_quant_algo: StrictStr | None = None  # this and the next advise on the cache; weights do not depend on it
    kv_cache_scheme: dict[str, Any] | None = None
    config_groups: dict[str, Any] | None = None  # repeats quantized_layers, sorted by format
    quantized_layers: dict[str, Any] | None = None
    exclude_modules: list[StrictStr] | None = None
    ignore: list[StrictStr] | None = None


class _Layer(Strict):
    quant_algo: StrictStr
    group_size: NaturalInt | None = None


class _File(Strict):
    producer: dict[str, Any] | None = None
    quantization: dict[str, Any]


def is_modelopt(section: Mapping[str, Any]) -> bool:
    """True for a `quantization_config` that ModelOpt wrote."""
    method = section.get("quant_method")
    return (isinstance(method, str) and method.startswith("modelopt")) or any(key in section for key in _MARKS)


def parse_modelopt(section: Mapping[str, Any], *, where: str) -> Quantization:
    """Accept NVFP4 routed experts beside linears in MXFP8 or BF16, and nothing else.

    Raises:
        UnsupportedFeature: another algorithm, or one of the two in a module where no such checkpoint has it.
        ConfigError: missing or unknown keys; mixed precision without its list of layers.
    """
    parsed = validate(_Section, section, where=where)
    if parsed.quant_method not in (None, "modelopt"):
        raise UnsupportedFeature(f"'quant_method' is {shown(parsed.quant_method)}", where=where, expected="'modelopt'")
    if parsed.quant_algo not in ("NVFP4", "MIXED_PRECISION"):
        raise UnsupportedFeature(
            f"'quant_algo' is {shown(parsed.quant_algo)}", where=where, expected="'NVFP4' or 'MIXED_PRECISION'"
        )
    if parsed.quant_algo == "MIXED_PRECISION" and not parsed.quantized_layers:
        raise ConfigError("missing key 'quantized_layers'", where=where, expected="it beside MIXED_PRECISION")
    if parsed.quant_algo == "NVFP4" and parsed.group_size not in (None, 16):
        raise UnsupportedFeature(f"'group_size' is {parsed.group_size}", where=where, expected="16, the NVFP4 group")
    for module, entry in (parsed.quantized_layers or {}).items():
        _check_layer(module, entry, where)
    names = (parsed.exclude_modules or []) + (parsed.ignore or [])
    ignored = tuple(dict.fromkeys(name.removeprefix("model.") for name in names))
    return Quantization(linears="mxfp8", experts="nvfp4", ignored=ignored, dialect="modelopt")


def _check_layer(module: str, entry: Any, where: str) -> None:
    at = f"{where}.quantized_layers[{shown(module)}]"
    if not isinstance(entry, Mapping):
        raise ConfigError(f"is {shown(entry)}", where=at, expected="an object")
    layer = validate(_Layer, entry, where=at)
    expected = "NVFP4" if _EXPERT.search(module) else "MXFP8"
    if layer.quant_algo != expected:
        raise UnsupportedFeature(
            f"'quant_algo' is {shown(layer.quant_algo)}",
            where=at,
            expected=f"'{expected}' for {'routed experts' if expected == 'NVFP4' else 'any other module'}",
            fix="m31 reads NVFP4 routed experts beside MXFP8 or BF16 linears; use the vendor's own checkpoint",
        )
    if layer.group_size not in (None, _GROUPS[expected]):
        raise UnsupportedFeature(f"'group_size' is {layer.group_size}", where=at, expected=str(_GROUPS[expected]))


def with_modelopt(model: Model, mapping: Mapping[str, Any], *, where: str) -> Model:
    """`model` with what `hf_quant_config.json` says about its weights.

    Raises:
        ConfigError: the file is not valid, or config.json describes other formats.
    """
    inner = f"{where}: quantization"
    found = parse_modelopt(validate(_File, mapping, where=where).quantization, where=inner)
    known = model.quantization
    if known is None:
        return replace(model, quantization=found)
    if (known.linears, known.experts, known.dialect) != (found.linears, found.experts, found.dialect):
        raise ConfigError(
            f"describes {found.dialect} {found.experts} experts, config.json {known.dialect} {known.experts} experts",
            where=where,
            expected="the same quantisation in both files",
            fix=f"remove the one that does not belong to these weights (usually {MODELOPT_FILE})",
        )
    return model
