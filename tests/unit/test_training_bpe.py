"""The bundled model's tokenizer, and the recall documents that are counted with it."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from training_helpers import other_environment, small_corpus

from m31.errors import CorpusError, RequestError, TemplateError
from m31.text import demo
from m31.text.template import ChatTemplate
from m31.text.tokenizer import Tokenizer
from m31.training import bpe, corpus, recall

SMALL = 700


@pytest.fixture(scope="module")
def full() -> tuple[corpus.Corpus, dict[str, bytes]]:
    """The real tokenizer: 4,096 tokens, the whole train split."""
    text = corpus.load()
    return text, bpe.build(text)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> corpus.Corpus:
    return small_corpus(tmp_path_factory.mktemp("library"))


@pytest.fixture(scope="module")
def tokenizer(library: corpus.Corpus) -> Tokenizer:
    return bpe.open_files(bpe.build(library, vocab_size=SMALL))


@pytest.fixture(scope="module")
def writer(library: corpus.Corpus, tokenizer: Tokenizer) -> recall.RecallWriter:
    return recall.RecallWriter(tokenizer, (document.text for document in library.split("train")), seed=7)


# -- the real one


def test_the_whole_vocabulary_is_there_and_small(full: tuple[corpus.Corpus, dict[str, bytes]], tmp_path: Path) -> None:
    text, files = full
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    assert len(files["tokenizer.json"]) < 250_000
    ids = bpe.special_ids()
    loaded = Tokenizer.load(tmp_path, vocab_size=bpe.VOCAB_SIZE, bos=ids[demo.BOS], eos=(ids[demo.EOS],))
    assert loaded.notes == ()  # every id has a token
    assert loaded.added_tokens == ids
    assert sorted(json.loads(files["tokenizer.json"])["model"]["vocab"].values()) == list(range(4096))
    assert bpe.bytes_per_token(loaded, (document.text for document in text.split("test"))) > 3.4


def test_every_text_of_the_test_split_survives(full: tuple[corpus.Corpus, dict[str, bytes]]) -> None:
    text, files = full
    loaded = bpe.open_files(files)
    for document in text.split("test"):
        ids = loaded.encode(document.text, special=False)
        assert loaded.decode(ids) == document.text
        assert sum(len(loaded.piece(token)) for token in ids) == document.size


def test_another_process_trains_the_same_bytes(full: tuple[corpus.Corpus, dict[str, bytes]]) -> None:
    code = """
