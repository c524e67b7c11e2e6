"""Chat templates: what they may use, what they may not, and that none can hang or flood m31."""

from __future__ import annotations

import datetime
import json
import os
import signal
import threading
import time

import pytest

from m31.errors import TemplateError
from m31.text.template import ChatTemplate, Limits, starts_in_reasoning

USER = [{"role": "user", "content": "hi"}]
CLOCK = datetime.datetime(2026, 10, 5, 12, 30)


def template(source, **options):
    return ChatTemplate({"default": source}, where="t.jinja", clock=lambda: CLOCK, **options)


def render(source, messages=USER, limits=None, **variables):
    chat = template(source, limits=limits)
    try:
        return chat.render(messages, **variables)
    finally:
        chat.close()


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{% for m in messages %}\n  {% if true %}\n{{ m.content }}\n  {% endif %}\n{% endfor %}", "hi\n"),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{{ {'k': 'é<日>'} | tojson }}", '{"k": "é<日>"}'),
        ("{{ {'k': 'é'} | tojson(ensure_ascii=true) }}", '{"k": "\\u00e9"}'),
        ("{{ [1] | tojson(indent=1) }}", "[\n 1\n]"),
        ("{{ strftime_now('%d %b %Y') }}", "05 Oct 2026"),
        ("{% generation %}a{{ messages[0].content }}{% endgeneration %}b", "ahib"),
        ("{{ bos_token }}{{ '<&>' }}", "<s><&>"),
        ("{% set ns = namespace(x=1) %}{% set ns.x = dict(a=2) %}{{ ns.x.a }}", "2"),
        ("{{ messages | length }}{{ messages[0]['content'] | upper | trim }}", "1HI"),
        ("{{ add_generation_prompt }}{{ tools is none }}", "TrueTrue"),
        ("{{ 'x' if nothing is defined else 'y' }}{{ nothing | default('z') }}", "yz"),
        ("{% if nothing %}a{% elif nothing == 'b' %}b{% else %}c{% endif %}{% for x in nothing %}{% endfor %}", "c"),
        ("{% if messages[0].tool_calls %}a{% endif %}{{ messages[0].name is defined }}", "False"),
        ("line\n", "line"),
        ("\ud83d", "\ud83d"),
    ],
)
def test_what_published_templates_use(source, expected):
    chat = template(source, special_tokens={"bos_token": "<s>"})
    assert chat.render(USER) == expected
    chat.close()


@pytest.mark.parametrize(
    ("source", "where", "text"),
    [
        ("a\n{% if %}", "t.jinja, line 2", "has a syntax error: Expected an expression"),
        ("\n\n{% include 'x' %}", "t.jinja, line 3", "'include' is not available: a chat template is one file"),
        ("{% import 'x' as y %}", "t.jinja, line 1", "'import' is not available"),
        ("{% from 'x' import y %}", "t.jinja, line 1", "'from ... import' is not available"),
        ("{% extends 'x' %}", "t.jinja, line 1", "'extends' is not available"),
        ("{% if no %}{% include 'x' %}{% endif %}", "t.jinja, line 1", "'include' is not available"),
        ("\n{{ who }}", "t.jinja, line 2", "uses something that is not defined: 'who' is undefined"),
        ("{{ 'a' ~ who }}", "t.jinja, line 1", "'who' is undefined"),
        ("{{ who.name }}", "t.jinja, line 1", "'who' is undefined"),
        ("{{ messages[0].name }}", "t.jinja, line 1", "'dict object' has no attribute 'name'"),
        ("{{ messages[7] }}", "t.jinja, line 1", "has no element 7"),
        ("\n{{ raise_exception('be nice') }}", "t.jinja, line 2", "the template refused these messages: be nice"),
        ("{{ ''.__class__ }}", "t.jinja, line 1", "the sandbox forbids: access to attribute '__class__' of 'str'"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "t.jinja, line 1", "'__class__'"),
        ("{% if ''.__class__ %}{% endif %}", "t.jinja, line 1", "'__class__'"),
        ("{{ messages | attr('__class__') }}", "t.jinja, line 1", "'__class__'"),
        ("{{ raise_exception.__globals__ }}", "t.jinja, line 1", "'__globals__'"),
        ("{{ strftime_now.__closure__ }}", "t.jinja, line 1", "'__closure__'"),
        ("{{ cycler.__init__.__globals__ }}", "t.jinja, line 1", "'__init__'"),
        ("{{ '{0.__class__}'.format(1) }}", "t.jinja, line 1", "'__class__'"),
        ("{{ messages.append(1) }}", "t.jinja, line 1", "'append' of 'list' object is unsafe"),
        ("{{ messages[0].update(a=1) }}", "t.jinja, line 1", "'update' of 'dict' object is unsafe"),
        ("{% for i in range(1000000) %}{% endfor %}", "t.jinja, line 1", "Range too big"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "t.jinja, line 1", "recurses too deeply"),
        ("{{ lipsum() }}", "t.jinja, line 1", "'lipsum' is undefined"),
        ("{{ [1, 2] | random }}", "t.jinja, line 1", "No filter named 'random'"),
        ("\n{{ 1 // 0 }}", "t.jinja, line 2", "the template failed: ZeroDivisionError"),
        ("{{ nothing | tojson }}", "t.jinja, line 1", "the template failed: TypeError"),
    ],
)
def test_faults_are_named_with_their_line(source, where, text):
    with pytest.raises(TemplateError) as caught:
        render(source)
    assert caught.value.where == where
    assert text in str(caught.value)
    assert caught.value.fix


