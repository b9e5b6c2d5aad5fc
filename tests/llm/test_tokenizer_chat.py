from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from tests.llm.tokenizer_samples import ANY_TEXT, SPECIAL, Source, write_json
from tritium.errors import Code, TritiumError
from tritium.llm.tokenizer import Tokenizer, load_tokenizer

CHATML = """\
{%- for message in messages %}
    {%- if loop.first and message['role'] != 'system' %}
        {{- '<|im_start|>system\\nYou are helpful.<|im_end|>\\n' }}
    {%- endif %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
LLAMA3 = """\
{{- bos_token }}
{% for message in messages %}
    {% if message.content is string %}
        {% generation %}{{ '[INST]' ~ message.role ~ '[/INST]\\n\\n' ~ message.content | trim ~ '<|im_end|>' }}{% endgeneration %}
    {% endif %}
{% endfor %}
{% if add_generation_prompt %}
[INST]assistant[/INST]

{% endif %}"""  # noqa: E501
MISTRAL = """\
{{ bos_token }}{% for message in messages -%}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}
{%- else %}{{ ' ' + message['content'] + eos_token }}{% endif %}{% endfor %}"""
QWEN = """\
{%- if tools %}
    {{- '<|im_start|>system\\n# Tools' }}
    {%- for tool in tools %}{{ "\\n" }}{{ tool | tojson }}{% endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=messages|length - 1, thinking=enable_thinking is defined and enable_thinking) %}
{%- for message in messages[::-1] %}{% if message.role == 'user' %}{% set ns.last = loop.index0 %}{% break %}{% endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content %}
    {%- if message.role == 'assistant' and '<think>' in content %}
        {%- set content = content.split('<think>')[-1].lstrip('\\n') %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + content }}
    {%- for call in message.tool_calls or [] %}
        {{- '\\n<tool_call>' + call.function.name + (call.function.arguments | tojson(indent=2)) }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' ~ ('<think>' if ns.thinking else '') }}{% endif %}"""
ROLES_AS_TOKENS = """\
{% for message in messages %}{{ '<|' + message['role'] + '|>\\n' + message['content'] + '<|end|>\\n' }}{% endfor %}"""
PARTS = """\
{{ bos_token }}{% for message in messages %}<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}
{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>
{% endfor %}"""
ONLY_PARTS = """\
{% for message in messages %}[INST]{% for part in message.content %}{{ part['text'] }}{% endfor %}[/INST]{% endfor %}"""
TEMPLATES = {
    "chatml": CHATML,
    "llama 3": LLAMA3,
    "mistral": MISTRAL,
    "qwen": QWEN,
    "roles as tokens": ROLES_AS_TOKENS,
    "parts": PARTS,
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "天气 <b>", "parameters": {"type": "object"}}}
]
CONTENTS = (
    "Hello there",
    "\n\n  padded \n",
    "介绍一下 👨‍👩‍👧",
    "a <b> & 'c' \"d\" {{ e }} {% f %}",
    "> quote [1] <",
    "<think>x</think>y \ue000\ue001",
    "",
)


def conversation(*contents: str) -> list[dict[str, Any]]:
    roles = itertools.cycle(("user", "assistant"))
    return [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]


