"""Text files for small checkpoints: a byte-level tokenizer and a chat template in the model's wire format.

For the demonstration that `m31` runs before anyone has downloaded weights, and for tests. The vocabulary is a
byte-level BPE trained, right here, on the passage below, so any text can be encoded; the template follows
MODEL.md §7.2 and §7.4 in words of our own and is not the published one. The same bytes come out everywhere.
`tokenizer_json`, `tokenizer_config` and `chat_template` also serve vocabularies that were trained elsewhere.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections import Counter
from collections.abc import Mapping, Sequence

from m31.errors import TemplateError, TokenizerError
from m31.text._pieces import byte_alphabet

# (string, special); MODEL.md §7.1. Their ids are 0, 1, 2, ... whatever the vocabulary's size is.
ADDED_STRINGS: tuple[tuple[str, bool], ...] = (
    ("]~!b[", True),
    ("]~b]", True),
    ("[e~[", True),
    ("]<]minimax[>[", False),
    ("<mm:think>", False),
    ("</mm:think>", False),
    ("]<]image[>[", True),
    ("]<]video[>[", True),
    ("]<]start of image[>[", True),
    ("]<]end of image[>[", True),
)
BOS, EOS = "]~b]", "[e~["
MIN_VOCAB_SIZE = len(ADDED_STRINGS) + 256

_PASSAGE = """\
The galaxy in Andromeda is the farthest thing that people can see without an instrument. On a dark night in autumn it
is a small soft patch of light, a little longer than it is wide, and it looks like nothing much. The light that
reaches the eye has been on its way for two and a half million years. When it started there were no cities, no farms
and no books, and nobody who could have written down where it was. It has crossed the whole distance only to end on
the back of an eye, in somebody who went outside to look.

A telescope shows more. There is a bright centre, and there are arms that wind around it, and in the arms there are
lanes of dust and knots of young blue stars. There are small companions, and there is a great halo of old stars that
reaches far beyond the part that is easy to see. The first people who measured how far away it is were surprised by
the number, and checked it, and were surprised again. It was not a cloud inside our own galaxy. It was another one,
as large as ours or larger, and there were many more behind it.

Looking carefully is a kind of work. The observer writes down the time, the place, the weather and the state of the
instrument, and then writes down what was seen, and not what was expected. If two observers disagree, they compare
their notes before they compare their opinions. A measurement without its error is only a story. A result that nobody
else can repeat is not yet a result. These are simple rules, and it is hard to keep them when the night is cold and
the answer is already known.

The same rules are good for programs. A program that gives an answer should say how it came to it. A program that
cannot give an answer should say so, and say why, and say what could be done about it. It should not guess. It should
not be quiet about what it left out. It is better to stop with a clear sentence than to go on with a wrong number,
because the sentence costs a minute and the number may cost a year. People will forgive a tool that is slow, and a
tool that is small, but they will not forgive a tool that they have to check by hand every time they use it.

