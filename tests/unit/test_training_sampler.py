"""The token cache and the batches: the same for the same (seed, step), whatever was asked for before."""

from __future__ import annotations

import hashlib
import itertools
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from training_helpers import other_environment, small_corpus

from m31.errors import CorpusError, RequestError
from m31.training import bpe, cache, corpus, draws, sampler
from m31.training.cache import TokenCache
from m31.training.draws import Draws, Purpose
from m31.training.recall import RecallWriter
from m31.training.sampler import IGNORE, SHARES, Sampler

SHORT = {256: 75, 512: 15, 1024: 10}  # the real shares, at a quarter of the lengths


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("training")


@pytest.fixture(scope="module")
def text(home: Path) -> corpus.Corpus:
    return small_corpus(home / "library")


@pytest.fixture(scope="module")
def files(text: corpus.Corpus) -> dict[str, bytes]:
    return bpe.build(text, vocab_size=700)


@pytest.fixture(scope="module")
def tokens(home: Path, text: corpus.Corpus, files: dict[str, bytes]) -> TokenCache:
    return cache.open_cache(home / "cache", text, files)


@pytest.fixture(scope="module")
def writer(text: corpus.Corpus, tokens: TokenCache) -> RecallWriter:
    return RecallWriter(tokens.tokenizer, (document.text for document in text.split("train")), seed=1)


def make(
    tokens: TokenCache, writer: RecallWriter | None, *, seed: int = 3, recall: float = 0.1, budget: int = 2048
) -> Sampler:
    return Sampler(tokens, seed=seed, tokens=budget, shares=SHORT, recall=recall, recall_writer=writer)


# -- the cache


def test_the_cache_holds_the_text(text: corpus.Corpus, tokens: TokenCache) -> None:
    assert tokens.ids.dtype == np.uint16
    assert not tokens.ids.flags.writeable
    for document, entry in zip(text.documents, tokens.documents, strict=True):
        assert (document.path, document.split, document.size) == (entry.path, entry.split, entry.size)
        ids = tokens.ids[entry.start : entry.stop].tolist()
        assert (ids[0], ids[-1]) == (tokens.bos, tokens.eos)
        assert tokens.tokenizer.decode(ids[1:-1]) == document.text
    counts, plain = tokens.describe(), text.describe()
    for split in corpus.SPLITS:
        assert {"files": counts[split]["files"], "bytes": counts[split]["bytes"]} == plain[split]
    assert sum(c["tokens"] + 2 * c["files"] for c in counts.values()) == len(tokens.ids)


def test_the_cache_is_made_once_and_keyed_by_text_and_tokenizer(
    tmp_path: Path, text: corpus.Corpus, files: dict[str, bytes], tokens: TokenCache
) -> None:
    first = cache.open_cache(tmp_path, text, files)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    again = cache.open_cache(tmp_path, text, files)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
    assert first.key == again.key == tokens.key
    other = cache.open_cache(tmp_path, text, bpe.build(text, vocab_size=300))
    assert other.key != first.key
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([f"tokens-{first.key}", f"tokens-{other.key}"])