@pytest.fixture(scope="module", params=["byte level", "unigram", "legacy"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Any]:
    folder = tmp_path_factory.mktemp("chat")
    return load_tokenizer(write_json(folder, request.param)), PreTrainedTokenizerFast.from_pretrained(folder)


def check(pair: tuple[Tokenizer, Any], messages: list[dict[str, Any]], template: str, **options: Any) -> None:
    ours, judge = pair
    want = judge.apply_chat_template(messages, chat_template=template, tokenize=False, **options)
    assert ours.render_chat(messages, template=template, **options) == want
    want = judge.apply_chat_template(messages, chat_template=template, return_dict=False, **options)
    assert ours.encode_chat(messages, template=template, **options) == want


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("prompt", [True, False])
def test_ids_are_those_of_transformers(pair: tuple[Tokenizer, Any], name: str, prompt: bool) -> None:
    for content in CONTENTS:
        for messages in (conversation(content), conversation("Hi", content, content)):
            check(pair, messages, TEMPLATES[name], add_generation_prompt=prompt)


def test_tools_and_variables(pair: tuple[Tokenizer, Any]) -> None:
    call = {"function": {"name": "weather", "arguments": {"city": "北京", "days": [1, 2.5, None, True]}}}
    messages = [*conversation("Hi", "Let me see"), {"role": "tool", "content": "{}"}]
    messages[1]["tool_calls"] = [call]
    check(pair, messages, QWEN, tools=TOOLS, add_generation_prompt=True, enable_thinking=True)


@settings(max_examples=40, deadline=None)
@given(contents=st.lists(ANY_TEXT, min_size=1, max_size=3), name=st.sampled_from(sorted(TEMPLATES)))
def test_any_content(pair: tuple[Tokenizer, Any], contents: list[str], name: str) -> None:
    check(pair, conversation(*contents), TEMPLATES[name], add_generation_prompt=True)


def specials(ours: Tokenizer, ids: list[int]) -> list[int]:
    unknown = ours.encode("<unk>", add_special_tokens=False, allow_special=True)
    return [number for number in ids if ours.is_special(number) and number not in unknown]


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("token", SPECIAL)
def test_content_never_becomes_a_control_token(pair: tuple[Tokenizer, Any], name: str, token: str) -> None:
    ours, _ = pair
    for content in (token, f"a {token}\n{token}{token}b", token[:-1], token[1:], f"x{token[:3]}", token * 50):
        for at in range(3):
            contents = ["one", "two", "three"]
            benign = ours.encode_chat(conversation(*contents), template=TEMPLATES[name])
            contents[at] = content
            ids = ours.encode_chat(conversation(*contents), template=TEMPLATES[name])
            assert specials(ours, ids) == specials(ours, benign)
            assert ours.render_chat(conversation(*contents), template=TEMPLATES[name]).count(content) >= 1


def test_halves_of_a_control_token_do_not_meet(pair: tuple[Tokenizer, Any]) -> None:
    ours, _ = pair
    template = (
        "{% for m in messages %}{{ m.content }}{{ m.name }}<{{ m.content }}{% endfor %}<|{{ messages[0].tail }}|>"
    )
    for token in SPECIAL:
        for cut in range(1, len(token)):
            message = {"role": "user", "content": token[:cut], "name": token[cut:], "tail": "x"}
            assert specials(ours, ours.encode_chat([message], template=template)) == []
    for tail in ("|im_end|>", "/s>", "s>"):
        message = {"role": "user", "content": tail, "name": "", "tail": "x"}
        assert specials(ours, ours.encode_chat([message], template=template)) == []


def test_roles_that_are_no_roles_build_no_control_token(pair: tuple[Tokenizer, Any]) -> None:
    ours, _ = pair
    good = ours.encode_chat([{"role": "user", "content": "x"}], template=ROLES_AS_TOKENS)
    assert len(specials(ours, good)) == 2
    for role in ("end", "im_end", "<|end|>", "x|><|end|", "endoftext"):
        ids = ours.encode_chat([{"role": role, "content": "x"}], template=ROLES_AS_TOKENS)
        assert specials(ours, ids) == specials(ours, good)[1:]


def test_tools_and_names_never_become_control_tokens(pair: tuple[Tokenizer, Any]) -> None:
    ours, _ = pair
    messages = conversation("Hi", "ok")
    benign = ours.encode_chat(messages, template=QWEN, tools=[{"type": "function"}])
    for token in SPECIAL:
        tools = [{"type": "function", "function": {"name": token, "parameters": {token: [token]}}, token: 1}]
        messages[1]["tool_calls"] = [{"function": {"name": token, "arguments": {token: token}}}]
        ids = ours.encode_chat(messages, template=QWEN, tools=tools)
        assert specials(ours, ids) == specials(ours, benign)
        text = ours.decode(ids, skip_special_tokens=False)
        assert token in text or "<unk>" in text


def test_marks_do_not_show(pair: tuple[Tokenizer, Any]) -> None:
    ours, judge = pair
    content = "a<|im_end|>\ue000 \\ue001 \ue002<"
    messages = conversation(content)
    for template in (CHATML, "{{ messages|tojson }}", "{{ messages|tojson(ensure_ascii=true) }}"):
        want = judge.apply_chat_template(messages, chat_template=template, tokenize=False, add_generation_prompt=True)
        assert ours.render_chat(messages, template=template) == want


def test_content_parts(pair: tuple[Tokenizer, Any]) -> None:
    ours, _ = pair
    text, parts = conversation("one\ntwo"), conversation("")
    parts[0]["content"] = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert ours.render_chat(parts, template=CHATML) == ours.render_chat(text, template=CHATML)
    assert "\nonetwo<|im_end|>" in ours.render_chat(parts, template=PARTS)
    assert ours.render_chat(text, template=ONLY_PARTS) == "[INST]one\ntwo[/INST]"
    parts[0]["content"] = [{"type": "text", "text": "<|im_"}, {"type": "text", "text": "end|>"}]
    for template in (PARTS, ONLY_PARTS):
        assert len(specials(ours, ours.encode_chat(parts, template=template))) == (3 if template == PARTS else 2)


def test_absent_fields_are_left_out(pair: tuple[Tokenizer, Any]) -> None:
    ours, _ = pair
    template = "{% for m in messages %}{{ m.content | trim }}{{ m.tool_calls is defined }}{% endfor %}"
    assert ours.render_chat([{"role": "assistant", "content": None, "tool_calls": None}], template=template) == "False"


@pytest.mark.parametrize(
    ("messages", "template", "param", "message"),
    [
        ([], CHATML, "messages", "messages is empty"),
        ("hi", CHATML, "messages", "messages is str"),
        (["hi"], CHATML, "messages", r"messages\[0\] is a str; expected an object"),
        (conversation("a", "b") + conversation("a", "b"), None, "messages", "no default chat template"),
        ([{"role": "assistant", "content": "x"}], MISTRAL, "messages", "refuses these messages: roles must alternate"),
        ([{"role": "user"}], CHATML, "messages", "has no attribute 'content'"),
        ([{"role": "user", "content": 7}], CHATML, "messages", r"messages\[0\].content is a int"),
        ([{"role": "user", "content": {1, 2}}], CHATML, "messages", "holds a set"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], CHATML, "messages", r"content\[0\] is 'image_url'"),
        (conversation("x"), "{% if %}", "chat_template", "does not compile"),
        (conversation("x"), "{{ 1|nothing }}", "chat_template", "No filter named 'nothing'"),
        (conversation("x"), "{{ 'a' * 10**9 }}", "chat_template", "more work than its budget"),
        (conversation("x"), "{{ x.y }}", "messages", "'x' is undefined"),
        (conversation("x"), "{{ ''.__class__.__mro__ }}", "chat_template", "__class__"),
        (conversation("x"), "y" * 70_000, "chat_template", "has 70000 characters; at most 65536"),
        (conversation("x"), "{{ '\ud83d' }}", "messages", "half of a surrogate pair"),
    ],
)
def test_what_is_wrong_is_named(
    pair: tuple[Tokenizer, Any], messages: Any, template: str | None, param: str, message: str
) -> None:
    with pytest.raises(TritiumError, match=message) as caught:
        pair[0].encode_chat(messages, template=template)
    assert (caught.value.code, caught.value.param) == (Code.INVALID_ARGUMENT, param)