SMALL = {"max_bytes": 300 * 2**20, "max_chars": 100_000}


@pytest.mark.parametrize(
    ("seconds", "source", "text"),
    [
        # Each bound of Jinja's own sandbox is kept: 10^5 rounds, twice.
        (
            0.5,
            "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
            "did not finish within 0.5 s",
        ),
        (
            0.5,
            "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
            "did not finish",
        ),
        # One comparison in C, exponential in the depth: no hook between steps of the template would see it.
        (
            0.5,
            "{% set n = namespace(x=[], y=[]) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}"
            "{% set n.y = [n.y, n.y] %}{% endfor %}{{ n.x == n.y }}",
            "did not finish",
        ),
        (0.5, "{{ 9 ** (9 ** 9) }}", "did not finish"),
        (30, "{{ messages[0].content.ljust(10 ** 10) }}", "needs more than 314,572,800 bytes of memory"),
        (
            30,
            "{% set n = namespace(s='ab') %}{% for i in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
            "needs more than 314,572,800 bytes of memory",
        ),
        (30, "{% for i in range(100000) %}some text{% endfor %}", "longer than 100,000 characters"),
    ],
)
def test_no_template_hangs_or_floods(seconds, source, text):
    start = time.monotonic()
    chat = template(source, limits=Limits(seconds=seconds, **SMALL))
    with pytest.raises(TemplateError, match=text):
        chat.render(USER)
    assert time.monotonic() - start < 45
    chat.close()


def test_after_a_kill_the_next_rendering_works():
    chat = template(
        "{% if messages[0].content == 'slow' %}{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}"
        "{% endfor %}{% endif %}done",
        limits=Limits(seconds=0.5),
    )
    assert chat.render(USER) == "done"
    with pytest.raises(TemplateError, match=r"did not finish within 0\.5 s; expected a template that ends; do not use"):
        chat.render([{"role": "user", "content": "slow"}])
    assert chat.render(USER) == "done"
    chat.close()


def test_a_worker_that_dies_is_reported_or_replaced():
    chat = template("ok")
    assert chat.render(USER) == "ok"
    worker = chat._process._process
    os.kill(worker.pid, signal.SIGKILL)
    worker.wait()
    assert chat.render(USER) == "ok"
    chat.close()
    assert chat.render(USER) == "ok"
    chat.close()


def test_the_worker_ends_with_its_template():
    chat = template("ok")
    chat.render(USER)
    worker = chat._process._process
    del chat
    assert worker.wait(5) is not None


