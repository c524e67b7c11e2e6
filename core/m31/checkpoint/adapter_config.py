"""`adapter_config.json` of a low-rank adapter, as PEFT writes it, read strictly.

Every key of PEFT's LoraConfig is one of three: it says what the adapter computes and is understood here; it asks for
something else than `y = W x + scale B A x` and must have its neutral value; or it only concerns how the adapter was
made. Keys that PEFT does not have are refused, since nobody can say which of the three they are.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from m31.errors import ConfigError, UnknownKey, UnsupportedFeature

NAME = "adapter_config.json"

# Each changes the computation, or the base, unless it has one of these values.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "bias": ("none",),
    "fan_in_fan_out": (False, None),
    "use_dora": (False, None),
    "lora_bias": (False, None),
    "use_qalora": (False, None),
    "modules_to_save": (None, []),
    "layers_to_transform": (None, []),
    "layers_pattern": (None, [], ""),
    "layer_replication": (None, []),
    "trainable_token_indices": (None, [], {}),
    "target_parameters": (None, []),
    "alora_invocation_tokens": (None, []),
    "use_bdlora": (None, False),
    "monteclora_config": (None,),
    "velora_config": (None,),
    "arrow_config": (None,),
    "kasa_config": (None,),
}
# Of how the adapter was trained, saved or begun.
_MAKING = (
    *("task_type", "inference_mode", "auto_mapping", "peft_version", "base_model_name_or_path", "revision"),
    *("lora_dropout", "init_lora_weights", "loftq_config", "eva_config", "corda_config", "lora_ga_config"),
    *("megatron_config", "megatron_core", "runtime_config", "qalora_group_size", "ensure_weight_tying"),
)
_READ = (
    *("peft_type", "r", "lora_alpha", "use_rslora", "target_modules", "exclude_modules"),
    *("rank_pattern", "alpha_pattern"),
)
# Beginnings that leave the base as it is. Others (PiSSA, OLoRA, CorDA, LoftQ, LoRA-GA) subtract the adapter from the
# base's weights first: it then belongs to weights that this checkpoint does not have.
_BEGINNINGS = (True, False, None, "gaussian", "orthogonal", "eva")
_QUIET = ("task_type", "inference_mode", "peft_version", "base_model_name_or_path", "megatron_core")  # in every folder
_MAX_RANK = 65_536

Patterns = tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterConfig:
    """What an adapter is.

    Args:
        r: rank of modules that no rank pattern names.
        alpha: likewise; a module is scaled by alpha / r, or by alpha / sqrt(r).
        rslora: which of the two.
        target_modules: names or endings of names behind a dot, or one regular expression for the whole name.
        exclude_modules: likewise, what is left out nevertheless.
        rank_pattern, alpha_pattern: regular expression of a name, or of its end behind a dot -> rank or alpha. For
            PEFT the first that fits counts, and it sorts them when it saves: two that fit one name must agree.
        notes: keys that were read and have no part in what is computed.
    """

    r: int
    alpha: float
    rslora: bool
    target_modules: str | tuple[str, ...]
    exclude_modules: str | tuple[str, ...] = ()
    rank_pattern: Patterns = ()
    alpha_pattern: Patterns = ()
    notes: tuple[str, ...] = field(default=(), compare=False)

    def targets(self, module: str) -> bool:
        """Whether the module of that full name has an adapter."""
        return _named(self.target_modules, module) and not _named(self.exclude_modules, module)

    def rank(self, module: str) -> int:
        """Rank of a module. Raises ConfigError: two patterns disagree."""
        return int(_fitting("rank_pattern", self.rank_pattern, module, self.r))

    def scale(self, module: str) -> float:
        """Factor of `B A` of a module. Raises ConfigError: two patterns disagree."""
        rank = self.rank(module)
        alpha = _fitting("alpha_pattern", self.alpha_pattern, module, self.alpha)
        return alpha / (math.sqrt(rank) if self.rslora else rank)

    def to_json(self, base: str) -> dict[str, Any]:
        """The file's content, for a base of that name. Only keys that every PEFT from 0.8 on knows."""
        targets, excluded = self.target_modules, self.exclude_modules
        content: dict[str, Any] = {
            "base_model_name_or_path": base,
            "bias": "none",
            "fan_in_fan_out": False,
            "inference_mode": True,
            "init_lora_weights": True,
            "lora_alpha": int(self.alpha) if self.alpha == int(self.alpha) else self.alpha,
            "lora_dropout": 0.0,
            "modules_to_save": None,
            "peft_type": "LORA",
            "r": self.r,
            "rank_pattern": {name: int(rank) for name, rank in self.rank_pattern},
            "alpha_pattern": dict(self.alpha_pattern),
            "target_modules": targets if isinstance(targets, str) else list(targets),
            "task_type": "CAUSAL_LM",
            "use_rslora": self.rslora,
        }
        if excluded:
            content["exclude_modules"] = excluded if isinstance(excluded, str) else list(excluded)
        return content


def _named(wanted: str | tuple[str, ...], module: str) -> bool:
    if isinstance(wanted, str):
        return bool(wanted) and re.fullmatch(wanted, module) is not None
    return any(module == name or module.endswith(f".{name}") for name in wanted)


def _fitting(key: str, patterns: Patterns, module: str, otherwise: float) -> float:
    found = {name: value for name, value in patterns if re.match(rf"(.*\.)?({name})$", module)}
    if len(set(found.values())) > 1:
        raise ConfigError(
            f"'{key}' has {' and '.join(map(repr, found))} for '{module}', with different values",
            where=NAME,
            expected="one: PEFT takes the first, and sorts them when it saves",
            fix="look up which one the adapter was trained with, and remove the other",
        )
    return next(iter(found.values()), otherwise)


