"""Training configurations, schemes and providers: what is accepted, and what is refused and how."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support import synthetic, trained
from training_helpers import small_corpus

from m31.checkpoint.encoding import Unit
from m31.cli.main import main
from m31.errors import ConfigError, OpRefused, RequestError, UnknownKey
from m31.formats.arithmetic import NAMED
from m31.text import demo
from m31.training import bpe, fakequant, nano
from m31.training import config as training_config
from m31.training.cache import open_cache
from m31.training.data import provided
from m31.training.parameters import Parameters

ROOT = Path(__file__).resolve().parents[2]


def parse(**changes: Any) -> training_config.TrainConfig:
    return training_config.parse(synthetic.mapping(**changes), where="run.toml")


def test_a_whole_file_is_read() -> None:
    config = parse()
    assert config.scheme().arithmetic is NAMED["w4a4-megamoe"]
    raw, target = config.target()
    assert raw["quantization_config"]["quant_method"] == "mxfp8"
    assert target.text.num_layers == 3
    twin = parse(quantisation={"weights": "none", "arithmetic": "exact", "kv": "float32", "index": "float32"})
    assert twin.target()[1].quantization is None
    assert twin.scheme().weights is None


def test_the_shipped_configuration_is_read() -> None:
    for name in ("nano.toml", "nano-twin.toml"):
        config = training_config.load(ROOT / "core/m31/training" / name)
        assert set(config.data.options) == set(inspect.signature(nano.provide).parameters)
        _, target = config.target()
        parameters = Parameters(target, dtype=torch.float32, quantise=config.quantised)
        count = sum(value.numel() for _, value in parameters.named())
        assert 10_500_000 < count < 11_500_000
        ids = bpe.special_ids()
        assert (target.text.bos_token_id, target.text.eos_token_ids) == (ids[demo.BOS], (ids[demo.EOS],))
        assert target.text.vocab_size == bpe.VOCAB_SIZE
        assert target.text.sparse is not None
        assert (target.text.sparse.block_size, target.text.sparse.topk_blocks) == (128, 16)


@pytest.mark.parametrize(
    ("section", "values", "words"),
    [
        ("run", {"threads": 0}, "threads"),
        ("run", {"folder": 3}, "folder"),
        ("optimiser", {"learning_rate": -1.0}, "learning_rate"),
        ("optimiser", {"learning_rate": float("nan")}, "learning_rate"),
        ("optimiser", {"beta1": 1.0}, "beta1"),
        ("optimiser", {"final_fraction": 2.0}, "final_fraction"),
        ("optimiser", {"warmup_steps": 10}, "warmup_steps"),
        ("budget", {"steps": None}, "neither"),
        ("budget", {"minutes": 1.0}, "both"),
        ("batch", {"micro_tokens": True}, "micro_tokens"),
        ("losses", {"balance_rate": -0.1}, "balance_rate"),
        ("quantisation", {"weights": "int4"}, "int4"),
        ("quantisation", {"arithmetic": "w4a5"}, "w4a5"),
        ("quantisation", {"arithmetic": "w8a8-mxfp8"}, "transform"),
        ("quantisation", {"arithmetic": "w4a4-q8kv4", "kv": "bfloat16"}, "E4M3"),
        ("quantisation", {"kv": "int8"}, "int8"),
        ("quantisation", {"index": "int3"}, "int3"),
        ("quantisation", {"weights": "none"}, "twin"),
        ("model", {"hidden_size": 48}, "48"),
        ("model", {"num_hidden_layers": 2}, "num_hidden_layers"),
    ],
)
def test_faults_are_named(section: str, values: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as error:
        parse(**{section: values})
    assert "run.toml" in str(error.value)


def test_minutes_need_a_warmup() -> None:
    with pytest.raises(ConfigError, match="warmup"):
        parse(budget={"steps": None, "minutes": 5.0}, optimiser={"warmup_steps": 0})


def test_unknown_and_missing_keys() -> None:
    with pytest.raises(UnknownKey, match="learning_rate"):
        parse(optimiser={"learning_rat": 1.0})
    with pytest.raises(UnknownKey, match="optimiser"):
        training_config.parse({**synthetic.mapping(), "optimizer": {}}, where="run.toml")
    missing = synthetic.mapping()
    del missing["optimiser"]["clip_norm"]
    with pytest.raises(ConfigError, match="clip_norm"):
        training_config.parse(missing, where="run.toml")


def test_a_quantised_or_seeing_model_is_refused() -> None:
    raw, _ = trained.tiny("m31")
    with pytest.raises(ConfigError, match="quantised"):
        training_config.parse({**synthetic.mapping(), "model": raw}, where="run.toml")


@pytest.mark.parametrize("text", ["[run", "\x00", "[run]\nthreads = 1\nthreads = 2"])
def test_files_that_are_no_toml(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.toml").write_text(text)
    with pytest.raises(ConfigError, match="TOML"):
        training_config.load(tmp_path / "a.toml")


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        training_config.load(tmp_path / "a.toml")


def test_the_fingerprint_covers_what_the_losses_depend_on() -> None:
    base = parse().fingerprint("data")
    assert parse(run={"threads": 2, "save_minutes": 1.0, "folder": "x"}).fingerprint("data") == base
    different = [parse(losses={"balance_rate": 0.1}), parse(budget={"steps": 11}), parse(model={"rope_theta": 1e6})]
    assert len({base, parse().fingerprint("other"), *(c.fingerprint("data") for c in different)}) == 5


@pytest.mark.parametrize(
    ("provider", "options", "words"),
    [
        ("tests.support.synthetic", {}, "module:function"),
        ("no_such_module:x", {}, "cannot be imported"),
        ("tests.support.synthetic:nothing", {}, "cannot be imported"),
        ("tests.support.synthetic:counting", {"colour": 1}, "do not fit"),
        ("builtins:dict", {}, "returns dict"),
    ],
)
def test_providers_that_do_not_provide(provider: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        provided(provider, options, where="[data]")


def test_a_scheme_refuses_what_it_cannot_be() -> None:
    with pytest.raises(OpRefused, match="nvfp4-shared-scale"):
        trained.scheme("w4a16-shared-scale")
    with pytest.raises(OpRefused, match="int4"):
        trained.scheme(weights="int4")
    # Served, projections that are stored plain have plain inputs (MODEL.md §3.7): training would round them.
    with pytest.raises(OpRefused, match="inputs of MXFP8 projections only"):
        trained.scheme(weights="bf16")
    assert trained.scheme("w16a16", weights="bf16").weights == "bf16"


def test_a_weight_that_is_not_finite_is_named() -> None:
    _, target = trained.tiny()
    unit = next(u for u in Parameters(target, dtype=torch.float32, quantise=True).units.values() if u.format == "nvfp4")
    assert isinstance(unit, Unit)
    with pytest.raises(OpRefused, match=r"experts\.0"):
        fakequant.weight(unit, torch.full(unit.shape, torch.nan))


def test_initial_weights_depend_on_seed_and_name_only() -> None:
    made = []
    for weights, seed in (("m31", 1), ("bf16", 1), ("m31", 2)):
        parameters = Parameters(trained.tiny(weights)[1], dtype=torch.float32, quantise=False)
        parameters.initialise(seed)
        made.append({name: value.clone() for name, value in parameters.named()})
    assert all(torch.equal(made[0][name], made[1][name]) for name in made[0])
    assert not torch.equal(made[0]["lm_head.weight"], made[2]["lm_head.weight"])


TOML = """
seed = 1
[run]
folder = "run"
threads = 1
save_minutes = 5
validate_every = 2
[data]
provider = "tests.support.synthetic:counting"
options = { rows = 2, length = 16 }
[quantisation]
weights = "m31"
arithmetic = "w4a4-megamoe"
kv = "nvfp4"
index = "nvfp4"
[optimiser]
learning_rate = 0.01
final_fraction = 0.1
warmup_steps = 1
beta1 = 0.9
beta2 = 0.95
epsilon = 1e-8
weight_decay = 0.1
clip_norm = 1
[losses]
index_weight = 1
balance_rate = 0.001
[budget]
steps = 3
[batch]
micro_tokens = 64
"""


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, model = tmp_path / "a.toml", synthetic.mapping()["model"]
    path.write_text(TOML + synthetic.as_toml(model, "model"))
    for _ in range(2):  # a finished run is recognised
        assert main(["train", str(path)]) == 0
        assert "trained 3 steps" in capsys.readouterr().err
    assert (tmp_path / "run/checkpoint/config.json").exists()
    path.write_text(path.read_text().replace("seed = 1", "seed = 2"))
    assert main(["train", str(path)]) == 1
    assert "another configuration" in capsys.readouterr().err
    assert main(["train", str(tmp_path / "b.toml")]) == 1
    assert "does not exist" in capsys.readouterr().err


def test_the_bar() -> None:
    from m31.cli.train import bar
    from m31.training.trainer import Report

    line = bar(Report(step=25, total=100, loss=2.5, validation=2.75, tokens_per_second=812.4, seconds_left=3725))
    assert line == (
        "[=======                       ]  25%  step 25 of 100, loss 2.5000 (validation 2.7500), 812 tokens/s, "
        "1 h 02 min left"
    )
    assert "step 1 of ?" in bar(Report(1, None, 2.5, None, 800.0, None))


def test_the_nano_learns_from_a_corpus(tmp_path: Path) -> None:
    """Its provider over a few files: batches, held-out windows, and files with which the checkpoint is served."""
    text = small_corpus(tmp_path / "library")
    files = bpe.build(text, vocab_size=600)
    options = {"seed": 1, "tokens": 4096, "recall": 0.1, "validation_length": 64, "validation_windows": 3}
    data = nano.of_corpus(text, files, open_cache(tmp_path / "cache", text, files), **options)
    tokens, targets = data.train.batch(5)
    assert tokens.shape == targets.shape
    assert tokens.numel() == 4096
    assert [len(batch[0]) for batch in data.validation] == [1, 1, 1]
    assert all(batch[0].shape[1] <= 64 for batch in data.validation)
    assert {"tokenizer.json", "generation_config.json"} <= set(data.files)
    other = nano.of_corpus(text, files, open_cache(tmp_path / "cache", text, files), **{**options, "seed": 2})
    assert other.identity != data.identity
    with pytest.raises(RequestError, match="validation_windows"):
        nano.of_corpus(text, files, open_cache(tmp_path / "cache", text, files), **{**options, "validation_windows": 0})
