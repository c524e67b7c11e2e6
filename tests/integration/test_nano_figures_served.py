"""The nano's figures on small models that are really served."""

from __future__ import annotations

import math
import sysconfig
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks.nano_figures import drafting, pages, recall, text
from benchmarks.nano_figures.job import Job
from benchmarks.nano_figures.served import Setting, by_layer, load, nats, reading_everything, watched
from benchmarks.nano_figures.store import Store
from tests.support import quantised, trained

from m31.engine.sampling import SamplingParams
from m31.training import bpe, cache, corpus
from m31.training.export import export

SERVED = Setting(arithmetic="w4a4-megamoe", kv="nvfp4", index="nvfp4")
VOCABULARY = 640
LENGTH, OVERLAP = 256, 64
# Name, which decides the split -> bytes of it: three files to test, one to validate, the rest to train.
TEST = {"lzma.py": 5000, "symtable.py": 1000, "reprlib.py": 800}
FILES = TEST | {"stat.py": 1000, "argparse.py": 99_999, "ast.py": 99_999, "enum.py": 99_999}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("figures")


@pytest.fixture(scope="module")
def texts(home: Path) -> corpus.Corpus:
    stdlib = Path(sysconfig.get_path("stdlib"))
    for name, size in FILES.items():
        (home / "library").mkdir(exist_ok=True)
        (home / "library" / name).write_bytes((stdlib / name).read_bytes()[:size])
    return corpus.load(home / "library", min_bytes=1, min_split_bytes=1)


@pytest.fixture(scope="module")
def checkpoint(home: Path) -> Path:
    """A tiny model of blocks of 4 under top-3, with random weights."""
    raw, target = trained.tiny(vocab_size=VOCABULARY)
    model = trained.model(target, trained.scheme(), dtype=torch.float32)
    export(home / "model", raw, model.parameters, extra_files={})
    return home / "model"


@pytest.fixture
def job(home: Path, texts: corpus.Corpus, checkpoint: Path, tmp_path: Path) -> Job:
    tokens = cache.open_cache(home / "cache", texts, bpe.build(texts, vocab_size=VOCABULARY))
    return Job(
        checkpoint=checkpoint,
        twin=None,
        served=SERVED,
        texts=texts,
        cache=tokens,
        store=Store(tmp_path / "kept"),
        length=LENGTH,
        overlap=OVERLAP,
        quick=False,
        seed=1,
    )


class Uniform:
    """A model that knows nothing."""

    def logits(self, ids: list[int]) -> torch.Tensor:
        return torch.zeros(len(ids), VOCABULARY)


