"""The demonstration tokenizer and template: the wire format of MODEL.md chapter 7."""

from __future__ import annotations

import hashlib
import json

import pytest

from m31.errors import TokenizerError
from m31.text import demo
from m31.text.template import ChatTemplate, starts_in_reasoning
from m31.text.tokenizer import Tokenizer

NS = "]<]minimax[>["
DIGESTS = {
    "tokenizer.json": "d40149b7b107237c",
    "tokenizer_config.json": "709c0938b242609f",
    "chat_template.jinja": "1d135fff8cfff062",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("demo")
    for name, content in demo.tokenizer_files(512).items():
        (path / name).write_bytes(content)
    return path


@pytest.fixture(scope="module")
def chat(folder):
    template = ChatTemplate.load(folder)
    yield template
    template.close()


def test_the_bytes_are_the_same_everywhere():
    digests = {name: hashlib.sha256(data).hexdigest()[:16] for name, data in demo.tokenizer_files(512).items()}
    assert digests == DIGESTS


@pytest.mark.parametrize("vocab_size", [demo.MIN_VOCAB_SIZE, 300, 512, 2000])
def test_every_size_loads_with_the_same_special_ids(tmp_path, vocab_size):
    for name, content in demo.tokenizer_files(vocab_size).items():
        (tmp_path / name).write_bytes(content)
    ids = demo.special_ids()
    tok = Tokenizer.load(tmp_path, vocab_size=vocab_size, bos=ids[demo.BOS], eos=(ids[demo.EOS],))
    assert tok.added_tokens == ids
    assert (tok.notes == ()) == (vocab_size <= 512)
    for text in ("The light of the galaxy", "naïve 日本 😀\n\ttab", demo._PASSAGE):
        assert tok.decode(tok.encode(text, special=False)) == text


def test_merges_are_worth_their_ids(folder):
    tok = Tokenizer.load(folder, vocab_size=512)
    assert len(tok.encode(demo._PASSAGE, special=False)) < 0.5 * len(demo._PASSAGE)
    # Every merge can be reached: each string in the vocabulary encodes to itself.
    vocab = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    whole = [token for token, i in vocab.items() if i >= demo.MIN_VOCAB_SIZE]
    alone = sum(len(tok.encode(token.replace("Ġ", " "), special=False)) == 1 for token in whole)
    assert alone == len(whole)


def test_a_vocabulary_that_is_too_small_is_refused():
    with pytest.raises(TokenizerError, match=r"vocabulary of 265 cannot hold .*; expected at least 266 \(10 added"):
        demo.tokenizer_files(265)


def test_markers_are_added_but_not_special(folder):
    tok = Tokenizer.load(folder, vocab_size=512)
    assert set(tok.added_tokens) - set(tok.special_tokens) == {NS, "<mm:think>", "</mm:think>"}


# -- the template

USER = {"role": "user", "content": "hi"}


def test_structure_and_identity(chat):
    text = chat.render([{"role": "system", "content": "Be brief."}, USER])
    head, developer, user, reply = text.split("[e~[\n")
    assert head.startswith("]~!b[]~b]system\nA small model with random weights")
    assert "\n\n<thinking_instructions>\n" in head
    assert head.endswith("\n</thinking_instructions>")
    # The caller's system prompt fills the developer section and never replaces the identity.
    assert developer == "]~b]developer\nBe brief."
    assert user == "]~b]user\nhi"
    assert reply == "]~b]ai\n"


def test_root_fills_the_system_section(chat):
    text = chat.render([{"role": "root", "content": "I am root."}, {"role": "developer", "content": "D"}, USER])
    assert text.startswith("]~!b[]~b]system\nI am root.\n\n<thinking_instructions>")
    assert "random weights" not in text
    assert "]~b]developer\nD[e~[\n" in text


def test_developer_default_and_model_identity(chat):
    assert "]~b]developer\nAnswer plainly.[e~[\n" in chat.render([USER])
    assert "]~b]developer\nI am M.[e~[\n" in chat.render([USER], model_identity="I am M.")


@pytest.mark.parametrize(
    ("mode", "prefix"), [({"thinking_mode": "enabled"}, "<mm:think>"), ({"thinking_mode": "disabled"}, "</mm:think>")]
)
def test_generation_prefix(chat, mode, prefix):
    text = chat.render([USER], **mode)
    assert text.endswith("]~b]ai\n" + prefix)
    assert starts_in_reasoning(text) == (prefix == "<mm:think>")


@pytest.mark.parametrize("mode", [{"thinking_mode": "adaptive"}, {}])
def test_adaptive_or_undefined_has_no_prefix(chat, mode):
    text = chat.render([USER], **mode)
    assert text.endswith("]~b]ai\n")
    assert "<mm:think>" in text  # in the instructions (BUG-31)
    assert not starts_in_reasoning(text)


def test_no_generation_prompt(chat):
    assert chat.render([USER], add_generation_prompt=False).endswith("]~b]user\nhi[e~[\n")


def test_assistant_history(chat):
    def turn(message):
        text = chat.render([USER, {"role": "assistant", **message}, USER], add_generation_prompt=False)
        return text.split("]~b]ai\n")[1].split("[e~[")[0]

    assert turn({"content": "plain"}) == "</mm:think>plain"
    assert turn({"content": "said", "reasoning_content": "why"}) == "<mm:think>why</mm:think>said"
    assert turn({"content": "<mm:think>\nwhy\n</mm:think>\n\nsaid"}) == "<mm:think>why</mm:think>said"
    assert turn({"content": "why</mm:think>said"}) == "<mm:think>why</mm:think>said"


def test_tools_are_listed_only_if_there_are_any(chat):
    tools = [{"type": "function", "function": {"name": "find", "description": "cherche é"}}]
    text = chat.render([USER], tools=tools)
    assert "\n\n# Tools\n" in text
    assert '<tools>\n<tool>{"name": "find", "description": "cherche é"}</tool>\n</tools>' in text
    assert f"{NS}<tool_call>\n{NS}<invoke name=" in text
    assert "# Tools" not in chat.render([USER], tools=[])


def test_tool_call_wire_format_of_the_specification(chat):
    """The example of MODEL.md §7.4, character by character."""
    first = {"name": "open", "arguments": '{"path":"a.txt","opts":{"deep":true},"ids":[4,5]}'}
    calls = [{"function": first}, {"function": {"name": "list", "arguments": "{}"}}]
    text = chat.render([USER, {"role": "assistant", "content": None, "tool_calls": calls}], add_generation_prompt=False)
    block = text.split("]~b]ai\n</mm:think>")[1].removesuffix("[e~[\n")
    assert block == (
        f"{NS}<tool_call>\n"
        f'{NS}<invoke name="open">{NS}<path>a.txt{NS}</path>{NS}<opts>{NS}<deep>true{NS}</deep>{NS}</opts>'
        f"{NS}<ids>{NS}<item>4{NS}</item>{NS}<item>5{NS}</item>{NS}</ids>{NS}</invoke>\n"
        f'{NS}<invoke name="list">{NS}</invoke>\n'
        f"{NS}</tool_call>"
    )


def test_tool_call_corner_values(chat):
    arguments = {"gone": None, "in": {"gone": None}, "list": [None, {}, []], "f": False, "n": 1.5, "s": '<&">\n'}
    calls = [{"function": {"name": "f", "arguments": arguments}}]
    text = chat.render([USER, {"role": "assistant", "content": "", "tool_calls": calls}], add_generation_prompt=False)
    body = text.split('<invoke name="f">')[-1].split(f"{NS}</invoke>")[0]
    empty = f"{NS}<item>{NS}</item>"
    assert body == (
        f"{NS}<in>{NS}</in>{NS}<list>{empty}{empty}{empty}{NS}</list>{NS}<f>false{NS}</f>{NS}<n>1.5{NS}</n>"
        f'{NS}<s><&">\n{NS}</s>'
    )


def test_tool_results_share_one_header(chat):
    calls = [{"function": {"name": "f", "arguments": {}}}]
    asking = {"role": "assistant", "content": "", "tool_calls": calls}
    results = [{"role": "tool", "content": "one"}, {"role": "tool", "content": "two"}]
    text = chat.render([USER, asking, *results])
    assert text.endswith("]~b]tool\n<response>one</response>\n<response>two</response>[e~[\n]~b]ai\n")


def test_media_parts_are_one_placeholder_each(chat):
    parts = [{"type": "image"}, {"type": "text", "text": "and"}, {"type": "video"}]
    assert "]~b]user\n]<]image[>[and]<]video[>[[e~[\n" in chat.render([{"role": "user", "content": parts}])


def test_template_has_no_stray_spaces(chat):
    text = chat.render([{"role": "system", "content": "S"}, USER, {"role": "assistant", "content": "A"}, USER])
    assert all(line == line.strip() for line in text.splitlines())


# -- against transformers, which other engines use


@pytest.fixture(scope="module")
def theirs(folder):
    import transformers

    return transformers.AutoTokenizer.from_pretrained(str(folder), local_files_only=True)


CALLS = [{"type": "function", "function": {"name": "f", "arguments": {"a": [1, {"b": None}], "c": "é"}}}]
CONVERSATIONS = [
    [USER],
    [{"role": "root", "content": "R"}, {"role": "system", "content": "S"}, USER],
    [
        {"role": "developer", "content": [{"type": "text", "text": "D"}]},
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "日本"}]},
        {"role": "assistant", "content": "t</mm:think>\n\nc", "tool_calls": CALLS},
        {"role": "tool", "content": "1"},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "x", "reasoning_content": "why"},
        USER,
    ],
]


@pytest.mark.parametrize("messages", CONVERSATIONS)
@pytest.mark.parametrize("options", [{}, {"thinking_mode": "enabled"}, {"add_generation_prompt": False}])
@pytest.mark.parametrize("tools", [None, [{"type": "function", "function": {"name": "g", "x": "ü"}}]])
def test_prompts_and_ids_equal_transformers(chat, folder, theirs, messages, options, tools):
    tok = Tokenizer.load(folder, vocab_size=512)
    ours = chat.render(messages, tools=tools, **options)
    options = {"add_generation_prompt": True, **options}
    assert ours == theirs.apply_chat_template(messages, tools=tools, tokenize=False, **options)
    ids = tok.encode(ours, special=True)
    assert ids == theirs.encode(ours, add_special_tokens=False)
    for skip in (True, False):
        assert tok.decode(ids, skip_special=skip) == theirs.decode(ids, skip_special_tokens=skip)
