"""`quantization_config`, MODEL.md §1.4."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import StrictStr

from m31.config.model import Quantization, WeightFormat
from m31.config.modelopt import is_modelopt, parse_modelopt
from m31.config.schema import AnyInt, NaturalInt, Strict, shown, validate
from m31.errors import ConfigError, UnsupportedFeature


class _Section(Strict):
    quant_method: StrictStr
    weight_block_size: list[AnyInt]
    activation_scheme: StrictStr
    moe_quant_algo: StrictStr | None = None
    moe_quant_format: StrictStr | None = None
    group_size: NaturalInt | None = None
    attention_quant_algo: StrictStr | None = None
    kv_cache_quant_algo: StrictStr | None = None
    index_k_quant_type: StrictStr | None = None
    ignored_layers: list[StrictStr] | None = None
    modules_to_not_convert: list[StrictStr] | None = None


def parse_quantization(section: Mapping[str, Any], *, where: str) -> Quantization:
    """Decide the stored formats.

    The pair `moe_quant_algo`, `moe_quant_format` distinguishes NVFP4 experts from MXFP8 ones; `quant_method` is the
    same word for both. ModelOpt's section is another dialect; see `m31.config.modelopt`.

    Raises:
        UnsupportedFeature: any format that no published checkpoint of this family has.
        ConfigError: half of the pair, or a group size without NVFP4 experts.
    """
    if is_modelopt(section):
        return parse_modelopt(section, where=where)
    method = section.get("quant_method")
    if isinstance(method, str) and method != "mxfp8":
        raise UnsupportedFeature(f"'quant_method' is {shown(method)}", where=where, expected="'mxfp8' or 'modelopt'")
    parsed = validate(_Section, section, where=where)
    _require(parsed.weight_block_size == [1, 32], "weight_block_size", parsed.weight_block_size, "[1, 32]", where)
    _require(parsed.activation_scheme == "dynamic", "activation_scheme", parsed.activation_scheme, "'dynamic'", where)
    for key, value, only in (
        ("attention_quant_algo", parsed.attention_quant_algo, "FP8"),
        ("kv_cache_quant_algo", parsed.kv_cache_quant_algo, "FP8"),
        ("index_k_quant_type", parsed.index_k_quant_type, "nvfp4"),
    ):
        _require(value in (None, only), key, value, repr(only), where)
    experts = _expert_format(parsed, where)
    names = (parsed.ignored_layers or []) + (parsed.modules_to_not_convert or [])
    ignored = tuple(dict.fromkeys(name.removeprefix("model.") for name in names))
    return Quantization(linears="mxfp8", experts=experts, ignored=ignored, dialect="official")


def _expert_format(parsed: _Section, where: str) -> WeightFormat:
    pair = (parsed.moe_quant_algo, parsed.moe_quant_format)
    if pair == (None, None):
        if parsed.group_size is not None:
            raise ConfigError(
                f"'group_size' is {parsed.group_size}, but no NVFP4 experts are declared",
                where=where,
                expected="moe_quant_algo and moe_quant_format beside it, or no group_size",
            )
        return "mxfp8"
    if None in pair:
        raise ConfigError(
            f"has only one of moe_quant_algo ({shown(pair[0])}) and moe_quant_format ({shown(pair[1])})",
            where=where,
            expected="both, or neither",
        )
    _require(pair[0] == "NVFP4", "moe_quant_algo", pair[0], "'NVFP4'", where)
    _require(pair[1] == "nvfp4-pack-quantized", "moe_quant_format", pair[1], "'nvfp4-pack-quantized'", where)
    if parsed.group_size is None:
        raise ConfigError("missing key 'group_size'", where=where, expected="16, the NVFP4 group")
    _require(parsed.group_size == 16, "group_size", parsed.group_size, "16", where)
    return "nvfp4"


def _require(holds: bool, key: str, value: object, expected: str, where: str) -> None:
    if not holds:
        raise UnsupportedFeature(f"'{key}' is {shown(value)}", where=where, expected=expected)
