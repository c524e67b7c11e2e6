"""The arithmetic behind the nano's figures: n-gram model, intervals, what is counted, what is kept."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks.nano_figures import curves, drafting, pages, recall, stats, store, tables
from benchmarks.nano_figures.kneser_ney import KneserNey

from m31.config import SparseAttention
from m31.training.recall import Fact, Probe

BOS, V = 0, 6
KINDS = ("greedy", "temperature_1")
DISCOUNTS = ((0.5, 0.9, 1.1), (0.6, 1.0, 1.4), (0.7, 1.2, 1.5))


def toy(seed: int, documents: int = 6, length: int = 25) -> list[list[int]]:
    """Documents with habits, so that counts of every size occur."""
    rng = np.random.default_rng(seed)
    out = []
    for _ in range(documents):
        text = [BOS]
        while len(text) < length:
            text.append(text[-1] % (V - 1) + 1 if rng.random() < 0.6 else int(rng.integers(1, V)))
        out.append(text)
    return out


def brute(documents: list[list[int]], order: int, discounts: Any, context: tuple[int, ...], word: int) -> float:
    """The recursion as it is written down, on dictionaries."""

    def count(gram: tuple[int, ...]) -> int:
        places = [(d, i) for d in documents for i in range(1, len(d)) if i - len(gram) + 1 >= 0]
        found = [(d, i) for d, i in places if tuple(d[i - len(gram) + 1 : i + 1]) == gram]
        if len(gram) == order or gram[0] == BOS:
            return len(found)
        return len({d[i - len(gram)] for d, i in found})

    def p(h: tuple[int, ...], w: int, k: int) -> float:
        if k == 0:
            return 1 / (V - 1)
        counts = {v: count((*h, v)) for v in range(1, V)}
        lower = p(h[1:], w, k - 1) if k > 1 else p((), w, 0)
        total = sum(counts.values())
        if not total:
            return lower
        d = (0.0, *discounts[k - 1])
        passed = sum(min(d[min(c, 3)], c) for c in counts.values()) / total
        return max(counts[w] - d[min(counts[w], 3)], 0) / total + passed * lower

    return p(context[-(order - 1) :] if order > 1 else (), word, min(order, len(context) + 1))


@pytest.mark.parametrize("order", [1, 2, 3])
def test_kneser_ney_is_the_recursion(order: int) -> None:
    documents = toy(1)
    model = KneserNey(documents, order=order, vocabulary=V, bos=BOS, discounts=DISCOUNTS[:order])
    for context in ((BOS,), (3,), (BOS, 2), (4, 5), (5, 1, 2), (2, 2), (BOS, 1, 2)):
        got = model.distribution(context)
        want = [0.0, *(brute(documents, order, DISCOUNTS, context, word) for word in range(1, V))]
        np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-15)
    text = [BOS, 3, 4, 5, 1, 2, 2]
    want = [math.log2(brute(documents, order, DISCOUNTS, tuple(text[:i]), text[i])) for i in range(1, len(text))]
    np.testing.assert_allclose(model.score(text), want, rtol=1e-12)


WORDS = 300
TIMES = (1, 1, 1, 1, 1, 1, 2, 2, 3, 4)


def rich() -> list[list[int]]:
    """Phrases of rare and frequent words, said one to four times each: every order has the counts 1 to 4."""
    rng = np.random.default_rng(2)
    weights = 1 / np.arange(1, WORDS)
    phrases = [rng.choice(np.arange(1, WORDS), 12, p=weights / weights.sum()).tolist() for _ in range(120)]
    said = [phrase for i, phrase in enumerate(phrases) for _ in range(TIMES[i % len(TIMES)])]
    order = rng.permutation(len(said))
    return [[BOS, *(word for i in order[first : first + 7] for word in said[i])] for first in range(0, len(said), 7)]


def test_kneser_ney_sums_to_one_after_every_context() -> None:
    documents = rich()
    model = KneserNey(documents, order=4, vocabulary=WORDS, bos=BOS)
    seen = [tuple(d[i : i + n]) for d in documents[:6] for i in (0, 1, 7) for n in (1, 2, 3, 5)]
    for context in (*seen, (299, 298, 297), (1, 299, 1), (BOS, 299), (299, 1, 1)):
        p = model.distribution(context)
        assert p.sum() == pytest.approx(1, abs=1e-12)
        assert p[BOS] == 0
        assert (p[1:] > 0).all()


def test_discounts_are_estimated_from_counts_of_counts() -> None:
    documents = rich()
    highest = Counter(tuple(d[i - 1 : i + 1]) for d in documents for i in range(1, len(d)))
    left: dict[int, set[int]] = {}
    for first, last in highest:
        left.setdefault(last, set()).add(first)
    for table, counts in zip(
        KneserNey(documents, order=2, vocabulary=WORDS, bos=BOS)._orders,
        ([len(neighbours) for neighbours in left.values()], list(highest.values())),
        strict=True,
    ):
        n = [sum(c == k for c in counts) for k in (1, 2, 3, 4)]
        y = n[0] / (n[0] + 2 * n[1])
        want = [0.0, *(k - (k + 1) * y * n[k] / n[k - 1] for k in (1, 2, 3))]
        np.testing.assert_allclose(table.discounts, want, rtol=1e-12)


@pytest.mark.parametrize(
    ("documents", "order", "message"),
    [
        ([[1, 2]], 2, "begins with BOS"),
        ([[BOS, 1, BOS]], 2, "begins with BOS"),
        ([], 2, "begins with BOS"),
        ([[BOS, 1]], 40, "does not fit"),
        ([[BOS, 1, 2]], 2, "too little text"),
        ([[BOS, *gram] for gram, times in (((1, 2), 1), ((1, 3), 9), ((1, 4), 9)) for _ in range(times)], 1, "text"),
    ],
)
def test_kneser_ney_refuses(documents: list[list[int]], order: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        KneserNey(documents, order=order, vocabulary=V, bos=BOS)


# -- intervals


def test_bootstrap_of_a_mean_is_the_textbook_interval() -> None:
    rng = np.random.default_rng(0)
    values = rng.normal(5, 2, 400)
    figure = stats.ratio(values, np.ones(400), of="files", seed=1)
    assert figure["value"] == pytest.approx(values.mean())
    assert (figure["n"], figure["of"]) == (400, "files")
    assert figure["high"] - figure["low"] == pytest.approx(2 * 1.96 * values.std() / 20, rel=0.05)
    assert stats.ratio(values, np.ones(400), of="files", seed=1) == figure


def test_paired_intervals_see_small_differences_between_files_that_differ_much() -> None:
    rng = np.random.default_rng(0)
    losses = rng.uniform(1, 9, 30)
    worse = losses * 1.01 + rng.normal(0, 0.001, 30)
    paired = stats.ratio(worse, losses, of="files", seed=1, less=1.0)
    assert 0.009 < paired["low"] < paired["value"] < paired["high"] < 0.011
    alone = stats.ratio(worse, np.ones(30), of="files", seed=1)
    assert alone["high"] - alone["low"] > 100 * (paired["high"] - paired["low"])


def test_units_without_a_denominator_carry_nothing() -> None:
    assert stats.ratio([1.0, 7.0, 3.0], [2.0, 0.0, 2.0], of="x", seed=1)["value"] == 1.0
    assert stats.ratio([1.0, 7.0, 3.0], [2.0, 0.0, 2.0], of="x", seed=1)["n"] == 2
    with pytest.raises(ValueError, match="no files"):
        stats.ratio([0.0], [0.0], of="files", seed=1)


@pytest.mark.parametrize(
    ("hits", "n", "low", "high"), [(8, 10, 0.4902, 0.9433), (0, 10, 0.0, 0.2775), (60, 60, 0.9398, 1.0)]
)
def test_wilson(hits: int, n: int, low: float, high: float) -> None:
    figure = stats.wilson(hits, n, of="questions")
    assert (figure["low"], figure["high"]) == (pytest.approx(low, abs=1e-4), pytest.approx(high, abs=1e-4))


def test_wilson_holds_the_share_also_at_its_ends() -> None:
    for n in range(1, 200):
        for hits in (0, n):
            figure = stats.wilson(hits, n, of="questions")
            assert 0 <= figure["low"] <= figure["value"] <= figure["high"] <= 1


def test_chi_square_tails() -> None:
    """3.841 and 14.067 are the textbook's 5 % points of 1 and 7 degrees of freedom."""
    assert stats._tail(3.8415, 1)["p"] == pytest.approx(0.05, abs=1e-4)
    assert stats._tail(14.0671, 7)["p"] == pytest.approx(0.05, abs=1e-4)
    assert stats.chi_square(np.array([50.0, 50.0, 1.0]), np.array([50.0, 50.0, 0.0]))["p"] == 0.0
    table = stats.same_source(np.array([30.0, 70.0, 0.0]), np.array([50.0, 50.0, 0.0]))
    assert (table["freedom"], table["statistic"]) == (1, pytest.approx(100 / 12))


