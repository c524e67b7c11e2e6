"""The seams of Model.generate: text of the last token, what each row is sampled with, events, and what load checks."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support import scripted

import m31
from m31.cli import demo
from m31.engine.sampling import RowState, Sampled, SamplingParams, sample
from m31.errors import TokenizerError
from m31.text import demo as text_demo
from m31.text._pieces import byte_alphabet

IDS: dict[str, int] = scripted.tokenizer_json()["model"]["vocab"]
LETTER = {byte: IDS[char] for char, byte in byte_alphabet().items()}  # byte -> token
A, B, C, D, HALF, STOP, START = (LETTER[byte] for byte in (*b"abcd", 0xC3, *b"!>"))
E_START, E_MIDDLE = LETTER[0xE2], LETTER[0x82]  # two of the three bytes of a euro sign
EOS = text_demo.special_ids()[text_demo.EOS]


def continuation(folder: Path, script: list[int], **options: Any) -> tuple[list[str], Any]:
    """(pieces, the finished generation) of a model that follows `script`, prompted with its first token."""
    model = m31.load(scripted.checkpoint(folder, script), backend="reference")
    generation = model.generate(script[:1], **{"temperature": 0.0, "max_tokens": len(script) - 1, **options})
    pieces = list(generation)
    assert generation.token_ids == script[1:]
    assert "".join(pieces) == generation.text
    assert model.engine.pool.free == model.engine.pool.pages
    return pieces, generation


# --- the end of the text ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stop", [STOP, EOS])
def test_the_token_that_ends_the_text_is_not_part_of_it(tmp_path: Path, stop: int) -> None:
    pieces, generation = continuation(
        tmp_path, [START, A, B, stop], max_tokens=9, stop_token_ids=() if stop == EOS else (stop,)
    )
    assert (pieces, generation.text, generation.finish_reason) == (["a", "b"], "ab", "stop")


def test_the_last_token_of_a_text_cut_by_length_is_part_of_it(tmp_path: Path) -> None:
    pieces, generation = continuation(tmp_path, [START, A, B, STOP])
    assert (pieces, generation.finish_reason) == (["a", "b", "!"], "length")


@pytest.mark.parametrize("end", ["length", "token"])
@pytest.mark.parametrize("part", [[HALF], [E_START, E_MIDDLE]], ids=["one-of-two", "two-of-three"])
def test_half_a_character_at_the_end_becomes_one_replacement(tmp_path: Path, end: str, part: list[int]) -> None:
    script = [START, A, *part, *([STOP] if end == "token" else [])]
    pieces, generation = continuation(tmp_path, script, stop_token_ids=(STOP,))
    assert pieces == ["a", "\ufffd"]
    assert generation.finish_reason == ("length" if end == "length" else "stop")


def test_half_a_character_that_is_closed_becomes_one_replacement(tmp_path: Path) -> None:
    model = m31.load(scripted.checkpoint(tmp_path, [START, A, E_START, E_MIDDLE, B]), backend="reference")
    generation = model.generate([START], temperature=0.0, max_tokens=9)
    events = generation.events()
    assert [next(events).text for _ in range(3)] == ["a", "", ""]
    generation.close()
    assert generation.text == "a\ufffd"


def test_half_a_character_of_the_prompt_does_not_reach_the_text(tmp_path: Path) -> None:
    """The continuation byte that would have completed the prompt's character is ill-formed alone."""
    script = [E_START, E_MIDDLE, LETTER[0xAC], A]
    model = m31.load(scripted.checkpoint(tmp_path, script), backend="reference")
    generation = model.generate(script[:2], temperature=0.0, max_tokens=2)
    assert list(generation) == ["\ufffd", "a"]


@pytest.mark.parametrize("end", ["length", "token"])
def test_what_could_have_become_a_stop_string_is_given_at_the_end(tmp_path: Path, end: str) -> None:
    script = [START, A, B, C, *([STOP] if end == "token" else [])]
    pieces, generation = continuation(tmp_path, script, stop=("bcd",), stop_token_ids=(STOP,))
    assert pieces == ["a", "bc"]
    assert generation.finish_reason == ("length" if end == "length" else "stop")


def test_a_stop_string_wins_over_the_length_and_takes_its_text_away(tmp_path: Path) -> None:
    pieces, generation = continuation(tmp_path, [START, A, B, C, D], stop=("bcd",))
    assert (pieces, generation.finish_reason) == (["a"], "stop")


