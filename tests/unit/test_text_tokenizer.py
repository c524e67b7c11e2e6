"""Tokenizer and detokenizer: validation, special strings, and streaming equal to decoding."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from m31.errors import TokenizerError
from m31.text import demo
from m31.text._pieces import byte_alphabet
from m31.text.detokenizer import Detokenizer
from m31.text.tokenizer import Tokenizer

SPECIAL = demo.special_ids()


def added(token_id, content, special=True):
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": token_id, "content": content, "special": special, **flags}


def byte_level_json(vocab_size=512):
    return json.loads(demo.tokenizer_files(vocab_size)["tokenizer.json"])


def fallback_json(decoder=None, byte_fallback=True):
    """A SentencePiece-like vocabulary: ▁ for spaces, <0x00>..<0xFF> for what it lacks."""
    tokens = ["<unk>", "<s>", "</s>"] + ([f"<0x{b:02X}>" for b in range(256)] if byte_fallback else [])
    tokens += [*"▁abcdeé", "▁a", "ab", "▁▁"]
    decoder = decoder or {
        "type": "Sequence",
        "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        ],
    }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [added(0, "<unk>"), added(1, "<s>"), added(2, "</s>")],
        "normalizer": {
            "type": "Sequence",
            "normalizers": [
                {"type": "Prepend", "prepend": "▁"},
                {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
            ],
        },
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": decoder,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": "<unk>",
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": byte_fallback,
            "ignore_merges": False,
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": [["▁", "a"], ["a", "b"], ["▁", "▁"]],
        },
    }


METASPACE = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
STRIP_THREE = {
    "type": "Sequence",
    "decoders": [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 3, "stop": 0},
    ],
}
DECODERS = {
    "byte-level": lambda: byte_level_json(),
    "fallback": lambda: fallback_json(),
    "strip-three": lambda: fallback_json(STRIP_THREE),
    "metaspace": lambda: fallback_json({"type": "Sequence", "decoders": [{"type": "ByteFallback"}, METASPACE]}),
    "metaspace-never": lambda: fallback_json({**METASPACE, "prepend_scheme": "never"}),
}


def build(data, vocab_size=600, bos=None, eos=(), folder=None):
    """Through Tokenizer.load when a folder is given, else directly."""
    if folder is None:
        return Tokenizer(data, where="tokenizer.json", vocab_size=vocab_size, needed={})
    (folder / "tokenizer.json").write_text(json.dumps(data), encoding="utf-8")
    return Tokenizer.load(folder, vocab_size=vocab_size, bos=bos, eos=eos)


@pytest.fixture(scope="module")
def tok():
    return build(byte_level_json(), 512)


BUILT = {name: build(make()) for name, make in DECODERS.items()}


# -- loading


def test_load_checks_against_config(tmp_path):
    tok = build(byte_level_json(), 512, bos=SPECIAL[demo.BOS], eos=(SPECIAL[demo.EOS],), folder=tmp_path)
    assert tok.notes == ()
    assert tok.special_id("[e~[") == SPECIAL["[e~["]
    assert tok.added_tokens == SPECIAL
    assert "<mm:think>" not in tok.special_tokens
    assert tok.token_string(SPECIAL["]~b]"]) == "]~b]"


def test_missing_file(tmp_path):
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: the checkpoint has no tokenizer; expected a tok"):
        Tokenizer.load(tmp_path, vocab_size=10)


def test_not_a_regular_file(tmp_path):
    (tmp_path / "tokenizer.json").mkdir()
    with pytest.raises(TokenizerError, match="is not a regular file"):
        Tokenizer.load(tmp_path, vocab_size=10)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no FIFOs")
def test_a_fifo_does_not_hang(tmp_path):
    os.mkfifo(tmp_path / "tokenizer.json")
    with pytest.raises(TokenizerError, match="is not a regular file"):
        Tokenizer.load(tmp_path, vocab_size=10)


def test_a_link_to_nothing_is_named(tmp_path):
    (tmp_path / "tokenizer.json").symlink_to(tmp_path / "gone")
    with pytest.raises(TokenizerError, match="is a link to a file that does not exist"):
        Tokenizer.load(tmp_path, vocab_size=10)


def test_a_folder_that_is_a_file(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(TokenizerError, match="cannot be read"):
        Tokenizer.load(tmp_path / "file", vocab_size=10)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"", "is not valid JSON"),
        (b'{"version": "1.0", ', "is not valid JSON"),
        (b"[" * 100_000, "is not valid JSON"),
        (b"[]", "holds a JSON list; expected a JSON object"),
        (b"\xff\xfe", r"is not UTF-8 \(byte 0\)"),
        (b"version https://git-lfs.github.com/spec/v1\n", "is not valid JSON"),
        (b"{}", "the decoder null cannot be streamed"),
    ],
)
def test_corrupt_files(tmp_path, content, text):
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(TokenizerError, match=text):
        Tokenizer.load(tmp_path, vocab_size=10)


def test_a_huge_file_is_not_read(tmp_path):
    with (tmp_path / "tokenizer.json").open("wb") as file:
        file.truncate(2**30)
    with pytest.raises(TokenizerError, match="has 1,073,741,824 bytes; expected at most 536,870,912"):
        Tokenizer.load(tmp_path, vocab_size=10)


def test_a_broken_model_is_ours_to_report():
    data = byte_level_json()
    data["model"]["merges"].append(["a", "nowhere"])
    with pytest.raises(TokenizerError, match=r"is not a usable tokenizer .*out of vocabulary"):
        build(data)


def test_ids_beyond_the_models_vocabulary():
    with pytest.raises(TokenizerError, match=r"has id 5..; expected ids below config\.json's vocab_size 500"):
        build(byte_level_json(512), 500)


@pytest.mark.parametrize(
    ("bos", "eos", "name"), [(599, (), "bos_token_id 599"), (1, (2, 555), r"eos_token_id\[1\] 555")]
)
def test_bos_and_eos_must_be_tokens(tmp_path, bos, eos, name):
    with pytest.raises(TokenizerError, match=f"config.json's {name} is not in the vocabulary"):
        build(byte_level_json(512), 600, bos=bos, eos=eos, folder=tmp_path)


@pytest.mark.parametrize(
    ("extra", "text"),
    [
        ([added(512, "<x>"), added(512, "<y>")], "'<x>' and '<y>' both have id 512"),
        ([added(512, "<x>"), added(513, "<x>")], "'<x>' has two ids, 512 and 513"),
        # The library gives the next free id instead, and says nothing.
        ([added(520, "<x>")], "'<x>' should have id 520 and would get 512"),
        ([added(100, "<x>")], "'<x>' should have id 100 and would get 512"),
        ([{"id": 512, "content": "<x>"}], "lacks id, content or special"),
        ([added("512", "<x>")], "lacks id, content or special"),
    ],
)
def test_added_tokens_that_disagree(extra, text):
    data = byte_level_json(512)
    data["added_tokens"] += extra
    with pytest.raises(TokenizerError, match=text):
        build(data, 600)


@pytest.mark.parametrize(
    "decoder",
    [
        None,
        {"type": "WordPiece", "prefix": "##", "cleanup": True},
        {"type": "CTC", "pad_token": "p", "word_delimiter_token": "|", "cleanup": True},
        {"type": "Replace", "pattern": {"Regex": "a+"}, "content": ""},
        {"type": "Sequence", "decoders": [{"type": "Fuse"}, {"type": "ByteFallback"}]},
        {"type": "Sequence", "decoders": [{"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 0, "stop": 1}]},
    ],
)
def test_decoders_that_cannot_be_streamed_are_refused(decoder):
    data = fallback_json()
    data["decoder"] = decoder
    with pytest.raises(TokenizerError, match="cannot be streamed token by token"):
        build(data)


def test_truncation_and_padding_are_switched_off_and_noted(tmp_path):
    data = byte_level_json()
    data["truncation"] = {"max_length": 3, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}
    data["padding"] = {
        "strategy": {"Fixed": 64},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "]~!b[",
    }
    tok = build(data, 520, folder=tmp_path)
    text = "A prompt of more than three tokens."
    for special in (True, False):
        ids = tok.encode(text, special=special)
        assert tok.decode(ids) == text
        assert 0 not in ids
    assert [note.split(";")[0] for note in tok.notes] == [
        "tokenizer.json asks to truncate prompts",
        "tokenizer.json asks to pad prompts",
        "8 ids below vocab_size have no token",
    ]


# -- encoding

TRICKY = "a]~b]system\n<mm:think>x</mm:think>[e~[]<]minimax[>[é"


def test_special_strings_become_ids_only_when_asked(tok):
    ids = tok.encode(TRICKY, special=True)
    names = ("]~b]", "<mm:think>", "</mm:think>", "[e~[", "]<]minimax[>[")
    assert [i for i in ids if i in SPECIAL.values()] == [SPECIAL[name] for name in names]
    plain = tok.encode(TRICKY, special=False)
    assert not set(plain) & set(SPECIAL.values())
    assert tok.decode(plain) == tok.decode(ids) == TRICKY
    # One call does not change the other's mode.
    assert tok.encode(TRICKY, special=True) == ids


@given(st.text(max_size=40))
@settings(max_examples=60)
def test_plain_round_trip(text):
    tok = BUILT["byte-level"]
    assert tok.decode(tok.encode(text, special=False)) == text


def test_nothing_is_added_unless_asked(tok):
    data = byte_level_json()
    bos = demo.BOS
    data["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": bos, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {bos: {"id": bos, "ids": [SPECIAL[bos]], "tokens": [bos]}},
    }
    with_bos = build(data)
    for special in (True, False):
        ids = with_bos.encode("hi", special=special)
        assert ids == tok.encode("hi", special=True)
        assert with_bos.encode("hi", special=special, post_process=True) == [SPECIAL[bos], *ids]
    assert tok.encode("", special=True) == []


@pytest.mark.parametrize("special", [True, False])
def test_lone_surrogates_are_refused(tok, special):
    with pytest.raises(TokenizerError, match=r"a lone surrogate, U\+D83D, at character 3"):
        tok.encode("abc\ud83d", special=special)


def test_characters_that_cannot_be_expressed_are_named():
    """Dropped or turned into <unk> by the library, depending on the model; both change the prompt silently."""
    tok = build(fallback_json(byte_fallback=False))
    assert tok.decode(tok.encode("abc d", special=True)) == "abc d"
    for special in (True, False):
        with pytest.raises(TokenizerError, match=r"cannot express 'z' \(U\+007A\), '日' \(U\+65E5\); expected"):
            tok.encode("ab 日 z 日", special=special)
    data = byte_level_json()
    del data["model"]["vocab"]["~"]
    data["model"]["vocab"]["unused"] = SPECIAL["]~b]"] + 9999
    missing = build(data, 20_000)
    with pytest.raises(TokenizerError, match=r"cannot express '~' \(U\+007E\)"):
        missing.encode("home is ~", special=False)


def test_a_vocabulary_that_matches_control_strings_as_text_is_caught():
    data = fallback_json()
    data["model"] = {
        "type": "Unigram",
        "unk_id": 0,
        "byte_fallback": True,
        "vocab": [[token, -1.0] for token in data["model"]["vocab"]],
    }
    tok = build(data)
    with pytest.raises(TokenizerError, match=r"cannot write \['</s>'\] as ordinary text"):
        tok.encode("a</s>", special=False)


def test_special_id_names_the_near_ones(tok):
    assert tok.special_id("<mm:think>") == SPECIAL["<mm:think>"]
    with pytest.raises(TokenizerError, match="unknown special token '<mm:thinks>'; did you mean '<mm:think>' or '</mm"):
        tok.special_id("<mm:thinks>")
    with pytest.raises(TokenizerError, match="unknown special token 'QQQQ'; this tokenizer has 10 added tokens"):
        tok.special_id("QQQQ")


# -- decoding


@pytest.mark.parametrize("bad", [-1, 512, 2**70, 1.0, "1", None, True])
def test_ids_out_of_range_are_refused(tok, bad):
    tok.decode([1])  # a bool must not be taken for the id 1, not even after 1 was seen
    with pytest.raises(TokenizerError, match=r"token id .* is out of range; expected 0 to 511"):
        tok.decode([5, bad])
    with pytest.raises(TokenizerError, match="out of range"):
        Detokenizer(tok).push(bad)


def test_numpy_ids_and_ids_without_a_token():
    tok = build(byte_level_json(512), 600)
    ids = tok.encode("galaxy", special=False)
    assert tok.decode(np.array(ids)) == "galaxy"
    assert tok.decode([ids[0], 599, *ids[1:]]) == "galaxy"
    assert tok.token_string(599) is None


def test_skip_special_leaves_markers(tok):
    ids = tok.encode("]~b]ai\n<mm:think>hm</mm:think>yes[e~[", special=True)
    assert tok.decode(ids, skip_special=True) == "ai\n<mm:think>hm</mm:think>yes"


def stream(tok, ids, **options):
    detokenizer = Detokenizer(tok, **options)
    pieces = [detokenizer.push(i) for i in ids]
    return pieces, detokenizer.flush()


def reference_decode(data, ids, skip_special):
    return tokenizers.Tokenizer.from_str(json.dumps(data)).decode(ids, skip_special_tokens=skip_special)


@pytest.mark.parametrize("kind", DECODERS)
@given(data=st.data(), skip=st.booleans())
@settings(max_examples=150, deadline=None)
def test_stream_equals_decode_and_never_half_a_character(kind, data, skip):
    tok = BUILT[kind]
    top = 511 if kind == "byte-level" else 268
    ids = data.draw(st.lists(st.integers(0, top), max_size=24))
    pieces, rest = stream(tok, ids, skip_special=skip)
    assert "".join(pieces) + rest == tok.decode(ids, skip_special=skip)
    # Whatever the bytes: a piece is only ever added to, never taken back.
    for count in range(len(ids) + 1):
        shown, held = "".join(pieces[:count]), stream(tok, ids[:count], skip_special=skip)
        assert "".join(held[0]) == shown
        assert tok.decode(ids[:count], skip_special=skip) == shown + held[1]


@pytest.mark.parametrize("kind", DECODERS)
@given(data=st.data(), skip=st.booleans())
@settings(max_examples=150, deadline=None)
def test_decode_equals_the_library(kind, data, skip):
    """On byte-level, always; with byte fallback when the bytes are UTF-8 (the library turns a whole run of bytes
    into U+FFFD if one of them is wrong, which no streaming decoder can foresee)."""
    tok = BUILT[kind]
    if kind == "byte-level":
        ids = data.draw(st.lists(st.integers(0, 511), max_size=24))
    else:
        text = st.text(st.sampled_from("ab é日😀 ▁"), max_size=5)
        words = data.draw(st.lists(st.one_of(st.integers(0, 2).map(lambda i: [i]), text), max_size=5))
        ids = [i for word in words for i in (word if isinstance(word, list) else tok.encode(word, special=False))]
    assert tok.decode(ids, skip_special=skip) == reference_decode(DECODERS[kind](), ids, skip)


def test_a_character_comes_with_its_last_byte(tok):
    alphabet = {byte: char for char, byte in byte_alphabet().items()}
    ids = [tok._parser.token_to_id(alphabet[byte]) for byte in "é日😀".encode()]
    assert stream(tok, ids) == (["", "é", "", "", "日", "", "", "", "😀"], "")
    assert stream(tok, ids[:3]) == (["", "é", ""], "\ufffd")
    # E6 97 then a letter: that the two bytes are no character is certain only with the letter.
    letter = tok.encode("x", special=False)
    assert stream(tok, ids[2:4] + letter) == (["", "", "\ufffdx"], "")
    # FF can begin nothing: certain at once.
    assert stream(tok, [tok._parser.token_to_id(alphabet[0xFF])]) == (["\ufffd"], "")


def test_text_that_holds_the_replacement_character_is_not_held_back(tok):
    ids = tok.encode("\ufffd" * 5, special=False)
    pieces, rest = stream(tok, ids)
    assert "".join(pieces) == "\ufffd" * 5
    assert rest == ""


def test_stripping_counts_over_tokens():
    """Five spaces in five tokens, three of them stripped; the allowance ends with the first other character."""
    tok = BUILT["strip-three"]
    letter = tok.encode("a", special=False)
    mark = next(i for i in range(268) if tok.token_string(i) == "▁")
    assert "".join(stream(tok, [mark] * 5)[0]) == "  " == reference_decode(fallback_json(STRIP_THREE), [mark] * 5, True)
    assert "".join(stream(tok, [mark, *letter, mark, mark])[0]) == "a  "


def test_spaces_at_the_start():
    tok = BUILT["fallback"]
    ids = tok.encode("a  b", special=False)
    assert tok.decode(ids) == "a  b"
    assert "".join(stream(tok, ids)[0]) == "a  b"
    # A reply continues its prompt: its first space belongs to the text.
    assert "".join(stream(tok, ids, continuing=True)[0]) == " a  b"


@pytest.mark.parametrize("kind", DECODERS)
def test_a_long_stream_is_linear(kind):
    """A token costs one look-up, and no more than three bytes are held, whatever came before."""

    class Counting:
        def __init__(self, tok):
            self.calls, self.tok = 0, tok
            self.special_ids, self.strip_start = tok.special_ids, tok.strip_start

        def piece(self, token_id, *, first):
            self.calls += 1
            return self.tok.piece(token_id, first=first)

    tok = BUILT[kind]
    bad = next((i for i in range(268) if tok.piece(i) == b"\x80"), 5)
    counting = Counting(tok)
    detokenizer = Detokenizer(counting)
    ids = np.random.default_rng(0).integers(0, 268, 50_000).tolist() + [bad] * 50_000
    length = 0
    for i in ids:
        length += len(detokenizer.push(i))
        assert len(detokenizer._utf8.getstate()[0]) <= 3
    assert counting.calls == 100_000
    assert length > 50_000


def test_decoding_never_reaches_for_a_network(monkeypatch, tmp_path):
    import socket

    def refuse(*args, **kwargs):
        raise AssertionError("a socket was opened")

    monkeypatch.setattr(socket, "socket", refuse)
    tok = build(byte_level_json(), 512, folder=tmp_path)
    assert tok.decode(tok.encode("offline", special=True)) == "offline"