# -- what is kept


def test_a_finished_measurement_is_not_made_again(tmp_path: Path) -> None:
    made: list[int] = []

    def compute() -> dict[str, list[int]]:
        made.append(1)
        return {"a": [len(made)]}

    kept = store.Store(tmp_path / "kept")
    assert kept.get("x", {"checkpoint": "1"}, compute) == {"a": [1]}
    assert store.Store(tmp_path / "kept").get("x", {"checkpoint": "1"}, compute) == {"a": [1]}
    assert kept.get("x", {"checkpoint": "2"}, compute) == {"a": [2]}  # another checkpoint
    assert kept.get("x", {"checkpoint": "1"}, compute) == {"a": [1]}  # which does not replace the first
    paths = list((tmp_path / "kept").iterdir())
    assert len(paths) == 2
    for path in paths:
        path.write_bytes(path.read_bytes()[:-9])  # as a full disk may leave it
    assert kept.get("x", {"checkpoint": "2"}, compute) == {"a": [3]}
    assert sorted((tmp_path / "kept").iterdir()) == sorted(paths)


def test_an_interrupted_measurement_leaves_nothing(tmp_path: Path) -> None:
    kept = store.Store(tmp_path)

    def stopped() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        kept.get("x", {}, stopped)
    assert list(tmp_path.iterdir()) == []
    assert kept.get("x", {}, lambda: 4) == 4


