"""Building blocks of the two config dialects: strict types, the generic transformers keys, and error translation.

Both dialects are pydantic models that forbid extra keys. Pydantic's errors become `m31.errors` with the offending
key, the section, and the nearest known key.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    StrictBool,
    StrictStr,
    ValidationError,
)

from m31.errors import ConfigError, UnknownKey

MAX_INT = 2**31 - 1  # every size fits a 32-bit index; larger values are damage, not models
MAX_LAYERS = 1024  # bounds what a hostile config can make us allocate; MODEL.md has 60 and 32
MAX_EXPERTS = 4096  # same; MODEL.md has 128
MAX_BLOCKS = 65_536  # same, for top-k and for the tokens of a block; MODEL.md has 16 and 128
MAX_EXPERTS_IN_ALL = 65_536  # same, over all layers: each becomes up to 12 declared tensors; MODEL.md has 7,296


def _finite(value: object) -> float:
    """Accept JSON ints and floats, never booleans or strings; refuse NaN, infinity and ints beyond float range."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError("expected a number")
    try:
        number = float(value)
    except OverflowError as exc:
        raise ValueError("expected a number in float range") from exc
    if not math.isfinite(number):
        raise ValueError("expected a finite number")
    return number


def _token_ids(value: object) -> object:
    """Accept null, one token id, or a non-empty list of them."""
    ids = value if isinstance(value, list) else [value]
    if value is not None and not (ids and all(type(item) is int and 0 <= item <= MAX_INT for item in ids)):
        raise ValueError("expected a token id or a non-empty list of them")
    return value


PositiveInt = Annotated[int, Field(strict=True, ge=1, le=MAX_INT)]
NaturalInt = Annotated[int, Field(strict=True, ge=0, le=MAX_INT)]
AnyInt = Annotated[int, Field(strict=True, ge=-MAX_INT, le=MAX_INT)]
LayerCount = Annotated[int, Field(strict=True, ge=1, le=MAX_LAYERS)]
ExpertCount = Annotated[int, Field(strict=True, ge=1, le=MAX_EXPERTS)]
BlockCount = Annotated[int, Field(strict=True, ge=1, le=MAX_BLOCKS)]
Flag01 = Annotated[int, Field(strict=True, ge=0, le=1)]
Finite = Annotated[float, BeforeValidator(_finite)]
PositiveFloat = Annotated[float, BeforeValidator(_finite), Field(gt=0)]
TokenIds = Annotated[int | list[int] | None, PlainValidator(_token_ids)]