def test_a_replacement_character_can_complete_a_stop_string(tmp_path: Path) -> None:
    """What the detokenizer held at the end goes through the stop strings like all other text."""
    pieces, generation = continuation(tmp_path, [START, A, B, HALF], stop=("b\ufffd",))
    assert (pieces, generation.finish_reason) == (["a"], "stop")


# --- the start of the text -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "decoder",
    [
        {"type": "Metaspace", "replacement": "Ġ", "prepend_scheme": "always", "split": True},
        {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "Ġ"}, "content": " "},
                {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0},
            ],
        },
    ],
    ids=["metaspace", "strip"],
)
def test_a_reply_keeps_the_space_that_a_text_would_lose_at_its_start(tmp_path: Path, decoder: dict[str, Any]) -> None:
    data = scripted.tokenizer_json()
    data["decoder"] = decoder
    the, a = IDS["Ġthe"], IDS["Ġa"]
    model = m31.load(scripted.checkpoint(tmp_path, [START, the, a], tokenizer=data), backend="reference")
    assert model.tokenizer.decode([the, a]) == "the a"  # so a text of its own would begin
    generation = model.generate([START], temperature=0.0, max_tokens=2)
    assert list(generation) == [" the", " a"]


def test_special_strings_of_a_prompt_are_tokens_only_if_asked_for(sampled: Any) -> None:
    string = text_demo.EOS
    plain = tuple(LETTER[byte] for byte in string.encode())
    assert sampled.encode(string, special=True) == (EOS,)
    assert len(sampled.encode(string, special=False)) > 1
    assert EOS not in sampled.encode(string, special=False)
    assert sampled.tokenizer.decode(sampled.encode(string, special=False)) == string
    one = {"max_tokens": 6, "temperature": 0.0, "ignore_eos": True}
    for special, ids in ((True, (EOS,)), (False, sampled.encode(string, special=False))):
        by_text, by_ids = sampled.generate(string, special=special, **one), sampled.generate(ids, **one)
        list(by_text)
        list(by_ids)
        assert by_text.stats.prompt_tokens == len(ids) <= len(plain)
        assert by_text.token_ids == by_ids.token_ids
    default = sampled.generate(string, **one)
    assert default.stats.prompt_tokens == 1
    default.close()


# --- what a row is sampled with --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sampled(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A model with random weights: its texts depend on everything."""
    folder = tmp_path_factory.mktemp("demo") / "ckpt"
    demo.write(folder, seed=0, layers=2)
    return m31.load(folder, backend="reference")


# What this model says greedily after 5, 6, 7; it would go on with more 97.
PROMPT = [5, 6, 7, 463, 225, 437, 368, 93, 308, 490, 329, 50, 97]


def run(model: Any, prompt: list[int], n: int, *, request: int = 0, **params: Any) -> list[int]:
    generation = model.generate(prompt, request=request, max_tokens=n, ignore_eos=True, **params)
    list(generation.events())
    assert len(generation.token_ids) == n
    return list(generation.token_ids)


def by_hand(model: Any, prompt: list[int], n: int, *, request: int = 0, **params: Any) -> list[int]:
    """The same, from a prefill per token and one explicit state per row."""
    values = SamplingParams(**params)
    out: list[int] = []
    for _ in range(n):
        row = RowState(
            params=values,
            seed=values.seed or 0,
            request=request,
            position=len(prompt) + len(out),
            prompt_ids=prompt,
            output_ids=list(out),
        )
        out.append(sample(model.logits([*prompt, *out])[-1:], [row])[0].token_id)
    return out


@pytest.mark.parametrize(
    "params",
    [
        {"seed": 1},
        {"seed": 1, "request": 3, "top_k": 50},
        {"temperature": 0.0, "repetition_penalty": 100.0},
        {"temperature": 0.0, "presence_penalty": 2.0},
        {"temperature": 0.0, "frequency_penalty": 2.0},
        {"seed": 5, "repetition_penalty": 1.5, "presence_penalty": 1.0, "frequency_penalty": 0.5},
    ],
    ids=lambda params: "-".join(params),
)
def test_every_token_is_sampled_with_its_own_state(sampled: Any, params: dict[str, Any]) -> None:
    got = run(sampled, PROMPT, 14, **params)
    assert got == by_hand(sampled, PROMPT, 14, **params)
    neutral = {name: value for name, value in params.items() if not name.endswith("_penalty")}
    if neutral != params:
        assert got != run(sampled, PROMPT, 14, **neutral), "this penalty changes nothing here: the test is empty"


