"""Bad input (rows B022-B073 of the reliability reference): right status, names the field, server unharmed."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.frontends.openai.conftest import Live
from tests.frontends.openai.fake import FakeTokenizer

VOCAB = FakeTokenizer.vocab_size
CHAT: dict[str, Any] = {"model": "fake", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
TEXT: dict[str, Any] = {"model": "fake", "prompt": "hi", "max_tokens": 4}

SHARED: list[tuple[str, Any]] = [
    *[("max_tokens", value) for value in (0, -1, 1.5, "4", True, 2**63, 10**30)],
    *[("temperature", value) for value in (-1, "NaN", 2**31, True, [])],
    *[("top_p", value) for value in (0, 1.1, -0.5, "x")],
    *[("presence_penalty", value) for value in (2.0001, -2.0001, "x")],
    *[("frequency_penalty", value) for value in (2.0001, -2.0001)],
    *[("repetition_penalty", value) for value in (0, -1, 1e38)],
    *[("logit_bias", value) for value in ({"-1": 1}, {"999999999": 1}, {"x": 1}, {"1": 1e9}, {"1": "x"}, [], "x")],
    ("logit_bias", {str(i): 1 for i in range(5000)}),
    *[("stop", value) for value in ("", [""], 5, ["x" * 2**18], ["a"] * 10**4, [1], {})],
    *[("seed", value) for value in (2**64, 1.5, "x")],
    *[("n", value) for value in (0, -1, 129, 1.5, "2")],
    *[("stream", value) for value in ("yes", 1)],
    ("stream_options", {"include_usage": True}),
    *[("top_k", value) for value in (-2, 1.5, 2**63, 2**70)],
    ("min_p", 2),
    *[("min_tokens", value) for value in (-1, 5)],
    *[("stop_token_ids", value) for value in ([VOCAB], [-1], "x", [1.5])],
    ("ignore_eos", "yes"),
    ("skip_special_tokens", 1),
    *[("priority", value) for value in ("high", 2**31)],
    *[("cache_salt", value) for value in ("x" * 2**19, "a\r\nb", 5)],
    *[("user", value) for value in ("x" * 2**19, "a\r\nb", 5)],
    *[("metadata", value) for value in ({"a": "x" * 2**19}, {"a": "b\n"}, {"a": 1}, "x")],
    *[("request_id", value) for value in ("x" * 2**19, "a\r\nb", 5)],
    ("model", 5),
    ("store", True),
    ("parallel_tool_calls", "yes"),
    ("prediction", "x"),
    ("metadata", {str(i): "x" for i in range(17)}),
    ("suffix", "x"),
    ("best_of", 3),
    ("echo", True),
    ("prompt_logprobs", 1),
    ("guided_json", {"type": "object"}),
    ("structured_outputs", {"regex": "a"}),
    ("chat_template", "{{ 1 }}"),
    ("nonsense", 1),
    ("x" * 2**18, 1),
]
CHAT_ONLY: list[tuple[str, Any]] = [
    ("messages", []),
    ("messages", "hi"),
    ("messages", None),
    ("messages", [5]),
    ("max_completion_tokens", 5),
    *[("logprobs", value) for value in (1, "yes")],
    *[("top_logprobs", value) for value in (-1, 21, 1.5, 3)],
    ("tools", [{"type": "function", "function": {"name": "__proto__"}}] * 10**4),
    *[("tool_choice", value) for value in ("auto", "required", {"type": "function", "function": {"name": "x"}})],
    ("response_format", {"type": "json_object"}),
    ("modalities", ["text", "audio"]),
    ("audio", {"voice": "x"}),
    ("functions", [{}]),
    ("reasoning_effort", "high"),
    ("web_search_options", {}),
]
TEXT_ONLY: list[tuple[str, Any]] = [
    *[("logprobs", value) for value in (-1, 10**6, 21, True)],
    *[("prompt", value) for value in ("", [], [""], [[]], None, 5, {}, True)],
    *[("prompt", value) for value in ([-1], [VOCAB], [2**63], [1.5], [1, "a"], ["a", 1], ["a", [1]], [True])],
    ("prompt", ["a"] * 4000),
    ("prompt", [["a"]]),
]
MESSAGES: list[tuple[str, Any]] = [
    ("messages[0].role", {"role": "tool", "content": "x"}),
    ("messages[0].role", {"role": "x" * 2**18, "content": "x"}),
    ("messages[0].role", {"content": "x"}),
    ("messages[0].content", {"role": "user"}),
    ("messages[0].content", {"role": "user", "content": 5}),
    ("messages[0].content[0].type", {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}),
    ("messages[0].content[0].type", {"role": "user", "content": [{"text": "x"}]}),
    ("messages[0].content[0].text", {"role": "user", "content": [{"type": "text"}]}),
    ("messages[0].tool_calls", {"role": "assistant", "tool_calls": [{}]}),
    ("messages[0].tool_call_id", {"role": "user", "content": "x", "tool_call_id": "1"}),
    ("messages[0].nonsense", {"role": "user", "content": "x", "nonsense": 1}),
]


def post(live: Live, path: str, body: Any, **more: Any) -> httpx.Response:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"content-type": "application/json"} | more
    return live.client.post(path, content=data, headers=headers)


def complaint(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert list(body) == ["error"]
    error = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert 0 < len(error["message"].encode()) < 512
    assert "Traceback" not in error["message"]
    return error


def check_field(live: Live, path: str, body: dict[str, Any], name: str, value: Any) -> None:
    error = complaint(post(live, path, body | {name: value}))
    shown = name[:40]
    assert error["param"] is not None
    assert error["param"].startswith(shown)
    assert shown in error["message"]
    assert live.server.seen == []


def alive(live: Live) -> None:
    assert post(live, "/v1/completions", TEXT).status_code == 200


@pytest.mark.parametrize("number", range(len(SHARED + CHAT_ONLY)))
def test_a_chat_refuses(live: Live, number: int) -> None:
    check_field(live, "/v1/chat/completions", CHAT, *(SHARED + CHAT_ONLY)[number])
    alive(live)


@pytest.mark.parametrize("number", range(len(SHARED + TEXT_ONLY)))
def test_a_completion_refuses(live: Live, number: int) -> None:
    check_field(live, "/v1/completions", TEXT, *(SHARED + TEXT_ONLY)[number])
    alive(live)


@pytest.mark.parametrize("number", range(len(MESSAGES)))
def test_a_message_is_refused(live: Live, number: int) -> None:
    name, message = MESSAGES[number]
    error = complaint(post(live, "/v1/chat/completions", CHAT | {"messages": [message]}))
    assert error["param"] == name
    assert name in error["message"]


@pytest.mark.parametrize("name", ["x - at `$.foo", "x - at `$.messages[9]", "x` - at `$.messages[0].role[1]"])
def test_a_field_named_like_a_complaint_is_refused(live: Live, name: str) -> None:
    complaint(post(live, "/v1/chat/completions", CHAT | {"messages": [{"role": "user", "content": "x", name: 1}]}))


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"[]",
        b'"x"',
        b"{}",
        b"{",
        b'{"a":1}x',
        b"\xff",
        b"\xef\xbb\xbf{}",
        '{"prompt":"x"}'.encode("utf-16"),
        b'{"prompt":"x","temperature":NaN}',
        b'{"prompt":"x","temperature":Infinity}',
        b'{"prompt":"x","temperature":1e400}',
        b'{"prompt":"x","seed":01}',
        b'{"prompt":"x","seed":0x10}',
        b'{"prompt":"x","seed":' + b"9" * 100_000 + b"}",
        b'{"prompt":"\xed\xa0\x80"}',
        b"[" * 250_000,
        b'{"prompt":' + b"[" * 200 + b"]" * 200 + b"}",
        b'{"prompt":"x","logit_bias":' + b'{"1":' * 900 + b"1" + b"}" * 900 + b"}",
    ],
)
def test_a_broken_body_is_refused(live: Live, body: bytes) -> None:
    for path in ("/v1/completions", "/v1/chat/completions"):
        complaint(post(live, path, body))
    alive(live)


@pytest.mark.parametrize(
    ("name", "body"),
    [
        ("prompt", b'{"model":"fake","prompt":"a\\ud800"}'),
        ("stop[1]", b'{"model":"fake","prompt":"a","stop":["b","\\udc00c"]}'),
        ("messages[0].content", b'{"model":"fake","messages":[{"role":"user","content":"\\ud800x"}]}'),
    ],
)
def test_half_a_surrogate_pair_is_named(live: Live, name: str, body: bytes) -> None:
    error = complaint(post(live, "/v1/completions", body))
    assert error["param"] == name


@pytest.mark.parametrize(
    "kind", ["text/plain", "", "application/x-pickle", "multipart/form-data; boundary=" + "-" * 999]
)
def test_other_content_types_are_415(live: Live, kind: str) -> None:
    complaint(post(live, "/v1/completions", TEXT, **{"content-type": kind}), 415)


def test_a_body_over_the_limit_is_413(live: Live) -> None:
    big = b'{"model":"fake","prompt":"' + b"a" * 2**20 + b'"}'
    complaint(post(live, "/v1/completions", big), 413)
    chunked = live.client.post(
        "/v1/completions",
        content=iter([big[:100], big[100:]]),
        headers={"content-type": "application/json"},
    )
    complaint(chunked, 413)
    alive(live)


def test_fields_without_effect_are_accepted(live: Live) -> None:
    inert: dict[str, Any] = {
        "user": "someone",
        "metadata": {"a": "b"},
        "store": False,
        "service_tier": "auto",
        "safety_identifier": "x",
        "prompt_cache_key": "x",
        "prompt_cache_retention": "24h",
        "prediction": {"type": "content", "content": "x"},
        "parallel_tool_calls": True,
        "response_format": {"type": "text"},
        "tools": [],
        "tool_choice": "none",
        "functions": [],
        "modalities": ["text"],
        "audio": None,
        "echo": False,
        "suffix": "",
        "length_penalty": 1.0,
        "guided_json": None,
        "stream": None,
        "stream_options": None,
        "n": None,
        "logit_bias": None,
        "stop": None,
        "seed": -1,
        "temperature": 1e-320,
    }
    assert post(live, "/v1/chat/completions", CHAT | inert).status_code == 200
    assert live.server.seen[0].params.greedy


def test_model_may_be_left_out_when_there_is_one(live: Live) -> None:
    body = {name: value for name, value in TEXT.items() if name != "model"}
    assert post(live, "/v1/completions", body).json()["model"] == "fake"
    live.server.models.append(type(live.server.models[0])("second"))
    error = complaint(post(live, "/v1/completions", body))
    assert error["param"] == "model"
    assert "fake, second" in error["message"]


def test_an_unexpected_failure_is_500_and_tells_nothing(live: Live) -> None:
    live.server.refuse = ZeroDivisionError("secret path /root/x")  # type: ignore[assignment]
    for body in (TEXT, TEXT | {"stream": True}):
        response = post(live, "/v1/completions", body)
        assert response.status_code == 500
        assert response.json()["error"]["type"] == "server_error"
        assert "secret" not in response.text
    live.server.refuse = None
    live.server.models[:] = [None]  # type: ignore[list-item]
    assert post(live, "/v1/completions", TEXT).status_code == 500
    live.server.models.clear()
    complaint(post(live, "/v1/completions", {"prompt": "x"}))


def test_prompts_times_choices_are_limited(live: Live) -> None:
    error = complaint(post(live, "/v1/completions", TEXT | {"prompt": ["a"] * 2048, "n": 2}))
    assert (error["param"], error["message"][:24]) == ("n", "n is 2 for 2048 prompts,")


@pytest.mark.parametrize("value", [255, 2**31 - 1])
def test_more_tokens_than_the_context_holds_names_both_numbers(live: Live, value: int) -> None:
    error = complaint(post(live, "/v1/completions", TEXT | {"max_tokens": value}))
    assert error["code"] == "context_length_exceeded"
    assert f"2 in the prompt, {value} in the completion" in error["message"]
    assert "256 tokens" in error["message"]