def parse_adapter(content: Mapping[str, Any], *, where: str) -> AdapterConfig:
    """The typed form of adapter_config.json.

    Args:
        content: the decoded file.
        where: its name, for messages.

    Raises:
        UnknownKey: a key that PEFT does not have.
        UnsupportedFeature: a key that asks for another computation than a plain adapter's.
        ConfigError: a key that is missing, or has a value that it cannot have.
    """
    known = (*_READ, *_NEUTRAL, *_MAKING)
    for key in content:
        if key not in known:
            raise UnknownKey(key, where=where, nearest=next(iter(difflib.get_close_matches(key, known, n=1)), None))
    if content.get("peft_type") != "LORA":
        raise UnsupportedFeature(f"'peft_type' is {content.get('peft_type')!r}", where=where, expected="LORA")
    for key, neutral in _NEUTRAL.items():
        if key in content and not any(_same(content[key], value) for value in neutral):
            raise UnsupportedFeature(
                f"'{key}' is {content[key]!r:.80}",
                where=where,
                expected=f"{neutral[0]!r}: m31 adds scale * B A to linear layers and nothing else",
                fix="train without it, or merge the adapter into an unquantised checkpoint with the tool that made it",
            )
    beginning = content.get("init_lora_weights", True)
    if not any(_same(beginning, value) for value in _BEGINNINGS):
        raise UnsupportedFeature(
            f"'init_lora_weights' is {beginning!r:.80}, which began by changing the base's weights",
            where=where,
            expected=" or ".join(repr(value) for value in _BEGINNINGS),
            fix="save it with PEFT's path_initial_model_for_weight_conversion, which makes an adapter of the base",
        )
    excluded = content.get("exclude_modules")
    return AdapterConfig(
        r=_rank(content, "r", where),
        alpha=_positive(_required(content, "lora_alpha", where), "lora_alpha", where),
        rslora=_boolean(content.get("use_rslora", False), "use_rslora", where),
        target_modules=_modules(_required(content, "target_modules", where), "target_modules", where),
        exclude_modules=() if excluded in (None, []) else _modules(excluded, "exclude_modules", where),
        rank_pattern=_patterns(content, "rank_pattern", where),
        alpha_pattern=_patterns(content, "alpha_pattern", where),
        notes=_notes(content),
    )


def _same(a: object, b: object) -> bool:
    """Equal, and not only because True is 1."""
    return type(a) is type(b) and a == b


def _notes(content: Mapping[str, Any]) -> tuple[str, ...]:
    told = [key for key in _MAKING if key in content and key not in _QUIET and content[key] not in (None, {}, [], "")]
    usual = {"lora_dropout": (0, 0.0), "init_lora_weights": (True,), "qalora_group_size": (16,)}
    told = [key for key in told if not (content[key] is False or content[key] in usual.get(key, ()))]
    told = [key for key in told if key != "runtime_config" or any(content[key].values())]
    if not told:
        return ()
    listed = ", ".join(f"{key} {content[key]!r:.60}" for key in told)
    return (f"{NAME}: of its training, without a part in what is computed: {listed}",)


def _required(content: Mapping[str, Any], key: str, where: str) -> Any:
    if content.get(key) is None:
        raise ConfigError(f"'{key}' is missing", where=where, fix="this is not a whole adapter_config.json")
    return content[key]


def _rank(content: Mapping[str, Any], key: str, where: str) -> int:
    value = _required(content, key, where)
    if type(value) is not int or not 0 < value <= _MAX_RANK:
        raise ConfigError(f"'{key}' is {value!r:.40}", where=where, expected=f"a whole number from 1 to {_MAX_RANK:,}")
    return value


def _positive(value: object, key: str, where: str) -> float:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 < float(value) < math.inf:  # type: ignore[arg-type]
        raise ConfigError(f"'{key}' is {value!r:.40}", where=where, expected="a finite number above zero")
    return float(value)  # type: ignore[arg-type]


def _boolean(value: object, key: str, where: str) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"'{key}' is {value!r:.40}", where=where, expected="true or false")
    return value


def _modules(value: object, key: str, where: str) -> str | tuple[str, ...]:
    if isinstance(value, str) and value:
        if value == "all-linear":
            raise ConfigError(
                f"'{key}' is 'all-linear', which means other modules in every library",
                where=where,
                expected="their names, as PEFT writes them when it saves",
            )
        _compiled(value, key, where)
        return value
    if isinstance(value, list) and value and all(isinstance(item, str) and item for item in value):
        return tuple(sorted(set(value)))
    raise ConfigError(f"'{key}' is {value!r:.80}", where=where, expected="names of modules, or a regular expression")


def _patterns(content: Mapping[str, Any], key: str, where: str) -> Patterns:
    found = content.get(key)
    if found is None:
        return ()
    if not isinstance(found, dict):
        raise ConfigError(f"'{key}' is {found!r:.80}", where=where, expected="an object from pattern to number")
    for name in found:
        _compiled(name, key, where)
    read = _rank if key == "rank_pattern" else lambda c, name, w: _positive(c[name], f"{key}: {name}", w)
    return tuple((name, float(read(found, name, where))) for name in found)


def _compiled(pattern: str, key: str, where: str) -> None:
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as exc:
        raise ConfigError(
            f"'{key}' holds {pattern!r:.80}, which is no regular expression ({exc})", where=where
        ) from exc
