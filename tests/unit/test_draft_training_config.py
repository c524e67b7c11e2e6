"""Configurations of a draft head's training: what is accepted, and what is refused and how."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
from tests.support import drafted

from m31.checkpoint.draft import expected_draft, require_fit
from m31.checkpoint.inventory import ITEMSIZE, numel
from m31.errors import ConfigError, UnknownKey
from m31.training import bpe, nano
from m31.training import config as text_config
from m31.training.draft import config as draft_config

SHIPPED = Path(__file__).resolve().parents[2] / "core/m31/training"


def parse(**changes: Any) -> draft_config.DraftConfig:
    return draft_config.parse(drafted.mapping(**changes), where="run.toml", folder=Path("here"))


def test_a_whole_file_is_read() -> None:
    config = parse()
    assert config.target.checkpoint == "here/target"
    assert config.draft().target_layer_ids == (0, 2)
    assert config.scheme().weights is None


def test_the_shipped_configuration_fits_the_nano() -> None:
    config = draft_config.load(SHIPPED / "nano-draft.toml")
    text = text_config.load(SHIPPED / "nano.toml")
    draft = config.draft()
    require_fit(draft, text.target()[1], where="nano-draft.toml")
    assert set(config.data.options) == set(inspect.signature(nano.provide).parameters)
    assert draft.noise_token_id == bpe.special_ids()[bpe.NOISE]
    assert (draft.block_size, draft.markov_rank) == (7, 64)
    assert config.target.model_dump(exclude={"checkpoint"}) == text.quantisation.model_dump(exclude={"weights"})
    checkpoint = (SHIPPED / config.target.checkpoint).resolve()
    assert checkpoint == (SHIPPED / text.run.folder / "checkpoint").resolve()
    size = sum(numel(decl.shape) * ITEMSIZE[decl.dtypes[0]] for decl in expected_draft(draft).values())
    assert size < 2_500_000


@pytest.mark.parametrize(
    ("section", "values", "words"),
    [
        ("run", {"threads": 0}, "threads"),
        ("data", {"provider": 3}, "provider"),
        ("optimiser", {"warmup_steps": 10}, "warmup_steps"),
        ("budget", {"minutes": 1.0}, "both"),
        ("batch", {"micro_tokens": 0}, "micro_tokens"),
        ("target", {"checkpoint": 3}, "checkpoint"),
        ("target", {"arithmetic": "w4a5"}, "w4a5"),
        ("target", {"arithmetic": "w8a8-mxfp8"}, "transform"),
        ("target", {"kv": "int8"}, "int8"),
        ("target", {"index": "int3"}, "int3"),
        ("losses", {"blocks": 0}, "blocks"),
        ("losses", {"blocks": 147}, "at most 146"),
        ("losses", {"hard_labels": 1.5}, "hard_labels"),
        ("losses", {"hard_labels": -0.5}, "hard_labels"),
        ("losses", {"row_decay": 0.0}, "row_decay"),
        ("losses", {"row_decay": 1.01}, "row_decay"),
        ("losses", {"confidence_weight": 0.0}, "confidence_weight"),
        ("losses", {"confidence_weight": True}, "confidence_weight"),
        ("head", {"hidden_size": 48}, "48"),
        ("head", {"dspark_markov_head_type": "gated"}, "Markov"),
        ("head", {"dspark_target_layer_ids": [2, 0]}, "target layers"),
        ("head", {"architectures": ["X"]}, "architectures"),
    ],
)
def test_faults_are_named(section: str, values: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as error:
        parse(**{section: values})
    assert "run.toml" in str(error.value)


@pytest.mark.parametrize(
    ("section", "key"),
    [(section, key) for section in ("target", "losses") for key in drafted.mapping()[section]]
    + [(None, name) for name in drafted.mapping()],
)
def test_every_key_is_required(section: str | None, key: str) -> None:
    mapping = drafted.mapping()
    del (mapping if section is None else mapping[section])[key]
    with pytest.raises(ConfigError, match=key):
        draft_config.parse(mapping, where="run.toml", folder=Path())


def test_unknown_keys() -> None:
    with pytest.raises(UnknownKey, match="row_decay"):
        parse(losses={"row_decai": 1.0})
    with pytest.raises(ConfigError, match="dspark_colour"):
        parse(head={"dspark_colour": 1})
    with pytest.raises(UnknownKey, match="model"):
        draft_config.parse({**drafted.mapping(), "model": {}}, where="run.toml", folder=Path())


def test_the_fingerprint_covers_what_the_losses_depend_on() -> None:
    base = parse().fingerprint("data")
    assert parse(run={"threads": 2}, target={"checkpoint": "elsewhere"}).fingerprint("data") == base
    different = [parse(losses={"blocks": 3}), parse(target={"kv": "fp8"}), parse(head={"sliding_window": 17})]
    assert len({base, parse().fingerprint("other"), *(c.fingerprint("data") for c in different)}) == 5