def test_templates_by_name(tmp_path: Path) -> None:
    named = [
        {"name": "default", "template": "d"},
        {"name": "tool_use", "template": "t"},
        {"name": "rag", "template": "r"},
    ]
    ours = load_tokenizer(write_json(tmp_path, "byte level", chat_template=named))
    messages = conversation("x")
    assert ours.chat_templates == ("default", "tool_use", "rag")
    assert ours.render_chat(messages) == "d"
    assert ours.render_chat(messages, tools=TOOLS) == "t"
    assert ours.render_chat(messages, template="rag", tools=TOOLS) == "r"
    assert ours.render_chat(messages, template="x{{ messages|length }}") == "x1"


def test_a_file_wins_over_configuration(tmp_path: Path) -> None:
    source = write_json(tmp_path, "byte level", chat_template="from the configuration")
    source.tokenizer["chat_template"] = "from the file"
    assert load_tokenizer(source).render_chat(conversation("x")) == "from the file"


@pytest.mark.parametrize(
    "template", ["{% if %}", "{% for i in range(9**5) %}{% for j in range(9**5) %}{% endfor %}{% endfor %}"]
)
def test_a_checkpoint_with_a_hostile_template_is_refused(tmp_path: Path, template: str) -> None:
    source: Source = write_json(tmp_path, "byte level", chat_template=template)
    with pytest.raises(TritiumError, match="chat_template") as caught:
        load_tokenizer(source)
    assert caught.value.code is Code.INVALID_ARGUMENT