def test_every_byte_and_token_is_counted_once(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    loads: list[Setting] = []

    def fake(folder: Path, setting: Setting) -> Uniform:
        loads.append(setting)
        return Uniform()

    monkeypatch.setattr(text, "load", fake)
    found = text.score(job, "served", job.checkpoint, SERVED)
    entries = {entry.path: entry for entry in job.entries()}
    assert list(found["path"]) == list(entries)
    assert found["bytes"] == [entry.size for entry in entries.values()]
    assert found["tokens"] == [entry.stop - entry.start - 2 for entry in entries.values()]
    np.testing.assert_allclose(found["nats"], np.array(found["tokens"]) * math.log(VOCABULARY), rtol=1e-6)
    # Of a window's 256 positions those from 12 on, less the 64 of context in all but the first window of a file.
    windows = text.held_out(job, LENGTH, longer_than=0)
    far: dict[str, int] = defaultdict(int)
    for window in windows:
        far[window.path] += int((window.targets[12:] >= 0).sum())
    assert found["far_tokens"] == list(far.values())
    assert text.score(job, "served", job.checkpoint, SERVED) == found
    assert len(loads) == 1  # kept
    text.score(job, "served", job.checkpoint, Setting(arithmetic="exact", kv="float32", index="float32"))
    assert len(loads) == 2  # another setting
    monkeypatch.setattr(text, "held_out", lambda *args, **kind: windows[:-1])
    with pytest.raises(ValueError, match=r"bytes of .* are not those of the file"):
        text.score(job, "other", job.checkpoint, SERVED)


def test_losses_are_those_of_the_served_logits(checkpoint: Path) -> None:
    model = load(checkpoint, SERVED)
    ids = trained.tokens(1, 40, vocabulary=VOCABULARY)[0]
    targets = torch.cat([ids[1:], torch.tensor([-1])])
    targets[5] = -1
    got = nats(model, ids, targets)
    logp = model.logits(ids.tolist()).double().log_softmax(-1).numpy()
    want = [0.0 if t < 0 else -logp[i, t] for i, t in enumerate(targets.tolist())]
    np.testing.assert_allclose(got, want, atol=1e-5)


def test_reading_everything_changes_what_is_read_and_nothing_else(checkpoint: Path) -> None:
    ids = trained.tokens(1, 40, vocabulary=VOCABULARY)[0].tolist()
    layers = 3
    with watched() as seen:
        served = load(checkpoint, SERVED)
        sparse = served.logits(ids)
        chosen = by_layer(seen, layers)
        seen.clear()
        with reading_everything(checkpoint, 40) as folder:
            dense = load(folder, SERVED).logits(ids)
        everything = by_layer(seen, layers)
    assert [tuple(blocks.shape) for blocks in chosen] == [(40, 2, 3)] * layers
    assert [tuple(blocks.shape) for blocks in everything] == [(40, 2, 10)] * layers
    assert torch.equal(sparse[:12], dense[:12])  # three blocks are all there is
    assert not torch.equal(sparse[12:], dense[12:])
    assert ((everything[0] >= 0).sum(-1) == (torch.arange(40) // 4 + 1)[:, None]).all()
    before = len(seen)
    load(checkpoint, SERVED).logits(ids)
    assert len(seen) == before  # nobody is watched any more


def test_formats_and_blocks(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """The figures of pages on the smallest files; each format is really served."""
    small = tuple(sorted(job.cache.split("test"), key=lambda entry: entry.size)[:2])
    monkeypatch.setattr(Job, "entries", lambda self: small)
    kv, index, dense = pages.kv_formats(job), pages.index_formats(job), pages.dense(job)
    assert kv["tokens"] == sum(entry.stop - entry.start - 2 for entry in small)
    losses = [kv[name]["loss"]["value"] for name in ("bfloat16", "fp8", "nvfp4")]
    assert len(set(losses)) == 3
    assert kv["nvfp4"]["over_bfloat16"]["value"] == pytest.approx(losses[2] / losses[0] - 1, rel=1e-9)
    assert index["loss"]["nvfp4"]["loss"]["value"] == pytest.approx(dense["sparse"]["loss"]["value"], rel=1e-9)
    assert dense["sparse"]["loss"]["value"] != dense["dense"]["loss"]["value"]
    spans = list(index["recall"])
    assert spans[0] == "12-24"
    first = index["recall"]["12-24"]
    for name in ("nvfp4", "int8", "fp8"):
        assert len(first[name]["layers"]) == 3
        assert first[name]["chance"] < first[name]["all"]["value"] <= 1
    assert first["int8"]["layers"][0]["value"] > first["nvfp4"]["layers"][0]["value"]


def test_recall_of_a_model_that_learned_nothing(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recall, "DISTANCES", {110: 2})
    monkeypatch.setattr(recall, "WITHOUT", (110,))
    found = recall.recall(job)["110"]
    assert found["with"]["right"]["value"] == 0
    assert found["without"]["right"]["n"] == 2
    assert found["with"]["nats_per_token"]["value"] > 1
    assert len(found["block_kept_by_layer"]) == 3
    assert 0 <= found["block_kept"]["value"] < 1  # 28 blocks back, of which three are read


@pytest.fixture(scope="module")
def drafts(home: Path) -> Path:
    """A model and a draft head, both with random weights."""
    mapping = quantised.bf16_config() | {"vocab_size": VOCABULARY}
    quantised.write_quantised(home / "drafts", mapping, "m31")
    quantised.write_draft(home / "drafts" / "dspark", vocab_size=VOCABULARY)
    return home / "drafts"


def test_what_verifications_keep(drafts: Path) -> None:
    params = SamplingParams(max_tokens=30, temperature=0.0, seed=3)
    model = load(drafts, replace(SERVED, dtype="float64", draft=drafting.DRAFT))
    tokens, accepted = drafting.continued(model, (1, 5, 9, 13), params, 0)
    # The first token comes from the prompt, whole drafts give what is kept and one more, the last ones are shorter.
    assert accepted
    assert all(0 <= count <= 7 for count in accepted)
    assert 23 <= 1 + sum(count + 1 for count in accepted) <= len(tokens) == 30


def test_drafting(job: Job, drafts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="has no draft head"):
        drafting.drafting(job)
    monkeypatch.setattr(drafting, "PROMPT", 16)
    monkeypatch.setattr(drafting, "_SIZES", {False: (2, 12)})
    with_head = replace(job, checkpoint=drafts)
    found = drafting.drafting(with_head)
    assert (found["prompts"], found["tokens"], found["mismatches"]) == (2, 24, 0)
    for kind in ("greedy", "temperature_1"):
        assert found[kind]["verifies"] > 0
        assert sum(found[kind]["share_of_length"]) == pytest.approx(1)
    assert len(list(with_head.store.folder.iterdir())) == 3  # greedy, without drafts, at temperature 1
    monkeypatch.setattr(drafting, "load", lambda *args: pytest.fail("all of it is kept"))
    assert drafting.drafting(with_head) == found


def test_the_command(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    from benchmarks.nano_figures import main

    made: list[str] = []

    def measurement(name: str) -> Callable[[Job], dict[str, Any]]:
        def measure(job: Job) -> dict[str, Any]:
            made.append(name)
            return {"draws": 1000, "pairs": {}}

        return measure

    monkeypatch.setattr(main, "_job", lambda args: job)
    monkeypatch.setattr(main, "MEASUREMENTS", {name: measurement(name) for name in ("distributions", "drafting")})
    given = ["--checkpoint", str(job.checkpoint), "--out", str(tmp_path), "--runs", str(tmp_path)]
    assert main.main([*given, "--only", "distributions"]) == 0
    assert made == ["distributions"]
    assert main.main(given) == 0
    assert made == ["distributions", "distributions"]
    out = capsys.readouterr().out
    assert "Not measured: the checkpoint has no draft head." in out
    assert "Not measured: no run's log was found." in out
    with pytest.raises(SystemExit, match="no draft head"):
        main.main([*given, "--only", "drafting"])


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