class Strict(BaseModel):
    """A section of config.json: unknown keys are errors, values are never converted."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, protected_namespaces=())


class Generic(Strict):
    """Keys that transformers writes into any config. All are inert at inference; the values that would not be
    (dropout, jitter, encoder-decoder, half precision) are refused by `m31.config.rules`."""

    architectures: list[StrictStr] | None = None
    model_type: StrictStr | None = None
    dtype: StrictStr | None = None
    torch_dtype: StrictStr | None = None
    transformers_version: StrictStr | None = None
    name_or_path: StrictStr | None = Field(default=None, alias="_name_or_path")
    commit_hash: StrictStr | None = Field(default=None, alias="_commit_hash")
    attn_autoset: StrictBool | None = Field(default=None, alias="_attn_implementation_autoset")
    auto_map: dict[str, Any] | None = None
    use_cache: StrictBool | None = None
    return_dict: StrictBool | None = None
    output_attentions: StrictBool | None = None
    output_hidden_states: StrictBool | None = None
    output_router_logits: StrictBool | None = None
    initializer_range: Finite | None = None
    initializer_factor: Finite | None = None
    router_aux_loss_coef: Finite | None = None
    router_jitter_noise: Finite | None = None
    attention_dropout: Finite | None = None
    chunk_size_feed_forward: NaturalInt | None = None
    is_encoder_decoder: StrictBool | None = None
    problem_type: StrictStr | None = None
    id2label: dict[str, Any] | None = None
    label2id: dict[str, Any] | None = None
    num_reward_heads: NaturalInt | None = None


class TextGeneric(Generic):
    """Text keys that either dialect may carry. transformers keeps the official extras when it saves a config that it
    read from an official folder, so they occur in both."""

    tie_word_embeddings: StrictBool | None = None
    bos_token_id: NaturalInt | None = None
    eos_token_id: TokenIds = None
    pad_token_id: NaturalInt | None = None
    attention_output_gate: StrictBool | None = None
    rope_scaling: dict[str, Any] | None = None
    num_mtp_modules: NaturalInt | None = None
    num_nextn_predict_layers: NaturalInt | None = None


class TokenCompression(Strict):
    """`img_token_compression_config`, at the top and inside `vision_config`, MODEL.md §1.1."""

    image_token_compression_method: StrictStr
    spatial_merge_size: PositiveInt
    temporal_patch_size: PositiveInt


class TopGeneric(Generic):
    """Top-level keys of the vision-language layout, MODEL.md §1.1; identical in both dialects."""

    image_token_index: NaturalInt
    video_token_index: NaturalInt
    projector_hidden_size: PositiveInt
    image_seq_length: NaturalInt | None = None
    projector_hidden_act: StrictStr | None = None
    multimodal_projector_bias: StrictBool | None = None
    vision_feature_layer: AnyInt | None = None
    vision_feature_select_strategy: StrictStr | None = None
    process_image_mode: StrictStr | None = None
    img_token_compression_config: dict[str, Any] | None = None
    image_grid_pinpoints: list[Any] | None = None
    merged_hidden_size: PositiveInt | None = None
    tie_word_embeddings: StrictBool | None = None
    bos_token_id: NaturalInt | None = None
    eos_token_id: TokenIds = None
    pad_token_id: NaturalInt | None = None
    text_config: dict[str, Any]
    vision_config: dict[str, Any] | None = None
    quantization_config: dict[str, Any] | None = None


Section = TypeVar("Section", bound=Strict)


def known_keys(model: type[Strict]) -> list[str]:
    """The JSON keys of a section, in declaration order."""
    return [field.alias or name for name, field in model.model_fields.items()]


def shown(value: object) -> str:
    """A value for an error message: ASCII, one line, short."""
    try:
        text = ascii(value)
    except ValueError:  # Python refuses to print integers of thousands of digits
        return "a number too large to print"
    return text if len(text) <= 60 else f"{text[:57]}..."


def validate(model: type[Section], section: Mapping[str, Any], *, where: str) -> Section:
    """Parse one section strictly.

    Args:
        where: file and section for messages, such as `config.json: text_config`.

    Raises:
        UnknownKey: a key that the section does not have.
        ConfigError: a key is missing, or has a value of the wrong type or out of range.
    """
    known = known_keys(model)
    for key in section:
        # Unknown before missing: a misspelt key is both, and the misspelling is the useful half.
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1, cutoff=0.6)
            label = shown(key).strip("'\"")
            raise UnknownKey(label, where=where, nearest=near[0] if near else None)
    try:
        return model.model_validate(dict(section))
    except ValidationError as exc:
        raise _translate(exc, where) from exc


def _translate(exc: ValidationError, where: str) -> ConfigError:
    errors = exc.errors(include_url=False, include_context=False)
    missing = [e for e in errors if e["type"] == "missing"]
    if missing:
        names = ", ".join(f"'{_dotted(e['loc'])}'" for e in missing[:8])
        more = f" and {len(missing) - 8} more" if len(missing) > 8 else ""
        plural = "keys" if len(missing) > 1 else "key"
        return ConfigError(
            f"missing {plural} {names}{more}", where=where, fix="m31 assumes no numbers: add it with the model's value"
        )
    first = errors[0]
    message = first["msg"].removeprefix("Value error, ")
    return ConfigError(
        f"'{_dotted(first['loc'])}' is {shown(first['input'])}", where=where, expected=_expected(message)
    )


def _expected(message: str) -> str:
    for head in ("expected ", "Input should be "):
        if message.startswith(head):
            return message.removeprefix(head)
    return f"a valid value ({message})"


def _dotted(loc: tuple[int | str, ...]) -> str:
    out = ""
    for part in loc:
        out += f"[{part}]" if isinstance(part, int) else (f".{part}" if out else part)
    return out