import hashlib
from m31.training import bpe, corpus
print(hashlib.sha256(bpe.build(corpus.load())["tokenizer.json"]).hexdigest())
"""
    done = subprocess.run([sys.executable, "-c", code], env=other_environment(), capture_output=True, text=True)
    assert done.stdout.strip() == hashlib.sha256(full[1]["tokenizer.json"]).hexdigest(), done.stderr


# -- what holds for every vocabulary


def test_special_ids_are_those_of_the_demo_and_one_more() -> None:
    ids = bpe.special_ids()
    assert list(ids.items())[:-1] == list(demo.special_ids().items())
    assert (ids[demo.BOS], ids[demo.EOS], ids[bpe.NOISE]) == (1, 2, 10)


def test_the_order_of_the_texts_does_not_matter(library: corpus.Corpus) -> None:
    texts = [document.text for document in library.split("train")]
    assert bpe.train(texts, vocab_size=SMALL) == bpe.train(texts[::-1], vocab_size=SMALL)


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=60))
@example("\ufeffdef f():\r\n\treturn  1  \n\n\n    x\u2028\x0b\x0c\x85 \u3000")
@example("".join(demo.special_ids()))
@example("".join(map(chr, range(256))))
def test_any_text_survives(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, special=False)
    assert tokenizer.decode(ids) == text
    assert b"".join(tokenizer.piece(token) for token in ids) == text.encode()
    assert not set(ids) & set(tokenizer.added_tokens.values())


@given(st.binary(max_size=80))
def test_any_bytes_survive_as_the_text_that_they_are_read_as(tokenizer: Tokenizer, data: bytes) -> None:
    for text in (data.decode("latin-1"), data.decode("utf-8", "replace")):
        assert tokenizer.decode(tokenizer.encode(text, special=False)) == text


@given(st.lists(st.text(alphabet="ab_.(\"'= 1\t#é\r", max_size=12).map(str.rstrip).filter(bool), max_size=6))
def test_the_tokens_of_a_text_are_those_of_its_lines(tokenizer: Tokenizer, lines: list[str]) -> None:
    """What `m31.training.recall` counts with: no piece reaches across the start of a line."""
    lines = [line for line in lines if "\r" not in line]
    whole = tokenizer.encode("x" + "".join("\n" + line for line in lines), special=False)
    parts = [token for line in lines for token in tokenizer.encode("\n" + line, special=False)]
    assert whole == tokenizer.encode("x", special=False) + parts


def test_depth_is_one_token_and_digits_stand_alone(tokenizer: Tokenizer) -> None:
    for spaces in (4, 8, 12, 16):
        pieces = [tokenizer.piece(t) for t in tokenizer.encode("x:\n" + " " * spaces + "y", special=False)]
        assert b"\n" + b" " * spaces in pieces
    assert [tokenizer.piece(t) for t in tokenizer.encode("31415", special=False)] == [b"3", b"1", b"4", b"1", b"5"]


def test_the_template_says_who_it_is(library: corpus.Corpus, tmp_path: Path) -> None:
    for name, content in bpe.build(library, vocab_size=300).items():
        (tmp_path / name).write_bytes(content)
    template = ChatTemplate.load(tmp_path)
    try:
        text = template.render([{"role": "user", "content": "hi"}])
    finally:
        template.close()
    assert text.startswith(f"]~!b[]~b]system\n{bpe.IDENTITY}\n\n<thinking_instructions>")
    assert text.endswith("]~b]user\nhi[e~[\n]~b]ai\n")
    with pytest.raises(TemplateError, match="cannot stand in a template; expected one line without quotes"):
        demo.chat_template("it's")


def test_vocabularies_that_cannot_be(library: corpus.Corpus) -> None:
    with pytest.raises(CorpusError, match=r"vocab_size: a vocabulary of 200 is too small; expected 267"):
        bpe.train(["x"], vocab_size=200)
    with pytest.raises(CorpusError, match=r"give 2\d\d tokens; expected enough text for 4,096"):
        bpe.train(["def f(): return 1\n"])


# -- recall documents


@pytest.mark.parametrize(("length", "count"), [(256, 40), (1025, 15), (2049, 6), (4097, 4)])
def test_distances_are_what_they_say(
    writer: recall.RecallWriter, tokenizer: Tokenizer, length: int, count: int
) -> None:
    facts = 0
    for index in range(count):
        ids, found = writer.document(index, length).ids, writer.document(index, length).facts
        assert len(ids) == length
        assert ids[0] == tokenizer.special_id(demo.BOS)
        for fact in found:
            assert tokenizer.decode(ids[fact.answer : fact.stop]) == fact.value
            # The value stands at the source, and nowhere between the source and the answer.
            word = fact.value.lstrip(" (")
            between = tokenizer.decode(ids[fact.source : fact.answer])
            assert between.lstrip(" (").startswith(word)
            assert between.count(word) == 1
            assert fact.name in between[between.rindex("\n") :]
            assert recall.MIN_DISTANCE <= fact.distance == fact.answer - fact.source <= recall.MAX_DISTANCE
        facts += len(found)
    assert facts > count * length / 200


def test_documents_are_what_their_text_encodes_to(writer: recall.RecallWriter, tokenizer: Tokenizer) -> None:
    for index in range(20):
        document = writer.document(index, 1024)
        stop = document.facts[-1].stop
        text = tokenizer.decode(document.ids[1:stop])
        assert tokenizer.encode(text, special=False) == list(document.ids[1:stop])


def test_far_questions_are_as_common_as_near_ones(writer: recall.RecallWriter) -> None:
    distances = [fact.distance for index in range(20) for fact in writer.document(index, 4097).facts]
    shares = [sum(low <= d < 2 * low for d in distances) / len(distances) for low in (100, 200, 400, 800, 1600)]
    assert all(share > 0.08 for share in shares)
    assert max(distances) > 3000


def test_a_document_is_a_function_of_seed_index_and_length(
    writer: recall.RecallWriter, library: corpus.Corpus, tokenizer: Tokenizer
) -> None:
    texts = [document.text for document in library.split("train")]
    again, other = (recall.RecallWriter(tokenizer, texts, seed=seed) for seed in (7, 8))
    assert writer.document(5, 600) == again.document(5, 600)
    assert writer.digest == again.digest != other.digest
    assert len({writer.document(5, 600), writer.document(6, 600), writer.document(5, 601), other.document(5, 600)}) == 4


@pytest.mark.parametrize("distance", [100, 700, 3000, 3500])
def test_probes_with_and_without_the_definition(
    writer: recall.RecallWriter, tokenizer: Tokenizer, distance: int
) -> None:
    for index in range(12):
        probe = writer.probe(index, distance=distance)
        fact = probe.fact
        assert distance <= fact.distance < distance + 110  # one line, or one definition of three
        assert len(probe.ids) == fact.stop
        answer = probe.ids[fact.answer :]
        assert probe.ids_without[probe.answer_without :] == answer
        assert tokenizer.decode(answer) == fact.value
        gone = len(probe.ids) - len(probe.ids_without)
        assert gone == fact.answer - probe.answer_without > 0
        with_text, without_text = (tokenizer.decode(ids[1:]) for ids in (probe.ids, probe.ids_without))
        for text, ids, times in ((with_text, probe.ids, 2), (without_text, probe.ids_without, 1)):
            assert text.count(fact.name) == text.count(fact.value.lstrip(" (")) == times
            assert tokenizer.encode(text, special=False) == list(ids[1:])
        assert len(probe.ids) <= 4096


def test_recall_refuses(writer: recall.RecallWriter, tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match="a recall document of 255 tokens; expected at least 256"):
        writer.document(0, 255)
    for distance in (99, 3501):
        with pytest.raises(RequestError, match=f"a distance of {distance} tokens; expected from 100 to 3500"):
            writer.probe(0, distance=distance)
    with pytest.raises(CorpusError, match="1 lines of code to put between facts; expected at least 100 lines"):
        recall.RecallWriter(tokenizer, ["x = 1\n"], seed=0)
