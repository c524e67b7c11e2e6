"""Drafting from a real folder: m31.load and the command line, with the head in `dspark/`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.support import quantised

import m31
from m31.cli import demo
from m31.cli.main import main
from m31.engine.compiler import PreparedWeights
from m31.engine.drafting import DraftHead
from m31.errors import BackendRefused, ConfigError, MemoryBudgetExceeded, NonFiniteWeight, RequestError
from m31_reference.session import ReferenceSession

PROMPT = list(range(3, 40))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """M3.1's formats: MXFP8 projections of target and head, NVFP4 experts."""
    path = tmp_path_factory.mktemp("drafting") / "ckpt"
    quantised.write_quantised(path, quantised.bf16_config(), "m31")
    quantised.write_draft(path / "dspark")
    return path


def load(folder: Path, **options: Any) -> Any:
    return m31.load(folder, **{"backend": "reference", "max_context": 512, **options})


def text(model: Any, **params: Any) -> tuple[list[int], Any]:
    generation = model.generate(PROMPT, **{"max_tokens": 40, "temperature": 0.0, "ignore_eos": True, **params})
    list(generation.events())
    return generation.token_ids, generation.stats


@pytest.mark.parametrize("draft", [1, 3, 7])
@pytest.mark.parametrize("formats", [{"dtype": "float64"}, {"kv_dtype": "nvfp4", "index_dtype": "nvfp4"}])
def test_greedy_text_is_that_without_drafting(folder: Path, formats: dict[str, Any], draft: int) -> None:
    want, plain = text(load(folder, **formats))
    got, stats = text(load(folder, draft=draft, **formats))
    assert got == want
    assert (plain.verifies, plain.accepted_per_verify, plain.draft_confidence) == (0, None, None)
    assert stats.verifies > 0
    assert stats.generated_tokens == 40
    assert 0 <= stats.accepted_per_verify <= draft
    assert stats.drafted_tokens <= draft * stats.verifies
    assert 0 < stats.draft_confidence < 1
    # The first token is the prompt's; a verify gives what it accepts and one more; the last may come without a draft.
    assert stats.generated_tokens - 1 - stats.verifies - stats.accepted_tokens in (0, 1)


def test_a_seed_gives_the_same_text_again(folder: Path) -> None:
    model = load(folder, draft=5)
    first, _ = text(model, temperature=1.0, seed=3)
    assert text(model, temperature=1.0, seed=3)[0] == first
    assert text(load(folder, draft=5), temperature=1.0, seed=3)[0] == first
    assert text(model, temperature=1.0, seed=4)[0] != first


def test_an_interrupted_generation_leaves_a_usable_model(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(folder, draft=5)
    want, _ = text(model)
    free = model.engine.pool.free
    real, calls = DraftHead.draft, [0]

    def draft(self: DraftHead, *args: Any) -> Any:
        calls[0] += 1
        if calls[0] == 3:
            raise KeyboardInterrupt
        return real(self, *args)

    monkeypatch.setattr(DraftHead, "draft", draft)
    generation = model.generate(PROMPT, max_tokens=40, temperature=0.0, ignore_eos=True)
    with pytest.raises(KeyboardInterrupt):
        list(generation.events())
    assert generation.finish_reason == "cancelled"
    assert generation.token_ids == want[: len(generation.token_ids)]
    assert model.engine.pool.free == free
    assert text(model)[0] == want


def test_what_is_not_served_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="at most 7"):
        load(folder, draft=8)
    with pytest.raises(RequestError, match="from 1 on"):
        load(folder, draft=0)
    with pytest.raises(BackendRefused, match="at most 64"):
        load(folder, draft=65)
    headless = Path(shutil.copytree(folder, tmp_path / "headless"))
    shutil.rmtree(headless / "dspark")
    with pytest.raises(RequestError, match="no draft head"):
        load(headless, draft=3)
    assert text(load(headless))[0] == text(load(folder))[0]


def test_a_head_that_is_not_right_stands_in_the_way_only_when_it_is_asked_for(folder: Path, tmp_path: Path) -> None:
    broken = Path(shutil.copytree(folder, tmp_path / "broken"))
    path = broken / "dspark" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "vocab_size": 63}))
    with pytest.raises(ConfigError, match="vocabulary"):
        load(broken, draft=3)
    assert text(load(broken))[0] == text(load(folder))[0]


def test_a_damaged_weight_of_the_head_shows_when_it_is_loaded(folder: Path, tmp_path: Path) -> None:
    damaged = Path(shutil.copytree(folder, tmp_path / "damaged"))
    tensors = quantised.draft_weights(quantised.draft_config())
    tensors["dspark.markov_head.markov_w2.weight"][3, 2] = float("nan")
    quantised.save(damaged / "dspark" / "model.safetensors", tensors)
    with pytest.raises(NonFiniteWeight, match="markov_w2"):
        load(damaged, draft=3)


def test_the_heads_pages_count(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A budget that holds the target's pages and not the head's."""
    plain, drafting = load(folder), load(folder, draft=3)
    own = drafting.engine.drafter.cache.layout.page_bytes
    both = (plain.engine.cache.layout.page_bytes + own) * 128
    monkeypatch.setattr(PreparedWeights, "bytes_needed", lambda self, found: 0)
    monkeypatch.setattr(ReferenceSession, "memory_free", lambda self: 2 * both)  # half of it is for pages
    load(folder, draft=3)
    monkeypatch.setattr(ReferenceSession, "memory_free", lambda self: 2 * (both - 1))
    with pytest.raises(MemoryBudgetExceeded, match="KV pages"):
        load(folder, draft=3)
    assert load(folder).cap.tokens == 512


@pytest.mark.parametrize("backend", ["cpu", "triton"])
def test_a_backend_without_drafting_says_so(folder: Path, backend: str) -> None:
    with pytest.raises(BackendRefused, match=r"does not draft 3 tokens.*no drafting"):
        load(folder, backend=backend, draft=3)


def test_the_command_line_drafts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "demo"
    demo.write(path, seed=0, layers=2)
    raw = json.loads((path / "config.json").read_text())
    same = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "rotary_dim", "vocab_size")
    quantised.write_draft(
        path / "dspark",
        **{key: raw[key] for key in same},
        partial_rotary_factor=raw["rotary_dim"] / raw["head_dim"],
        dspark_target_layer_ids=[0, 1],
        dflash_config={"num_target_layers": 2, "num_hidden_layers": 2, "target_layer_ids": [0, 1]},
    )
    words = ["run", str(path), "hello", "--backend", "reference", "--temperature", "0", "--max-tokens", "12"]
    assert main([*words, "--ignore-eos", "--dtype", "float64"]) == 0
    plain = capsys.readouterr()
    assert main([*words, "--ignore-eos", "--dtype", "float64", "--draft", "3"]) == 0
    drafted = capsys.readouterr()
    assert drafted.out == plain.out
    assert "drafted tokens kept per verify" in drafted.err
    assert "per verify" not in plain.err
    assert main([*words, "--draft", "3", "--json"]) == 0
    done = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert done["stats"]["accepted_per_verify"] is not None