def test_the_digest_sees_names_and_contents(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"1")
    first = store.folder_digest(tmp_path)
    assert store.folder_digest(tmp_path) == first
    (tmp_path / "a").write_bytes(b"2")
    second = store.folder_digest(tmp_path)
    (tmp_path / "a").rename(tmp_path / "b")
    third = store.folder_digest(tmp_path)
    assert len({first, second, third}) == 3
    (tmp_path / "dspark").mkdir()
    (tmp_path / "dspark" / "a").write_bytes(b"1")
    assert store.folder_digest(tmp_path, without="dspark") == third != store.folder_digest(tmp_path)


# -- recall


class Copier:
    """A model that has seen "name, value" and knows the value after the name; it is otherwise sure of token 1."""

    def __init__(self, wrong_at: int | None = None) -> None:
        self.wrong_at = wrong_at

    def logits(self, ids: list[int]) -> torch.Tensor:
        out = torch.zeros(len(ids), 50)
        out[:, 1] = 5.0
        for i in range(1, len(ids)):
            earlier = [j for j in range(i) if ids[j] == ids[i]]
            if earlier and i != self.wrong_at:
                out[i, ids[earlier[-1] + 1]] = 9.0
        return out


NAME, VALUE = 40, (21, 22, 23)


def test_an_answer_is_right_if_all_its_tokens_are() -> None:
    ids = (2, NAME, *VALUE, 7, 8, 9, NAME, *VALUE)
    start = len(ids) - len(VALUE)
    found = recall.answer(Copier(), ids, start)
    assert (found.right, found.hits, found.tokens) == (True, 3, 3)
    logp = 9 - math.log(math.exp(9) + math.exp(5) + 48)
    assert found.nats == pytest.approx(3 * logp, rel=1e-5)
    second = recall.answer(Copier(wrong_at=start), ids, start)  # the token after the value's first
    assert (second.right, second.hits) == (False, 2)
    without = (2, 7, 8, 9, NAME, *VALUE)
    gone = recall.answer(Copier(), without, len(without) - len(VALUE))
    assert (gone.right, gone.hits) == (False, 0)
    assert gone.nats < found.nats - 10


def test_the_block_of_the_definition() -> None:
    probe = Probe(ids=(), fact=Fact(source=9, answer=15, stop=16, name="", value=""), ids_without=(), answer_without=0)
    blocks = [torch.full((15, 2, 3), -1), torch.full((15, 2, 3), -1)]
    blocks[0][14, 1] = torch.tensor([0, 2, 3])  # 9 lies in block 2 of 4 tokens
    blocks[1][13, 0] = torch.tensor([0, 2, 3])  # another query
    assert recall.block_kept(blocks, probe, 4).tolist() == [[False, True], [False, False]]