def test_requests_tell_apart_samples_of_one_seed(sampled: Any) -> None:
    texts = [tuple(run(sampled, PROMPT, 12, seed=7, request=request)) for request in range(4)]
    assert len(set(texts)) == 4
    assert [tuple(run(sampled, PROMPT, 12, seed=7, request=request)) for request in range(4)] == texts
    generation = sampled.generate(PROMPT, seed=7, max_tokens=12, ignore_eos=True)
    list(generation)
    assert tuple(generation.token_ids) == texts[0]  # the first sample is the default


@pytest.mark.parametrize("cut", [1, 7, 13])
def test_a_text_resumed_from_its_own_start_continues_alike(sampled: Any, cut: int) -> None:
    """Random numbers belong to absolute positions, so it does not matter where the prompt ended."""
    whole = run(sampled, PROMPT, 16, seed=9)
    assert run(sampled, PROMPT + whole[:cut], 16 - cut, seed=9) == whole[cut:]


def test_a_huge_repetition_penalty_repeats_nothing(sampled: Any) -> None:
    plain = run(sampled, PROMPT, 40, temperature=0.0)
    assert len(set(plain)) < 40 or set(plain) & set(PROMPT)
    out = run(sampled, PROMPT, 40, temperature=0.0, repetition_penalty=100.0)
    assert len(set(out)) == 40
    assert not set(out) & set(PROMPT)


def test_a_presence_penalty_does_not_look_at_the_prompt(sampled: Any) -> None:
    """The most probable token stays the first one although the prompt is made of it."""
    prompt = PROMPT
    for _ in range(3):
        best = run(sampled, prompt, 1, temperature=0.0)
        prompt = prompt + best
        again = run(sampled, prompt, 1, temperature=0.0)
        assert run(sampled, prompt, 1, temperature=0.0, presence_penalty=2.0, frequency_penalty=2.0) == again


# --- events ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [None, 0, 3])
def test_the_shape_of_an_event(sampled: Any, count: int | None) -> None:
    """One event per token; log-probabilities only when asked for, the token's own and as many as asked for."""
    generation = sampled.generate(PROMPT, seed=4, max_tokens=8, ignore_eos=True, logprobs=count)
    events = list(generation.events())
    assert [event.token_ids for event in events] == [(token,) for token in generation.token_ids]
    assert "".join(event.text for event in events) == generation.text
    rows = torch.log_softmax(sampled.logits([*PROMPT, *generation.token_ids]).double(), -1)[len(PROMPT) - 1 :]
    for event, row in zip(events, rows, strict=False):
        if count is None:
            assert event.logprobs == ()
            continue
        (got,) = event.logprobs
        assert isinstance(got, Sampled)
        assert (got.token_id,) == event.token_ids
        assert got.logprob == pytest.approx(float(row[got.token_id]), abs=1e-5)
        assert got.top_logprobs is not None
        assert [token for token, _ in got.top_logprobs] == row.topk(count).indices.tolist()
        assert [value for _, value in got.top_logprobs] == pytest.approx(row.topk(count).values.tolist(), abs=1e-5)


def test_the_token_that_ends_the_text_has_an_event_too(tmp_path: Path) -> None:
    model = m31.load(scripted.checkpoint(tmp_path, [START, A, STOP]), backend="reference")
    generation = model.generate([START], temperature=0.0, stop_token_ids=(STOP,), logprobs=0)
    events = list(generation.events())
    assert [(event.text, event.token_ids) for event in events] == [("a", (A,)), ("", (STOP,))]
    assert [event.logprobs[0].token_id for event in events] == [A, STOP]
    assert (generation.text, generation.finish_reason) == ("a", "stop")


# --- loading ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"bos_token_id": 511}, r"bos_token_id 511"),
        ({"eos_token_id": 511}, r"eos_token_id 511"),
        ({"eos_token_id": [2, 511]}, r"eos_token_id\[1\] 511"),
    ],
    ids=["bos", "eos", "second-eos"],
)
def test_a_tokenizer_without_a_token_that_config_names_is_refused(
    tmp_path: Path, changes: dict[str, Any], name: str
) -> None:
    """The ids of 500 and above have rows in the model and no token in this tokenizer.json."""
    folder = scripted.checkpoint(tmp_path / "good", [START, A], tokenizer=scripted.tokenizer_json(500))
    m31.load(folder, backend="reference")
    bad = shutil.copytree(folder, tmp_path / "bad")
    config = json.loads((bad / "config.json").read_text())
    (bad / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(TokenizerError, match=f"config.json's {name} is not in the vocabulary"):
        m31.load(bad, backend="reference")