def test_threads_share_a_template():
    chat = template("{{ messages[0].content }}")
    results: dict[int, str] = {}

    def work(index):
        results[index] = chat.render([{"role": "user", "content": f"{index}" * 1000}])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {i: f"{i}" * 1000 for i in range(8)}
    chat.close()


def test_a_large_conversation_passes_through_the_pipes():
    text = "日x" * 500_000
    assert render("{{ messages[0].content }}", [{"role": "user", "content": text}]) == text


def test_input_is_not_changed_and_templates_cannot_see_python_objects():
    messages = [{"role": "user", "content": "hi", "extra": {"a": [1]}}]
    assert render("{{ messages[0].extra.a[0] }}", messages) == "1"
    with pytest.raises(TemplateError, match="a template variable cannot be written as JSON"):
        render("x", thing=object())
    with pytest.raises(TemplateError, match="a template variable cannot be written as JSON"):
        render("x", thing=float("nan"))


# -- finding the template


def write(folder, **files):
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / name.replace("__", ".")).write_text(text, encoding="utf-8")
    return folder


def test_the_file_comes_before_the_config(tmp_path):
    write(
        tmp_path,
        chat_template__jinja="file {{ bos_token }}",
        tokenizer_config__json={"chat_template": "config", "bos_token": "B"},
    )
    assert ChatTemplate.load(tmp_path).render(USER) == "file B"


def test_config_string_with_token_objects(tmp_path):
    config = {"chat_template": "{{ bos_token }}{{ eos_token }}", "bos_token": {"content": "B"}, "eos_token": "E"}
    assert ChatTemplate.load(write(tmp_path, tokenizer_config__json=config)).render(USER) == "BE"


def test_config_list_picks_by_tools(tmp_path):
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    chat = ChatTemplate.load(write(tmp_path, tokenizer_config__json={"chat_template": named}))
    assert chat.render(USER) == "plain"
    assert chat.render(USER, tools=[{"function": {"name": "f"}}]) == "tools"
    assert chat.render(USER, tools=[]) == "plain"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ([{"name": "rag", "template": "x"}], "no template named 'default' among"),
        ([{"name": "default", "template": "x"}] * 2, "two chat templates have the same name"),
        ([{"name": "default"}], "'chat_template' has an unknown form"),
        (3, "'chat_template' has an unknown form"),
        ([], "'chat_template' has an unknown form"),
        ("x" * (2**20 + 1), "the chat template has 1,048,577 characters"),
        ("{% if %}", "line 1: the template has a syntax error"),
    ],
)
def test_bad_config_templates(tmp_path, value, text):
    write(tmp_path, tokenizer_config__json={"chat_template": value})
    with pytest.raises(TemplateError, match=text):
        ChatTemplate.load(tmp_path)


def test_no_template_says_how_to_go_on(tmp_path):
    write(tmp_path, tokenizer_config__json={"bos_token": "B"})
    with pytest.raises(
        TemplateError, match=r"has no chat template; expected chat_template.jinja, or .*; give a raw prompt"
    ):
        ChatTemplate.load(tmp_path)


def test_broken_files(tmp_path):
    (tmp_path / "chat_template.jinja").mkdir()
    with pytest.raises(TemplateError, match=r"chat_template\.jinja: is not a regular file"):
        ChatTemplate.load(tmp_path)
    write(tmp_path, tokenizer_config__json="{")
    with pytest.raises(TemplateError, match=r"tokenizer_config\.json: is not valid JSON"):
        ChatTemplate.load(tmp_path)


def test_reasoning_is_decided_by_the_end_alone():
    """BUG-31: the whole prompt holds example markers."""
    assert starts_in_reasoning("text ]~b]ai\n<mm:think>")
    assert not starts_in_reasoning("think between <mm:think> and </mm:think>\n]~b]ai\n")
    assert not starts_in_reasoning("<mm:think></mm:think>")
    assert not starts_in_reasoning("<mm:think>\n")
    assert not starts_in_reasoning("")