def test_summary_of_recall() -> None:
    rows = [[1.0, 3, -0.3, 3], [0.0, 1, -4.5, 3]]
    found = recall.summary({"with": rows, "without": [], "kept": [[[1, 0]], [[0, 0]]]}, seed=1)
    assert found["with"]["right"]["value"] == 0.5
    assert found["with"]["tokens_right"]["value"] == pytest.approx(4 / 6)
    assert found["with"]["nats_per_token"]["value"] == pytest.approx(4.8 / 6)
    assert found["block_kept"]["value"] == 0.25
    assert found["block_kept_somewhere"]["value"] == 0.5
    assert "without" not in found


# -- blocks


def test_shared_blocks_against_sets() -> None:
    sparse = SparseAttention(num_index_heads=2, index_dim=8, topk_blocks=3, block_size=2, local_blocks=1, init_blocks=1)
    rng = np.random.default_rng(5)
    tokens, heads = 24, 2
    choices = []
    for _ in range(2):
        ids = torch.full((tokens, heads, 3), -1)
        for t in range(tokens):
            for h in range(heads):
                forced = {0, t // 2}
                others = [b for b in range(t // 2) if b not in forced]
                picked = sorted(forced | set(rng.permutation(others)[: 3 - len(forced)].tolist()))
                ids[t, h, : len(picked)] = torch.tensor(picked)
        choices.append(ids)
    got = pages.kept_blocks(*choices, sparse, first=6)
    want = {(6, 12): [0, 0], (12, 24): [0, 0]}
    for t in range(6, tokens):
        for h in range(heads):
            a, b = (set(c[t, h].tolist()) - {-1, 0, t // 2} for c in choices)
            span = want[(6, 12) if t < 12 else (12, 24)]
            span[0] += len(a & b)
            span[1] += len(a)
    assert {span: list(counts[:2]) for span, counts in got.items()} == want
    assert got[6, 12][2] == pytest.approx(sum(2 / (t // 2 - 1) for t in range(6, 12)))
    same = pages.kept_blocks(choices[0], choices[0], sparse, first=6)
    assert all(kept == wanted for kept, wanted, _ in same.values())


# -- drafting


def test_acceptance_by_length_and_position() -> None:
    found = drafting.acceptance([[7, 0, 2], [2]], seed=1)
    assert found["per_verify"]["value"] == 11 / 4
    assert (found["per_verify"]["n"], found["verifies"]) == (2, 4)
    assert found["share_of_length"] == [0.25, 0, 0.5, 0, 0, 0, 0, 0.25]
    assert found["kept_at_position"] == [0.75, 0.75, 0.25, 0.25, 0.25, 0.25, 0.25]


def test_every_difference_between_texts_is_counted() -> None:
    assert drafting.mismatches([[1, 2, 3], [4]], [[1, 2, 3], [4]]) == 0
    assert drafting.mismatches([[1, 2, 3], [4, 5]], [[1, 9, 3], [4]]) == 2


@pytest.mark.parametrize("name", drafting.PAIRS)
def test_sampled_distributions(name: str) -> None:
    found = drafting.sampled(*drafting.PAIRS[name], draws=3000, seed=4, request=2)
    assert found["against_target"]["p"] > 1e-4
    assert found["against_plain"]["p"] > 1e-4
    assert found["kept"] == pytest.approx(found["most_kept"], abs=0.05)


def test_sampled_distributions_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule that keeps too much is seen by both tests; one that is not the engine's is refused."""
    pair = drafting.PAIRS["near"]
    monkeypatch.setattr(drafting, "keeps", lambda p, q, token, u: True)
    with pytest.raises(ValueError, match="verify and sample give"):
        drafting.sampled(*pair, draws=3000, seed=4, request=2)
    monkeypatch.setattr(drafting, "_CHECKED", 0)
    found = drafting.sampled(*pair, draws=3000, seed=4, request=2)
    assert found["against_target"]["p"] < 1e-6
    assert found["against_plain"]["p"] < 1e-6


# -- logs and documents


def test_logs(tmp_path: Path) -> None:
    rows = [{"step": n, "loss": 9.0 - n, "tokens_per_second": 10.0, "load": {"1": [0.25, 0.75]}} for n in range(1, 5)]
    lines = [json.dumps(row) for row in (*rows, {"step": 4, "validation": 5.5, "best": True})]
    (tmp_path / "nano").mkdir()
    (tmp_path / "nano" / "log.jsonl").write_text("\n".join(lines) + '\n{"step": 5, "lo')
    found = curves.figures(curves.runs(tmp_path))
    assert found.keys() == {"nano"}
    assert (found["nano"]["steps"], found["nano"]["loss"]) == (4, 6.5)
    assert (found["nano"]["validation"], found["nano"]["validation_step"]) == (5.5, 4)
    assert found["nano"]["load"] == {"1": [0.25, 0.75]}
    assert "kl" not in found["nano"]
    assert "draft.svg" not in tables.curves(found)
    found["draft"] = {**found["nano"], "load": {}, "accepted": 2.345, "greedy": 2.5}
    assert "2.35 at temperature 1 and 2.50 greedily" in tables.curves(found)
    assert curves.smooth(np.array([1.0, 2.0, 6.0, 7.0]), 2).tolist() == [1.0, 1.5, 4.0, 6.5]


def test_plots_are_small_and_the_same_every_time(tmp_path: Path) -> None:
    """Curves of 850 steps that are nothing but noise, which is the most that they can take."""
    pytest.importorskip("matplotlib")
    from benchmarks.nano_figures import plots

    rng = np.random.default_rng(0)
    steps = np.arange(1, 851.0)
    series = {kind: (steps, rng.random(850) + 1) for kind in ("loss", "kl", "accepted", "tokens_per_second")}
    run = curves.Curves(
        series | {"validation": (steps[::50], rng.random(17))}, {str(n): rng.random((850, 16)) for n in range(3)}
    )
    for folder in (tmp_path / "a", tmp_path / "b"):
        folder.mkdir()
        plots.draw_curves(folder, {"nano": run, "twin": run, "draft": run})
        plots.draw_drafting(folder / "drafting.svg", {kind: {"kept_at_position": [0.9, 0.1]} for kind in KINDS})
    for path in (tmp_path / "a").iterdir():
        assert 1000 < path.stat().st_size < 60_000, path.name
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()
    assert {path.stem for path in (tmp_path / "a").iterdir()} == {"loss", "index", "load", "draft", "drafting"}


def test_figures_as_text() -> None:
    figure: stats.Figure = {"value": 0.0123, "low": -0.001, "high": 0.02, "n": 20, "of": "files"}
    assert tables.plain(figure) == "0.012 [-0.001, 0.020]"
    assert tables.percent(figure) == "1.2 % [-0.1, 2.0]"
    assert tables.change(figure) == "+1.23 % [-0.10, +2.00]"
    assert tables.plain({**figure, "n": 1}) == "0.012 (n = 1)"


def results(figures: dict[str, Any]) -> dict[str, Any]:
    provenance = {
        "versions": {"m31": "0.1", "torch": "2"},
        "served": {"arithmetic": "exact", "kv": "nvfp4", "index": "int8"},
        "files": ["a.py"],
        "library": "CPython 3.12",
        "checkpoint": "0123456789abcdef",
        "machine": "m",
        "seed": 1,
    }
    return {"provenance": provenance, "figures": figures, "skipped": {"drafting": "the checkpoint has no draft head"}}


def test_a_document_is_filled_between_its_markers() -> None:
    names = [*tables.TABLES, "source"]
    document = "a\n" + "".join(f"<!-- figures: {name} -->\nold\n<!-- end -->\nb\n" for name in names)
    pair = {test: {"p": 0.5} for test in ("against_target", "against_plain")} | {"kept": 0.5, "most_kept": 0.5}
    measured = results({"distributions": {"draws": 2000, "pairs": {"near": pair}}})
    found = tables.filled(document, measured, "nano/results.json")
    assert "old" not in found
    assert "| near | 0.500 | 0.500 | 50.00 % | 50.00 % |" in found
    assert "Not measured: the checkpoint has no draft head." in found
    assert "[nano/results.json](nano/results.json). Checkpoint 0123456789ab, arithmetic exact" in found
    assert found.count("\nb\n") == len(names)
    assert tables.filled(found, measured, "nano/results.json") == found
    with pytest.raises(ValueError, match="marked are"):
        tables.filled(document.replace("figures: recall", "figures: recal"), measured, "x")


def test_the_page_about_the_nano_shows_the_results_beside_it() -> None:
    folder = Path(__file__).resolve().parents[2] / "docs"
    document = (folder / "nano.md").read_text(encoding="utf-8")
    (stored,) = (folder / "nano").glob("results*.json")
    assert tables.filled(document, json.loads(stored.read_bytes()), f"nano/{stored.name}") == document
    for plot in (folder / "nano").glob("*.svg"):
        assert f"(nano/{plot.name})" in document
        assert plot.stat().st_size < 60_000