So this is a small model with random weights, and what it writes means nothing at all. It shows that the pieces fit:
words become numbers, numbers go through the layers one after another, and numbers become words again. Give it the
weights of a trained model and the same path will carry meaning. Until then it is a telescope with its cap on, pointed
in the right direction, waiting for the light.
"""

_TEMPLATE = r"""
{#- Wire format of MODEL.md, chapter 7. Roles: root, system / developer, user, assistant, tool. -#}
{%- set ns_mark = ']<]minimax[>[' -%}
{%- macro text_of(content) -%}
  {%- if content is string -%}{{ content }}{%- else -%}
    {%- for part in content -%}
      {%- if part.type == 'text' -%}{{ part.text }}
      {%- elif part.type == 'image' -%}]<]image[>[
      {%- elif part.type == 'video' -%}]<]video[>[
      {%- else -%}{{ raise_exception('a part of type ' ~ part.type ~ ' cannot be shown') }}
      {%- endif -%}
    {%- endfor -%}
  {%- endif -%}
{%- endmacro -%}
{%- macro element(name, value) -%}
  {{ ns_mark }}<{{ name }}>{{ wire(value) }}{{ ns_mark }}</{{ name }}>
{%- endmacro -%}
{%- macro wire(value) -%}
  {%- if value is mapping -%}
    {%- for key in value -%}{%- if value[key] is not none -%}{{ element(key, value[key]) }}{%- endif -%}{%- endfor -%}
  {%- elif value is string -%}{{ value }}
  {%- elif value is true -%}true
  {%- elif value is false -%}false
  {%- elif value is none -%}
  {%- elif value is iterable -%}
    {%- for item in value -%}{{ element('item', item) }}{%- endfor -%}
  {%- else -%}{{ value }}
  {%- endif -%}
{%- endmacro -%}
{%- set start = namespace(at=0, root=none, developer=none) -%}
{%- if messages[0].role == 'root' -%}
  {%- set start.root = text_of(messages[0].content) -%}{%- set start.at = 1 -%}
{%- endif -%}
{%- if messages[start.at:] and messages[start.at].role in ('system', 'developer') -%}
  {%- set start.developer = text_of(messages[start.at].content) -%}{%- set start.at = start.at + 1 -%}
{%- endif -%}
{{- ']~!b[]~b]system\n' -}}
{{- start.root if start.root is not none else '@IDENTITY@' -}}
{{- '\n\n<thinking_instructions>\nThoughts stand between <mm:think> and </mm:think>, before the reply.\n' -}}
{%- if thinking_mode == 'enabled' -%}{{- 'Think before every reply.' -}}
{%- elif thinking_mode == 'disabled' -%}{{- 'Reply at once.' -}}
{%- else -%}{{- 'Think where it helps.' -}}
{%- endif -%}
{{- '\n</thinking_instructions>[e~[\n' -}}
{{- ']~b]developer\n' -}}
{{- start.developer if start.developer is not none else model_identity | default('Answer plainly.') -}}
{%- if tools -%}
  {{- '\n\n# Tools\nThese tools can be called.\nTheir arguments are described in JSON Schema.\n<tools>\n' -}}
  {%- for tool in tools -%}{{- '<tool>' ~ (tool.function | tojson) ~ '</tool>\n' -}}{%- endfor -%}
  {{- '</tools>\n\nA call of two tools looks like this:\n' -}}
  {{- ns_mark ~ '<tool_call>\n' -}}
  {{- ns_mark ~ '<invoke name="first">' ~ element('key', 'value') ~ ns_mark ~ '</invoke>\n' -}}
  {{- ns_mark ~ '<invoke name="second">' ~ element('list', [1, 2]) ~ ns_mark ~ '</invoke>\n' -}}
  {{- ns_mark ~ '</tool_call>' -}}
{%- endif -%}
{{- '[e~[\n' -}}
{%- for message in messages[start.at:] -%}
  {%- if message.role == 'user' -%}
    {{- ']~b]user\n' ~ text_of(message.content) ~ '[e~[\n' -}}
  {%- elif message.role == 'assistant' -%}
    {%- set said = namespace(text=text_of(message.content), thought=message.reasoning_content | default('', true)) -%}
    {%- if not said.thought and '</mm:think>' in said.text -%}
      {%- set halves = said.text.split('</mm:think>', 1) -%}
      {%- set said.thought = halves[0].replace('<mm:think>', '').strip('\n') -%}
      {%- set said.text = halves[1].strip('\n') -%}
    {%- endif -%}
    {{- ']~b]ai\n' -}}
    {{- '<mm:think>' ~ said.thought if said.thought else '' -}}
    {{- '</mm:think>' ~ said.text -}}
    {%- if message.tool_calls -%}
      {{- ns_mark ~ '<tool_call>\n' -}}
      {%- for call in message.tool_calls -%}
        {{- ns_mark ~ '<invoke name="' ~ call.function.name ~ '">' -}}
        {{- wire(call.function.arguments) ~ ns_mark ~ '</invoke>\n' -}}
      {%- endfor -%}
      {{- ns_mark ~ '</tool_call>' -}}
    {%- endif -%}
    {{- '[e~[\n' -}}
  {%- elif message.role == 'tool' -%}
    {%- if loop.first or loop.previtem.role == 'user' -%}
      {{- raise_exception('a tool message needs a tool call before it') -}}
    {%- endif -%}
    {%- if loop.previtem.role != 'tool' -%}{{- ']~b]tool' -}}{%- endif -%}
    {{- '\n<response>' ~ text_of(message.content) ~ '</response>' -}}
    {%- if loop.last or loop.nextitem.role != 'tool' -%}{{- '[e~[\n' -}}{%- endif -%}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- ']~b]ai\n' -}}
  {%- if thinking_mode == 'enabled' -%}{{- '<mm:think>' -}}
  {%- elif thinking_mode == 'disabled' -%}{{- '</mm:think>' -}}
  {%- endif -%}
{%- endif -%}
"""


def special_ids() -> dict[str, int]:
    """String -> id of the added tokens, in every vocabulary of this module. `BOS` and `EOS` name two of them."""
    return {string: token_id for token_id, (string, _) in enumerate(ADDED_STRINGS)}


def tokenizer_files(vocab_size: int) -> dict[str, bytes]:
    """tokenizer.json, tokenizer_config.json and chat_template.jinja: file name -> content.

    Ids: the added tokens, the 256 bytes, then as many merges as fit `vocab_size` and the passage gives (about 270);
    ids beyond have no token.

    Raises:
        TokenizerError: `vocab_size` is below `MIN_VOCAB_SIZE`.
    """
    if vocab_size < MIN_VOCAB_SIZE:
        raise TokenizerError(
            f"a vocabulary of {vocab_size} cannot hold the demonstration tokenizer",
            where="vocab_size",
            expected=f"at least {MIN_VOCAB_SIZE} ({len(ADDED_STRINGS)} added tokens and 256 bytes)",
        )
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    merges = _merges()[: vocab_size - MIN_VOCAB_SIZE]
    return {
        "tokenizer.json": _json(tokenizer_json(ADDED_STRINGS, merges, byte_level)),
        "tokenizer_config.json": tokenizer_config(),
        "chat_template.jinja": chat_template("A small model with random weights, for trying m31."),
    }


def tokenizer_config() -> bytes:
    """tokenizer_config.json: the names of `BOS` and `EOS`, for libraries that do not read config.json."""
    config = {
        "bos_token": BOS,
        "eos_token": EOS,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1048576,
    }
    return _json(config)


def chat_template(identity: str) -> bytes:
    """chat_template.jinja in the wire format of MODEL.md §7.2 and §7.4.

    Args:
        identity: what the system section says unless a root message says something else. It becomes a string literal
            of the template.

    Raises:
        TemplateError: it holds a quote, a backslash, a brace or a line end, which that literal cannot.
    """
    if set(identity) & set("'\\{}\n\r"):
        raise TemplateError(
            f"the identity {identity!r} cannot stand in a template",
            where="identity",
            expected="one line without quotes, backslashes and braces",
        )
    return _TEMPLATE.lstrip("\n").replace("@IDENTITY@", identity).encode("utf-8")


def _json(value: object) -> bytes:
    return (json.dumps(value, ensure_ascii=False, indent=1) + "\n").encode("utf-8")


def tokenizer_json(
    added: Sequence[tuple[str, bool]], merges: Sequence[tuple[str, str]], pre_tokenizer: Mapping[str, object]
) -> dict[str, object]:
    """The content of a tokenizer.json: byte-level BPE; ids are the added tokens, the 256 bytes, then what merges spell.

    Args:
        added: (string, special) of the added tokens.
        merges: pairs in the byte alphabet, first the one that is applied first. Two that spell the same share an id.
        pre_tokenizer: its `pre_tokenizer` node; the text that it cuts has to be in the byte alphabet.
    """
    strings = [string for string, _ in added] + list(byte_alphabet())
    strings += dict.fromkeys(left + right for left, right in merges)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": token_id,
                "content": string,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": special,
            }
            for token_id, (string, special) in enumerate(added)
        ],
        "normalizer": None,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {string: token_id for token_id, string in enumerate(strings)},
            "merges": [list(pair) for pair in merges],
        },
    }


@functools.cache
def _merges() -> tuple[tuple[str, str], ...]:
    """Byte-pair merges of the passage: the most frequent pair first, the smaller pair on ties; pairs seen twice.

    Our own forty lines rather than the library's trainer, so that the files do not depend on its version.
    """
    # The passage is ASCII: a space is U+0120 in the byte alphabet. Words carry the space before them, as the
    # pre-tokenizer cuts them; merges across other boundaries are never applied and only waste their ids.
    words: Counter[tuple[str, ...]] = Counter()
    for index, word in enumerate(_words(_PASSAGE)):
        words[tuple((chr(0x120) if index else "") + word)] += 1
    merges: list[tuple[str, str]] = []
    known = set(byte_alphabet())
    while True:
        pairs: Counter[tuple[str, str]] = Counter()
        for parts, count in words.items():
            for pair in itertools.pairwise(parts):
                pairs[pair] += count
        if not pairs:
            break
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        if pairs[best] < 2:
            break
        # Two merges that spell the same token would give one string two ids; the later is applied, not recorded.
        if best[0] + best[1] not in known:
            known.add(best[0] + best[1])
            merges.append(best)
        words = Counter({_merged(parts, best): count for parts, count in words.items()})
    return tuple(merges)


def _words(passage: str) -> list[str]:
    """Runs of letters; punctuation and line ends are left to the byte tokens."""
    return "".join(char if char.isalpha() else " " for char in passage).split()


def _merged(parts: tuple[str, ...], pair: tuple[str, str]) -> tuple[str, ...]:
    result: list[str] = []
    index = 0
    while index < len(parts):
        if parts[index : index + 2] == pair:
            result.append(pair[0] + pair[1])
            index += 2
        else:
            result.append(parts[index])
            index += 1
    return tuple(result)