def test_an_interrupted_write_leaves_nothing(
    tmp_path: Path, text: corpus.Corpus, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full_disk(path: Path, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cache, "write_file", full_disk)
    with pytest.raises(CorpusError, match=r"cannot be written \(No space left on device\); choose another folder"):
        cache.open_cache(tmp_path, text, files)
    assert list(tmp_path.iterdir()) == []


def test_whoever_comes_second_uses_what_the_first_made(
    tmp_path: Path, text: corpus.Corpus, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = cache.write_file

    def overtaken(path: Path, data: bytes) -> None:
        monkeypatch.setattr(cache, "write_file", real)
        cache.open_cache(tmp_path, text, files)
        real(path, data)

    monkeypatch.setattr(cache, "write_file", overtaken)
    found = cache.open_cache(tmp_path, text, files)
    assert [path.name for path in tmp_path.iterdir()] == [f"tokens-{found.key}"]


@pytest.mark.parametrize("damage", ["byte", "short", "no ids", "index"])
def test_a_damaged_cache_is_refused(
    tmp_path: Path, home: Path, text: corpus.Corpus, files: dict[str, bytes], tokens: TokenCache, damage: str
) -> None:
    folder = tmp_path / f"tokens-{tokens.key}"
    shutil.copytree(home / "cache" / folder.name, folder)
    data = (folder / "ids.npy").read_bytes()
    if damage == "byte":
        (folder / "ids.npy").write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    elif damage == "short":
        (folder / "ids.npy").write_bytes(data[:-2])
    elif damage == "no ids":
        (folder / "ids.npy").unlink()
    else:
        (folder / "index.json").write_text("{}")
    with pytest.raises(CorpusError, match=r"token cache is damaged \(.*delete that folder; it is made again"):
        cache.open_cache(tmp_path, text, files)


# -- batches


def test_random_access_equals_sequential_and_a_fresh_start(tokens: TokenCache, writer: RecallWriter) -> None:
    one = make(tokens, writer)
    sequential = [one.batch(step) for step in range(2 * one.cycle + 3)]
    for step in (2 * one.cycle + 2, 0, one.cycle, one.cycle - 1, 17, 30):
        for a, b in zip(make(tokens, writer).batch(step), sequential[step], strict=True):
            assert torch.equal(a, b)
    for step in (1, 60, 5):  # out of order on a used one
        assert torch.equal(one.batch(step)[0], sequential[step][0])
    assert not torch.equal(make(tokens, writer, seed=4).batch(0)[0], sequential[0][0])
    assert len({hashlib.sha256(tokens.numpy().tobytes()).digest() for tokens, _ in sequential}) == len(sequential)


def test_every_batch_has_its_tokens_and_every_length_its_share(tokens: TokenCache, writer: RecallWriter) -> None:
    for budget in (1024, 2048, 4096):
        one = make(tokens, writer, budget=budget)
        assert one.cycle == 29
        counts: Counter[int] = Counter()
        recalled = 0
        for step in range(3 * one.cycle, 4 * one.cycle):
            rows = one.rows(step)
            assert len({row.length for row in rows}) == 1
            counts[rows[0].length] += len(rows)
            recalled += sum(row.length for row in rows if row.recall is not None)
            if step % 7 == 0:
                assert one.batch(step)[0].shape == one.batch(step)[1].shape == (len(rows), rows[0].length)
                assert one.batch(step)[0].numel() == budget
        total = sum(counts.values())
        assert {length: count / total for length, count in counts.items()} == {256: 0.75, 512: 0.15, 1024: 0.1}
        assert abs(recalled / (one.cycle * budget) - 0.1) < 0.02


def test_the_real_shares(tokens: TokenCache, writer: RecallWriter) -> None:
    one = Sampler(tokens, seed=0, tokens=8192, shares=SHARES, recall=0.1, recall_writer=writer)
    counts = Counter(row.length for step in range(one.cycle) for row in one.rows(step))
    assert counts == {1024: 120, 2048: 24, 4096: 16}
    assert one.batch(0)[0].numel() == 8192
    assert one.batch(0)[0].dtype == one.batch(0)[1].dtype == torch.int64


def test_targets_follow_and_never_cross_into_another_document(tokens: TokenCache, writer: RecallWriter) -> None:
    one = make(tokens, writer)
    ends = 0
    for step in range(one.cycle):
        ids, targets = one.batch(step)
        assert torch.equal((targets == IGNORE), (ids == tokens.eos))
        assert not (targets == tokens.bos).any()
        same = targets[:, :-1] != IGNORE
        assert torch.equal(targets[:, :-1][same], ids[:, 1:][same])
        assert (ids[:, 1:][~same] == tokens.bos).all()
        ends += int((ids == tokens.eos).sum())
    assert ends > 3


def test_rows_are_pieces_of_train_files_or_recall_documents(tokens: TokenCache, writer: RecallWriter) -> None:
    one = make(tokens, writer)
    streams = [tokens.ids[e.start : e.stop].tobytes() for e in tokens.split("train")]
    held_out = [tokens.ids[e.start : e.stop] for split in ("validation", "test") for e in tokens.split(split)]
    windows = {a[i : i + 40].tobytes() for a in held_out for i in range(len(a) - 40)}
    for step in range(one.cycle):
        for row, ids in zip(one.rows(step), one.batch(step)[0].numpy().astype(np.uint16), strict=True):
            if row.recall is not None:
                assert tuple(ids) == writer.document(row.recall, row.length + 1).ids[:-1]
                continue
            cuts = [0, *(np.flatnonzero(ids == tokens.bos)), row.length]
            for start, stop in itertools.pairwise(cuts):
                assert any(ids[start:stop].tobytes() in stream for stream in streams)
            # Files share headers; no long stretch of a held-out file is trained on.
            assert sum(ids[i : i + 40].tobytes() in windows for i in range(0, row.length - 40, 40)) <= 1


def test_an_epoch_is_every_token_once(tokens: TokenCache) -> None:
    """Text blocks are used one after another; each epoch's are those of a ring of all train documents."""
    one = make(tokens, None, recall=0.0)
    train = tokens.split("train")
    ring = sum(entry.stop - entry.start for entry in train)
    blocks = -(-ring // one.longest)
    rows: dict[tuple[int, int], np.ndarray] = {}
    for step in range(2 * blocks * one.longest // 2048 + 2 * one.cycle):
        for row, ids in zip(one.rows(step), one.batch(step)[0].numpy(), strict=True):
            assert row.block is not None
            assert (row.block, row.part) not in rows
            rows[row.block, row.part] = ids
    expected = np.bincount(np.concatenate([tokens.ids[e.start : e.stop] for e in train]), minlength=700)
    for epoch in range(2):
        members = [ids for (block, _), ids in rows.items() if block // blocks == epoch]
        assert sum(map(len, members)) == blocks * one.longest
        extra = np.bincount(np.concatenate(members), minlength=700) - expected
        assert (extra >= 0).all()
        assert extra.sum() == blocks * one.longest - ring < one.longest
    assert one.epochs(one.cycle) == pytest.approx(one.cycle * 2048 / ring)


def test_recall_documents_take_no_text_away_and_batches_mix_files(tokens: TokenCache, writer: RecallWriter) -> None:
    one = make(tokens, writer)
    rows = [one.rows(step) for step in range(5 * one.cycle)]
    blocks = [row.block for batch in rows for row in batch if row.block is not None]
    assert sorted(set(blocks)) == list(range(max(blocks) + 1))
    # A batch of eight rows is not two blocks in a row: it comes from many places.
    short = [len({row.block for row in batch if row.block is not None}) for batch in rows if batch[0].length == 256]
    assert sum(short) / len(short) > 6
    assert [row.length for batch in rows[:29] for row in batch] != [
        row.length for batch in rows[29:58] for row in batch
    ]


def test_recall_documents_never_repeat(tokens: TokenCache, writer: RecallWriter) -> None:
    one = make(tokens, writer)
    numbers = [row.recall for step in range(20 * one.cycle) for row in one.rows(step) if row.recall is not None]
    assert len(numbers) == len(set(numbers)) > 100


def test_identity_names_everything_that_batches_depend_on(tokens: TokenCache, writer: RecallWriter) -> None:
    lines = [f"x = {i}\n" * 3 for i in range(100)]
    others = [
        make(tokens, writer),
        make(tokens, writer, seed=4),
        make(tokens, writer, budget=4096),
        make(tokens, writer, recall=0.2),
        make(tokens, None, recall=0.0),
        make(tokens, RecallWriter(tokens.tokenizer, lines, seed=1)),
        Sampler(tokens, seed=3, tokens=2048, shares={256: 1, 1024: 1}, recall=0.1, recall_writer=writer),
    ]
    assert len({one.identity for one in others}) == len(others)
    assert make(tokens, writer).identity == others[0].identity


def test_another_process_draws_the_same_batches(home: Path, tokens: TokenCache, writer: RecallWriter) -> None:
    code = f"""
import hashlib
from pathlib import Path
from m31.training import bpe, cache, corpus, recall, sampler
text = corpus.load(Path({str(home / "library")!r}), min_bytes=1, min_split_bytes=1)
tokens = cache.open_cache(Path({str(home / "other")!r}), text, bpe.build(text, vocab_size=700))
writer = recall.RecallWriter(tokens.tokenizer, (d.text for d in text.split("train")), seed=1)
one = sampler.Sampler(tokens, seed=3, tokens=2048, shares={SHORT!r}, recall=0.1, recall_writer=writer)
print(one.identity, *(hashlib.sha256(one.batch(step)[1].numpy().tobytes()).hexdigest() for step in range(30)))
"""
    done = subprocess.run([sys.executable, "-c", code], env=other_environment(), capture_output=True, text=True)
    one = make(tokens, writer)
    digests = [hashlib.sha256(one.batch(step)[1].numpy().tobytes()).hexdigest() for step in range(30)]
    assert done.stdout.split() == [one.identity, *digests], done.stderr


def test_what_is_drawn_does_not_change_between_versions() -> None:
    """Pinned: a stored training state must go on with the batches that it would have had."""
    stream = Draws(5, Purpose.RECALL, 2**40)
    assert [stream.below(1000) for _ in range(5)] == [544, 243, 350, 946, 476]
    assert draws.permutation(5, Purpose.BLOCKS, 1, 7).tolist() == [4, 1, 0, 2, 6, 3, 5]


def test_draws() -> None:
    for n in (0, 1, 2, 101):
        assert sorted(draws.permutation(1, Purpose.ROWS, 2, n).tolist()) == list(range(n))
    counts = Counter(int(draws.permutation(seed, Purpose.ROWS, 0, 4)[0]) for seed in range(400))
    assert all(70 < counts[i] < 130 for i in range(4))
    stream = Draws(0, Purpose.PROBE, 0)
    values = [stream.between(3, 5) for _ in range(3000)]
    assert all(900 < values.count(i) < 1100 for i in (3, 4, 5))
    assert len({tuple(Draws(1, purpose, 0).below(2**32) for _ in range(2)) for purpose in Purpose}) == len(Purpose)
    for seed, index in ((-1, 0), (2**64, 0), (0, -1)):
        with pytest.raises(RequestError, match=r"expected an integer from 0 to 2\*\*64 - 1"):
            draws.permutation(seed, Purpose.ROWS, index, 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": 3000}, "a batch of 3000 tokens; expected a multiple of the longest length, 1024"),
        ({"tokens": 512}, "a batch of 512 tokens"),
        ({"shares": {300: 1, 1024: 1}}, "lengths of 2 or more that divide the longest"),
        ({"shares": {}}, "shares are {}"),
        ({"shares": {256: -1, 1024: 1}}, "shares are"),
        ({"recall": 1.0}, "recall is 1.0; expected a fraction from 0, below 1"),
        ({"recall_writer": None}, "recall documents need a writer and room"),
        ({"shares": {128: 1, 1024: 1}}, "lengths of at least 256"),
        ({"seed": -1}, "seed is -1"),
    ],
)
def test_arguments_that_cannot_be(
    tokens: TokenCache, writer: RecallWriter, changes: dict[str, object], message: str
) -> None:
    arguments = {"seed": 0, "tokens": 2048, "shares": SHORT, "recall": 0.1, "recall_writer": writer} | changes
    with pytest.raises(RequestError) as caught:
        Sampler(tokens, **arguments).batch(0)  # type: ignore[arg-type]
    assert message in str(caught.value)


def test_there_is_no_step_before_the_first(tokens: TokenCache, writer: RecallWriter) -> None:
    with pytest.raises(RequestError, match="step is -1; expected 0 or more"):
        make(tokens, writer).batch(-1)


# -- windows


@pytest.mark.parametrize(("length", "overlap"), [(512, 0), (512, 200), (100, 99), (10**6, 0)])
@pytest.mark.parametrize("split", ["validation", "test"])
def test_windows_are_whole_files_and_count_their_bytes(
    text: corpus.Corpus, tokens: TokenCache, split: corpus.Split, length: int, overlap: int
) -> None:
    if overlap == 99:
        tokens_of = {document.path: document for document in text.split(split)[:1]}
    else:
        tokens_of = {document.path: document for document in text.split(split)}
    found: dict[str, list[int]] = {}
    sizes: Counter[str] = Counter()
    for window in sampler.windows(tokens, split, length=length, overlap=overlap):
        if window.path not in tokens_of:
            break
        assert 0 < len(window.tokens) == len(window.targets) <= length
        scored = window.targets != IGNORE
        context = int((~scored).sum())
        assert scored[context:].all()
        assert context == (0 if window.path not in found else min(overlap, len(found[window.path])))
        if window.path not in found:
            assert window.tokens[0] == tokens.bos
        targets = window.targets[scored].tolist()
        # What a target has before it is what the file has before it.
        assert torch.equal(window.tokens[context + 1 :], window.targets[context:-1])
        found.setdefault(window.path, []).extend(targets)
        sizes[window.path] += window.bytes
    assert list(found) == list(tokens_of)
    for path, ids in found.items():
        assert tokens.tokenizer.decode(ids) == tokens_of[path].text
        assert sizes[path] == tokens_of[path].size


def test_windows_refuse_no_room(tokens: TokenCache) -> None:
    for length, overlap in ((0, 0), (8, 8), (8, -1)):
        with pytest.raises(RequestError, match=f"length {length}, overlap {overlap}; expected from 0 to less than"):
            next(sampler.windows(tokens, "test", length=length, overlap=overlap))
